"""`llmpq-algo fits` against truth: what it says fits runs full, what it says does not is refused.

    PYTHONPATH=tests python benchmarks/memory_fidelity.py fits [--seeds 200] [--first 0]

A seed draws a published config of some family (data/published_configs.jsonl), shrunk to a tiny
model, its bits of weights and KV cache, how many requests of which context, and one to three CPU
stages with memory caps around what it needs. Where `fits` says yes the stages are started with
random weights, requests fill nine tenths of their context at once, and what each stage allocated is
compared with what was predicted; where it says no the planner must find no plan by its search. One
row of all goes to results/fits.jsonl.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from lib.published_configs import published, shrunk
from lib.rows import write_row

from llmpq import LLM, SamplingParams
from llmpq.errors import DoesNotFitError
from llmpq.models.model_spec import ModelSpec
from llmpq.planner.cli.fit_report import FitAnswer, fit_answer
from llmpq.planner.make import make_plan
from llmpq.planner.problem.requests import FitsRequest
from llmpq.plans.capabilities import lacks
from llmpq.plans.plan import Plan
from llmpq.precision import KVPrecision

MODELS_OF_A_KIND = 3
GEN = 8
"""Tokens of an answer."""
SHARE = 0.9
"""Of the context that requests fill."""
CAPS = (0.55, 1.5)
"""Memory of all devices together, of what the job needs on one."""


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A model, requests, and devices by their bytes."""

    config: dict[str, Any]
    bits: str
    kv: str
    batch: int
    context: int
    shares: tuple[float, ...]
    """Memory of each device, of what the job needs on one that has room."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """What came of one seed."""

    kind: str
    fits: bool
    stages: int = 0
    errors: tuple[float, ...] = ()
    """Of each stage: how far what it allocated is from what was predicted."""
    wrong: str = ""
    """What is not as it was said; empty where all is well."""


@cache
def configs() -> tuple[dict[str, Any], ...]:
    """Return tiny configs, a few of each family that is run."""
    found: dict[str, list[dict[str, Any]]] = {}
    for entry in published():
        kind = str(entry["config"].get("model_type"))
        some = found.setdefault(kind, [])
        if len(some) < MODELS_OF_A_KIND:
            try:
                tiny = shrunk(entry["config"])
                _spec(tiny)
            except (ValueError, KeyError, AttributeError, TypeError):  # refused: not run
                continue
            some.append(tiny)
    return tuple(config for some in found.values() for config in some)


def _spec(config: dict[str, Any]) -> ModelSpec:
    with tempfile.TemporaryDirectory() as folder:
        return ModelSpec.from_directory(_written(folder, config))


def _written(folder: str, config: dict[str, Any]) -> str:
    (Path(folder) / "config.json").write_text(json.dumps(config))
    return folder


def draw(seed: int) -> Drawn:
    """Return the seed's case."""
    rng = random.Random(seed)
    config = configs()[seed % len(configs())]
    spec = _spec(config)
    packed = not lacks(spec, "packed_kv")
    count = rng.randint(1, 3)
    total = rng.uniform(*CAPS)
    cuts = [rng.uniform(0.6, 1.4) for _ in range(count)]
    return Drawn(
        config=config,
        bits=rng.choice(("16", "8", "4", "8,4", "16,8,4", "3,4")),
        kv=rng.choice(("16", "16", "8", "4")) if packed else "16",
        batch=rng.randint(1, 4),
        context=min(spec.max_positions, rng.randint(48, 1400)),
        shares=tuple(total * cut / sum(cuts) for cut in cuts),
    )


def asked(folder: str, drawn: Drawn, memories: Sequence[int]) -> FitAnswer:
    """Return what `fits` says on CPUs of so many bytes."""
    return fit_answer(_request(folder, drawn, memories))


def _request(folder: str, drawn: Drawn, memories: Sequence[int]) -> FitsRequest:
    # JSON is YAML.
    groups = [{"kind": "CPU", "threads": 1, "memory": f"{m} B", "reserve": 0} for m in memories]
    cluster = {"schema": 1, "name": "caps", "nodes": [{"name": "a", "devices": groups}]}
    path = Path(folder) / "cluster.yaml"
    path.write_text(json.dumps(cluster))
    return FitsRequest(
        model=folder,
        cluster=str(path),
        batch=drawn.batch,
        context=drawn.context,
        gen_len=GEN,
        bits=drawn.bits,
        kv=drawn.kv,
        dtype="float32",
    )


def tried(drawn: Drawn) -> Found:
    """Return whether what `fits` says of a case is true."""
    kind = str(drawn.config["model_type"])
    with tempfile.TemporaryDirectory() as folder:
        _written(folder, drawn.config)
        roomy = asked(folder, drawn, [2**40])
        (own,) = roomy.report.devices
        caps = [int(share * own.total_bytes) for share in drawn.shares]
        found = asked(folder, drawn, caps)
        if found.plan is None:
            return Found(kind=kind, fits=False, wrong=_planned(folder, drawn, caps))
        return _ran(kind, folder, drawn, found.plan)


def _planned(folder: str, drawn: Drawn, caps: Sequence[int]) -> str:
    """Return what is wrong with a no: a plan that a search finds."""
    request = _request(folder, drawn, caps)
    try:
        plan = make_plan(
            folder,
            cluster=request.cluster,
            batch=drawn.batch,
            context=drawn.context,
            gen_len=GEN,
            bits=drawn.bits,
            kv=drawn.kv,
            dtype="float32",
            time_limit_s=20.0,
        )
    except DoesNotFitError:
        return ""
    return f"said not to fit, planned on {len(plan.stages)} stages"


def _ran(kind: str, folder: str, drawn: Drawn, plan: Plan) -> Found:
    """Run as many requests as were asked for, nine tenths of their context full."""
    prompt_len = max(1, int(SHARE * drawn.context) - GEN)
    rng = random.Random(1)
    prompts = [[rng.randrange(2, 190) for _ in range(prompt_len)] for _ in range(drawn.batch)]
    greedy = SamplingParams(max_tokens=GEN, temperature=0, ignore_eos=True)
    # For prefixes, packed blocks have 16-bit tokens behind them, and fewer requests run at once.
    caching = plan.workload.kv is KVPrecision.KV16
    how: dict[str, Any] = {"load_format": "dummy", "backend": "threads"}
    with LLM(folder, plan=plan, enable_prefix_caching=caching, **how) as llm:
        answers = llm.generate(prompts, greedy)
        loads = list(llm.engine.client.load_reports)
    errors = []
    for stage, load in zip(plan.stages, loads, strict=True):
        memory = stage.memory
        assert memory is not None, "the planner counts memory"
        predicted = memory.weights_bytes + memory.embedding_bytes + memory.kv_bytes
        predicted += memory.prefix_bytes
        errors.append((load.weights_bytes + load.kv_bytes) / predicted - 1)
    done = all(len(answer.outputs[0].token_ids) == GEN for answer in answers)
    wrong = "" if done else "an answer is short"
    if max(map(abs, errors)) > 0.01:
        wrong = f"bytes are off by {max(errors, key=abs):+.2%}"
    return Found(kind=kind, fits=True, stages=len(plan.stages), errors=tuple(errors), wrong=wrong)


def main(words: list[str], program: str) -> None:
    """Try seeds, write the row, print what is wrong."""
    parser = argparse.ArgumentParser(prog=program, description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    args = parser.parse_args(words)
    import torch

    torch.set_num_threads(1)
    found = []
    for seed in range(args.first, args.first + args.seeds):
        drawn = draw(seed)
        try:
            one = tried(drawn)
        except Exception as error:  # the others are tried all the same
            one = Found(kind=str(drawn.config["model_type"]), fits=True, wrong=repr(error)[:300])
        found.append(one)
        if one.wrong:
            shown = replace(drawn, config={"model_type": one.kind})
            print(f"seed {seed}: {one.wrong} ({shown})", flush=True)
    ran = [one for one in found if one.fits]
    errors = [abs(error) for one in ran for error in one.errors]
    case = {
        "seeds": [args.first, args.first + args.seeds],
        "kinds": len({one.kind for one in found}),
        "fit": len(ran),
        "refused": len(found) - len(ran),
        "stages": sum(one.stages for one in ran),
        "wrong": sum(bool(one.wrong) for one in found),
        "share_of_context": SHARE,
    }
    print(json.dumps(case), f"largest error {max(errors, default=0.0):.3%}")
    write_row(
        "fits.jsonl", bench="fits_truth", case=case, samples=errors or [0.0], unit="relative error"
    )
