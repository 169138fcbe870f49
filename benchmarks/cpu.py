"""Decode and prefill on this machine's CPU: ours, Transformers and llama.cpp in turn, in one run.

    python benchmarks/cpu.py --llama-bench PATH                  llama-3.2-1b at 16, 8 and 4 bits
    python benchmarks/cpu.py --llama-bench PATH --model qwen2.5-3b --bits 4 --batch 1,8,32
    python benchmarks/cpu.py --llama-bench PATH --bits 4 --depth 4096,16384 --kv kv16,kv4
    python benchmarks/cpu.py --model benchmarks/data/hybrid-1b --beside llama-3.2-1b --bits 8,4

PATH is llama.cpp's `llama-bench`; `llama-batched-bench` beside it serves batches. Both build from
the sdist of `llama-cpp-python` (in vendor/llama.cpp: `cmake -B build -DGGML_NATIVE=ON`, then
`cmake --build build --target llama-bench llama-batched-bench`). Weights are random, in a GGUF file
that the `gguf` package writes here. Programs alternate, so that other load falls on all of them; a
row is the median of ours, in the pool of KV blocks that runs serve from, with theirs as baselines.
`--head`: what llama.cpp's output matrix is: quantised like its layers (`same`), `f16`, or `q6_k`,
what its own quantiser writes beside Q4_0; ours is what plans have, 8 bits where layers have 8 or
fewer. `--depth`: decode steps behind so many tokens,
llama.cpp's with its F16 cache, filled by `--fill-threads`; a long one once for a case's rows.
`--beside`: another model of ours in turn; its baseline is its time times the first one's bytes of
weights that a step reads over its own.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lib.rows import write_row
from torch import Tensor

from llmpq.kernels.native import library
from llmpq.models.model_spec import ModelSpec
from llmpq.precision import KVPrecision, Precision
from llmpq.runtime.cache.kv_cache import PagedKV
from llmpq.runtime.cache.paged_by_precision import make_paged_kv
from llmpq.runtime.cache.recurrent_states import with_states
from llmpq.runtime.models.linear import round_activations
from llmpq.runtime.models.sampling import likeliest
from llmpq.runtime.models.stage_model import DTYPES
from llmpq.runtime.requests.request import PagedRow
from llmpq.runtime.steps.step import RaggedStep
from llmpq.runtime.weights.dummy import CopiedLayers
from llmpq.runtime.weights.sources import RandomSource
from llmpq.sizes.kv_format import BLOCK_TOKENS, packed_blocks
from llmpq.sizes.memory import Quantization, default_head_bits
from llmpq.sizes.pool_size import PoolSize
from reference.pipeline import ReferencePipeline

KINDS = {16: "F16", 8: "Q8_0", 4: "Q4_0"}
"""llmpq's bits -> llama.cpp's kind of file."""
Seconds = tuple[float, float]
"""Of the whole prefill, of one decode step."""


def write_gguf(spec: ModelSpec, kind: str, head: str, path: Path) -> None:
    """Write a model of random weights; every layer has the same bytes."""
    import gguf

    biased = any(shape.bias for shape in spec.linears() if shape.name == "qkv")
    writer = gguf.GGUFWriter(path, "qwen2" if biased else "llama")
    writer.add_context_length(spec.max_positions)
    writer.add_embedding_length(spec.hidden)
    writer.add_block_count(spec.num_layers)
    writer.add_feed_forward_length(spec.ffn)
    writer.add_head_count(spec.heads)
    writer.add_head_count_kv(spec.kv_heads)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    writer.add_rope_freq_base(spec.rope_theta or 10000.0)
    writer.add_vocab_size(spec.vocab)
    writer.add_tokenizer_model("none")

    def matrix(name: str, n: int, k: int, kind: str) -> None:
        number = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, _random_matrix(n, k, kind), raw_dtype=number)

    def ones(name: str, size: int) -> None:
        writer.add_tensor(name, np.ones(size, np.float32))

    head_kind = kind if head == "same" else head.upper()
    matrix("token_embd.weight", spec.vocab, spec.hidden, head_kind)
    if not spec.tied_embeddings:
        matrix("output.weight", spec.vocab, spec.hidden, head_kind)
    ones("output_norm.weight", spec.hidden)
    q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    for layer in range(spec.num_layers):
        at = f"blk.{layer}."
        for part, n, k in (
            ("attn_q", q, spec.hidden), ("attn_k", kv, spec.hidden), ("attn_v", kv, spec.hidden),
            ("attn_output", spec.hidden, q), ("ffn_gate", spec.ffn, spec.hidden),
            ("ffn_up", spec.ffn, spec.hidden), ("ffn_down", spec.hidden, spec.ffn),
        ):  # fmt: skip
            matrix(f"{at}{part}.weight", n, k, kind)
            if biased and part in ("attn_q", "attn_k", "attn_v"):
                ones(f"{at}{part}.bias", n)
        ones(f"{at}attn_norm.weight", spec.hidden)
        ones(f"{at}ffn_norm.weight", spec.hidden)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _random_matrix(n: int, k: int, kind: str) -> np.ndarray:
    random = np.random.default_rng(n + k)
    if kind == "F16":
        return np.resize(random.normal(0, 0.02, 1 << 20).astype(np.float16), (n, k))
    weights, block, at = {"Q4_0": (32, 18, 0), "Q8_0": (32, 34, 0), "Q6_K": (256, 210, 208)}[kind]
    shape = (n, k // weights, block)
    blocks = np.resize(random.integers(0, 256, (1 << 15, block), np.uint8), shape)
    blocks[:, :, at : at + 2] = np.array([0.003], np.float16).view(np.uint8)  # the scale
    return blocks.reshape(n, -1)


def our_model(spec: ModelSpec, bits: int, dtype: str, head_bits: int) -> ReferencePipeline:
    """Build a model of random weights, all layers of one precision."""
    precision = Precision.parse(str(bits))
    scheme = Quantization().scheme
    source = CopiedLayers(
        RandomSource(spec), dict.fromkeys(range(spec.num_layers), scheme(precision)),
        torch.device("cpu"),
    )  # fmt: skip
    return ReferencePipeline.build(
        spec,
        source,
        precisions=[precision] * spec.num_layers,
        dtype=DTYPES[dtype],
        head_precision=Precision.parse(str(head_bits)),
    )


@torch.inference_mode()
def time_ours(model: ReferencePipeline, batch: int, prompt: int, new: int) -> Seconds:
    """Time one prefill and the mean of `new` decode steps, in the pool that runs serve from."""
    pool = pool_of(model, batch, prompt + new, KVPrecision.KV16)
    tokens = torch.randint(1, model.spec.vocab, (1, batch * prompt))
    start_s = time.perf_counter()
    one_step(model, pool, tokens, [0] * batch, [prompt] * batch)
    prefill_s = time.perf_counter() - start_s
    start_s = time.perf_counter()
    for index in range(new):
        one_step(model, pool, tokens[:, :batch], [prompt + index] * batch, [1] * batch)
    return prefill_s, (time.perf_counter() - start_s) / new


def time_alike(
    other: ReferencePipeline, model: ReferencePipeline, batch: int, prompt: int, new: int
) -> Seconds:
    """Time another model of ours, and return what it would take with as many bytes of weights."""
    size = _bytes_read(model) / _bytes_read(other)
    prefill_s, step_s = time_ours(other, batch, prompt, new)
    return prefill_s * size, step_s * size


def _bytes_read(model: ReferencePipeline) -> int:
    """Return the bytes of weights that a step reads: all but the table of token embeddings."""
    (stage,) = model.stages
    assert stage.embedding is not None
    return stage.weight_nbytes - stage.embedding.tokens_Vh.nbytes


@torch.inference_mode()
def time_ours_behind(
    model: ReferencePipeline, batch: int, depth: int, new: int, kv: KVPrecision
) -> Seconds:
    """Time decode steps of rows that have `depth` tokens in the pool, of any values."""
    pool = pool_of(model, batch, depth + new + 1, kv, start=depth)
    tokens = torch.randint(1, model.spec.vocab, (1, batch))
    start_s = time.perf_counter()
    for index in range(new + 1):
        if index == 1:  # the first has what is new to warm up
            start_s = time.perf_counter()
        one_step(model, pool, tokens, [depth + index] * batch, [1] * batch)
    return 0.0, (time.perf_counter() - start_s) / new


def pool_of(
    model: ReferencePipeline, batch: int, length: int, kv: KVPrecision, *, start: int = 0
) -> PagedKV:
    """Return a pool whose rows have blocks for `length` tokens, `start` of them there."""
    blocks = -(-length // BLOCK_TOKENS)
    size = PoolSize(num_blocks=batch * blocks, slots=batch, max_len=length, prefix_cache=False)
    spec = model.spec
    attending = [layer for layer in range(spec.num_layers) if spec.has_kv(layer)]
    pool = make_paged_kv(spec, kv, size, layers=attending, dtype=model.dtype)
    pool = with_states(
        pool, spec, num_layers=sum(map(spec.has_state, range(spec.num_layers))), slots=batch,
        snapshots=0, dtype=model.dtype, device="cpu",
    )  # fmt: skip
    own = [tuple(range(row, batch * blocks, batch)) for row in range(batch)]
    given = blocks if kv is KVPrecision.KV16 else packed_blocks(size.max_len)
    rows = [PagedRow(slot=row, new_blocks=own[row][:given]) for row in range(batch)]
    pool.take_rows(rows, [start] * batch)
    return pool


def one_step(
    model: ReferencePipeline, pool: PagedKV, tokens: Tensor, starts: list[int], counts: list[int]
) -> None:
    """Run a step of all rows to its next tokens."""
    (stage,) = model.stages
    slots, wanted = list(range(len(starts))), [1] * len(starts)
    step = RaggedStep.of_rows(slots, starts, counts, wanted=wanted, width=sum(counts))
    likeliest(stage.logits(stage(tokens, step, pool), step))


def transformers_model(spec: ModelSpec, dtype: str) -> Any:
    """Build Transformers' Llama of the same shape, random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=spec.hidden, intermediate_size=spec.ffn, num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.heads, num_key_value_heads=spec.kv_heads, vocab_size=spec.vocab,
        head_dim=spec.head_dim, tie_word_embeddings=spec.tied_embeddings,
    )  # fmt: skip
    before = torch.get_default_dtype()
    torch.set_default_dtype(DTYPES[dtype])
    try:
        return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


@torch.inference_mode()
def time_transformers(model: Any, batch: int, prompt: int, new: int) -> Seconds:
    """Time one prefill and the mean of `new` decode steps."""
    tokens = torch.randint(1, model.config.vocab_size, (batch, prompt))
    start_s = time.perf_counter()
    out = model(tokens, use_cache=True, logits_to_keep=1)
    prefill_s = time.perf_counter() - start_s
    start_s = time.perf_counter()
    for _ in range(new):
        out = model(tokens[:, :1], past_key_values=out.past_key_values, use_cache=True)
    return prefill_s, (time.perf_counter() - start_s) / new


def time_llama(bench: Path, path: Path, batch: int, prompt: int, new: int, threads: int) -> Seconds:
    """Ask llama.cpp's own program for tokens/s, and return seconds."""
    shared = ["-m", str(path), "-t", str(threads)]
    if batch == 1:
        command = [str(bench), *shared, "-p", str(prompt), "-n", str(new), "-r", "1", "-o", "jsonl"]
        first, second = _json_lines(command)
        return prompt / first["avg_ts"], 1 / second["avg_ts"]
    command = [
        str(bench.with_name("llama-batched-bench")), *shared, "-npp", str(prompt), "-ntg", str(new),
        "-npl", str(batch), "-c", str(batch * (prompt + new)), "--output-format", "jsonl",
    ]  # fmt: skip
    (line,) = _json_lines(command)
    return line["t_pp"], line["t_tg"] / new


def time_llama_behind(
    bench: Path, path: Path, batch: int, depth: int, new: int, threads: int, fill_threads: int
) -> Seconds:
    """Ask llama.cpp for decode steps behind `depth` tokens."""
    command = [
        str(bench.with_name("llama-batched-bench")), "-m", str(path), "-t", str(threads),
        "-tb", str(fill_threads), "-npp", str(depth), "-ntg", str(new), "-npl", str(batch),
        "-c", str(batch * (depth + new)), "--output-format", "jsonl",
    ]  # fmt: skip
    (line,) = _json_lines(command)
    return 0.0, line["t_tg"] / new


time_llama_once = functools.cache(time_llama_behind)
"""What the first run found: filling a long cache takes minutes."""
_LONG = 2048


def _json_lines(command: list[str]) -> list[dict[str, Any]]:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise SystemExit(f"{command[0]} ended with code {done.returncode}: {done.stderr[-500:]}")
    return [json.loads(line) for line in lines]


def measure(
    case: Mapping[str, Any], programs: Mapping[str, Callable[[], Seconds]], repeat: int, noisy: bool
) -> None:
    """Run the programs in turn, once to warm up; write a row for each phase."""
    samples: dict[str, list[Seconds]] = {name: [] for name in programs}
    for index in range(repeat + 1):
        for name, program in programs.items():
            seconds = program()
            if index:
                samples[name].append(seconds)
    for phase, name in enumerate(("prefill", "decode step")):
        if case["depth"] and name == "prefill":
            continue
        times = {who: [sample[phase] for sample in runs] for who, runs in samples.items()}
        medians = {who: statistics.median(values) for who, values in times.items()}
        write_row(
            "cpu.jsonl",
            bench=f"cpu {name}",
            case=dict(case),
            unit="s",
            samples=times["ours"],
            baselines={who: value for who, value in medians.items() if who != "ours"},
            noisy=noisy,
        )
        ratios = {w: f"{v / medians['ours']:.2f}x" for w, v in medians.items() if w != "ours"}
        print(f"{case} {name}: ours {medians['ours'] * 1e3:.1f} ms; theirs / ours: {ratios}")


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _names(text: str) -> list[str]:
    return text.split(",")


def main() -> None:
    """Measure and append rows to results/cpu.jsonl."""
    levels = [level.name for level in library.usable_levels()]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--llama-bench", type=Path, help="llama.cpp's program; left out without")
    parser.add_argument("--model", default="llama-3.2-1b", help="a built-in model's shape, or DIR")
    parser.add_argument("--beside", help="another model's shape, in turn")
    parser.add_argument("--layers", type=int, help="fewer layers, of all programs")
    parser.add_argument("--bits", type=_numbers, default=[16, 8, 4])
    parser.add_argument("--batch", type=_numbers, default=[1])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=16)
    parser.add_argument("--depth", type=_numbers, default=[0], help="tokens before the new ones")
    parser.add_argument("--kv", type=_names, default=["kv16"], help="of ours, with --depth")
    parser.add_argument("--cpu-activations", choices=("exact", "int8"), default="exact")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16", help="of ours")
    parser.add_argument("--level", choices=levels, help="force our dispatch")
    parser.add_argument("--head-bits", type=int, choices=(4, 8, 16), help="of ours (plans: 8, 16)")
    parser.add_argument("--llama-build", default="", help="what llama.cpp was compiled for")
    parser.add_argument("--fill-threads", type=int, help="of llama.cpp with --depth (--threads)")
    parser.add_argument("--head", choices=("same", "f16", "q6_k"), default="same")
    parser.add_argument("--transformers", action="store_true", help="measure it, too (16 bits)")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--noisy", action="store_true", help="the machine has other work")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.level is not None:
        level = library.LEVELS[args.level]
        library.best_level = lambda: level  # type: ignore[assignment]
    spec = spec_of(args.model)
    spec = replace(spec, num_layers=args.layers) if args.layers else spec
    with tempfile.TemporaryDirectory(prefix="llmpq-gguf-") as folder:
        for bits in args.bits:
            measure_bits(args, spec, bits, Path(folder) / f"{bits}.gguf")


def spec_of(name: str) -> ModelSpec:
    """Return a built-in model, or that of a directory."""
    return ModelSpec.from_directory(name) if Path(name).is_dir() else ModelSpec.by_name(name)


def measure_bits(args: argparse.Namespace, spec: ModelSpec, bits: int, path: Path) -> None:
    """Measure all batches at one bit width."""
    model = our_model(spec, bits, args.dtype, _head_bits(args, bits))
    hf = transformers_model(spec, args.dtype) if args.transformers and bits == 16 else None
    llama = args.llama_bench is not None and bits in KINDS
    if llama:
        write_gguf(spec, KINDS[bits], args.head, path)
    if args.cpu_activations == "int8":
        round_activations(model.stages[0])
    other = None
    if args.beside:
        other = our_model(spec_of(args.beside), bits, args.dtype, _head_bits(args, bits))
    for batch in args.batch:
        for depth in args.depth:
            programs = _programs(args, model, hf, path if llama else None, (bits, batch, depth))
            case = _case(args, spec, bits, batch, depth)
            if other is not None and not depth:
                shape = (batch, args.prompt, args.new)
                programs[f"{args.beside}, bytes alike"] = functools.partial(
                    time_alike, other, model, *shape
                )
            for name in args.kv if depth else ["kv16"]:
                if depth:
                    behind = (batch, depth, args.new, KVPrecision.parse(name))
                    programs["ours"] = functools.partial(time_ours_behind, model, *behind)
                measure(case | {"kv": name}, programs, args.repeat, args.noisy)
    path.unlink(missing_ok=True)


def _programs(
    args: argparse.Namespace, model: ReferencePipeline, hf: Any, path: Path | None,
    size: tuple[int, int, int],
) -> dict[str, Callable[[], Seconds]]:  # fmt: skip
    bits, batch, depth = size
    shape = (batch, args.prompt, args.new)
    programs: dict[str, Callable[[], Seconds]] = {
        "ours": functools.partial(time_ours, model, *shape)
    }
    if hf is not None and not depth:
        programs["transformers"] = functools.partial(time_transformers, hf, *shape)
    if path is not None:
        timed = functools.partial(time_llama, args.llama_bench, path, *shape, args.threads)
        if depth:
            threads = args.threads, args.fill_threads or args.threads
            ask = time_llama_behind if depth < _LONG else time_llama_once
            timed = functools.partial(ask, args.llama_bench, path, batch, depth, args.new, *threads)
        programs[f"llama.cpp {KINDS[bits]}"] = timed
    return programs


def _head_bits(args: argparse.Namespace, bits: int) -> int:
    """Return the bits of our output matrix: as asked, or as a plan for this CPU has them."""
    chosen: int | None = args.head_bits
    return chosen or default_head_bits([Precision.parse(str(bits))], on_cpu=True)


def _case(
    args: argparse.Namespace, spec: ModelSpec, bits: int, batch: int, depth: int
) -> dict[str, Any]:
    used = library.best_level()
    return {
        "model": args.model, "layers": spec.num_layers, "bits": bits, "dtype": args.dtype,
        "batch": batch, "prompt": 0 if depth else args.prompt, "depth": depth, "new": args.new,
        "threads": args.threads, "level": used.name if used else "torch",
        "llama build": args.llama_build,
        "llama head": args.head, "head bits": _head_bits(args, bits),
        "cpu activations": args.cpu_activations, "onednn": os.environ.get("ONEDNN_MAX_CPU_ISA"),
    }  # fmt: skip


if __name__ == "__main__":
    main()
