"""Products with codes of a table compile for every listed architecture; shared memory fits."""

import pytest

pytest.importorskip("triton")
from llmpq.kernels.gemm.float_codes.codebook_products import (  # noqa: E402
    HALF,
    codebook_dequantize_kernel,
    codebook_gemm_kernel,
)
from llmpq.kernels.gemm.scaled.small_groups import BN
from llmpq.kernels.kernel_table import FEW_ROWS
from reference.cubin import (  # noqa: E402
    ARCHITECTURES,
    CONSUMER_BLACKWELL,
    SHARED_LIMIT,
    compile_kernel,
)

pytestmark = pytest.mark.compile
SIZES = ("M", "N", "K", "groups", "splits")
FORMS = {
    "mxfp4": ({"G": 32, "E2M1": True, "SCALE": "e8m0"}, "*u8"),
    "nvfp4": ({"G": 16, "E2M1": True, "SCALE": "e4m3"}, "*u8"),
    "nf4": ({"G": 64, "E2M1": False, "SCALE": "float"}, "*fp16"),
}


@pytest.mark.thin
@pytest.mark.parametrize("arch", (*ARCHITECTURES, CONSUMER_BLACKWELL))
@pytest.mark.parametrize("form", [pytest.param("mxfp4", marks=pytest.mark.seldom), "nvfp4", "nf4"])
def test_products_fit(arch, form):
    constants, scale = FORMS[form]
    constants = constants | {"HALF": HALF}
    cases = [
        (codebook_gemm_kernel, {"BM": 16, "BN": BN}, "*fp32"),
        (codebook_gemm_kernel, {"BM": FEW_ROWS, "BN": BN}, "*fp32"),
        (codebook_dequantize_kernel, {"BN": 16, "HAS_FACTOR": form == "nvfp4"}, "*bf16"),
    ]
    for kernel, own, out in cases:
        kinds = {"P": "*u8", "S": scale, "T": "*fp32", "F": "*fp32", "OUT": out, "X": "*bf16"}
        kinds |= dict.fromkeys(SIZES, "i32")
        given = {n: kinds[n] for n in kernel.arg_names if n not in constants | own}
        aligned = tuple(name for name, kind in given.items() if kind.startswith("*"))
        made = compile_kernel(
            kernel, arch, given, constants | own, aligned=aligned, options={"num_warps": 4}
        )
        assert made.cubin and made.shared_bytes <= SHARED_LIMIT[arch]
