"""Products of experts compile for every listed architecture, with the tiles that may be chosen."""

import pytest

pytest.importorskip("triton")
from llmpq.kernels.gemm.config import Config, make_plan  # noqa: E402
from llmpq.kernels.gemm.expert_kernel import (  # noqa: E402
    assign_kernel,
    dense_expert_kernel,
    packed_expert_kernel,
)
from llmpq.kernels.gemm.expert_stack import DENSE_DEPTH, dense_tiles  # noqa: E402
from llmpq.kernels.tools.cubin import ARCHITECTURES, SHARED_LIMIT, compile_kernel  # noqa: E402
from llmpq.kernels.tools.machine_code import overwritten, product_loops  # noqa: E402

pytestmark = pytest.mark.compile
POINTERS = {"P0": "*i32", "P1": "*i32", "S": "*i32", "Z": "*i32", "expert_C": "*i64"}
POINTERS |= dict.fromkeys(("order", "starts", "ends"), "*i32")
SIZES = ("N", "K", "blocks", "groups", "top", "shares", "C")


def build(kernel, arch, dtype, constants, **options):
    types = dict.fromkeys(("X", "W", "Y", "BIAS"), f"*{dtype}") | POINTERS
    types |= dict.fromkeys(SIZES, "i32")
    constants = constants | {"PDL": arch >= 90}
    arguments = {n: types[n] for n in kernel.arg_names if n in types and n not in constants}
    aligned = tuple(n for n, t in arguments.items() if t.startswith("*") or n in ("N", "K"))
    made = compile_kernel(kernel, arch, arguments, constants, aligned=aligned, options=options)
    assert made.cubin and made.shared_bytes <= SHARED_LIMIT[arch]
    return made


def packed(arch, bits, bm, *, dtype="bf16", gather=True):
    config = Config(kernel="tile", warps=4, bm=bm, stages=4 if bm <= 32 else 3)
    constants = {
        "BITS": bits, "GROUPED": True, "SYMMETRIC": bits == 4, "EVEN_K": True, "HAS_BIAS": True,
        "GATHER": gather, "WM": 4, "BM": bm, "STAGES": config.stages,
        "KWIDTH4": make_plan(config, divmod(arch, 10)).kwidth4, "INTERPRET": False,
    }  # fmt: skip
    options = {"num_warps": 4, "num_stages": config.stages}
    return build(packed_expert_kernel, arch, dtype, constants, **options)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_everything_compiles(arch):
    for bits, bm in ((4, 16), (8, 64), (3, 128)):
        packed(arch, bits, bm, gather=bm != 16)
    for dtype, bm in (("bf16", 16), ("bf16", 128), ("fp32", 64)):
        rows, stages, warps = dense_tiles(bm, 4 if dtype == "fp32" else 2)
        constants = {"HAS_BIAS": False, "GATHER": True, "BN": rows, "BM": bm, "BK": DENSE_DEPTH}
        constants |= {"STAGES": stages, "INTERPRET": False}
        build(dense_expert_kernel, arch, dtype, constants, num_warps=warps)
    build(assign_kernel, arch, "bf16", {"STEP": 256}, num_warps=4)


@pytest.mark.parametrize("bm", [16, 64, 128])
def test_products_in_flight_keep_their_operands(bm):
    """As test_gemm_compile.py: no step unpacks into registers that wgmma still reads."""
    code = packed(90, 4, bm).machine_code()
    assert product_loops(code) and overwritten(code) == []
