"""Falcon-H1: attention and Mamba-2 side by side on one norm, each scaled; a scaled gated MLP.

    x += a attention(norm(x)) + m mamba2(norm(x));  x += d down(silu(g gate) * up) of norm(x)

What scales a layer's input or keys stands in the factor of the scores and of what attention gives.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.families import llama
from llmpq.families.common.config_values import Config, expect, flag, head_size, number, size
from llmpq.families.common.record import linear_names, norm_names
from llmpq.families.common.recurrent_config import mamba2, mixer_names
from llmpq.families.common.rotary_families import rotary_fields


def fields(config: Config) -> dict[str, Any]:
    """Return the fields of `ModelSpec`."""
    base = {**rotary_fields(config), **llama.bias_fields(config)}
    expect(config, "attention_bias", False, default=False)
    for key in ("num_logits_to_keep", "layer_types", "layers_block_type"):
        config.get(key)  # every layer has both
    inner = size(config, "mamba_d_ssm") if config.get("mamba_d_ssm") is not None else None
    form = mamba2(config, inner)
    normed = flag(config, "mamba_rms_norm")
    bias = flag(config, "projectors_bias")
    expect(config, "projectors_bias", form.bias, default=bias)
    gate, down = _numbers(config, "mlp_multipliers", 2)
    of_input = number(config, "attention_in_multiplier")
    columns = _numbers(config, "ssm_multipliers", 5)
    into = number(config, "ssm_in_multiplier")
    if form.bias and into != 1:  # scales what the matrix reads, not its bias
        raise ValueError(
            f"config.json: ssm_in_multiplier={into} beside a bias of Mamba-2's input "
            "(mamba_proj_bias) is not supported; expected 1, or no bias"
        )
    return {
        **base,
        "mixer": "both",
        "recurrent": replace(
            form,
            gated_norm=normed,
            norm_first=normed and flag(config, "mamba_norm_before_gate"),
            in_factors=tuple(into * factor for factor in columns),
            out_factor=number(config, "ssm_out_multiplier"),
        ),
        "score_factor": head_size(config) ** -0.5 * number(config, "key_multiplier") * of_input**2,
        "attention_factor": of_input * number(config, "attention_out_multiplier"),
        "gate_factor": gate,
        "mlp_factor": down,
        "embedding_factor": number(config, "embedding_multiplier"),
        "logit_factor": number(config, "lm_head_multiplier"),
    }


def _numbers(config: Config, key: str, count: int) -> list[float]:
    """Return a list of positive factors; absent ones are 1."""
    found = config.get(key)
    values = [1.0] * count if found is None else found
    if not isinstance(values, list) or len(values) != count:
        raise ValueError(
            f"config.json: '{key}' must be {count} numbers, got {values!r}; correct it or download "
            "config.json again"
        )
    return [number({key: value}, key) for value in values]


_MLP = "layers.{i}.feed_forward"
FAMILY = replace(
    llama.FAMILY,
    name="falcon_h1",
    model_types=("falcon_h1",),
    fields=fields,
    names=replace(
        llama.FAMILY.names,
        layer={
            **norm_names(
                ("attn_norm", "layers.{i}.input_layernorm"),
                ("mlp_norm", "layers.{i}.pre_ff_layernorm"),
            ),
            **llama.QKV,
            **llama.OUT,
            **mixer_names("layers.{i}.mamba"),
            **linear_names(
                ("gate_up", (f"{_MLP}.gate_proj", f"{_MLP}.up_proj")),
                ("down", (f"{_MLP}.down_proj",)),
            ),
        },
        head=norm_names(("norm", "final_layernorm")),
    ),
    behind=("model.final_layernorm", "lm_head"),
)
