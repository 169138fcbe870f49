"""`generation_config.json`: the tokens that end an answer, and how its author samples.

As in vLLM, its end tokens count beside those of config.json, and its sampling values are the
defaults of requests that state none. Standard library only.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llmpq.checkpoints.gguf_file import is_gguf
from llmpq.model_spec import ModelSpec

NAME = "generation_config.json"
AUTO, IGNORED = "auto", "vllm"
"""The model's own file; none, which has vLLM's word for it."""
IGNORE = (
    f"correct it, or ignore the file: --generation-config {IGNORED} "
    f"(in Python generation_config='{IGNORED}')"
)
_SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""What is read of sampling -> what `SamplingParams` calls it."""


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """What a model's author says of its answers."""

    path: Path | None = None
    """Where that was read; None where there is no file, or it is ignored."""
    eos_token_ids: tuple[int, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Values by the names of `SamplingParams`; not checked."""

    def with_ends(self, spec: ModelSpec) -> ModelSpec:
        """Return a model whose answers end at these tokens, too."""
        known = dict.fromkeys([*spec.eos_token_ids, *self.eos_token_ids])
        return replace(spec, eos_token_ids=tuple(t for t in known if 0 <= t < spec.vocab))


def read_generation_config(directory: str | Path, source: str = AUTO) -> GenerationConfig:
    """Return what a model's directory says, or the one that `source` names instead.

    `ValueError` for a file that cannot be read, or a named directory without one.
    """
    if source == IGNORED or (source == AUTO and is_gguf(directory)):
        return GenerationConfig()
    path = Path(directory if source == AUTO else source) / NAME
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        if source == AUTO:
            return GenerationConfig()
        raise ValueError(
            f"no {NAME} in '{source}'; expected a directory that has one, '{AUTO}' (the model's) "
            f"or '{IGNORED}' (none)"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"'{path}' is not valid JSON: {error}; {IGNORE}") from None
    if not isinstance(data, dict):
        raise ValueError(f"'{path}': got {type(data).__name__}, expected an object; {IGNORE}")
    ends = data.get("eos_token_id", [])
    ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if not all(type(token) is int for token in ends):
        raise ValueError(
            f"'{path}': 'eos_token_id' must be a token id or a list of them, got "
            f"{reprlib.repr(data['eos_token_id'])}; {IGNORE}"
        )
    found = {
        ours: data[theirs] for theirs, ours in _SAMPLING.items() if data.get(theirs) is not None
    }
    return GenerationConfig(path=path, eos_token_ids=tuple(ends), sampling=found)
