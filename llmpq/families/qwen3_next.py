"""Qwen3-Next: three layers of the gated delta rule to one of attention, and a mixture with a gate.

    attention: runtime/models/layers.py, what it gives times the sigmoid of a gate
    delta rule: runtime/models/recurrent.py
    y = sum of w_e expert_e(x) + sigmoid(g . x) shared(x)

Norms store what they exceed one by, but for the one behind the delta rule. The module that predicts
a further token (MTP) drafts, where it is asked to.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.families import llama, qwen3_moe
from llmpq.families.common.config_values import Config, flag, size
from llmpq.families.common.mixture_config import counts, expert_names
from llmpq.families.common.record import ABOVE_ONE, MODULE_MTP, Arrange, linear_names
from llmpq.families.common.recurrent_config import gated_delta, mixer_names, mixers
from llmpq.families.common.rotary_families import rotary_fields
from llmpq.families.common.spec_values import Router

_ATTENTION_EVERY = 4


def fields(config: Config) -> dict[str, Any]:
    """Return the fields of `ModelSpec`."""
    base = {**rotary_fields(config, partial_rotary=True), **hybrid_fields(config)}
    return {**base, **mixture(config, base["ffn"])}


def hybrid_fields(config: Config) -> dict[str, Any]:
    """Return the fields of gated attention, of the delta rule, and which layers have which."""
    bias = flag(config, "attention_bias", default=False)
    count = size(config, "num_hidden_layers")
    every = size(config, "full_attention_interval", default=_ATTENTION_EVERY)
    default = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(count)]
    heads, key_heads = (size(config, f"linear_num_{kind}_heads") for kind in ("value", "key"))
    key_dim, value_dim = (size(config, f"linear_{kind}_head_dim") for kind in ("key", "value"))
    return {
        "qk_norm": True,
        "qkv_bias": bias,
        "o_bias": bias or None,
        "attention_gate": True,
        "mixers": mixers(config, default, recurrent={"linear_attention"}),
        "recurrent": gated_delta(
            config, heads=heads, key_heads=key_heads, key_dim=key_dim, value_dim=value_dim
        ),
    }


def mixture(config: Config, ffn: int) -> dict[str, Any]:
    """Return the fields of a mixture beside a gated MLP."""
    return {
        **counts(config, "num_experts", "num_local_experts"),
        "ffn": size(config, "moe_intermediate_size"),
        "shared_ffn": size(config, "shared_expert_intermediate_size"),
        "shared_gate": True,
        "router": Router(normalise=flag(config, "norm_topk_prob", default=True)),
        **qwen3_moe.dense_layers(config, ffn),
    }


def gate_behind(rows: Any, spec: Any) -> Any:
    """Return queries, keys, values, gates of rows that begin with a query and a gate per head."""
    both = 2 * spec.heads * spec.head_dim
    by_head = rows[:both].view(spec.heads, 2, spec.head_dim, *rows.shape[1:])
    queries, gates = (by_head[:, i].reshape(both // 2, *rows.shape[1:]) for i in (0, 1))
    return queries.new_empty(rows.shape).copy_(_stacked(queries, rows[both:], gates))


def _by_key_head(rows: Any, spec: Any, *widths: int) -> list[Any]:
    """Return the parts of rows that hold one of each part for every key head in turn."""
    by_head = rows.view(spec.recurrent.key_heads, sum(widths), *rows.shape[1:])
    parts = by_head.split(list(widths), dim=1)
    return [part.reshape(-1, *rows.shape[1:]) for part in parts]


def _qkvz(rows: Any, spec: Any) -> Any:
    form = spec.recurrent
    value = form.heads // form.key_heads * form.value_dim
    return _stacked(*_by_key_head(rows, spec, form.key_dim, form.key_dim, value, value))


def _ba(rows: Any, spec: Any) -> Any:
    shared = spec.recurrent.heads // spec.recurrent.key_heads
    return _stacked(*_by_key_head(rows, spec, shared, shared))


def _stacked(first: Any, *others: Any) -> Any:
    """Return tensors behind each other; torch's, which this file does not import."""
    parts = (first, *others)
    whole, start = first.new_empty((sum(len(p) for p in parts), *first.shape[1:])), 0
    for part in parts:
        whole[start : start + len(part)] = part
        start += len(part)
    return whole


_LINEAR = "layers.{i}.linear_attn"
ATTENTION = {**llama.NORMS, **llama.QKV, **llama.OUT, **llama.HEAD_NORMS}
LAYER = {
    **ATTENTION,
    **mixer_names(
        _LINEAR,
        **{"mixer_in.weight": "in_proj_qkvz.weight", "step.weight": "in_proj_ba.weight"},
    ),
}
_MLP = "layers.{i}.mlp"
_SHARED = f"{_MLP}.shared_expert"
EXPERTS = {
    **expert_names(_MLP),
    **linear_names(
        ("shared.gate_up", (f"{_SHARED}.gate_proj", f"{_SHARED}.up_proj")),
        ("shared.down", (f"{_SHARED}.down_proj",)),
    ),
    "shared_gate.weight": (f"{_MLP}.shared_expert_gate.weight",),
}
ARRANGE = {
    **{
        f"{part}.weight": ABOVE_ONE
        for part in (
            "attn_norm",
            "mlp_norm",
            "q_norm",
            "k_norm",
            "norm",
            "token_norm",
            "hidden_norm",
        )
    },
    "qkv.weight": Arrange(rows=gate_behind),
    "qkv.bias": Arrange(rows=gate_behind),
}
FAMILY = replace(
    llama.FAMILY,
    name="qwen3_next",
    model_types=("qwen3_next",),
    fields=fields,
    names=replace(
        llama.FAMILY.names,
        layer={**LAYER, **EXPERTS},
        dense={**LAYER, **llama.MLP},
        mtp=MODULE_MTP,
        arrange={
            **ARRANGE,
            "mixer_in.weight": Arrange(rows=_qkvz),
            "step.weight": Arrange(rows=_ba),
        },
        otherwise={
            "mixer_in.weight": (f"{_LINEAR}.in_proj_qkv.weight", f"{_LINEAR}.in_proj_z.weight"),
        },
    ),
)
