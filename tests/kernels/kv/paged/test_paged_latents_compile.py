"""The kernels over a pool of latents compile for every listed architecture; memory fits."""

import pytest
import torch

pytest.importorskip("triton")
from llmpq.kernels.kv.paged import paged_latents  # noqa: E402
from llmpq.kernels.kv.paged.chosen_latents import score_keys  # noqa: E402
from llmpq.kernels.kv.paged.paged_latents import (  # noqa: E402
    LatentPlan,
    chunk_latents,
    combine_latents,
    decode_latents,
)
from reference.cubin import (  # noqa: E402
    ARCHITECTURES,
    CONSUMER_BLACKWELL,
    SHARED_LIMIT,
    compile_kernel,
)

pytestmark = pytest.mark.compile
KINDS = {
    **dict.fromkeys(("num_rows", "columns", "splits", "num_chosen", "width"), "i32"),
    **dict.fromkeys(("rows", "table"), "*i32"),
    **dict.fromkeys(("part_ptr", "lse_ptr", "score_ptr"), "*fp32"),
    "choice": "*i64",
    "scale": "fp32",
}
TURING = 75
LIMIT = {**SHARED_LIMIT, TURING: 65536}
# (query heads, channels, of them values): DeepSeek-V2-Lite, V3
MODELS = [pytest.param((16, 576, 512), marks=pytest.mark.seldom), (128, 576, 512)]
# (query heads, heads of an indexer, their channels): DeepSeek-V3.2, GLM-5
SPARSE = [(128, 64, 128), pytest.param(64, 32, 128, marks=pytest.mark.seldom)]


def compiled(kernel, arch, constants):
    constants = dict(constants)
    options = {"num_warps": constants.pop("num_warps")}
    given = {
        n: KINDS.get(n, "*bf16" if arch >= 80 else "*fp16")
        for n in kernel.arg_names
        if n not in constants
    }
    aligned = tuple(name for name, kind in given.items() if kind.startswith("*"))
    made = compile_kernel(kernel, arch, given, constants, aligned=aligned, options=options)
    assert made.cubin and made.shared_bytes <= LIMIT[arch]


def planned(monkeypatch, arch, model, **more):
    LatentPlan.of.__func__.cache_clear()
    monkeypatch.setattr(paged_latents, "shared_memory", lambda _: (LIMIT[arch], 0))
    monkeypatch.setattr(paged_latents, "older_than", lambda *_: arch < 80)
    dtype = torch.bfloat16 if arch >= 80 else torch.float16
    plan = LatentPlan.of(*model, dtype, torch.device("cpu"), **more)
    LatentPlan.of.__func__.cache_clear()
    return plan


@pytest.mark.thin
@pytest.mark.parametrize("arch", (TURING, *ARCHITECTURES, CONSUMER_BLACKWELL))
@pytest.mark.parametrize("model", MODELS)
def test_kernels_fit(monkeypatch, arch, model):
    plan = planned(monkeypatch, arch, model)
    compiled(decode_latents, arch, plan.options() | {"CHOSEN": False})
    compiled(chunk_latents, arch, plan.options() | {"ROWS": 64})
    combine = {"H": plan.heads, "V": plan.value_dim, "PADDED": 512, "X": 4}
    compiled(combine_latents, arch, combine | {"num_warps": 4})


@pytest.mark.thin
@pytest.mark.parametrize("arch", (TURING, *ARCHITECTURES, CONSUMER_BLACKWELL))
@pytest.mark.parametrize(("heads", "index_heads", "channels"), SPARSE)
def test_kernels_of_chosen_keys_fit(monkeypatch, arch, heads, index_heads, channels):
    plan = planned(monkeypatch, arch, (heads, 576, 512), index_dim=channels)
    compiled(decode_latents, arch, plan.options() | {"CHOSEN": True})
    sizes = {"X": index_heads, "C": channels, "HEADS": index_heads, "CHANNELS": channels}
    own = {name: plan.options()[name] for name in ("D", "ENTRY", "PAGE")}
    compiled(score_keys, arch, sizes | own | {"N": plan.tile_keys, "num_warps": 4})
