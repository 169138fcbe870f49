"""Chunks of words compile for every listed architecture; shared memory fits, operands stay."""

import pytest

tl = pytest.importorskip("triton.language")
from llmpq.kernels.formats.table_weight import Values  # noqa: E402
from llmpq.kernels.gemm.scaled.chunk_kernels import (  # noqa: E402
    chunk_numbers_kernel,
    chunk_rows_kernel,
    chunk_tile_kernel,
)
from llmpq.kernels.gemm.scaled.chunk_launch import DEPTH, tile_of  # noqa: E402
from llmpq.kernels.gemm.scaled.code_assembly import linear_assembly, lookup_assembly  # noqa: E402
from llmpq.kernels.tools.cubin import (  # noqa: E402
    ARCHITECTURES,
    CONSUMER_BLACKWELL,
    SHARED_LIMIT,
    compile_kernel,
)
from llmpq.kernels.tools.machine_code import overwritten, product_loops  # noqa: E402

pytestmark = pytest.mark.compile
NUMBERS = ("M", "N", "K", "blocks", "groups", "split")
POINTERS = dict.fromkeys(("P0", "P1", "S", "Z", "ARRIVED"), "*i32")
POINTERS |= dict.fromkeys(("T", "PARTIAL"), "*fp32")
FORMS = {
    "nf4": (0, 2, Values.NF4),
    "iq4": (0, 4, Values.IQ4),
    "w4 in 32": (4, 4, True),
    "w4 in 64, zeros": (4, 2, False),
    "w8 in 32": (8, 4, True),
    "w8 in 32, zeros": (8, 4, False),
}


def build(kernel, arch, form, dtype, own, **options):
    bits, parts, how = FORMS[form]
    kind = "f16" if dtype == "fp16" else "bf16"
    constants = {"BITS": bits, "PARTS": parts, "EVEN_K": True, "INTERPRET": False} | own
    constants["SYMMETRIC"] = bits == 0 or how
    constants["SDT"] = tl.bfloat16 if bits and dtype == "bf16" else tl.float16
    for half in range(2):
        constants[f"ASM{half}"] = (
            linear_assembly(bits, kind, half, how) if bits
            else lookup_assembly(how.table, kind, half)
        )  # fmt: skip
    kinds = POINTERS | dict.fromkeys(NUMBERS, "i32")
    kinds |= dict.fromkeys(("X", "Y", "BIAS", "RESIDUAL", "OUT"), f"*{dtype}")
    given = {n: kinds[n] for n in kernel.arg_names if n in kinds and n not in constants}
    aligned = tuple(n for n, t in given.items() if t.startswith("*") or n in ("N", "K"))
    made = compile_kernel(kernel, arch, given, constants, aligned=aligned, options=options)
    assert made.cubin and made.shared_bytes <= SHARED_LIMIT[arch]
    return made


def tiles(arch, form, dtype, rows):
    tile = tile_of(rows)
    own = {
        "HAS_BIAS": True, "HAS_RESIDUAL": True, "SPLIT": rows <= 64, "BH": tile.high,
        "WM": tile.warps, "BM": tile.bm, "STAGES": tile.stages, "PDL": arch >= 90,
    }  # fmt: skip
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    return build(chunk_tile_kernel, arch, form, dtype, own, **options)


def rows(arch, form, dtype, warps=8, steps=4):
    own = {
        "HAS_BIAS": True, "HAS_RESIDUAL": True, "EVEN_G": True, "BH": 1, "WM": warps,
        "STEPS": steps, "D": DEPTH, "PDL": arch >= 90,
    }  # fmt: skip
    return build(chunk_rows_kernel, arch, form, dtype, own, num_warps=warps, num_stages=1)


@pytest.mark.parametrize("arch", (*ARCHITECTURES, CONSUMER_BLACKWELL))
@pytest.mark.parametrize("form", FORMS)
def test_everything_compiles(arch, form):
    for dtype, many in (("bf16", 8), ("fp16", 32), ("bf16", 128)):
        tiles(arch, form, dtype, many)
    rows(arch, form, "bf16")
    build(chunk_numbers_kernel, arch, form, "bf16", {"BH": 1, "WM": 4}, num_warps=4)


@pytest.mark.parametrize("many", [16, 32, 64, 128])
@pytest.mark.parametrize("form", FORMS)
def test_products_in_flight_keep_their_operands(form, many):
    code = tiles(90, form, "bf16", many).machine_code()
    assert product_loops(code) and overwritten(code) == []
    assert code.count("STL") <= 16, "a few addresses may go by memory"
