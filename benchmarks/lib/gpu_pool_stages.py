"""Two stages over a pool on two GPUs: the tokens of one stage, whatever carries hidden states.

Part of gpu_pool.py. The demo model in float32, prompts in chunks beside rows that decode, rows that
go on before their tokens are known, half of them ended by a stop token: equal greedy tokens.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from llmpq.model_spec import ModelSpec
from llmpq.runtime.launch.plans.hand_plan import hand_plan, on_gpu
from llmpq.runtime.llm import LLM
from llmpq.runtime.sampling_params import SamplingParams
from llmpq.workload import Workload

LINKS = ("peer", "nccl", "gloo")
REQUESTS, NEW_TOKENS, STEP_TOKENS, MOST_ROWS = 96, 60, 128, 24


def stages_tokens(model: Path) -> list[dict[str, Any]]:
    """Serve the same requests by one stage, and by two over each kind of link."""
    if torch.cuda.device_count() < 2:
        return [{"what": "needs two GPUs, there is one", "holds": False}]
    spec, rng = ModelSpec.from_directory(model), random.Random(2)
    lengths = [rng.choice((1, 7, 64, 129, 300, 650)) + rng.randrange(9) for _ in range(REQUESTS)]
    prompts = [[rng.randrange(spec.vocab) for _ in range(length)] for length in lengths]
    whole, _ = _served(model, spec, prompts, None)
    rows = []
    for links in LINKS:
        found, sending_s = _served(model, spec, prompts, links)
        equal = sum(a == b for a, b in zip(found, whole, strict=True))
        ended = sum(len(tokens) < NEW_TOKENS for tokens in found)
        what = f"{links}: {equal} of {len(found)} requests equal, {ended} ended by a stop token"
        # Only links into the other GPU's memory know how long they take: they were in use.
        known = (sending_s > 0) == (links == "peer")
        rows.append({"what": what, "holds": equal == len(found) and ended > 0 and known})
    return rows


def _served(
    model: Path, spec: ModelSpec, prompts: list[list[int]], links: Any
) -> tuple[list[list[int]], float]:
    """Return each request's tokens, and the seconds that messages took; no links: one stage."""
    plan = hand_plan(
        spec,
        Workload(batch=MOST_ROWS, prompt_len=760, gen_len=NEW_TOKENS, dtype="float32"),
        splits=() if links is None else (spec.num_layers // 2,),
        decode_microbatch=MOST_ROWS,
    )
    # One token in 97 ends an answer: some end early, others at their length.
    stops = list(range(5, spec.vocab, 97))
    params = [
        SamplingParams(
            max_tokens=NEW_TOKENS,
            temperature=0.0,
            ignore_eos=True,
            stop_token_ids=stops if number % 2 else [],
        )
        for number in range(len(prompts))
    ]
    with LLM(
        model,
        plan=on_gpu(plan),
        kv_pool=True,
        links=links or "auto",
        stages_apart=True,
        max_num_batched_tokens=STEP_TOKENS,
        enable_prefix_caching=False,
    ) as llm:
        answers = llm.generate([{"prompt_token_ids": own} for own in prompts], params)
        sending_s = sum(record.sending_s for record in llm._engine.engine.records())
    return [list(answer.outputs[0].token_ids) for answer in answers], sending_s
