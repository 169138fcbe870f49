"""Steps with chunks of prompts on a GPU: from a graph, and as they come.

    python benchmarks/long_steps.py [--model llama-3.1-8b] [--precisions 4,16] [--kv kv16,kv4]
        [--out ROWS.jsonl]

Times a layer as `llmpq-profile` does, with every size captured and with none: a line a step, with
what the host needs to enqueue a layer. Up to which size the engine captures steps
(llmpq/sizes/step_padding.py) was chosen by it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch

from llmpq.cost_model import Phase
from llmpq.kernels.gpu_timing import write_row
from llmpq.memory import Quantization
from llmpq.precision import KVPrecision, Precision
from llmpq.profiler.timing.cases import Effort, Sampling, Target, TimedCase, model_spec
from llmpq.profiler.timing.timed_layers import TimedModel
from llmpq.runtime.backends.gpu import paged_graphs

CHUNKS = ((8, 160, 0), (1, 1280, 0), (8, 256, 0), (1, 2048, 0), (4, 512, 1024), (1, 4096, 0))
"""Prompts, tokens of each, tokens before them."""
WAYS = {"from a graph": 1 << 20, "as it comes": 0}
"""Tokens up to which steps are captured."""
EFFORT = Effort(seconds=0.02, min_repeats=3)


def host_us(model: TimedModel, case: TimedCase) -> float:
    """Return what the host needs to enqueue a layer of a step, while the device waits for it."""
    with torch.inference_mode():
        call, layers = model.step(case)
        call()
        took = []
        for _ in range(7):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            call()
            took.append((time.perf_counter() - begin) / layers)
        torch.cuda.synchronize()
    return 1e6 * statistics.median(took)


def main() -> None:
    """Time every chunk in both ways."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--precisions", default="4,16")
    parser.add_argument("--kv", default="kv16,kv4")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    spec, device = model_spec(options.model), torch.device("cuda:0")
    model = TimedModel(spec, device, Quantization(), Sampling())
    for precision in map(Precision.parse, options.precisions.split(",")):
        for kv in map(KVPrecision, options.kv.split(",")):
            target = Target(
                device_kind="here",
                part="layer",
                phase=Phase.PREFILL,
                precision=precision,
                kv=kv,
                dtype="bfloat16",
            )
            for v, length, start in CHUNKS:
                case = TimedCase(target=target, v=v, length=length, start=start)
                for way, most in WAYS.items():
                    paged_graphs.CAPTURED_TOKENS = most
                    timing, host = model.time(case, EFFORT), host_us(model, case)
                    print(
                        f"{precision.value} {kv.value} {v} x {length} behind {start} {way}: "
                        f"{1e6 * timing.seconds:.0f} us a layer, the host's {host:.0f}",
                        flush=True,
                    )
                    if options.out:
                        write_row(
                            options.out,
                            bench="long_step",
                            case={
                                "model": spec.name,
                                "precision": precision.value,
                                "kv": kv.value,
                                "dtype": "bfloat16",
                                "chunks": f"{v} x {length}",
                                "behind": start,
                                "step": way,
                            },
                            unit="us",
                            samples=[1e6 * timing.seconds],
                            baselines={"host": host},
                            program="python benchmarks/long_steps.py",
                        )


if __name__ == "__main__":
    main()
