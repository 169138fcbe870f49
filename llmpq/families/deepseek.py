"""DeepSeek-V2, V3 (R1) and V3.2, Kimi K2, GLM-5: latents, and a mixture behind the first layers.

    attention: runtime/models/latent_attention.py; the rotated channels are stored in pairs
    V2   w = the k largest of softmax(router(x)), of the groups with the best expert; times a scale
    V3   p = sigmoid(router(x)), chosen by p + c of the groups whose two best are best; w = p of the
         chosen, made to sum to one, times a scale
    y = sum of w_e expert_e(x) + shared(x)

V3.2 and GLM-5 attend to the tokens that an indexer chooses (runtime/models/latent_attention.py).
The layer behind the last one predicts a further token (MTP); it drafts, where it is asked to.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.families import llama
from llmpq.families.common.config_values import Config, expect, number, size
from llmpq.families.common.mixture_config import counts, expert_names, first_layers, groups
from llmpq.families.common.record import LAYER_MTP, Arrange, linear_names, norm_names
from llmpq.families.common.rope import yarn_score_factor
from llmpq.families.common.rotary_families import pairs_to_halves, rotary_fields
from llmpq.families.common.spec_values import Indexer, Latent, Router
from llmpq.families.glm4_moe import mixture


def fields(config: Config, dense: tuple[int, ...] | None = None) -> dict[str, Any]:
    """Return the fields of `ModelSpec`; `dense`: layers without experts, None: the first ones."""
    base = latent_fields(config)
    is_v3 = config.get("model_type") != "deepseek_v2"
    own = _v3(config, base["ffn"], dense) if is_v3 else _v2(config, base["ffn"])
    return {**base, **own}


def latent_of(config: Config) -> Latent:
    """Return the form of latent attention."""
    small = config.get("q_lora_rank") is not None
    return Latent(
        q_rank=size(config, "q_lora_rank") if small else 0,
        kv_rank=size(config, "kv_lora_rank"),
        nope_dim=size(config, "qk_nope_head_dim"),
        rope_dim=size(config, "qk_rope_head_dim"),
        v_dim=size(config, "v_head_dim"),
    )


def latent_fields(config: Config, *, knows: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the fields of a model with latents, its mixture left out.

    `knows`: as in `rope_fields`.
    """
    for key in ("attention_bias", "mlp_bias"):
        expect(config, key, False, default=False)
    expect(config, "rope_interleave", True, default=True)
    expect(config, "moe_layer_freq", 1, default=1)
    for key in ("head_dim", "qk_head_dim"):
        config.get(key)  # the sum of others
    base = rotary_fields(config, partial_rotary=True, knows=knows)
    latent = latent_of(config)
    rotated = base["rotary_dim"]
    if rotated not in (None, latent.rope_dim):
        raise ValueError(
            f"config.json: partial_rotary_factor rotates {rotated} channels, qk_rope_head_dim says "
            f"{latent.rope_dim}; correct one of them or download config.json again"
        )
    return {
        **base,
        "rotary_dim": None,
        "latent": latent,
        "kv_heads": 1,
        "head_dim": latent.dim,
        "score_factor": latent.q_head_dim**-0.5 * yarn_score_factor(config),
    }


def _v3(config: Config, ffn: int, dense: tuple[int, ...] | None) -> dict[str, Any]:
    expect(config, "scoring_func", "sigmoid", default="sigmoid")
    expect(config, "topk_method", "noaux_tc", default="noaux_tc")
    return mixture(config, ffn, dense)


def _v2(config: Config, ffn: int) -> dict[str, Any]:
    expect(config, "scoring_func", "softmax", default="softmax")
    expect(config, "norm_topk_prob", False, default=False)
    found = counts(config, "n_routed_experts", "num_local_experts", "num_experts")
    wide = size(config, "moe_intermediate_size")
    number_of, kept = groups(config, found["experts"])
    if config.get("topk_method", "greedy") == "greedy":
        number_of = kept = 1
    else:
        expect(config, "topk_method", "group_limited_greedy", default="greedy")
    shared = size(config, "n_shared_experts")
    scale = number(config, "routed_scaling_factor")
    return {
        **found,
        "ffn": wide,
        "shared_ffn": wide * shared,
        "router": Router(normalise=False, scale=scale, groups=number_of, groups_kept=kept),
        **first_layers(config, ffn),
    }


def _query_halves(rows: Any, spec: Any) -> Any:
    """Return query rows whose rotated channels, the last of each head, are halves."""
    latent = spec.latent
    by_head = rows.view(spec.heads, latent.q_head_dim, *rows.shape[1:])
    out = by_head.clone()
    rotated = by_head[:, latent.nope_dim :].reshape(-1, *rows.shape[1:])
    halves = pairs_to_halves(rotated, spec.heads, latent.rope_dim, latent.rope_dim)
    out[:, latent.nope_dim :] = halves.view(spec.heads, latent.rope_dim, *rows.shape[1:])
    return out.view(rows.shape)


def _key_halves(rows: Any, spec: Any) -> Any:
    """Return the latent's rows, the shared key's channels behind them as halves."""
    latent = spec.latent
    out = rows.clone()
    out[latent.kv_rank :] = pairs_to_halves(
        rows[latent.kv_rank :], 1, latent.rope_dim, latent.rope_dim
    )
    return out


_SELF = "layers.{i}.self_attn"
ATTENTION = {
    **llama.NORMS,
    **linear_names(
        ("q", (f"{_SELF}.q_proj",)),
        ("q_a", (f"{_SELF}.q_a_proj",)),
        ("q_b", (f"{_SELF}.q_b_proj",)),
        ("kv_a", (f"{_SELF}.kv_a_proj_with_mqa",)),
        ("kv_b", (f"{_SELF}.kv_b_proj",)),
    ),
    **llama.OUT,
    "q_norm.weight": (f"{_SELF}.q_a_layernorm.weight",),
    "kv_norm.weight": (f"{_SELF}.kv_a_layernorm.weight",),
}
FAMILY = replace(
    llama.FAMILY,
    name="deepseek",
    model_types=("deepseek_v2", "deepseek_v3", "kimi_k2"),
    fields=fields,
    names=replace(
        llama.FAMILY.names,
        layer={**ATTENTION, **expert_names("layers.{i}.mlp", shared=True)},
        dense={**ATTENTION, **llama.MLP},
        mtp=LAYER_MTP,
        arrange={
            "q.weight": Arrange(rows=_query_halves),
            "q_b.weight": Arrange(rows=_query_halves),
            "kv_a.weight": Arrange(rows=_key_halves),
        },
    ),
)


SPARSE_ATTENTION = ("indexed_attention", "deepseek_sparse_attention")
"""What Transformers and published files call it in `layer_types`."""
INDEX_NORM = norm_names(("index_norm", f"{_SELF}.indexer.k_norm"))


def sparse_fields(config: Config) -> dict[str, Any]:
    """Return the fields of a model with an indexer on every layer."""
    base = latent_fields(config)
    if not base["latent"].q_rank:
        raise ValueError(
            "config.json: 'q_lora_rank' is missing, whose small vector an indexer reads; correct "
            "it or download config.json again"
        )
    kinds = config.get("layer_types")
    if kinds is not None and set(kinds) - {*SPARSE_ATTENTION}:
        raise ValueError(
            f"config.json: layer_types has others than '{SPARSE_ATTENTION[0]}', which llmpq does "
            "not run; expected it of every layer"
        )
    _require_own_indexers(config)
    indexer = Indexer(
        heads=size(config, "index_n_heads"),
        dim=size(config, "index_head_dim"),
        topk=size(config, "index_topk"),
    )
    return {
        **base,
        **_v3(config, base["ffn"], listed_dense(config)),
        "indexer": indexer,
        "head_dim": base["head_dim"] + indexer.dim,
    }


def _require_own_indexers(config: Config) -> None:
    """Refuse layers that attend to what another layer's indexer chose (GLM-5.2)."""
    for key in ("index_skip_topk_offset", "index_topk_pattern", "index_share_for_mtp_iteration"):
        config.get(key)  # what `indexer_types` comes of
    types, every = config.get("indexer_types"), config.get("index_topk_freq")
    if (types is not None and set(types) != {"full"}) or (types is None and every not in (None, 1)):
        raise ValueError(
            "config.json: indexer_types has layers that attend to what another layer's indexer "
            "chose, which llmpq does not run; expected 'full' of every layer"
        )


def listed_dense(config: Config) -> tuple[int, ...] | None:
    """Return the layers with one MLP where the config lists them, else None."""
    kinds = config.get("mlp_layer_types")
    config.get("first_k_dense_replace")  # what they come of
    if kinds is None:
        return None
    count = size(config, "num_hidden_layers")
    if not isinstance(kinds, list) or len(kinds) != count or set(kinds) - {"dense", "sparse"}:
        raise ValueError(
            f"config.json: 'mlp_layer_types' must say dense or sparse of each of {count} layers; "
            "correct it or download config.json again"
        )
    return tuple(i for i, kind in enumerate(kinds) if kind == "dense")


def glm_fields(config: Config) -> dict[str, Any]:
    """Return the fields of GLM-5, whose indexer rotates pairs of channels."""
    expect(config, "indexer_rope_interleave", True, default=True)
    return sparse_fields(config)


def _index_halves(rows: Any, spec: Any) -> Any:
    """Return an indexer's rows whose rotated channels, the first of each head, are halves."""
    heads = rows.shape[0] // spec.indexer.dim
    return pairs_to_halves(rows, heads, spec.indexer.dim, spec.latent.rope_dim)


_INDEX = {
    **linear_names(("index_q", (f"{_SELF}.indexer.wq_b",))),
    **INDEX_NORM,
    "index_k.weight": (f"{_SELF}.indexer.wk.weight",),
    "index_weights.weight": (f"{_SELF}.indexer.weights_proj.weight",),
}
SPARSE = replace(
    FAMILY,
    name="deepseek_v32",
    model_types=("deepseek_v32",),
    fields=sparse_fields,
    names=replace(
        FAMILY.names,
        layer={**FAMILY.names.layer, **_INDEX},
        dense={**FAMILY.names.dense, **_INDEX},
        mtp=None,
    ),
)
_TURNED = ("index_q.weight", "index_k.weight", *INDEX_NORM)
GLM = replace(
    SPARSE,
    name="glm_moe_dsa",
    model_types=("glm_moe_dsa",),
    fields=glm_fields,
    names=replace(
        SPARSE.names,
        arrange={
            **SPARSE.names.arrange,
            **{part: Arrange(rows=_index_halves) for part in _TURNED},
        },
    ),
)
