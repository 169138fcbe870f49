"""A headless Chromium, driven in the W3C's WebDriver protocol; for tests of pages."""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
DRIVER = shutil.which("chromedriver")
WHY_NOT = "no Chromium with its driver here: apt-get install chromium chromium-driver"
needs_browser = pytest.mark.skipif(BROWSER is None or DRIVER is None, reason=WHY_NOT)
_WORDS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--window-size=1100,1150",
)  # fmt: skip


class Browser:
    """A headless Chromium, driven in the W3C's WebDriver protocol."""

    def __init__(self, url: str) -> None:
        self._url = url
        options = {"binary": BROWSER, "args": [*_WORDS]}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        made = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._url = f"{url}/session/{made['sessionId']}"

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self._url + path, data, {"Content-Type": "application/json"}, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(error.read().decode()[:2000]) from None

    def open(self, url: str) -> None:
        self._ask("POST", "/url", {"url": url})

    def run(self, script: str) -> Any:
        """Return what a script's `return` gives."""
        return self._ask("POST", "/execute/sync", {"script": script, "args": []})

    def text(self, name: str) -> str:
        return str(self.run(f"return document.getElementById('{name}').textContent"))

    def until(self, script: str, limit_s: float = 30.0) -> None:
        """Wait until a script's expression is true."""
        end_s = time.monotonic() + limit_s
        while not self.run(f"return Boolean({script})"):
            assert time.monotonic() < end_s, f"never true: {script}"
            time.sleep(0.05)

    def press(self, keys: str) -> None:
        """Press keys, one after the other, wherever the focus is."""
        presses = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self._ask("POST", "/actions", {"actions": [{"type": "key", "id": "k", "actions": presses}]})

    def complaints(self) -> list[str]:
        """Return what the console said since it was last asked."""
        return [line["message"] for line in self._ask("POST", "/se/log", {"type": "browser"})]

    def _tool(self, command: str, **params: Any) -> Any:
        """Ask Chromium's developer tools."""
        return self._ask("POST", "/goog/cdp/execute", {"cmd": command, "params": params})

    def prefer(self, scheme: str, *, medium: str = "screen") -> None:
        """Show pages as people see them who prefer light or dark ones, or on paper (`print`)."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._tool("Emulation.setEmulatedMedia", media=medium, features=features)

    def names(self, role: str) -> list[str]:
        """Return the names of what has a role, as a screen reader gets them."""
        nodes = self._tool("Accessibility.getFullAXTree")["nodes"]
        shown = [node for node in nodes if not node["ignored"] and node["role"]["value"] == role]
        # Some Chromium builds keep the space between a label's text and the field inside it.
        return [str(node.get("name", {}).get("value", "")).strip() for node in shown]

    def faults(self) -> list[str]:
        """Return what axe-core finds that keeps people out: serious and critical faults."""
        self.run((Path(__file__).parent / "axe/axe-core.min.js").read_text())
        found = self.run(
            "return axe.run(document, {resultTypes: ['violations']}).then((all) => all.violations)"
        )
        return [
            f"{fault['id']}: {node['html'][:200]}: {node['failureSummary'][:300]}"
            for fault in found
            if fault["impact"] in ("serious", "critical")
            for node in fault["nodes"]
        ]

    def fetched(self) -> list[str]:
        """Return the addresses that the page has asked, but for its own."""
        return list(
            self.run("return performance.getEntriesByType('resource').map((one) => one.name)")
        )

    def picture(self) -> bytes:
        """Return the window as PNG."""
        return base64.b64decode(self._ask("GET", "/screenshot"))

    def small_picture(self) -> bytes:
        """Return the window as WebP."""
        shot = self._tool("Page.captureScreenshot", format="webp", quality=80)
        return base64.b64decode(shot["data"])

    def size(self, width: int, height: int = 1150) -> None:
        """Show pages in a window of so many pixels."""
        self._tool("Emulation.setDeviceMetricsOverride", width=width, height=height,
                   deviceScaleFactor=1, mobile=False)  # fmt: skip

    def close(self) -> None:
        self._ask("DELETE", "")


LOOKS = (
    ("light", "screen", 1100), ("dark", "screen", 1100), ("light", "screen", 390),
    ("light", "print", 790),
)  # fmt: skip
"""What a reader prefers, the medium, pixels of width."""


def faults_in_every_look(page: Browser) -> list[str]:
    """Return what keeps people out of a page: light, dark, on a phone, on paper."""
    found = []
    for scheme, medium, width in LOOKS:
        page.prefer(scheme, medium=medium)
        page.size(width)
        wide = page.run("return document.documentElement.scrollWidth")
        found += [f"{width} pixels are too few: {wide}"] if wide > width else []
        found += [f"{scheme} {medium} {width}: {fault}" for fault in page.faults()]
    return found


@contextmanager
def browser() -> Iterator[Browser]:
    """Return a browser for a block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert DRIVER is not None
    with subprocess.Popen([DRIVER, f"--port={port}", "--silent"]) as driver:
        try:
            end_s = time.monotonic() + 30
            while socket.socket().connect_ex(("127.0.0.1", port)):
                assert time.monotonic() < end_s, "chromedriver does not listen"
                time.sleep(0.05)
            made = Browser(f"http://127.0.0.1:{port}")
            try:
                yield made
            finally:
                made.close()
        finally:
            driver.terminate()
