"""The page: its files and numbers; in a browser where one is installed."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
import urllib.request
from pathlib import Path

import pytest

from browser import browser, needs_browser

pytestmark = pytest.mark.cpu


def read(server, path):
    with urllib.request.urlopen(server.url + path, timeout=30) as answer:
        return answer.headers, answer.read().decode()


def test_the_page_needs_nothing_from_elsewhere(server):
    headers, page = read(server, "/")
    assert headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    files = re.findall(r'(?:src|href)="(page/[^"]+)"', page)  # beside it, wherever a proxy shows it
    assert sorted(files) == ["page/page.css", "page/page.js"]
    whole = page + "".join(read(server, "/" + path)[1] for path in files)
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


TAB, SPACE = "\ue004", " "


@needs_browser
def test_a_browser_draws_it_and_streams_a_prompt(server, tmp_path):
    pictures = Path(os.environ.get("LLMPQ_PAGE_PICTURES", tmp_path))
    with browser() as page:
        page.open(f"{server.url}/")
        page.until("document.getElementById('status').className === 'ready'")
        assert "8 layers over 2 devices" in page.text("plan-text")
        layers = "document.querySelectorAll('#stages li svg rect').length"
        assert page.run(f"return {layers}") == 8
        # A text to continue, of the kind that the model knows: this one knows Python.
        page.until("!document.getElementById('form').disabled")
        page.run("""
            document.getElementById('form').value = 'text';
            document.getElementById('form').dispatchEvent(new Event('change'));
        """)
        assert page.run("return document.getElementById('prompt').value").startswith("def main")
        assert not page.run("return document.getElementById('answer').checkVisibility() === false")
        # What a stream shows on its way: the answer grows, numbers move, then they rest.
        page.run("""
            window.lengths = [];
            new MutationObserver(() => window.lengths.push(
              document.getElementById('answer').textContent.length
            )).observe(document.getElementById('answer'), {childList: true});
            document.getElementById('max-tokens').value = 150;
            document.getElementById('prompt').focus();
        """)
        for _ in range(4):  # by the keyboard: past the numbers and the key, to the button
            page.press(TAB)
        assert page.run("return document.activeElement.id") == "send"
        page.press(SPACE)
        page.until("Number(document.getElementById('tokens-per-s').textContent) > 0")
        page.until("document.getElementById('load-1').value > 0")
        page.until("document.getElementById('stop').disabled")
        lengths = page.run("return window.lengths")
        assert len(lengths) > 10 and lengths == sorted(lengths) and lengths[-1] > lengths[0] > 0
        assert page.text("problem") == ""
        points = "document.querySelector('#chart-tokens polyline').getAttribute('points')"
        page.until(f"{points}.split(' ').length > 3")
        shots = {}
        for scheme in ("light", "dark"):
            page.prefer(scheme)
            shots[scheme] = page.picture()
            (pictures / f"page-{scheme}.png").write_bytes(shots[scheme])
        assert shots["light"] != shots["dark"]
        assert page.complaints() == []


@needs_browser
def test_the_page_says_what_was_refused_and_stops_when_told(server):
    with browser() as page:
        page.open(f"{server.url}/")
        page.until("document.getElementById('status').className === 'ready'")
        page.until("document.getElementById('prompt-label').textContent === 'Message'")
        page.run("""
            document.getElementById('form').value = 'text';
            document.getElementById('form').dispatchEvent(new Event('change'));
            document.getElementById('temperature').value = -1;
            document.getElementById('ask').noValidate = true;
            document.getElementById('send').click();
        """)
        page.until("document.getElementById('problem').textContent.includes('temperature must')")
        page.run("""
            document.getElementById('temperature').value = 1;
            document.getElementById('max-tokens').value = 190;
            document.getElementById('send').click();
        """)
        page.until("document.getElementById('answer').textContent.length > 0")
        page.run("document.getElementById('stop').click()")
        page.until("document.getElementById('stop').disabled")
        assert page.text("problem") == ""
        end_s = time.monotonic() + 30
        while server.service.num_under_way and time.monotonic() < end_s:
            time.sleep(0.02)
        assert server.service.num_under_way == 0


def say(page, text):
    page.run(f"""
        document.getElementById('prompt').value = {json.dumps(text)};
        document.getElementById('send').click();
    """)


@needs_browser
def test_the_page_chats_by_the_models_template(server):
    from llmpq import SamplingParams

    greedy = SamplingParams(max_tokens=8, temperature=0)
    talk = [{"role": "user", "content": "import"}]
    answers = [server.llm.chat(talk, greedy)[0].text]
    talk += [{"role": "assistant", "content": answers[0]}, {"role": "user", "content": "def"}]
    answers.append(server.llm.chat(talk, greedy)[0].text)
    with browser() as page:
        page.open(f"{server.url}/")
        page.until("document.getElementById('prompt-label').textContent === 'Message'")
        assert page.run("return document.getElementById('continued').hidden")
        page.run("""
            document.getElementById('max-tokens').value = 8;
            document.getElementById('temperature').value = 0;
        """)
        turns = "[...document.querySelectorAll('#turns li')].map((turn) => turn.textContent)"
        for number, text in enumerate(("import", "def"), start=1):
            say(page, text)
            page.until(f"{turns}.length === {2 * number}")
            page.until("document.getElementById('stop').disabled")
        assert page.run(f"return {turns}") == ["import", answers[0], "def", answers[1]]
        # A turn that is refused is none, and can be corrected.
        page.run("document.getElementById('temperature').value = -1;"
                 "document.getElementById('ask').noValidate = true;")  # fmt: skip
        say(page, "again")
        page.until("document.getElementById('problem').textContent.includes('temperature must')")
        assert page.run(f"return {turns}.length") == 4
        assert page.run("return document.getElementById('prompt').value") == "again"
        # Stop ends an answer; what there is of it is part of the conversation.
        page.run("document.getElementById('temperature').value = 1;"
                 "document.getElementById('max-tokens').value = 150;")  # fmt: skip
        say(page, "more")
        page.until(f"({turns}[5] || '').length > 0")
        page.run("document.getElementById('stop').click()")
        page.until("document.getElementById('stop').disabled")
        assert page.run(f"return {turns}.length") == 6 and page.text("problem") == ""
        page.run("document.getElementById('anew').click()")
        assert page.run(f"return {turns}.length") == 0
        page.run("document.getElementById('temperature').value = 0;"
                 "document.getElementById('max-tokens').value = 8;")  # fmt: skip
        page.run("document.getElementById('prompt').focus()")
        page.press("import")
        page.press("\ue007")  # Enter sends
        page.until(f"{turns}.length === 2")
        page.until("document.getElementById('stop').disabled")
        assert page.run(f"return {turns}") == ["import", answers[0]]
        # Of the texts that were refused, the browser says so itself.
        assert all("400" in line for line in page.complaints())


def test_a_base_model_is_offered_a_text_of_its_kind(server, demo_model, tmp_path):
    from llmpq import LLM
    from llmpq.runtime.serve.page import EXAMPLES, asks_of

    assert json.loads(read(server, "/page/state")[1])["asks"] == {
        "chat": True, "example": EXAMPLES[1],
    }  # fmt: skip
    shutil.copytree(demo_model, tmp_path / "base")
    settings = json.loads((demo_model / "tokenizer_config.json").read_text())
    settings.pop("chat_template")
    (tmp_path / "base" / "tokenizer_config.json").write_text(json.dumps(settings))
    with LLM(tmp_path / "base", dtype="float32") as llm:
        assert asks_of(llm, None) == {"chat": False, "example": EXAMPLES[1]}
        assert asks_of(llm, "{{ messages[0].content }}")["chat"]
