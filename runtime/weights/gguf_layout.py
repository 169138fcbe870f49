"""Where a GGUF file keeps a tensor of the Hugging Face names, and how it becomes that tensor.

Most names follow from the `gguf` package's table. The others:

    experts.gate_up_proj[e]   gpt-oss: rows of ffn_gate_exps and ffn_up_exps in turn, transposed
    experts.down_proj[e]      gpt-oss: ffn_down_exps, transposed
    kv_b_proj                 DeepSeek: attn_k_b [H, L, N] transposed and attn_v_b [H, V, L], a head
                              at a time, where the file has no attn_kv_b
    e_score_correction_bias   exp_probs_b.bias
    q_layernorm.norms.3       StableLM: row 3 of attn_q_norm, as of k
    A_log, D, norm, conv      Mamba-2 and delta rule: log(-ssm_a); others without dimensions, or
                              with one, of one
    input_linear              Granite 4: gates above ups, of an MLP, or of all experts
    altup_projections.3       row 3 of altup_proj; altup_unembed_projections: of altup_unembd_proj
    experts.3.gate_proj       half of expert 3's rows of ffn_gate_up_exps, where the file has that
    router.scale              Gemma 4: ffn_gate_inp.scale; per_expert_scale: ffn_down_exps.scale

Legend: H heads, L kv_rank, N nope_dim, V v_dim.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

EXPERT = re.compile(
    r"(?P<before>.*\.(?:experts|altup_projections|altup_unembed_projections))"
    r"\.(?P<index>[0-9]+)\.(?P<behind>.*)"
)
"""What is one tensor in a file: all experts of a layer, all streams' matrices."""
LAYER = re.compile(r".*\blayers\.(?P<layer>[0-9]+)\.(?P<part>.*)")
HEAD_NORM = re.compile(
    r".*\blayers\.(?P<layer>[0-9]+)\.self_attn\.(?P<kind>[qk])_layernorm"
    r"\.norms\.(?P<head>[0-9]+)\.weight"
)
SUFFIXES = (".weight", ".bias")
CORRECTIONS = {
    "e_score_correction_bias": "e_score_correction.bias",
    "feed_forward.expert_bias": "feed_forward.expert_bias.bias",
}
"""How a name ends that the package's table knows with a dot more."""
EXPERT_PARTS = {
    "w1": "gate",
    "w2": "down",
    "w3": "up",
    **{f"{part}_proj": part for part in ("gate", "up", "down")},
}
"""What families call an expert's matrices, where the package's table leaves them out."""
HALVES = {"ffn_gate_exps": 0, "ffn_up_exps": 1}
"""What may be one tensor in a file, gates above ups."""

Make = Callable[[list[Tensor]], Tensor]


@dataclass(frozen=True, kw_only=True)
class Stored:
    """Tensors of the file, by its own names, that make one of ours."""

    names: tuple[str, ...]
    expert: int | None = None
    """Which row of their first dimension it is of; None: they are taken whole."""
    half: int | None = None
    """Which half of its rows is ours; None: all of them."""
    make: Make | None = field(default=None, compare=False)
    """What makes ours of several or of another form; None: it is the one tensor as it is."""


def layout(names: Collection[str], table: Any, tensors: Mapping[str, Any]) -> dict[str, Stored]:
    """Return Hugging Face name -> where the file has it, of the names that it has.

    `table`: the package's tensor name map. `tensors`: the file's, by their own names.
    """
    found = {}
    for name in sorted(names):
        plain = _plain(name, table)
        for stored in (_made(name, tensors), plain, _half(plain)):
            if stored is not None and all(own in tensors for own in stored.names):
                found[name] = stored
                break
    return found


def _plain(name: str, table: Any) -> Stored | None:
    """Return what the package's table says."""
    of_head = HEAD_NORM.fullmatch(name)
    if of_head is not None:
        norm = f"blk.{of_head['layer']}.attn_{of_head['kind']}_norm.weight"
        return Stored(names=(norm,), expert=int(of_head["head"]))
    match = EXPERT.fullmatch(name)
    merged = name if match is None else f"{match['before']}.{match['behind']}"
    for theirs, spelled in CORRECTIONS.items():
        merged = merged.removesuffix(theirs) + spelled if merged.endswith(theirs) else merged
    own = table.get_name(merged, SUFFIXES)
    if own is None and match is not None:
        own = _expert_named(merged)
    if own is None:
        return None
    if not own.endswith(SUFFIXES):
        own += ".weight"
    return Stored(names=(own,), expert=None if match is None else int(match["index"]))


def _half(plain: Stored | None) -> Stored | None:
    """Return where gates or ups are that lie in one tensor."""
    part = "" if plain is None else plain.names[0].split(".")[-2]
    if plain is None or part not in HALVES:
        return None
    both = plain.names[0].replace(part, "ffn_gate_up_exps")
    return replace(plain, names=(both,), half=HALVES[part])


def _expert_named(merged: str) -> str | None:
    """Return what a file calls the experts' matrices that are numbered parts."""
    match = LAYER.fullmatch(merged)
    part = EXPERT_PARTS.get(merged.removesuffix(".weight").rpartition(".")[2])
    if match is None or part is None:
        return None
    return f"blk.{match['layer']}.ffn_{part}_exps.weight"


def _made(name: str, tensors: Collection[str]) -> Stored | None:
    """Return what a tensor is made of where the file keeps it in another form."""
    match = LAYER.fullmatch(name)
    if match is None or match["part"] not in MADE:
        return None
    parts, how = MADE[match["part"]]
    make = None if how is _first else how
    if parts[0] not in SHARED_OR_NOT or f"blk.{match['layer']}.{parts[0]}" in tensors:
        return Stored(names=tuple(f"blk.{match['layer']}.{part}" for part in parts), make=make)
    shared = (f"blk.{match['layer']}.{part.replace('.', '_shexp.')}" for part in parts)
    return Stored(names=tuple(shared), make=make)


def _in_turn(pieces: list[Tensor]) -> Tensor:
    """Return [..., 2 N] of gates and ups [..., N]: a gate and an up in turn."""
    return torch.stack([piece.float() for piece in pieces], dim=-1).flatten(-2)


def _gates_and_ups(pieces: list[Tensor]) -> Tensor:
    return _in_turn([piece.transpose(-1, -2) for piece in pieces])


def _transposed(pieces: list[Tensor]) -> Tensor:
    return pieces[0].transpose(-1, -2)


def _by_head(pieces: list[Tensor]) -> Tensor:
    """Return [H (N + V), L] of keys [H, L, N] and values [H, V, L]."""
    keys, values = (piece.float() for piece in pieces)
    return torch.cat((keys.transpose(1, 2), values), dim=1).flatten(0, 1)


def _first(pieces: list[Tensor]) -> Tensor:
    return pieces[0]


def _above(pieces: list[Tensor]) -> Tensor:
    """Return [..., 2 N, K] of gates and ups [..., N, K]."""
    return torch.cat([piece.float() for piece in pieces], dim=-2)


ONE_BELOW = (_gates_and_ups, _transposed, _above)
"""What makes parts of matrices whose rows, one below the other, are in our order."""


def _apart(pieces: list[Tensor]) -> Tensor:
    """Return a convolution's [C, 1, K]."""
    return pieces[0].flatten(0, -2)[:, None]


def _flat(pieces: list[Tensor]) -> Tensor:
    return pieces[0].flatten()


def _one_row(pieces: list[Tensor]) -> Tensor:
    return pieces[0].reshape(1, -1)


def _logarithm(pieces: list[Tensor]) -> Tensor:
    """Return A's logarithm; a file has what becomes of it, -e^A."""
    return (-pieces[0].float()).log().flatten()


SHARED_OR_NOT = ("ffn_gate.weight", "ffn_down.weight")
"""Of an MLP that a file of a mixture calls `shexp`, since it stands beside experts."""
_EXPERTS = "mlp.experts."
_MAMBA2: Mapping[str, tuple[tuple[str, ...], Make]] = {
    "conv1d.weight": (("ssm_conv1d.weight",), _apart),
    "A_log": (("ssm_a",), _logarithm),
    "D": (("ssm_d",), _flat),
    "dt_bias": (("ssm_dt.bias",), _first),
    "norm.weight": (("ssm_norm.weight",), _flat),
}
MADE: Mapping[str, tuple[tuple[str, ...], Make]] = {
    **{f"{mixer}.{part}": how for mixer in ("mamba", "mixer") for part, how in _MAMBA2.items()},
    **{
        f"self_attn.{kind}_conv1d.weight": ((f"ssm_conv1d_{kind}.weight",), _apart)
        for kind in ("q", "k", "v")
    },
    "self_attn.A_log": (("ssm_a",), _logarithm),
    "self_attn.dt_bias": (("ssm_dt.bias",), _first),
    "router.scale": (("ffn_gate_inp.scale",), _first),
    "router.per_expert_scale": (("ffn_down_exps.scale",), _first),
    "mixer.gate.e_score_correction_bias": (("exp_probs_b.bias",), _first),
    f"{_EXPERTS}gate_up_proj": (
        ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
        _gates_and_ups,
    ),
    f"{_EXPERTS}gate_up_proj_bias": (("ffn_gate_exps.bias", "ffn_up_exps.bias"), _in_turn),
    f"{_EXPERTS}down_proj": (("ffn_down_exps.weight",), _transposed),
    f"{_EXPERTS}down_proj_bias": (("ffn_down_exps.bias",), _first),
    "conv.conv.weight": (("shortconv.conv.weight",), _apart),
    "linear_attn.conv1d.weight": (("ssm_conv1d.weight",), _apart),
    "linear_attn.A_log": (("ssm_a",), _logarithm),
    "linear_attn.dt_bias": (("ssm_dt.bias",), _first),
    "mlp.shared_expert_gate.weight": (("ffn_gate_inp_shexp.weight",), _one_row),
    "shared_mlp.input_linear.weight": (("ffn_gate.weight", "ffn_up.weight"), _above),
    "shared_mlp.output_linear.weight": (("ffn_down.weight",), _first),
    "block_sparse_moe.input_linear.weight": (
        ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
        _above,
    ),
    "block_sparse_moe.output_linear.weight": (("ffn_down_exps.weight",), _first),
    "self_attn.kv_b_proj.weight": (("attn_k_b.weight", "attn_v_b.weight"), _by_head),
}
"""A layer's tensor -> the layer's tensors in the file, and what makes it of them."""
