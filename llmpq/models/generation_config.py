"""`generation_config.json`: the tokens that end an answer, and how its author samples.

As in vLLM, its end tokens count beside those of config.json, and its sampling values are the
defaults of requests that state none. Tokens that it suppresses are never chosen (Gemma 4's marks of
pictures and sound). What else would change answers is not obeyed, and said. Standard library only.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llmpq.checkpoints.gguf_file import is_gguf
from llmpq.models.model_spec import ModelSpec

NAME = "generation_config.json"
AUTO, IGNORED = "auto", "vllm"
"""The model's own file; none, which has vLLM's word for it."""
IGNORE = f"correct it, or ignore the file: --generation-config {IGNORED}"
_SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""What is read of sampling -> what `SamplingParams` calls it."""


_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "begin_suppress_tokens": ([],),
    "bad_words_ids": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "sequence_bias": ({}, []),
    "no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "exponential_decay_length_penalty": (),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "stop_strings": ([], ""),
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "top_h": (),
    "penalty_alpha": (0,),
    "guidance_scale": (1,),
    "watermarking_config": (),
    "num_beams": (1,),
    "num_beam_groups": (1,),
}
"""Keys that would change answers and are not obeyed -> their values, beside null, that change
nothing."""


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """What a model's author says of its answers."""

    path: Path | None = None
    """Where that was read; None where there is no file, or it is ignored."""
    eos_token_ids: tuple[int, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Values by the names of `SamplingParams`; not checked."""
    suppressed: tuple[int, ...] = ()
    """Tokens that are never chosen."""
    not_obeyed: Mapping[str, Any] = field(default_factory=dict)
    """What it says besides that would change answers."""

    def applied_to(self, spec: ModelSpec) -> ModelSpec:
        """Return a model whose answers end at these tokens, too, and have none that is suppressed.

        Tokens that the model does not have are left out.
        """

        def known(tokens: Iterable[int]) -> tuple[int, ...]:
            return tuple(token for token in dict.fromkeys(tokens) if 0 <= token < spec.vocab)

        ends = known([*spec.eos_token_ids, *self.eos_token_ids])
        return replace(spec, eos_token_ids=ends, suppressed=known(self.suppressed))


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
    found = {
        ours: data[theirs] for theirs, ours in _SAMPLING.items() if data.get(theirs) is not None
    }
    return GenerationConfig(
        path=path,
        eos_token_ids=_tokens(data, "eos_token_id", path),
        sampling=found,
        suppressed=_tokens(data, "suppress_tokens", path),
        not_obeyed={
            key: data[key]
            for key, neutral in _NEUTRAL.items()
            if data.get(key) is not None and data[key] not in neutral
        },
    )


def _tokens(data: Mapping[str, Any], key: str, path: Path) -> tuple[int, ...]:
    """Return the tokens that a key names: one, a list, or none."""
    given = data.get(key)
    tokens = given if isinstance(given, list) else [] if given is None else [given]
    if not all(type(token) is int for token in tokens):
        raise ValueError(
            f"'{path}': '{key}' must be a token id or a list of them, got "
            f"{reprlib.repr(given)}; {IGNORE}"
        )
    return tuple(tokens)
