"""Every family over packed KV caches and with speculation on a GPU: as on a CPU, as plain runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from llmpq.model_spec import ModelSpec
from llmpq.precision import KVPrecision
from llmpq.runtime.backends.build_stage import build_slot_stage, load_slots
from llmpq.runtime.backends.gpu.cuda_slot_stage_runner import CudaSlotStageRunner
from llmpq.runtime.backends.slot_stage_runner import SlotStageRunner
from llmpq.runtime.cache.kv_by_precision import make_kv_cache
from llmpq.runtime.drafts.drafters import FixedDrafter
from llmpq.runtime.engine.mailbox import Mailbox
from llmpq.runtime.engine.slot_limits import SlotLimits
from llmpq.runtime.engine.slot_scheduler import SlotScheduler
from llmpq.runtime.engine.stage_loop import FirstStage
from llmpq.runtime.request import Request
from llmpq.runtime.step import Step
from llmpq.runtime.trace import Recorder
from llmpq.runtime.weights.sources import CheckpointSource
from reference.pipeline import ReferencePipeline, pad

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
TOLERANCE = 5e-3
"""As in test_cuda_packed_interpret.py."""
PROMPT, NEW = 280, 8
RULED = ("gemma2", "gemma3", "gpt_oss", "deepseek_v2", "deepseek_v3")


def logits(directory: Any, tokens: list[int], kv: KVPrecision, device: str) -> list[torch.Tensor]:
    """Return the logits behind a prompt, a token, three tokens and a chunk of thirty."""
    pipeline = ReferencePipeline.from_directory(directory, device=device, max_len=len(tokens))
    cache = make_kv_cache(
        pipeline.spec, kv, num_layers=4, slots=2, max_len=len(tokens), dtype=torch.float32,
        device=device,
    )  # fmt: skip
    found, start = [], 0
    for count in (PROMPT, 1, 3, 30, 1):
        step = Step.of([1], [start], [count], device=torch.device(device))
        given = pad([tokens[start : start + count]]).to(device)
        found.append(pipeline.logits(given, step, [cache]).cpu())
        start += count
    return found


def near(models: Any, random_prompts: Any, kind: str, kv: KVPrecision) -> None:
    (tokens,) = random_prompts(PROMPT + 35)
    got, want = (logits(models.directory(kind), tokens, kv, on) for on in ("cuda", "cpu"))
    for ours, theirs in zip(got, want, strict=True):
        assert float((ours - theirs).norm() / theirs.norm()) < TOLERANCE


def test_every_family_in_four_bits(models: Any, random_prompts: Any, family_kind: str) -> None:
    near(models, random_prompts, family_kind, KVPrecision.KV4)


@pytest.mark.parametrize("kv", [KVPrecision.KV8, KVPrecision.KV2], ids=lambda kv: kv.value)
@pytest.mark.parametrize("kind", RULED)
def test_rules_in_other_precisions(
    models: Any, random_prompts: Any, kind: str, kv: KVPrecision
) -> None:
    near(models, random_prompts, kind, kv)


@pytest.mark.parametrize("kind", RULED)
@pytest.mark.parametrize("mode", ["kv4", "ngram"])
def test_drafts_leave_the_tokens_as_they_are(
    models: Any, make_plan: Any, random_prompts: Any, kind: str, mode: str
) -> None:
    directory, prompts = models.directory(kind), random_prompts(9, 3, 7)
    spec = ModelSpec.from_directory(directory)
    plan = make_plan(directory, batch=2, decode_microbatch=2, prefill_microbatch=2)
    compute, _ = build_slot_stage(
        plan, 0, spec, CheckpointSource(directory, spec), torch.device("cuda")
    )
    assert isinstance(compute, CudaSlotStageRunner)
    compute.enable_speculation(mode, plan.workload)  # type: ignore[arg-type]
    mailbox = Mailbox()
    for i, prompt in enumerate(prompts):
        mailbox.requests.put(Request(id=i, prompt=tuple(prompt), max_new=NEW))
    mailbox.requests.put(None)
    limits = SlotLimits(
        num_slots=plan.workload.batch,
        prompt_len=plan.workload.prompt_len,
        max_len=plan.workload.max_len,
        prefill_microbatch=plan.prefill_microbatch,
        decode_microbatch=plan.decode_microbatch,
    )
    scheduler = SlotScheduler(limits, drafter=FixedDrafter(mode, 3))  # type: ignore[arg-type]
    FirstStage(scheduler, compute, None, mailbox, Recorder(), num_stages=1).run()
    found = [done.tokens for done in sorted(mailbox.finished, key=lambda done: done.id)]
    assert found == [row[:NEW] for row in models.greedy(kind, prompts)]


@pytest.mark.parametrize("kind", RULED)
def test_decode_steps_are_captured(
    models: Any, make_plan: Any, random_prompts: Any, stage_tokens: Any, kind: str
) -> None:
    directory, prompts = models.directory(kind), random_prompts(200, 19)
    options = {"prompt_len": 200, "gen_len": NEW, "kv": "kv8"}
    plan = make_plan(directory, batch=2, decode_microbatch=2, prefill_microbatch=2, **options)
    spec = ModelSpec.from_directory(directory)
    source = CheckpointSource(directory, spec)
    compute, _ = build_slot_stage(plan, 0, spec, source, torch.device("cuda"))
    assert isinstance(compute, CudaSlotStageRunner)
    found = stage_tokens(compute, plan, prompts, NEW)
    assert compute.captured_rows, "decode steps ran without a graph"
    cpu = torch.device("cpu")
    on_cpu = SlotStageRunner(*load_slots(plan, 0, spec, source, cpu), cpu, torch.float32)
    assert found == stage_tokens(on_cpu, plan, prompts, NEW)
