"""W4A4's Hopper kernels, and GPTQ's, compile to machine code without a GPU and do not spill."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
from triton.experimental.gluon import language as gl

from llmpq.kernels import nvrtc
from llmpq.kernels.atom import hopper as atom_hopper
from llmpq.kernels.atom import int8_kernel, round_activation, round_kernels, round_norm
from llmpq.kernels.atom.codes_text import CodesTile, text
from llmpq.kernels.fused import gptq_block
from reference.cubin import ARCHITECTURES, SHARED_LIMIT, Compiled, compile_kernel

pytestmark = pytest.mark.compile

ROUNDING = {"OUTLIERS": 128, "BITS": 4, "SIGNED": True, "CLIP": 0.95}
TYPES = {
    **dict.fromkeys(("X", "WEIGHT", "BIAS", "S", "RESIDUAL", "Y"), "*bf16"),
    **dict.fromkeys(("OUTLIER", "W", "U", "SCALE", "ZERO", "CODES", "ERRORS"), "*fp32"),
    "SCALES": "*fp32",
    "MATRICES": "*bf16",
    **dict.fromkeys(("UW", "UA", "UNIT"), "*fp32"),
    **dict.fromkeys(("SI", "CODES8"), "*i8"),
    "eighths": "i32",
    **dict.fromkeys(("M", "N", "K", "F", "normal", "x_stride", "w_stride", "u_stride"), "i32"),
    **dict.fromkeys(("eps", "low", "high"), "fp32"),
    "MS": "i32",
    "whole": "i32",
    "PARTIAL": "*fp32",
    "ARRIVED": "*i32",
    "INDEX": "*i32",
    "OUT": "*i8",
}


def compiled(kernel: Any, arch: int, constants: dict[str, Any], warps: int, **more: str) -> Any:
    types = {**TYPES, **more}
    arguments = {n: types[n] for n in kernel.arg_names if n in types}
    aligned = tuple(n for n, t in arguments.items() if t.startswith("*"))
    aligned += tuple(n for n in ("N", "K", "F", "MS", "x_stride") if n in arguments)
    if any(type.startswith("tensordesc") for type in more.values()):
        aligned = ()  # descriptors unfold into several arguments: places shift
    constants = {**constants, "num_warps": warps} if kernel.is_gluon() else constants
    made = compile_kernel(
        kernel, arch, arguments, constants, aligned=aligned, options={"num_warps": warps}
    )
    assert made.cubin and made.shared_bytes <= SHARED_LIMIT[arch]
    return made


def box(element: str, shape: list[int], swizzle: int) -> str:
    """A tensor descriptor's type."""
    layout = gl.NVMMASharedLayout(swizzle, 16 if element == "bf16" else 8, len(shape))
    return f"tensordesc<{element}[{','.join(map(str, shape))}],{layout!r}>"


@pytest.mark.skipif(not nvrtc.available(), reason="needs NVRTC (nvidia-cuda-nvrtc)")
@pytest.mark.parametrize(
    ("tokens", "warpgroups"), [(96, 3), pytest.param(160, 2, marks=pytest.mark.seldom)]
)
def test_the_product_runs_on_fp8_tensor_cores_beside_which_operands_are_made(
    tokens: int, warpgroups: int
) -> None:
    tile = CodesTile(kind="bf16", scales="f16", outliers=True, tokens=tokens, warpgroups=warpgroups)
    code = nvrtc.compile_text(text(tile))
    lines = Compiled(cubin=code, ptx="", shared_bytes=tile.shared_bytes).machine_code().splitlines()
    assert sum("IGMMA" in line for line in lines) == 4
    assert not [line for line in lines if re.search(r"\b(LDL|STL)\b", line)]
    # Between a product and the wait for it stands the unpacking of the next one's words.
    kinds = [k for line in lines if (k := re.search(r"QGMMA|VABSDIFF4|gsb0, 0x0", line))]
    order = [k[0] for k, before in zip(kinds[1:], kinds, strict=False) if k[0] != before[0]]
    turns = " ".join(order[order.index("QGMMA") :])
    assert turns.startswith("QGMMA VABSDIFF4 gsb0, 0x0 QGMMA VABSDIFF4 gsb0, 0x0")
    assert tile.slots >= 6


@pytest.mark.parametrize("outliers", [pytest.param(False, marks=pytest.mark.seldom), True])
def test_the_product_of_integer_scales_runs_on_int8_tensor_cores(outliers: bool) -> None:
    constants = {
        "G": 31,
        "SCALES": 34 if outliers else 31,
        "OUTLIERS": outliers,
        "HAS_BIAS": not outliers,
        "HAS_RESIDUAL": outliers,
        "BM": 128,
        "STAGES": 8,
        "GROUP_M": 8,
    }
    made = compiled(
        int8_kernel.integer_kernel,
        90,
        constants,
        4,
        a_desc=box("i8", [128, 64], 64),
        p_desc=box("u8", [8, 8, 128], 128),
    )
    assert re.search(r"wgmma\.mma_async.*s32\.s8\.s8", made.ptx)
    assert "e4m3" not in made.ptx and "setmaxnreg" in made.ptx
    loop = _loop_of_products(made.machine_code().splitlines(), 4)
    assert not [line for line in loop if re.search(r"\b(LDL|STL)\b", line)]
    # One half's products are always under way: ptxas did not make them wait for each other.
    waits = [line for line in loop if "DEPBAR" in line]
    assert len(waits) == 2 and all("gsb0, 0x1" in line for line in waits)


def _loop_of_products(lines: list[str], count: int) -> list[str]:
    """Return the shortest loop that has so many integer products."""
    found = []
    for end, line in enumerate(lines):
        target = re.search(r"BRA `\((\.L_x_\d+)\)", line)
        if target and f"{target[1]}:" in lines[:end]:
            loop = lines[lines.index(f"{target[1]}:") : end]
            if sum("IGMMA" in part for part in loop) == count:
                found.append(loop)
    return min(found, key=len)


@pytest.mark.parametrize("groups", [31, pytest.param(111, marks=pytest.mark.seldom)])
def test_codes_times_integer_scales_compile(groups: int) -> None:
    constants = {"G": groups, "OUTLIERS": True, "ALL": 32 if groups == 31 else 128}
    constants |= {"BLOCK_M": 16, "BLOCK_G": 8, "STEPS": 15, "PDL": True, "INTERPRET": False}
    made = compiled(round_kernels.steps_kernel, 90, constants, 8)
    assert "ld.global.v4" in made.ptx and "st.global.v4" in made.ptx


@pytest.mark.parametrize("groups", [1, 7, 31, 111])
def test_every_program_that_shares_tiles_has_a_part_of_them(groups: int) -> None:
    """A program with an empty run between a tile's owners would never arrive: no sums, no y."""
    shared = 0
    for tiles in range(1, 1200):
        programs, whole = atom_hopper._schedule(tiles, groups, True, 132)
        assert 0 < programs <= 132 and (whole == tiles or whole % programs == 0)
        cuts = [i * (tiles - whole) * groups // programs for i in range(programs + 1)]
        assert whole == tiles or all(a < b for a, b in itertools.pairwise(cuts)), tiles
        shared += whole < tiles
    assert shared > 1000


@pytest.mark.parametrize("form", [0, 1])
def test_norm_and_rounding_compile(form: int) -> None:
    constants = {**ROUNDING, "G": 31, "BLOCK_K": 4096, "NORM": 1, "HAS_BIAS": False}
    constants |= {"HAS_INDEX": True, "FORM": form, "PDL": True}
    out = "*i8" if form == 0 else "*bf16"
    for groups, warps in ((4, 4), (32, 8)):
        constants |= {"BLOCK_G": groups, "WHOLE": groups == 32}
        compiled(round_kernels.norm_round_kernel, 90, constants, warps, OUT=out)


@pytest.mark.parametrize("norm", [0, 1, 2])
def test_the_gluon_norm_meets_at_few_barriers(norm: int) -> None:
    constants = {"OUTLIERS": 128, "SIGNED": True, "CLIP": 0.95, "G": 31, "BLOCK": 4096}
    constants |= {"FULL": norm == 1, "NORM": norm, "HAS_BIAS": norm == 2, "HAS_INDEX": True}
    made = compiled(round_norm.norm_codes_kernel, 90, constants | {"PDL": True}, 8)
    barriers = made.ptx.count("bar.sync") + made.ptx.count("barrier.sync")
    assert 1 <= barriers <= 2 + 3 * norm
    assert "cvt.rn.satfinite.e4m3x2.f32" in made.ptx
    # No number waits in memory.
    assert ".local" not in made.ptx


@pytest.mark.parametrize(
    "activation",
    ["silu", "gelu", *(pytest.param(a, marks=pytest.mark.seldom) for a in ("relu", "none"))],
)
def test_the_rotation_runs_on_tensor_cores(activation: str) -> None:
    constants = {"OUTLIERS": 128, "SIGNED": True, "CLIP": 0.95, "G": 111, "STEPS": 4}
    constants |= {"ACT": activation, "ROTATE": activation == "silu", "PDL": True}
    made = compiled(round_activation.act_codes_kernel, 90, constants, 4)
    assert "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16" in made.ptx
    assert "ld.global.v4" in made.ptx and "st.global.v4" in made.ptx


@pytest.mark.parametrize("form", [0, 1])
def test_activation_and_rounding_compile(form: int) -> None:
    constants = {**ROUNDING, "G": 111, "BLOCK_M": 1, "ACT": "silu", "ROTATE": True}
    constants |= {"FORM": form, "PDL": True}
    out = "*i8" if form == 0 else "*bf16"
    made = compiled(round_kernels.act_round_kernel, 90, constants, 1, OUT=out)
    assert form == 0 or made.shared_bytes == 0  # a warp turns its group by shuffles


@pytest.mark.thin
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("columns", [64, 128])
def test_gptqs_loop_compiles(arch: int, columns: int) -> None:
    compiled(gptq_block.block_kernel, arch, {"ROWS": 16, "B": columns}, 4)
