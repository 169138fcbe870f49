"""Every weight kernel compiles to machine code for every listed architecture, without a GPU."""

from dataclasses import replace
from itertools import product

import pytest

from llmpq.kernels.gemm.choice import choose
from llmpq.kernels.gemm.dequantize import fragment_dequantize_kernel, rows_dequantize_kernel
from llmpq.kernels.gemm.gemv import gemv_kernel
from llmpq.kernels.gemm.ranking.config import make_plan
from llmpq.kernels.gemm.ranking.machine import REFERENCE
from llmpq.kernels.gemm.ranking.predict import Product, shared_estimate
from llmpq.kernels.gemm.splitk_gemm import splitk_gemm_kernel
from reference.cubin import (
    ARCHITECTURES,
    CONSUMER_BLACKWELL,
    SHARED_LIMIT,
    compile_kernel,
)
from reference.machine_code import overwritten, product_loops

pytestmark = pytest.mark.compile

# Every bit width, dtype and kind of zero once; each compile takes about half a second.
VARIANTS = [(4, "fp16", True), (3, "bf16", False), (8, "bf16", False)]
SIZES = ("M", "N", "K", "blocks", "groups", "split", "rows")


def _compile(kernel, arch, dtype, constants, **options):
    types = {"P0": "*i32", "P1": "*i32", "S": "*i32", "Z": "*i32", "PARTIAL": "*fp32"}
    types |= {"ARRIVED": "*i32"} | dict.fromkeys(SIZES, "i32")
    types |= dict.fromkeys(("X", "Y", "OUT", "BIAS", "RESIDUAL"), f"*{dtype}")
    if kernel is rows_dequantize_kernel:
        types |= {"P0": "*u8", "P1": "*u8", "S": f"*{dtype}", "Z": f"*{dtype}"}
    arguments = {name: types[name] for name in kernel.arg_names if name in types}
    aligned = [n for n, t in arguments.items() if t.startswith("*")]
    aligned += [n for n in ("N", "K") if n in arguments]
    constants = {name: v for name, v in constants.items() if name in kernel.arg_names}
    made = compile_kernel(
        kernel, arch, arguments, constants, aligned=tuple(aligned), options=options
    )
    assert made.cubin and made.shared_bytes <= SHARED_LIMIT[arch]
    return made


def _constants(bits, symmetric, arch):
    return {
        "BITS": bits,
        "GROUPED": True,
        "SYMMETRIC": symmetric,
        "EVEN_K": True,
        "EVEN_G": True,
        "HAS_BIAS": True,
        "HAS_RESIDUAL": False,
        "SPLIT": True,
        "PDL": arch >= 90,
        "KWIDTH4": arch < 90,
        "FORM": "",
        "ASM": "",
        "INTERPRET": False,
    }


@pytest.mark.thin
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("bits,dtype,symmetric", VARIANTS)
def test_gemv_kernel_compiles(arch, bits, dtype, symmetric):
    constants = _constants(bits, symmetric, arch)
    constants |= {"BH": 1, "WM": 4, "STEPS": 3, "D": 2, "XD": 1}
    made = _compile(gemv_kernel, arch, dtype, constants, num_warps=4, num_stages=1)
    assert "mma.sync" in made.ptx


@pytest.mark.thin
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("bits,dtype,symmetric", VARIANTS)
@pytest.mark.parametrize("stages", [1, 3])
def test_splitk_kernel_compiles(arch, bits, dtype, symmetric, stages):
    constants = _constants(bits, symmetric, arch)
    constants |= {"BH": 1, "WM": 4, "BM": 16, "D": 2 if stages == 1 else 1, "STAGES": stages}
    constants |= {"XS": 3 if stages == 1 else 1}
    # Only tuned for Hopper; Triton 3.6 and 3.9 fail to compile it for sm_100.
    constants |= {"SCALE_W": stages == 1 and arch == 90}
    made = _compile(splitk_gemm_kernel, arch, dtype, constants, num_warps=4, num_stages=stages)
    if arch == 90:
        assert "wgmma" in made.ptx
    elif arch < 90:
        assert "mma.sync" in made.ptx


OTHERS = (80, 89, 100)
"""Beside what has the least memory, Hopper and consumer Blackwell: in `make test-all` only."""


@pytest.mark.everywhere
@pytest.mark.parametrize(
    "arch",
    [
        pytest.param(arch, marks=[pytest.mark.seldom] if arch in OTHERS else [])
        for arch in (*ARCHITECTURES, CONSUMER_BLACKWELL)
    ],
)
def test_every_tile_that_may_be_chosen_compiles_and_fits(arch, share):
    """The forms that the model of the machine chooses for some product of some model."""
    machine = replace(
        REFERENCE,
        capability=divmod(arch, 10),
        shared_block=SHARED_LIMIT[arch],
        shared_all=SHARED_LIMIT[arch] + 1024,
    )
    shapes = [(5760, 2304), (7168, 5120), (5120, 17408), (28672, 4096), (4096, 14336), (1024, 2048)]
    kinds = {}
    for bits, (n, k), rows in product((4, 8), shapes, (1, 4, 16, 32, 48, 64, 96, 128, 200)):
        config = choose(Product(bits, n, k, rows, "bf16 zeros"), machine)
        if config.kernel == "splitk_gemm":
            kinds[bits, replace(config, split=2)] = config
    assert kinds
    every = [*ARCHITECTURES, CONSUMER_BLACKWELL] * 2  # of an architecture's share every second one
    for bits, config in share(sorted(kinds, key=repr), arch, every):
        constants = _constants(bits, False, arch) | {
            "SCALE_W": False,
            "KWIDTH4": make_plan(config, machine.capability).kwidth4,
            "FORM": "",
            "ASM": "",
            "BH": config.blocks,
            "WM": config.warps,
            "BM": config.bm,
            "D": config.depth if config.stages == 1 else 1,
            "STAGES": config.stages,
            "XS": config.x_stages,
        }
        options = {"num_warps": config.warps, "num_stages": config.stages}
        made = _compile(
            splitk_gemm_kernel, arch, "bf16", constants, **options, maxnreg=config.registers
        )
        assert made.shared_bytes <= shared_estimate(config, bits, machine), config


@pytest.mark.thin
@pytest.mark.parametrize(
    "bits,dtype,symmetric",
    [*VARIANTS, pytest.param(4, "bf16", False, marks=pytest.mark.seldom)],
)
@pytest.mark.parametrize("grouped", [True, False], ids=["grouped", "channel"])
@pytest.mark.parametrize(
    "bm,stages", [(16, 4), (128, 3), (32, 1), pytest.param(64, 3, marks=pytest.mark.seldom)]
)
def test_products_in_flight_keep_their_operands(bits, dtype, symmetric, grouped, bm, stages):
    """Sums that wgmma carries from step to step itself are pipelined wrongly (H200: error 23)."""
    constants = _constants(bits, symmetric, 90) | {"GROUPED": grouped, "SCALE_W": False}
    constants |= {"BH": 1, "WM": 8, "BM": bm, "D": 2 if stages == 1 else 1, "STAGES": stages}
    constants |= {"XS": 3 if stages == 1 and grouped else 1}  # as the launch has them
    made = _compile(splitk_gemm_kernel, 90, dtype, constants, num_warps=8, num_stages=stages)
    code = made.machine_code()
    assert product_loops(code) and overwritten(code) == []
    # The same loop, but with a product left in flight at its end.
    assert overwritten(code.replace("gsb0, 0x0", "gsb0, 0x1"))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_dequantise_compiles(arch, share):
    for bits, dtype, symmetric in share(VARIANTS, 1, (0, 1)):
        constants = _constants(bits, symmetric, arch) | {"BH": 1, "WM": 2}
        _compile(fragment_dequantize_kernel, arch, dtype, constants, num_warps=2)
    _compile(rows_dequantize_kernel, arch, "fp16", _constants(3, True, arch))


@pytest.mark.parametrize("bits", [4, pytest.param(8, marks=pytest.mark.seldom)])
def test_weights_reach_the_tensor_core_without_shared_memory(bits):
    """The layout's whole point: gemv_kernel has no shared-memory load before the final sum."""
    constants = _constants(bits, True, 90) | {"BH": 1, "WM": 4, "STEPS": 4, "D": 4, "XD": 2}
    made = _compile(gemv_kernel, 90, "fp16", constants, num_warps=4, num_stages=1)
    before_last_product = made.ptx[: made.ptx.rindex("mma.sync")]
    products = made.ptx.count("mma.sync")
    # The scales of four steps may pass through it, one exchange each; words and x do not.
    assert products == 4 * 8 and before_last_product.count("ld.shared") <= 4
