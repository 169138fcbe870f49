"""A lane's words in shared memory to wgmma's left operand, as wgmma_rows.cu has them, on the CPU.

3 bits' assembly is executed in gluon/test_gluon_unpack.py; here is where its pairs go.
"""

import re

import numpy as np
import pytest
import torch

from llmpq.kernels.formats.weight_layout import Layout, pack
from llmpq.kernels.gemm.cuda import rows_unpack
from llmpq.kernels.gemm.cuda.rows_text import RowsTile, text
from llmpq.kernels.gemm.gluon.gluon_unpack import scaled_text
from reference.ptx_words import execute, floats, pairs

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize("bits", [4, 8])
def test_words_of_a_lane_are_its_rows_and_columns(bits):
    """PTX, m64n8k16: registers of a lane are (row, k), (row + 8, k), (row, k + 8), (both)."""
    codes = torch.randint(0, 1 << bits, (16, 128), dtype=torch.uint8)
    planes = [p.numpy().view(np.uint32) for p in pack(codes, bits, Layout.FRAGMENT)]
    for lane in range(32):
        row, column = lane // 4, 2 * (lane % 4)
        words = [
            [plane[j * 128 + lane * 4 + i] for j in range(2) for i in range(4)] for plane in planes
        ]
        for half in range(2):
            for j in range(8):  # a[2 j], a[2 j + 1] are of word j
                k = 64 * half + 16 * (j // 2) + 8 * (j % 2) + column
                for r3 in range(2):
                    for k0 in range(2):
                        shift = 16 * k0 + 8 * half + 4 * r3
                        nibbles = [int(plane[j]) >> shift & 15 for plane in words]
                        code = nibbles[0] if bits == 4 else nibbles[0] * 16 + nibbles[1]
                        assert code == codes[row + 8 * r3, k + k0]


def test_three_bits_of_a_lane_are_in_the_order_of_the_operand():
    codes = torch.randint(0, 8, (16, 128), dtype=torch.uint8)
    words = pack(codes, 3, Layout.FRAGMENT)[0].numpy().view(np.uint32).reshape(3, 32, 2)
    for lane, half, p, k0 in np.ndindex(32, 2, 16, 2):
        own = [int(w) >> 16 * k0 & 0xFFFF for w in words[:, lane, half]]
        top = own[0] >> 15 | (own[1] >> 15) << 1 | (own[2] >> 15) << 2
        code = top if p == 15 else own[p // 5] >> 3 * (p % 5) & 7
        row = lane // 4 + 8 * (p % 2)
        k = 64 * half + 16 * (p // 4) + 8 * (p // 2 % 2) + 2 * (lane % 4) + k0
        assert code == codes[row, k]


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("bits", [4, 8])
def test_operands_are_code_minus_zero_times_scale_rounded_once(bits, kind, symmetric, half):
    random = np.random.default_rng(bits)
    words = [random.integers(0, 1 << 32, 512, dtype=np.uint32) for _ in range(bits // 4)]
    codes = [sum(_codes_of(word, half, r3) << 4 * i for i, word in enumerate(reversed(words)))
             for r3 in range(2)]  # fmt: skip
    zero = [random.integers(0, 1 << bits, (512, 1)) + 0.0 for _ in range(2)]
    if symmetric:
        zero = [np.full((512, 1), 2.0 ** (bits - 1))] * 2
    scale = [random.uniform(1e-5, 3.0, (512, 1)) * random.choice([-1, 1], (512, 1)) for _ in zero]
    scale = [floats(pairs(np.repeat(s, 2, 1), kind), kind) for s in scale]
    wanted = [pairs((c - z) * s, kind) for c, z, s in zip(codes, zero, scale, strict=True)]

    given = execute(rows_unpack.JOIN, words, 2) if bits == 8 else words
    scales = [pairs(s, kind) for s in scale]
    if rows_unpack.is_subnormal(bits, kind):
        scales = [execute(rows_unpack.SCALE, [s], 1)[0] for s in scales]
    if symmetric:
        zeros = [np.full(512, z, np.uint32) for z in rows_unpack.symmetric_zeros(bits, kind)]
    else:
        both = pairs(np.concatenate(zero, 1), kind)
        zeros = execute(rows_unpack.zero_text(bits, kind), [both], 2)
    text_of = rows_unpack.pairs_text(bits, kind, half)
    made = execute(text_of, [*given, *scales, *zeros], 2)
    assert all(np.array_equal(m, w) for m, w in zip(made, wanted, strict=True))
    spoilt = text_of.replace("0x000f000f", "0x000f0007").replace("0x4341", "0x4342")
    spoilt = execute(spoilt.replace("0x00ff00ff", "0x007f00ff"), [*given, *scales, *zeros], 2)
    assert not np.array_equal(spoilt[0], made[0])


def _codes_of(word, half, r3):
    """The nibbles of two neighbours along k."""
    at = np.array([8 * half + 4 * r3, 16 + 8 * half + 4 * r3], np.uint32)
    return (word[:, None] >> at & np.uint32(15)).astype(np.int64)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("zeros", [True, False])
def test_three_bits_have_the_assembly_of_the_other_kernels(zeros, kind):
    """The same instructions, with 32-bit outputs in place of halves."""
    tile = RowsTile(bits=3, kind=kind, zeros=zeros, grouped=True, rows=96, warpgroups=2)
    made, known = text(tile), scaled_text(3, kind, symmetric=not zeros)
    steps = [s for s in known.split(";") if "{$" not in s and s.strip("{} ")]
    renamed = [re.sub(r"\$(\d+)", lambda f: f"%{int(f[1]) - 16}", step) for step in steps]
    assert ";".join(renamed).lstrip("{") in made.replace("{.reg", ".reg")
    assert f"m64n96k16.f32.{kind}.{kind}" in made and made.count("mov.b32 %0, p0;") >= 1
