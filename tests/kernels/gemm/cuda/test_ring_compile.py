"""The CUDA C++ kernel of few rows through rings compiles without a GPU, without spills."""

from dataclasses import replace

import pytest

from llmpq.kernels import nvrtc
from llmpq.kernels.gemm.cuda.ring_text import text
from llmpq.kernels.gemm.ranking.ring_plan import RingForm
from reference.cubin import Compiled

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(not nvrtc.available(), reason="needs NVRTC (nvidia-cuda-nvrtc)"),
]

PLAIN = RingForm(bits=4, kind="bf16", zeros=True)


@pytest.mark.parametrize(
    "form",
    [
        PLAIN,
        replace(PLAIN, kind="f16", zeros=False),
        replace(PLAIN, bits=8, ring=3),
        replace(PLAIN, bits=16, zeros=False, grouped=False, warps=8, parts=8, ring=4),
        replace(PLAIN, grouped=False, warps=8, parts=4, tiles=2),
    ],
    ids=lambda f: f"{f.bits} {f.kind} {f.warps}/{f.parts}",
)
def test_every_form_compiles_and_keeps_its_registers(form):
    code = Compiled(cubin=nvrtc.compile_text(text(form)), ptx="", shared_bytes=0).machine_code()
    assert "LDGSTS" in code and "LDSM" in code
    assert not any(spill in code for spill in ("STL", "LDL"))
