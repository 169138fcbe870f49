"""gpt-oss: windows on every other layer, a sink per head, experts with clamped gates and biases.

    softmax over the scores and one more, the sink, which brings no value
    w = softmax over the k largest of router(x)
    expert = down(g sigmoid(1.702 g) (u + 1)) with g = min(gate, 7), u = clamp(up, -7, 7)

Experts are stored in one tensor a layer, transposed, gate and up in turn; or as MXFP4 codes; in
quantised checkpoints one by one, as llm-compressor writes them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.families import llama
from llmpq.families.common.config_values import Config, flag, number
from llmpq.families.common.mixture_config import counts
from llmpq.families.common.record import Arrange, linear_names
from llmpq.families.common.rotary_families import alternating, layer_kinds, rotary_fields, windows
from llmpq.families.common.spec_values import Router

FULL_EVERY = 2


def fields(config: Config) -> dict[str, Any]:
    """Return the fields of `ModelSpec`."""
    bias = flag(config, "attention_bias")
    return {
        **rotary_fields(config),
        **counts(config, "num_local_experts", "num_experts"),
        "activation": "clamped_silu",
        "activation_limit": number(config, "swiglu_limit"),
        "activation_slope": number(config, "swiglu_alpha"),
        "qkv_bias": bias,
        "linear_bias": True,
        "o_bias": None if bias else False,
        "windows": windows(config, layer_kinds(config, alternating(config, FULL_EVERY))),
        "sinks": True,
        "router": Router(bias=True),
    }


def _in_turn(rows: Any, spec: Any) -> Any:
    """Return gates, then ups, of rows that are a gate and an up in turn."""
    by_pair = rows.view(spec.ffn, 2, *rows.shape[1:])
    return by_pair.transpose(0, 1).reshape(rows.shape)


_EXPERTS = "layers.{i}.mlp.experts"
FAMILY = replace(
    llama.FAMILY,
    name="gpt_oss",
    model_types=("gpt_oss",),
    published_as="mxfp4",
    codes_unread="experts",
    fields=fields,
    names=replace(
        llama.FAMILY.names,
        layer={
            **llama.NORMS,
            **llama.QKV,
            **llama.OUT,
            "sinks": ("layers.{i}.self_attn.sinks",),
            "router.weight": ("layers.{i}.mlp.router.weight",),
            "router.bias": ("layers.{i}.mlp.router.bias",),
            "experts.{e}.gate_up.weight": (f"{_EXPERTS}.gate_up_proj[{{e}}]^T",),
            "experts.{e}.gate_up.bias": (f"{_EXPERTS}.gate_up_proj_bias[{{e}}]",),
            "experts.{e}.down.weight": (f"{_EXPERTS}.down_proj[{{e}}]^T",),
            "experts.{e}.down.bias": (f"{_EXPERTS}.down_proj_bias[{{e}}]",),
        },
        apart=dict(
            linear_names(
                (
                    "experts.{e}.gate_up",
                    (f"{_EXPERTS}.{{e}}.gate_proj", f"{_EXPERTS}.{{e}}.up_proj"),
                ),
                ("experts.{e}.down", (f"{_EXPERTS}.{{e}}.down_proj",)),
            )
        ),
        arrange={
            f"experts.{{e}}.gate_up.{kind}": Arrange(rows=_in_turn) for kind in ("weight", "bias")
        },
    ),
)
