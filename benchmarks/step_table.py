"""Where a decode step's time goes: every kernel of a layer, and the step without it.

    python benchmarks/step_table.py --precision w4a16 --symmetric --rows 32 1 --out step.jsonl

Two views of the captured step of a whole model on one GPU, random weights:

    trace       kernels in the order of a layer: bytes they must move, their time, the time from the
                end of the one before to their own end (with programmatic dependent launch a kernel
                starts while the one before ends: durations overlap, these do not)
    without     the step once more with one kind of kernel left out: what it costs where it stands

`--prompt` times a single prompt as well: until its token is there, what the host takes to issue it,
and the device's share.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from unittest import mock

import torch
from lib.rows import write_row

from llmpq.kernels.fused import gated_mlp, rope_append
from llmpq.kernels.kv import plain_attend
from llmpq.memory import Quantization
from llmpq.model_spec import ModelSpec
from llmpq.precision import Precision
from llmpq.runtime.backends.backend import backend_of
from llmpq.runtime.backends.gpu import cuda_graphs, cuda_layers
from llmpq.runtime.backends.gpu.cuda_graphs import DecodeGraphs
from llmpq.runtime.backends.gpu.cuda_step_times import seconds_of, step_message
from llmpq.runtime.cache.plain_kv import PlainKVCache
from llmpq.runtime.models.layers import Linear
from llmpq.runtime.models.stage_model import DTYPES, StageModel
from llmpq.runtime.step import Step
from llmpq.runtime.weights.dummy import CopiedLayers
from llmpq.runtime.weights.sources import RandomSource

DEVICE = torch.device("cuda:0")
NO_KERNELS = ("Memcpy", "Memset", "Activity Buffer")


def build(spec: ModelSpec, precision: Precision, symmetric: bool, dtype: torch.dtype) -> StageModel:
    """Return a whole model with random weights."""
    scheme = Quantization(symmetric=symmetric).scheme
    layers = range(spec.num_layers)
    source = CopiedLayers(
        RandomSource(spec, device=DEVICE), dict.fromkeys(layers, scheme(precision)), DEVICE
    )
    return StageModel.build(
        spec,
        layers,
        [precision] * spec.num_layers,
        first=True,
        last=True,
        dtype=dtype,
        device=DEVICE,
        scheme=scheme,
        source=source,
        runner=backend_of(DEVICE).layers(),
    )


def captured(model: StageModel, rows: int, context: int, dtype: torch.dtype) -> Callable[[], None]:
    """Return a call that replays a step of so many rows at a context length, captured anew."""
    kv = _cache(model, rows, context + 16, dtype)
    options = {"num_slots": rows, "max_len": context + 16, "max_rows": rows}
    graphs = DecodeGraphs(model, kv, **options, dtype=dtype, device=DEVICE)
    message = step_message(rows, context, 1)

    @torch.inference_mode()
    def step() -> None:
        graphs.run(message, None)

    step()
    return step


def _cache(model: StageModel, rows: int, max_len: int, dtype: torch.dtype) -> PlainKVCache:
    layers = len(model.layers)
    return PlainKVCache(
        model.spec, num_layers=layers, slots=rows, max_len=max_len, dtype=dtype, device=DEVICE
    )


def step_us(model: StageModel, rows: int, context: int, dtype: torch.dtype) -> float:
    """Return the device time of a step."""
    return seconds_of(captured(model, rows, context, dtype), repeats=40) * 1e6


def trace(step: Callable[[], None], steps: int = 5) -> list[list[tuple[str, float, float]]]:
    """Return, for every step, its kernels: name, time, time since the end of the one before."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as found:
        for _ in range(steps):
            step()
            torch.cuda.synchronize()
            time.sleep(0.002)
    events = sorted(
        (e.time_range.start, e.time_range.end, e.name)
        for e in found.events()
        if e.device_type == torch.autograd.DeviceType.CUDA and not e.name.startswith(NO_KERNELS)
    )
    runs: list[list[tuple[str, float, float]]] = []
    last = -1e9
    for start, end, name in events:
        if start - last > 1000:
            runs.append([])
            last = start
        runs[-1].append((name, end - start, end - last))
        last = max(last, end)
    return runs


def of_a_layer(
    runs: list[list[tuple[str, float, float]]], layers: int
) -> tuple[list[tuple[str, float, float]], float]:
    """Return the mean over layers and steps of every kernel of a layer, and what is no layer's."""
    usual = statistics.mode(len(run) for run in runs)
    runs = [run for run in runs if len(run) == usual]
    names = [name for name, _, _ in runs[0]]
    first = next(i for i, name in enumerate(names) if "rms_norm" in name or "layer_norm" in name)
    period = next(
        p
        for p in range(3, 40)
        if all(names[first + i] == names[first + p + i] for i in range((layers - 1) * p))
    )
    table = []
    for place in range(period):
        at = [run[first + place + layer * period] for run in runs for layer in range(layers)]
        table.append((
            names[first + place],
            statistics.fmean(duration for _, duration, _ in at),
            statistics.fmean(since for _, _, since in at),
        ))  # fmt: skip
    total = statistics.fmean(sum(since for _, _, since in run) for run in runs)
    return table, total - layers * sum(since for _, _, since in table)


@contextlib.contextmanager
def without(model: StageModel, what: str) -> Iterator[None]:
    """Leave a kind of kernel out of what is captured: its output is memory nobody wrote."""
    shapes = {part.name: (part.out_features, part.in_features) for part in model.spec.linears()}
    shapes["head"] = (model.spec.vocab, model.spec.hidden)

    def empty_like_product(part: Linear, x: torch.Tensor, **options: object) -> torch.Tensor:
        if shape_of(part) == shapes[what]:
            residual = options.get("residual")
            return residual if residual is not None else x.new_empty(*x.shape[:-1], shapes[what][0])
        return whole(part, x, **options)

    whole = cuda_layers.product
    patches = {
        "norm": (cuda_layers, "norm", lambda _part, x, **_: x),
        "silu": (
            gated_mlp, "gate_mul", lambda g, *_, **__: g.new_empty(*g.shape[:-1], g.shape[-1] // 2),
        ),
        "rope": (rope_append, "rope_append", lambda q, *_: q.new_empty(q.shape)),
        "attend": (plain_attend, "plain_attend", lambda q, *_, **__: q),
        "argmax": (cuda_graphs, "argmax", lambda x, **_: x[:, 0].long()),
    }  # fmt: skip
    if what == "head":
        patched = mock.patch.object(
            Linear, "forward", lambda self, x: x.new_empty(*x.shape[:-1], shape_of(self)[0])
            if shape_of(self) == shapes["head"] else LINEAR(self, x),
        )  # fmt: skip
    elif what in patches:
        patched = mock.patch.object(*patches[what])
    else:
        patched = mock.patch.object(cuda_layers, "product", empty_like_product)
    with patched:
        yield


LINEAR = Linear.forward


def shape_of(part: Linear) -> tuple[int, int]:
    """Return (out_features, in_features) of a linear."""
    w = part.weight
    return w.out_features, w.in_features


def prompt_ms(model: StageModel, tokens: int, dtype: torch.dtype) -> dict[str, float]:
    """Return milliseconds until a single prompt's token is there, of the host, of the device."""
    kv = _cache(model, 1, tokens + 16, dtype)
    ids = torch.randint(0, model.spec.vocab, (1, tokens), device=DEVICE)

    @torch.inference_mode()
    def prefill() -> torch.Tensor:
        step = Step.of([0], [0], [tokens], device=DEVICE)
        return model.logits(model(ids, step, kv, last_only=True), step).argmax(dim=-1)

    for _ in range(3):
        prefill().item()
    found: dict[str, list[float]] = defaultdict(list)
    for _ in range(9):
        torch.cuda.synchronize()
        began = time.perf_counter()
        last = prefill()
        found["host"].append(1e3 * (time.perf_counter() - began))
        last.item()
        found["whole"].append(1e3 * (time.perf_counter() - began))
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        step = Step(
            slots_B=torch.zeros(1, dtype=torch.long, device=DEVICE),
            start_B=torch.zeros(1, dtype=torch.long, device=DEVICE),
            num_new_B=torch.full((1,), tokens, dtype=torch.long, device=DEVICE),
            q_len=tokens, max_end=tokens, fresh=True, runs=((0, 0, 1),), uniform=True,
        )  # fmt: skip
        model.logits(model(ids, step, kv, last_only=True), step)
    found["device"] = [1e3 * seconds_of(graph.replay, repeats=9)]
    return {name: statistics.median(values) for name, values in found.items()}


def main() -> None:
    """Time, print and write rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama-3.1-8b", help="built-in architecture")
    parser.add_argument("--precision", default="w4a16")
    parser.add_argument("--symmetric", action="store_true")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rows", type=int, nargs="*", default=[32, 1])
    parser.add_argument("--context", type=int, default=560)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--prompt", type=int, default=0)
    parser.add_argument("--no-without", action="store_true", help="the trace alone")
    parser.add_argument("--out", help="file of benchmarks/results to append to")
    parser.add_argument("--commit")
    args = parser.parse_args()
    spec = ModelSpec.by_name(args.model)
    spec = replace(spec, num_layers=args.layers or spec.num_layers)
    dtype = DTYPES[args.dtype]
    model = build(spec, Precision.parse(args.precision), args.symmetric, dtype)
    case = {"model": args.model, "precision": args.precision, "dtype": args.dtype,
            "symmetric": args.symmetric, "layers": spec.num_layers}  # fmt: skip

    def row(bench: str, unit: str, value: float, **more: object) -> None:
        if args.out:
            write_row(args.out, bench=bench, case=case | more, unit=unit, samples=[value],
                      device=torch.cuda.get_device_name(), made_at=args.commit)  # fmt: skip

    for rows in args.rows:
        base = step_us(model, rows, args.context, dtype)
        print(f"== {args.model} {args.precision} {args.dtype} rows {rows}: step {base:.0f} us")
        row("step", "us", base, rows=rows, context=args.context)
        table, rest = of_a_layer(trace(captured(model, rows, args.context, dtype)), spec.num_layers)
        for place, (name, duration, since) in enumerate(table):
            print(f"   {since:7.2f} us to its end, {duration:7.2f} us long  {name[:60]}")
            row("step_kernel", "us", since, rows=rows, place=place, kernel=name[:60], long=duration)
        print(f"   layer {sum(t[2] for t in table):.1f} us, not layers {rest:.0f} us", flush=True)
        if args.no_without:
            continue
        parts = [part.name for part in spec.linears()] + ["head", "norm", "silu", "rope"]
        for what in [*parts, "attend", "argmax"]:
            with without(model, what):
                less = base - step_us(model, rows, args.context, dtype)
            print(f"   without {what:8} {less:7.0f} us less", flush=True)
            row("step_without", "us", less, rows=rows, without=what)
    if args.prompt:
        for name, ms in prompt_ms(model, args.prompt, dtype).items():
            print(f"== one prompt of {args.prompt}: {name} {ms:.2f} ms")
            row("prompt", "ms", ms, tokens=args.prompt, part=name)


if __name__ == "__main__":
    main()
