"""Gemma 1, 2 and 3: scaled embeddings, GeGLU; since 2 norms behind, too, and windows.

    x = sqrt(h) * embedding
    x += norm(o(attention(...)) of norm(x));  x += norm(down(gelu(gate) * up)) of norm(x)

Norms multiply by 1 + w, scores by 1 / sqrt(query_pre_attn_scalar). Gemma 1 has no norms behind and
no windows, and its `hidden_act` "gelu" means the tanh form, as in Transformers. Gemma 2 caps scores
and logits and gives every other layer a window; Gemma 3 norms query and key heads, gives five
layers of six a window, and rotates those by a theta of their own. Its vision tower is left out.
VaultGemma is Gemma 2 without norms behind.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.families import llama
from llmpq.families.common.config_values import Config, expect, is_given, number, size
from llmpq.families.common.record import ABOVE_ONE, norm_names
from llmpq.families.common.rope import window_theta
from llmpq.families.common.rotary_families import alternating, layer_kinds, rotary_fields, windows

FULL_EVERY = {"gemma2": 2, "vaultgemma": 2, "gemma3": 6}


def fields(config: Config) -> dict[str, Any]:
    """Return the fields of `ModelSpec`."""
    expect(config, "attention_bias", False, default=False)
    expect(config, "use_bidirectional_attention", False, default=False)
    factor = size(config, "hidden_size") ** 0.5
    kind = "gemma3" if config.get("model_type") == "gemma3_text" else config["model_type"]
    if kind == "gemma":
        base = rotary_fields(config, activation="gelu_tanh", also_called="gelu")
        return {**base, "embedding_factor": factor}
    every = size(
        config, "sliding_window_pattern", "_sliding_window_pattern", default=FULL_EVERY[kind]
    )
    score_cap, logit_cap = (cap(config, f"{what}_logit_softcapping") for what in ("attn", "final"))
    found = {
        **rotary_fields(config, activation="gelu_tanh"),
        "norm_order": "pre" if kind == "vaultgemma" else "both",
        "windows": windows(config, layer_kinds(config, alternating(config, every))),
        "score_factor": number(config, "query_pre_attn_scalar") ** -0.5,
        "score_cap": score_cap,
        "logit_cap": logit_cap,
        "embedding_factor": factor,
    }
    if kind == "gemma3":
        _refuse_score_cap(score_cap)
        found["qk_norm"] = True
        found["window_rope_theta"] = window_theta(config, beside="rope_local_base_freq")
    return found


def cap(config: Config, key: str) -> float:
    """Return a soft cap, 0 for none."""
    return number(config, key) if is_given(config.get(key)) else 0.0


def _refuse_score_cap(cap: float) -> None:
    """Refuse a cap that Transformers' Gemma 3 reads and does not compute."""
    if cap:
        raise ValueError(
            f"config.json: attn_logit_softcapping={cap:g} is not supported in Gemma 3, whose "
            "scores have no cap; expected null"
        )


_NORMS = norm_names(
    ("attn_norm", "layers.{i}.input_layernorm"),
    ("attn_out_norm", "layers.{i}.post_attention_layernorm"),
    ("mlp_norm", "layers.{i}.pre_feedforward_layernorm"),
    ("mlp_out_norm", "layers.{i}.post_feedforward_layernorm"),
)
_ABOVE_ONE = ("attn_norm", "attn_out_norm", "mlp_norm", "mlp_out_norm", "q_norm", "k_norm", "norm")
_ARRANGE = {f"{norm}.weight": ABOVE_ONE for norm in _ABOVE_ONE}
FAMILY = replace(
    llama.FAMILY,
    name="gemma",
    model_types=("gemma2", "gemma3_text"),
    fields=fields,
    names=replace(
        llama.FAMILY.names,
        layer={**_NORMS, **llama.QKV, **llama.OUT, **llama.MLP, **llama.HEAD_NORMS},
        arrange=_ARRANGE,
    ),
)
VAULT = replace(FAMILY, name="vaultgemma", model_types=("vaultgemma",))
FIRST = replace(
    llama.FAMILY,
    name="gemma1",
    model_types=("gemma",),
    fields=fields,
    names=replace(llama.FAMILY.names, arrange=_ARRANGE),
)
