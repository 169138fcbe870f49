"""The kernels over a pool of blocks compile for every listed architecture, their memory fits."""

import pytest
import torch

from llmpq.kernels.kv.paged import paged_plan
from llmpq.kernels.kv.paged.paged_attend import chunk_kernel, combine_kernel, decode_kernel
from llmpq.kernels.kv.paged.paged_plan import PagedPlan, Scores
from llmpq.kernels.kv.paged.paged_rows import SPREAD_TOKENS, spread_kernel
from llmpq.sizes.kv_format import BLOCK_TOKENS
from reference.cubin import (
    ARCHITECTURES,
    CONSUMER_BLACKWELL,
    SHARED_LIMIT,
    compile_kernel,
)

pytestmark = pytest.mark.compile

NUMBERS = ("num_rows", "columns", "block_stride", "padding_slot", "window", "widest", "num_places")
LONGS = ("positions", "slots", "places", "row_slots", "lasts")
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
# (query heads, key/value heads, head_dim, dtype): Llama, Qwen2, Phi, OPT, BLOOM and wider,
# Gemma 4's layers that see all tokens.
MODELS = [
    (32, 8, 128, torch.bfloat16),
    (28, 4, 128, torch.float16),
    (32, 32, 96, torch.float16),
    (32, 32, 80, torch.bfloat16),
    (12, 12, 64, torch.float32),
    (16, 2, 192, torch.bfloat16),
    (16, 8, 256, torch.bfloat16),
    (8, 4, 256, torch.float32),
    (32, 4, 512, torch.bfloat16),
    (16, 1, 512, torch.bfloat16),
]


def compiled(kernel, arch, constants, element):
    constants = dict(constants)
    options = {"num_warps": constants.pop("num_warps", 4)}
    arguments = {}
    for name in kernel.arg_names:
        if name in constants:
            continue
        if name in NUMBERS:
            arguments[name] = "i32"
        elif name in ("score_scale", "cap"):
            arguments[name] = "fp32"
        elif name in ("rows", "work_split", "table", "arrived"):
            arguments[name] = "*i32"
        elif name in ("part_ptr", "lse_ptr", "slopes", "sinks"):
            arguments[name] = "*fp32"
        else:
            arguments[name] = "*i64" if name in LONGS else f"*{element}"
    loose = (
        "num_rows",
        "columns",
        "padding_slot",
        "window",
        "widest",
        "num_places",
        "score_scale",
        "cap",
    )
    aligned = tuple(name for name in arguments if name not in loose)
    return compile_kernel(kernel, arch, arguments, constants, aligned=aligned, options=options)


def plan_for(arch, model, monkeypatch):
    """Return the plan that a card of an architecture would get."""
    limit = SHARED_LIMIT[arch]
    monkeypatch.setattr(paged_plan, "shared_memory", lambda device: (limit, limit + 1024))
    return PagedPlan.of.__func__.__wrapped__(PagedPlan, *model, torch.device("cpu"))


ALL = (*ARCHITECTURES, CONSUMER_BLACKWELL)
PLAIN, RULED = Scores(), Scores(capped=True, windowed=True, chunked=True, sinks=True)


def case(model, arch, scores=None):
    return model, arch, scores or Scores(alibi=model[1] == model[0])


def seldom(model, arch, scores=None):
    """In `make test-all` only: its like is in `make test`."""
    return pytest.param(*case(model, arch, scores), marks=pytest.mark.seldom)


# The widest where memory is least; `make test-all`: each there, the most common everywhere.
HERE = [(0, 100), (1, 120), (7, 86), (8, 86)]
CASES = [case(MODELS[i], arch) for i, arch in HERE]
CASES += [seldom(model, 86) for i, model in enumerate(MODELS) if (i, 86) not in HERE]
CASES += [seldom(MODELS[0], arch) for arch in (80, 89, 90, CONSUMER_BLACKWELL)]
CASES += [seldom(model, 90) for model in MODELS[1:]]
# gpt-oss and Gemma 2.
CASES += [
    case((64, 8, 64, torch.bfloat16), 90, RULED),
]
CASES += [seldom((64, 8, 64, torch.bfloat16), 86, RULED)]
CASES += [seldom((16, 8, 256, torch.bfloat16), arch, RULED) for arch in (86, 90)]


@pytest.mark.everywhere
@pytest.mark.parametrize(
    "model,arch,scores", CASES, ids=lambda value: str(value).replace("torch.", "")
)
def test_attention_fits(model, arch, scores, monkeypatch, seeds):
    plan, element, pdl = plan_for(arch, model, monkeypatch), NAMES[model[3]], arch >= 90
    few, many = (plan.decode_options(rows, scores, pdl=pdl) for rows in (1, 33))
    kernels = [(decode_kernel, few), (decode_kernel, many)]
    kernels += [(chunk_kernel, plan.chunk_options(33, scores, pdl=pdl))]
    # Few rows differ in how parts are summed. In `make test` a model has one of the three, what
    # needs most memory a chunk.
    first = 2 if plan.head_dim > 128 or arch == CONSUMER_BLACKWELL else arch % 2
    for kernel, constants in seeds(kernels[first:] + kernels[:first]):
        made = compiled(kernel, arch, constants, element)
        assert made.cubin and made.shared_bytes <= SHARED_LIMIT[arch]
        assert ("griddepcontrol.wait" in made.ptx) == pdl
        if element != "fp32":
            assert "cp.async" in made.ptx, "tiles are not fetched ahead"
            assert "mma" in made.ptx, "no tensor core multiplies"
            tile = 2 * constants["N"] * constants["PADDED"] * model[3].itemsize
            assert made.shared_bytes >= (constants["STAGES"] - 1) * tile, (
                "tiles wait for their block"
            )


@pytest.mark.parametrize("arch", ALL)
def test_the_rest_compiles(arch, monkeypatch):
    plan = plan_for(arch, MODELS[0], monkeypatch)
    constants = plan.combine_options(1, PLAIN, pdl=arch >= 90)
    assert compiled(combine_kernel, arch, constants, "bf16").cubin
    constants = {"PAGE": BLOCK_TOKENS, "STEP": SPREAD_TOKENS, "PDL": arch >= 90}
    assert compiled(spread_kernel, arch, constants, "bf16").cubin
