"""Atom's Triton kernels compile to machine code for every listed architecture, without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from llmpq.kernels.atom.input_kernels import round_input_kernel
from llmpq.kernels.atom.portable import FEW_TILES, WIDE, GemmPlan, channel_plan
from llmpq.kernels.atom.portable_kernels import atom_gemm_kernel, channel_gemm_kernel
from reference.cubin import ARCHITECTURES, SHARED_LIMIT, Compiled, compile_kernel

pytestmark = pytest.mark.compile

ROUNDING = {"BITS": 4, "SIGNED": True, "CLIP": 0.95}
TYPES = {
    **dict.fromkeys(("A", "WO", "CODES"), "*i8"),
    **dict.fromkeys(("SA", "SCALES", "HADAMARD"), "*fp32"),
    **dict.fromkeys(("SW", "SO", "BIAS", "RESIDUAL", "Y", "X", "WEIGHT"), "*bf16"),
    **dict.fromkeys(("M", "N", "K", "columns", "normal", "outliers", "x_stride", "a_width"), "i32"),
    "eps": "fp32",
    "INDEX": "*i32",
}


def compiled(kernel: Any, arch: int, constants: dict[str, Any], w: str, **options: int) -> Compiled:
    types = {name: t for name, t in {**TYPES, "W": w}.items() if name not in constants}
    arguments = {name: types[name] for name in kernel.arg_names if name in types}
    aligned = tuple(n for n, t in arguments.items() if t.startswith("*"))
    aligned += tuple(
        n
        for n in ("N", "K", "columns", "normal", "x_stride", "outliers", "a_width")
        if n in arguments
    )
    made = compile_kernel(kernel, arch, arguments, constants, aligned=aligned, options=options)
    assert made.cubin and made.shared_bytes <= SHARED_LIMIT[arch]
    return made


@pytest.mark.thin
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("bits", "parts"), [(4, 1), (4, 2), (8, 0)])
def test_product_compiles_to_tensor_cores(
    arch: int, bits: int, parts: int, seeds: Callable[..., Sequence[tuple[int, int, int, int]]]
) -> None:
    groups = {0: 1, 1: 31, 2: 62}[parts]
    tiles = [(16, 64, 4, 4), (128, 128, 8, 3)]  # `make test`: large ones where memory is least
    for block_m, block_n, warps, stages in seeds(tiles[:: -1 if arch in (86, 89) else 1]):
        constants = {
            "GROUPS": groups,
            "BLOCKS": 31,
            "PARTS": parts,
            "BITS": bits,
            "HAS_OUTLIERS": bits == 4,
            "HAS_BIAS": False,
            "HAS_RESIDUAL": True,
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
            "GROUP_N": 8,
        }
        w = "*u8" if bits == 4 else "*i8"
        made = compiled(atom_gemm_kernel, arch, constants, w, num_warps=warps, num_stages=stages)
        assert any(kind in made.ptx for kind in (".s8", "kind::i8"))
        assert any(unit in made.ptx for unit in ("mma.sync", "wgmma", "tcgen05.mma"))


@pytest.mark.everywhere
@pytest.mark.parametrize(
    "arch",
    [
        pytest.param(arch, marks=[pytest.mark.seldom] if arch not in (86, 90) else [])
        for arch in ARCHITECTURES
    ],
)
def test_every_tile_of_w8a8_fits_every_architecture(
    arch: int, share: Callable[..., Sequence[GemmPlan]]
) -> None:
    many = {channel_plan(rows, columns) for rows in (129, 4096) for columns in (WIDE, WIDE + 1)}
    assert all(isinstance(tiles, GemmPlan) for tiles in many)
    every = sorted(many | set(FEW_TILES.values()), key=str)
    for tiles in share(every, arch, ARCHITECTURES):
        constants = {
            "K": 4096,
            "HAS_BIAS": True,
            "HAS_RESIDUAL": True,
            "BLOCK_M": tiles.block_m,
            "BLOCK_N": tiles.block_n,
            "GROUP_M": 8,
        }
        options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
        made = compiled(channel_gemm_kernel, arch, constants, "*i8", **options)
        assert any(unit in made.ptx for unit in ("mma.sync", "wgmma", "tcgen05.mma"))


@pytest.mark.thin
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("making", ["none", "rms", "silu", "relu"])
@pytest.mark.parametrize("compressed", [True, False])
def test_rounding_compiles(arch: int, making: str, compressed: bool) -> None:
    """Rows of 14,336 channels of W8A8, which no thread spills; groups of W4A4 in an order."""
    groups, group = (1, 14336) if compressed else (31, 128)
    constants = {
        **ROUNDING,
        "COMPRESSED": compressed,
        "MAKING": making,
        "GROUPS": groups,
        "BLOCK_G": 1 if compressed else 32,
        "GROUP": group,
        "BLOCK_GROUP": 16384 if compressed else 128,
        "BLOCK": 16384 if compressed else 4096,
        "HAS_INDEX": not compressed,
    }
    warps = 16 if making == "rms" and compressed else 8
    made = compiled(round_input_kernel, arch, constants, "*u8", num_warps=warps)
    assert "st.local" not in made.machine_code() and "STL" not in made.machine_code()
