"""Every family over a pool on a GPU: a CPU's tokens and scores, or one sentence why not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from llmpq.capabilities import lacking_sentence, lacks, ways_of
from llmpq.model_spec import ModelSpec
from llmpq.precision import KVPrecision
from llmpq.runtime.backends.gpu.cuda_stage_runner import CudaStageRunner
from llmpq.runtime.drafts.drafters import FixedDrafter
from llmpq.sizes.pool_size import PoolSize
from reference.family_runs import Knowing, served, stages_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
NEW, TOLERANCE = 12, 1e-3
POOL = PoolSize(num_blocks=4, slots=2, max_len=80)


def test_tokens_and_scores_equal_a_cpu(
    models: Any, make_plan: Any, random_prompts: Any, family_kind: str
) -> None:
    """In float32: chunks of one token, odd ones and whole prompts, from graphs and without."""
    directory = models.directory(family_kind)
    spec, plan = ModelSpec.from_directory(directory), make_plan(directory, batch=2, gen_len=NEW)
    if missing := lacks(spec, "gpu"):
        with pytest.raises(ValueError, match=missing[0].replace("(", r"\(").replace(")", r"\)")):
            stages_of(directory, plan, POOL, device="cuda")
        return
    (word,) = random_prompts(5)
    prompts = [*random_prompts(39), (word * 4)[:18]]
    on_cpu = stages_of(directory, plan, POOL)
    captured = stages_of(directory, plan, POOL, device="cuda")
    plain = stages_of(directory, plan, POOL, device="cuda", graphs=False)
    want: dict[int, Any] = {}
    for stages, step_tokens in ((captured, 1), (captured, 33), (captured, 64), (plain, 64)):
        # Earlier keys stay as dynamic frequencies turned them: chunks are another model there.
        way = step_tokens if "dynamic" in family_kind else 64
        if way not in want:
            want[way] = served(on_cpu, prompts, POOL, new=NEW, step_tokens=way)
        options = {"step_tokens": step_tokens, "prompts_too": stages is plain}
        got = served(stages, prompts, POOL, new=NEW, **options)
        assert got.tokens == want[way].tokens, step_tokens
        assert got.furthest(want[way]) < TOLERANCE, step_tokens
    compute = captured.computes[0]
    assert isinstance(compute, CudaStageRunner) and not compute.model.asks_host
    assert all(compute.captured), "steps ran without a graph"
    if not lacks(spec, "drafts") and not lacks(spec, "gpu_drafts"):
        drafter = Knowing(want[64].tokens, spec.vocab)
        drafted = served(captured, prompts, POOL, new=NEW, drafter=drafter)
        assert drafted.tokens == want[64].tokens
        assert sum(drafter.acceptance.accepted) > 0 and drafter.acceptance.refusals > 0


TIE = 0.05
"""How far below the most likely token another may be that half precision takes for it."""
PACKED = PoolSize(num_blocks=4, slots=2, max_len=300, prefix_cache=False)


def test_packed_caches_score_as_on_a_cpu(
    models: Any, make_plan: Any, random_prompts: Any, family_kind: str
) -> None:
    """In float16, over a block's end: nearer to a CPU's than 16-bit keys and values are."""
    directory = models.directory(family_kind)
    spec = ModelSpec.from_directory(directory)
    options = {"batch": 2, "prompt_len": 190, "gen_len": NEW, "dtype": "float16"}
    plans = {kv: make_plan(directory, kv=kv, **options) for kv in ("kv16", "kv4")}
    ways = ways_of(gpu=True, kv=KVPrecision.KV4, drafts=False)
    if lacking_sentence(spec, ways, max_len=300):
        with pytest.raises(ValueError, match="does not run with a"):
            stages_of(directory, plans["kv4"], PACKED, device="cuda")
        return
    if spec.positions == "learned":
        return  # too few of them
    prompts = random_prompts(190, 140)
    on_cpu = {kv: stages_of(directory, plan, PACKED) for kv, plan in plans.items()}
    want = {kv: served(stages, prompts, PACKED, new=2) for kv, stages in on_cpu.items()}
    few_bits = want["kv16"].mostly(want["kv4"])
    got = served(stages_of(directory, plans["kv4"], PACKED, device="cuda"), prompts, PACKED, new=2)
    assert got.mostly(want["kv4"]) < 0.5 * few_bits  # a code may fall either way, so may an expert
    if lacks(spec, "drafts", max_len=300) or lacks(spec, "gpu_drafts"):
        return
    drafting = stages_of(directory, plans["kv16"], PACKED, device="cuda", speculate="kv4")
    drafter = FixedDrafter("kv4", 3)
    drafted = served(drafting, prompts, PACKED, new=8, drafter=drafter)
    assert sum(drafter.acceptance.accepted) > 0
    answered = [[*p, *t] for p, t in zip(prompts, drafted.tokens, strict=True)]
    judged = served(on_cpu["kv16"], answered, PACKED, new=1)
    assert max(below for row in judged.below_best for below in row[-8:]) < TIE
