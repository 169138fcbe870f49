"""Shared by models with recurrent layers: their configs and the names in their checkpoints."""

from __future__ import annotations

from collections.abc import Collection

from llmpq.errors import short_repr
from llmpq.families.common.config_values import Config, flag, size
from llmpq.families.common.spec_values import Mixer, Recurrent

UNLIMITED = (None, [0.0, float("inf")], [0.0, {"__float__": "Infinity"}])
"""What says that Mamba-2's time steps have any length; the last is how Transformers 5 writes it."""
ATTENTION = ("attention", "full_attention")
"""What configs call layers of attention that see all tokens."""


def mixers(
    config: Config,
    default: list[str],
    *,
    recurrent: Collection[str],
    windowed: str | None = None,
    key: str = "layer_types",
) -> tuple[Mixer, ...]:
    """Return what mixes each layer's tokens; `recurrent`: what the family calls such layers.

    `windowed`: what it calls layers of attention that see a window, where it has some.
    """
    given = config.get(key)
    kinds = default if given is None else given
    count = size(config, "num_hidden_layers")
    if not isinstance(kinds, list) or len(kinds) != count:
        raise ValueError(
            f"config.json: '{key}' must name the kind of each of {count} layers; correct it or "
            "download config.json again"
        )
    attention = ATTENTION if windowed is None else (*ATTENTION, windowed)
    other = sorted({str(kind) for kind in kinds} - {*attention, *recurrent})
    if other:
        raise ValueError(
            f"config.json: layers of type '{other[0]}' are not supported; expected "
            + " or ".join(f"'{kind}'" for kind in (*attention[1:], *sorted(recurrent)))
        )
    return tuple("recurrent" if kind in recurrent else "attention" for kind in kinds)


def gated_delta(
    config: Config, *, heads: int, key_heads: int, key_dim: int, value_dim: int
) -> Recurrent:
    """Return the form of layers of the gated delta rule, normalised before they are gated."""
    return Recurrent(
        kind="gated_delta",
        taps=size(config, "linear_conv_kernel_dim"),
        channels=2 * key_heads * key_dim + heads * value_dim,
        heads=heads,
        key_heads=key_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        norm_first=True,
    )


def mamba2(config: Config, inner: int | None = None) -> Recurrent:
    """Return the form of Mamba-2 layers by the keys `mamba_...`; `inner`: channels of its output.

    Output is gated first, then normalised by groups.
    """
    inner = size(config, "mamba_expand") * size(config, "hidden_size") if inner is None else inner
    config.get("mamba_expand")
    heads, groups = size(config, "mamba_n_heads"), size(config, "mamba_n_groups")
    state = size(config, "mamba_d_state")
    given = config.get("mamba_d_head")
    value_dim = inner // heads if given in (None, "auto") else size(config, "mamba_d_head")
    if heads * value_dim != inner or heads % groups or inner % groups:
        raise ValueError(
            f"config.json: {heads} heads of {value_dim} channels in {groups} groups do not make "
            f"the {inner} channels of a Mamba-2 layer; correct mamba_n_heads, mamba_d_head or "
            "mamba_n_groups, or download config.json again"
        )
    limit = config.get("time_step_limit")
    if limit not in UNLIMITED:
        raise ValueError(
            f"config.json: time_step_limit={short_repr(limit)} is not supported; Mamba-2 layers "
            "are run with steps of any length, [0, Infinity]"
        )
    config.get("mamba_chunk_size")  # how prompts were cut in training; sums are the same
    return Recurrent(
        kind="mamba2",
        taps=size(config, "mamba_d_conv"),
        channels=inner + 2 * groups * state,
        heads=heads,
        key_heads=groups,
        key_dim=state,
        value_dim=value_dim,
        bias=flag(config, "mamba_proj_bias"),
        conv_bias=flag(config, "mamba_conv_bias"),
        norm_groups=groups,
    )


def mixer_names(mixer: str, **own: str) -> dict[str, tuple[str, ...]]:
    """Return the entries of a recurrent mixer below `mixer`; `own`: part -> another name there."""
    parts = {
        **{f"mixer_in.{kind}": f"in_proj.{kind}" for kind in ("weight", "bias")},
        **{f"mixer_out.{kind}": f"out_proj.{kind}" for kind in ("weight", "bias")},
        **{f"conv.{kind}": f"conv1d.{kind}" for kind in ("weight", "bias")},
        "decay": "A_log",
        "step_bias": "dt_bias",
        "skip": "D",
        "mixer_norm.weight": "norm.weight",
        **own,
    }
    return {part: (f"{mixer}.{name}",) for part, name in parts.items()}
