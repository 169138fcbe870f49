"""Flags made from `EngineOptions`: name, choices, default and help are those of the field.

Imports no torch and no Ray, so that `--help` is instant.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, get_type_hints

from llmpq.commands.command_line import Only, Section, token_count
from llmpq.runtime.options.engine_options import (
    PLANNING,
    STATED,
    Deadlines,
    EngineOptions,
    choices,
    field_docs,
)

_TOKENS = ("max_model_len", "max_num_batched_tokens")
_VALUES = {
    "revision": "NAME",
    "quantization": "METHOD",
    "cluster": "YAML",
    "dtype": "DTYPE",
    "kv_cache_dtype": "KV",
    "costs": "FILE",
    "generation_config": "DIR",
    "layer_cache": "DIR",
    "ray_address": "ADDRESS",
    "master_addr": "IP",
    "master_port": "PORT",
    "network_interface": "NAME",
    "trace": "FILE",
    "deadlines": "NAME=S,...",
    "speculate": "MODE",
    "gpu_memory_utilization": "SHARE",
    "min_quality": "BITS",
    "head_bits": "8|16",
}
"""What stands for a flag's value in `--help`; N for the others."""
_ALSO = {
    "ray_address": ("--address", "--from-ray"),
    "tensor_parallel_size": ("-tp",),
    "quantization": ("-q",),
}
REPLANS = Only(lambda a: a.on_loss == "replan", "without --on-loss replan", "add that")
UNPLANNED = Only(lambda a: a.plan is None, "with --plan, whose plan says it", "re-plan")


def add_engine_flags(
    section: Section,
    *names: str,
    daily: Collection[str] = (),
    only: Only | None = None,
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Declare the flags of these fields of `EngineOptions`; `only`: when they have an effect.

    `daily`: those that the short help shows. `defaults`: those of a command that has others.
    """
    types, docs, usual = get_type_hints(EngineOptions), field_docs(), EngineOptions()
    for name in names:
        default = defaults.get(name, getattr(usual, name))
        flag, options = "--" + name.replace("_", "-"), dict[str, Any](help=_help(docs[name]))
        conditions = [UNPLANNED] if name in PLANNING and name not in STATED else []
        conditions += [REPLANS] if name == "min_quality" else []
        conditions += [] if only is None else [only]
        options |= {"dest": name, "default": default}
        if types[name] is bool:
            if default:
                flag, options["help"] = (
                    f"--no-{name.replace('_', '-')}",
                    f"do not {options['help']}",
                )
            options["action"] = "store_false" if default else "store_true"
        elif name in choices() and name != "speculate":
            options["choices"] = choices()[name]
        else:
            options |= {"type": _reader(name, types[name]), "metavar": _VALUES.get(name, "N")}
        section.flag(
            flag, also=_ALSO.get(name, ()), daily=name in daily, only=conditions, **options
        )


def _help(text: str) -> str:
    """Return a docstring as a line of `--help`."""
    text = text.rstrip(".")
    return text if text[1:2].isupper() else text[0].lower() + text[1:]


def _reader(name: str, kind: Any) -> Callable[[str], Any]:
    if name == "max_model_len":
        return _longest
    if name in _TOKENS:
        return token_count
    if name == "deadlines":
        return _deadlines
    if name == "gamma":
        return _gamma
    if name == "head_bits":
        return int
    return int if kind in (int, int | None) else float if kind == float | None else str


def _longest(text: str) -> int | None:
    """Read a number of tokens; vLLM's words for as many as fit are what is so without the flag."""
    return None if text in ("auto", "-1") else token_count(text)


def _deadlines(text: str) -> Deadlines:
    try:
        return Deadlines.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _gamma(text: str) -> int | str:
    return int(text) if text.isdigit() else text
