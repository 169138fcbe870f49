"""The Gluon kernel's operand, from packed bytes to [64 rows, 64 k], executed on the CPU.

The assembly runs instruction by instruction (test_unpack_assembly.py does the same for the
other kernels'); axes and shapes are the kernel's own. Only the layouts are left to a GPU.
"""

import re

import numpy as np
import pytest
import torch

from llmpq.kernels.formats.weight_layout import Layout, pack
from llmpq.kernels.gemm.gluon import gluon_unpack as unpack
from llmpq.kernels.gemm.operands.unpack_assembly import BZ3, BZ4, BZ8, FZ3, FZ4, FZ8
from reference.ptx_words import execute, floats, pairs

pytestmark = pytest.mark.cpu

_SYMMETRIC = {  # what zero_constants gives for zeros of 2^(bits-1)
    (4, "f16"): [0x64086408, 0xD480D480],
    (4, "bf16"): [0xC308C308] * 2,
    (8, "f16"): [0x64806480] * 2,
    (8, "bf16"): [0xC508C508] * 2 + [0xC300C300] * 2,
}
_ZEROS = {(3, "f16"): FZ3, (4, "f16"): FZ4, (8, "f16"): FZ8}
_ZEROS |= {(3, "bf16"): BZ3, (4, "bf16"): BZ4, (8, "bf16"): BZ8}


def _operand(bits, kind, symmetric, half, codes, scale, zero, spoil=lambda text: text):
    """What `operand` makes of 64 rows' codes [64, 128], scales and zeros [64]."""
    planes = pack(torch.from_numpy(codes), bits, Layout.FRAGMENT)
    words = [p.numpy().view(np.uint32).reshape(4, -1) for p in planes]  # a block a warp
    lane = np.arange(32)
    if bits == 3:
        at = [64 * part + lane * 2 + half for part in range(3)]
        inputs = [words[0][:, a].reshape(-1) for a in at]
    else:
        w = np.arange(8)
        at = w // 4 * 128 + lane[:, None] * 4 + w % 4
        inputs = [plane[:, at].reshape(-1) for plane in words]
    repeat = len(inputs[0]) // 128
    thread = np.arange(128)
    row = thread // 32 * 16 + thread % 32 // 4
    splat = [np.repeat(pairs(np.stack([scale[row + r]] * 2, 1), kind), repeat) for r in (0, 8)]
    if not symmetric:
        count = {(3, "f16"): 6, (3, "bf16"): 4, (8, "bf16"): 4}.get((bits, kind), 2)
        pair = pairs(np.stack([zero[row], zero[row + 8]], 1), kind)
        zeros = [np.repeat(z, repeat) for z in execute(_ZEROS[bits, kind].value, [pair], count)]
    else:
        constants = _SYMMETRIC.get((bits, kind), [])
        zeros = [np.full(128 * repeat, c, np.uint32) for c in constants]
    if bits == 3:
        text = unpack._ASSEMBLY3[kind, symmetric]
        out = execute(spoil(text), [*inputs, *zeros, *splat], 32)
        axes = unpack.AXES3.value
    else:
        text = unpack._ASSEMBLY[bits, kind, half]
        out = execute(spoil(text), [*inputs, *splat, *zeros], 4)
        axes = unpack.AXES4.value
    numbers = np.stack(out, -1).astype(np.uint16)  # k0 fastest, as the joins' first axis
    count = numbers.shape[-1].bit_length() - 1
    numbers = numbers.reshape(-1, *([2] * count)).transpose(0, *range(count, 0, -1))
    numbers = numbers.reshape(unpack.LANES_SHAPE.value).transpose(axes).reshape(64, 64)
    words = np.ascontiguousarray(numbers).view(np.uint32).reshape(-1)
    return floats(words, kind).reshape(64, 64)


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_operand_is_code_minus_zero_times_scale(bits, kind, symmetric, half):
    random = np.random.default_rng(bits)
    codes = random.integers(0, 1 << bits, (64, 128)).astype(np.uint8)
    scale = floats(pairs(random.uniform(0.005, 0.015, (64, 2)), kind), kind)[:, 0]
    zero = random.integers(0, 1 << bits, 64).astype(np.float64)
    zero = np.full(64, 2.0 ** (bits - 1)) if symmetric else zero
    exact = (codes.astype(np.float64) - zero[:, None]) * scale[:, None]
    wanted = floats(pairs(exact[:, 64 * half : 64 * half + 64].reshape(-1, 2), kind), kind)
    made = _operand(bits, kind, symmetric, half, codes, scale, zero)
    assert np.array_equal(made, wanted.reshape(64, 64))  # one rounding, that of the product
    spoilt = _operand(bits, kind, symmetric, half, codes, scale, zero, _wrong_mask)
    assert not np.array_equal(spoilt, made)


def _wrong_mask(text):
    changed = re.sub(r"0x00(\w)\w00\1", lambda m: m[0].replace("f", "7").replace("7", "3", 1), text)
    return changed if changed != text else text.replace("0x000f000f", "0x00070007")
