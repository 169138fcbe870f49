"""W4A4's Hopper kernels, and GPTQ's, compile to machine code without a GPU and do not spill."""

from __future__ import annotations

import re
from typing import Any

import pytest
from triton.experimental.gluon import language as gl

from llmpq.kernels import atom_norm, atom_round, atom_wgmma, gptq_block
from llmpq.kernels.compile import ARCHITECTURES, SHARED_LIMIT, compile_kernel

pytestmark = pytest.mark.compile

ROUNDING = {"OUTLIERS": 128, "BITS": 4, "SIGNED": True, "CLIP": 0.95}
TYPES = {
    **dict.fromkeys(("X", "WEIGHT", "BIAS", "HADAMARD", "S", "RESIDUAL", "Y"), "*bf16"),
    **dict.fromkeys(("OUTLIER", "W", "U", "SCALE", "ZERO", "CODES", "ERRORS"), "*fp32"),
    **dict.fromkeys(("M", "N", "K", "F", "normal", "x_stride", "w_stride", "u_stride"), "i32"),
    **dict.fromkeys(("eps", "low", "high"), "fp32"),
    "MS": "i32",
    "SCALES": "*bf16",
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


@pytest.mark.parametrize("tokens", [64, 128])
def test_the_product_runs_on_fp8_tensor_cores_and_keeps_its_sums_in_registers(tokens: int) -> None:
    constants = {
        "G": 31,
        "SCALES": 34,
        "OUTLIERS": True,
        "HAS_BIAS": False,
        "HAS_RESIDUAL": True,
        "BM": tokens,
        "STAGES": 6,
        "GROUP_M": 8,
    }
    made = compiled(
        atom_wgmma.wgmma_kernel,
        90,
        constants,
        4,
        a_desc=box("fp8e4nv", [tokens, 64], 64),
        o_desc=box("i8", [tokens, 64], 64),
        p_desc=box("u8", [8, 8, 128], 128),
        t_desc=box("bf16", [1, 16, tokens], 128),
    )
    assert re.search(r"wgmma\.mma_async.*e4m3\.e4m3", made.ptx)
    assert re.search(r"wgmma\.mma_async.*s8\.s8", made.ptx)
    assert "vabsdiff4" in made.ptx and "setmaxnreg" in made.ptx


@pytest.mark.parametrize("form", [0, 1])
def test_norm_and_rounding_compile(form: int) -> None:
    constants = {**ROUNDING, "G": 31, "BLOCK_G": 32, "BLOCK_K": 4096, "ROWS": 2, "NORM": 1}
    constants |= {"HAS_BIAS": False, "HAS_INDEX": True, "FORM": form, "PDL": True}
    compiled(atom_round.norm_round_kernel, 90, constants, 8, OUT="*i8" if form == 0 else "*bf16")


def test_the_gluon_norm_meets_at_few_barriers() -> None:
    constants = {**ROUNDING, "G": 31, "BLOCK": 4096, "ROWS": 4, "NORM": 1}
    constants |= {"HAS_BIAS": False, "HAS_INDEX": True}
    made = compiled(atom_norm.norm_codes_kernel, 90, constants, 8)
    assert 1 <= made.ptx.count("bar.sync") + made.ptx.count("barrier.sync") <= 7


@pytest.mark.parametrize("form", [0, 1])
def test_activation_and_rounding_compile(form: int) -> None:
    constants = {**ROUNDING, "G": 111, "BLOCK_M": 16, "STEPS": 1, "ACT": "silu", "ROTATE": True}
    constants |= {"FORM": form, "PDL": True}
    compiled(atom_round.act_round_kernel, 90, constants, 4, OUT="*i8" if form == 0 else "*bf16")


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("columns", [64, 128])
def test_gptqs_loop_compiles(arch: int, columns: int) -> None:
    compiled(gptq_block.block_kernel, arch, {"ROWS": 16, "B": columns}, 4)
