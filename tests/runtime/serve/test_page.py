"""The page: its files and numbers; in a browser where one is installed."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
import urllib.request

import pytest

from browser import browser, faults_in_every_look, needs_browser
from llmpq.units import format_size

pytestmark = pytest.mark.cpu


def read(server, path):
    with urllib.request.urlopen(server.url + path, timeout=30) as answer:
        return answer.headers, answer.read().decode()


def test_the_page_needs_nothing_from_elsewhere(server):
    headers, page = read(server, "/")
    assert headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    files = re.findall(r'(?:src|href)="(page/[^"]+)"', page)  # beside it, wherever a proxy shows it
    assert sorted(files) == [
        "page/chat.js",
        "page/markdown-it.min.js",
        "page/page.css",
        "page/page.js",
    ]
    own = [path for path in files if "markdown-it" not in path]
    whole = page + "".join(read(server, "/" + path)[1] for path in own)
    hosts = set(re.findall(r"https?://[^\"'\s/]+", whole))
    assert hosts == {"http://www.w3.org"}, "the name of SVG's space, which nobody fetches"
    assert "onclick=" not in whole and "innerHTML" not in whole
    assert "unsafe" not in headers["Content-Security-Policy"]
    for path in files:
        assert not re.search(r"\beval\(|new Function\b", read(server, "/" + path)[1]), path
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
def test_a_browser_draws_it_and_streams_a_prompt(server):
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
        page.press(TAB)  # by the keyboard, to the button
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


ANSWERED = "document.getElementById('stop').disabled"
FACTS = "[...document.querySelectorAll('#turns .facts span')].map((one) => one.textContent)"
SAID = "said.map((turn) => turn.content)"
TURNS = "document.querySelectorAll('#turns > li').length"


@needs_browser
def test_the_page_chats_by_the_models_template(server):
    from llmpq import SamplingParams

    greedy = SamplingParams(max_tokens=8, temperature=0)
    talk, answers = [], []
    for text in ("import", "def", "class"):
        talk.append({"role": "user", "content": text})
        answers.append(server.llm.chat(talk, greedy)[0].text)
        talk.append({"role": "assistant", "content": answers[-1]})
    with browser() as page:
        page.open(f"{server.url}/")
        page.until("document.getElementById('prompt-label').textContent === 'Message'")
        assert page.run("return document.getElementById('continued').hidden")
        page.run("""
            document.getElementById('max-tokens').value = 8;
            document.getElementById('temperature').value = 0;
        """)
        for number, text in enumerate(("import", "def", "class"), start=1):
            say(page, text)
            page.until(f"{TURNS} === {2 * number}")
            page.until(ANSWERED)
        assert page.run(f"return {SAID}") == [turn["content"] for turn in talk]
        users = "[...document.querySelectorAll('#turns .user')].map((one) => one.textContent)"
        assert page.run(f"return {users}") == ["import", "def", "class"]
        # Beside each answer: its tokens, how long the first took, tokens/s, why it ended.
        for said in page.run(f"return {FACTS}"):
            assert re.match(
                r"8 tokens, first token \d+\.\d\d s, \d+\.\d tokens/s, cut off at the limit", said
            )
        # A turn that is refused is none, and can be corrected.
        page.run("document.getElementById('temperature').value = -1;"
                 "document.getElementById('ask').noValidate = true;")  # fmt: skip
        say(page, "again")
        page.until("document.getElementById('problem').textContent.includes('temperature must')")
        assert page.run(f"return {TURNS}") == 6
        assert page.run("return document.getElementById('prompt').value") == "again"
        # Stop ends an answer; what there is of it is part of the conversation.
        page.run("document.getElementById('temperature').value = 1;"
                 "document.getElementById('max-tokens').value = 150;")  # fmt: skip
        say(page, "more")
        page.until("(said[7] || {content: ''}).content.length > 0")
        page.run("document.getElementById('stop').click()")
        page.until(ANSWERED)
        page.until(f"{FACTS}.length === 4")
        assert page.run(f"return {TURNS}") == 8 and page.text("problem") == ""
        assert page.run(f"return {FACTS}")[-1].endswith(", stopped")
        page.run("document.getElementById('anew').click()")
        assert page.run(f"return {TURNS}") == 0
        page.run("document.getElementById('temperature').value = 0;"
                 "document.getElementById('max-tokens').value = 8;")  # fmt: skip
        page.run("document.getElementById('prompt').focus()")
        page.press("import")
        page.press("\ue007")  # Enter sends
        page.until(f"{TURNS} === 2")
        page.until(ANSWERED)
        assert page.run(f"return {SAID}") == ["import", answers[0]]
        # Of the texts that were refused, the browser says so itself.
        assert all("400" in line for line in page.complaints())


@needs_browser
def test_settings_are_part_of_the_request(server):
    with browser() as page:
        page.open(f"{server.url}/")
        page.until("document.getElementById('prompt-label').textContent === 'Message'")
        sent = page.run("""
            const set = (id, value) => { document.getElementById(id).value = value; };
            set('system', 'Be brief.'); set('max-tokens', 7); set('temperature', 0.5);
            set('top-p', 0.9); set('thinking', 'false');
            return bodyOf(true, 'hello', {role: 'user', content: 'hello'});
        """)
        assert sent["messages"] == [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "hello"},
        ]
        assert (sent["max_tokens"], sent["temperature"], sent["top_p"]) == (7, 0.5, 0.9)
        assert sent["chat_template_kwargs"] == {"enable_thinking": False}
        plain = page.run("""
            for (const id of ['temperature', 'top-p', 'thinking', 'system']) {
              document.getElementById(id).value = '';
            }
            return bodyOf(false, 'a', null);
        """)
        assert not {"temperature", "top_p", "messages", "chat_template_kwargs"} & set(plain)


EVIL = """<img src=x onerror="window.broken = 1"><script>window.broken = 2</script>

[a](javascript:window.broken=3) ![b](http://example.org/b.png) [c](https://example.org/)

# Title

| x | y |
|--:|---|
| 1 | `2` |

```python
<b>bold</b>
```
"""


@needs_browser
def test_markdown_is_drawn_and_html_stays_text(server):
    with browser() as page:
        page.open(f"{server.url}/")
        page.until("document.getElementById('prompt-label').textContent === 'Message'")
        page.run(f"""
            const turn = new Turn();
            turn.show({{content: {json.dumps(EVIL)}, reasoning_content: '<i>hm</i>'}});
            turn.end({{content: 'x'}}, '3 tokens');
        """)
        said = "document.querySelector('#turns .said')"
        count = f"{said}.querySelectorAll"
        assert page.run(f"return {count}('img, script, b, i, [style]').length") == 0
        assert page.run(f"return {said}.textContent.includes('<img src=x onerror=')")
        assert page.run(f"return {said}.querySelector('pre').textContent") == "<b>bold</b>\n"
        assert page.run(f"return [...{count}('a')].map((one) => one.href)") == [
            "http://example.org/b.png", "https://example.org/",
        ]  # fmt: skip
        assert page.run(f"return [...{count}('a')].every((one) => one.rel.includes('noopener'))")
        assert page.run(f"return {count}('table td').length") == 2
        assert "Title" in page.names("heading")
        assert {"Copy", "Copy code"} <= set(page.names("button"))
        fold = "document.querySelector('#turns details')"
        assert page.run(f"return {fold}.open") is False, "thoughts are folded away"
        assert page.run(f"return {fold}.querySelector('div').textContent") == "<i>hm</i>"
        assert page.run("return window.broken === undefined")
        assert page.faults() == [] and page.complaints() == []


@needs_browser
def test_nothing_keeps_people_out_of_the_page(server):
    with browser() as page:
        page.open(f"{server.url}/")
        page.until("document.getElementById('prompt-label').textContent === 'Message'")
        page.run("document.getElementById('settings').open = true;"
                 "document.getElementById('max-tokens').value = 20;")  # fmt: skip
        say(page, "import")
        page.until(f"{FACTS}.length === 1")
        assert {"demo-7m", "Ask", "Now", "Stages"} <= set(page.names("heading"))
        assert {"Send", "Stop", "New conversation", "Copy"} <= set(page.names("button"))
        assert {"Message", "System message", "API key"} <= set(page.names("textbox"))
        assert "conversation" in page.names("list")
        assert faults_in_every_look(page) == []
        assert all(one.startswith(server.url) for one in page.fetched())
        assert page.complaints() == []
        page.run("document.querySelector('main').append(document.createElement('img'))")
        assert "image-alt" in " ".join(page.faults()), "a fault is found"


@needs_browser
def test_the_live_picture_is_the_servers_state(server):
    with browser() as page:
        page.open(f"{server.url}/")
        page.until("document.getElementById('held-1').textContent !== ''")
        state = json.loads(read(server, "/page/state")[1])
        for name in ("running", "waiting"):
            assert page.text(name) == str(state[name])
        assert page.text("kv-text") == f"{state['blocks_held']} of {state['blocks']} blocks"
        for index, stage in enumerate(state["stages"]):
            held = page.text(f"held-{index}")
            assert format_size(stage["weights_bytes"]) in held
            assert format_size(stage["kv_bytes"]) in held
        assert f"KV cache {state['plan']['kv']}" in page.text("plan-text")


@needs_browser
def test_a_stage_that_is_lost_is_said_and_the_answer_goes_on(demo_model, make_plan, running):
    from llmpq import LLM

    plan = make_plan(demo_model, (3,), batch=4, prompt_len=200, gen_len=200, dtype="float32")
    with (
        running(lambda: LLM(demo_model, plan=plan, backend="processes")) as server,
        browser() as page,
    ):
        page.open(f"{server.url}/")
        page.until("document.getElementById('prompt-label').textContent === 'Message'")
        page.run("document.getElementById('temperature').value = 0;"
                 "document.getElementById('max-tokens').value = 180;")  # fmt: skip
        say(page, "import")
        page.until("(said[1] || {content: ''}).content.length > 0")
        os.kill(server.llm.stage_places[1].pid, 9)
        # While it lasts (shorter than a beat of the page, at times), and when it is over.
        under_way = page.run(
            "return recovered([{action: 'restart', reason: 'killed', began: 'now', "
            "predicted_s: 1.94, measured_s: null}])"
        )
        assert under_way.startswith("A stage was lost: killed. Now another stage is started in its")
        assert "in about 1.9 s" in under_way
        lost = "document.getElementById('recoveries').textContent"
        page.until(f"{lost}.startsWith('Recovered once')", 120)
        page.until(f"{ANSWERED} && {FACTS}.length === 1", 60)
        assert page.text("problem") == "" and "180 tokens" in page.run(f"return {FACTS}")[0]
        page.until("document.getElementById('status').className === 'ready'")
        assert page.complaints() == []


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
