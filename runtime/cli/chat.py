"""`llmpq-dist chat`: a conversation in the terminal, or a text that a base model continues."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from types import FrameType
from typing import Any, Self

from llmpq.commands.input_text import text_of
from llmpq.errors import ExitCode, RequestFailedError
from llmpq.runtime.cli.chat_flags import ChatOptions
from llmpq.runtime.cli.plan_file import load_plan
from llmpq.runtime.entrypoints.llm import LLM
from llmpq.runtime.requests.sampling_params import SamplingParams
from llmpq.runtime.text.request_factory import Prompt

_HELP = """\
/reset          forget the conversation (the system message stays)
/system TEXT    another system message; without TEXT none; forgets the conversation
/again          answer the last message anew
/undo           forget the last message and its answer
/help           this list
/exit           end, as Ctrl-D does
A line that ends in a backslash goes on in the next one; Ctrl-C ends an answer.
"""
_NO_TALK = "the model has no chat template: it continues each text, and there is no conversation"


class Talk:
    """What was said so far, and what of it the model is asked to continue."""

    def __init__(self, llm: LLM, template: str | None, system: str | None) -> None:
        """`template`: instead of the model's own."""
        self._llm, self._template = llm, template
        self.is_talk = template is not None or llm.tokenizer.has_chat_template
        """False: a base model, which continues each text."""
        if system is not None and not self.is_talk:
            raise ValueError(f"--system has no effect: {_NO_TALK}; leave it out")
        self._system = system
        self._turns: list[dict[str, str]] = []
        self._last: str | None = None
        """The text that a base model continued last."""

    def say(self, text: str) -> Prompt:
        """Take the user's text; return the prompt to answer, `ValueError` if it cannot be one."""
        self._last = text
        if not self.is_talk:
            return text
        self._turns.append({"role": "user", "content": text})
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        return self._llm.tokenizer.encode_chat(
            [*system, *self._turns], template=self._template, room=self._llm.max_model_len
        )

    def answered(self, text: str) -> None:
        """Take an answer, or as much of it as there is."""
        if self.is_talk:
            self._turns.append({"role": "assistant", "content": text})

    def undo(self) -> str | None:
        """Forget the last text and what was answered; return the text."""
        if not self.is_talk:
            return self._last
        while self._turns:
            turn = self._turns.pop()
            if turn["role"] == "user":
                return turn["content"]
        return None

    def reset(self) -> None:
        """Forget all but the system message."""
        self._turns = []

    def set_system(self, text: str | None) -> None:
        """Begin anew under another system message."""
        self._system = text
        self.reset()


class CtrlC:
    """What Ctrl-C does while it is entered: an answer that comes ends, at a prompt it interrupts.

    Anywhere else nothing is raised, so that the chat goes on whenever it comes.
    """

    def __init__(self) -> None:
        self.at_prompt = self.was_pressed = False
        self._answer: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any] | None] | None = None
        self._before: Any = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._pressed)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    @contextlib.contextmanager
    def ends_this_task(self) -> Iterator[None]:
        """Let it cancel the task that runs."""
        self._answer = asyncio.get_running_loop(), asyncio.current_task()
        try:
            yield
        finally:
            self._answer = None

    def _pressed(self, number: int, frame: FrameType | None) -> None:
        self.was_pressed = True
        if self.at_prompt:
            raise KeyboardInterrupt
        if self._answer is not None:
            loop, task = self._answer
            if task is not None:
                loop.call_soon_threadsafe(task.cancel)


def main(options: ChatOptions) -> int:
    """Talk until the input ends; 8 if a line from a pipe was refused."""
    template = options.chat_template
    text = None if template is None else text_of("--chat-template", template)
    given = _given(options)
    try:
        SamplingParams(**given)  # before the model is loaded
    except ValueError as error:
        raise ValueError(f"--{str(error).replace('_', '-')}") from None
    with _open(options) as llm:
        chat = Talk(llm, text, options.system)
        talks = sys.stdin.isatty()
        if talks:
            kind = "Chat with" if chat.is_talk else "Give a text, which is continued by"
            sys.stdout.write(f"{kind} {llm.plan.model.name}; /help lists commands, Ctrl-D ends\n")
        with asyncio.Runner() as runner, CtrlC() as ctrl_c:
            failed = _talk(chat, llm, runner, _sampling(llm, given), ctrl_c, talks=talks)
    return ExitCode.SOME_ROWS_FAILED if failed and not talks else ExitCode.DONE


def _given(options: ChatOptions) -> dict[str, Any]:
    """Return what flags say of sampling."""
    names = ("max_tokens", "temperature", "top_p", "top_k", "seed")
    given = {name: getattr(options, name) for name in names}
    if options.max_tokens is not None and options.max_tokens < 1:
        raise ValueError(f"--max-tokens must be at least 1, got {options.max_tokens}")
    return {name: value for name, value in given.items() if value is not None}


def _open(options: ChatOptions) -> LLM:
    if options.directory is not None and options.model not in (None, options.directory):
        raise ValueError(f"'{options.directory}' and --model '{options.model}': give one of them")
    if options.directory is None and options.model is None and options.plan is None:
        raise ValueError("no model to talk to; give its directory: llmpq-dist chat DIR")
    planned = options.plan is not None
    return LLM(
        options.model if options.directory is None else options.directory,
        plan=load_plan(str(options.plan)) if planned else None,
        options=options.engine,
        max_num_seqs=None if planned else 1,
    )


def _sampling(llm: LLM, given: dict[str, Any]) -> SamplingParams:
    default = llm.get_default_sampling_params()
    if "max_tokens" not in llm.generation_config.sampling:
        default = replace(default, max_tokens=None)
    return replace(default, **given)


def _talk(
    chat: Talk,
    llm: LLM,
    runner: asyncio.Runner,
    params: SamplingParams,
    ctrl_c: CtrlC,
    *,
    talks: bool,
) -> bool:
    """Answer line after line; return whether one was refused."""
    failed = False
    for line in _lines(ctrl_c, talks=talks):
        text: str | None = line
        if line.startswith("/"):
            text, end = _obey(chat, line)
            if end:
                break
        if text is None:
            continue
        try:
            _answer(chat, llm, runner, text, params, ctrl_c)
            if ctrl_c.was_pressed and not talks:
                raise KeyboardInterrupt  # of a pipe's lines, all that are left
        except (ValueError, RequestFailedError) as error:
            failed = True
            chat.undo()
            hint = "; /reset begins a new conversation" if chat.is_talk else ""
            sys.stderr.write(f"{error}{hint}\n")
    return failed


def _lines(ctrl_c: CtrlC, *, talks: bool) -> Iterator[str]:
    """Yield what the user types, or a pipe brings; blank lines drop."""
    if talks:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 (input() edits lines by it)
    parts: list[str] = []
    while True:
        try:
            sys.stdout.flush()
            ctrl_c.at_prompt, ctrl_c.was_pressed = True, False
            line = input(("... " if parts else "> ") if talks else "")
            ctrl_c.at_prompt = False
        except EOFError:
            if talks:
                sys.stdout.write("\n")
            if any(parts):
                yield "\n".join(parts)
            return
        except KeyboardInterrupt:
            ctrl_c.at_prompt = False
            if not talks or not ctrl_c.was_pressed:  # SIGTERM, which ends the command
                raise
            parts = []
            sys.stdout.write("\n(Ctrl-D or /exit ends)\n")
            continue
        if line.endswith("\\"):
            parts.append(line[:-1])
            continue
        whole, parts = "\n".join([*parts, line]), []
        if whole.strip():
            yield whole


def _obey(chat: Talk, line: str) -> tuple[str | None, bool]:
    """Do what a command says; return a text to answer, if any, and whether to end."""
    word, _, rest = line.partition(" ")
    if word in ("/exit", "/quit", "/bye"):
        return None, True
    if word == "/help":
        sys.stdout.write(_HELP)
    elif word == "/again":
        text = chat.undo()
        if text is None:
            sys.stderr.write("there is nothing to answer anew\n")
        return text, False
    elif word in ("/reset", "/system", "/undo") and not chat.is_talk:
        sys.stderr.write(f"{_NO_TALK}\n")
    elif word == "/reset":
        chat.reset()
    elif word == "/system":
        chat.set_system(rest.strip() or None)
    elif word == "/undo":
        chat.undo()
    else:
        sys.stderr.write(f"unknown command {word}; /help lists them\n")
    return None, False


def _answer(
    chat: Talk, llm: LLM, runner: asyncio.Runner, text: str, params: SamplingParams, ctrl_c: CtrlC
) -> None:
    """Write the answer to a text as it comes; Ctrl-C ends it, and what there is of it counts."""
    pieces: list[str] = []

    def write(piece: str) -> None:
        pieces.append(piece)
        sys.stdout.write(piece)
        sys.stdout.flush()

    async def stream(prompt: Prompt) -> None:
        async with contextlib.aclosing(llm.stream(prompt, params)) as answer:
            with ctrl_c.ends_this_task():
                async for piece in answer:
                    write(piece)
                    if ctrl_c.was_pressed:
                        break

    prompt = chat.say(text)
    if not chat.is_talk:
        write(text)
    with contextlib.suppress(asyncio.CancelledError):
        runner.run(stream(prompt))
    sys.stdout.write(" [stopped]\n" if ctrl_c.was_pressed else "\n")
    sys.stdout.flush()
    chat.answered("".join(pieces))
