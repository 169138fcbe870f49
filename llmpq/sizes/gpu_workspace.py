"""The largest temporary of a stage on a GPU, as runtime/backends/gpu/cuda_layers.py runs.

Other moments than a CPU's (llmpq/sizes/workspace.py): products add the residual stream themselves,
attention's output lives until its layer ends, a packed weight is made dense for many rows.
Besides there are what libraries keep, a decode graph's input and output, the inbox that a stage
before writes into, and outputs that are still on their way to the stage behind.

Symbols: t tokens of a step with its padding, e bytes of an element; of
`ModelSpec`: h hidden, q = H D query and g = G D key or value features, F ffn, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from llmpq.families.common.spec_values import Recurrent
from llmpq.models.model_spec import ModelSpec
from llmpq.precision import KVPrecision, Precision
from llmpq.sizes.kv_format import BLOCK_TOKENS
from llmpq.sizes.stage_shape import StageShape
from llmpq.sizes.state_size import PAIRED_TOKENS
from llmpq.sizes.step_padding import gpu_padded
from llmpq.workload import Workload, chunk_tokens

DENSE_ROWS = 256
"""Rows from which a product may unpack its whole weight (linear_gpu.py's crossover)."""

SHARES_BYTES = 34 << 20
"""Float32 shares of the tiles that the Hopper kernel cuts, in place of an unpacked weight."""

PIECE_BYTES, PIECES_ABOVE = 128 << 20, 512
"""The largest piece of an 8-bit weight that cuBLAS reads in place of these shares, and the tokens
above which it may (kernels/gemm/ranking/config.py, kernels/kernel_table.py)."""

INBOX_SLOTS = 2
"""Messages an inbox has room for (runtime/links/peer_links.py)."""

OUTPUTS_LEAVING = 2
"""Outputs of the largest size that may be on their way while the next one is made: a stage waits
for a slower one behind it (runtime/links/device_links.py, runtime/links/peer_links.py)."""

CHOSEN_ELEMENTS = 1 << 24
"""Scores of an indexer's queries, or sums of latents over what it chose, that are made at a time
(kernels/kv/paged/chosen_latents.py)."""
PART_ELEMENTS = 1 << 21
"""Of the parts of a few rows' sums: 16 heads of 512 channels of as many programs as run at once."""

LIBRARY_BYTES = 66 << 20
"""cuBLAS takes 32 MiB on each of two streams, prompts' and graphs'; the rest is rounding (H200)."""


def gpu_workspace_bytes(spec: ModelSpec, workload: Workload, stage: StageShape) -> int:
    """Return the bytes beside weights and cache when a stage's prompts and tokens need most.

    Where it does not unpack, on Hopper, 8-bit weights meet cuBLAS in pieces, others not.
    """
    e, kv = workload.dtype_bytes, workload.kv
    chunk = chunk_tokens(workload.prompt_len, stage.prefill_chunk)
    # Messages between stages carry no padding.
    rows, decode_rows = stage.prefill_microbatch, stage.decode_microbatch
    tokens = (rows * chunk, decode_rows)
    longest = workload.max_len
    prefill = _Shape(rows, gpu_padded(tokens[0]), longest, e, kv, fresh=True)
    decode = _Shape(decode_rows, decode_rows, longest, e, kv, fresh=False)
    hidden = [count * spec.hidden * e for count in tokens]
    inbox = 0 if stage.first else INBOX_SLOTS * max(hidden)
    moments = []
    for shape, output in zip((prefill, decode), hidden, strict=True):
        # The ids of the step's tokens where there is no inbox; the outputs before, on their way.
        held = 8 * shape.tokens if stage.first else 0
        held += 0 if stage.last else OUTPUTS_LEAVING * output
        moments.append(held + _phase_bytes(spec, shape, stage))
    # Packed weights meet kernels of our own; cuBLAS multiplies dense ones and the head's.
    dense = stage.last or stage.unpacks or any(p.weight_bits == 16 for p in stage.precisions)
    dense = dense or (prefill.tokens > PIECES_ABOVE and Precision.W8A16 in stage.precisions)
    libraries = LIBRARY_BYTES if dense else 0
    return libraries + inbox + _graph_bytes(spec, decode, stage) + max(moments)


@lru_cache(maxsize=1 << 14)  # planners ask for every pair of sizes
def _widest_moment(
    spec: ModelSpec, shape: _Shape, quantized: bool, unpacked_bytes: int | None
) -> int:
    """Return the most that lives at once while one micro-batch passes through a layer."""
    return max(_layer_moments(spec, shape, quantized=quantized, unpacked_bytes=unpacked_bytes))


@dataclass(frozen=True)
class _Shape:
    """One micro-batch."""

    rows: int
    tokens: int
    """Of all rows, with the step's padding."""
    longest: int
    """Tokens of a request at most."""
    element_bytes: int
    kv: KVPrecision
    fresh: bool

    @property
    def unit(self) -> int:
        """Bytes of one feature of all tokens."""
        return self.tokens * self.element_bytes


def _phase_bytes(spec: ModelSpec, shape: _Shape, stage: StageShape) -> int:
    """Return the most that lives at once while one micro-batch passes through the layers."""
    moments = [0]
    for quantized, eight in {(p.weight_bits < 16, p is Precision.W8A16) for p in stage.precisions}:
        pieces = PIECE_BYTES if eight and shape.tokens > PIECES_ABOVE else 0
        moments.append(_widest_moment(spec, shape, quantized, None if stage.unpacks else pieces))
    if stage.last:
        e = shape.element_bytes
        moments.append(head_bytes(spec, tokens=shape.tokens, rows=shape.rows, element_bytes=e))
    return max(moments)


def _graph_bytes(spec: ModelSpec, shape: _Shape, stage: StageShape) -> int:
    """Return what a decode graph holds on to: its input, and its output or logits."""
    given = 0 if stage.first else shape.unit * spec.hidden
    return given + (shape.unit * spec.vocab if stage.last else shape.unit * spec.hidden)


def _layer_moments(
    spec: ModelSpec, shape: _Shape, *, quantized: bool, unpacked_bytes: int | None
) -> Iterator[int]:
    """Yield the bytes alive at each wide moment of a layer, its input x counted.

    `unpacked_bytes`: of a packed weight that are dense at a time at most, None for all.

    Attention: x, its norm, qkv, rotated queries (and keys, for a low-bit cache), the result and a
    float32 per head. MLP: x, attention's result, the new residual stream y, and what is wide.
    """
    unit = shape.unit
    h, f = spec.hidden, spec.ffn
    q, g = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    sums = 4 * shape.tokens * spec.heads if shape.fresh else 0
    rotated = q + (g if shape.kv is not KVPrecision.KV16 else 0)

    def product(n: int, k: int, *, adds: bool = False) -> int:
        """Bytes of y [t, n]: a whole packed weight beside it, and y again plus the residual."""
        if not quantized or shape.tokens <= DENSE_ROWS:
            return unit * n
        if unpacked_bytes is not None:
            own = min(unpacked_bytes, n * k * shape.element_bytes)
            return max(SHARES_BYTES, own) + unit * n
        return max(n * k * shape.element_bytes + unit * n, unit * 2 * n if adds else 0)

    if spec.latent is not None:
        yield unit * (2 * h + g + _latent_features(spec))
        yield unit * (2 * h + g) + _chosen_bytes(spec, shape)
    else:
        gate = q if spec.attention_gate else 0
        yield unit * 2 * h + product(q + gate + 2 * g, h)
        # Norms of heads that no kernel fuses, and limits, make queries and keys anew.
        anew = spec.qk_norm_apart or spec.qk_norm_centred or spec.qk_norm_late
        copies = (2 if anew else 0) * (q + g) + (q + 2 * g if spec.qkv_limit else 0)
        yield unit * (2 * h + q + 2 * gate + 2 * g + copies + rotated + q) + sums
    yield unit * (h + q) + product(h, q, adds=True)
    if spec.recurrent is not None:
        own = spec.recurrent
        yield unit * 2 * h + product(own.in_features, h)
        yield unit * (2 * h + own.in_features) + _recurrence_bytes(own, shape)
    if spec.norm_order != "pre" or spec.normed_stream is not None:
        yield unit * 4 * h  # what a norm behind is given and gives
    if spec.shared_ffn:
        yield unit * (5 * h + q + 3 * spec.shared_ffn)
    if spec.experts:
        # Beside x, attention's result, y and its norm live the sum over experts and who goes where;
        # of every pair of token and expert its hidden features, then what it adds. Experts that
        # cannot be stacked run one by one, and all tokens may go to one.
        k, inner = spec.experts_per_token, spec.mlp_hidden
        held = unit * (5 * h + q) + shape.tokens * (4 * spec.experts + k * 36)
        yield held + unit * k * 3 * f
        yield held + unit * k * (f + inner)
        yield held + product(2 * f, inner)
        yield held + unit * f + product(inner, f)
        return
    if spec.gated:
        yield unit * (3 * h + q) + product(2 * f, h)
        yield unit * (3 * h + q + 3 * f)
    else:
        yield unit * (3 * h + q) + product(f, h)
        yield unit * (3 * h + q + wide_features(spec))
    # A dense product without a bias adds to y in place.
    in_place = not quantized and spec.gated
    yield unit * (2 * h + q + f) + (0 if in_place else product(h, f, adds=True))


def _recurrence_bytes(form: Recurrent, shape: _Shape) -> int:
    """Return what a recurrence holds beside what the matrix in front gives.

    Steps, what is convolved and what is read; then pairs of the tokens of a block, or the gated
    output.
    """
    steps = form.steps if form.is_delta else 0
    steps += 2 * form.low_rank + (form.inner if form.kind == "kda" else 0)
    matrices = {"gated_delta": 2, "mamba2": 1, "lightning": 1}.get(form.kind, 0)
    pairs = form.heads * (4 * shape.tokens + matrices * PAIRED_TOKENS * shape.unit)
    return shape.unit * (steps + form.channels + form.inner) + max(pairs, shape.unit * form.inner)


def _latent_features(spec: ModelSpec) -> int:
    """Return the most features of a token that latent attention holds beside x and the latent.

    Queries as they come, through the keys' matrix, and that beside their rotated part; then these
    and the sums of latents, and values made of them.
    """
    latent = spec.latent
    assert latent is not None
    absorbed, wide = spec.heads * latent.kv_rank, spec.heads * latent.dim
    made = spec.heads * latent.q_head_dim + absorbed + wide
    return max(made, wide + absorbed + spec.heads * latent.v_dim)


def _chosen_bytes(spec: ModelSpec, shape: _Shape) -> int:
    """Return what attention to keys that an indexer chooses holds beside x and its entries.

    Queries of both, an indexer's twice as they are rotated, and the sums; then of some tokens at a
    time every key's score, the best ones and their positions, and float32 sums, of which few rows
    leave several parts.
    """
    latent, form = spec.latent, spec.indexer
    if latent is None or form is None or shape.longest <= form.topk:
        return 0
    sums = spec.heads * latent.kv_rank
    keys = -(-shape.longest // BLOCK_TOKENS) * BLOCK_TOKENS
    tokens = min(shape.tokens, chosen_at_once(keys, sums))
    made = spec.heads * latent.dim + 2 * form.heads * form.dim + sums
    parts = max(tokens * sums, PART_ELEMENTS)
    return shape.unit * made + tokens * (4 * keys + 12 * form.topk) + 4 * parts


def chosen_at_once(keys: int, sums: int) -> int:
    """Return how many tokens of a step choose keys and attend to them together, 16 at least.

    `keys`: of the longest request. `sums`: elements of a token's sums, of all heads.
    """
    return max(16, CHOSEN_ELEMENTS // max(keys, sums) // 16 * 16)


def wide_features(spec: ModelSpec) -> int:
    """Return the features of a token that live while an MLP without a gate is activated."""
    copies = {"relu": 1, "relu2": 1, "xielu": 3}
    return copies.get(spec.activation, 2) * spec.ffn


def head_bytes(spec: ModelSpec, *, tokens: int, rows: int, element_bytes: int) -> int:
    """Return the last layer's output, each row's last token of it, its norm, and the logits."""
    return element_bytes * (tokens * spec.hidden + rows * (2 * spec.hidden + spec.vocab))
