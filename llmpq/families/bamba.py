"""Bamba: layers of Mamba-2 among layers of attention that rotate half of each head.

Mamba-2: runtime/models/recurrent.py;  MLP: Llama's
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.families import llama
from llmpq.families.common.config_values import Config
from llmpq.families.common.record import linear_names, norm_names
from llmpq.families.common.recurrent_config import mamba2, mixer_names
from llmpq.families.common.rotary_families import rotary_fields


def fields(config: Config) -> dict[str, Any]:
    """Return the fields of `ModelSpec`."""
    base = {**rotary_fields(config, partial_rotary=True), **llama.bias_fields(config)}
    for key in ("attn_rotary_emb", "num_logits_to_keep", "z_loss_coefficient", "layer_types"):
        config.get(
            key
        )  # a half is rotated whatever they say, they are of training, or say the same
    config.get("layers_block_type")
    listed = config.get("attn_layer_indices") or []
    attention = [i in listed for i in range(base["num_layers"])]
    return {
        **base,
        "mixers": tuple("attention" if own else "recurrent" for own in attention),
        "recurrent": mamba2(config),
    }


_MLP = "layers.{i}.feed_forward"
FAMILY = replace(
    llama.FAMILY,
    name="bamba",
    model_types=("bamba",),
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
