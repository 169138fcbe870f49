"""The KV kernels compile for every listed architecture, words go straight to operands."""

import re

import pytest

from llmpq.kernels.kv.launch_plan import LOOP_SHAPE
from llmpq.kernels.kv.low_bit import append as kv_append
from llmpq.kernels.kv.low_bit import attend as kv_attend
from llmpq.kernels.kv.low_bit import combine as kv_combine
from llmpq.kernels.kv.ops import WORD_K_WIDTH

pytest.importorskip("triton")
from reference.cubin import ARCHITECTURES, SHARED_LIMIT, compile_kernel  # noqa: E402

pytestmark = pytest.mark.compile
POINTERS = {
    "k_words": "*i32", "k_params": "*fp16", "v_words": "*i32", "v_params": "*fp16", "table": "*i32",
    "slots": "*i32", "starts": "*i32", "counts": "*i32", "slopes": "*fp32", "part_out": "*fp32",
    "part_lse": "*fp32", "inv_freq": "*fp32", "tickets": "*i32", "sinks": "*fp32",
}  # fmt: skip
SCALARS = {
    "score_scale": "fp32",
    "chunk": "i32",
    "first": "i32",
    "table_width": "i32",
    "num_parts": "i32",
    "ahead": "i32",
    "cap": "fp32",
    "window": "i32",
}
STRIDES = dict.fromkeys(("stride_b", "stride_t", "stride_g", "q_stride_b", "q_stride_t"), "i32")


def seldom(*case):
    """In `make test-all` only: its like is in `make test`."""
    return pytest.param(*case, marks=pytest.mark.seldom)


def build(kernel, arch, constants, dtype="fp16", **options):
    typed = dict.fromkeys(
        ("q_ptr", "out_ptr", "k_ring", "v_ring", "k_new", "v_new", "q_new", "q_out"), f"*{dtype}"
    )
    arguments = {**typed, **POINTERS, **SCALARS, **STRIDES}
    arguments = {n: t for n, t in arguments.items() if n in kernel.arg_names}
    constants = {n: v for n, v in constants.items() if n in kernel.arg_names}
    aligned = tuple(n for n, t in arguments.items() if t.startswith("*") or n in STRIDES)
    made = compile_kernel(kernel, arch, arguments, constants, aligned=aligned, options=options)
    assert made.shared_bytes <= SHARED_LIMIT[arch]
    return made


def attend(arch, bits=4, dtype="fp16", **changes):
    tiles, stages = LOOP_SHAPE[bits]
    constants = {
        "H": 32, "G": 8, "Q": 1, "D": 128, "BITS": bits, "KEY_GROUP": 128, "R": 8, "PAGED": False,
        "ALIBI": False, "RING_PARTS": 1, "TILES": tiles, "STAGES": stages, "KW": WORD_K_WIDTH,
        "KW0": 2, "DYNAMIC": False, "PDL": arch >= 90, "EMULATE": False, "CAPPED": False,
        "WINDOWED": False,
    }  # fmt: skip
    return build(kv_attend.attend_split, arch, {**constants, **changes}, dtype, num_warps=1)


@pytest.mark.thin
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(
    "bits,changes", [(4, {}), (8, {"D": 256, "CAPPED": True, "WINDOWED": True})]
)
def test_attention_compiles_everywhere(arch, bits, changes):
    assert attend(arch, bits, **changes).cubin


@pytest.mark.thin
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("ruled", [False, True])
def test_sums_of_parts_compile_everywhere(arch, ruled):
    constants = {
        "H": 32,
        "G": 8,
        "Q": 1,
        "D": 128,
        "R": 8,
        "RING_PARTS": 1,
        "N_STEP": 2,
        "D_STEP": 32,
        "X_STEP": 64,
        "TILES": 1,
        "EARLY": True,
        "PDL": arch >= 90,
        "WINDOWED": ruled,
        "SINKS": ruled,
    }
    assert build(kv_combine.combine_parts, arch, constants, num_warps=4).cubin


@pytest.mark.parametrize(
    ("bits", "changes"),
    [
        (4, {"KEY_GROUP": 0, "PAGED": True, "dtype": "bf16", "ALIBI": True}),
        (2, {"DYNAMIC": True, "Q": 2, "KEY_GROUP": 64}),
        seldom(2, {}),
        seldom(8, {}),
        seldom(4, {"KEY_GROUP": 32, "D": 64, "ALIBI": True}),
        seldom(4, {"KEY_GROUP": 0, "PAGED": True, "dtype": "bf16"}),
        seldom(2, {"DYNAMIC": True, "Q": 4, "R": 16, "KEY_GROUP": 64}),
        seldom(4, {"Q": 4, "R": 16, "ALIBI": True}),
        seldom(4, {"KEY_GROUP": 32, "D": 64}),
        seldom(4, {"DYNAMIC": True}),
        seldom(2, {"D": 256, "CAPPED": True, "WINDOWED": True, "DYNAMIC": True}),
        seldom(4, {"D": 64, "WINDOWED": True}),
        seldom(8, {"KEY_GROUP": 32, "CAPPED": True}),
    ],
)
def test_variants_compile(bits, changes):
    assert attend(90, bits, **changes).cubin


@pytest.mark.thin
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(
    "kernel", [kv_append.append_step, kv_append.pack_blocks, kv_append.write_ring]
)
def test_packing_compiles_everywhere(arch, kernel):
    shape = {"G": 8, "D": 128, "BITS": 4, "KEY_GROUP": 128, "PAGED": False, "S": 1, "TOKENS": 32}
    shape |= {"H": 32, "ROTARY": True, "PDL": arch >= 90}
    assert build(kernel, arch, shape, num_warps=4).cubin


@pytest.mark.parametrize("bits", [4, seldom(8), seldom(2)])
def test_words_reach_the_operands_without_a_shuffle(bits):
    """A wrong WORD_K_WIDTH or load shape would send every word through shuffles (planted below)."""

    def shuffles(made):
        return len(re.findall(r"shfl\.sync\.(idx|bfly)", made.ptx))

    good = attend(90, bits)
    assert "movmatrix" in good.ptx
    assert shuffles(good) <= 100
    bad = attend(90, bits, KW=6 - WORD_K_WIDTH)
    assert shuffles(bad) > shuffles(good) + 10 or bad.shared_bytes > good.shared_bytes
