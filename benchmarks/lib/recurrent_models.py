"""Whole models with recurrent layers on a GPU: a decode step beside its byte floor, a long prompt.

    python benchmarks/families_gpu.py models [--models qwen3.5-27b,...] [--precision w4a16]
        [--rows 1,8,32] [--prompt 8192] [--beside qwen3-32b] [--out FILE.jsonl]   (--prompt 0: none)

Dummy weights, steps as the engine runs them (captured where it captures them). The floor of a step
is what it has to read and write at the card's memory rate: weights (of a mixture the experts that
so many tokens are expected to hit), keys and values of its context, every request's state twice.
A prompt's row is its operations a second in matrices, beside those of a dense model (`--beside`).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path

import torch

from llmpq.devices.device_spec import canonical_kind, device_specs
from llmpq.kernels.gpu_timing import write_row
from llmpq.models.model_spec import ModelSpec
from llmpq.planner.costs.roofline import experts_hit
from llmpq.precision import KVPrecision, Precision
from llmpq.runtime.backends.backend import backend_of
from llmpq.runtime.backends.build_stage import stage_over_pool
from llmpq.runtime.backends.stage_runner import StageRunner
from llmpq.runtime.models.stage_model import StageModel
from llmpq.runtime.requests.request import PagedRow, StepKind, StepMessage
from llmpq.runtime.steps.step import message_of_rows
from llmpq.runtime.weights.dummy import CopiedLayers
from llmpq.runtime.weights.sources import RandomSource
from llmpq.sizes.kv_format import BLOCK_TOKENS
from llmpq.sizes.memory import Quantization, expert_weight_bytes
from llmpq.sizes.pool_size import PoolSize
from llmpq.sizes.state_size import state_bytes

DEVICE, DTYPE, DTYPE_BYTES = torch.device("cuda:0"), torch.bfloat16, 2
PROGRAM = "python benchmarks/families_gpu.py models"
TOKENS, STRIDE = 1000, 377
"""Numbers that every vocabulary has, and how far apart those of neighbours are: rows of one token
would go to the same experts, of which the floor counts many."""


def build(
    spec: ModelSpec,
    precision: Precision,
    *,
    symmetric: bool = False,
    head_precision: Precision = Precision.W16A16,
) -> StageModel:
    """Return a whole model with random weights."""
    scheme, layers = Quantization(symmetric=symmetric).scheme, range(spec.num_layers)
    schemes = dict.fromkeys(layers, scheme(precision))
    return StageModel.build(
        spec,
        layers,
        [precision] * spec.num_layers,
        first=True,
        last=True,
        dtype=DTYPE,
        device=DEVICE,
        scheme=scheme,
        head_precision=head_precision,
        source=CopiedLayers(RandomSource(spec, device=DEVICE), schemes, DEVICE),
        runner=backend_of(DEVICE).layers(),
    )


def stage(model: StageModel, rows: int, max_len: int, step_tokens: int) -> StageRunner:
    """Return what runs steps of so many requests."""
    size = PoolSize(num_blocks=rows * -(-max_len // BLOCK_TOKENS), slots=rows, max_len=max_len + 1)
    return stage_over_pool(
        model,
        KVPrecision.KV16,
        size,
        layers=range(len(model.layers)),
        dtype=DTYPE,
        device=DEVICE,
        step_tokens=step_tokens,
    )


def message(kind: StepKind, rows: int, start: int, count: int) -> StepMessage:
    """Return a step of rows alike, each in blocks of its own."""
    each = -(-(start + count) // BLOCK_TOKENS)
    return message_of_rows(
        kind,
        range(rows),
        [start] * rows,
        [count] * rows,
        tokens=[place * STRIDE % TOKENS for place in range(rows * count)],
        rows=[
            PagedRow(slot=row, new_blocks=tuple(range(row * each, (row + 1) * each)))
            for row in range(rows)
        ],
    )


def seconds(call: Callable[[], object], repeats: int) -> list[float]:
    """Return what calls take one after the other on the device."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    found = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1e3)
    return found


def step_bytes(
    model: StageModel, compute: StageRunner, precision: Precision, rows: int, context: int
) -> float:
    """Return the bytes that a decode step has to move."""
    spec, layers = model.spec, range(model.spec.num_layers)
    assert model.embedding is not None
    read = float(model.weight_nbytes)
    if not spec.tied_embeddings:
        read -= model.embedding.tokens_Vh.nbytes
    if spec.experts:
        unread = spec.experts - experts_hit(spec.experts, spec.experts_per_token, rows)
        one = expert_weight_bytes(spec, precision, Quantization(), DTYPE_BYTES)
        read -= unread * one * sum(spec.of_layer(layer).experts > 0 for layer in layers)
    tokens = compute.kv.nbytes / (rows * -(-(context + 1) // BLOCK_TOKENS) * BLOCK_TOKENS)
    states = state_bytes(spec, layers, slots=rows, dtype_bytes=DTYPE_BYTES)
    return read + rows * context * tokens + 2 * states


def measure_model(name: str, options: argparse.Namespace, peak: float) -> float:
    """Write a model's rows; return the operations a second of its prompt in matrices, or 0."""
    spec, precision = ModelSpec.by_name(name), Precision.parse(options.precision)
    model = build(spec, precision)
    case = {"model": name, "precision": options.precision}
    recurrent = spec.recurrent is not None
    for rows in map(int, options.rows.split(",")) if recurrent else ():
        compute = stage(model, rows, options.context + 1, rows)
        decode = message(StepKind.DECODE, rows, options.context, 1)
        samples = seconds(compute.repeatable(decode, None), 40)
        floor = step_bytes(model, compute, precision, rows, options.context) / peak
        step_s = statistics.median(samples)
        print(
            f"{name} {rows:3} requests at {options.context}: step {step_s * 1e3:.2f} ms, floor "
            f"{floor * 1e3:.2f} ms, {step_s / floor:.2f}x",
            flush=True,
        )
        if options.out:
            case |= {"rows": rows, "context": options.context}
            write_row(
                options.out,
                bench="recurrent_decode",
                case=case,
                unit="s",
                samples=samples,
                floor=floor,
                program=PROGRAM,
            )
        del compute
    if not options.prompt:
        return 0.0
    compute = stage(model, 1, options.prompt, options.prompt)
    prompt = message(StepKind.PREFILL, 1, 0, options.prompt)
    samples = seconds(compute.repeatable(prompt, None), 4)
    prompt_s = statistics.median(samples)
    work = (
        2.0
        * options.prompt
        * sum(spec.of_layer(layer).weights_per_token for layer in range(spec.num_layers))
    )
    print(f"{name} prompt of {options.prompt}: {prompt_s * 1e3:.0f} ms, "
          f"{work / prompt_s / 1e12:.0f} Tflop/s in matrices", flush=True)  # fmt: skip
    if options.out:
        case = {"model": name, "precision": options.precision, "prompt": options.prompt}
        write_row(
            options.out,
            bench="recurrent_prompt",
            case=case,
            unit="s",
            samples=samples,
            program=PROGRAM,
        )
    return work / prompt_s


def main(words: list[str], program: str) -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(prog=program, description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", default="qwen3.5-27b")
    parser.add_argument("--beside", help="a dense model, for its prompt's rate")
    parser.add_argument("--precision", default="w4a16")
    parser.add_argument("--rows", default="1,8,32")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--prompt", type=int, default=8192)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(words)
    spec = device_specs()[canonical_kind(torch.cuda.get_device_name(DEVICE))]
    peak = spec.mem_gbps * 1e9
    rates = {name: measure_model(name, options, peak) for name in options.models.split(",")}
    if options.beside:
        dense = measure_model(options.beside, options, peak)
        for name, rate in rates.items():
            print(f"{name}: {rate / dense:.2f} of the rate of {options.beside}", flush=True)
