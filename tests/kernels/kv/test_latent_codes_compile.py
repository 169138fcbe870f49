"""Attention over packed latents compiles for every listed architecture; shared memory fits."""

import pytest

pytest.importorskip("triton")
from llmpq.kernels.kv.latent_codes import COLUMNS, latent_codes_kernel, shape_of  # noqa: E402
from llmpq.kernels.kv.ops import WORD_K_WIDTH  # noqa: E402
from llmpq.kernels.tools.cubin import (  # noqa: E402
    ARCHITECTURES,
    CONSUMER_BLACKWELL,
    SHARED_LIMIT,
    compile_kernel,
)

pytestmark = pytest.mark.compile
KINDS = (
    dict.fromkeys(("k_words", "v_words", "table", "slots", "starts", "counts"), "*i32")
    | dict.fromkeys(("k_params", "v_params"), "*fp16")
    | dict.fromkeys(("part_ptr", "lse_ptr"), "*fp32")
    | dict.fromkeys(("table_width", "splits"), "i32")
    | {"scale": "fp32"}
)


@pytest.mark.parametrize(
    ("arch", "bits"),
    [*((arch, 4) for arch in (*ARCHITECTURES, CONSUMER_BLACKWELL)), (86, 8), (90, 8), (90, 2)],
)
def test_it_fits(arch, bits):
    warps, stages = shape_of(bits, SHARED_LIMIT[arch])
    constants = {
        "Q": 1,
        "H": 16,
        "D": 576,
        "C": 576,
        "BITS": bits,
        "R": COLUMNS,
        "PADDED": 1024,
        "STAGES": stages,
        "KW": WORD_K_WIDTH,
        "EMULATE": False,
    }
    names = [name for name in latent_codes_kernel.arg_names if name not in constants]
    given = {name: KINDS.get(name, "*bf16") for name in names} | {"q_ptr": "*fp16"}
    aligned = tuple(name for name, kind in given.items() if kind.startswith("*"))
    made = compile_kernel(
        latent_codes_kernel, arch, given, constants, aligned=aligned, options={"num_warps": warps}
    )
    assert made.cubin and made.shared_bytes <= SHARED_LIMIT[arch]
