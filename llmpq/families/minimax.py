"""MiniMax-Text-01 and M1: lightning attention, every few layers attention, and Mixtral's mixture.

n = norm(x); x = a n + b mixer(n);  n = norm(x); x = a' n + b' mixture(n)
lightning attention: runtime/models/recurrent.py; attention: Llama's

A part of each head is rotated where `rotary_dim` says so.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.families import minimax_m2, mixtral
from llmpq.families.common.config_values import Config, head_size, is_given, number
from llmpq.families.common.mixture_config import counts
from llmpq.families.common.record import Arrange
from llmpq.families.common.recurrent_config import mixer_names, mixers
from llmpq.families.common.rotary_families import rotary_fields, window_size
from llmpq.families.common.spec_values import NormedStream, Recurrent


def fields(config: Config) -> dict[str, Any]:
    """Return the fields of `ModelSpec`."""
    base = rotary_fields(config)
    if is_given(config.get("rotary_dim")):  # the makers' code reads it, Transformers does not
        base["rotary_dim"] = minimax_m2.rotated_channels(config)
    config.get("block_size")  # how prompts are cut; sums are the same
    kinds = ["linear_attention" if i % 2 else "full_attention" for i in range(base["num_layers"])]
    found = mixers(config, kinds, recurrent={"linear_attention"})
    heads, dim, window = base["heads"], head_size(config), window_size(config)

    def factors(of: str) -> tuple[float, float]:
        return number(config, f"{of}_alpha_factor"), number(config, f"{of}_beta_factor")

    return {
        **base,
        **counts(config, "num_local_experts"),
        "windows": tuple(window if mixer == "attention" else 0 for mixer in found)
        if window
        else (),
        "mixers": found,
        "recurrent": Recurrent(
            kind="lightning",
            taps=1,
            channels=3 * heads * dim,
            heads=heads,
            key_heads=heads,
            key_dim=dim,
            value_dim=dim,
            norm_first=True,
            gate="sigmoid",
        ),
        "normed_stream": NormedStream(
            attention=factors("full_attn"), recurrent=factors("linear_attn"), mlp=factors("mlp")
        ),
    }


def _by_part(rows: Any, spec: Any) -> Any:
    """Return queries, keys, values, gates of rows that begin with all three of every head."""
    form = spec.recurrent
    by_head = rows[: form.channels].view(form.heads, 3, form.key_dim, *rows.shape[1:])
    out = rows.clone()
    out[: form.channels] = by_head.transpose(0, 1).reshape(form.channels, *rows.shape[1:])
    return out


_LIGHTNING = "layers.{i}.self_attn"
FAMILY = replace(
    mixtral.FAMILY,
    name="minimax",
    model_types=("minimax",),
    fields=fields,
    names=replace(
        mixtral.FAMILY.names,
        layer={
            **mixtral.FAMILY.names.layer,
            **mixer_names(_LIGHTNING),
            "mixer_in.weight": (
                f"{_LIGHTNING}.qkv_proj.weight",
                f"{_LIGHTNING}.output_gate.weight",
            ),
        },
        arrange={"mixer_in.weight": Arrange(rows=_by_part)},
    ),
)
