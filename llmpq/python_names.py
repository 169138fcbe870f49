"""Errors of the Python API name arguments where those of the commands name flags.

    --max-model-len 32k  ->  max_model_len=32k              an argument of what was called
    --no-stages-apart    ->  stages_apart=False
    --copy-weights       ->  llmpq-dist run --copy-weights  no argument: the command has it
    llmpq-algo --kv 4    ->  llmpq-algo --kv 4              a command to type

Errors are raised with flags, as most of what is run is; the front door (`llmpq.LLM`,
`llmpq.make_plan`) spells them anew. Standard library only.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, is_dataclass
from functools import partial, wraps
from typing import Any

from llmpq.errors import LlmpqError, nearest

_COMMAND = re.compile(r"((?:llmpq-\w+|ray start|hf \w+|pip install)\b[^;:,()]*)")
_FLAG = re.compile(
    r"(?<![\w-])--(?P<no>no-)?(?P<name>[a-z][\w-]*)"
    r"(?:[ =](?P<value>[A-Z0-9][\w:.,+=-]*|auto\b|off\b|exact\b|vllm\b))?"
)
COMMAND_OF = {"LLM": "llmpq-dist run", "make_plan": "llmpq-algo"}
"""The command that has what an argument does not say."""
ALSO: Mapping[str, Mapping[str, str]] = {
    "LLM": {
        "kv": "kv_cache_dtype",
        "batch": "max_num_seqs",
        "context": "max_model_len",
        "prefix_cache": "enable_prefix_caching",
    },
    "make_plan": {"time_limit": "time_limit_s"},
}
"""Flag -> the argument that says the same under another name."""


def in_python(text: str, arguments: Collection[str], called: str) -> str:
    """Return an error's text with the arguments of what was called in place of flags."""

    def spelled(found: re.Match[str]) -> str:
        name = found["name"].replace("-", "_")
        name = ALSO[called].get(name, name)
        if name not in arguments:
            return f"{COMMAND_OF[called]} {found[0]}"
        value = "False" if found["no"] else found["value"]
        if value is not None and re.fullmatch(r"[a-z]+|\d+[a-z]\w*", value):
            value = repr(value)
        return name if value is None else f"{name}={value}"

    parts = _COMMAND.split(text)  # what is in the brackets has odd places
    return "".join(part if i % 2 else _FLAG.sub(spelled, part) for i, part in enumerate(parts))


def python_door(value: Any) -> Any:
    """Return a class or a function whose errors name its arguments."""
    if not isinstance(value, type):
        return _spelling(value, _arguments(value), value.__name__)
    options = _arguments(value)
    own: dict[str, Any] = {"__module__": value.__module__, "__doc__": value.__doc__}
    for name, function in vars(value).items():
        if inspect.isfunction(function) and (name == "__init__" or not name.startswith("_")):
            if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
                continue
            known = options | _arguments(function)
            own[name] = _spelling(function, known, value.__name__)
    return type(value.__name__, (value,), own)


def _arguments(called: Any) -> set[str]:
    """Return names of arguments, and of the fields of dataclasses that are among them."""
    parameters = inspect.signature(called).parameters
    names, module = set(parameters), vars(sys.modules[called.__module__])
    for word in re.findall(r"\w+", " ".join(str(p.annotation) for p in parameters.values())):
        kind = module.get(word)
        if isinstance(kind, type) and is_dataclass(kind):
            names |= {field.name for field in fields(kind)}
    return names


def _spelling(function: Any, arguments: Collection[str], called: str) -> Any:
    spell: Callable[[str], str] = partial(in_python, arguments=arguments, called=called)
    parameters = inspect.signature(function).parameters
    named = [p.name for p in parameters.values() if p.kind is not p.POSITIONAL_ONLY]
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    whose = called if called == function.__name__ else f"{called}.{function.__name__}"

    @wraps(function)
    def door(*args: Any, **options: Any) -> Any:
        for name in () if takes_all else options:
            if name not in named:
                raise TypeError(
                    f"{whose} has no argument '{name}': {nearest(name, named)}see help({whose})"
                )
        try:
            return function(*args, **options)
        except (ValueError, LlmpqError) as error:
            error.args = tuple(spell(arg) if isinstance(arg, str) else arg for arg in error.args)
            raise

    return door
