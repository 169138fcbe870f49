"""Every family over a pool on a GPU: a CPU's tokens and scores, or one sentence why not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from llmpq.models.model_spec import ModelSpec
from llmpq.plans.capabilities import execution_modes, lacking_sentence, lacks
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
        scored = stages is plain
        got = served(stages, prompts, POOL, new=NEW, step_tokens=step_tokens, prompts_too=scored)
        assert got.tokens == want[way].tokens, step_tokens
        assert got.furthest(want[way]) < TOLERANCE, step_tokens
    compute = captured.computes[0]
    assert isinstance(compute, CudaStageRunner) and not compute.model.asks_host
    assert all(compute.captured), "steps ran without a graph"
    if not lacks(spec, "drafts"):
        drafter = Knowing(want[64].tokens, spec.vocab)
        noting = stages_of(directory, plan, POOL, device="cuda", speculate="ngram")
        drafted = served(noting, prompts, POOL, new=NEW, drafter=drafter)
        assert drafted.tokens == want[64].tokens
        assert sum(drafter.acceptance.accepted) > 0 and drafter.acceptance.refusals > 0


NEAR, TIE = 0.15, 0.5
"""How far log-probabilities may be apart on average in half precision, where a code of a key and
the choice of an expert may fall either way; and an accepted token below the most likely one. Those
of tokens by chance are further below."""
PACKED = PoolSize(num_blocks=4, slots=2, max_len=300, prefix_cache=False)


def test_packed_caches_and_drafts_from_them_in_half_precision(
    models: Any, make_plan: Any, random_prompts: Any, family_kind: str
) -> None:
    """Over a block's end: a CPU's scores; drafts are accepted, and such as the model would take."""
    directory = models.directory(family_kind)
    spec = ModelSpec.from_directory(directory)
    options = {"batch": 2, "prompt_len": 190, "gen_len": NEW, "dtype": "float16"}
    plans = {kv: make_plan(directory, kv=kv, **options) for kv in ("kv16", "kv4")}
    ways = execution_modes(gpu=True, kv=KVPrecision.KV4, drafts=False)
    if lacking_sentence(spec, ways, max_len=300):
        with pytest.raises(ValueError, match="does not run with a"):
            stages_of(directory, plans["kv4"], PACKED, device="cuda")
        return
    if spec.positions == "learned":
        return  # too few of them
    prompts = random_prompts(190, 140)
    on_gpu, on_cpu = (
        served(stages_of(directory, plans["kv4"], PACKED, device=device), prompts, PACKED, new=2)
        for device in ("cuda", "cpu")
    )
    beyond = zip(on_gpu.prompt_scores[0][150:], on_cpu.prompt_scores[0][150:], strict=True)
    apart = [abs(ours - theirs) for ours, theirs in beyond]
    assert sum(apart) / len(apart) < NEAR
    if lacks(spec, "drafts", max_len=300):
        return
    drafting = stages_of(directory, plans["kv16"], PACKED, device="cuda", speculate="kv4")
    drafter = FixedDrafter("kv4", 3)
    drafted = served(drafting, prompts, PACKED, new=8, drafter=drafter)
    assert sum(drafter.acceptance.accepted) > 0
    answered = [[*p, *t] for p, t in zip(prompts, drafted.tokens, strict=True)]
    plain = stages_of(directory, plans["kv16"], PACKED, device="cuda")
    judged = served(plain, answered, PACKED, new=1)
    assert max(below for row in judged.below_best for below in row[-8:]) < TIE


@pytest.mark.parametrize("kv", ["kv8v4", "kv4v2", "kv16v4"])
def test_keys_and_values_of_different_bits_give_a_cpus_scores(
    models: Any, make_plan: Any, random_prompts: Any, kv: str
) -> None:
    directory = models.directory("granite")
    plan = make_plan(directory, kv=kv, batch=2, prompt_len=190, gen_len=NEW, dtype="float16")
    on_gpu, on_cpu = (
        served(
            stages_of(directory, plan, PACKED, device=device),
            random_prompts(190, 140), PACKED, new=2,
        )
        for device in ("cuda", "cpu")
    )  # fmt: skip
    beyond = zip(on_gpu.prompt_scores[0][150:], on_cpu.prompt_scores[0][150:], strict=True)
    apart = [abs(ours - theirs) for ours, theirs in beyond]
    assert sum(apart) / len(apart) < NEAR
