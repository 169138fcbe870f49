"""Scaled operands compile for every listed architecture; shared memory fits, operands stay."""

from itertools import product

import pytest

pytest.importorskip("triton")
from llmpq.kernels.gemm.gemv import gemv_kernel  # noqa: E402
from llmpq.kernels.gemm.operands.code_assembly import word_assembly  # noqa: E402
from llmpq.kernels.gemm.scaled.scaled_dequantize import WARPS, scaled_dequantize_kernel  # noqa: E402
from llmpq.kernels.gemm.splitk_gemm import splitk_gemm_kernel  # noqa: E402
from reference.cubin import (  # noqa: E402
    ARCHITECTURES,
    CONSUMER_BLACKWELL,
    SHARED_LIMIT,
    compile_kernel,
)
from reference.machine_code import overwritten, product_loops  # noqa: E402

pytestmark = pytest.mark.compile
SIZES = ("M", "N", "K", "blocks", "groups", "split")
FORMS = {
    "mxfp4": ("e2m1", 4, 1, True),
    "nvfp4": ("nvfp4", 4, 1, True),
    "nf4": ("nf4", 4, 2, True),
    "iq4": ("iq4", 4, 4, True),
    "w4 in 32": ("parts", 4, 4, True),
    "w4 in 64, zeros": ("parts", 4, 2, False),
    "w3 in 32, zeros": ("parts", 3, 4, False),
    "w3 in 64": ("parts", 3, 2, True),
    "w8 in 32, zeros": ("parts", 8, 4, False),
}


def build(kernel, arch, form, dtype, own, **options):
    name, bits, parts, symmetric = FORMS[form]
    text = ""
    if name not in ("e2m1", "nvfp4"):
        text = word_assembly(name, bits, "f16" if dtype == "fp16" else "bf16", symmetric, parts)
    constants = {
        "FORM": name, "ASM": text, "BITS": bits, "GROUPED": parts, "SYMMETRIC": symmetric,
        "EVEN_K": True, "INTERPRET": False,
    } | own  # fmt: skip
    kinds = dict.fromkeys(("P0", "P1", "S", "Z", "ARRIVED"), "*i32") | {"PARTIAL": "*fp32"}
    if name == "nvfp4":
        kinds["Z"] = "*fp32"
    kinds |= dict.fromkeys(("X", "Y", "BIAS", "RESIDUAL", "OUT"), f"*{dtype}")
    kinds |= dict.fromkeys(SIZES, "i32")
    given = {n: kinds[n] for n in kernel.arg_names if n in kinds and n not in constants}
    aligned = tuple(n for n, t in given.items() if t.startswith("*") or n in ("N", "K"))
    made = compile_kernel(kernel, arch, given, constants, aligned=aligned, options=options)
    assert made.cubin and made.shared_bytes <= SHARED_LIMIT[arch]
    return made


def tiles(arch, form, dtype, bm, stages, depth=1):
    own = {
        "HAS_BIAS": True, "HAS_RESIDUAL": True, "SPLIT": bm <= 64, "SCALE_W": False, "BH": 1,
        "WM": 4, "BM": bm, "D": depth, "STAGES": stages, "XS": 1, "PDL": arch >= 90,
        "KWIDTH4": not 90 <= arch < 120,
    }  # fmt: skip
    return build(splitk_gemm_kernel, arch, form, dtype, own, num_warps=4, num_stages=stages)


def rows(arch, form):
    own = {
        "HAS_BIAS": True, "HAS_RESIDUAL": True, "EVEN_G": True, "BH": 1, "WM": 8, "STEPS": 2,
        "D": 2, "XD": 2, "PDL": arch >= 90,
    }  # fmt: skip
    build(gemv_kernel, arch, form, "bf16", own, num_warps=8, num_stages=1)


KINDS = {
    "few rows": lambda arch, form: tiles(arch, form, "bf16", 8, 1, 2),
    "32 rows": lambda arch, form: tiles(arch, form, "fp16", 32, 3),
    "rows": rows,
    "numbers": lambda arch, form: build(
        scaled_dequantize_kernel, arch, form, "bf16", {"WM": WARPS}, num_warps=WARPS
    ),
}


# `make test` has a kind or two of a form: words are unpacked alike in all of a form's, and every
# form's tiles of three stages are compiled below.
TURNS = {
    "mxfp4": ("rows",),
    "nvfp4": ("few rows",),
    "nf4": (),
    "iq4": ("numbers",),
    "w4 in 32": ("rows",),
    "w4 in 64, zeros": (),
    "w3 in 32, zeros": (),
    "w3 in 64": ("32 rows",),
    "w8 in 32, zeros": ("few rows",),
}
CASES = [
    pytest.param(form, kind, marks=[] if kind in TURNS[form] else [pytest.mark.seldom])
    for form, kind in product(FORMS, KINDS)
]


LIKE = ("iq4", "w4 in 64, zeros", "w3 in 64", "nvfp4", "w4 in 32", "mxfp4")
"""Forms whose words are unpacked as those of another, nf4 or w3 in 32, or in products above."""
IN_FLIGHT = [
    pytest.param(form, marks=[pytest.mark.seldom] if form in LIKE else []) for form in FORMS
]


@pytest.mark.thin
@pytest.mark.parametrize("arch", (*ARCHITECTURES, CONSUMER_BLACKWELL))
@pytest.mark.parametrize(("form", "kind"), CASES)
def test_everything_compiles(arch, form, kind):
    KINDS[kind](arch, form)


@pytest.mark.thin
@pytest.mark.parametrize("bm", [16, 64, 128, pytest.param(32, marks=pytest.mark.seldom)])
@pytest.mark.parametrize("form", IN_FLIGHT)
def test_products_in_flight_keep_their_operands(form, bm):
    code = tiles(90, form, "bf16", bm, 3).machine_code()
    assert product_loops(code) and overwritten(code) == []
    assert code.count("STL") <= 16, "a few addresses may go by memory"
