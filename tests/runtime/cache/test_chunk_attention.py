"""A chunk of a prompt over its context in pieces: equal to all at once, and no larger for it."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from llmpq.kernels.kv.reference import ScoreRule, Scoring
from llmpq.models.model_spec import ModelSpec
from llmpq.precision import KVPrecision
from llmpq.runtime.cache import cpu_paged_kv
from llmpq.runtime.cache.attention import alibi_slopes
from llmpq.runtime.cache.kv_cache import AttentionInputs
from llmpq.runtime.cache.paged_by_precision import make_paged_kv
from llmpq.runtime.requests.request import PagedRow
from llmpq.runtime.steps.step import RaggedStep
from llmpq.sizes.pool_size import wanted_pool
from llmpq.workload import Workload

pytestmark = pytest.mark.cpu
RULES = {
    "plain": {},
    "window": {"window": 50},
    "wide window": {"window": 300},
    "cap": {"cap": 3.0},
    "sinks": {"sinks_H": torch.linspace(-1, 2, 8)},
    "gpt-oss": {"sinks_H": torch.linspace(-1, 2, 8), "window": 50},
    "gemma 2": {"cap": 3.0, "window": 50},
    "alibi": None,
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("start", [0, 1, 129, 500])
def test_pieces_are_the_whole(name: str, start: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(start)
    heads, groups, queries, dim = 8, 2, 64, 32
    rule = ScoreRule(**(RULES[name] or {}))  # type: ignore[arg-type]
    slopes = alibi_slopes(heads) if RULES[name] is None else None
    q = torch.randn(queries, heads, dim)
    k, v = torch.randn(2, start + queries, groups, dim)
    first = max(0, start - rule.window + 1) // 128 * 128 if rule.window else 0

    def past(most: int) -> Any:
        for at in range(first, start, most):
            yield at, k[at : min(at + most, start)], v[at : min(at + most, start)]

    scores = torch.einsum("qhd,nhd->hqn", q, k.repeat_interleave(4, 1)).double() * 0.3
    if rule.cap:
        scores = rule.cap * torch.tanh(scores / rule.cap)
    at, keys = torch.arange(start, start + queries)[:, None], torch.arange(start + queries)
    if slopes is not None:
        scores += slopes.double()[:, None, None] * (keys - at)
    unseen = (keys > at) | ((keys <= at - rule.window) if rule.window else False)
    scores = scores.masked_fill(unseen, -torch.inf)
    if rule.sinks_H is not None:
        sinks = rule.sinks_H.double()[:, None, None].expand(-1, queries, 1)
        scores = torch.cat((scores, sinks), -1)
    share = scores.softmax(-1)[..., : start + queries]
    want = torch.einsum("hqn,nhd->qhd", share, v.repeat_interleave(4, 1).double())
    for elements, least in ((1 << 20, 128), (1 << 11, 16)):  # one piece, and many
        monkeypatch.setattr(cpu_paged_kv, "CHUNK_ELEMENTS", elements)
        monkeypatch.setattr(cpu_paged_kv, "LEAST_KEYS", least)
        with torch.inference_mode():
            scoring = Scoring(0.3, slopes, rule)
            got = cpu_paged_kv.attend_chunk(q, k[start:], v[start:], past, start, scoring)
        assert torch.allclose(got.double(), want, atol=1e-5)


class _Live(TorchDispatchMode):
    """The most bytes of tensors that operators made and that live at once."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        given = {tensor.untyped_storage()._cdata for tensor in tensors}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.sizes and storage._cdata not in given:
                    self.sizes[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self.sizes.pop, storage._cdata, None)
        self.peak = max(self.peak, sum(self.sizes.values()))
        return result


def _attending_bytes(spec: ModelSpec, kv: KVPrecision, context: int) -> int:
    """Return what the last chunk of 128 tokens of a prompt holds while it attends."""
    work = Workload(batch=1, prompt_len=context, gen_len=2, dtype="float32", kv=kv)
    size = wanted_pool(spec, work, max_len=context + 2, prefix_cache=False)
    cache = make_paged_kv(spec, kv, size, layers=range(1), dtype=torch.float32)
    blocks = tuple(range(size.num_blocks))
    cache.take_rows([PagedRow(slot=0, samples=False, first_block=0, new_blocks=blocks)], [0])
    step = RaggedStep.of_rows([0], [context - 128], [128], wanted=[1])
    q = torch.randn(1, 128, spec.heads, spec.head_dim)
    k, v = torch.randn(2, 1, 128, spec.kv_heads, spec.head_dim)
    slopes = alibi_slopes(spec.heads) if spec.positions == "alibi" else None
    gc.collect()
    with torch.no_grad(), _Live() as live:
        cache.attend(0, AttentionInputs(q, k, v, Scoring(0.1, slopes)), step)
    return live.peak


@pytest.mark.parametrize("model", ["llama-3.1-8b", "bloom-560m"])
def test_a_chunk_holds_no_more_for_a_longer_context(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 16-bit caches; but for where each token is in the pool."""
    monkeypatch.setattr(cpu_paged_kv, "CHUNK_ELEMENTS", 1 << 15)
    shapes = {"hidden": 256, "heads": 8, "head_dim": 32, "ffn": 64, "vocab": 64, "num_layers": 1}
    kv_heads = 8 if model == "bloom-560m" else 2
    spec = dataclasses.replace(ModelSpec.by_name(model), kv_heads=kv_heads, **shapes)
    short, long = (_attending_bytes(spec, KVPrecision.KV16, n) for n in (2048, 16384))
    assert long - short == 8 * (16384 - 2048)
