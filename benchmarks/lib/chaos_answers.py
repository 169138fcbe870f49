"""Kills stages at random and special moments, and compares every answer with an undisturbed run's.

    python benchmarks/chaos.py answers --kills 50 --rows

Three stages of unequal memory on CPUs, two models (the demo model, and a random one of another
family), each with and without drafts; requests of every kind that keeps state. One line a kill says
when it came and how long the pause was; the last line says how many answers were lost, came twice,
or differ (none may), and the quantiles of the pauses.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lib.kills import DEMO, quantile, strike, unequal_plan
from lib.rows import write_row

from llmpq import LLM, SamplingParams
from llmpq.models.model_spec import ModelSpec
from llmpq.runtime.requests.request_output import RequestOutput
from llmpq.runtime.requests.sampling_params import StructuredOutputsParams
from llmpq.runtime.text.request_factory import PreparedPrompt

MOMENTS = (
    "anywhen", "first", "last", "middle", "two at once", "all at once", "prefill", "decode",
    "loading", "recovering", "connecting", "stopped",
)  # fmt: skip
ROUND_LIMIT_S = 180.0
"""A round that takes longer hangs."""


@dataclass
class Chaos:
    """What was killed so far, and what came of it."""

    rng: random.Random
    end_s: float
    num_kills: int = 0
    num_answers: int = 0
    lost: int = 0
    twice: int = 0
    different: int = 0
    hung: int = 0
    pauses_s: list[float] = field(default_factory=list)

    @property
    def failures(self) -> dict[str, int]:
        """What must not happen, and how often it did."""
        return {name: getattr(self, name) for name in ("lost", "twice", "different", "hung")}


@dataclass(frozen=True)
class Case:
    """A model and how it runs."""

    name: str
    directory: Path
    speculate: Literal["ngram"] | None

    def llm(self, backend: Literal["threads", "processes"]) -> LLM:
        """Return it over three unequal stages."""
        return LLM(
            self.directory,
            plan=unequal_plan(self.directory, batch=8, prompt_len=48, gen_len=96),
            backend=backend,
            speculate=self.speculate,
            gamma=None if self.speculate is None else 3,
            use_tqdm=False,
        )


def main(words: list[str], program: str) -> int:
    """Kill until so many stages are dead; 1 if an answer is not as it was."""
    parser = argparse.ArgumentParser(prog=program, description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end after so long")
    parser.add_argument("--rows", action="store_true", help="add rows to results/chaos.jsonl")
    given = parser.parse_args(words)
    chaos = Chaos(random.Random(given.seed), time.monotonic() + given.seconds)
    with tempfile.TemporaryDirectory() as folder:
        models = (("demo-7m", DEMO), ("random", random_model(Path(folder))))
        cases = [Case(*model, draft) for model in models for draft in (None, "ngram")]
        for case in cases:
            before = len(chaos.pauses_s), chaos.num_kills, chaos.num_answers
            disturb(case, chaos, num_kills=-(-given.kills // len(cases)))
            pauses_s = sorted(chaos.pauses_s[before[0] :])
            if given.rows and pauses_s:
                write_row(
                    "chaos.jsonl",
                    bench="pause",
                    case={
                        "model": case.name, "drafts": case.speculate, "stages": 3,
                        "kills": chaos.num_kills - before[1],
                        "answers": chaos.num_answers - before[2],
                        "p99_s": quantile(pauses_s, 0.99), **chaos.failures,
                        "load_average": os.getloadavg()[0],
                    },
                    unit="s",
                    samples=pauses_s,
                    noisy=os.getloadavg()[0] > 2 * (os.cpu_count() or 1),
                )  # fmt: skip
    pauses_s = sorted(chaos.pauses_s)
    print(
        f"{chaos.num_kills} kills, {len(pauses_s)} pauses, {chaos.num_answers} answers, "
        f"{chaos.failures}; pause p50 {quantile(pauses_s, 0.5)} s, p99 {quantile(pauses_s, 0.99)} "
        f"s, longest {pauses_s[-1:]}; load average {os.getloadavg()[0]}"
    )
    return int(any(chaos.failures.values()))


def disturb(case: Case, chaos: Chaos, *, num_kills: int) -> None:
    """Run one model's requests until enough of its stages were killed."""
    vocab = ModelSpec.from_directory(case.directory).vocab
    prompts, params = requests(vocab, guided=case.directory == DEMO)
    with case.llm("threads") as whole:
        expected = [seen(one) for one in whole.generate(prompts, params, use_tqdm=False)]
    until = chaos.num_kills + num_kills
    with case.llm("processes") as llm:
        while chaos.num_kills < until and time.monotonic() < chaos.end_s:
            before, over = len(llm.recoveries), threading.Event()
            answers: dict[int, list[RequestOutput]] = {}
            prepared = [llm.prepare(p, own) for p, own in zip(prompts, params, strict=True)]
            asking = threading.Thread(target=ask, args=(llm, prepared, answers), daemon=True)
            killer = threading.Thread(target=kill, args=(llm, chaos, over, case), daemon=True)
            asking.start()
            killer.start()
            asking.join(ROUND_LIMIT_S)
            over.set()
            killer.join(ROUND_LIMIT_S)
            chaos.hung += asking.is_alive()
            chaos.num_answers += len(answers)
            chaos.lost += len(prompts) - len(answers)
            chaos.twice += sum(len(each) - 1 for each in answers.values())
            different = [i for i, each in answers.items() if seen(each[0]) != expected[i]]
            chaos.different += len(different)
            for index in different:
                was, now = expected[index], seen(answers[index][0])
                same = [one == other for one, other in zip(was, now, strict=True)]
                parted = [place for place, pair in enumerate(zip(was[0], now[0], strict=False))
                          if pair[0] != pair[1]][:1]  # fmt: skip
                print(f"  {params[index]}: tokens, end, scores alike: {same}; from {parted}")
            new = [one.pause_s for one in llm.recoveries[before:] if one.pause_s is not None]
            chaos.pauses_s += new
            print(f"  pauses {[round(one, 2) for one in new]}, different {different}", flush=True)
            if asking.is_alive():
                return


def ask(llm: LLM, prepared: list[PreparedPrompt], answers: dict[int, list[RequestOutput]]) -> None:
    """Gather the answers, as often as they come."""
    for index, output in llm.as_completed(prepared):
        answers.setdefault(index, []).append(output)


def kill(llm: LLM, chaos: Chaos, over: threading.Event, case: Case) -> None:
    """Kill at one moment of a round, chosen at random."""
    rng = chaos.rng
    moment = rng.choice(MOMENTS)
    first = llm.stages_started
    assert first is not None
    time.sleep(rng.uniform(0.0, 0.5))
    if moment in ("prefill", "decode"):
        names = (moment, "mixed") if moment == "prefill" else (moment, "verify")
        while first.phase not in names and not over.wait(0.001):
            pass
    pids, chosen = first.stage_pids(), rng.randrange(3)
    victims = {
        "first": [0], "last": [2], "middle": [1], "two at once": [chosen, (chosen + 1) % 3],
        "all at once": [0, 1, 2],
    }.get(moment, [chosen])  # fmt: skip
    if over.is_set():
        return
    how = signal.SIGSTOP if moment == "stopped" else signal.SIGKILL
    for victim in victims:
        strike(pids[victim], how)
        chaos.num_kills += 1
        print(f"{chaos.num_kills} {case.name}: {moment}, stage {victim}", flush=True)
    if moment == "stopped":  # silence takes the deadline to be noticed: it is ended instead
        time.sleep(0.3)
        strike(pids[victims[0]], signal.SIGKILL)
    if moment in ("loading", "recovering", "connecting"):
        delay_s, again = rng.uniform(0, 0.5), rng.randrange(3)
        while not over.wait(0.001):
            client = llm.stages_started or first
            fresh = client is not first and client.stage_pids()
            if fresh and (moment == "recovering" or client.phase == moment):
                if moment == "recovering":
                    time.sleep(delay_s)
                strike(client.stage_pids()[again], signal.SIGKILL)
                chaos.num_kills += 1
                print(f"{chaos.num_kills} {case.name}: again, stage {again}", flush=True)
                return
            if llm.recovering is None and client is not first:
                return


def requests(vocab: int, *, guided: bool) -> tuple[list[list[int]], list[SamplingParams]]:
    """Return prompts and options: greedy, sampled, with rules and scores."""
    rng = random.Random(5)
    long: dict[str, Any] = {"max_tokens": 56, "ignore_eos": True}
    kinds = [
        SamplingParams(temperature=0, **long),
        SamplingParams(temperature=0.8, seed=2, **long),
        SamplingParams(temperature=0.8, seed=3, frequency_penalty=0.5, logprobs=1, **long),
        SamplingParams(temperature=0, repetition_penalty=1.3, prompt_logprobs=1, **long),
        SamplingParams(temperature=1.0, seed=4, top_k=20, min_p=0.02, **long),
    ]
    if guided:
        regex = StructuredOutputsParams(regex="[a-z ]{50}")
        kinds.append(
            SamplingParams(temperature=0.9, seed=6, max_tokens=56, structured_outputs=regex)
        )
    prompts = [[rng.randrange(3, vocab) for _ in range(rng.randint(1, 40))] for _ in range(9)]
    return prompts, [kinds[i % len(kinds)] for i in range(len(prompts))]


def seen(output: RequestOutput) -> list[Any]:
    """Return what must not depend on kills."""
    (answer,) = output.outputs
    rows = [answer.logprobs, output.prompt_logprobs]
    scores = [[sorted(row) if row else None for row in some] if some else None for some in rows]
    return [list(answer.token_ids), answer.finish_reason, scores]


def random_model(folder: Path) -> Path:
    """Write a random model of another family."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=6, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, eos_token_id=0,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder / "random")
    return folder / "random"
