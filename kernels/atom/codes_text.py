"""The CUDA C++ of one tile of `wgmma_codes.cu`: its constants and products before it."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

from llmpq.kernels.gemm.cuda.cuda_text import defined, wgmma_parts
from llmpq.kernels.gemm.ranking.wgmma_plan import SHARED_BYTES

_ALIGNMENT, _BARRIERS = 1024, 512
_MOST_SLOTS = 8
_REGISTERS = {2: (232, 40), 3: (160, 32)}
"""Of a thread that multiplies and of one that asks, by warpgroups: what a multiprocessor has."""


@dataclass(frozen=True, kw_only=True)
class CodesTile:
    """What a compiled kernel is for."""

    kind: str
    """Of y: "f16" or "bf16"."""
    scales: str
    """Of the weight's scales: the same."""
    outliers: bool
    tokens: int
    """A multiple of 16: int8 products know no other."""
    warpgroups: int

    @property
    def slot_bytes(self) -> int:
        """Codes, words and scales of a k-group."""
        words = 4 * self.warpgroups * (1024 + 32)
        return self.tokens * 128 + words + -(-self.tokens * 4 // 128) * 128

    @property
    def slots(self) -> int:
        """K-groups on their way."""
        held = _ALIGNMENT + _BARRIERS + self.warpgroups * self.tokens * 128
        return min(_MOST_SLOTS, (SHARED_BYTES - held) // self.slot_bytes)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a program."""
        staged = self.warpgroups * self.tokens * 128
        return _ALIGNMENT + _BARRIERS + staged + self.slots * self.slot_bytes


@functools.lru_cache(maxsize=64)
def text(tile: CodesTile) -> str:
    """Return the kernel's whole text."""
    registers, asking = _REGISTERS[tile.warpgroups]
    constants = {
        "IS_BF16": int(tile.kind == "bf16"),
        "SCALES_BF16": int(tile.scales == "bf16"),
        "OUTLIERS": int(tile.outliers),
        "NT": tile.tokens,
        "WGS": tile.warpgroups,
        "BH": 1,
        "SPLIT": 1,
        "SLOTS": tile.slots,
        "REGISTERS": registers,
        "REGISTERS_ASKING": asking,
    }
    products = _product("mma", tile.tokens, "f32.e4m3.e4m3", "float", "f", ", 1, 1")
    products += _product("mma8", tile.tokens, "s32.s8.s8", "int", "r", "")
    body = Path(__file__).with_name("wgmma_codes.cu").read_text()
    return defined(constants) + wgmma_parts() + products + body


def _product(name: str, tokens: int, kinds: str, number: str, constraint: str, signs: str) -> str:
    """Return the device function of one wgmma, 64 rows of w by 32 k; number 0 starts sums anew."""
    count = tokens // 2
    sums = ", ".join(f"%{i}" for i in range(count))
    left = ", ".join(f"%{count + i}" for i in range(4))
    outputs = ", ".join(f'"+{constraint}"(d[{i}])' for i in range(count))
    operands = ", ".join(f'"r"(a[4 * j + {i}])' for i in range(4))
    instruction = f"wgmma.mma_async.sync.aligned.m64n{tokens}k32.{kinds}"
    return (
        f"__device__ __forceinline__ void {name}({number} (&d)[{count}], const u32 (&a)[16], "
        f'int j, u64 x) {{\n  asm volatile("{{.reg .pred p;setp.ne.b32 p, %{count + 5}, 0;'
        f"{instruction} "
        f'{{{sums}}}, {{{left}}}, %{count + 4}, p{signs};}}" : {outputs} : {operands}, '
        f'"l"(x), "r"(j));\n}}\n'
    )
