"""A GGUF matrix's own 4-bit codes that stand for values of a table: MXFP4, IQ4_NL, IQ4_XS.

    block, 32 weights                                            w
    MXFP4    e | 16 bytes, weights 0-15 | 16-31                  E2M1 2^(e - 127)
    IQ4_NL   d f16 | 16 bytes                                    d iq4
    block, 256 weights in eights of 32
    IQ4_XS   d f16 | their high 2 bits, 2 bytes | low 4, 4 bytes | 128 bytes    d (s - 32) iq4

MXFP4 is kept on any grid, IQ4 in groups of 32, where a plan counts its scales. Those are float32 in
a float32 stage, else float16: exact for IQ4_NL, within 2^-11 for IQ4_XS. At 8 bits, IQ4's values
are whole ones, which codes of 8 bits are.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from llmpq.checkpoints.gguf_file import GgufTensor
from llmpq.kernels.formats.codebooks import Codebook
from llmpq.kernels.weights.codebook_weight import CodebookWeight, codebook_weight, serves_codebooks
from llmpq.precision import WeightScheme
from llmpq.runtime.weights.codebook_forms import bounded, has_halves
from llmpq.runtime.weights.gguf_codes import GROUP, BlockCodes, halves, nibbles

KINDS = ("MXFP4", "IQ4_NL", "IQ4_XS")
SIZES = {"MXFP4": 17, "IQ4_NL": 18, "IQ4_XS": 136}
"""Bytes of a block."""


def keeps_kind(kind: str, scheme: WeightScheme | None) -> bool:
    """Whether a layer stored so holds a type's codes."""
    if scheme is None or kind not in KINDS or not serves_codebooks(scheme):
        return False
    return kind == "MXFP4" or (scheme.group_size == GROUP and scheme.bits == 4)


def codebook_of_blocks(
    tensor: GgufTensor,
    expert: int | None,
    dtype: torch.dtype,
    columns: Callable[[Tensor], Tensor] | None = None,
) -> CodebookWeight | None:
    """Return a matrix's codes, or one expert's; None where float16 does not hold its scales.

    `columns`: puts columns, transposed, in another order, that of whole groups.
    """
    codes_NK, scale_NG = _codes(tensor, expert)
    if columns is not None:
        codes_NK, scale_NG = (columns(t.T).T.contiguous() for t in (codes_NK, scale_NG))
    if tensor.kind == "MXFP4":
        made = codebook_weight(codes_NK, scale_NG, codebook=Codebook.E2M1, group_size=GROUP)
        return bounded(made, dtype)
    if dtype != torch.float32:
        if not has_halves(scale_NG):
            return None
        scale_NG = scale_NG.half()
    made = codebook_weight(codes_NK, scale_NG, codebook=Codebook.IQ4, group_size=GROUP)
    return bounded(made, dtype)


def whole_numbers(tensor: GgufTensor, expert: int | None) -> BlockCodes:
    """Return IQ4's values as codes of 8 bits around 128."""
    codes_NK, scale_NG = _codes(tensor, expert)
    table = torch.tensor(Codebook.IQ4.values).int() + 128
    return BlockCodes(codes_NK=table.to(torch.uint8)[codes_NK.int()], scale_NG=scale_NG, zero=128)


def _codes(tensor: GgufTensor, expert: int | None) -> tuple[Tensor, Tensor]:
    """Return codes uint8 [N, K] and scales [N, K / 32]: exponents, or float32."""
    blocks, shape = torch.from_numpy(tensor.blocks()), tensor.shape
    if expert is not None:
        blocks, shape = blocks.view(shape[0], -1)[expert], shape[1:]
    blocks = blocks.view(shape[0], -1, SIZES[tensor.kind])
    if tensor.kind == "MXFP4":
        return nibbles(blocks[..., 1:]).flatten(1), blocks[..., 0].contiguous()
    if tensor.kind == "IQ4_NL":
        return nibbles(blocks[..., 2:]).flatten(1), halves(blocks, 0)
    codes = nibbles(blocks[..., 8:].unflatten(-1, (8, 16)))
    high = blocks[..., 2].int() | blocks[..., 3].int() << 8
    low = torch.stack((blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4), dim=-1).flatten(-2).int()
    steps = low | (high[..., None] >> 2 * torch.arange(8) & 3) << 4
    return codes.flatten(1), (halves(blocks, 0)[..., None] * (steps - 32)).flatten(1)
