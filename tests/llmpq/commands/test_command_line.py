"""The mechanism behind every command's flags: spellings, one screen of help, refusals, endings."""

from __future__ import annotations

import argparse
import io
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from llmpq.commands.command_line import CUT_SHORT, CommandParser, Only, run_command
from llmpq.errors import DoesNotFitError
from llmpq.version import __version__

pytestmark = pytest.mark.pure


@dataclass(frozen=True, kw_only=True)
class Request:
    model: str
    temperature: float
    top_k: int | None
    max_tokens: int
    pin: list[str]
    verbose: bool


def parser() -> CommandParser:
    made = CommandParser("llmpq-x run", "Do x.", example="llmpq-x run --model m")
    job = made.section("job")
    job.flag("--model", required=True, help="a directory")
    job.flag("--temperature", type=float, default=0.0, daily=True, help="above 0: sample")
    sampled = Only(lambda a: a.temperature > 0, "on greedy tokens", "add --temperature T")
    job.flag("--top-k", type=int, only=sampled, help="from the K likeliest")
    job.flag("--max-tokens", also=("--n",), type=int, default=16, help="new tokens")
    more = made.section("more")
    more.flag("--pin", action="append", default=[], help="0-3=T4")
    more.flag("-v", "--verbose", action="store_true", help="say more")
    return made


def read(words: str) -> Request:
    return parser().read_as(Request, words.split())


def test_defaults_and_values_reach_the_request() -> None:
    assert read("--model m") == Request(
        model="m", temperature=0.0, top_k=None, max_tokens=16, pin=[], verbose=False
    )
    given = read("--model m --temperature 1 --top-k 3 --pin a --pin b -v")
    assert (given.temperature, given.top_k, given.pin, given.verbose) == (1.0, 3, ["a", "b"], True)


@pytest.mark.parametrize("spelling", ["--max-tokens", "--max_tokens", "--n"])
def test_every_spelling_is_accepted(spelling: str) -> None:
    assert read(f"--model m {spelling} 5").max_tokens == 5


@pytest.mark.parametrize("words", ["--top-k 3", "--top_k=3"])
def test_a_flag_without_effect_is_refused_with_its_remedy(words: str) -> None:
    with pytest.raises(ValueError, match=r"--top-k .*greedy.*--temperature"):
        read(f"--model m {words}")


def test_a_default_that_is_given_counts_as_given() -> None:
    strict = CommandParser("x", "Do x.", example="x")
    only = Only(lambda a: False, "here", "go elsewhere")
    strict.section("job").flag("--seed", type=int, default=0, only=only)
    assert strict.read([]).seed == 0
    with pytest.raises(ValueError, match="--seed"):
        strict.read(["--seed", "0"])


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("", "--model"),
        ("--model m --top-j 3", "--top-k"),
        ("--model m --max-tokens many", "--max-tokens"),
        ("--model m stray", "stray"),
        ("--mod m", "--model"),
    ],
)
def test_wrong_words_are_value_errors_that_name_the_flag(words: str, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        read(words)


@pytest.mark.parametrize("empty", ["", " "])
def test_an_empty_path_is_not_the_folder_that_one_is_in(empty: str) -> None:
    made = CommandParser("llmpq-x write", "Write x.", example="llmpq-x write IN OUT")
    made.positional("source", type=Path)
    made.section("files").flag("-o", "--output", type=Path)
    assert made.read(["a", "-o", "b"]).output == Path("b")
    for words, named in ((["a", "-o", empty], "--output"), ([empty], "source")):
        with pytest.raises(ValueError, match=f"{named}: expected a path, got an empty one"):
            made.read(words)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--modle", "--model"),
        ("--mod", "--model"),
        ("--max_token", "--max-tokens"),
        ("--tempratuer", "--temperature"),
        ("--most-tokens", "--max-tokens"),
        ("--pni", "--pin"),
        ("--cert", None),
        ("--listen", None),
        ("--headless", None),
        ("--no-node", None),
        ("--pan", "--pin"),
        ("--my-temp", "--temperature"),
        ("--my-te", None),
        ("--pal", None),
        ("--odel-line", None),
        ("--models-dir", "--model"),
        ("--system-model", None),
        ("--no-models", "--model"),
    ],
)
def test_an_unknown_flag_gets_a_guess_only_at_what_is_like_it(
    typed: str, meant: str | None
) -> None:
    with pytest.raises(ValueError, match="unknown flag") as refused:
        read(f"--model m {typed}")
    said = re.findall("did you mean '(.*?)'", str(refused.value))
    assert said == ([] if meant is None else [meant])


def test_help_shows_daily_flags_and_help_all_every_one(capsys: pytest.CaptureFixture[str]) -> None:
    for word, shown, hidden in (
        ("--help", ["--model", "--temperature", "example: llmpq-x"], ["--top-k", "--pin"]),
        ("--help-all", ["--model", "--top-k", "-v, --verbose"], ["--top_k", "--n "]),
    ):
        with pytest.raises(SystemExit) as ended:
            parser().read([word])
        text = capsys.readouterr().out
        assert ended.value.code == 0
        assert all(flag in text for flag in shown) and not any(flag in text for flag in hidden)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().read(["--version"])
    assert capsys.readouterr().out == f"llmpq-x {__version__}\n"


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ValueError("bad\n input"), 2, "x: bad input\n"),
        (DoesNotFitError("too large"), 5, "x: too large\n"),
        (FileNotFoundError(2, "No such file", "a.json"), 2, "x: 'a.json': No such file\n"),
        (RuntimeError("CUDA out of memory. Tried"), 5, "out of memory"),
        (KeyboardInterrupt(), 130, "run it again"),
    ],
)
def test_endings(error: BaseException, code: int, said: str) -> None:
    def run() -> int:
        raise error

    err = io.StringIO()
    assert run_command("x", run, err=err) == code
    assert said in err.getvalue()


def test_an_error_of_ours_is_not_hidden() -> None:
    def run() -> int:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        run_command("x", run)


def test_a_request_gets_only_what_was_declared() -> None:
    assert isinstance(parser().read(["--model", "m"]), argparse.Namespace)
    with pytest.raises(KeyError):
        CommandParser("x", "Do x.", example="x").read_as(Request, [])


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_has_enough_is_no_error(unbuffered: str) -> None:
    """`llmpq-... | head -1` says nothing and ends as other commands do."""
    code = "import sys; from llmpq.commands.command_line import run_command\n"
    code += "def run():\n    [print(k) for k in range(100_000)]\n    return 0\n"
    code += "sys.exit(run_command('x', run))"
    env = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    writer = [sys.executable, "-c", code]
    with subprocess.Popen(
        writer, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "0\n"
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(30) == CUT_SHORT


def test_a_broken_pipe_elsewhere_is_told() -> None:
    def run() -> int:
        raise BrokenPipeError(32, "Broken pipe")

    err = io.StringIO()
    assert run_command("x", run, err=err) == 2
    assert "Broken pipe" in err.getvalue()


def test_a_model_without_its_flag_is_answered_with_it(tmp_path: Path) -> None:
    made = CommandParser("llmpq-x run", "Do x.", example="llmpq-x run --model m")
    made.section("job").flag("--model", help="a directory")
    for word in (str(tmp_path), "m.gguf"):
        with pytest.raises(ValueError, match=f"'{word}' belongs to no flag: write --model {word};"):
            made.read([word])
        with pytest.raises(ValueError, match=f"'{word}' belongs to no flag; see"):
            made.read(["--model", "m", word])
    with pytest.raises(ValueError, match="'other' belongs to no flag; see"):
        made.read(["other"])
