"""Shared by mixtures of experts: their configs and the names in their checkpoints."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from llmpq.families.common.config_values import Config, flag, number, size
from llmpq.families.common.record import linear_names
from llmpq.families.common.spec_values import Router


def counts(config: Config, *keys: str, per_token: tuple[str, ...] = ()) -> dict[str, int]:
    """Return how many experts a layer has and how many a token goes to; `keys`: of the former.

    `per_token`: what else than `num_experts_per_tok` the latter is called.
    """
    experts, called = size(config, *keys), (*per_token, "num_experts_per_tok")
    taken = size(config, *called)
    if taken > experts:
        raise ValueError(
            f"config.json: {called[0]}={taken} of {keys[0]}={experts}; expected at most all of them"
        )
    return {"experts": experts, "experts_per_token": taken}


def first_layers(config: Config, ffn: int) -> dict[str, Any]:
    """Return the fields of a model whose first layers have one MLP of width `ffn` each."""
    dense = config.get("first_k_dense_replace") or 0
    if type(dense) is not int or dense < 0:
        raise ValueError(
            f"config.json: 'first_k_dense_replace' must be a number of layers, got {dense!r}"
        )
    return dense_fields(range(min(dense, size(config, "num_hidden_layers"))), ffn)


def dense_fields(layers: Iterable[int], ffn: int) -> dict[str, Any]:
    """Return the fields of a model of which some layers have one MLP of width `ffn` each."""
    dense = tuple(layers)
    return {"dense_layers": dense, "dense_ffn": ffn} if dense else {}


def groups(config: Config, experts: int) -> tuple[int, int]:
    """Return in how many groups experts stand and how many of them a token keeps."""
    found = size(config, "n_group", default=1)
    kept = size(config, "topk_group", default=1)
    if experts % found or kept > found:
        raise ValueError(
            f"config.json: {experts} experts in n_group={found} groups of which topk_group={kept} "
            "are kept; expected equal groups, and at most all of them kept"
        )
    return found, kept


def sigmoid_router(config: Config, experts: int) -> Router:
    """Return the router of DeepSeek-V3's form: sigmoids, a correction for the choice, groups."""
    number_of, kept = groups(config, experts)
    return Router(
        score="sigmoid",
        normalise=flag(config, "norm_topk_prob"),
        scale=number(config, "routed_scaling_factor"),
        group_score="top2",
        correction=True,
        groups=number_of,
        groups_kept=kept,
    )


def expert_names(mlp: str, *, shared: bool = False) -> dict[str, tuple[str, ...]]:
    """Return the entries of a router and experts below `mlp`, each expert's matrices apart."""
    one = f"{mlp}.experts.{{e}}"
    names = {
        "router.weight": (f"{mlp}.gate.weight",),
        **linear_names(
            ("experts.{e}.gate_up", (f"{one}.gate_proj", f"{one}.up_proj")),
            ("experts.{e}.down", (f"{one}.down_proj",)),
        ),
    }
    if shared:
        both = f"{mlp}.shared_experts"
        names["router.correction"] = (f"{mlp}.gate.e_score_correction_bias",)
        names |= linear_names(
            ("shared.gate_up", (f"{both}.gate_proj", f"{both}.up_proj")),
            ("shared.down", (f"{both}.down_proj",)),
        )
    return names
