"""The one way in which every command of llmpq declares, shows and refuses its flags.

A package's `cli/` declares each flag once, with the conditions under which it has an effect, and
makes of the parsed words a frozen request; argparse is used in `cli/` only. Standard library only.

    parser = CommandParser("llmpq-profile run", "Time the layers of a model on this machine.",
                           example="llmpq-profile --model llama-3.1-8b --cluster my.yaml -o c.json")
    job = parser.section("job")
    job.flag("--model", required=True, daily=True, help="model directory, or a built-in name")
    job.flag("--temperature", type=float, default=0.0, help="above 0: time sampled tokens")
    job.flag("--top-k", type=int, help="draw from the K likeliest",
             only=Only(lambda a: a.temperature > 0, "on greedy tokens", "add --temperature T"))
    request = parser.read_as(ProfileRequest, argv)     # fields are named as the flags

`daily` flags are what `--help` shows (at most 14, on one screen); `--help-all` shows every one.
`--a-b` is also accepted as `--a_b` and the other way round; `also=` names further spellings (the
paper's), which are accepted and not listed. `--version` is everywhere. A flag that was given though
its `only` does not hold is refused with one sentence: what has no effect, when, and what to do.
What a user got wrong is a `ValueError`; `run_command` makes sentence and exit code of every end.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import select
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import IO, Any, TypeVar, cast

from llmpq.checkpoints.hub import at_revision
from llmpq.commands.interrupts import Interrupts
from llmpq.commands.output_paths import refusal
from llmpq.errors import EXIT_CODES, ExitCode, LlmpqError, nearest
from llmpq.missing_packages import missing_package
from llmpq.out_of_memory import first_line, out_of_memory
from llmpq.version import __version__

T = TypeVar("T")

CUT_SHORT = 141
"""Exit code after a closed pipe (`| head`): that of a command ended by SIGPIPE."""
_NOT_GIVEN: Any = object()
"""Stands for a flag until the command line is read: a default may also be given explicitly."""


@dataclass(frozen=True)
class Only:
    """When a flag has an effect, and what to say where it has none."""

    holds: Callable[[argparse.Namespace], object]
    """Of all parsed flags, defaults filled in."""
    otherwise: str
    """Where the flag has no effect: "on greedy tokens", "with --pareto"."""
    remedy: str
    """What gives it one: "add --temperature T"."""


def token_count(text: str) -> int:
    """Read a number of tokens: `512`, `32k` (32 x 1,024), `1.5k`, `1M` (1,024 x 1,024)."""
    found = re.fullmatch(r"([+-]?\d+)|(\d+(?:\.\d+)?)([kKmM])", text.strip().replace(",", ""))
    if found is None or len(text) > 30:
        raise argparse.ArgumentTypeError(
            f"expected a number of tokens such as 512, 32k or 1M, got '{text[:40]}'"
        )
    return int(found[1]) if found[1] else round(float(found[2]) * _TOKENS[found[3].lower()])


_TOKENS = {"k": 1 << 10, "m": 1 << 20}


def whole_number(text: str) -> int:
    """Read a whole number."""
    try:
        return int(text)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"expected a whole number, got '{text[:40]}'")


def number(text: str) -> float:
    """Read a number, without a unit or a percent sign."""
    try:
        return float(text)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"expected a number such as 0.5, got '{text[:40]}'")


def in_seconds(text: str) -> float:
    """Read a number of seconds, without a unit."""
    try:
        return float(text)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(
        f"expected a number of seconds such as 0.5, without a unit, got '{text[:40]}'"
    )


def named_path(text: str) -> Path:
    """Read a path; an empty one, as where a variable is not set, would be the folder one is in."""
    if text.strip():
        return Path(text)
    raise argparse.ArgumentTypeError("expected a path, got an empty one")


_READ: Mapping[Any, Callable[[str], Any]] = {int: whole_number, float: number, Path: named_path}
"""A flag's `type` -> what reads it, and says in a sentence what it expected."""


@dataclass(frozen=True)
class Idle:
    """A flag of another program (vLLM's, say) that asks for what llmpq does anyway."""

    why: str
    values: tuple[str, ...] | None = ()
    """Values with which it changes nothing; (): it takes no value; None: with any."""


class Section:
    """Flags that stand together in `--help-all`."""

    def __init__(
        self, parser: CommandParser, title: str, add_argument: Callable[..., argparse.Action]
    ) -> None:
        """`add_argument`: of the argument group that has this title."""
        self._parser = parser
        self.title = title
        self._add_argument = add_argument
        self.actions: list[argparse.Action] = []

    def flag(
        self,
        *names: str,
        daily: bool = False,
        also: Sequence[str] = (),
        only: Only | Sequence[Only] = (),
        **options: Any,
    ) -> None:
        """Declare a flag: listed names, whether `--help` shows it, what makes it have an effect.

        `options` are argparse's own (type, default, choices, action, metavar, help, required).
        """
        listed = list(names)
        spellings = [s for name in (*names, *also) for s in _spellings(name)]
        hidden = [s for s in dict.fromkeys(spellings) if s not in listed]
        if "dest" not in options:
            options["dest"] = _dest(names)
        options |= {"type": _READ[kind]} if (kind := options.get("type")) in _READ else {}
        action = self._add_argument(*listed, *hidden, **options)
        self.actions.append(action)
        conditions = (only,) if isinstance(only, Only) else tuple(only)
        self._parser.declared(
            action,
            tuple(listed),
            daily=daily,
            only=conditions,
            appends=options.get("action") == "append",
        )

    def revision(self, *models: str) -> None:
        """Declare `--revision` of the model that one of these flags or words names."""
        text = "branch, tag or commit of a model of the hub (default: main)"
        self.flag("--revision", metavar="NAME", help=text)
        self._parser.models = models


class CommandParser:
    """The flags of one command: declared in sections, shown on one screen, read into a request."""

    def __init__(
        self,
        program: str,
        summary: str,
        *,
        example: str,
        notes: str = "",
        others: Mapping[str, str] | None = None,
        idle: Mapping[str, Idle] | None = None,
        flag_of: Callable[[str], str] | None = None,
    ) -> None:
        """`others`: flags of other programs that people know, and what stands for them here.

        `idle`: those of them that change nothing here, which are taken with a line on stderr.
        `flag_of`: which flag a word without one is most likely meant for.
        """
        self._others, self._idle, self._flag_of = others or {}, idle or {}, flag_of
        self.program = program
        self._summary = summary
        self._example = example
        self._notes = notes
        self._parser = _Parser(prog=program, add_help=False, allow_abbrev=False)
        self._parser.shown = {}
        self._help_all = argparse.ArgumentParser(add_help=False).add_argument(
            "--help-all", action="store_true", help="all flags (--version: which llmpq this is)"
        )
        self._sections: list[Section] = []
        self._actions: list[argparse.Action] = []
        """Flags and words, as they are declared."""
        self._appended: set[argparse.Action] = set()
        """Flags that may be given several times, each time with one more value."""
        self._daily: set[argparse.Action] = set()
        self._only: list[tuple[argparse.Action, Only]] = []
        self._positionals: list[argparse.Action] = []
        self.models: tuple[str, ...] = ()
        """Flags and words that `--revision` is about."""

    def section(self, title: str) -> Section:
        """Start a group of flags."""
        section = Section(self, title, self._parser.add_argument_group(title).add_argument)
        self._sections.append(section)
        return section

    def positional(self, name: str, **options: Any) -> None:
        """Declare a word that needs no flag; `--help` shows it."""
        options |= {"type": _READ[kind]} if (kind := options.get("type")) in _READ else {}
        action = self._parser.add_argument(name, **options)
        self._positionals.append(action)
        self._actions.append(action)

    def declared(
        self,
        action: argparse.Action,
        listed: tuple[str, ...],
        *,
        daily: bool,
        only: tuple[Only, ...],
        appends: bool,
    ) -> None:
        """Take over what `Section.flag` declared; `appends`: every use adds a value."""
        self._parser.shown[action] = listed
        self._actions.append(action)
        if appends:
            self._appended.add(action)
        if daily or action.required:
            self._daily.add(action)
        self._only += [(action, condition) for condition in only]

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """Return the flags' values; ends the process after `--help`, `--help-all`, `--version`.

        `ValueError` for words that are no flag of this command, and for flags without an effect.
        """
        self._show_and_leave(argv)
        found, given = self._parsed(argv)
        for _, only in self._only:
            if not only.holds(found):
                names = {
                    self._parser.shown[action][-1]: action.dest in given
                    for action, other in self._only
                    if other is only
                }
                refuse_without_effect(names, only.otherwise, only.remedy)
        return found

    def read_given(self, argv: Sequence[str]) -> dict[str, Any]:
        """Return the values of the flags that are among the words, and of no other."""
        found, given = self._parsed(argv)
        return {dest: getattr(found, dest) for dest in given}

    def _parsed(self, argv: Sequence[str]) -> tuple[argparse.Namespace, set[str]]:
        """Return the values of all flags, and which were given."""
        argv = list(self._without_idle(argv))
        for word in argv:
            flag = word.partition("=")[0]
            if flag not in self._spelled_flags() and self._other(flag) is not None:
                raise self._unknown(word, argv)
        actions = [a for a in self._actions if a.option_strings]
        blank = argparse.Namespace(
            **{a.dest: None if a in self._appended else _NOT_GIVEN for a in actions}
        )
        found, unknown = self._parser.parse_known_args(list(argv), blank)
        if unknown:
            raise self._unknown(unknown[0], argv)
        given = set()
        for action in actions:
            value = getattr(found, action.dest)
            if value is _NOT_GIVEN or (value is None and action in self._appended):
                setattr(found, action.dest, action.default)
            else:
                given.add(action.dest)
        if "revision" in given:
            self._put_at_revision(found)
        return found, given

    def _spelled_flags(self) -> set[str]:
        """Return every spelling of every flag of the command."""
        return {name for action in self._actions for name in action.option_strings}

    def _without_idle(self, argv: Sequence[str]) -> Iterator[str]:
        """Yield the words without flags that change nothing, each of which is said in a line."""
        words = iter(enumerate(argv))
        for index, word in words:
            flag, equals, value = word.partition("=")
            found = self._idle.get(_spellings(flag)[-1]) if flag.startswith("-") else None
            if found is None or flag in self._spelled_flags():
                yield word
                continue
            behind = argv[index + 1] if found.values != () and index + 1 < len(argv) else ""
            value = value if equals else behind
            if found.values and value not in found.values:
                yield word
                continue
            if found.values != () and not equals:
                next(words, None)
            said = f"{flag} {value}" if found.values else flag
            sys.stderr.write(f"{self.program.split()[0]}: {said} changes nothing: {found.why}\n")

    def _put_at_revision(self, found: argparse.Namespace) -> None:
        """Write `--revision` behind the model's name, as `NAME@REVISION`."""
        named = [dest for dest in self.models if getattr(found, dest) is not None]
        if not named:
            raise ValueError("--revision has no effect without --model: name one, or leave it out")
        for dest in named:
            model = getattr(found, dest)
            setattr(found, dest, type(model)(at_revision(model, found.revision)))
        found.revision = None

    def read_as(self, request: type[T], argv: Sequence[str]) -> T:
        """Return a frozen request whose fields are named as the flags.

        A field that is a dataclass by default is read from the flags of its own fields.
        """
        return _request(request, vars(self.read(argv)))

    def as_typed(self, text: str, argv: Sequence[str]) -> str:
        """Return a message with flags as these words spell them, not as they are listed."""
        typed = {word.partition("=")[0] for word in argv if word.startswith("-")}
        for action in self._actions:
            listed = self._parser.shown.get(action, ())
            own = sorted(typed & set(action.option_strings))
            if len(own) == 1 and own[0] not in listed:
                for name in listed:
                    text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", own[0], text)
        return text

    def help_text(self, *, everything: bool = False) -> str:
        """Return what `--help` prints, or, `everything`, `--help-all`."""
        parser = self._parser
        lines = [f"usage: {self._usage()}", "", self._summary, ""]
        formatter = _HelpFormatter(self.program, parser.shown)
        sections = [("positional arguments", self._positionals)]
        sections += [(section.title, section.actions) for section in self._sections]
        for title, actions in sections:
            shown = [a for a in actions if everything or a in self._daily or not a.option_strings]
            if shown:
                formatter.start_section(title if everything else None)
                formatter.add_arguments(shown)
                formatter.end_section()
        if not everything and self._hides():
            formatter.start_section(None)
            formatter.add_arguments([self._help_all])
            formatter.end_section()
        text = formatter.format_help().strip("\n")
        lines += [line for line in text.splitlines() if everything or line.strip()]
        lines += ["", *self._notes.splitlines()] if self._notes else []
        if "exit codes:" not in self._notes:
            lines += ["", *exit_codes_lines()]
        return "\n".join([*lines, "", f"example: {self._example}", ""])

    def _hides(self) -> bool:
        """Whether `--help` leaves out flags."""
        return any(action not in self._daily for action in self._parser.shown)

    def _usage(self) -> str:
        """Return the usage line: positional words and required flags."""
        words = [self.program]
        for action in self._actions:
            if not action.option_strings:
                word = str(action.metavar or action.dest).upper()
                words.append(f"[{word}]" if action.nargs == "?" else word)
            elif action.required:
                name = self._parser.shown[action][0]
                words.append(f"{name} {action.metavar or action.dest.upper()}")
        return " ".join([*words, "[flags]"])

    def _show_and_leave(self, argv: Sequence[str]) -> None:
        if "--version" in argv:
            self._leave(f"{self.program.split()[0]} {__version__}\n")
        if "--help-all" in argv or "--help_all" in argv:
            self._leave(self.help_text(everything=True))
        if "--help" in argv or "-h" in argv:
            self._leave(self.help_text())

    @staticmethod
    def _leave(text: str) -> None:
        sys.stdout.write(text)
        sys.exit(ExitCode.DONE)

    def _other(self, flag: str) -> str | None:
        """Return what stands for a flag of another program, None if it is not known."""
        return self._others.get(_spellings(flag)[-1])

    def _repeated(self, word: str, argv: Sequence[str]) -> str | None:
        """Return the last flag before a word, if it takes one value each time it is given."""
        words = argv[: list(argv).index(word)]
        before = [one.partition("=")[0] for one in words if one.startswith("-")]
        flags = {name for action in self._appended for name in action.option_strings}
        return before[-1] if before and before[-1] in flags else None

    def _meant(self, word: str, argv: Sequence[str]) -> str | None:
        """Return the flag that a word without one is most likely meant for."""
        if self._flag_of is not None:
            return self._flag_of(word)
        given = {one.partition("=")[0] for one in argv}
        asked = "--model" in self._spelled_flags() - given and not self._positionals
        is_model = os.path.isdir(word) or word.lower().endswith(".gguf")
        return "--model" if asked and is_model else None

    def _unknown(self, word: str, argv: Sequence[str]) -> ValueError:
        """Return the error of a word that is no flag or value, with what was probably meant."""
        if not word.startswith("-"):
            flag = self._repeated(word, argv) or self._meant(word, argv)
            hint = "" if flag is None else f": write {flag} {word}"
            return ValueError(f"'{word}' belongs to no flag{hint}; see {self.program} --help-all")
        flag = word.partition("=")[0]
        other = self._other(flag)
        if other is not None:
            return ValueError(f"this command has no '{flag}': {other}")
        for action in self._positionals:
            if action.dest == flag.strip("-").replace("-", "_"):
                return ValueError(f"write {action.metavar} without '{flag}': {self._example}")
        typed = flag.replace("_", "-")
        known = [name for names in self._parser.shown.values() for name in names]
        like = [name for name in known if name.replace("-", "") == typed.replace("-", "")]
        hint = nearest(typed, like or [name for name in known if _is_like(typed, name)])
        return ValueError(f"unknown flag '{word}': {hint}see {self.program} --help-all")


def _is_like(typed: str, flag: str) -> bool:
    """Whether a flag may be meant: most of either's letters are in words of both, or it is a slip.

    Two edits of a short name make another (`--prefix`, `--prefer`): one for every four letters.
    """
    own, other = typed.strip("-").removeprefix("no-"), flag.strip("-")
    words, known = own.split("-"), other.split("-")
    slips = min(2, max(1, len(own) // 4))
    both = _shares_most(words, known) and _shares_most(known, words)
    return both or other.startswith(own) or _edits(own, other) <= slips


def _shares_most(words: Sequence[str], others: Sequence[str]) -> bool:
    """Whether more than half of the letters are in words that the others have, too."""
    shared = [word for word in words if any(_same(word, other) for other in others)]
    return 2 * len("".join(shared)) > len("".join(words))


def _same(word: str, other: str) -> bool:
    """Whether one word is the other, or its first three letters or more (`len`, `length`)."""
    short, long = sorted((word, other), key=len)
    return word == other or (len(short) > 2 and long.startswith(short))


def _edits(a: str, b: str) -> int:
    """Return how many letters are wrong, missing, too many or swapped with the next one."""
    before: list[int] = []
    last = list(range(len(b) + 1))
    for i, letter in enumerate(a, 1):
        row = [i]
        for j, other in enumerate(b, 1):
            least = min(last[j] + 1, row[-1] + 1, last[j - 1] + (letter != other))
            if i > 1 and j > 1 and letter == b[j - 2] and a[i - 2] == other:
                least = min(least, before[j - 2] + 1)
            row.append(least)
        before, last = last, row
    return last[-1]


def exit_codes_lines() -> list[str]:
    """Return the lines of --help that list the exit codes, the same for every command."""
    said = ", ".join(f"{int(code)} {words}" for code, words in EXIT_CODES.items())
    return textwrap.wrap(f"exit codes: {said}", width=96)


def _request(kind: type[T], values: Mapping[str, Any]) -> T:
    """Return a request made of flags; a field within another dataclass may have no flag."""
    given: dict[str, Any] = {}
    outer = {f.name for f in fields(kind)}  # type: ignore[arg-type]
    for own in fields(kind):  # type: ignore[arg-type]
        if own.name in values or not is_dataclass(own.default_factory):
            given[own.name] = values[own.name]
        else:
            names = {f.name for f in fields(own.default_factory)} - outer
            inner: Any = own.default_factory
            given[own.name] = inner(**{n: values[n] for n in names & values.keys()})
    return kind(**given)


def refuse_without_effect(given: Mapping[str, bool], otherwise: str, remedy: str) -> None:
    """`ValueError` for flags that were given though they have no effect.

    For what a declared `Only` cannot know, since it depends on a file that a flag names.
    `given`: flag -> whether it was; the other two as in `Only`.
    """
    idle = [flag for flag, was in given.items() if was]
    if idle:
        verb, them = ("has", idle[0]) if len(idle) == 1 else ("have", "them")
        raise ValueError(
            f"{', '.join(idle)} {verb} no effect {otherwise}: {remedy}, or leave {them} out"
        )


@dataclass(frozen=True)
class Command:
    """One word after a program's name: its flags, the options they become, what does its work."""

    parser: Callable[[], CommandParser]
    options: type[Any]
    module: str
    """Imported once the flags are read: torch, Ray and solvers take seconds."""
    function: str = "main"
    extras: tuple[str, ...] = ("run",)
    """Of pyproject.toml: what the command needs installed."""

    def read(self, words: Sequence[str]) -> Any:
        """Return the options that words become; `ValueError` for what they cannot be."""
        return self.parser().read_as(self.options, words)

    def work(self) -> Callable[..., Any]:
        """Return what does the command's work, imported here."""
        return cast(
            Callable[..., Any], getattr(importlib.import_module(self.module), self.function)
        )


def run_command(
    program: str,
    run: Callable[[], int],
    *,
    interrupted: str = "stopped; run it again",
    no_memory: str = "take less at a time, or another device",
    extras: Sequence[str] = ("run",),
    spelled: Callable[[str], str] = str,
    err: IO[str] | None = None,
    own_process: bool = False,
) -> int:
    """Run a command and return its exit code; what ends it early is one sentence on stderr.

    SIGTERM and SIGHUP end it as Ctrl-C does: what it has started goes with it. `extras`: those of
    pyproject.toml that the command needs. `spelled` brings the sentence's flags to the spelling
    that the user typed. `own_process`: it ends with the command, by force where an interrupt
    does not end it (interrupts.py).
    """

    def cut_off(why: str) -> str:
        return f"{program}: {interrupted} ({why})\n"

    try:
        with Interrupts(cut_off, own_process=own_process):
            code = int(run())
            sys.stdout.flush()
        return code
    except LlmpqError as error:
        message, code = str(error), error.exit_code
    except ValueError as error:
        message, code = str(error), ExitCode.USAGE
    except ModuleNotFoundError as error:
        missing = missing_package(error, extras)
        if missing is None:
            raise
        message, code = missing, ExitCode.USAGE
    except OSError as error:
        if isinstance(error, BrokenPipeError) and _reader_is_gone(sys.stdout):
            return CUT_SHORT
        message, code = refusal(error), ExitCode.USAGE
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        message, code = f"out of memory: {first_line(error)}; {no_memory}", ExitCode.DOES_NOT_FIT
    except KeyboardInterrupt:
        message, code = interrupted, ExitCode.INTERRUPTED
    (err or sys.stderr).write(f"{program}: {spelled(' '.join(message.split()))}\n")
    return int(code)


def _reader_is_gone(out: IO[str]) -> bool:
    """Whether a pipe's reader is gone (`| head`); what is left for it is dropped in silence."""
    try:
        ends = select.poll()
        ends.register(out.fileno(), 0)  # errors are shown unasked
    except (AttributeError, OSError):  # Windows has no poll; not every stream is a file
        return False
    if not any(event & select.POLLERR for _, event in ends.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())
    return True


class _Parser(argparse.ArgumentParser):
    """Raises `ValueError` where argparse would print a page of usage and end the process."""

    shown: dict[argparse.Action, tuple[str, ...]]

    def error(self, message: str) -> Any:
        for action in self._actions:  # named as listed, not by every spelling
            listed = self.shown.get(action)
            if listed:
                message = message.replace("/".join(action.option_strings), "/".join(listed))
        raise ValueError(f"{message}; see {self.prog} --help")


class _HelpFormatter(argparse.HelpFormatter):
    """One line a flag where it fits: listed names only, the value's name once."""

    def __init__(self, program: str, shown: dict[argparse.Action, tuple[str, ...]]) -> None:
        super().__init__(program, max_help_position=26, width=96)
        self._shown = shown

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return str(action.metavar or action.dest)
        names = ", ".join(self._shown.get(action, action.option_strings))
        if action.nargs == 0:
            return names
        if action.metavar is not None or not action.choices:
            return f"{names} {self._format_args(action, action.dest.upper())}"
        one_of = "|".join(map(str, action.choices))
        return f"{names} {one_of if len(one_of) < 40 else action.dest.upper()}"


def _spellings(name: str) -> tuple[str, ...]:
    """Return a long flag with dashes and with underscores; a short one as it is."""
    if not name.startswith("--"):
        return (name,)
    return name, "--" + name[2:].replace("-", "_"), "--" + name[2:].replace("_", "-")


def _dest(names: Sequence[str]) -> str:
    """Return the attribute that argparse sets for a flag: its first long name."""
    long = next((name for name in names if name.startswith("--")), names[0])
    return long.lstrip("-").replace("-", "_")
