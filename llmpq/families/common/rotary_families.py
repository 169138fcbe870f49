"""Shared by families since Llama: RMSNorm, rotary positions, grouped heads, gated MLPs."""

from __future__ import annotations

from typing import Any

from llmpq.families.common.config_values import Config, epsilon, expect, flag, is_given, size
from llmpq.families.common.plain_families import plain_activation
from llmpq.families.common.rope import rope_fields

SLIDING, FULL = "sliding_attention", "full_attention"
"""Transformers' `layer_types`."""
CALLED = {"gelu_tanh": "gelu_pytorch_tanh"}
"""Our name of an activation -> Transformers', where it is another."""


def rotary_fields(
    config: Config,
    *,
    activation: str = "silu",
    also_called: str | None = None,
    eps_key: str = "rms_norm_eps",
    partial_rotary: bool = False,
    ffn_key: str = "intermediate_size",
    knows: tuple[str, ...] = (),
    fixed_alpha: bool = False,
) -> dict[str, Any]:
    """Return the fields that these families share.

    `also_called`: another word of the family's for its activation. `partial_rotary`: whether
    `partial_rotary_factor` means something to it. `knows`, `fixed_alpha`: as in `rope_fields`.
    """
    known = CALLED.get(activation, activation)
    key = "hidden_activation" if config.get("hidden_activation") is not None else "hidden_act"
    if config.get(key) != also_called:
        expect(config, key, known, default=known)
    rope = rope_fields(config, knows=knows, fixed_alpha=fixed_alpha)
    if rope["rotary_dim"] is not None and not partial_rotary:
        raise ValueError(
            f"config.json: model_type '{config.get('model_type')}' rotates whole heads, "
            "partial_rotary_factor says that only a part is rotated; remove it if the model was "
            "trained without it"
        )
    return {
        **_shapes(config, ffn_key, None),
        **rope,
        "norm": "rmsnorm",
        "norm_eps": epsilon(config, eps_key),
        "activation": activation,
        "gated": True,
        "qkv_bias": False,
        "linear_bias": False,
        "tied_embeddings": flag(config, "tie_word_embeddings", default=False),
    }


def plain_rotary_fields(
    config: Config, *, eps_key: str = "layer_norm_eps", ffn: int | None = None
) -> dict[str, Any]:
    """Return the fields of families with LayerNorm, rotary positions and MLPs without a gate.

    `ffn`: the MLP's width where the config does not say it.
    """
    return {
        **_shapes(config, "intermediate_size", ffn),
        **rope_fields(config),
        "norm": "layernorm",
        "norm_eps": epsilon(config, eps_key),
        "activation": plain_activation(config, "hidden_act"),
        "gated": False,
        "tied_embeddings": flag(config, "tie_word_embeddings", default=False),
    }


def _shapes(config: Config, ffn_key: str, ffn: int | None) -> dict[str, Any]:
    """Return the sizes of a model with rotary positions."""
    heads = size(config, "num_attention_heads")
    return {
        "num_layers": size(config, "num_hidden_layers"),
        "hidden": size(config, "hidden_size"),
        "heads": heads,
        "kv_heads": size(config, "num_key_value_heads", default=heads),
        "ffn": size(config, ffn_key, default=ffn),
        "vocab": size(config, "vocab_size"),
        "positions": "rotary",
    }


def window_size(config: Config) -> int:
    """Return the tokens that a windowed layer sees, itself included; 0 where all are seen."""
    if not is_given(config.get("sliding_window")):
        return 0
    return size(config, "sliding_window")


def layer_kinds(config: Config, default: list[str], *, windowed: str = SLIDING) -> list[str]:
    """Return `layer_types`, one per layer, each `windowed` or full."""
    kinds = config.get("layer_types")
    if kinds is None:
        return default
    count = size(config, "num_hidden_layers")
    if not isinstance(kinds, list) or len(kinds) != count:
        raise ValueError(
            f"config.json: 'layer_types' must name the kind of each of {count} layers; correct it "
            "or download config.json again"
        )
    other = sorted({str(kind) for kind in kinds} - {windowed, FULL})
    if other:
        raise ValueError(
            f"config.json: layers of type '{other[0]}' are not supported; expected '{windowed}' or "
            f"'{FULL}'"
        )
    return kinds


def alternating(config: Config, every: int) -> list[str]:
    """Return kinds of layers of which every `every`-th sees all tokens, the others a window."""
    count = size(config, "num_hidden_layers")
    return [SLIDING if (i + 1) % every else FULL for i in range(count)]


def windows(config: Config, kinds: list[str]) -> tuple[int, ...]:
    """Return each layer's window, 0 for all tokens; nothing where no layer has one."""
    window = window_size(config)
    found = tuple(window if kind == SLIDING else 0 for kind in kinds)
    return found if any(found) else ()


def everywhere(config: Config) -> tuple[int, ...]:
    """Return the windows of a model whose layers all have the config's, whatever `layer_types` say.

    So Transformers runs these families; `ValueError` where `layer_types` are unlike and a window is
    given, which other engines heed.
    """
    every = [SLIDING] * size(config, "num_hidden_layers")
    kinds = layer_kinds(config, every)
    if len(set(kinds)) > 1 and window_size(config):
        raise ValueError(
            "config.json: 'layer_types' are of both kinds, and Transformers gives every layer of "
            "this family the sliding_window; remove the one or the other"
        )
    return windows(config, every)


def pairs_to_halves(rows: Any, heads: int, head_dim: int, rotated: int) -> Any:
    """Return rows [heads * head_dim, ...] of queries or keys whose rotated channels lie in pairs.

    Checkpoints that rotate (0, 1), (2, 3), ... get channels 0, 2, ... first and 1, 3, ... behind,
    so that halves are rotated; what queries and keys give together is the same.
    """
    by_head = rows.view(heads, head_dim, *rows.shape[1:])
    order = [*range(0, rotated, 2), *range(1, rotated, 2), *range(rotated, head_dim)]
    return by_head[:, order].reshape(rows.shape)


def rotated_channels(spec: Any) -> int:
    """Return how many channels of a head are rotated."""
    return spec.rotary_dim or spec.head_dim
