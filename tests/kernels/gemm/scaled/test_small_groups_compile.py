"""Products of groups of 32 and 64 compile for every listed architecture; shared memory fits."""

import pytest

pytest.importorskip("triton")
from llmpq.kernels.gemm.scaled.small_groups import BN, HALF, dequantize_kernel, product_kernel  # noqa: E402
from llmpq.kernels.kernel_table import FEW_ROWS  # noqa: E402
from reference.cubin import (  # noqa: E402
    ARCHITECTURES,
    CONSUMER_BLACKWELL,
    SHARED_LIMIT,
    compile_kernel,
)

pytestmark = pytest.mark.compile
SIZES = ("M", "N", "K", "groups", "splits")


@pytest.mark.thin
@pytest.mark.parametrize("arch", (*ARCHITECTURES, CONSUMER_BLACKWELL))
@pytest.mark.parametrize(
    ("bits", "group", "symmetric"),
    [(3, 64, False), (8, 64, True), pytest.param(4, 32, False, marks=pytest.mark.seldom)],
)
def test_products_fit(arch, bits, group, symmetric):
    constants = {"HALF": HALF, "BITS": bits, "G": group, "SYMMETRIC": symmetric}
    cases = [
        (product_kernel, {"BM": 16, "BN": BN}, "*fp32"),
        (product_kernel, {"BM": FEW_ROWS, "BN": BN}, "*fp32"),
        (dequantize_kernel, {"BN": 16}, "*bf16"),
    ]
    for kernel, own, out in cases:
        kinds = {"P0": "*u8", "P1": "*u8", "OUT": out} | dict.fromkeys(SIZES, "i32")
        given = {
            name: kinds.get(name, "*bf16")
            for name in kernel.arg_names
            if name not in constants | own
        }
        aligned = tuple(name for name, kind in given.items() if kind.startswith("*"))
        made = compile_kernel(
            kernel, arch, given, constants | own, aligned=aligned, options={"num_warps": 4}
        )
        assert made.cubin and made.shared_bytes <= SHARED_LIMIT[arch]
