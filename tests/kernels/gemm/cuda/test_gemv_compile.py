"""The CUDA C++ kernel for GPUs before Ampere compiles for them without one, and spills nothing."""

import pytest

from llmpq.kernels import nvrtc
from llmpq.kernels.gemm.cuda.gemv_launch import ROWS_PLAIN, ROWS_TENSOR, text
from llmpq.kernels.kernel_table import Kernel, KernelForm, eligible, gpu
from reference.cubin import Compiled

CARDS = ((7, 0), (7, 5))
FORMS = ((4, 1, 1), (8, 0, 0), (3, 1, 4), (4, 0, 2))
"""Bits, kind of zeros, parts of a group."""


@pytest.mark.compile
@pytest.mark.skipif(not nvrtc.available(), reason="needs NVRTC (nvidia-cuda-nvrtc)")
@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize(
    "bits,zeros,parts",
    [FORMS[0], FORMS[2], *(pytest.param(*f, marks=pytest.mark.seldom) for f in FORMS[1::2])],
)
def test_every_form_compiles_for_old_cards(card, bits, zeros, parts, share):
    """In `make test` a form has the largest tile of either kind, and its share of the others."""
    if not nvrtc.compiles_for(card):
        pytest.skip("this NVRTC does not know the card: CUDA 13's has none before Turing")
    constants = (("BITS", bits), ("ZEROS", zeros), ("PARTS", parts))
    largest = [(ROWS_PLAIN[-1], False), (ROWS_TENSOR[-1], True)]
    smaller = [(r, False) for r in ROWS_PLAIN[:-1]] + [(r, True) for r in ROWS_TENSOR[:-1]]
    for rows, tensor in (*largest, *share(smaller, (bits, zeros, parts), FORMS)):
        if tensor and card < (7, 5):
            continue
        code = nvrtc.compile_text(text(constants, rows, 8, tensor), nvrtc.architecture(card))
        found = Compiled(cubin=code, ptx="", shared_bytes=0).machine_code()
        assert ("HMMA.1688" in found) == tensor
        assert "STL" not in found and "LDL" not in found, "registers are spilt"


@pytest.mark.pure
def test_old_cards_read_few_rows_packed_and_make_w_for_many():
    for form in (KernelForm.WORDS, KernelForm.PARTS, KernelForm.PARTS_3):
        for card, most in (((7, 0), 16), ((7, 5), 64)):
            assert eligible(form, gpu(card), most)[0] == Kernel.CUDA_GEMV
            assert eligible(form, gpu(card), most + 1)[0] == Kernel.CUDA_DEQUANTIZE
        assert Kernel.CUDA_GEMV not in eligible(form, gpu((8, 0)), 1)
        assert Kernel.CUDA_GEMV not in eligible(form, gpu((6, 1)), 1)
