"""Where a start of an engine on a GPU goes: seconds by phase, kernels compiled, graphs captured.

    python benchmarks/start_profile.py --model DIR --bits 4 [--requests 256] [--rows FILE]

Three processes one after the other: the first with an empty folder of compiled kernels, the second
finds what the first left, the third runs a job of a batch that is new to the folder. Each prints
its phases, the kernels that took longest to compile and where its threads were found most often (a
sample every 5 ms).
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmpq.kernels.gpu_timing import write_row

EVERY_S = 0.005
STARTS = ("first", "second", "batch")
SHOWN = 14
"""Kernels and places that are printed."""


def main() -> None:
    """Measure both starts, print, append rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--bits", default="4", help="precision of all layers (default 4)")
    parser.add_argument("--load-format", default="copies")
    parser.add_argument("--requests", type=int, default=256, help="at once (default 256)")
    parser.add_argument("--batch", type=int, default=44, help="of the third start (default 44)")
    parser.add_argument("--rows", type=Path, help="append the rows to this file")
    parser.add_argument("--start", choices=STARTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.start:
        print(json.dumps(_start(args)))
        return
    with tempfile.TemporaryDirectory() as folder:
        for start in STARTS:
            done = subprocess.run(
                [sys.executable, __file__, *sys.argv[1:], "--start", start],
                env={**os.environ, "TRITON_CACHE_DIR": folder},
                stdout=subprocess.PIPE, text=True, check=True,
            )  # fmt: skip
            found = json.loads(done.stdout.splitlines()[-1])
            if args.rows:
                _write(args, start, found)
            _show(start, found)


def _write(args: argparse.Namespace, start: str, found: dict[str, Any]) -> None:
    """Append a row: seconds without imports, and beside them those of its phases."""
    case = {"model": args.model, "bits": args.bits, "requests": args.requests, "start": start}
    if start == "batch":
        case["requests"] = args.batch
    phases = ("import_s", "compile_forked_s", "record_s", "warm_up_s", "all_s")
    write_row(
        args.rows,
        bench="start",
        case=case,
        unit="s",
        samples=[found["start_s"]],
        baselines={name: found[name] for name in phases},
        program="python benchmarks/start_profile.py",
    )


def _show(start: str, found: dict[str, Any]) -> None:
    places, kernels = found.pop("places"), found.pop("kernels")
    print(f"== {start} start", {k: round(v, 2) for k, v in found.items()})
    for name, (count, seconds, front) in list(kernels.items())[:SHOWN]:
        print(f"  kernel {name}: {count} compiled, {seconds:.1f} s ({front:.1f} in Python)")
    for name, seconds in places[:SHOWN]:
        print(f"  at {seconds:6.2f} s  {name}")
    sys.stdout.flush()


class _Clock:
    """Seconds in functions, by name: their own and everything below."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = collections.defaultdict(float)

    def around(self, owner: Any, name: str, label: str) -> None:
        """Time a method from now on."""
        plain: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            since = time.perf_counter()
            try:
                return plain(*args, **kwargs)
            finally:
                self.seconds[label + "_s"] += time.perf_counter() - since
                self.seconds["num_" + label] += 1

        setattr(owner, name, timed)


def _start(args: argparse.Namespace) -> dict[str, Any]:
    """Start an engine in this process, answer one prompt; return what it took."""
    since = time.perf_counter()
    places: collections.Counter[str] = collections.Counter()
    ended = threading.Event()
    threading.Thread(target=_sample, args=(places, ended), daemon=True).start()
    import torch
    import triton

    from llmpq.kernels import compile_missing
    from llmpq.model_spec import ModelSpec
    from llmpq.precision import Precision
    from llmpq.runtime.backends.gpu import cuda_stage_runner
    from llmpq.runtime.backends.gpu.cuda_graphs import StepGraphs
    from llmpq.runtime.launch.plans.manual_plan import manual_plan, on_gpu
    from llmpq.runtime.launch.stages import stage_loading
    from llmpq.runtime.llm import LLM
    from llmpq.runtime.sampling_params import SamplingParams
    from llmpq.workload import Workload

    clock, kernels = _Clock(), dict[str, tuple[int, float, float]]()
    clock.seconds["import_s"] = time.perf_counter() - since
    clock.around(stage_loading, "build_stage", "build")
    clock.around(cuda_stage_runner.CudaStageRunner, "warm_up", "warm_up")
    clock.around(StepGraphs, "run_through", "run_through")
    clock.around(StepGraphs, "_record", "record")
    clock.around(compile_missing, "_compile_forked", "compile_forked")
    clock.around(cuda_stage_runner.CudaStageRunner, "_staged", "staged")
    clock.around(cuda_stage_runner.CudaStageRunner, "_answer", "answer")
    clock.around(torch.cuda.CUDAGraph, "replay", "replay")
    clock.around(torch.cuda.graph, "__enter__", "capture_begin")
    clock.around(torch.cuda.graph, "__exit__", "capture_end")

    def listener(*, src: Any, times: Any, cache_hit: bool, **_: Any) -> None:
        name = getattr(src, "name", "?")
        front = times.ir_initialization / 1e6
        whole = front + times.total_lowering / 1e6 + times.store_results / 1e6
        clock.seconds["cache_hits" if cache_hit else "num_compiled"] += 1
        clock.seconds["found_s" if cache_hit else "compile_s"] += whole
        if not cache_hit:
            count, seconds, python = kernels.get(name, (0, 0.0, 0.0))
            kernels[name] = (count + 1, seconds + whole, python + front)

    triton.knobs.compilation.listener = listener
    offline = args.start == "batch"
    rows = args.batch if offline else args.requests
    spec = ModelSpec.from_directory(args.model)
    plan = manual_plan(
        spec,
        Workload(batch=rows, prompt_len=512, gen_len=512, dtype="bfloat16"),
        precision=Precision.parse(args.bits),
        prefill_microbatch=rows if offline else 1,
        decode_microbatch=rows,
    )
    if torch.cuda.is_available():
        plan = on_gpu(plan)
    llm = LLM(args.model, plan=plan, load_format=args.load_format, offline=offline, use_tqdm=False)
    clock.seconds["start_s"] = llm.startup_s
    ready = time.perf_counter()
    llm.generate([[7] * 300], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
    clock.seconds["first_answer_s"] = time.perf_counter() - ready
    clock.seconds["all_s"] = time.perf_counter() - since
    ended.set()
    llm.close()
    return {
        **clock.seconds,
        "kernels": dict(sorted(kernels.items(), key=lambda item: -item[1][1])),
        "places": [(name, count * EVERY_S) for name, count in places.most_common(40)],
    }


WAITS = ("wait", "select", "_recv", "accept", "poll", "get", "result", "join", "readline")


def _sample(places: collections.Counter[str], ended: threading.Event) -> None:
    """Count where threads are that do not wait for others: their innermost frames of two files."""
    own = threading.get_ident()
    while not ended.wait(EVERY_S):
        for number, frame in sys._current_frames().items():
            if number == own or frame.f_code.co_name in WAITS:
                continue
            names: list[str] = []
            step: Any = frame
            while step is not None and len(names) < 3:
                path = Path(step.f_code.co_filename)
                name = f"{path.parent.name}/{path.name}:{step.f_code.co_name}"
                if not names or names[-1].partition(":")[0] != name.partition(":")[0]:
                    names.append(name)
                step = step.f_back
            places[" < ".join(names)] += 1


if __name__ == "__main__":
    main()
