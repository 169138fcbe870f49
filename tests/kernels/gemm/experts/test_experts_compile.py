"""Products of experts compile for every listed architecture, with the tiles that may be chosen."""

import pytest

pytest.importorskip("triton")
from llmpq.kernels.fused.norm_route import CHUNK, EXPERTS, TOKENS, norm_logits_kernel  # noqa: E402
from llmpq.kernels.fused.route import route_kernel  # noqa: E402
from llmpq.kernels.gemm.experts import expert_wide  # noqa: E402
from llmpq.kernels.gemm.experts.expert_blocks import (  # noqa: E402
    BLOCK,
    MOST_EXPERTS,
    SHORT,
    WIDE,
    count_kernel,
    place_kernel,
)
from llmpq.kernels.gemm.experts.expert_dispatch import ASSIGN_STEP  # noqa: E402
from llmpq.kernels.gemm.experts.expert_kernel import (  # noqa: E402
    assign_kernel,
    assign_pairs_kernel,
    dense_expert_kernel,
    packed_expert_kernel,
)
from llmpq.kernels.gemm.experts.expert_rows import rows_expert_kernel  # noqa: E402
from llmpq.kernels.gemm.experts.expert_stack import (  # noqa: E402
    DENSE_DEPTH,
    FEW_ROWS,
    MOST_GATED,
    WGMMA,
    dense_tiles,
    packed_tiles,
    wide_fits,
)
from llmpq.kernels.gemm.ranking.config import Config, make_plan  # noqa: E402
from reference.cubin import ARCHITECTURES, SHARED_LIMIT, compile_kernel  # noqa: E402
from reference.machine_code import overwritten, product_loops  # noqa: E402

pytestmark = pytest.mark.compile
POINTERS = {"P0": "*i32", "P1": "*i32", "S": "*i32", "Z": "*i32", "expert_C": "*i64"}
POINTERS |= dict.fromkeys(("order", "runs", "counts", "count"), "*i32")
POINTERS |= {"correction": "*fp32", "ids": "*i64", "logits": "*bf16", "weights": "*bf16"}
POINTERS |= {"scale": "fp32", "least": "fp32"}
SIZES = ("N", "K", "blocks", "groups", "top", "shares", "C", "E", "B", "tiles")
GATE = {"limit": "fp32", "slope": "fp32"}


def seldom(*case):
    """In `make test-all` only: its like is in `make test`."""
    return pytest.param(*case, marks=pytest.mark.seldom)


def build(kernel, arch, dtype, constants, given=None, **options):
    """`given`: types of arguments that are not as elsewhere."""
    types = dict.fromkeys(("X", "W", "Y", "BIAS"), f"*{dtype}") | POINTERS
    types |= dict.fromkeys(SIZES, "i32") | GATE | (given or {})
    constants = constants | {"PDL": arch >= 90}
    arguments = {n: types[n] for n in kernel.arg_names if n in types and n not in constants}
    aligned = tuple(
        n for n, t in arguments.items() if t.startswith("*") or n in ("N", "K", "columns")
    )
    made = compile_kernel(kernel, arch, arguments, constants, aligned=aligned, options=options)
    assert made.cubin and made.shared_bytes <= SHARED_LIMIT[arch]
    return made


def packed(arch, bits, bm, *, dtype="bf16", gather=True, fuse=False, groups=16):
    high, warps, stages = packed_tiles(bm, groups, fused=fuse)
    config = Config(kernel="splitk_gemm", blocks=high, warps=warps, bm=bm, stages=stages)
    constants = {
        "BITS": bits, "GROUPED": True, "SYMMETRIC": bits == 4, "EVEN_K": True, "HAS_BIAS": True,
        "GATHER": gather, "BH": high, "WM": warps, "BM": bm, "STAGES": config.stages,
        "KWIDTH4": make_plan(config, divmod(arch, 10)).kwidth4 or bm < WGMMA, "INTERPRET": False,
        "FUSE": fuse, "ACT": "silu",
    }  # fmt: skip
    options = {"num_warps": warps, "num_stages": stages}
    return build(packed_expert_kernel, arch, dtype, constants, **options)


def dense(arch, dtype, bm, fuse):
    rows, stages, warps = dense_tiles(bm, 4 if dtype == "fp32" else 2, fused=fuse)
    constants = {"HAS_BIAS": False, "GATHER": True, "BN": rows, "BM": bm, "BK": DENSE_DEPTH}
    constants |= {"STAGES": stages, "INTERPRET": False, "FUSE": fuse, "ACT": "gelu_tanh"}
    build(dense_expert_kernel, arch, dtype, constants, num_warps=warps)


@pytest.mark.thin(apart=True)
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(
    ("bits", "bm", "fuse"),
    [
        (4, 16, False), (3, 128, False), (8, 64, True),
        *(seldom(*case) for case in ((8, 64, False), (4, FEW_ROWS, True), (4, 16, True))),
    ],
)  # fmt: skip
def test_packed_products_compile(arch, bits, bm, fuse):
    packed(arch, bits, bm, gather=fuse or bm != 16, fuse=fuse)


@pytest.mark.thin(apart=True)
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(
    ("dtype", "bm", "fuse"),
    [
        ("bf16", 128, False), ("fp32", 64, False), ("fp16", MOST_GATED, True),
        *(seldom("bf16", *case) for case in ((16, False), (16, True), (32, True))),
    ],
)  # fmt: skip
def test_dense_products_compile(arch, dtype, bm, fuse):
    dense(arch, dtype, bm, fuse)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_places_compile(arch):
    for step, warps in ((256, 4), (ASSIGN_STEP, 8)):
        build(assign_kernel, arch, "bf16", {"STEP": step, "EP": 128}, num_warps=warps)
    for step, beside in ((16, False), (512, True)):
        constants = {"STEP": step, "BESIDE": beside}
        build(assign_pairs_kernel, arch, "bf16", constants, num_warps=1)


@pytest.mark.thin
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(
    ("bits", "groups", "fuse", "high", "warps", "registers"),
    [
        (4, 8, True, 1, 4, 168), (4, 6, False, 2, 1, 128),
        seldom(4, 16, True, 1, 4, 168), seldom(4, 16, True, 1, 2, 168),
        seldom(4, 6, False, 1, 2, 128),
    ],
)  # fmt: skip
def test_programs_of_all_k_compile_and_keep_words_in_registers(
    arch, bits, groups, fuse, high, warps, registers
):
    constants = {
        "BITS": bits, "SYMMETRIC": False, "EVEN_K": True, "HAS_BIAS": fuse, "GATHER": fuse,
        "BH": high, "WM": warps, "STEPS": groups // warps, "D": 4, "FUSE": fuse, "ACT": "silu",
        "INTERPRET": False,
    }  # fmt: skip
    options = {"num_warps": warps, "maxnreg": registers}
    made = build(rows_expert_kernel, arch, "bf16", constants, **options)
    # Shared memory is where the warps' sums meet.
    assert made.shared_bytes <= 2 * warps * high * 16 * 8 * 4
    assert "cp.async" not in made.ptx


@pytest.mark.thin
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(
    "padded", [64, *(pytest.param(n, marks=pytest.mark.seldom) for n in (16, MOST_EXPERTS))]
)
def test_sorting_of_many_compiles(arch, padded):
    blocks = dict.fromkeys(("blocks", "apart", "broad"), "*i32")
    constants = {"EP": padded, "BLOCK": BLOCK}
    build(count_kernel, arch, "bf16", constants, num_warps=8)
    constants |= {"WIDE": WIDE, "SHORT": SHORT}
    build(place_kernel, arch, "bf16", constants, blocks, num_warps=8)


def wide(arch, *, dtype, tma, fuse, even=True):
    tile = expert_wide
    own = tile.BN // 2 if fuse else tile.BN
    given = {"blocks": "*i32", "DESC": f"*{dtype}"}
    if tma:
        given["DESC"] = f"tensordesc<{dtype}[{own},{tile.BK}]>"
    constants = {
        "BM": WIDE, "BN": tile.BN, "BK": tile.BK, "TAIL": tile.TAIL, "STAGES": tile.STAGES,
        "GATHER": fuse, "FUSE": fuse, "ACT": "clamped_silu" if fuse else "silu",
        "HAS_BIAS": True, "TMA": tma, "EVEN_K": even, "EVEN_N": even, "INTERPRET": False,
    }  # fmt: skip
    return build(
        expert_wide.wide_expert_kernel, arch, dtype, constants, given, num_warps=tile.WARPS
    )


WIDE_FITS = [a for a in ARCHITECTURES if wide_fits(SHARED_LIMIT[a])]


@pytest.mark.everywhere
@pytest.mark.parametrize("arch", [a if a == 90 else seldom(a) for a in WIDE_FITS])
def test_wide_tiles_compile_where_they_fit(arch, seeds):
    for dtype, fuse, even in seeds([("bf16", True, True), ("fp16", False, False)]):
        made = wide(arch, dtype=dtype, tma=arch >= 90, fuse=fuse, even=even)
        assert (arch >= 90) == ("cp.async.bulk.tensor" in made.ptx)
    if arch == 90:  # columns that are no multiple of 8, and not gated
        wide(arch, dtype="bf16", tma=False, fuse=False, even=False)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_routers_compile(arch):
    one = {"E": 128, "PADDED": 128, "TOP": 8, "TOP_PADDED": 8, "GROUPS": 1, "KEPT": 1}
    one |= {"SIGMOID": False, "CORRECTED": False, "TWO": False, "NORMALISE": True}
    many = one | {"E": 256, "PADDED": 256, "GROUPS": 8, "KEPT": 4, "TWO": True}
    given = dict.fromkeys(("x_ptr", "norm_weight", "router", "bias", "normed"), "*bf16")
    given |= {"shares": "*fp32", "T": "i32", "columns": "i32", "eps": "fp32"}
    whole = {"E": 128, "CHUNKS": 6, "BT": TOKENS, "BE": EXPERTS, "BK": CHUNK, "INTERPRET": False}
    build(norm_logits_kernel, arch, "bf16", whole, given, num_warps=4)
    one |= {"HAS_BIAS": False, "SHARES": 1}
    shared = {"HAS_BIAS": True, "SHARES": 6}
    for constants in (one, many | shared | {"SIGMOID": True, "CORRECTED": True}):
        build(route_kernel, arch, "bf16", constants, given, num_warps=1)


@pytest.mark.parametrize(
    ("bm", "groups", "fuse"),
    [
        (128, 16, False), (MOST_GATED, 16, True), seldom(16, 6, False),
        *(seldom(bm, 16, False) for bm in (16, 32, 64)),
        *(seldom(bm, 16, True) for bm in (16, 32)),
    ],
)  # fmt: skip
def test_products_in_flight_keep_their_operands(bm, groups, fuse):
    """As test_gemm_compile.py: no step unpacks into registers that wgmma still reads."""
    code = packed(90, 4, bm, fuse=fuse, groups=groups).machine_code()
    assert product_loops(code) and overwritten(code) == []
