"""The kernels over a pool of packed blocks compile for every listed architecture; memory fits."""

import pytest
import torch

from llmpq.kernels.formats.kv_block import pool_format
from llmpq.kernels.kv.paged.packed_pages_append import append_packed, write_rings
from llmpq.kernels.kv.paged.packed_pages_chunk import chunk_packed
from llmpq.kernels.kv.paged.packed_pages_decode import combine_packed, decode_packed
from llmpq.kernels.kv.paged.packed_pages_plan import PackedPlan
from llmpq.kernels.kv.paged.paged_plan import Scores
from llmpq.precision import KVPrecision
from reference.cubin import (
    ARCHITECTURES,
    CONSUMER_BLACKWELL,
    SHARED_LIMIT,
    compile_kernel,
    lanes_apart,
)

pytestmark = pytest.mark.compile

NUMBERS = ("num_rows", "columns", "window", "q_stride", "kv_stride")
KINDS = {
    "k_words": "*i32", "v_words": "*i32", "k_params": "*fp16", "v_params": "*fp16",
    "rows": "*i32", "work_split": "*i32", "table": "*i32", "slopes": "*fp32", "inv_freq": "*fp32",
    "part_ptr": "*fp32", "lse_ptr": "*fp32", "score_scale": "fp32", "factor": "fp32",
    "cap": "fp32", "sinks": "*fp32",
} | dict.fromkeys(NUMBERS, "i32")  # fmt: skip
LOOSE = ("num_rows", "columns", "score_scale", "factor", "cap", "window")
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
P = KVPrecision
# (precision, query heads, key/value heads, head_dim, dtype): Llama, Qwen2, OPT, Falcon, Gemma,
# Pythia, Phi-3.
MODELS = [
    (P.KV4, 32, 8, 128, torch.bfloat16),
    (P.KV8, 32, 8, 128, torch.float16),
    (P.KV2, 28, 4, 128, torch.bfloat16),
    (P.KV4, 12, 12, 64, torch.float32),
    (P.KV8, 71, 1, 64, torch.bfloat16),
    (P.KV8, 16, 8, 256, torch.bfloat16),
    (P.KV2, 8, 4, 256, torch.float32),
    (P.KV4, 32, 32, 80, torch.float16),
    (P.KV8, 32, 32, 96, torch.bfloat16),
    (P.KV2, 8, 2, 192, torch.float32),
    (P.KV8V4, 32, 8, 128, torch.bfloat16),
    (P.KV4V2, 32, 32, 80, torch.float16),
    (P.KV16V4, 32, 8, 128, torch.bfloat16),
    (P.KV16V8, 8, 4, 256, torch.float32),
]
UNEVEN = [(P.KV16V8, 32, 32, 80, torch.float16), (P.KV16V4, 8, 2, 160, torch.bfloat16)]
"""Whose values begin at multiples of 4 channels only, and whose keys do not choose the layout."""
RULED_MODELS = [(P.KV4, 64, 8, 64, torch.bfloat16), (P.KV8, 16, 8, 256, torch.bfloat16)]
APPENDED = [MODELS[0], UNEVEN[0]]
APPENDED += [
    pytest.param(model, marks=pytest.mark.seldom) for model in (MODELS[10], MODELS[12], UNEVEN[1])
]
RULED = Scores(capped=True, windowed=True, chunked=True, sinks=True)
ALL = (*ARCHITECTURES, CONSUMER_BLACKWELL)


def seldom(*case):
    """In `make test-all` only: its like is in `make test`."""
    return pytest.param(*case, marks=pytest.mark.seldom)


DECODE, CHUNK = "decode", "chunk"
CASES = [
    (MODELS[0], 89, DECODE), (MODELS[1], 120, CHUNK), (MODELS[6], 86, CHUNK),
    (MODELS[12], 90, DECODE),
]  # fmt: skip
"""In `make test` each precision and type once, where memory is least what needs most of it."""
PLACES = [(model, 86) for model in MODELS]
PLACES += [(MODELS[0], arch) for arch in (80, 89, 90, 100, CONSUMER_BLACKWELL)]
PLACES += [(MODELS[1], CONSUMER_BLACKWELL), (MODELS[2], 100), (MODELS[4], CONSUMER_BLACKWELL)]
PLACES += [(model, arch) for model in MODELS[10:] for arch in (80, 89, 100, CONSUMER_BLACKWELL)]
PLACES += [(model, 90) for model in MODELS[1:]]
MORE = [(*place, kernel) for place in PLACES for kernel in (DECODE, CHUNK)]
CASES += [seldom(*case) for case in MORE if case not in CASES]
"""Then where it is most, the most common everywhere."""
RULED_CASES = [(RULED_MODELS[0], 86, DECODE)]
RULED_CASES += [
    seldom(model, arch, kernel)
    for model in RULED_MODELS
    for arch in (*ARCHITECTURES, CONSUMER_BLACKWELL)
    for kernel in (DECODE, CHUNK)
    if (model, arch, kernel) not in RULED_CASES
]


def compiled(kernel, arch, constants, element, **options):
    constants = dict(constants)
    options["num_warps"] = constants.pop("num_warps")
    kinds = KINDS | ({"k_words": f"*{element}"} if constants.get("KEY_BITS") == 16 else {})
    arguments = {
        name: kinds.get(name, f"*{element}") for name in kernel.arg_names if name not in constants
    }
    aligned = tuple(name for name in arguments if name not in LOOSE)
    made = compile_kernel(kernel, arch, arguments, constants, aligned=aligned, options=options)
    assert made.cubin and made.shared_bytes <= SHARED_LIMIT[arch]
    return made


def plan_of(kv, heads, groups, dim, dtype):
    fmt = pool_format(kv, dim)
    return PackedPlan.of(fmt, heads, groups, dtype, torch.device("cpu"))


@pytest.mark.parametrize(
    "model,arch,kernel", CASES, ids=lambda value: str(value).replace("torch.", "")
)
def test_attention_fits(model, arch, kernel):
    plan, element = plan_of(*model), NAMES[model[-1]]
    how, pdl = Scores(alibi=model[1] == model[2]), arch >= 90
    if kernel == DECODE:
        decode = {**plan.decode_options(how, pdl=pdl), "EMULATE": False}
        cap = {"maxnreg": plan.max_registers} if plan.max_registers else {}
        made = compiled(decode_packed, arch, decode, element, **cap)
        assert "mma.sync" in made.ptx and "cp.async" in made.ptx
        assert ("griddepcontrol.wait" in made.ptx) == (arch >= 90)
    else:
        chunk = {**plan.chunk_options(33, how, pdl=pdl), "EMULATE": False}
        made = compiled(chunk_packed, arch, chunk, element)
        assert "mma" in made.ptx, "no tensor core multiplies"


@pytest.mark.parametrize(
    "model,arch,kernel", RULED_CASES, ids=lambda value: str(value).replace("torch.", "")
)
def test_attention_with_rules_fits(model, arch, kernel):
    plan, pdl = plan_of(*model), arch >= 90
    if kernel == DECODE:
        decode = {**plan.decode_options(RULED, pdl=pdl), "EMULATE": False}
        cap = {"maxnreg": plan.max_registers} if plan.max_registers else {}
        assert compiled(decode_packed, arch, decode, "bf16", **cap)
    else:
        chunk = {**plan.chunk_options(33, RULED, pdl=pdl), "EMULATE": False}
        assert "mma" in compiled(chunk_packed, arch, chunk, "bf16").ptx


@pytest.mark.thin
@pytest.mark.parametrize("arch", ALL)
@pytest.mark.parametrize("chunks", [False, True])
@pytest.mark.parametrize("model", APPENDED, ids=lambda m: f"{m[0].value}-{m[3]}")
def test_appending_compiles(arch, chunks, model):
    plan, pdl = plan_of(*model), arch >= 90
    options = plan.append_options(33, rotary=not chunks, chunks=chunks, behind=True, pdl=pdl)
    assert compiled(append_packed, arch, {**options, "HALF": model[3] // 2}, NAMES[model[-1]])


def test_reductions_over_lanes_apart_are_seen():
    """A token's channels in lanes 0, 3 and 4 of five, which Triton 3.6 takes for 0, 1 and 2."""
    text = """#linear = #ttg.linear<{register = [[0, 1]], lane = [[0, 4], [4, 0], [8, 0], [0, 16], \
[0, 32]], warp = [[0, 64]], block = []}>
    %low = "tt.reduce"(%x) <{axis = 1 : i32}> ({
    ^bb0(%a: f32, %b: f32):
    }) : (tensor<16x128xf32, #linear>) -> tensor<16xf32, #ttg.slice<{dim = 1, parent = #linear}>>
"""
    assert lanes_apart(text) == ["16x128xf32, #linear"]
    assert not lanes_apart(text.replace("axis = 1", "axis = 0")), "lanes 1 and 2 are neighbours"
    inner = text.replace(
        "(tensor<16x128xf32, #linear>",
        "(tensor<16x128xf32, #ttg.slice<{dim = 0, \
parent = #linear2}>>",
    ).replace("#linear =", "#linear2 =")
    for old, new in (("[0, 4]", "[1, 0, 4]"), ("[4, 0]", "[0, 4, 0]"), ("[8, 0]", "[0, 8, 0]")):
        inner = inner.replace(old, new)
    inner = inner.replace("[0, 16]", "[0, 0, 16]").replace("[0, 32]", "[0, 0, 32]")
    assert len(lanes_apart(inner)) == 1, "a slice's axis is its parent's"


@pytest.mark.thin
@pytest.mark.parametrize("arch", ALL)
@pytest.mark.parametrize("scores", [Scores(), RULED], ids=["plain", "ruled"])
def test_the_rest_compiles(arch, scores):
    plan, pdl = plan_of(*MODELS[0]), arch >= 90
    assert compiled(combine_packed, arch, plan.combine_options(33, scores, pdl=pdl), "bf16")
    if scores == RULED:
        assert compiled(write_rings, arch, plan.ring_options(pdl=pdl), "bf16")
