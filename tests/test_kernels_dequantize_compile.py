"""The dequantise kernel compiles to machine code for every listed architecture, without a GPU."""

import itertools

import pytest

from llmpq.kernels.compile import ARCHITECTURES, SHARED_LIMIT, compile_kernel
from llmpq.kernels.dequantize import dequantize_kernel

pytestmark = pytest.mark.compile

POINTERS = {"PLANE0": "*u8", "PLANE1": "*u8", "SCALE": "*fp16", "ZERO": "*fp16", "OUT": "*fp16"}
SIZES = {"first_row": "i32", "last_row": "i32", "N": "i32", "K": "i32", "groups": "i32"}


@pytest.mark.parametrize("arch,bits", itertools.product(ARCHITECTURES, (3, 4, 8)))
def test_dequantise_compiles(arch, bits):
    constants = {"BITS": bits, "PER_CHANNEL": False, "SYMMETRIC": False, "FRAGMENT": True}
    made = compile_kernel(
        dequantize_kernel,
        arch,
        POINTERS | SIZES,
        constants | {"GROUPS_PER_PROGRAM": 4},
        aligned=(*POINTERS, "K"),
    )
    assert made.cubin and made.shared_bytes <= SHARED_LIMIT[arch]
