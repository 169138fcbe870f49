"""Products of experts in MXFP4 compile for every listed architecture; shared memory fits."""

import pytest

pytest.importorskip("triton")
from llmpq.kernels.gemm.experts.expert_kernel import packed_expert_kernel  # noqa: E402
from llmpq.kernels.gemm.experts.expert_stack import FEW_ROWS, MOST_GATED, WGMMA, packed_tiles  # noqa: E402
from llmpq.kernels.gemm.ranking.config import Config, make_plan  # noqa: E402
from reference.cubin import (  # noqa: E402
    ARCHITECTURES,
    CONSUMER_BLACKWELL,
    SHARED_LIMIT,
    compile_kernel,
)
from reference.machine_code import overwritten, product_loops  # noqa: E402

pytestmark = pytest.mark.compile
SIZES = ("N", "K", "blocks", "groups", "top", "shares")


def build(arch, bm, *, dtype="bf16", fuse=False, groups=23):
    high, warps, stages = packed_tiles(bm, groups, fused=fuse)
    config = Config(kernel="splitk_gemm", blocks=high, warps=warps, bm=bm, stages=stages)
    constants = {
        "BITS": 4, "GROUPED": True, "SYMMETRIC": True, "EVEN_K": False, "HAS_BIAS": True,
        "GATHER": fuse, "BH": high, "WM": warps, "BM": bm, "STAGES": config.stages,
        "KWIDTH4": make_plan(config, divmod(arch, 10)).kwidth4 or bm < WGMMA, "INTERPRET": False,
        "FUSE": fuse, "ACT": "clamped_silu", "E2M1": True, "PDL": arch >= 90,
    }  # fmt: skip
    types = dict.fromkeys(("X", "Y", "BIAS"), f"*{dtype}") | dict.fromkeys(SIZES, "i32")
    types |= dict.fromkeys(("P0", "P1", "S", "Z", "order", "runs"), "*i32")
    types |= {"limit": "fp32", "slope": "fp32"}
    given = {name: types[name] for name in packed_expert_kernel.arg_names if name in types}
    aligned = tuple(n for n, t in given.items() if t.startswith("*") or n in ("N", "K"))
    options = {"num_warps": warps, "num_stages": stages}
    made = compile_kernel(
        packed_expert_kernel, arch, given, constants, aligned=aligned, options=options
    )
    assert made.cubin and made.shared_bytes <= SHARED_LIMIT[arch]
    return made


@pytest.mark.thin(apart=True)
@pytest.mark.parametrize("arch", (*ARCHITECTURES, CONSUMER_BLACKWELL))
@pytest.mark.parametrize(
    ("dtype", "bm", "fuse"),
    [
        ("bf16", MOST_GATED, True), ("fp16", 128, False),
        *(pytest.param(*case, marks=pytest.mark.seldom) for case in (
            ("bf16", FEW_ROWS, True), ("bf16", 16, False), ("fp16", 16, True))),
    ],
)  # fmt: skip
def test_everything_compiles(arch, dtype, bm, fuse):
    build(arch, bm, dtype=dtype, fuse=fuse)


@pytest.mark.parametrize(
    ("bm", "fuse"),
    [
        (16, True),
        *(pytest.param(*case, marks=pytest.mark.seldom) for case in (
            (128, False), (16, False), (32, False), (64, False), (32, True), (64, True))),
    ],
)  # fmt: skip
def test_products_in_flight_keep_their_operands(bm, fuse):
    """As test_experts_compile.py: no step unpacks into registers that wgmma still reads."""
    code = build(90, bm, fuse=fuse).machine_code()
    assert product_loops(code) and overwritten(code) == []
