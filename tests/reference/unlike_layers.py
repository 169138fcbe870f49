"""Published models' layers made small, of models whose layers mix tokens in unlike ways."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.models.model_spec import ModelSpec

SMALL: dict[str, Any] = {
    "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocab": 96, "rotary_dim": None,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"ffn": 32, "experts": 4, "experts_per_token": 2, "shared_ffn": 32}
DELTA: dict[str, Any] = {
    "channels": 128, "heads": 4, "key_heads": 2, "key_dim": 16, "value_dim": 16,
}  # fmt: skip
MAMBA: dict[str, Any] = {
    "channels": 128, "heads": 4, "key_heads": 2, "key_dim": 16, "value_dim": 16,
}  # fmt: skip


def small(name: str, form: dict[str, Any] | None = None, **changed: Any) -> ModelSpec:
    """Return a published model's layers, eight of them, small ones."""
    spec = ModelSpec.by_name(name)
    whole = {"num_layers": 8, "mixers": spec.mixers[:8], "windows": spec.windows[:8]}
    whole["without_mlp"] = tuple(n for n in spec.without_mlp if n < 8)
    if spec.recurrent is not None:
        whole["recurrent"] = replace(spec.recurrent, **(form or {}))
    return replace(spec, **{**SMALL, **whole, **changed})


NEXT = small("qwen3-next-80b-a3b", DELTA, **EXPERTS)
DENSE = small("qwen3.5-27b", DELTA, ffn=32)
NANO = small("nemotron-3-nano-30b-a3b", MAMBA, **EXPERTS)
