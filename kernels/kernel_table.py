"""The one table of products: which kernel multiplies a form of weight, where, for how many rows.

`eligible` reads it. Lines of a form are tried in their order. Of those that are `ranked` the
quickest is taken by measured times, then by a model of the machine (gemm/choice.py). What a line
cannot say stands under `needs` and is asked where the kernel is launched: the next line serves
where it fails.

A device is a GPU's compute capability, or what a CPU's library is compiled for. `llmpq-dist doctor`
prints the lines of a machine's own devices. Knows no tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

Device = tuple[str, int, int]
"""("cuda", compute capability) or ("cpu", place in CPU_LEVELS, 0)."""
CPU_LEVELS = ("no compiler", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx_int8")
"""What a CPU's products are compiled for (native/library.py), each with all before it."""
INTERPRETED: Device = ("cuda", 8, 0)
"""What Triton's interpreter stands for."""


def gpu(capability: tuple[int, int]) -> Device:
    """Return the device of a compute capability."""
    return "cuda", *capability


def cpu(level: str) -> Device:
    """Return the device of one of `CPU_LEVELS`."""
    return "cpu", CPU_LEVELS.index(level), 0


class KernelForm(StrEnum):
    """How a weight's bytes lie, as far as kernels differ."""

    WORDS = "3, 4, 8 bits, groups of 128 or a row"
    WORDS_BF16_ZEROS = "3, 4 bits with zeros, bfloat16"
    PARTS = "4, 8 bits, groups of 32 or 64"
    PARTS_3 = "3 bits, groups of 32 or 64"
    ROWS = "groups of 32 or 64, rows that are no words"
    MXFP4 = "MXFP4"
    NVFP4 = "NVFP4"
    LOOKED_UP = "NF4, FP4, IQ4"
    E2M1_ROWS = "MXFP4, NVFP4, rows that are no words"
    CODEBOOK_ROWS = "NF4, FP4, IQ4, rows that are no words"
    FP8_WORDS = "FP8"
    FP8_ROWS = "FP8, rows that are no words"
    ATOM_TILES = "W4A4 on Hopper"
    ATOM_TILES_A16 = "W4A4's weight, inputs of 16 bits"
    ATOM_INTEGER = "W4A4 with --integer-scales"
    ATOM = "W4A4, W8A8"
    ATOM_OTHER = "rounded inputs, other schemes"
    DENSE = "16 bits, float32"
    EXPERTS_DENSE = "experts, 16 bits"
    EXPERTS_FLOAT32 = "experts, float32"
    EXPERTS_4 = "experts, 4 bits in groups"
    EXPERTS_3 = "experts, 3 bits, 4 bits by rows"
    EXPERTS_8 = "experts, 8 bits"
    EXPERTS_MXFP4 = "experts, MXFP4"
    EXPERTS_FP8 = "experts, FP8"


class Kernel(StrEnum):
    """A way to multiply."""

    GEMV = "gemv"
    SPLITK_GEMM = "splitk_gemm"
    WGMMA_GEMM = "wgmma_gemm"
    WGMMA_ROWS = "wgmma_rows"
    RING_GEMV = "ring_gemv"
    CUDA_GEMV = "cuda_gemv"
    CUDA_DEQUANTIZE = "cuda_dequantize"
    DEQUANTIZE = "dequantize"
    DEQUANTIZE_TORCH = "dequantize_torch"
    ROWS_GEMM = "rows_gemm"
    AS_WORDS = "as_words"
    FP8_WGMMA = "fp8_wgmma"
    INT8_WGMMA = "int8_wgmma"
    INT8_GEMM = "int8_gemm"
    REFERENCE = "reference"
    EXPERTS_GEMV = "experts_gemv"
    EXPERTS_GEMM = "experts_gemm"
    EXPERTS_WIDE = "experts_wide"
    EXPERTS_WGMMA = "experts_wgmma"
    NATIVE = "native"
    TORCH = "torch"


HELP = {
    Kernel.GEMV: "one program takes 16 rows of w and all of K",
    Kernel.SPLITK_GEMM: "tiles of w, K split over programs",
    Kernel.WGMMA_GEMM: "wgmma fed from registers, x by TMA (Gluon)",
    Kernel.WGMMA_ROWS: "the same, any multiple of 8 rows a tile (CUDA C++)",
    Kernel.RING_GEMV: "few rows of x, words through rings of shared memory (CUDA C++)",
    Kernel.CUDA_GEMV: "few rows of x, w read as it is stored (CUDA C++)",
    Kernel.CUDA_DEQUANTIZE: "w in float16 (CUDA C++), then cuBLAS",
    Kernel.DEQUANTIZE: "w in x's type, then cuBLAS or oneDNN",
    Kernel.DEQUANTIZE_TORCH: "w by torch's operators, then cuBLAS or oneDNN",
    Kernel.ROWS_GEMM: "bytes as a checkpoint has them",
    Kernel.AS_WORDS: "restored inputs times 4-bit words",
    Kernel.FP8_WGMMA: "codes as e4m3, wgmma (CUDA C++)",
    Kernel.INT8_WGMMA: "codes times integer scales, int8 wgmma (Gluon)",
    Kernel.INT8_GEMM: "integer products by groups",
    Kernel.REFERENCE: "what rounding leaves of x, times w",
    Kernel.EXPERTS_GEMV: "all of K in one short program",
    Kernel.EXPERTS_GEMM: "tiles that walk over K",
    Kernel.EXPERTS_WIDE: "tiles of 128 pairs through shared memory",
    Kernel.EXPERTS_WGMMA: "wgmma, work shared out in turns (Gluon)",
    Kernel.TORCH: "cuBLAS, or oneDNN",
    Kernel.NATIVE: "our own C++: integers, in vectors or AMX tiles",
}
"""What each one does, in a few words."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of the table."""

    form: KernelForm
    kernel: Kernel
    file: str
    since: Device
    """The first device of its kind that the line is for."""
    before: Device
    """The first one that it is not for."""
    first: int = 0
    last: int | None = None
    """Rows of x, both included; None: any more. Of experts: pairs of one, if all had as many."""
    ranked: bool = False
    """Whether its time is compared with those of the form's other ranked lines."""
    needs: str = ""
    """What else must hold; else the next line serves."""

    def serves(self, device: Device, rows: int) -> bool:
        """Whether the line is for a device and so many rows."""
        here = self.since <= device < self.before
        return here and self.first <= rows and (self.last is None or rows <= self.last)

    @property
    def span(self) -> str:
        """Its rows of x: "any", "65+" or "1-8"."""
        if self.last is None:
            return "any" if self.first < 2 else f"{self.first}+"
        return f"{max(1, self.first)}-{self.last}"


TENSOR_CORES = (8, 0)
"""Oldest GPU whose tensor cores Triton drives."""
GEMV_ROWS, GEMV_ROWS_BF16_ZEROS = 8, 2
"""Most rows of gemv.py. Of 4-bit weights whose tiles have times of their own, two: gemv, which has
float16's, would be expected too fast (timed in layers, H100)."""
RING_ROWS, RING_ROWS_DENSE = 4, 2
"""Most rows of ring_gemv.cu, whose programs load all of x (H200, 4 bits, 24576 x 4096 at 1, 4 and 8
rows: 17.3, 18.6, 20.1 us, 22 by tiles; 16 bits: steps of Llama-3.1-8B of one and two requests 4.13
and 4.43 ms, by cuBLAS 4.49 and 4.63)."""
SPLITK_ROWS = 256
"""Most rows of splitk_gemm.py: past them each tile of w is unpacked many times."""
CUDA_GEMV_ROWS, CUDA_GEMV_ROWS_VOLTA = 64, 16
"""Most rows of gemv.cu with and without tensor cores: past them w is made first. No such card could
be timed: from an H200's times (28672 x 4096, 4 bits, 1, 8, 16, 64 rows: 31, 41, 84, 322 us; without
tensor cores 32, 155, 301 us to 16 rows; w made 290 us), by multiprocessors and clocks of a T4 and a
V100, and by bytes."""
WGMMA_FROM = 33
WGMMA_ROWS_SPAN = (49, 2048)
"""Rows of x at which wgmma_rows.cu is as quick as wgmma_gemm.py or quicker, so that it takes its
place where it is compiled (H200, eight shapes; longer ones were not timed)."""
PIECES_FROM = 513
"""Rows of x from which Hopper may make w in 16 bits first, piece by piece."""
LOOKED_UP_SPLITK_ROWS = 64
"""Rows of x above which wgmma_gemm.py hides looking up better (H200: 2048 x 11008, 128 rows, NF4
23.7 us, in tiles 32.1)."""
FEW_ROWS = 16
"""Rows of products with bytes as stored; more are dequantised first, which is faster (H200,
28672 x 4096: 32 rows 188 us by the product; 128 rows 173 by cuBLAS)."""
FP8_ROWS = 256
ATOM_FEW = 64
"""Tokens up to which the weight-only kernels multiply W4A4: they are limited by the same bytes."""
ATOM_INTEGER_FROM = 257
EXPERT_BLOCKS_FROM = 65
"""Pairs of an expert from which they come in blocks: half of one is filled."""
EXPERTS_GEMV_PAIRS = 4
CPU_ROWS, CPU_ROWS_FLOAT32 = 32, 24
"""Rows of x up to which a CPU multiplies codes as they are.

Seconds of CPU of all products of llama-3.2-1b's layers at 4 bits, two threads on an Intel Xeon with
AMX (busy: CPU time, not wall), codes / dequantise and oneDNN: bfloat16, 64 rows 1.29 / 1.02, 128
rows 2.43 / 1.31; float32, 64 rows 2.49 / 1.88; below 32 rows codes win."""
CPU_FLOAT_ROWS = 16
"""The same of codes that are floats."""

_END = ("cuda", 99, 0)
_NEW = (gpu(TENSOR_CORES), _END)
_HOPPER = (gpu((9, 0)), gpu((9, 1)))
"""Those that Gluon's kernels are written for."""
_AMPERE, _BLACKWELL = (gpu((8, 0)), gpu((9, 0))), (gpu((9, 1)), _END)
_TRITON = (gpu((7, 5)), _END)
"""GPUs that run the kernels that dequantise."""
_TURING, _OLD = (gpu((7, 5)), gpu((8, 0))), (gpu((0, 0)), gpu((7, 5)))
_VOLTA, _GPUS = (gpu((7, 0)), gpu((7, 5))), (gpu((0, 0)), _END)
_CPUS, _NATIVE = (cpu("no compiler"), ("cpu", 99, 0)), (cpu("avx2"), ("cpu", 99, 0))
_NO_COMPILER, _VNNI = (cpu("no compiler"), cpu("avx2")), (cpu("avx512_vnni"), ("cpu", 99, 0))

_INTEGERS = (KernelForm.WORDS, KernelForm.WORDS_BF16_ZEROS)
_HALVED = (KernelForm.PARTS, KernelForm.MXFP4)
_NO_WGMMA = (KernelForm.PARTS_3, KernelForm.NVFP4)
_SCALED = (*_HALVED, *_NO_WGMMA, KernelForm.LOOKED_UP)
_CODEBOOK = (KernelForm.E2M1_ROWS, KernelForm.CODEBOOK_ROWS)
_EXPERT_WORDS = (KernelForm.EXPERTS_4, KernelForm.EXPERTS_3, KernelForm.EXPERTS_MXFP4)
_EXPERTS = (
    *_EXPERT_WORDS,
    KernelForm.EXPERTS_DENSE,
    KernelForm.EXPERTS_FLOAT32,
    KernelForm.EXPERTS_8,
)
_PACKED = (KernelForm.WORDS, KernelForm.PARTS, KernelForm.PARTS_3)

_ALIGNED = "x, w and y start on 16 bytes"
_COMPILED = _ALIGNED + ", NVRTC"
_RINGS_NEED = "4 bits, K in 128s, x on 16 bytes, NVRTC"
_DENSE_NEEDS = "16 bits, K in 128s, N in 16s, x on 16 bytes, NVRTC"
_HALVES_COMPILED = "float16, even K, NVRTC that knows the card"
_GLUON_EXPERTS = "16-bit x, K in eights from 256"


def _lines(
    forms: tuple[KernelForm, ...],
    kernel: Kernel,
    file: str,
    on: tuple[Device, Device],
    rows: tuple[int, int | None] = (0, None),
    *,
    ranked: bool = False,
    needs: str = "",
) -> Iterator[Line]:
    first, last = rows
    for form in forms:
        yield Line(
            form=form,
            kernel=kernel,
            file=file,
            since=on[0],
            before=on[1],
            first=first,
            last=last,
            ranked=ranked,
            needs=needs,
        )


def _table() -> Iterator[Line]:
    k, g = Kernel, "gemm/"
    # Words of integers and codebooks on GPUs.
    some, few = (1, GEMV_ROWS), (1, GEMV_ROWS_BF16_ZEROS)
    many, more = (1, SPLITK_ROWS), (WGMMA_FROM, None)
    yield from _lines((KernelForm.WORDS, *_SCALED), k.GEMV, g + "gemv.py", _NEW, some, ranked=True)
    yield from _lines((KernelForm.WORDS_BF16_ZEROS,), k.GEMV, g + "gemv.py", _NEW, few, ranked=True)
    ring, ring_rows = g + "cuda/ring_gemv.cu", (1, RING_ROWS)
    yield from _lines(
        _INTEGERS, k.RING_GEMV, ring, _HOPPER, ring_rows, ranked=True, needs=_RINGS_NEED
    )
    tiles, looked_up = g + "splitk_gemm.py", (KernelForm.LOOKED_UP,)
    tiled = (*_INTEGERS, *_HALVED, *_NO_WGMMA)
    yield from _lines(tiled, k.SPLITK_GEMM, tiles, _NEW, many, ranked=True)
    short = (1, LOOKED_UP_SPLITK_ROWS)
    yield from _lines(looked_up, k.SPLITK_GEMM, tiles, _HOPPER, short, ranked=True)
    yield from _lines(looked_up, k.SPLITK_GEMM, tiles, _AMPERE, many, ranked=True)
    yield from _lines(looked_up, k.SPLITK_GEMM, tiles, _BLACKWELL, many, ranked=True)
    wgmma, flowing = g + "gluon/wgmma_gemm.py", (*_INTEGERS, *_HALVED, KernelForm.LOOKED_UP)
    yield from _lines(flowing, k.WGMMA_GEMM, wgmma, _HOPPER, more, ranked=True, needs=_ALIGNED)
    between, rows_file = WGMMA_ROWS_SPAN, g + "cuda/wgmma_rows.cu"
    yield from _lines(
        _INTEGERS, k.WGMMA_ROWS, rows_file, _HOPPER, between, ranked=True, needs=_COMPILED
    )
    for forms, file in ((_INTEGERS, "dequantize.py"), (_SCALED, "scaled/scaled_dequantize.py")):
        beyond = (GEMV_ROWS + 1, None)
        yield from _lines(forms, k.DEQUANTIZE, g + file, _AMPERE, beyond, ranked=True)
        yield from _lines(forms, k.DEQUANTIZE, g + file, _BLACKWELL, beyond, ranked=True)
        if forms is _INTEGERS:
            long = (PIECES_FROM, None)
            yield from _lines(forms, k.DEQUANTIZE, g + file, _HOPPER, long, ranked=True)
        yield from _lines(forms, k.DEQUANTIZE, g + file, _HOPPER)
    by_torch, few_file = "weights/quantized_weight.py", g + "cuda/gemv.cu"
    for on, most in ((_TURING, CUDA_GEMV_ROWS), (_VOLTA, CUDA_GEMV_ROWS_VOLTA)):
        integers = (KernelForm.WORDS, KernelForm.PARTS, KernelForm.PARTS_3)
        yield from _lines(integers, k.CUDA_GEMV, few_file, on, (1, most), needs=_HALVES_COMPILED)
        yield from _lines(integers, k.CUDA_DEQUANTIZE, few_file, on, needs=_HALVES_COMPILED)
    yield from _lines(_INTEGERS, k.DEQUANTIZE, g + "dequantize.py", _TURING)
    yield from _lines(_INTEGERS, k.DEQUANTIZE_TORCH, by_torch, _OLD)
    yield from _lines(_SCALED, k.DEQUANTIZE_TORCH, by_torch, _OLD)
    yield from _lines(_SCALED, k.DEQUANTIZE_TORCH, by_torch, _TURING)
    # Bytes as a checkpoint has them.
    few = (1, FEW_ROWS)
    small, books = g + "scaled/small_groups.py", g + "float_codes/codebook_products.py"
    yield from _lines((KernelForm.ROWS,), k.ROWS_GEMM, small, _NEW, few)
    yield from _lines((KernelForm.E2M1_ROWS,), k.ROWS_GEMM, books, _NEW, few, needs="groups to 64")
    yield from _lines((KernelForm.ROWS,), k.DEQUANTIZE, small, _TRITON)
    yield from _lines(_CODEBOOK, k.DEQUANTIZE, books, _TRITON, needs="groups to 64")
    yield from _lines((KernelForm.ROWS,), k.DEQUANTIZE_TORCH, by_torch, _OLD)
    yield from _lines(_CODEBOOK, k.DEQUANTIZE_TORCH, "weights/codebook_weight.py", _GPUS)
    # FP8.
    e4m3, halves = g + "float_codes/e4m3_", "16-bit x"
    tail = (GEMV_ROWS + 1, FP8_ROWS)
    yield from _lines(
        (KernelForm.FP8_WORDS,), k.GEMV, e4m3 + "fragments.py", _NEW, some, needs=halves
    )
    yield from _lines(
        (KernelForm.FP8_WORDS,), k.SPLITK_GEMM, e4m3 + "fragments.py", _NEW, tail, needs=halves
    )
    yield from _lines(
        (KernelForm.FP8_ROWS,), k.ROWS_GEMM, e4m3 + "kernel.py", _NEW, (1, FP8_ROWS), needs=halves
    )
    fp8 = (KernelForm.FP8_WORDS, KernelForm.FP8_ROWS)
    yield from _lines(fp8, k.DEQUANTIZE, g + "float_codes/fp8_products.py", _TRITON)
    yield from _lines(fp8, k.DEQUANTIZE_TORCH, "weights/fp8_weight.py", _OLD)
    # Rounded inputs.
    atom = (KernelForm.ATOM_TILES, KernelForm.ATOM_INTEGER)
    after, between = (ATOM_FEW + 1, None), (ATOM_FEW + 1, ATOM_INTEGER_FROM - 1)
    large = (ATOM_INTEGER_FROM, None)
    yield from _lines(atom, k.AS_WORDS, g + "linear_gpu.py", _HOPPER, (0, ATOM_FEW))
    yield from _lines((KernelForm.ATOM_TILES_A16,), k.AS_WORDS, g + "linear_gpu.py", _HOPPER)
    yield from _lines((KernelForm.ATOM_TILES,), k.FP8_WGMMA, "atom/wgmma_codes.cu", _HOPPER, after)
    yield from _lines(
        (KernelForm.ATOM_INTEGER,), k.FP8_WGMMA, "atom/wgmma_codes.cu", _HOPPER, between
    )
    yield from _lines(
        (KernelForm.ATOM_INTEGER,), k.INT8_WGMMA, "atom/int8_kernel.py", _HOPPER, large
    )
    yield from _lines((KernelForm.ATOM,), k.INT8_GEMM, "atom/portable.py", _GPUS)
    yield from _lines((KernelForm.ATOM_OTHER,), k.REFERENCE, "atom/reference.py", _GPUS)
    yield from _lines(
        (KernelForm.ATOM, KernelForm.ATOM_OTHER), k.REFERENCE, "atom/reference.py", _CPUS
    )
    # A mixture's experts, all of a layer in one launch.
    e, blocks = g + "experts/", (EXPERT_BLOCKS_FROM, None)
    dense_experts = (KernelForm.EXPERTS_DENSE,)
    yield from _lines(
        dense_experts,
        k.EXPERTS_WGMMA,
        e + "gluon_expert_dense.py",
        _HOPPER,
        blocks,
        needs=_GLUON_EXPERTS,
    )
    yield from _lines(
        _EXPERT_WORDS,
        k.EXPERTS_WGMMA,
        e + "gluon_expert_packed.py",
        _HOPPER,
        blocks,
        needs=_GLUON_EXPERTS,
    )
    yield from _lines(
        dense_experts,
        k.EXPERTS_WIDE,
        e + "expert_wide.py",
        _NEW,
        blocks,
        needs="145 KiB of shared memory",
    )
    yield from _lines(
        (KernelForm.EXPERTS_4,),
        k.EXPERTS_GEMV,
        e + "expert_rows.py",
        _NEW,
        (0, EXPERTS_GEMV_PAIRS),
        needs="short K, or few programs",
    )
    yield from _lines(_EXPERTS, k.EXPERTS_GEMM, e + "expert_kernel.py", _NEW)
    yield from _lines((KernelForm.EXPERTS_FP8,), k.EXPERTS_GEMM, e + "e4m3_experts.py", _NEW)
    dense = "AMX bfloat16 to 64 rows, weights to 2 MiB to 16, others to 4"
    yield from _lines((KernelForm.DENSE,), k.NATIVE, "cpu/dense.py", _NATIVE, (1, 64), needs=dense)
    yield from _lines((KernelForm.DENSE,), k.TORCH, "cpu/dense.py", _CPUS)
    few_dense, dense_file = (1, RING_ROWS_DENSE), "gemm/dense_few.py"
    yield from _lines(
        (KernelForm.DENSE,), k.RING_GEMV, dense_file, _HOPPER, few_dense, needs=_DENSE_NEEDS
    )
    yield from _lines((KernelForm.DENSE,), k.TORCH, "weights/dense_weight.py", _GPUS)
    # CPUs; which of our own kernels runs is native/products.cpp's to say.
    own = "cpu/native_linear.py"
    yield from _lines(
        _PACKED, k.NATIVE, own, _NATIVE, (0, CPU_ROWS), needs=f"float32: to {CPU_ROWS_FLOAT32} rows"
    )
    yield from _lines(_PACKED, k.NATIVE, own, _VNNI, needs="x in 16 bits, or rounded to 8")
    yield from _lines(_PACKED, k.DEQUANTIZE, own, _NATIVE)
    yield from _lines((*_PACKED, KernelForm.ROWS), k.DEQUANTIZE_TORCH, own, _CPUS)
    for forms, file in ((fp8, "cpu/fp8_linear.py"), (_CODEBOOK, "cpu/codebook_linear.py")):
        yield from _lines(forms, k.NATIVE, file, _NATIVE, (1, CPU_FLOAT_ROWS))
        yield from _lines(forms, k.DEQUANTIZE, file, _NATIVE)
        yield from _lines(forms, k.DEQUANTIZE_TORCH, file, _NO_COMPILER)


TABLE = tuple(_table())


@functools.lru_cache(maxsize=1 << 14)
def lines_of(form: KernelForm, device: Device, rows: int) -> tuple[Line, ...]:
    """Return the lines that serve, in the order in which they are tried."""
    return tuple(line for line in TABLE if line.form is form and line.serves(device, rows))


@functools.lru_cache(maxsize=1 << 14)
def eligible(form: KernelForm, device: Device, rows: int) -> tuple[Kernel, ...]:
    """Return the kernels that may multiply, in the order in which they are tried."""
    return tuple(dict.fromkeys(line.kernel for line in lines_of(form, device, rows)))


def device_lines(device: Device) -> list[Line]:
    """Return the lines that are for a device."""
    return [line for line in TABLE if line.since <= device < line.before]


def summary(device: Device) -> list[tuple[str, str]]:
    """Return what multiplies on a device, for people: forms of weights, and rows with kernels."""
    forms: dict[KernelForm, list[str]] = {}
    for line in device_lines(device):
        tried = forms.setdefault(line.form, [])
        text = f"{line.span} {line.kernel}{' *' if line.ranked else ''}"
        if text not in tried:
            tried.append(text)
    alike: dict[str, list[str]] = {}
    for form, tried in forms.items():
        alike.setdefault(", ".join(tried), []).append(form.value)
    return [("; ".join(names), kernels) for kernels, names in alike.items()]
