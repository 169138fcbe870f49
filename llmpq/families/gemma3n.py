"""Gemma 3n: Gemma 3's layers on several streams, shared caches, inputs of layers, sparse gates.

    streams, LAuReL and the layer's own input: runtime/models/streams.py
    MLP: down(gelu(relu(g - mean(g) - d std(g))) * up), d by `activation_sparsity_pattern`

Queries, keys and values are normalised (values without a weight), scores unscaled. The last layers
make queries and attend to the cache of the last layer of their kind in front of them. Its towers
for pictures and sound are left out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.families import gemma, gemma4
from llmpq.families.common.config_values import Config, flag, size
from llmpq.families.common.record import linear_names, norm_names
from llmpq.families.common.rotary_families import alternating, layer_kinds, rotary_fields
from llmpq.families.common.spec_values import AltUp

FULL_EVERY = 5
SPARSE_LAYERS, SPARSITY = 10, 0.95
MOST_STREAMS = 16


def fields(config: Config) -> dict[str, Any]:
    """Return the fields of `ModelSpec`."""
    base = rotary_fields(config, activation="gelu_tanh", ffn_key="hidden_size")
    count = base["num_layers"]
    kinds = layer_kinds(config, alternating(config, FULL_EVERY))
    shared = gemma4.shared_layers(config)
    config.get("altup_coef_clip")  # of training
    widths = _widths(config, count)
    return {
        **gemma4.attention_fields(config, base, kinds),
        "ffn": max(widths),
        "ffns": widths if len(set(widths)) > 1 else (),
        "gate_sparsities": _sparsities(config, count),
        "altup": _altup(config),
        **gemma4.sharing(kinds, shared),
        **_inputs(config),
    }


def _inputs(config: Config) -> dict[str, Any]:
    """Return the layers' own inputs, which every layer has."""
    size(config, "hidden_size_per_layer_input")
    return gemma4.per_layer_inputs(config)


def _altup(config: Config) -> AltUp:
    active = config.get("altup_active_idx")
    form = AltUp(
        streams=size(config, "altup_num_inputs"),
        active=active if type(active) is int else -1,
        scaled=flag(config, "altup_correct_scale"),
        laurel_rank=size(config, "laurel_rank"),
    )
    if not 0 <= form.active < form.streams <= MOST_STREAMS:
        raise ValueError(
            f"config.json: altup_active_idx={active!r} of altup_num_inputs={form.streams} streams; "
            f"expected one of them, and at most {MOST_STREAMS}"
        )
    return form


def _widths(config: Config, count: int) -> tuple[int, ...]:
    """Return the widths of the layers' MLPs: one of all, or listed."""
    given = config.get("intermediate_size")
    if not isinstance(given, list):
        return (size(config, "intermediate_size"),) * count
    if len(given) != count or not all(type(width) is int and width > 0 for width in given):
        raise ValueError(
            f"config.json: 'intermediate_size' must be a width, or one of each of {count} layers; "
            "correct it or download config.json again"
        )
    return tuple(given)


def _sparsities(config: Config, count: int) -> tuple[float, ...]:
    """Return the share of gates that each layer cuts off; nothing where none does."""
    given = config.get("activation_sparsity_pattern")
    if given is None:
        sparse = SPARSE_LAYERS if count > SPARSE_LAYERS else 0
        given = [SPARSITY] * sparse + [0.0] * (count - sparse)
    if (
        not isinstance(given, list)
        or len(given) != count
        or not all(type(share) in (int, float) and 0 <= share < 1 for share in given)
    ):
        raise ValueError(
            f"config.json: 'activation_sparsity_pattern' must be a share below 1 of each of "
            f"{count} layers; correct it or download config.json again"
        )
    return tuple(float(share) for share in given) if any(given) else ()


_I = "layers.{i}"
_LAYER = {
    **gemma.FAMILY.names.layer,
    **linear_names(
        ("q", (f"{_I}.self_attn.q_proj",)),
        ("per_layer_gate", (f"{_I}.per_layer_input_gate",)),
        ("per_layer_out", (f"{_I}.per_layer_projection",)),
        ("altup.router", (f"{_I}.altup.modality_router",)),
        ("altup.predict", (f"{_I}.altup.prediction_coefs",)),
        ("altup.correct", (f"{_I}.altup.correction_coefs",)),
        ("laurel.left", (f"{_I}.laurel.linear_left",)),
        ("laurel.right", (f"{_I}.laurel.linear_right",)),
    ),
    **norm_names(
        ("per_layer_out_norm", f"{_I}.post_per_layer_input_norm"),
        ("altup_norm", f"{_I}.altup.router_norm"),
        ("laurel_norm", f"{_I}.laurel.post_laurel_norm"),
    ),
    "altup.scale": (f"{_I}.altup.correct_output_scale",),
}


def _streams(part: str, theirs: str) -> dict[str, tuple[str, ...]]:
    others = range(1, MOST_STREAMS)
    return {f"{part}.{i}.weight": (f"{theirs}.{i - 1}.weight",) for i in others}


FAMILY = replace(
    gemma.FAMILY,
    name="gemma3n",
    before=(*gemma4.BEFORE, "model.altup_projections"),
    behind=("model.altup_unembed_projections", *gemma.FAMILY.behind),
    model_types=("gemma3n_text",),
    fields=fields,
    names=replace(
        gemma4.FAMILY.names,
        embedding={
            **gemma4.FAMILY.names.embedding,
            **_streams("stream_in", "altup_projections"),
        },
        layer=_LAYER,
        head={
            **gemma.FAMILY.names.head,
            **_streams("stream_out", "altup_unembed_projections"),
        },
        arrange={},
        apart={},
    ),
)
