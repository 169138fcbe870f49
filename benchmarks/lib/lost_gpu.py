"""Takes a card from a model that runs on two: pauses and tokens/s beside what was predicted.

    python benchmarks/elastic.py lost --model DIR --memory "14 GiB" [--rows]

Random weights over two devices that have so much memory of theirs. A stage is killed under load
and starts again on its card; it is killed once more and its card is hidden, so that the job moves
to the other one, with as many bits as fit there. Tokens/s after each are compared with those of
fresh starts. One line for each. `--cpu`: with cores in the place of cards.
"""

from __future__ import annotations

import argparse
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lib.rows import write_row

from llmpq import LLM, SamplingParams
from llmpq.devices.cluster import Cluster
from llmpq.plans.plan import Plan

LIMIT_S = 60.0


def main(words: list[str], program: str) -> None:
    """Run, kill, compare."""
    parser = argparse.ArgumentParser(prog=program, description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--memory", default="14 GiB", help="that the plan may use of each device")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    parser.add_argument("--kind", default="H200")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--rows", action="store_true", help="add rows to results/lost_gpu.jsonl")
    given = parser.parse_args(words)
    device = {"kind": given.kind, "reserve": "512 MiB", "emulate": {"memory": given.memory}}
    if given.cpu:
        device = {"kind": "CPU", "threads": 1, "memory": given.memory, "reserve": 0}
    bench = Bench(given)
    moved = None
    for count in (2, 1):
        node = {"name": "here", "devices": [device] * count}
        cluster = Cluster.parse_data({"name": "two", "nodes": [node]}, where="the benchmark")
        with bench.llm(cluster) as llm, bench.load(llm):
            fresh = bench.rate(llm)
            print(
                f"fresh start in {llm.startup_s:.1f} s: {stages_of(llm.plan)}; {fresh:.0f} "
                "tokens/s",
                flush=True,
            )
            if count == 2:
                bench.lose(llm, fresh, hide=False)
                moved = bench.lose(llm, None, hide=True)
            elif moved is not None:
                print(f"after the move {moved / fresh:.3f} of a fresh start's tokens/s")


class Bench:
    """What is measured of an engine under load."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given

    def llm(self, cluster: Cluster) -> LLM:
        """Return an engine whose stages are processes."""
        return LLM(
            self.given.model,
            cluster=cluster,
            load_format="dummy",
            backend="processes",
            use_tqdm=False,
            max_model_len=1024,
            max_num_seqs=self.given.requests,
            dtype="float32" if self.given.cpu else "float16",
            on_loss="replan",
        )

    @contextmanager
    def load(self, llm: LLM) -> Iterator[None]:
        """Keep as many requests under way as run at once."""
        over = threading.Event()
        params = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)

        def one(number: int) -> None:
            with suppress(Exception):  # the engine is closed while they run
                while not over.is_set():
                    prompt = [5 + (number + i) % 100 for i in range(64)]
                    llm.generate([prompt], params, use_tqdm=False)

        threads = [threading.Thread(target=one, args=(n,), daemon=True)
                   for n in range(self.given.requests)]  # fmt: skip
        for thread in threads:
            thread.start()
        time.sleep(2.0)
        try:
            yield
        finally:
            over.set()

    def rate(self, llm: LLM) -> float:
        """Return tokens/s over some seconds, once they come as fast as they will."""
        time.sleep(self.given.seconds / 2)
        began_s, before = time.perf_counter(), generated(llm)
        time.sleep(self.given.seconds)
        return (generated(llm) - before) / (time.perf_counter() - began_s)

    def lose(self, llm: LLM, fresh: float | None, *, hide: bool) -> float | None:
        """Kill the last stage, hide its card, and say what came of it."""
        client = llm.stages_started
        assert client is not None
        if hide:
            first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
            os.environ["CUDA_VISIBLE_DEVICES"] = f"{first},-1"
        count = len(llm.recoveries)
        began_s = time.perf_counter()
        os.kill(client.stage_pids()[-1], signal.SIGKILL)
        while len(llm.recoveries) == count or llm.recoveries[-1].pause_s is None:
            time.sleep(0.01)
            llm.check_alive()
            if time.perf_counter() - began_s > LIMIT_S:
                print(f"not recovered within {LIMIT_S:.0f} s: {llm.recoveries[-1:]}", flush=True)
                return None
        recovery = llm.recoveries[-1]
        measured, predicted = recovery.measured_s or 0.0, recovery.predicted_s or 0.0
        rate = self.rate(llm)
        share = "" if fresh is None else f" ({rate / fresh:.3f} of a fresh start's)"
        print(
            f"{recovery.action}: serves again after {measured:.2f} s, {predicted:.2f} s predicted "
            f"({measured / max(predicted, 1e-9):.2f}); next token after {recovery.pause_s:.2f} s; "
            f"{recovery.num_attempts} attempts, {recovery.num_held} layers there, "
            f"{recovery.num_loaded} loaded; {rate:.0f} tokens/s{share}; {stages_of(llm.plan)}; "
            f"planner {(recovery.plan or {}).get('planner_s', 0.0):.2f} s",
            flush=True,
        )
        if self.given.rows:
            write_row(
                "lost_gpu.jsonl",
                bench="lost_gpu",
                case={"model": Path(self.given.model).name, "action": recovery.action,
                      "held": recovery.num_held, "loaded": recovery.num_loaded,
                      "tokens_per_s": rate, "fresh_tokens_per_s": fresh},
                unit="s",
                samples=[measured],
                predicted=predicted,
            )  # fmt: skip
        return rate


def generated(llm: LLM) -> int:
    """Return how many tokens came so far."""
    return int(llm.stats()["generated_tokens"])


def stages_of(plan: Plan) -> str:
    """Return devices, layers and bits in short."""
    parts = [
        f"{s.device}: {s.num_layers} x {'/'.join(sorted({p.value for p in s.precisions}))}"
        for s in plan.places
    ]
    return ", ".join(parts) + f", {plan.workload.kv.value}"
