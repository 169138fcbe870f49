"""A lane's words in shared memory to wgmma's left operand, as wgmma_rows.cu has them, on the CPU.

The assembly itself is executed in gluon/test_gluon_unpack.py; here is where its pairs go.
"""

import re

import numpy as np
import pytest
import torch

from llmpq.kernels.formats.weight_layout import Layout, pack
from llmpq.kernels.gemm.cuda.rows_text import RowsTile, text
from llmpq.kernels.gemm.gluon.gluon_unpack import scaled_text

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


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("bits,zeros", [(3, True), (3, False), (4, True), (8, False)])
def test_the_text_has_the_assembly_of_the_other_kernels(bits, zeros, kind):
    """The same instructions, with 32-bit outputs in place of halves."""
    tile = RowsTile(bits=bits, kind=kind, zeros=zeros, grouped=True, rows=96, warpgroups=2)
    made, pairs = text(tile), 16 if bits == 3 else 2
    for half in (0,) if bits == 3 else (0, 1):
        known = scaled_text(bits, kind, half=half, symmetric=not zeros)
        steps = [s for s in known.split(";") if "{$" not in s and s.strip("{} ")]
        renamed = [re.sub(r"\$(\d+)", lambda f: f"%{int(f[1]) - pairs}", step) for step in steps]
        assert ";".join(renamed).lstrip("{") in made.replace("{.reg", ".reg")
    assert f"m64n96k16.f32.{kind}.{kind}" in made and made.count("mov.b32 %0, p0;") >= 1
