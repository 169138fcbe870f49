"""A decoder layer of a few rows as one call of our own code (kernels/native/layer.cpp).

    y = x + attention(norm(x)); y += down(silu(gate) up) of norm(y)

A user's step is hundreds of small operators; called one by one from Python they take longer than
their arithmetic. The order and the roundings are those of separate calls: results are the same.
Attention runs in the call over a pool of 16-bit blocks, and then several layers are one call, too
(`NativeStack`); else it is the caller's between two halves.

Legend: M rows of tokens, h hidden, H query heads, G key/value heads, D head_dim, A angles.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llmpq.kernels.cpu.block_attention import BlockRows
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
    """What a layer is made of."""

    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int
    rotated: bool
    """Whether heads are rotated to their positions."""
    attn_norm: Tensor
    attn_eps: float
    mlp_norm: Tensor
    mlp_eps: float
    head_norms: tuple[Tensor, Tensor] | None
    """Of each query head and each key head."""
    head_eps: float
    slopes_H: Tensor | None
    products: tuple[Matrix, Matrix, Matrix, Matrix]
    """qkv, o, gate and up, down."""
    biases: tuple[Tensor | None, ...]
    """Of each product."""


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
        for name in ("dtype", "hidden", "heads", "groups", "dim", "ffn", "rotated", "window")
    ]
    _fields_ += [
        (name, ctypes.c_size_t) for name in ("attn_norm", "mlp_norm", "q_norm", "k_norm", "slopes")
    ]
    _fields_ += [(name, ctypes.c_double) for name in ("attn_eps", "mlp_eps", "head_eps", "scale")]
    _fields_ += [(name, _Product) for name in ("qkv", "o", "gate_up", "down")]


class _Rows(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("rows", "threads")]
    _fields_ += [
        (name, ctypes.c_size_t) for name in ("x", "y", "qkv", "q", "attended", "cosine", "sine")
    ]
    _fields_ += [("angles", ctypes.c_int64)]
    _fields_ += [(name, ctypes.c_size_t) for name in ("k", "v", "places", "tables", "ends")]
    _fields_ += [(name, ctypes.c_int64) for name in ("tokens", "columns")]


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
class PoolPlaces:
    """`PoolPlace` of all layers of a stage, which lie in one pool or two."""

    k_L: ctypes.Array[ctypes.c_size_t]
    v_L: ctypes.Array[ctypes.c_size_t]
    """Addresses."""
    pool_L: ctypes.Array[ctypes.c_int64]
    pools: Sequence[tuple[Tensor, BlockRows] | None]
    """Where a pool's tokens go, and which blocks rows read; None of one without layers."""


class NativeLayer:
    """A layer whose parts the library takes (`native_layer`)."""

    def __init__(self, form: LayerForm, most_rows: int) -> None:
        """`most_rows`: of all its products."""
        self.form, self.most_rows = form, most_rows
        self._held: list[Tensor] = []
        hidden = form.attn_norm.shape[0]
        q_norm, k_norm = form.head_norms or (None, None)
        given = zip(form.products, form.biases, strict=True)
        products = [self._product(matrix, bias) for matrix, bias in given]
        self._layer = _Layer(
            DTYPE_CODES[form.dtype],
            hidden,
            form.heads,
            form.kv_heads,
            form.head_dim,
            products[3].k,
            form.rotated,
            form.window,
            self._address(form.attn_norm),
            self._address(form.mlp_norm),
            self._address(q_norm),
            self._address(k_norm),
            self._address(None if form.slopes_H is None else form.slopes_H.float()),
            form.attn_eps,
            form.mlp_eps,
            form.head_eps,
            form.scale,
            *products,
        )
        self._at = ctypes.addressof(self._layer)

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

    def before(self, x: Tensor, angles: Angles | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [..., H, D], keys and values [..., G, D] of rows [..., h]."""
        form = self.form
        qkv = x.new_empty(*x.shape[:-1], form.heads + 2 * form.kv_heads, form.head_dim)
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
        k, v = qkv[..., form.heads :, :].split(form.kv_heads, dim=-2)
        return q, k, v

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

    def takes(self, x: Tensor) -> bool:
        """Whether every layer does."""
        return all(layer.takes(x) for layer in self.layers)

    def whole(self, x: Tensor, y: Tensor, angles: Angles | None, places: PoolPlaces) -> None:
        """Write the last layer's output to y; keys go to the pools."""
        first = self.layers[0]
        rows = (_Rows * len(places.pools))(
            *(
                _Rows() if pool is None else first._rows(x, y, angles, *pool)
                for pool in places.pools
            )
        )
        arrays = (self._at, rows, places.pool_L, places.k_L, places.v_L)
        call("llmpq_layers", *(ctypes.addressof(array) for array in arrays), len(self.layers))


def native_layer(form: LayerForm) -> NativeLayer | None:
    """Return a layer in the library's form; None where there is none, or a part is not for it."""
    norms: Sequence[Tensor] = (form.attn_norm, form.mlp_norm, *(form.head_norms or ()))
    alike = all(norm.dtype == form.dtype and norm.device.type == "cpu" for norm in norms)
    if form.dtype not in DTYPE_CODES or not alike or form.head_dim % 2 or library() is None:
        return None
    most_rows = min(matrix.most_rows for matrix in form.products)
    return NativeLayer(form, most_rows) if most_rows else None


def _angles(angles: Angles | None) -> tuple[int, int, int]:
    if angles is None:
        return 0, 0, 1
    cosine, sine = angles
    return cosine.data_ptr(), sine.data_ptr(), cosine.numel() // cosine.shape[-1]
