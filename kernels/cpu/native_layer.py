"""A decoder layer of a few rows as one call of our own code (kernels/native/layer.cpp).

    y = x + mixer(norm(x)); y += down(silu(gate) up) of norm(y)

A user's step is hundreds of small operators; called one by one from Python they take longer than
their arithmetic. The order and the roundings are those of separate calls: results are the same.
Attention runs in the call over a pool of 16-bit blocks, and then several layers are one call, too
(`NativeStack`); else it is the caller's between two halves. Recurrent mixers are in the call, too
(recurrent_step.py). Of a layer whose mixer the library does not compute the half behind it is one.

Legend: M rows of tokens, h hidden, H query heads, G key/value heads, D head_dim, A angles.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmpq.kernels.cpu.block_attention import BlockRows
from llmpq.kernels.cpu.recurrent_step import RecurrentStep, SingleRows
from llmpq.kernels.formats.weight_layout import GROUP
from llmpq.kernels.native.library import DTYPE_CODES, address, call, library
from llmpq.precision import padded_k

_BEFORE, _ATTENTION, _BEHIND = 1, 2, 4


@dataclass(frozen=True, kw_only=True, eq=False)
class Matrix:
    """A product's weight as the library takes it, quantised or (0 bits) not."""

    n: int
    k: int
    codes: Tensor
    """Packed codes, or w itself."""
    most_rows: int
    """Rows of x that one call multiplies."""
    bits: int = 0
    scale: Tensor | None = None
    zero: Tensor | None = None
    groups: int = 0
    panels: bool = False
    x_bits: int = 16


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerForm:
    """What a layer is made of; without its attention, the half behind it."""

    dtype: torch.dtype
    mlp_norm: Tensor
    mlp_eps: float
    products: tuple[Matrix, Matrix, Matrix]
    """o, gate and up, down."""
    biases: tuple[Tensor | None, ...]
    """Of each product."""
    before: AttentionForm | RecurrentForm | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class MixerInput:
    """What stands before a mixer: a norm, and the product of what that gives."""

    norm: Tensor
    norm_eps: float
    product: Matrix
    bias: Tensor | None


@dataclass(frozen=True, kw_only=True, eq=False)
class RecurrentForm:
    """A recurrent mixer, and what stands before it."""

    into: MixerInput
    steps: Matrix | None
    """What makes its steps, where the product does not."""
    step: RecurrentStep


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionForm:
    """Attention, and what stands before it: qkv, a gate of what attention gives behind it."""

    into: MixerInput
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int
    turned: int
    """Channels of a head that are rotated to its position, the first ones."""
    gated: bool
    head_norms: tuple[Tensor, Tensor] | None
    """Of each query head and each key head."""
    head_eps: float
    slopes_H: Tensor | None


class _Product(ctypes.Structure):
    _fields_ = [("bits", ctypes.c_int64)] + [
        (name, ctypes.c_size_t) for name in ("codes", "scale", "zero", "bias")
    ]
    _fields_ += [
        (name, ctypes.c_int64)
        for name in ("n", "k", "k_groups", "groups", "panels", "scale_dtype", "x_bits")
    ]


class _Layer(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            *("dtype", "hidden", "heads", "groups", "dim", "ffn", "turned", "window"),
            "gated",
        )
    ]
    _fields_ += [
        (name, ctypes.c_size_t) for name in ("attn_norm", "mlp_norm", "q_norm", "k_norm", "slopes")
    ]
    _fields_ += [(name, ctypes.c_double) for name in ("attn_eps", "mlp_eps", "head_eps", "scale")]
    _fields_ += [(name, _Product) for name in ("qkv", "o", "gate_up", "down")]
    _fields_ += [("mixer", ctypes.c_size_t), ("steps", _Product)]


class _Rows(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("rows", "threads")]
    _fields_ += [
        (name, ctypes.c_size_t) for name in ("x", "y", "qkv", "q", "attended", "cosine", "sine")
    ]
    _fields_ += [("angles", ctypes.c_int64)]
    _fields_ += [(name, ctypes.c_size_t) for name in ("k", "v", "places", "tables", "ends")]
    _fields_ += [(name, ctypes.c_int64) for name in ("tokens", "columns")]
    _fields_ += [(name, ctypes.c_size_t) for name in ("at", "slots", "fresh")]


Angles = tuple[Tensor, Tensor]
"""Cosine and sine [A, D / 2] in the rows' dtype, row m's those of m % A."""


@dataclass(frozen=True, eq=False)
class PoolPlace:
    """Where the tokens of a step go in a layer's pool, one a row, and which blocks rows read."""

    k_NGD: Tensor
    v_NGD: Tensor
    places_T: Tensor
    rows: BlockRows


@dataclass(frozen=True, eq=False)
class StatePlace:
    """The slots of a recurrent layer, and which of them rows of one token have."""

    rows: SingleRows
    tail_SKC: Tensor
    matrix_SHNP: Tensor


@dataclass(frozen=True, eq=False)
class PoolPlaces:
    """`PoolPlace` of all layers of a stage that attend, which lie in one pool or two."""

    k_L: Sequence[int]
    v_L: Sequence[int]
    """Addresses."""
    pool_L: Sequence[int]
    pools: Sequence[tuple[Tensor, BlockRows] | None]
    """Where a pool's tokens go, and which blocks rows read; None of one without layers."""


@dataclass(frozen=True, eq=False)
class StatePlaces:
    """`StatePlace` of all recurrent layers of a stage."""

    rows: SingleRows
    tail_L: Sequence[int]
    matrix_L: Sequence[int]
    """Addresses."""


class NativeLayer:
    """A layer whose parts the library takes (`native_layer`)."""

    def __init__(self, form: LayerForm, most_rows: int) -> None:
        """`most_rows`: of all its products."""
        self.form, self.most_rows = form, most_rows
        self._held: list[Tensor] = []
        given = zip(form.products, form.biases, strict=True)
        o, gate_up, down = [self._product(matrix, bias) for matrix, bias in given]
        self._layer = _Layer(
            dtype=DTYPE_CODES[form.dtype],
            hidden=form.mlp_norm.shape[0],
            ffn=down.k,
            mlp_norm=self._address(form.mlp_norm),
            mlp_eps=form.mlp_eps,
            o=o,
            gate_up=gate_up,
            down=down,
        )
        if isinstance(form.before, AttentionForm):
            self._add_attention(form.before)
        elif form.before is not None:
            self._add_recurrence(form.before)
        self._at = ctypes.addressof(self._layer)

    def _add_input(self, form: MixerInput) -> None:
        layer = self._layer
        layer.attn_norm, layer.attn_eps = self._address(form.norm), form.norm_eps
        layer.qkv = self._product(form.product, form.bias)

    def _add_recurrence(self, form: RecurrentForm) -> None:
        self._add_input(form.into)
        self._layer.mixer = form.step.address
        if form.steps is not None:
            self._layer.steps = self._product(form.steps, None)

    def _add_attention(self, form: AttentionForm) -> None:
        self._add_input(form.into)
        layer = self._layer
        q_norm, k_norm = form.head_norms or (None, None)
        layer.heads, layer.groups, layer.dim = form.heads, form.kv_heads, form.head_dim
        layer.turned, layer.window, layer.scale = form.turned, form.window, form.scale
        layer.gated = form.gated
        layer.q_norm, layer.k_norm = self._address(q_norm), self._address(k_norm)
        layer.head_eps = form.head_eps
        layer.slopes = self._address(None if form.slopes_H is None else form.slopes_H.float())

    def takes(self, x: Tensor) -> bool:
        """Whether these rows [..., h] are few enough, and as they have to be."""
        return (
            x.numel() <= self.most_rows * self._layer.hidden
            and x.dtype == self.form.dtype
            and x.is_contiguous()
            and not x.requires_grad
        )

    def whole(self, x: Tensor, y: Tensor, angles: Angles | None, place: PoolPlace) -> None:
        """Write the layer's output to y (x, if that is read no more); keys go to the pool."""
        rows = self._rows(x, y, angles, place.places_T, place.rows)
        rows.k, rows.v = place.k_NGD.data_ptr(), place.v_NGD.data_ptr()
        call("llmpq_layer", self._at, ctypes.addressof(rows), _BEFORE | _ATTENTION | _BEHIND)

    def recur(self, x: Tensor, y: Tensor, place: StatePlace) -> None:
        """Write a recurrent layer's output to y (or x); states move on by a token a row."""
        rows = self._recurrent_rows(x, y, place.rows)
        rows.k, rows.v = place.tail_SKC.data_ptr(), place.matrix_SHNP.data_ptr()
        call("llmpq_layer", self._at, ctypes.addressof(rows), _BEFORE | _ATTENTION | _BEHIND)

    def _recurrent_rows(self, x: Tensor, y: Tensor, single: SingleRows) -> _Rows:
        return _Rows(
            rows=x.numel() // self._layer.hidden,
            threads=torch.get_num_threads(),
            x=x.data_ptr(),
            y=y.data_ptr(),
            tokens=single.at_B.shape[0],
            at=single.at_B.data_ptr(),
            slots=single.slots_B.data_ptr(),
            fresh=single.fresh_B.data_ptr(),
        )

    def _rows(
        self, x: Tensor, y: Tensor, angles: Angles | None, places_T: Tensor, rows: BlockRows
    ) -> _Rows:
        tables_BM, ends_B = rows.tables_BM, rows.ends_B
        return _Rows(
            x.numel() // self._layer.hidden,
            torch.get_num_threads(),
            x.data_ptr(),
            y.data_ptr(),
            0,
            0,
            0,
            *_angles(angles),
            0,
            0,
            places_T.data_ptr(),
            tables_BM.data_ptr(),
            ends_B.data_ptr(),
            ends_B.shape[0],
            tables_BM.shape[1],
        )

    def before(
        self, x: Tensor, angles: Angles | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return queries [..., H, D], keys and values [..., G, D] of rows [..., h], and a gate."""
        form = self.form.before
        assert isinstance(form, AttentionForm)
        parts = [form.heads, form.kv_heads, form.kv_heads, form.heads * form.gated]
        qkv = x.new_empty(*x.shape[:-1], sum(parts), form.head_dim)
        q = x.new_empty(*x.shape[:-1], form.heads, form.head_dim)
        rows = _Rows(
            x.numel() // self._layer.hidden,
            torch.get_num_threads(),
            x.data_ptr(),
            0,
            qkv.data_ptr(),
            q.data_ptr(),
            0,
            *_angles(angles),
        )
        call("llmpq_layer", self._at, ctypes.addressof(rows), _BEFORE)
        _, k, v, gate = qkv.split(parts, dim=-2)
        return q, k, v, gate if form.gated else None

    def behind(self, attended: Tensor, x: Tensor, y: Tensor) -> None:
        """Write the layer's output to y (or x) from what attention [..., H, D] found."""
        attended = attended.contiguous()
        rows = _Rows(
            x.numel() // self._layer.hidden,
            torch.get_num_threads(),
            x.data_ptr(),
            y.data_ptr(),
            attended.data_ptr(),
            0,
            attended.data_ptr(),
        )
        call("llmpq_layer", self._at, ctypes.addressof(rows), _BEHIND)

    def _address(self, tensor: Tensor | None) -> int:
        if tensor is None:
            return 0
        self._held.append(tensor.contiguous())
        return self._held[-1].data_ptr()

    def _product(self, matrix: Matrix, bias: Tensor | None) -> _Product:
        scale = matrix.scale
        return _Product(
            matrix.bits,
            address(matrix.codes),
            address(scale),
            address(matrix.zero),
            self._address(None if bias is None else bias.to(self.form.dtype)),
            matrix.n,
            matrix.k,
            padded_k(matrix.k) // GROUP if matrix.bits else 0,
            matrix.groups,
            int(matrix.panels),
            0 if scale is None else DTYPE_CODES[scale.dtype],
            matrix.x_bits,
        )


class NativeStack:
    """Layers one after the other as one call: nothing of Python's between two of them."""

    def __init__(self, layers: Sequence[NativeLayer]) -> None:
        self.layers = layers
        self._at = (ctypes.c_size_t * len(layers))(*(layer._at for layer in layers))
        self._placed: tuple[tuple[object, object], tuple[ctypes.Array[Any], ...]] | None = None

    def takes(self, x: Tensor) -> bool:
        """Whether every layer does."""
        return all(layer.takes(x) for layer in self.layers)

    def whole(
        self,
        x: Tensor,
        y: Tensor,
        angles: Angles | None,
        pools: PoolPlaces | None,
        states: StatePlaces | None,
    ) -> None:
        """Write the last layer's output to y; keys go to the pools, states move on."""
        first = self.layers[0]
        rows = []
        if pools is not None:
            own = [None if p is None else first._rows(x, y, angles, *p) for p in pools.pools]
            rows = [_Rows() if one is None else one for one in own]
        if states is not None:
            rows.append(first._recurrent_rows(x, y, states.rows))
        of = (None if pools is None else pools.k_L, None if states is None else states.tail_L)
        if self._placed is None or any(
            a is not b for a, b in zip(self._placed[0], of, strict=True)
        ):
            self._placed = of, self._addresses(pools, states)
        arrays: tuple[ctypes.Array[Any], ...] = (
            *(self._at, (_Rows * len(rows))(*rows)),
            *self._placed[1],
        )
        call("llmpq_layers", *(ctypes.addressof(array) for array in arrays), len(self.layers))

    def _addresses(
        self, pools: PoolPlaces | None, states: StatePlaces | None
    ) -> tuple[ctypes.Array[Any], ...]:
        """Return of every layer which rows it takes, and where its keys and values or state lie."""
        in_pools = [] if pools is None else zip(pools.pool_L, pools.k_L, pools.v_L, strict=True)
        in_slots = [] if states is None else zip(states.tail_L, states.matrix_L, strict=True)
        attending, recurrent = iter(in_pools), iter(in_slots)
        behind = 0 if pools is None else len(pools.pools)
        placed = [
            (behind, *next(recurrent))
            if isinstance(layer.form.before, RecurrentForm)
            else next(attending)
            for layer in self.layers
        ]
        numbers, k_L, v_L = zip(*placed, strict=True)
        count = len(placed)
        array = ctypes.c_size_t * count
        return (ctypes.c_int64 * count)(*numbers), array(*k_L), array(*v_L)


def native_layer(form: LayerForm) -> NativeLayer | None:
    """Return a layer in the library's form; None where there is none, or a part is not for it."""
    before = form.before
    norms, products = [form.mlp_norm], list(form.products)
    if before is not None:
        norms.append(before.into.norm)
        products.append(before.into.product)
    if isinstance(before, AttentionForm):
        norms += before.head_norms or ()
    elif before is not None and before.steps is not None:
        products.append(before.steps)
    alike = all(norm.dtype == form.dtype and norm.device.type == "cpu" for norm in norms)
    odd = isinstance(before, AttentionForm) and before.head_dim % 2
    if form.dtype not in DTYPE_CODES or not alike or odd or library() is None:
        return None
    most_rows = min(matrix.most_rows for matrix in products)
    return NativeLayer(form, most_rows) if most_rows else None


def _angles(angles: Angles | None) -> tuple[int, int, int]:
    if angles is None:
        return 0, 0, 1
    cosine, sine = angles
    return cosine.data_ptr(), sine.data_ptr(), cosine.numel() // cosine.shape[-1]
