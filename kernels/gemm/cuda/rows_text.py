"""The CUDA C++ of one tile of `wgmma_rows.cu`: its constants, unpacking and product before it.

Unpacking gives the operands of gluon_unpack.py, so that products of the same tiles have the same
bits; 3 bits take its assembly, 4 and 8 that of rows_unpack.py.
"""

from __future__ import annotations

import functools

from llmpq.kernels.gemm.cuda.cuda_text import defined, numbered, part, wgmma_parts, zero_constants
from llmpq.kernels.gemm.cuda.rows_unpack import (
    JOIN,
    SCALE,
    is_subnormal,
    pairs_text,
    symmetric_zeros,
    zero_text,
)
from llmpq.kernels.gemm.gluon.gluon_unpack import CONSTANTS, scaled_text
from llmpq.kernels.gemm.gluon.gluon_unpack import zero_text as three_zeros
from llmpq.kernels.gemm.ranking.rows_tile import RowsTile

_REGISTERS = {2: (232, 40), 3: (160, 32)}
"""Of a thread that multiplies and of one that asks, by warpgroups: what a multiprocessor has."""


@functools.lru_cache(maxsize=256)
def text(tile: RowsTile) -> str:
    """Return the kernel's whole text."""
    x, words = tile.slots
    registers, asking = _REGISTERS[tile.warpgroups]
    constants = {
        "BITS": tile.bits,
        "IS_BF16": int(tile.kind == "bf16"),
        "ZEROS": int(tile.zeros),
        "GROUPED": int(tile.grouped),
        "NT": tile.rows,
        "WGS": tile.warpgroups,
        "BH": 1,
        "SPLIT": tile.split,
        "XS": x,
        "WS": words,
        "ZC": _zero_count(tile),
        "SUBNORMAL": int(is_subnormal(tile.bits, tile.kind)),
        "REGISTERS": registers,
        "REGISTERS_ASKING": asking,
    }
    made = _unpacking(tile) + _zero_constants(tile) + _product(tile)
    return defined(constants) + wgmma_parts() + made + part("wgmma_rows.cu")


def _zero_count(tile: RowsTile) -> int:
    return 2 if tile.bits != 3 else len(CONSTANTS[tile.bits, tile.kind])


def _unpacking(tile: RowsTile) -> str:
    """Return device functions from words to pairs of scaled numbers."""
    zeros = [f'"r"(z[{i}])' for i in range(_zero_count(tile))]
    scales = ['"r"(s[0])', '"r"(s[1])']
    if tile.bits == 3:
        inputs = [f'"r"(w{i})' for i in range(3)] + (zeros if tile.zeros else []) + scales
        assembly = numbered(scaled_text(3, tile.kind, symmetric=not tile.zeros), pairs=16)
        outputs = ", ".join(f'"=&r"(a[{i}])' for i in range(16))
        return (
            "__device__ __forceinline__ void unpack(u32 (&a)[16], u32 w0, u32 w1, u32 w2, "
            f'const u32 (&s)[2], const u32 (&z)[ZC]) {{\n  asm("{assembly}" : {outputs} : '
            f"{', '.join(inputs)});\n}}\n"
        )
    found = ""
    for half in (0, 1):
        words = ["w", "v"] if tile.bits == 8 else ["w"]
        assembly = numbered(pairs_text(tile.bits, tile.kind, half))
        operands = [f'"r"({o})' for o in (*words, "s[0]", "s[1]", "z[0]", "z[1]")]
        found += (
            f"__device__ __forceinline__ void unpack{half}(u32 &p, u32 &q, u32 w, u32 v, "
            f'const u32 (&s)[2], const u32 (&z)[2]) {{\n  asm("{assembly}" : "=&r"(p), "=&r"(q) : '
            f"{', '.join(operands)});\n}}\n"
        )
    if tile.bits == 8:
        found += (
            "__device__ __forceinline__ void join(u32 &p, u32 &q, u32 w, u32 v) {\n"
            f'  asm("{numbered(JOIN)}" : "=&r"(p), "=&r"(q) : "r"(w), "r"(v));\n}}\n'
        )
    if is_subnormal(tile.bits, tile.kind):
        found += (
            "__device__ __forceinline__ u32 scaled_up(u32 s) {\n  u32 v;\n"
            f'  asm("{numbered(SCALE)}" : "=r"(v) : "r"(s));\n  return v;\n}}\n'
        )
    return found


def _zero_constants(tile: RowsTile) -> str:
    """Return the device function that makes what unpacking takes off of a pair of zeros."""
    bits, kind = tile.bits, tile.kind
    known = CONSTANTS[3, kind] if bits == 3 else symmetric_zeros(bits, kind)
    if not tile.zeros:
        return zero_constants(known, None)
    return zero_constants(known, three_zeros(3, kind) if bits == 3 else zero_text(bits, kind))


def _product(tile: RowsTile) -> str:
    """Return the device function of one wgmma: 64 rows of w, 16 k, all rows of x."""
    count = tile.rows // 2
    sums = ", ".join(f"%{i}" for i in range(count))
    left = ", ".join(f"%{count + i}" for i in range(4))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    operands = ", ".join(f'"r"(a[4 * j + {i}])' for i in range(4))
    name = f"wgmma.mma_async.sync.aligned.m64n{tile.rows}k16.f32.{tile.kind}.{tile.kind}"
    return (
        f"__device__ __forceinline__ void mma(float (&d)[{count}], const u32 (&a)[16], int j, "
        f'u64 x) {{\n  asm volatile("{{.reg .pred p;setp.ne.b32 p, %{count + 5}, 0;{name} '
        f'{{{sums}}}, {{{left}}}, %{count + 4}, p, 1, 1, 0;}}" : {outputs} : {operands}, '
        f'"l"(x), "r"(1));\n}}\n'
    )
