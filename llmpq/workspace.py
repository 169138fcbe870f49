"""The largest temporary of a stage: what one micro-batch needs beside weights and KV cache.

The formulas follow runtime/layers.py moment by moment: what is alive while a line runs, in bytes.
A test compares them with the tensors that really live (tests/test_runtime_memory.py).

Symbols: v rows, s tokens of a row, t = v s tokens, T keys in sight, e bytes of an element; of
`ModelSpec`: h hidden, q = H D query and g = G D key or value features, F ffn, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from llmpq.model_spec import ModelSpec
from llmpq.precision import Precision, padded_k
from llmpq.workload import Workload

DEQUANTIZE_WEIGHTS = 1 << 20
"""Weights a CPU dequantises at a time (kernels/cpu_linear.py)."""


def workspace_bytes(
    spec: ModelSpec,
    workload: Workload,
    *,
    precisions: Sequence[Precision],
    last: bool,
    prefill_microbatch: int,
    decode_microbatch: int,
    first: bool = False,
) -> int:
    """Return the bytes of the largest temporary over both phases.

    It depends on the set of precisions only. A stage that is not the first also holds the hidden
    states it received.
    """
    e = workload.dtype_bytes
    prefill = _Shape(prefill_microbatch, workload.prompt_len, workload.prompt_len, e, fresh=True)
    decode = _Shape(decode_microbatch, 1, workload.max_len, e, fresh=False)
    peaks = []
    for shape in (prefill, decode):
        received = 0 if first else shape.tokens * spec.hidden * e
        moments = [0]
        for bits in {p.weight_bits for p in precisions}:
            moments += _layer_moments(spec, shape, quantized=bits < 16)
        if last:
            moments.append(_logits_bytes(spec, shape))
        peaks.append(received + max(moments))
    return max(peaks)


@dataclass(frozen=True)
class _Shape:
    """One micro-batch."""

    rows: int
    row_tokens: int
    keys: int
    element_bytes: int
    fresh: bool

    @property
    def tokens(self) -> int:
        return self.rows * self.row_tokens


def _layer_moments(spec: ModelSpec, shape: _Shape, *, quantized: bool) -> Iterator[int]:
    """Yield the bytes alive at each wide moment of a decoder layer.

    The residual stream x and its norm are alive all through attention (2 h); the MLP adds the new
    residual stream (3 h).
    """
    unit = shape.tokens * shape.element_bytes
    h, f = spec.hidden, spec.ffn
    q, g = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    once = _step_bytes(spec, shape)

    def linear(out_features: int, in_features: int) -> int:
        return _linear_bytes(shape, out_features, in_features, quantized=quantized)

    qkv, qk = q + 2 * g, q + g
    yield once + unit * 2 * h + linear(qkv, h)
    yield once + unit * (2 * h + qkv) + _positioned_bytes(spec, shape)
    rotated = qk if spec.positions == "rotary" else 0
    yield once + unit * (2 * h + qkv + rotated + q)
    yield once + unit * (2 * h + q) + linear(h, q)
    if spec.gated:
        yield once + unit * 3 * h + linear(2 * f, h)
        yield once + unit * (3 * h + 3 * f)
    else:
        yield once + unit * 3 * h + linear(f, h)
        yield once + unit * (3 * h + (f if spec.activation == "relu" else 2 * f))
    yield once + unit * (3 * h + f) + linear(h, f)


def _linear_bytes(shape: _Shape, n: int, k: int, *, quantized: bool) -> int:
    """Return the product [t, n] and, for packed weights, the piece being dequantised.

    Codes take a byte each until they are numbers of e bytes. A matrix of several pieces needs its
    product and the product of one piece besides.
    """
    e, product = shape.element_bytes, shape.tokens * n * shape.element_bytes
    if not quantized:
        return product
    rows = min(n, max(64, DEQUANTIZE_WEIGHTS // k // 64 * 64))
    piece = rows * padded_k(k)
    unpacking = piece * (e + 1)
    if rows == n:
        return max(unpacking, piece * e + product)
    return product + max(unpacking, piece * e + shape.tokens * rows * e)


def _positioned_bytes(spec: ModelSpec, shape: _Shape) -> int:
    """Return what q/k norms and rotation add to qkv, or making ALiBi's bias does.

    A norm makes one float32 copy; the norms' results live until both are rotated. The bias of
    16-bit dtypes is made in float32.
    """
    unit, e = shape.tokens * shape.element_bytes, shape.element_bytes
    q, g = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    if spec.positions == "alibi":
        return 4 * _alibi_elements(spec, shape) if e < 4 else 0
    if spec.positions == "learned":
        return 0
    if not spec.qk_norm:
        return unit * (q + g)
    norming = shape.tokens * q * (4 + (e if e < 4 else 0))
    return max(unit * 2 * (q + g), norming)


def _step_bytes(spec: ModelSpec, shape: _Shape) -> int:
    """Return what a step derives once for all layers: cos and sin, the bias of the scores."""
    e = shape.element_bytes
    if spec.positions == "alibi":
        return _alibi_elements(spec, shape) * e
    # A cached step of ragged rows masks each row's future for every head that shares keys.
    mask = 0 if shape.fresh else shape.rows * (spec.heads // spec.kv_heads) * shape.keys * e
    if spec.positions == "learned":
        return mask
    angles = shape.row_tokens if shape.fresh else shape.tokens
    return mask + angles * spec.head_dim * e


def _alibi_elements(spec: ModelSpec, shape: _Shape) -> int:
    """Return the size of [H, s, T], for every row once their positions differ."""
    rows = 1 if shape.fresh else shape.rows
    return rows * spec.heads * shape.row_tokens * shape.keys


def _logits_bytes(spec: ModelSpec, shape: _Shape) -> int:
    """Return the last layer's output, each row's last token of it, its norm, and the logits."""
    elements = shape.tokens * spec.hidden + shape.rows * (2 * spec.hidden + spec.vocab)
    return elements * shape.element_bytes
