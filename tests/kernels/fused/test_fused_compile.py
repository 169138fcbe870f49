"""The fused kernels and plain attention compile to machine code for every listed architecture."""

import pytest
import torch

from llmpq.kernels.fused.allowed_tokens import BLOCK as ALLOWED_BLOCK
from llmpq.kernels.fused.allowed_tokens import only_allowed_kernel
from llmpq.kernels.fused.argmax import merge_kernel, parts_kernel
from llmpq.kernels.fused.draw_tokens import BLOCK, KEY_BITS, sample_kernel
from llmpq.kernels.fused.gated_mlp import gate_kernel
from llmpq.kernels.fused.head_norm import head_norm_kernel
from llmpq.kernels.fused.layer_norm import layer_norm_kernel
from llmpq.kernels.fused.norm_behind import norm_behind_kernel
from llmpq.kernels.fused.rms_norm import rms_norm_kernel
from llmpq.kernels.fused.rope_append import rope_append_kernel
from llmpq.kernels.fused.round_inputs import round_kernel
from llmpq.kernels.fused.search_grid import search_kernel
from llmpq.kernels.fused.weighted_sum import weighted_sum_kernel
from reference.cubin import ARCHITECTURES, SHARED_LIMIT, compile_kernel

pytestmark = pytest.mark.compile

FLOATS = ("part_ptr", "lse_ptr", "inv_freq", "slopes")
INDICES = ("slots", "places", "starts", "counts")
NUMBERS = ("eps", "next_eps", "score_scale", "factor", "top", "limit", "slope")
ROPE = {"H": 32, "G": 8, "BLOCK": 8, "ROTARY": True}
ROPE |= {"BY_ROW": False}
WHOLE = ROPE | {"D": 128, "HALF": 64, "PADDED": 64, "REST": 0}
KERNELS = {
    "rope": (
        rope_append_kernel,
        # Q stays an argument: one kernel for prompts of every length.
        WHOLE | {"PAGE": 0, "KEEP": False},
        {"num_warps": 2},
    ),
    "rope-by-row": (
        rope_append_kernel,
        WHOLE | {"PAGE": 128, "KEEP": True, "BY_ROW": True},
        {"num_warps": 2},
    ),
    "rope-part": (
        rope_append_kernel,
        ROPE | {"D": 128, "HALF": 24, "PADDED": 32, "REST": 128, "PAGE": 0, "KEEP": False},
        {"num_warps": 2},
    ),
    "rope-keep": (rope_append_kernel, WHOLE | {"PAGE": 128, "KEEP": True}, {"num_warps": 2}),
    "rope-pages": (rope_append_kernel, WHOLE | {"PAGE": 128, "KEEP": False}, {"num_warps": 2}),
    "silu": (gate_kernel, {"BLOCK": 2048, "ACT": "silu"}, {"num_warps": 4}),
    "gelu": (gate_kernel, {"BLOCK": 2048, "ACT": "gelu_tanh"}, {"num_warps": 4}),
    "clamped": (gate_kernel, {"BLOCK": 2048, "ACT": "clamped_silu"}, {"num_warps": 4}),
    "weighted-sum": (
        weighted_sum_kernel,
        {"TOP": 8, "ROWS": 8, "BLOCK": 256, "PADDED": 1, "HAS_X": True}
        | {"SHARED": False, "GATED": False},
        {"num_warps": 1},
    ),
    "weighted-sum-shared": (
        weighted_sum_kernel,
        {"TOP": 8, "ROWS": 9, "BLOCK": 256, "PADDED": 2048, "HAS_X": True}
        | {"SHARED": True, "GATED": True},
        {"num_warps": 4},
    ),
    "head-norm": (
        head_norm_kernel,
        {"H": 32, "G": 4, "D": 128, "PADDED": 128, "HEADS": 4},
        {"num_warps": 1},
    ),
    "norm": (rms_norm_kernel, {"BLOCK": 4096}, {"num_warps": 8}),
    "norm-behind": (norm_behind_kernel, {"BLOCK": 4096, "NEXT": True}, {"num_warps": 8}),
    "layer-norm": (
        layer_norm_kernel,
        {"BLOCK": 8192, "BEFORE": True, "AFTER": True},
        {"num_warps": 16},
    ),
    "argmax-parts": (parts_kernel, {"BLOCK": 4096}, {"num_warps": 4}),
    "round": (round_kernel, {"GROUP": 128, "GROUPS": 8}, {"num_warps": 4}),
    "argmax-merge": (
        merge_kernel,
        {"PARTS": 32, "REMEMBER": True, "NOT_FINITE": -2},
        {"num_warps": 1},
    ),
}


@pytest.mark.thin
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", KERNELS)
def test_compiles_within_shared_memory(name, arch):
    kernel, constants, options = KERNELS[name]
    constants = constants | {"PDL": arch >= 90}
    element = "fp32" if name.endswith("float32") else "bf16"
    arguments = {}
    for argument in kernel.arg_names:
        if argument in constants:
            continue
        if argument in FLOATS:
            arguments[argument] = "*fp32"
        elif argument in ("addresses", "tokens") or (name, argument) == ("look-up", "out"):
            arguments[argument] = "*i64"
        elif name == "catch-up" and argument in (*INDICES, "table"):
            arguments[argument] = "*i32"
        elif argument in INDICES:
            arguments[argument] = "*i64"
        elif argument in NUMBERS:
            arguments[argument] = "fp32"
        elif argument in ("best", "place", "history"):
            arguments[argument] = "*i32"
        elif argument in ("out", "table") and name == "argmax-merge":
            arguments[argument] = "*i64"
        elif argument.endswith(
            ("stride", "splits", "features", "columns", "parts", "Q", "outputs", "width")
        ):
            arguments[argument] = "i32"
        else:
            arguments[argument] = f"*{element}"
    loose = (*NUMBERS, "splits", "outputs", "parts", "Q", "table_width")
    aligned = tuple(n for n in arguments if n not in loose)
    made = compile_kernel(kernel, arch, arguments, constants, aligned=aligned, options=options)
    assert made.cubin and made.shared_bytes <= SHARED_LIMIT[arch]
    assert ("griddepcontrol.wait" in made.ptx) == (arch >= 90)
    if name == "silu":
        assert "ld.global.v4" in made.ptx, "accesses are not 16 bytes wide"


@pytest.mark.thin
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(dtype, marks=[pytest.mark.seldom] * (dtype is torch.float16))
        for dtype in KEY_BITS
    ],
)  # both halves have 16 bits
def test_sampling_compiles(dtype, arch):
    name = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]
    arguments = {"x": f"*{name}", "how": "*fp64", "out": "*i64"}
    arguments |= dict.fromkeys(("rows", "columns", "row_stride"), "i32")
    constants = {"BITS": KEY_BITS[dtype], "BLOCK": BLOCK}
    options = {"num_warps": 16}
    made = compile_kernel(
        sample_kernel, arch, arguments, constants, aligned=("x", "columns"), options=options
    )
    assert made.cubin and made.shared_bytes <= SHARED_LIMIT[arch]


@pytest.mark.thin
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("element", ["bf16", "fp32"])
def test_forbidding_tokens_compiles(element, arch):
    arguments = {"x": f"*{element}", "bits": "*u8", "out": f"*{element}"}
    arguments |= dict.fromkeys(("columns", "row_stride", "bit_stride"), "i32")
    made = compile_kernel(
        only_allowed_kernel, arch, arguments, {"BLOCK": ALLOWED_BLOCK}, aligned=("x", "columns"),
        options={"num_warps": 8},
    )  # fmt: skip
    assert made.cubin and made.shared_bytes <= SHARED_LIMIT[arch]


@pytest.mark.thin
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("symmetric", [True, False])
def test_the_clip_search_compiles(symmetric, arch):
    arguments = {"W": "*bf16", "CLIPS": "*fp32", "CODES": "*u8", "SCALE": "*bf16", "ZERO": "*bf16"}
    arguments |= dict.fromkeys(("num_groups", "groups", "K", "w_stride", "clips"), "i32")
    arguments |= dict.fromkeys(("least", "levels", "half"), "fp32")
    constants = {"GROUP": 128, "ROWS": 32, "SYMMETRIC": symmetric}
    aligned = ("W", "CODES", "SCALE", "ZERO", "num_groups", "groups", "K", "w_stride")
    made = compile_kernel(
        search_kernel, arch, arguments, constants, aligned=aligned,
        options={"num_warps": 4, "enable_fp_fusion": False},
    )  # fmt: skip
    assert made.cubin and made.shared_bytes <= SHARED_LIMIT[arch]
    assert "ld.global.v4" in made.ptx, "accesses are not 16 bytes wide"
