"""The kernels over a pool of latents compile for every listed architecture; memory fits."""

import pytest
import torch

pytest.importorskip("triton")
from llmpq.kernels.kv.paged import paged_latents  # noqa: E402
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
    **dict.fromkeys(("rows", "table", "num_rows", "columns", "splits"), "i32"),
    **dict.fromkeys(("rows", "table"), "*i32"),
    **dict.fromkeys(("part_ptr", "lse_ptr"), "*fp32"),
    "scale": "fp32",
}
# (query heads, channels, of them values): DeepSeek-V2-Lite, V3
MODELS = [(16, 576, 512), (128, 576, 512)]


def compiled(kernel, arch, constants):
    constants = dict(constants)
    options = {"num_warps": constants.pop("num_warps")}
    given = {n: KINDS.get(n, "*bf16") for n in kernel.arg_names if n not in constants}
    aligned = tuple(name for name, kind in given.items() if kind.startswith("*"))
    made = compile_kernel(kernel, arch, given, constants, aligned=aligned, options=options)
    assert made.cubin and made.shared_bytes <= SHARED_LIMIT[arch]


@pytest.mark.thin
@pytest.mark.parametrize("arch", (*ARCHITECTURES, CONSUMER_BLACKWELL))
@pytest.mark.parametrize("model", MODELS)
def test_kernels_fit(monkeypatch, arch, model):
    LatentPlan.of.__func__.cache_clear()
    monkeypatch.setattr(paged_latents, "shared_memory", lambda _: (SHARED_LIMIT[arch], 0))
    plan = LatentPlan.of(*model, torch.bfloat16, torch.device("cpu"))
    LatentPlan.of.__func__.cache_clear()
    compiled(decode_latents, arch, plan.options())
    compiled(chunk_latents, arch, plan.options() | {"ROWS": 64})
    combine = {"H": plan.heads, "V": plan.value_dim, "PADDED": 512, "X": 4}
    compiled(combine_latents, arch, combine | {"num_warps": 4})
