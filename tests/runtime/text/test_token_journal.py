"""What a killed driver leaves of answers that had begun."""

from __future__ import annotations

import json

import pytest

from llmpq.runtime.text import token_journal
from llmpq.runtime.text.batch_io import read_rows, side_file
from llmpq.runtime.text.batch_rows import Defaults
from llmpq.runtime.text.token_journal import TokenJournal, begun_answers

pytestmark = pytest.mark.pure


@pytest.fixture
def batch(tmp_path, monkeypatch):
    """Return an output file and its rows."""
    monkeypatch.setattr(token_journal, "EVERY_S", 0.0)
    path, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"p{i}"}) + "\n" for i in range(4)))
    output.write_text("")
    return output, read_rows(path, Defaults())


def made(row, engine=0):
    return {"model": "m 1", "weights": f"w{engine}", "temperature": row.sampling.temperature}


def left(output, rows, done=(), weights=("w0",)):
    return begun_answers(
        output, rows, lambda row: [made(row) | {"weights": one} for one in weights], dict(done)
    )


def test_tokens_come_back_as_they_were_written(batch):
    output, rows = batch
    journal = TokenJournal(output, rows, made, {})
    journal.begin()
    assert left(output, rows) == {}
    journal.take(lambda: [(0, 0, [5, 6]), (2, 0, [7])])
    journal.take(lambda: [(0, 0, [5, 6, 8]), (2, 0, [7]), (3, 0, [])])
    assert left(output, rows) == {0: [5, 6, 8], 2: [7]}
    assert left(output, rows, done={0: {}}) == {2: [7]}
    lines = side_file(output, "begun").read_text().splitlines()
    assert sum("made_with" in line for line in lines) == 2, "once a row"
    journal.end()
    assert left(output, rows) == {}


def test_a_torn_line_costs_what_it_had_and_the_next_run_begins_a_whole_file(batch):
    output, rows = batch
    journal = TokenJournal(output, rows, made, {})
    journal.begin()
    journal.take(lambda: [(0, 0, [5, 6])])
    with side_file(output, "begun").open("a") as file:
        file.write('{"index": 0, "at": 2, "tok')
    found = left(output, rows)
    assert found == {0: [5, 6]}
    again = TokenJournal(output, rows, made, found)
    again.begin()
    again.take(lambda: [(0, 0, [5, 6, 9])])
    assert left(output, rows) == {0: [5, 6, 9]}


def test_answers_that_have_ended_do_not_fill_the_disk(batch, monkeypatch):
    output, rows = batch
    monkeypatch.setattr(token_journal, "LEAST_BYTES", 500)
    journal = TokenJournal(output, rows, made, {3: [4, 4]})
    journal.begin()
    journal.take(lambda: [(0, 0, list(range(200))), (1, 0, [5]), (3, 0, [])])
    for count in (2, 3):
        journal.take(lambda count=count: [(1, 0, [5, 6, 7][:count]), (3, 0, [])])
        assert side_file(output, "begun").stat().st_size < 700
    assert left(output, rows) == {1: [5, 6, 7], 3: [4, 4]}
    journal.take(lambda: [(1, 0, [5, 6, 7, 8]), (2, 1, [9]), (3, 0, [])])
    found = left(output, rows, weights=("w0", "w1"))
    assert found == {1: [5, 6, 7, 8], 2: [9], 3: [4, 4]}


def test_what_another_engine_begins_anew_takes_the_place_of_what_was_there(batch):
    output, rows = batch
    journal = TokenJournal(output, rows, made, {})
    journal.begin()
    journal.take(lambda: [(0, 0, [5, 6, 7])])
    journal.take(lambda: [(0, 1, [8, 9, 10, 11])])
    assert left(output, rows, weights=("w0", "w1")) == {0: [8, 9, 10, 11]}


def test_tokens_of_another_input_or_made_otherwise_are_refused(batch, tmp_path):
    output, rows = batch
    journal = TokenJournal(output, rows, made, {})
    journal.begin()
    journal.take(lambda: [(1, 0, [5])])
    with pytest.raises(ValueError, match=r"row 1: weights was 'w0', now it is 'w7'"):
        left(output, rows, weights=("w7",))
    other = tmp_path / "other.jsonl"
    other.write_text('{"prompt": "p0"}\n{"prompt": "q"}\n')
    with pytest.raises(ValueError, match="its row 1 has another prompt"):
        left(output, read_rows(other, Defaults()))
    other.write_text('{"prompt": "p0"}\n')
    with pytest.raises(ValueError, match="not from this input file: 1"):
        left(output, read_rows(other, Defaults()))


def test_a_disk_that_is_full_does_not_end_the_run(batch, caplog, monkeypatch):
    output, rows = batch
    journal = TokenJournal(output, rows, made, {})
    journal.begin()

    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(token_journal.os, "fsync", full)
    journal.take(lambda: [(0, 0, [5])])
    monkeypatch.undo()
    journal.take(lambda: [(0, 0, [5, 6])])
    assert "No space left on device" in caplog.text and len(caplog.records) == 1


def test_a_pipe_has_no_file_beside_it(batch, tmp_path):
    import os

    _, rows = batch
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    journal = TokenJournal(pipe, rows, made, {})
    journal.begin()
    journal.take(lambda: [(0, 0, [5])])
    assert not side_file(pipe, "begun").exists()
