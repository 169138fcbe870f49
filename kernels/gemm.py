"""y = x w^T on a GPU: `plan` decides which kernel and how, `run` launches it, one op wraps both.

    M rows of x        path
    1, 2               rows_kernel: all of K in one program
    up to a crossover  tile_kernel: BM rows of x at a time, K split over programs
    above              dequantise, then cuBLAS
    GPU before sm_80   dequantise, then cuBLAS, always: Triton drives no older tensor core

Which configuration: `tuned/*.json` (measured, per GPU and shape), else `default_config`.
Rows of w past the last full 16 go through cuBLAS. Nothing here synchronises or allocates more than
torch's caching allocator can serve inside a CUDA graph.
"""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton
from torch import Tensor
from torch.nn import functional

from llmpq.kernels.dequantize import dequantize_triton
from llmpq.kernels.formats import BLOCK_ROWS
from llmpq.kernels.gemm_rows import rows_kernel
from llmpq.kernels.gemm_tile import tile_kernel
from llmpq.kernels.qweight import QuantizedWeight

TENSOR_CORE_CAPABILITY = (8, 0)
"""Oldest compute capability for which Triton emits tensor-core code."""

TRITON_CAPABILITY = (7, 5)
"""Oldest compute capability on which the dequantise kernel is used; torch operators below."""

M_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Tuned entries and plans are kept per bucket: the least one that is >= M."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """One way to compute a product; `kernel` is "rows", "tile" or "dense" (dequantise, cuBLAS)."""

    kernel: str
    blocks: int = 1
    """16-row blocks of w a warp holds (BH)."""
    warps: int = 4
    depth: int = 2
    """k-groups of w in flight in registers."""
    x_depth: int = 2
    """rows: k-groups of x in flight."""
    bm: int = 16
    """tile: rows of x a program multiplies."""
    stages: int = 1
    """tile: cp.async stages; 1 keeps weights in registers instead."""
    split: int = 1
    """tile: programs that share one tile's K."""
    scale_w: bool = False
    """tile: scale the operand instead of the accumulator."""

    def __post_init__(self) -> None:
        # Triton 3.6 overlaps the next step's operand with wgmma still reading the last one's
        # registers when a pipelined loop feeds it from arithmetic: wrong sums (H200).
        if self.scale_w and self.stages > 1:
            raise ValueError("scale_w needs stages = 1: pipelined loops of it compute wrong sums")


DENSE = Config(kernel="dense")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A decided product: the configuration and the launch it makes."""

    config: Config
    pdl: bool
    kwidth4: bool
    interpret: bool


def bucket(rows: int) -> int | None:
    """Return the least of `M_BUCKETS` that holds `rows`, or None above all."""
    return next((m for m in M_BUCKETS if rows <= m), None)


def default_config(bits: int, n: int, k: int, rows: int, *, multiprocessors: int) -> Config:
    """Return a sane configuration for shapes and GPUs that nobody tuned."""
    groups = -(-k // 128)
    if rows <= 2:
        many = n // BLOCK_ROWS >= 2.5 * multiprocessors
        return Config(kernel="rows", warps=4 if many else 8, depth=4 if bits == 8 else 6)
    if rows > 256:
        return DENSE
    bm = max(16, min(128, 1 << (rows - 1).bit_length()))
    tiles = -(-n // 128) * -(-rows // bm)
    split = max(1, min(groups // 2, 2 * multiprocessors // tiles)) if rows <= bm else 1
    if rows > 32:
        return Config(kernel="tile", warps=8, bm=bm, stages=3, split=split)
    return Config(kernel="tile", warps=8, bm=bm, depth=2 if groups % 2 == 0 else 1, split=split)


@functools.cache
def _tuned() -> dict[tuple[str, int, int, int, int], Config]:
    """(GPU name, bits, N, K, M bucket) to the configuration measured best."""
    found = {}
    for path in sorted((Path(__file__).parent / "tuned").glob("*.json")):
        table = json.loads(path.read_text())
        for entry in table["entries"]:
            key = (table["gpu"], entry["bits"], entry["n"], entry["k"], entry["m"])
            found[key] = Config(**entry["config"])
    return found


def tuned_shapes() -> list[tuple[int, int]]:
    """Return every tuned (N, K)."""
    return sorted({(n, k) for _, _, n, k, _ in _tuned()})


@functools.cache
def plan(bits: int, n: int, k: int, rows: int, device: torch.device) -> Plan:
    """Decide how to multiply `rows` rows of x by a weight [n, k] on `device`."""
    if device.type != "cuda":
        raise ValueError(f"plan: got device {device}, expected a CUDA GPU")
    properties = torch.cuda.get_device_properties(device)
    capability = (properties.major, properties.minor)
    if capability < TENSOR_CORE_CAPABILITY or n < BLOCK_ROWS:
        return make_plan(DENSE, capability)
    config = next(
        # Bits without their own measurement use the 4-bit one: the layouts differ little.
        (
            c
            for b in (bits, 4)
            if (c := _tuned().get((properties.name, b, n, k, bucket(rows) or 0)))
        ),
        None,
    )
    if config is None and bucket(rows) is None:
        config = DENSE
    if config is None:
        count = properties.multi_processor_count
        config = default_config(bits, n, k, rows, multiprocessors=count)
    return make_plan(config, capability)


def make_plan(config: Config, capability: tuple[int, int], *, interpret: bool = False) -> Plan:
    """Fit a configuration to a compute capability."""
    hopper_on = capability >= (9, 0)
    return Plan(
        config=config,
        pdl=hopper_on and not interpret,
        kwidth4=not hopper_on,
        interpret=interpret,
    )


def run(
    plan: Plan,
    x_MK: Tensor,
    q: QuantizedWeight,
    bias: Tensor | None = None,
    residual_MN: Tensor | None = None,
) -> Tensor:
    """Launch the planned product: y [M, N] = x w^T (+ bias) (+ residual)."""
    if x_MK.dtype != q.scale.dtype or x_MK.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(
            f"linear on a GPU: got x in {x_MK.dtype}, expected {q.scale.dtype}, the 16-bit dtype "
            "the weight was quantised for. Quantise with dtype=x.dtype."
        )
    x_MK = x_MK.contiguous()
    if plan.config.kernel == "dense":
        return _dense(x_MK, q, bias, residual_MN, plan.interpret)
    y_MN = x_MK.new_empty(x_MK.shape[0], q.out_features)
    if x_MK.shape[0] == 0:
        return y_MN
    launch = _launch_rows if plan.config.kernel == "rows" else _launch_tiles
    launch(plan, x_MK, q, bias, residual_MN, y_MN)
    full = q.out_features // BLOCK_ROWS * BLOCK_ROWS
    if full < q.out_features:
        tail = q.row_slice(full, q.out_features)
        part = None if bias is None else bias[full:]
        more = None if residual_MN is None else residual_MN[:, full:]
        y_MN[:, full:] = _dense(x_MK, tail, part, more, plan.interpret)
    return y_MN


def _dense(
    x: Tensor, q: QuantizedWeight, bias: Tensor | None, residual: Tensor | None, interpret: bool
) -> Tensor:
    if interpret or torch.cuda.get_device_capability(x.device) >= TRITON_CAPABILITY:
        w = dequantize_triton(q, interpret=interpret)
    else:
        w = q.dequantize(x.dtype)
    y = functional.linear(x, w, bias)
    return y if residual is None else y + residual


def _launch_rows(
    plan: Plan,
    x: Tensor,
    q: QuantizedWeight,
    bias: Tensor | None,
    residual: Tensor | None,
    y: Tensor,
) -> None:
    config, (m, k) = plan.config, x.shape
    planes, scale, zero = q.block_words()
    blocks, groups = q.out_features // BLOCK_ROWS, -(-k // 128)
    warps = min(config.warps, 1 << (groups.bit_length() - 1))
    rows_kernel[(triton.cdiv(blocks, config.blocks),)](
        x,
        planes[0],
        planes[-1],
        scale,
        zero,
        x if bias is None else bias,
        x if residual is None else residual,
        y,
        m,
        q.out_features,
        k,
        blocks,
        groups,
        BITS=q.bits,
        GROUPED=q.group_size is not None,
        SYMMETRIC=q.symmetric,
        EVEN_K=k % 128 == 0,
        EVEN_G=groups % warps == 0,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        BH=config.blocks,
        WM=warps,
        STEPS=triton.cdiv(groups, warps),
        D=config.depth,
        XD=config.x_depth,
        PDL=plan.pdl,
        INTERPRET=plan.interpret,
        num_warps=warps,
        num_stages=1,
        launch_pdl=plan.pdl,
    )


def _launch_tiles(
    plan: Plan,
    x: Tensor,
    q: QuantizedWeight,
    bias: Tensor | None,
    residual: Tensor | None,
    y: Tensor,
) -> None:
    config, (m, k) = plan.config, x.shape
    planes, scale, zero = q.block_words()
    blocks, groups = q.out_features // BLOCK_ROWS, -(-k // 128)
    bn = BLOCK_ROWS * config.blocks * config.warps
    tiles, split = triton.cdiv(blocks * BLOCK_ROWS, bn), config.split
    partial = x.new_empty(tiles * split * bn * config.bm if split > 1 else 1, dtype=torch.float32)
    tile_kernel[(triton.cdiv(m, config.bm), tiles, split)](
        x,
        planes[0],
        planes[-1],
        scale,
        zero,
        x if bias is None else bias,
        x if residual is None else residual,
        y,
        partial,
        _arrivals(x.device, tiles),
        m,
        q.out_features,
        k,
        blocks,
        groups,
        split,
        BITS=q.bits,
        GROUPED=q.group_size is not None,
        SYMMETRIC=q.symmetric,
        EVEN_K=k % 128 == 0,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        SPLIT=split > 1,
        SCALE_W=config.scale_w,
        BH=config.blocks,
        WM=config.warps,
        BM=config.bm,
        D=config.depth if config.stages == 1 and groups % config.depth == 0 else 1,
        STAGES=config.stages,
        PDL=plan.pdl,
        KWIDTH4=plan.kwidth4,
        INTERPRET=plan.interpret,
        num_warps=config.warps,
        num_stages=config.stages,
        launch_pdl=plan.pdl,
        maxnreg=_register_limit(config, m),
    )


def _register_limit(config: Config, rows: int) -> int | None:
    """128 for pipelined products of one tile of x: two programs of 8 warps share a multiprocessor.

    H200, gate_up, M = 64: 149 registers 41.6 us, at most 128 34.0 us. With several tiles of x the
    limit costs more than it brings (o, M = 256: 20.8 us without, 31.8 us with it).
    """
    return 128 if config.warps == 8 and config.stages > 1 and rows <= config.bm <= 64 else None


def _arrivals(device: torch.device, tiles: int) -> Tensor:
    """Counters of arrived shares, one a tile, zero between launches: the last share resets its own.

    Products on one stream take turns; two streams must not share counters, so each has its own.
    A captured graph runs on whatever stream replays it and takes the default stream's, which must
    be zeroed outside the capture: every eager product sees to that.
    """
    size = 1 << max(12, (tiles - 1).bit_length())
    default = _counters(device, 0, size)
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return default
    return _counters(device, torch.cuda.current_stream(device).cuda_stream, size)


@functools.cache
def _counters(device: torch.device, stream: int, size: int) -> Tensor:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a product with split K was captured before any ran: its counters would not be zero. "
            "Call linear once with these shapes before capturing a CUDA graph."
        )
    return torch.zeros(size, dtype=torch.int32, device=device)


@torch.library.custom_op("llmpq::quantized_linear", mutates_args=())
def quantized_linear(
    x: Tensor,
    planes: list[Tensor],
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    bits: int,
    per_channel: bool,
    out_features: int,
) -> Tensor:
    """The product as one opaque operator, so that torch.compile traces past it."""
    q = QuantizedWeight.fragment(planes, scale, zero, bits, per_channel, out_features, x.shape[1])
    chosen = plan(bits, out_features, x.shape[1], bucket(x.shape[0]) or x.shape[0], x.device)
    return run(chosen, x, q, bias, residual)


@quantized_linear.register_fake
def _(
    x: Tensor,
    planes: list[Tensor],
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    bits: int,
    per_channel: bool,
    out_features: int,
) -> Tensor:
    return x.new_empty(x.shape[0], out_features)


def linear_gpu(
    x_MK: Tensor, q: QuantizedWeight, bias: Tensor | None, residual_MN: Tensor | None
) -> Tensor:
    """Multiply x [M, K] by a FRAGMENT weight; through the custom op where torch.compile traces.

    Dispatching the op is host time that short prompts wait for (H200, eager, a layer of 16 tokens:
    0.79 ms with four of them, 0.40 ms with dense weights).
    """
    if not torch.compiler.is_compiling():
        rows, k = x_MK.shape
        return run(plan(q.bits, q.out_features, k, bucket(rows) or rows, x_MK.device), x_MK, q,
                   bias, residual_MN)  # fmt: skip
    return quantized_linear(
        x_MK,
        list(q.planes),
        q.scale,
        q.zero,
        bias,
        residual_MN,
        q.bits,
        q.group_size is None,
        q.out_features,
    )


def config_entry(config: Config) -> dict[str, object]:
    """Return the fields of a configuration that differ from the defaults, for `tuned/*.json`."""
    plain = asdict(Config(kernel=config.kernel))
    return {k: v for k, v in asdict(config).items() if k == "kernel" or v != plain[k]}
