"""GGUF keys of Gemma, and of other models whose layers see a window or all tokens.

Of Gemma 4, the plain keys are those of layers that see all tokens, `*_swa` those of windowed ones.
Gemma 3n's cut-offs of gates are in standard deviations above the mean, config.json's are shares.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from llmpq.checkpoints.gguf_metadata import REAL, Metadata

GEMMA_27B = {"gemma2": 46, "gemma3": 62}
"""Layers of the one size whose scores are scaled by hidden / heads, not by a head's channels."""
SLIDING, FULL = "sliding_attention", "full_attention"


def gemma(kind: str) -> Callable[[Metadata, dict[str, Any]], None]:
    """Return what reads Gemma 2 or 3."""

    def also(metadata: Metadata, config: dict[str, Any]) -> None:
        largest = config["num_hidden_layers"] == GEMMA_27B[kind]
        whole = config["hidden_size"] // config["num_attention_heads"]
        config["query_pre_attn_scalar"] = whole if largest else config["head_dim"]
        scale = metadata.get("attention.scale")
        if scale:
            config["query_pre_attn_scalar"] = float(scale) ** -2
        metadata.number("attention.sliding_window")
        layer_types(metadata, config)
        config |= {
            f"{short}_logit_softcapping": metadata.get(f"{short}_logit_softcapping")
            for short in ("attn", "final")
        }
        if kind == "gemma3":
            _thetas(metadata, config)

    return also


def _thetas(metadata: Metadata, config: dict[str, Any]) -> None:
    """Say by what windowed layers rotate, and by what the others do."""
    config["rope_local_base_freq"] = metadata.number("rope.freq_base_swa", REAL, default=10000.0)
    config["rope_theta"] = metadata.number("rope.freq_base", REAL, default=1e6)


def gemma3n(metadata: Metadata, config: dict[str, Any]) -> None:
    """Gemma 3n; the rank of LAuReL is its matrices'."""
    layer_types(metadata, config)
    _thetas(metadata, config)
    count, tensors = config["num_hidden_layers"], metadata.file.tensors
    laurel, inputs = "blk.0.laurel_l.weight", "per_layer_token_embd.weight"
    if laurel not in tensors or inputs not in tensors:
        raise ValueError(
            f"'{metadata.file.path}' has no tensor '{laurel}' or '{inputs}': it is not a whole "
            "model; download it again"
        )
    cuts = metadata.get("activation_sparsity_scale") or [-math.inf] * count
    config |= {
        "intermediate_size": metadata.of_layers("feed_forward_length", count),
        "num_kv_shared_layers": metadata.get("attention.shared_kv_layers") or 0,
        "hidden_size_per_layer_input": metadata.number("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": tensors[inputs].shape[0],
        "altup_num_inputs": metadata.number("altup.num_inputs"),
        "altup_active_idx": metadata.get("altup.active_idx") or 0,
        "altup_correct_scale": "blk.0.altup_correct_scale.weight" in tensors,
        "laurel_rank": tensors[laurel].shape[0],
        "activation_sparsity_pattern": [round(_share_below(cut), 6) for cut in cuts],
        "final_logit_softcapping": metadata.get("final_logit_softcapping"),
    }
    config.pop("mlp_bias")


def _share_below(cut: float) -> float:
    """Return the share of normally distributed values that lie below so many deviations."""
    return (1 + math.erf(cut / math.sqrt(2))) / 2


def gemma4(metadata: Metadata, config: dict[str, Any]) -> None:
    """Gemma 4; layers without values of their own take keys for them."""
    layer_types(metadata, config)
    _thetas(metadata, config)
    count, wide = config["num_hidden_layers"], config["head_dim"]
    heads, ffn = (
        metadata.of_layers(key, count) for key in ("attention.head_count_kv", "feed_forward_length")
    )
    kinds = config.get("layer_types")
    if kinds is None or FULL not in kinds:
        raise ValueError(
            f"'{metadata.file.path}': attention.sliding_window_pattern must say of each of {count} "
            "layers whether it sees a window, and one must see all tokens; convert the model again"
        )
    first = kinds.index(FULL)
    small = metadata.number("attention.key_length_swa", default=wide)
    for key in ("attention.value_length_swa", "rope.dimension_count_swa"):
        if metadata.number(key, default=small) != small:
            raise ValueError(
                f"'{metadata.file.path}': windowed layers have heads of {small} channels, and "
                f"{key}={metadata.get(key)}; expected the same number"
            )
    tensors = metadata.file.tensors
    inputs = tensors.get("per_layer_token_embd.weight")
    config |= {
        "head_dim": small,
        "global_head_dim": wide,
        "num_key_value_heads": heads[kinds.index(SLIDING) if SLIDING in kinds else first],
        "num_global_key_value_heads": heads[first],
        "attention_k_eq_v": f"blk.{first}.attn_v.weight" not in tensors,
        "num_kv_shared_layers": metadata.get("attention.shared_kv_layers") or 0,
        "use_double_wide_mlp": ffn[-1] > ffn[0],
        "hidden_size_per_layer_input": metadata.get("embedding_length_per_layer_input") or 0,
        "vocab_size_per_layer_input": inputs.shape[0] if inputs else config["vocab_size"],
        "final_logit_softcapping": metadata.get("final_logit_softcapping"),
        "enable_moe_block": bool(metadata.get("expert_count")),
    }
    wide_expert = metadata.get("expert_feed_forward_length")
    if config["enable_moe_block"]:
        config |= {
            "num_experts": metadata.number("expert_count"),
            "top_k_experts": metadata.number("expert_used_count"),
            "moe_intermediate_size": wide_expert,
        }


def layer_types(metadata: Metadata, config: dict[str, Any]) -> None:
    """Say which layers see a window, where the file does: EXAONE 4, Command R7B and A, Gemma."""
    config["sliding_window"] = metadata.get("attention.sliding_window")
    pattern = metadata.get("attention.sliding_window_pattern")
    if type(pattern) is int:
        config["sliding_window_pattern"] = pattern
    elif isinstance(pattern, list):
        config["layer_types"] = [SLIDING if windowed else FULL for windowed in pattern]
    elif not config["sliding_window"]:
        config["layer_types"] = [FULL] * config["num_hidden_layers"]
