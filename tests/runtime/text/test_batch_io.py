"""Batch files: every form of row, every kind of bad row, order of output, resuming."""

from __future__ import annotations

import errno
import io
import json
import os
from pathlib import Path

import pytest

from llmpq.errors import DeadlineError
from llmpq.runtime.requests.request_output import CompletionOutput, RequestOutput
from llmpq.runtime.requests.sampling_params import SamplerConfig
from llmpq.runtime.text.batch_io import (
    OrderedWriter,
    finished_lines,
    read_rows,
    require_no_answers,
    side_file,
)
from llmpq.runtime.text.batch_rows import (
    Defaults,
    answer_line,
    error_line,
    json_row,
    text_row,
)

pytestmark = pytest.mark.pure
ANSWER = RequestOutput(
    request_id="0",
    prompt=None,
    prompt_token_ids=[1, 2, 3],
    outputs=[
        CompletionOutput(
            index=0, text=" world", token_ids=[4, 5], finish_reason="length", first_token_s=0.1,
            total_s=0.2,
        )
    ],
)  # fmt: skip


def openai(url: str = "/v1/completions", **body) -> str:
    body = body or {"prompt": "hello"}
    return json.dumps({"custom_id": "a", "method": "POST", "url": url, "body": body})


def test_an_openai_completion_and_its_answer():
    row = json_row(
        0, openai(prompt="hello", max_tokens=7, temperature=0.5, stop=["x"], n=1), Defaults()
    )
    assert (row.form, row.row_id, row.prompt) == ("completion", "a", "hello")
    assert (row.max_tokens, row.stop) == (7, ("x",))
    assert row.sampling == SamplerConfig(temperature=0.5)
    line = answer_line(row, ANSWER, "demo")
    body = line["response"]["body"]
    assert line["custom_id"] == "a" and line["error"] is None
    assert line["response"]["status_code"] == 200
    assert body["object"] == "text_completion" and body["model"] == "demo"
    assert body["choices"][0]["text"] == " world"
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


def test_an_openai_chat_and_its_answer():
    messages = [{"role": "user", "content": "hi"}]
    row = json_row(0, openai("/v1/chat/completions", messages=messages), Defaults())
    assert row.form == "chat" and list(row.messages) == messages
    body = answer_line(row, ANSWER, "demo")["response"]["body"]
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"] == {"role": "assistant", "content": " world"}


def test_the_short_form_is_answered_like_the_long_one():
    row = json_row(0, '{"custom_id": "a", "prompt": "hello", "max_tokens": 3}', Defaults())
    assert (row.form, row.prompt, row.max_tokens) == ("completion", "hello", 3)


def test_plain_rows_token_prompts_and_text(tmp_path):
    plain = json_row(3, '{"prompt": [5, 6], "id": 9, "seed": 12}', Defaults(temperature=1.0))
    assert (plain.form, plain.prompt, plain.row_id) == ("plain", (5, 6), "9")
    assert plain.sampling == SamplerConfig(temperature=1.0, seed=12)
    line = answer_line(plain, ANSWER, "demo")
    assert (line["index"], line["id"], line["prompt"]) == (3, "9", [5, 6])
    assert (line["text"], line["tokens"]) == (" world", [4, 5])
    path = tmp_path / "prompts.txt"
    path.write_text("one\n\n  two\n")
    rows = read_rows(path, Defaults(seed=40))
    assert [row.prompt for row in rows] == ["one", "  two"]
    assert [row.sampling.seed for row in rows] == [40, 41], "equal prompts draw differently"


def test_a_table_is_not_read_as_a_prompt_a_line(tmp_path):
    path = tmp_path / "prompts.csv"
    path.write_text("id,prompt\n1,one\n")
    with pytest.raises(ValueError, match=r"is a table \(.csv\).*write JSON lines"):
        read_rows(path, Defaults())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "x"', "line 1 is not JSON"),
        ("[1]", "expected an object, got list"),
        ('{"promt": "x"}', "did you mean 'prompt'"),
        ('{"prompt": "x", "temprature": 1}', "did you mean 'temperature'"),
        ('{"prompt": 3}', "one text or one list of token ids"),
        ('{"prompt": "x", "max_tokens": 0}', "at least 1, got 0"),
        ('{"prompt": "x", "temperature": -1}', "temperature"),
        ('{"prompt": "x", "top_p": 0}', "top_p"),
        ('{"prompt": "x", "top_k": "many"}', "whole number"),
        ('{"prompt": "x", "n": 2}', "'n' is not supported"),
        ('{"prompt": "x", "stop": [""]}', "'stop'"),
        ('{"prompt": "x", "stop": 5}', "'stop' must be a text or a list of texts"),
        ('{"prompt": "x", "ignore_eos": "false"}', "'ignore_eos' must be true or false"),
        ('{"prompt": "x", "temperature": 1' + "0" * 400 + "}", "line 1"),
        ('{"prompt": "x", "seed": 1' + "0" * 5000 + "}", "line 1 is not JSON"),
        ("[" * 100_000, "line 1 is not JSON"),
        (openai("/v1/embeddings"), "url must be"),
        ('{"custom_id": "a", "url": "/v1/completions"}', "'body' must be an object"),
        ('{"body": {"prompt": "x"}}', "custom_id"),
        (openai("/v1/chat/completions", prompt="x"), "needs 'messages'"),
        (openai("/v1/chat/completions", messages=[{"role": "user"}]), "'content'"),
        (openai("/v1/chat/completions", messages=[{"content": "hi"}]), "'role'"),
    ],
)
def test_a_bad_line_becomes_an_error_row(line, message):
    row = json_row(0, line, Defaults())
    assert row.error is not None and message in row.error
    assert message in error_line(row, row.error)["error"]["message"]


def test_an_id_may_be_used_once(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text(openai() + "\n" + openai() + "\n")
    first, second = read_rows(path, Defaults())
    assert first.error is None and second.error is not None
    assert "'a' was used in line 1" in second.error


@pytest.mark.parametrize(
    ("text", "message"), [(None, "no such input file"), ("\n\n", "has no rows")]
)
def test_unusable_input_files(tmp_path, text, message):
    path = tmp_path / "in.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_rows(path, Defaults())


def lines(path) -> list[int]:
    return [json.loads(line)["index"] for line in path.read_text().splitlines()]


def test_output_streams_in_input_order(tmp_path):
    path = tmp_path / "out.jsonl"
    with OrderedWriter(path, 4) as writer:
        writer.write(1, {"index": 1})
        assert path.read_text() == ""
        writer.write(0, {"index": 0})
        assert lines(path) == [0, 1]
        writer.write(3, {"index": 3})
        writer.write(2, {"index": 2})
        assert lines(path) == [0, 1, 2, 3]


def test_an_interrupt_keeps_rows_beyond_the_gap(tmp_path):
    path = tmp_path / "out.jsonl"
    with pytest.raises(KeyboardInterrupt), OrderedWriter(path, 4) as writer:
        writer.write(0, {"index": 0})
        writer.write(2, {"index": 2})
        raise KeyboardInterrupt
    assert lines(path) == [0, 2]


def plain_rows(tmp_path, count: int = 4):
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"p{i}"}) + "\n" for i in range(count)))
    return read_rows(path, Defaults())


def test_a_driver_that_is_killed_loses_no_row(tmp_path):
    """Rows beyond a gap are on disk; what goes on puts all in order and leaves nothing beside."""
    path, out = tmp_path / "in.txt", tmp_path / "out.jsonl"
    path.write_text("a\nb\nc\nd\n")
    rows = read_rows(path, Defaults())
    lines = [{"index": i, "prompt": rows[i].prompt, "text": "x", "error": None} for i in range(4)]
    killed = OrderedWriter(out, 4)
    killed.__enter__()
    for index in (0, 3, 2):
        killed.write(index, lines[index])
    with side_file(out).open("a") as torn:
        torn.write('{"index": 1, "pro')
    assert [json.loads(line)["index"] for line in out.read_text().splitlines()] == [0]
    with pytest.raises(ValueError, match="has 4 lines already"):
        require_no_answers(out)
    done = finished_lines(out, rows)
    assert sorted(done) == [0, 2, 3]
    with OrderedWriter(out, 4, done=done) as writer:
        writer.begin()
        assert not side_file(out).exists()
        writer.write(1, lines[1])
    assert [json.loads(line)["index"] for line in out.read_text().splitlines()] == [0, 1, 2, 3]
    with OrderedWriter(out, 4) as writer:
        writer.write(2, lines[2])
        assert side_file(out).exists()
    assert not side_file(out).exists()


def test_resuming_keeps_finished_rows_and_repeats_failed_and_torn_ones(tmp_path):
    rows = plain_rows(tmp_path)
    path = tmp_path / "out.jsonl"
    with OrderedWriter(path, 4) as writer:
        writer.write(0, answer_line(rows[0], ANSWER, "demo"))
        writer.write(1, error_line(rows[1], "too long"))
    whole = json.dumps(answer_line(rows[2], ANSWER, "demo"))
    path.write_text(path.read_text() + whole[: len(whole) // 2])
    done = finished_lines(path, rows)
    assert sorted(done) == [0]
    with OrderedWriter(path, 4, done=done) as writer:
        for index in (3, 2, 1):
            writer.write(index, answer_line(rows[index], ANSWER, "demo"))
            on_disk = {json.loads(line)["index"] for line in path.read_text().splitlines()}
            assert 0 in on_disk and index in on_disk, "a second crash must lose nothing"
    assert lines(path) == [0, 1, 2, 3]


def test_resuming_refuses_the_output_of_another_input(tmp_path):
    rows = plain_rows(tmp_path)
    path = tmp_path / "out.jsonl"
    path.write_text(json.dumps({"index": 1, "prompt": "other", "text": "", "error": None}) + "\n")
    with pytest.raises(ValueError, match="another prompt"):
        finished_lines(path, rows)
    path.write_text(json.dumps({"index": 9, "prompt": "p9", "text": "", "error": None}) + "\n")
    with pytest.raises(ValueError, match="not from this input"):
        finished_lines(path, rows)


def test_resuming_openai_rows_goes_by_custom_id(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text(openai() + "\n")
    rows = read_rows(path, Defaults())
    out = tmp_path / "out.jsonl"
    with OrderedWriter(out, 1) as writer:
        writer.write(0, answer_line(rows[0], ANSWER, "demo"))
    assert sorted(finished_lines(out, rows)) == [0]


def test_resuming_leaves_out_the_rows_of_repeated_ids(tmp_path):
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_text(openai() + "\n" + openai() + "\n")
    rows = read_rows(path, Defaults())
    assert rows[1].error is not None
    with OrderedWriter(out, 2) as writer:
        writer.write(0, answer_line(rows[0], ANSWER, "demo"))
        writer.write(1, error_line(rows[1], rows[1].error))
    assert sorted(finished_lines(out, rows)) == [0]


def test_a_line_torn_within_a_character_runs_again(tmp_path):
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_text(openai() + "\n")
    rows = read_rows(path, Defaults())
    with OrderedWriter(out, 1) as writer:
        writer.write(0, answer_line(rows[0], ANSWER, "demo"))
    whole = out.read_bytes()
    out.write_bytes(whole + '{"text": "é'.encode()[:-1])
    assert sorted(finished_lines(out, rows)) == [0]


def test_errors_name_lines_as_an_editor_counts_them(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text("\n" + openai() + "\n\n{bad\n" + openai() + "\n")
    first, bad, again = read_rows(path, Defaults())
    assert first.error is None and (bad.index, again.index) == (1, 2)
    assert bad.error is not None and bad.error.startswith("line 4 is not JSON")
    assert again.error == "line 5: id 'a' was used in line 2"


@pytest.mark.parametrize("form", ["completion", "chat", "plain chat"])
def test_resuming_refuses_an_id_that_has_another_prompt_now(tmp_path, form):
    def rows_of(text: str):
        messages = [{"role": "user", "content": text}]
        line = {
            "completion": openai(prompt=text),
            "chat": openai("/v1/chat/completions", messages=messages),
            "plain chat": json.dumps({"messages": messages}),
        }[form]
        path = tmp_path / "in.jsonl"
        path.write_text(line + "\n")
        return read_rows(path, Defaults())

    out = tmp_path / "out.jsonl"
    answer = answer_line(rows_of("old")[0], ANSWER, "demo")
    out.write_text(json.dumps(answer) + "\n")
    assert sorted(finished_lines(out, rows_of("old"))) == [0]
    with pytest.raises(ValueError, match="row 0 has another prompt"):
        finished_lines(out, rows_of("new"))
    answer.pop("prompt_hash", None)
    out.write_text(json.dumps(answer) + "\n")
    if form != "plain chat":
        assert sorted(finished_lines(out, rows_of("new"))) == [0], "answers without it are kept"


def test_what_utf8_cannot_hold_is_written_escaped(tmp_path):
    path = tmp_path / "out.jsonl"
    row = json_row(0, r'{"id": "\ud800", "promt": "x"}', Defaults())
    with OrderedWriter(path, 2) as writer:
        writer.write(0, {"index": 0, "id": "\ud800", "error": row.error})
        writer.write(1, {"index": 1, "text": "\u00e9"})
    assert json.loads(path.read_text().splitlines()[0])["id"] == "\ud800"
    assert "\u00e9" in path.read_text(encoding="utf-8"), "and everything else as it is"


def test_a_run_that_never_began_leaves_what_was_there(tmp_path):
    out = tmp_path / "out.jsonl"
    out.write_text("of an earlier run\n")
    with pytest.raises(RuntimeError, match="planted"), OrderedWriter(out, 1):
        raise RuntimeError("planted")
    assert out.read_text() == "of an earlier run\n"
    with OrderedWriter(out, 1) as writer:
        writer.write(0, {"index": 0})
    assert out.read_text() == '{"index": 0}\n'


def test_a_link_stays_a_link_and_a_pipe_a_pipe(tmp_path):
    target, link, pipe = (tmp_path / name for name in ("target.jsonl", "link.jsonl", "pipe"))
    link.symlink_to(target)
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDWR)
    for path in (link, pipe):
        with OrderedWriter(path, 2) as writer:
            writer.write(1, {"index": 1})
    assert link.is_symlink() and target.read_text() == '{"index": 1}\n'
    assert pipe.is_fifo() and os.read(reader, 100) == b'{"index": 1}\n'
    os.close(reader)


def test_resuming_refuses_a_file_that_holds_something_else(tmp_path):
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_text(openai() + "\n")
    rows = read_rows(path, Defaults())
    for text in ('{\n "schema": 1\n}\n', "notes\nmore\n"):
        out.write_text(text)
        with pytest.raises(ValueError, match="line 1 is no answer of an earlier run"):
            finished_lines(out, rows)
    out.write_text('{"custom_id": ["a"]}\n')
    with pytest.raises(ValueError, match="not from this input file"):
        finished_lines(out, rows)


@pytest.fixture
def full_disk(monkeypatch):
    """Return a switch: from then on files take `room` bytes each, copies none."""

    def fill(room: int) -> None:
        class Full(io.FileIO):
            def write(self, data) -> int:
                copy = str(self.name).endswith(".tmp")
                left = 0 if copy else room - os.fstat(self.fileno()).st_size
                if left <= 0:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return super().write(bytes(data)[:left])

        def opened(path: Path, mode: str = "r", **options) -> io.IOBase:
            if mode[0] == "r":
                return open(path, mode, **options)
            raw = Full(path, mode.replace("b", ""))
            return raw if "buffering" in options else io.TextIOWrapper(io.BufferedWriter(raw))

        monkeypatch.setattr(Path, "open", opened)

    return fill


FULL = "cannot write '{}': no space left on device; {} finished rows are kept in it: free some"


def test_a_full_disk_is_named_and_keeps_whole_rows(tmp_path, full_disk):
    path = tmp_path / "out.jsonl"
    full_disk(30)
    message = FULL.format(path, 2)
    with pytest.raises(ValueError, match=message), OrderedWriter(path, 9) as writer:
        for index in range(9):
            writer.write(index, {"index": index})
    assert lines(path) == [0, 1], "no half of a row"
    assert [p.name for p in tmp_path.iterdir()] == ["out.jsonl"]


def test_a_full_disk_keeps_rows_beyond_a_gap(tmp_path, full_disk, caplog):
    """And hides nothing of what ended the run."""
    path = tmp_path / "out.jsonl"
    rows = [text_row(i, "x", Defaults()) for i in range(9)]
    full_disk(70)
    with pytest.raises(DeadlineError), OrderedWriter(path, 9) as writer:
        for index in (0, 5, 1, 7):
            writer.write(index, {"index": index})
        raise DeadlineError("late")
    assert FULL.format(path, 4) in caplog.text
    assert sorted(finished_lines(path, rows)) == [0, 1, 5, 7]


def test_a_full_disk_leaves_what_an_earlier_run_finished(tmp_path, full_disk):
    path = tmp_path / "out.jsonl"
    path.write_text('{"index": 0}\n{"index": 3}\n')
    rows = [text_row(i, "x", Defaults()) for i in range(5)]
    done = finished_lines(path, rows)
    full_disk(20)
    with (
        pytest.raises(ValueError, match=FULL.format(path, 2)),
        OrderedWriter(path, 5, done=done) as writer,
    ):
        writer.write(1, {"index": 1})
    assert lines(path) == [0, 3]
    assert [p.name for p in tmp_path.iterdir()] == ["out.jsonl"]


def piped(data: bytes) -> str:
    """Return the name of a pipe that has been written to and closed."""
    out, into = os.pipe()
    os.write(into, data)
    os.close(into)
    return f"/proc/self/fd/{out}"


def test_a_pipe_of_json_lines_is_read_as_such(tmp_path):
    line = json.dumps({"prompt": "x"})
    assert [row.prompt for row in read_rows(piped(line.encode()), Defaults())] == ["x"]
    assert [row.prompt for row in read_rows(piped(b"{ a line of code"), Defaults())] == [
        "{ a line of code"
    ]
    (tmp_path / "rows.jsonl").write_text(line)
    (tmp_path / "stdin").symlink_to(tmp_path / "rows.jsonl")
    assert [row.prompt for row in read_rows(tmp_path / "stdin", Defaults())] == ["x"]


def test_rows_are_written_into_a_pipe():
    out, into = os.pipe()
    with OrderedWriter(f"/proc/self/fd/{into}", 2) as writer:
        writer.write(1, {"index": 1})
        writer.write(0, {"index": 0})
    os.close(into)
    with open(out) as found:
        assert [json.loads(line)["index"] for line in found] == [0, 1]


def test_an_output_with_answers_is_not_replaced_unasked(tmp_path):
    out = tmp_path / "out.jsonl"
    for text in ("", '{"index": 0, "error": "too long"}\n', "\n"):
        out.write_text(text)
        require_no_answers(out)
    require_no_answers(tmp_path / "new.jsonl")
    for text, lines in (
        ('{"index": 0, "text": "a"}\n', "1 line"),
        ('{"index": 0, "error": null, "text": "a"}\n{"error": "x"}\n{"ind', "2 lines"),
        ("my diary\nof three\nlines", "3 lines"),
    ):
        out.write_text(text)
        with pytest.raises(ValueError, match=f"has {lines} already: .*--resume.*--overwrite"):
            require_no_answers(out)
        assert out.read_text() == text
