"""Take the screenshots of docs: a plan's page, a run's page, and the server's page after a chat.

    PYTHONPATH=tests python docs/make_screenshots.py            all, as WebP in docs/
    PYTHONPATH=tests python docs/make_screenshots.py run page   some

The plan is docs/plan.json; the run is docs/run.json, the report of 48 requests to the bundled model
over two CPU stages; the server runs that report's plan and is asked three times. Each is taken on a
light and a dark screen, 390 pixels wide, and as printed. Needs Chromium and its driver.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from browser import Browser, browser
from llmpq.pictures.plan_page import plan_page
from llmpq.pictures.run_page import run_page
from llmpq.plans.plan import Plan

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
VIEWS = {
    "light": ("light", "screen", 1100),
    "dark": ("dark", "screen", 1100),
    "390": ("light", "screen", 390),
    "print": ("light", "print", 790),
}
"""End of the file's name -> what the reader prefers, the medium, pixels of width."""
HIGH = 1150
QUESTIONS = ("def read_lines(path):", "class Stack:", "try:")
"""Python, as that is what the bundled model knows."""


def of_file(page: str) -> Callable[[Browser], None]:
    """Return what opens a page that is a file, and waits for its charts."""

    def open_it(shown: Browser) -> None:
        file = Path(tempfile.mkdtemp()) / "page.html"
        file.write_text(page)
        shown.open(file.as_uri())
        charts = "document.querySelectorAll('.chart').length"
        shown.until(f"document.querySelectorAll('.chart svg').length === {charts}")

    return open_it


def take(name: str, shown: Browser) -> None:
    """Write every view of the page that is open."""
    for view, (scheme, medium, width) in VIEWS.items():
        shown.prefer(scheme, medium=medium)
        shown.size(width, HIGH)
        shown.run("return new Promise((done) => setTimeout(done, 300))")  # it is laid out anew
        (DOCS / f"{name}-{view}.webp").write_bytes(shown.small_picture())
        sys.stdout.write(f"wrote docs/{name}-{view}.webp\n")


def chat(shown: Browser) -> None:
    """Ask the server's page a few times, and let its charts grow."""
    shown.until("document.getElementById('status').className === 'ready'", 120)
    shown.run("""
        document.getElementById('max-tokens').value = 48;
        document.getElementById('temperature').value = 0.8;
    """)
    for number, question in enumerate(QUESTIONS, start=1):
        shown.run(f"""
            document.getElementById('prompt').value = {json.dumps(question)};
            document.getElementById('send').click();
        """)
        shown.until(f"document.querySelectorAll('#turns .facts').length === {number}", 120)


@contextmanager
def serving(plan: str) -> Iterator[str]:
    """Serve the bundled model by a plan; yield the address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    path = Path(tempfile.mkdtemp()) / "plan.json"
    path.write_text(plan)
    words = ["serve", "--plan", str(path), "--model", str(ROOT / "examples/demo-7m")]
    words += ["--backend", "processes", "--port", str(port)]
    with subprocess.Popen([sys.executable, "-m", "llmpq.runtime", *words]) as server:
        try:
            yield f"http://127.0.0.1:{port}/"
        finally:
            server.terminate()


def main() -> int:
    """Take those that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("which", nargs="*", choices=["plan", "run", "page", []])
    which = parser.parse_args().which or ["plan", "run", "page"]
    report = json.loads((DOCS / "run.json").read_text())
    own = json.dumps(report["plan"])
    files = {
        "plan": ("report-plan", lambda: plan_page(Plan.load(DOCS / "plan.json"))),
        "run": ("report-run", lambda: run_page(report, Plan.model_validate_json(own))),
    }
    for kind, (name, page) in files.items():
        if kind in which:
            with browser() as shown:
                of_file(page())(shown)
                take(name, shown)
    if "page" in which:
        with serving(own) as url, browser() as shown:
            _open_when_it_listens(shown, url)
            chat(shown)
            take("page", shown)
    return 0


def _open_when_it_listens(shown: Browser, url: str) -> None:
    port = int(url.rsplit(":", 1)[1].strip("/"))
    for _ in range(600):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        shown.run("return new Promise((done) => setTimeout(done, 200))")
    shown.open(url)


if __name__ == "__main__":
    sys.exit(main())
