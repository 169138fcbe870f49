"""The largest temporary of a stage: what one micro-batch needs beside weights and KV cache.

On a CPU; a GPU's are in llmpq/sizes/gpu_workspace.py. The formulas follow
runtime/models/layers.py moment by moment: what is alive while a
line runs, in bytes. A test compares them with the tensors that really live
(tests/runtime/models/test_memory.py).

Symbols: v rows, s tokens of a row, t = v s tokens, T keys in sight, e bytes of an element; of
`ModelSpec`: h hidden, q = H D query and g = G D key or value features, F ffn, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from llmpq.models.model_spec import ModelSpec
from llmpq.precision import KVPrecision, padded_k
from llmpq.sizes.gpu_workspace import gpu_workspace_bytes, head_bytes, wide_features
from llmpq.sizes.kv_format import (
    BLOCK_TOKENS,
    HOLDBACK_TOKENS,
    RING_TOKENS,
    packed_blocks,
    padded_head_dim,
)
from llmpq.sizes.stage_shape import StageShape
from llmpq.sizes.state_size import recurrence_bytes
from llmpq.workload import Workload, chunk_tokens

DEQUANTIZE_WEIGHTS = 1 << 20
"""Weights a CPU dequantises at a time (kernels/cpu/native_linear.py)."""

KV_PIECE_ELEMENTS = 1 << 19
"""Elements of a low-bit KV cache that a CPU dequantises or packs at a time, keys or values
(kernels/kv/reference.py)."""

CHUNK_ELEMENTS = 1 << 20
"""Elements of keys that a chunk of a prompt gathers from a pool of blocks together, or of its
scores as numbers, on a CPU (runtime/cache/cpu_paged_kv.py)."""
CHOICE_ELEMENTS = 1 << 22
"""Scores of an indexer's queries, or of those over what it chose, that are numbers at a time."""
LEAST_KEYS = 128
"""Keys that a chunk's queries attend to together, at least."""
QUERIES_AT_ONCE = 64
"""Queries of a chunk that attend to packed keys together (runtime/cache/cpu_packed_kv.py)."""


def workspace_bytes(spec: ModelSpec, workload: Workload, stage: StageShape) -> int:
    """Return the bytes of the largest temporary over both phases.

    It depends on the set of precisions only. A stage that is not the first also holds the hidden
    states it received. GPUs have moments of their own (llmpq/sizes/gpu_workspace.py).
    """
    if stage.on_gpu:
        return gpu_workspace_bytes(spec, workload, stage)
    e = workload.dtype_bytes
    kv, prompt_len = workload.kv, workload.prompt_len
    tokens = chunk_tokens(prompt_len, stage.prefill_chunk)
    whole = tokens == prompt_len
    prefill = _Shape(stage.prefill_microbatch, tokens, prompt_len, e, kv, fresh=whole)
    decode = _Shape(stage.decode_microbatch, 1, workload.max_len, e, kv, fresh=False)
    peaks = []
    for shape in (prefill, decode):
        streams = spec.stream_features - spec.hidden
        received = 0 if stage.first else shape.tokens * spec.hop_features * e
        # The layers' own inputs: made with three of their size, then held all through the stage.
        inputs = shape.tokens * spec.num_layers * spec.per_layer_dim * e
        moments = [4 * inputs if stage.first else 0]
        for quantized in {p.weight_bits < 16 for p in stage.precisions}:
            # A layer holds its streams as it found them, as it predicts and as it corrects them.
            beside = inputs + 3 * shape.tokens * streams * e
            moments.append(beside + _widest_moment(spec, shape, quantized))
        if stage.last:
            moments.append(head_bytes(spec, tokens=shape.tokens, rows=shape.rows, element_bytes=e))
        peaks.append(received + max(moments))
    return max(peaks)


@lru_cache(maxsize=1 << 14)  # planners ask for every pair of sizes
def _widest_moment(spec: ModelSpec, shape: _Shape, quantized: bool) -> int:
    """Return the most that lives at once while one micro-batch passes through a layer."""
    kinds = {spec}
    if spec.differs_in_attention and not spec.mixers:
        kinds = {spec.of_layer(index) for index in range(spec.num_layers)}
    return max(max(_layer_moments(one, shape, quantized=quantized)) for one in kinds)


@dataclass(frozen=True)
class _Shape:
    """One micro-batch."""

    rows: int
    row_tokens: int
    keys: int
    element_bytes: int
    kv: KVPrecision
    fresh: bool

    @property
    def tokens(self) -> int:
        return self.rows * self.row_tokens

    @property
    def chunked(self) -> bool:
        """Whether rows are chunks of prompts behind what is cached: each attends by itself."""
        return not self.fresh and self.row_tokens > 1

    @property
    def piece(self) -> _Shape:
        """The queries of one chunk that attend to packed keys together."""
        return replace(self, rows=1, row_tokens=min(self.row_tokens, QUERIES_AT_ONCE))

    @property
    def low_bit(self) -> bool:
        return self.kv is not KVPrecision.KV16

    @property
    def blocks(self) -> int:
        """Packed blocks of a row with all its keys."""
        return packed_blocks(self.keys)

    @property
    def recent(self) -> int:
        """16-bit keys of the row that has most (llmpq/sizes/kv_format.py)."""
        return min(self.keys, BLOCK_TOKENS + HOLDBACK_TOKENS)

    @property
    def completed(self) -> int:
        """Blocks that the step completes: a prompt's, or one of every row."""
        return self.rows * (self.blocks if self.fresh else min(1, self.blocks))


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

    gate = q if spec.attention_gate else 0
    qkv, qk = q + gate + 2 * g, q + g
    yield once + unit * 2 * h + linear(qkv, h)
    yield once + unit * (2 * h + qkv) + _positioned_bytes(spec, shape)
    rotated = qk if spec.positions == "rotary" else 0
    attending = unit * (2 * h + qkv + rotated + q)
    if shape.chunked and not shape.low_bit:
        yield once + attending + _chunk_bytes(spec, shape)
    else:
        own = shape.piece if shape.chunked else shape
        yield once + attending + _score_bytes(spec, own)
        if shape.low_bit:
            yield once + unit * (2 * h + qkv + rotated) + _packing_bytes(spec, own)
            if not shape.fresh:
                yield once + attending + _dequantised_bytes(spec, own)
    if spec.indexer is not None and shape.keys > spec.indexer.topk:
        # Queries of the indexer beside the others, a row's keys, and the scores of a piece.
        wide = q + spec.indexer.heads * spec.head_dim
        keys = shape.keys * (spec.head_dim * shape.element_bytes + 4 * spec.indexer.dim)
        yield once + unit * (2 * h + 2 * wide + q) + keys + 16 * CHOICE_ELEMENTS
    yield once + unit * (2 * h + q + 2 * gate) + linear(h, q)
    if spec.recurrent is not None:
        form = spec.recurrent
        beside = recurrence_bytes(form, shape.rows, shape.row_tokens)
        yield once + unit * 2 * h + linear(form.in_features, h)
        yield once + unit * (2 * h + form.in_features) + beside
        yield once + unit * (2 * h + form.inner) + linear(h, form.inner)
    if spec.norm_order != "pre" or spec.normed_stream is not None:
        yield once + unit * 5 * h  # what a norm behind is given and gives, and its float32
    if spec.shared_ffn:
        yield once + unit * (5 * h + 3 * spec.shared_ffn)
    if spec.experts:
        # All tokens may be sent to one expert. Beside x, its norm and the new residual stream live
        # the sum over experts and the tokens gathered for one.
        held = once + unit * 5 * h + _routing_bytes(spec, shape)
        inner = spec.mlp_hidden
        if spec.latent_experts:
            held += 2 * unit * inner  # what experts read, and what they give
            yield held + linear(inner, h)
        yield held + linear(2 * f, inner)
        yield held + unit * 3 * f
        yield held + unit * f + linear(inner, f)
        return
    if spec.gated:
        yield once + unit * 3 * h + linear(2 * f, h)
        yield once + unit * (3 * h + 3 * f)
    else:
        yield once + unit * 3 * h + linear(f, h)
        yield once + unit * (3 * h + wide_features(spec))
    yield once + unit * (3 * h + f) + linear(h, f)


def _score_bytes(spec: ModelSpec, shape: _Shape) -> int:
    """Return the scores that soft caps and sinks need as float32 numbers, [v, H, s, T] thrice.

    Scores, with a sink beside them, and the softmax; then as shares in e bytes.
    """
    if not (spec.score_cap or spec.sinks):
        return 0
    scores = shape.rows * spec.heads * shape.row_tokens * (shape.keys + 1)
    return scores * (12 + shape.element_bytes)


def _chunk_bytes(spec: ModelSpec, shape: _Shape) -> int:
    """Return what a chunk of one prompt attends with: pieces of keys, and sums over them.

    A chunk's own keys are repeated for every query head; those before are gathered from blocks,
    beside its queries, their result so far in float32 and a piece's. Where the keys are takes 8
    bytes for each: all that grows with the context.
    """
    e, queries, dim = shape.element_bytes, shape.row_tokens, spec.head_dim
    result = spec.heads * queries * dim
    keys = CHUNK_ELEMENTS // (spec.kv_heads * dim)
    explicit = bool(spec.score_cap)
    if explicit or spec.sinks or spec.positions == "alibi":
        keys = max(LEAST_KEYS, min(keys, CHUNK_ELEMENTS // (spec.heads * queries)))
    past = shape.keys - queries
    heads = spec.heads if spec.positions == "alibi" else 1
    masked = explicit or spec.positions == "alibi" or any(spec.windows)

    def attended(count: int, *, own: bool) -> int:
        bias = heads * queries * count if masked else 0
        made = bias * (4 + (e if e < 4 else 0)) + (5 * queries * count if masked else 0)
        repeated = 2 * spec.heads * count * dim * e if masked or own else 0
        scores = 2 * 4 * spec.heads * queries * count if explicit else 0
        return max(made, bias * e + repeated) + scores

    def gathered(count: int) -> int:
        return spec.kv_vectors * count * spec.kv_heads * dim * e + attended(count, own=False)

    beside = e if spec.heads == spec.kv_heads else 2 * e  # a piece's result, queries of a group
    moments = [attended(queries, own=True) + result * e]
    moments.append(gathered(min(keys, past)) + result * (e + beside))
    if past > keys:  # the result so far is in float32 then
        moments.append(gathered(min(keys, past - keys)) + result * (4 + beside))
    moments.append(result * (8 + (e if e < 4 else 0)))
    return 8 * shape.keys + max(moments)


def _window_bytes(spec: ModelSpec, shape: _Shape) -> int:
    """Return the masks of windows, and of all tokens where scores are numbers, [v, R s, T]."""
    if shape.chunked or not (spec.windows or spec.score_cap or spec.sinks):
        return 0
    rep = spec.heads // spec.kv_heads
    kinds = len({window for window in spec.windows if window < shape.keys} | {0})
    rows = 1 if shape.fresh else shape.rows
    width = 4 if spec.score_cap or spec.sinks else shape.element_bytes
    return kinds * rows * rep * shape.row_tokens * shape.keys * (width + 2)


def _routing_bytes(spec: ModelSpec, shape: _Shape) -> int:
    """Return float32 chances [t, E]; weights twice, experts, order and tokens of t k pairs."""
    pairs = spec.experts_per_token * (2 * shape.element_bytes + 3 * 8)
    return shape.tokens * (4 * spec.experts + pairs)


def _linear_bytes(shape: _Shape, n: int, k: int, *, quantized: bool) -> int:
    """Return the product [t, n] and, for packed weights, the piece being dequantised.

    A matrix of several pieces needs its product and the product of one piece besides. Without a
    C++ compiler, the codes of a piece take a byte each until they are numbers.
    """
    e, product = shape.element_bytes, shape.tokens * n * shape.element_bytes
    if not quantized:
        return product
    rows = min(n, max(64, DEQUANTIZE_WEIGHTS // k // 64 * 64))
    piece = rows * padded_k(k)
    return piece * e + (product if rows == n else product + shape.tokens * rows * e)


def _positioned_bytes(spec: ModelSpec, shape: _Shape) -> int:
    """Return what q/k norms and rotation add to qkv, or making ALiBi's bias does.

    A norm makes one float32 copy; the norms' results live until both are rotated. The bias of
    16-bit dtypes is made in float32.
    """
    unit, e = shape.tokens * shape.element_bytes, shape.element_bytes
    q, g = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    if spec.positions == "alibi":
        return 4 * _alibi_elements(spec, shape) if e < 4 and _has_bias(shape) else 0
    if spec.positions == "learned":
        return 0
    limited = unit * (q + 2 * g) if spec.qkv_limit else 0
    if not spec.qk_norm:
        return limited + unit * (q + g)
    norming = shape.tokens * q * (4 + (e if e < 4 else 0))
    return limited + max(unit * 2 * (q + g), norming)


def _step_bytes(spec: ModelSpec, shape: _Shape) -> int:
    """Return what a step derives once for all layers: cos and sin, the bias of the scores."""
    e = shape.element_bytes
    view = 0
    if shape.low_bit:
        view = _view_bytes(spec, shape.piece if shape.chunked else shape)
    if spec.positions == "alibi":
        return view + (_alibi_elements(spec, shape) * e if _has_bias(shape) else 0)
    # A cached step of ragged rows masks each row's future for every head that shares keys.
    rep = spec.heads // spec.kv_heads
    mask = 0 if not _has_bias(shape) or shape.fresh else shape.rows * rep * shape.keys * e
    if spec.positions == "learned":
        return view + mask
    angles = shape.row_tokens if shape.fresh else shape.tokens
    thetas = 1 if spec.window_rope_theta is None else 2
    windows = _window_bytes(spec, shape)
    return view + mask + windows + thetas * angles * spec.head_dim * e


def _has_bias(shape: _Shape) -> bool:
    """Whether a step makes one bias for all layers; a low-bit cache masks its own keys."""
    return shape.fresh or not (shape.low_bit or shape.chunked)


def _view_bytes(spec: ModelSpec, shape: _Shape) -> int:
    """Return the tables of a step over a low-bit cache (kernels/kv/step_view.py).

    Four int64 per token the ring takes; two and a flag per 16-bit token that is gathered; whether a
    query sees a key.
    """
    tables = 32 * shape.rows * min(shape.row_tokens, RING_TOKENS)
    gathered = shape.completed * BLOCK_TOKENS
    if shape.fresh:
        return tables + 17 * gathered
    keys = shape.blocks * BLOCK_TOKENS + shape.recent
    seen = shape.rows * shape.row_tokens * keys
    return tables + 17 * (gathered + shape.rows * shape.recent) + seen


def _packing_bytes(spec: ModelSpec, shape: _Shape) -> int:
    """Return what packing a piece of the completed blocks needs, or writing the ring.

    Keys and values of e bytes, in float32 where they are not, two float32 temporaries, codes. Keys
    of 16 bits stay as they are.
    """
    e, plain_keys = shape.element_bytes, shape.kv.key_bits == 16
    block = spec.kv_heads * BLOCK_TOKENS
    at_once = max(1, KV_PIECE_ELEMENTS // (block * padded_head_dim(spec.head_dim)))
    elements = min(shape.completed, at_once) * block * spec.head_dim
    ring = shape.rows * min(shape.row_tokens, RING_TOKENS) * spec.kv_heads * spec.head_dim * e
    in_float32 = 0 if e == 4 else 4 if plain_keys else 8
    return max(elements * (2 * e + in_float32 + (8 if plain_keys else 9)), ring)


def _dequantised_bytes(spec: ModelSpec, shape: _Shape) -> int:
    """Return what attending over a piece of a low-bit cache needs: some rows, some heads.

    Chunks of prompts need it, and rows of one token where our own code does not read in place; a
    chunk's piece holds its queries twice, its keys, values and result besides.

    The keys are whole when values are unpacked (bytes twice, words twice) and joined with the
    newest tokens, or gathered where nothing is packed.
    """
    e, channels = shape.element_bytes, padded_head_dim(spec.head_dim)
    row = shape.blocks * BLOCK_TOKENS + shape.recent
    at_once = max(1, KV_PIECE_ELEMENTS // (row * channels))
    rows = min(shape.rows, max(1, at_once // spec.kv_heads))
    heads = rows * min(at_once, spec.kv_heads)
    keys = heads * row * spec.head_dim * e
    recent = heads * shape.recent * spec.head_dim * e
    if not shape.blocks:
        return keys + 3 * recent
    old = heads * shape.blocks * BLOCK_TOKENS * channels
    unpacking = old * max(2 + shape.kv.value_bits / 4, 1 + e)
    repeated = spec.heads // spec.kv_heads if shape.row_tokens > 1 else 1
    masking = shape.tokens * row * max(10 if any(spec.windows) else 0, repeated * (1 + e))
    if spec.positions == "alibi":
        masking = shape.tokens * row * max(8 + e, 1 + e + heads // rows * e)
    held = keys
    if shape.row_tokens > 1:
        held += shape.tokens * (3 * spec.heads + 2 * spec.kv_heads) * spec.head_dim * e
    return held + max(3 * recent, recent + int(unpacking), recent + old * e + keys, keys + masking)


def _alibi_elements(spec: ModelSpec, shape: _Shape) -> int:
    """Return the size of [H, s, T], for every row once their positions differ."""
    rows = 1 if shape.fresh else shape.rows
    return rows * spec.heads * shape.row_tokens * shape.keys
