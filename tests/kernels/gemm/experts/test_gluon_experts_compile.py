"""The Gluon programs of a mixture's prompts compile for sm_90 and keep a product in flight.

No interpreter runs Gluon: test_experts_gpu.py compares them with their twin on a GPU.
"""

import pytest
from triton.experimental.gluon import language as gl

from llmpq.kernels.gemm.experts.gluon_expert_dense import dense_kernel
from llmpq.kernels.gemm.experts.gluon_expert_launch import BROAD_STAGES, PACKED_STAGES, STAGES
from llmpq.kernels.gemm.experts.gluon_expert_packed import packed_kernel
from reference.cubin import SHARED_LIMIT, compile_kernel
from reference.machine_code import overwritten, product_loops

pytestmark = pytest.mark.compile
LAYOUT = gl.NVMMASharedLayout(128, 16, 2)
POINTERS = dict.fromkeys(("order", "blocks", "count", "P0", "P1", "S", "Z"), "*i32")
SIZES = ("N", "F", "K", "top", "slots", "tiles", "height", "every", "groups")


def seldom(*case):
    """In `make test-all` only: its like is in `make test`."""
    return pytest.param(*case, marks=pytest.mark.seldom)


def build(kernel, dtype, constants):
    rows = 256 if constants.get("BROAD") else 128
    types = {
        f"{x}_desc": f"tensordesc<{dtype}[{n},64],{LAYOUT!r}>" for x, n in (("x", rows), ("w", 64))
    }
    types |= POINTERS | dict.fromkeys(("X", "Y", "BIAS"), f"*{dtype}") | dict.fromkeys(SIZES, "i32")
    types |= {"limit": "fp32", "slope": "fp32"}
    given = {n: types[n] for n in kernel.arg_names if n not in constants}
    aligned = tuple(n for n, t in given.items() if t.startswith("*") or n in ("N", "F", "K"))
    made = compile_kernel(kernel, 90, given, constants, aligned=aligned, options={"num_warps": 4})
    assert made.cubin and made.shared_bytes <= SHARED_LIMIT[90]
    code = made.machine_code()
    assert overwritten(code) == []
    return code


def common(fuse):
    return {"FUSE": fuse, "ACT": "silu", "HAS_BIAS": True, "GATHER": fuse, "PDL": True}


@pytest.mark.parametrize(("fuse", "dtype"), [(True, "bf16"), seldom(False, "fp16")])
def test_16_bit_programs(fuse, dtype):
    """Blocks of 128 and of 64 rows, two warpgroups, two products of 64 k each."""
    code = build(dense_kernel, dtype, common(fuse) | {"STAGES": STAGES, "SEEK": fuse})
    assert code.count("HGMMA") == 2 * 2 * 2 * 4
    assert code.count("WARPGROUP.DEPBAR") == 2 * 2 * (2 + 1)
    assert code.count("STL") == 0
    assert ("LDGSTS" in code) == fuse
    assert len(product_loops(code)) >= 4


@pytest.mark.parametrize(
    ("bits", "fuse", "dtype"),
    [seldom(4, True, "bf16"), seldom(4, False, "fp16"), (3, True, "bf16")],  # 4: mxfp4's, too
)
def test_packed_programs(bits, fuse, dtype):
    """The same, four operands unpacked a k-group."""
    constants = common(fuse) | {"BITS": bits, "GROUPED": True, "SYMMETRIC": False}
    code = build(packed_kernel, dtype, constants | {"STAGES": PACKED_STAGES, "BROAD": False})
    assert code.count("HGMMA") == 2 * 2 * 4 * 4
    assert code.count("WARPGROUP.DEPBAR") == 2 * 2 * (4 + 1)
    inner = [loop for loop in product_loops(code) if len(loop) < 700]
    assert len(inner) == 4
    for loop in inner:  # 128 sums a thread: a few addresses may go by memory
        assert sum(op.startswith(("STL", "LDL")) for op, _ in loop) <= 12


@pytest.mark.seldom  # those of mxfp4 are below
def test_broad_packed_programs():
    """Blocks of 256, 128 and 64 rows, an operand of 64 k a slot."""
    constants = common(False) | {"BITS": 4, "GROUPED": True, "SYMMETRIC": False}
    code = build(packed_kernel, "bf16", constants | {"STAGES": BROAD_STAGES, "BROAD": True})
    assert code.count("HGMMA") == 3 * 2 * 2 * 4
    assert code.count("WARPGROUP.DEPBAR") == 3 * 2 * (2 + 1)


@pytest.mark.seldom  # as packed ones; unpacked as below
@pytest.mark.parametrize(("fuse", "dtype"), [(True, "bf16"), (False, "fp16")])
def test_mxfp4_programs(fuse, dtype):
    constants = common(fuse) | {"BITS": 4, "GROUPED": True, "SYMMETRIC": "e2m1"}
    code = build(packed_kernel, dtype, constants | {"STAGES": PACKED_STAGES, "BROAD": False})
    assert code.count("HGMMA") == 2 * 2 * 4 * 4
    inner = [loop for loop in product_loops(code) if len(loop) < 800]
    assert len(inner) == 4
    for loop in inner:
        assert sum(op.startswith(("STL", "LDL")) for op, _ in loop) <= 12


def test_broad_mxfp4_programs():
    """Blocks of 256, 128 and 64 rows, an operand of 64 k a slot."""
    constants = common(False) | {"BITS": 4, "GROUPED": True, "SYMMETRIC": "e2m1"}
    code = build(packed_kernel, "bf16", constants | {"STAGES": BROAD_STAGES, "BROAD": True})
    assert code.count("HGMMA") == 3 * 2 * 2 * 4
    assert code.count("WARPGROUP.DEPBAR") == 3 * 2 * (2 + 1)
