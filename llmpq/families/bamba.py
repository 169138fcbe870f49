"""Bamba: layers of Mamba-2 among layers of attention that rotate half of each head.

Mamba-2: runtime/models/recurrent.py;  MLP: Llama's;  tensors are called as Falcon-H1's
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.families import falcon_h1, llama
from llmpq.families.common.config_values import Config
from llmpq.families.common.recurrent_config import mamba2
from llmpq.families.common.rotary_families import rotary_fields


def fields(config: Config) -> dict[str, Any]:
    """Return the fields of `ModelSpec`."""
    base = {**rotary_fields(config, partial_rotary=True), **llama.bias_fields(config)}
    # A half is rotated whatever they say, they are of training, or say the same.
    for key in ("attn_rotary_emb", "num_logits_to_keep", "z_loss_coefficient", "layer_types"):
        config.get(key)
    config.get("layers_block_type")
    listed = config.get("attn_layer_indices") or []
    attention = [i in listed for i in range(base["num_layers"])]
    return {
        **base,
        "mixers": tuple("attention" if own else "recurrent" for own in attention),
        "recurrent": mamba2(config),
    }


FAMILY = replace(falcon_h1.FAMILY, name="bamba", model_types=("bamba",), fields=fields)
