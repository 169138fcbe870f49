"""The page: its files and numbers; in a browser where one is installed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.request
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu
BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


def read(server, path):
    with urllib.request.urlopen(server.url + path, timeout=30) as answer:
        return answer.headers, answer.read().decode()


def test_the_page_needs_nothing_from_elsewhere(server):
    headers, page = read(server, "/")
    assert headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    files = re.findall(r'(?:src|href)="(/page/[^"]+)"', page)
    assert sorted(files) == ["/page/page.css", "/page/page.js"]
    whole = page + "".join(read(server, path)[1] for path in files)
    hosts = set(re.findall(r"https?://[^\"'\s/]+", whole))
    assert hosts == {"http://www.w3.org"}, "the name of SVG's space, which nobody fetches"
    assert "onclick=" not in whole and "innerHTML" not in whole
    for name in re.findall(r'byId\("([\w-]+)"\)', whole):
        assert f'id="{name}"' in page, name


def test_its_numbers_move(server):
    before = json.loads(read(server, "/page/state")[1])
    assert before["status"] == "ready" and before["model"] == "demo-7m"
    assert [stage["bits"] for stage in before["plan"]["stages"]] == [["w16a16"] * 3, ["w16a16"] * 5]
    body = json.dumps({"prompt": "a", "max_tokens": 5, "ignore_eos": True}).encode()
    request = urllib.request.Request(
        f"{server.url}/v1/completions", body, {"Content-Type": "application/json"}
    )
    urllib.request.urlopen(request, timeout=60).read()
    after = json.loads(read(server, "/page/state")[1])
    assert after["sums"]["tokens"] - before["sums"]["tokens"] == 5
    assert after["sums"]["gaps"] - before["sums"]["gaps"] == 4
    for old, new in zip(before["stages"], after["stages"], strict=True):
        assert new["busy_s"] > old["busy_s"]


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here: apt-get install chromium")
def test_a_browser_draws_it_without_complaint(server, tmp_path):
    shot = tmp_path / "page.png"
    done = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=6000",
         f"--screenshot={shot}", "--enable-logging=stderr", "--dump-dom", f"{server.url}/"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert 'class="ready"' in done.stdout and "layers 0 to 2" in done.stdout
    assert "CONSOLE" not in done.stderr, done.stderr
    assert Path(shot).stat().st_size > 5000
