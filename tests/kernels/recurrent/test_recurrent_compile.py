"""The kernels of recurrent layers compile to machine code for every listed architecture."""

import pytest

from llmpq.kernels.recurrent.convolve import convolve_kernel, tail_kernel
from llmpq.kernels.recurrent.delta_step import NUM_WARPS, delta_step_kernel
from llmpq.kernels.recurrent.gated_norm import gated_norm_kernel
from llmpq.kernels.recurrent.notes import note_kernel
from llmpq.kernels.recurrent.state_scan import pairs_kernel, scan_kernel
from llmpq.kernels.recurrent.state_walk import walk_kernel
from reference.cubin import ARCHITECTURES, SHARED_LIMIT, compile_kernel

pytestmark = pytest.mark.compile

CONVOLVE = {"TAPS": 4, "BIAS": True, "GATED": False, "BLOCK": 128, "STEP": 16, "PARTS": 1}
SINGLE = {"STEP": 1, "BLOCK": 256, "weight_stride": 1}
WALK = {"HEADS": 32, "SHARED": 2, "N": 128, "P": 128, "PADDED_N": 128, "BLOCK_P": 64, "ZEROS": 32}
WALK |= {"BY_CHANNEL": False, "FIXED": False}
NORM = {"WIDTH": 128, "PADDED": 128, "GROUPS": 8, "NORM": True, "NORM_FIRST": True, "SHARED": True}
NORM |= {"SIGMOID": False}
FIXED = {"DELTA": False, "FIXED": True, "SHARED": 1}
MAMBA = {"HEADS": 128, "SHARED": 16, "P": 64, "DELTA": False}
SCAN = {"HEADS": 32, "SHARED": 2, "N": 128, "P": 128, "PADDED_N": 128, "BLOCK_T": 64}
SCAN |= {"PRECISION": "tf32", "FIXED": False}
FLOAT32 = {"DELTA": True, "BLOCK_P": 32, "PRECISION": "ieee", "N": 32, "PADDED_N": 32}
"""Smaller keys: products without tensor cores are long code."""
NOTED = {"NOTES": 7}
STEP = {"HEADS": 32, "SHARED": 2, "N": 128, "P": 128, "PADDED_N": 128, "PADDED_P": 128, "TAPS": 4}
STEP |= {
    "PADDED": 4,
    "BIAS": False,
    "GIVEN": 2048,
    "BG": 2048,
    "BY_CHANNEL": False,
    "SIGMOID": False,
    "weight_stride": 1,
}
KDA = {"SHARED": 1, "GIVEN": 0, "BG": 1, "BY_CHANNEL": True, "SIGMOID": True}
KERNELS = {
    "convolve": (convolve_kernel, CONVOLVE, 4),
    "convolve-single": (convolve_kernel, CONVOLVE | SINGLE, 1),
    "convolve-gated": (convolve_kernel, CONVOLVE | {"TAPS": 3, "GATED": True, "PARTS": 4}, 4),
    "tail": (tail_kernel, {"TAPS": 4, "GATED": False, "BLOCK": 128}, 1),
    "convolve-noted": (convolve_kernel, CONVOLVE | NOTED, 4),
    "tail-noted": (tail_kernel, {"TAPS": 3, "GATED": True, "BLOCK": 128} | NOTED, 1),
    "note": (note_kernel, {"GATED": False, "BLOCK": 512} | NOTED, 4),
    "delta-noted": (walk_kernel, WALK | {"DELTA": True, "BLOCK_P": 32} | NOTED, 1),
    "mamba2-noted": (walk_kernel, WALK | MAMBA | NOTED, 2),
    "delta": (walk_kernel, WALK | {"DELTA": True}, 2),
    "delta-few": (walk_kernel, WALK | {"DELTA": True, "BLOCK_P": 32}, 1),
    "delta-kda": (walk_kernel, WALK | {"DELTA": True, "BY_CHANNEL": True, "SHARED": 1}, 2),
    "delta-step": (delta_step_kernel, STEP, NUM_WARPS),
    "delta-step-wide": (delta_step_kernel, STEP | {"GIVEN": 5120}, NUM_WARPS),
    "delta-step-kda": (delta_step_kernel, STEP | KDA, NUM_WARPS),
    "mamba2": (walk_kernel, WALK | MAMBA, 2),
    "lightning": (walk_kernel, WALK | FIXED, 2),
    "pairs-lightning": (pairs_kernel, SCAN | FIXED | {"SOLVED": 16, "MERGED": "tf32x3"}, 4),
    "scan-lightning": (scan_kernel, SCAN | FIXED | {"BLOCK_P": 32}, 4),
    "pairs": (pairs_kernel, SCAN | {"DELTA": True, "SOLVED": 16, "MERGED": "tf32x3"}, 4),
    "pairs-short": (
        pairs_kernel,
        SCAN | {"DELTA": True, "SOLVED": 16, "MERGED": "tf32x3", "BLOCK_T": 32},
        4,
    ),
    "scan": (scan_kernel, SCAN | {"DELTA": True, "BLOCK_P": 32}, 4),
    "scan-mamba2": (scan_kernel, SCAN | MAMBA | {"BLOCK_P": 32}, 4),
    "scan-float32": (scan_kernel, SCAN | FLOAT32, 4),
    "gated-norm": (gated_norm_kernel, NORM, 4),
    "gated-norm-sigmoid": (gated_norm_kernel, NORM | {"SIGMOID": True}, 4),
    "gate-first": (
        gated_norm_kernel,
        NORM | {"WIDTH": 1280, "PADDED": 2048, "GROUPS": 1, "NORM_FIRST": False, "SHARED": False},
        8,
    ),
}
LIKE = ("pairs", "scan-float32", "scan-lightning", "delta-few", "mamba2-noted", "delta-step-wide")
"""In `make test-all` only: in `make test` are smaller ones of the same branches."""
INTEGERS = ("inputs", "num_rows", "longest", "shortest", "places", "channels", "groups")
FLOATS = ("scale", "eps", "beta_factor")


@pytest.mark.thin
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.seldom] if name in LIKE else []) for name in KERNELS],
)
def test_compiles_within_shared_memory(name, arch):
    kernel, constants, warps = KERNELS[name]
    constants = constants | {"PDL": arch >= 90}
    if "NOTES" in kernel.arg_names:
        constants = {"NOTES": 0} | constants
    arguments = {}
    for argument in kernel.arg_names:
        if argument in constants:
            continue
        if argument in ("rows", "moves", "noted_rows", "arrived"):
            arguments[argument] = "*i32"
        elif argument == "slots":
            arguments[argument] = "*i64"
        elif argument in ("states", "sums") or (argument == "decay" and "lightning" in name):
            arguments[argument] = "*fp32"
        elif argument in FLOATS:
            arguments[argument] = "fp32"
        elif argument in INTEGERS or argument.endswith("stride"):
            arguments[argument] = "i32"
        else:
            arguments[argument] = "*fp32" if name.endswith("float32") else "*bf16"
    loose = (*FLOATS, "num_rows", "longest", "shortest", "places", "groups")
    aligned = tuple(argument for argument in arguments if argument not in loose)
    options = {"num_warps": warps, "num_stages": 1}
    made = compile_kernel(kernel, arch, arguments, constants, aligned=aligned, options=options)
    assert made.cubin and made.shared_bytes <= SHARED_LIMIT[arch]
    assert ("griddepcontrol.wait" in made.ptx) == (arch >= 90)
    if name == "convolve-single":
        assert "ld.global.v4" in made.ptx, "weights of a tap are not read 16 bytes at a time"
    if name.startswith(("delta", "mamba2")):
        assert "ld.global.v4" in made.ptx, "a state is not read 16 bytes at a time"
