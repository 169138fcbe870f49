"""Products of E4M3 weights compile for every listed architecture; shared memory fits, no spills."""

import pytest

pytest.importorskip("triton")
from llmpq.kernels.gemm.experts import e4m3_experts  # noqa: E402
from llmpq.kernels.gemm.float_codes import e4m3_fragments, fp8_products  # noqa: E402
from llmpq.kernels.gemm.float_codes.e4m3_kernel import e4m3_dequantize_kernel, e4m3_kernel  # noqa: E402
from llmpq.kernels.kernel_table import GEMV_ROWS
from reference.cubin import (  # noqa: E402
    ARCHITECTURES,
    CONSUMER_BLACKWELL,
    SHARED_LIMIT,
    compile_kernel,
)

pytestmark = pytest.mark.compile
POINTERS = {"W": "*u8", "S": "*fp32", "PARTIAL": "*fp32"}
WHOLE = ("M", "N", "K", "rows", "columns", "high", "wide", "half", "groups", "split", "top",
         "shares")  # fmt: skip
KINDS = (
    POINTERS
    | dict.fromkeys(("ARRIVED", "order", "runs"), "*i32")
    | dict.fromkeys(WHOLE, "i32")
    | dict.fromkeys(("limit", "slope"), "fp32")
)


def seldom(*case):
    """In `make test-all` only: each kernel is in `make test` with its largest tiles."""
    return pytest.param(*case, marks=pytest.mark.seldom)


def compiled(kernel, arch, constants, dtype, w="*u8", **options):
    kinds = KINDS | {"W": w}
    given = {
        name: kinds.get(name, f"*{dtype}") for name in kernel.arg_names if name not in constants
    }
    aligned = tuple(name for name, kind in given.items() if kind.startswith("*"))
    aligned += ("N", "K")
    return compile_kernel(kernel, arch, given, constants, aligned=aligned, options=options)


@pytest.mark.thin
@pytest.mark.parametrize("arch", (*ARCHITECTURES, CONSUMER_BLACKWELL))
@pytest.mark.parametrize(
    ("m", "shared", "dtype"),
    [
        (1, True, "fp16"),
        (200, False, "bf16"),
        seldom(30, False, "bf16"),
        seldom(64, False, "fp16"),
    ],
)
def test_products_fit(arch, m, shared, dtype):
    tile = fp8_products.tile_of(m, 128)
    constants = {
        "HAS_BIAS": False,
        "HAS_RESIDUAL": True,
        "SPLIT": True,
        "SHARED": shared,
        "EVEN_K": True,
        "BN": tile.bn,
        "BM": tile.bm,
        "BK": tile.bk,
        "STAGES": tile.stages,
        "PDL": arch >= 90,
        "INTERPRET": False,
    }
    made = compiled(
        e4m3_kernel, arch, constants, dtype, num_warps=tile.warps, num_stages=tile.stages
    )
    assert made.cubin and made.shared_bytes <= SHARED_LIMIT[arch]


@pytest.mark.thin
@pytest.mark.parametrize("arch", (*ARCHITECTURES, CONSUMER_BLACKWELL))
@pytest.mark.parametrize(("m", "shared", "dtype"), [(8, True, "fp16"), (200, False, "bf16"),
                                                    seldom(1, False, "bf16"),
                                                    seldom(16, False, "bf16"),
                                                    seldom(64, True, "fp16")])  # fmt: skip
def test_products_of_fragments_fit(arch, m, shared, dtype):
    same = {
        "SHARED": shared,
        "HAS_BIAS": False,
        "HAS_RESIDUAL": True,
        "PDL": arch >= 90,
        "INTERPRET": False,
    }
    if m <= GEMV_ROWS:
        warps, steps = fp8_products.rows_form(112 if m == 1 else 32)
        kernel, stages = e4m3_fragments.e4m3_gemv_kernel, 1
        own = {"EVEN_G": True, "BH": 1, "WM": warps, "STEPS": steps, "D": fp8_products.DEPTH}
    else:
        tile = fp8_products.fragments_of(m)
        kernel, stages, warps = e4m3_fragments.e4m3_splitk_kernel, tile.stages, tile.warps
        own = {"BH": tile.high, "WM": warps, "BM": tile.bm, "STAGES": stages, "SPLIT": True}
        own["KWIDTH4"] = not 90 <= arch < 120
    made = compiled(kernel, arch, same | own, dtype, w="*i32", num_warps=warps, num_stages=stages)
    assert made.cubin and made.shared_bytes <= SHARED_LIMIT[arch]


@pytest.mark.thin
@pytest.mark.parametrize("arch", (*ARCHITECTURES, CONSUMER_BLACKWELL))
@pytest.mark.parametrize(("bm", "fused", "shared"), [(64, True, True), (128, False, False),
                                                     seldom(16, True, False)])  # fmt: skip
def test_experts_fit(arch, bm, fused, shared):
    bn, bk, stages, warps = e4m3_experts.tiles(bm, 128, fused=fused)
    constants = {
        "SHARED": shared,
        "EVEN_K": True,
        "HAS_BIAS": False,
        "GATHER": fused,
        "BN": bn,
        "BM": bm,
        "BK": bk,
        "STAGES": stages,
        "FUSE": fused,
        "ACT": "silu",
        "PDL": arch >= 90,
        "INTERPRET": False,
    }
    kernel = e4m3_experts.e4m3_expert_kernel
    made = compiled(kernel, arch, constants, "bf16", num_warps=warps)
    assert made.cubin and made.shared_bytes <= SHARED_LIMIT[arch]


@pytest.mark.thin
@pytest.mark.parametrize("arch", (*ARCHITECTURES, CONSUMER_BLACKWELL))
@pytest.mark.parametrize(("bm", "fused", "shared"), [(64, True, True), (128, False, False),
                                                     seldom(16, True, False)])  # fmt: skip
def test_experts_in_fragments_fit(arch, bm, fused, shared):
    high, warps, stages = e4m3_experts.fragment_tiles(bm, 16, fused=fused)
    constants = {
        "SHARED": shared,
        "HAS_BIAS": False,
        "GATHER": fused,
        "BH": high,
        "WM": warps,
        "BM": bm,
        "STAGES": stages,
        "FUSE": fused,
        "ACT": "silu",
        "PDL": arch >= 90,
        "KWIDTH4": not 90 <= arch < 120,
        "INTERPRET": False,
    }
    kernel = e4m3_experts.fragment_expert_kernel
    made = compiled(kernel, arch, constants, "bf16", w="*i32", num_warps=warps, num_stages=stages)
    assert made.cubin and made.shared_bytes <= SHARED_LIMIT[arch]


@pytest.mark.parametrize("arch", (75, *ARCHITECTURES, CONSUMER_BLACKWELL))
def test_dequantising_compiles(arch):
    constants = {"BN": 16, "BK": 256, "INTERPRET": False}
    assert compiled(e4m3_dequantize_kernel, arch, constants, "fp16", num_warps=4).cubin
    constants = {"BH": 1, "WM": 4, "INTERPRET": False}
    blocks = e4m3_fragments.e4m3_blocks_kernel
    assert compiled(blocks, arch, constants, "bf16", w="*i32", num_warps=4).cubin
