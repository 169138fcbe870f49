"""Loading a model on this machine's CPU: seconds, and what memory it is in afterwards.

    python benchmarks/cpu_load.py [--model llama-3.2-1b] [--bits 16,8,4] [--head-bits 16]

Writes a checkpoint of the model's shape (random weights, bfloat16), then loads all of it as one
stage, each time in a fresh process: quantised anew (`search`), quantised and kept in a layer cache
(`cached first`), read from there (`cached again`). Rows in seconds, beside those that one CPU would
be busy, which other work does not change; `memory` rows in bytes: own pages (anonymous) after
loading, with the pages of mapped files beside them and the peak of both. Files are in the system's
cache, as after a download. Compiled products are kept by the machine and are not counted.
"""

from __future__ import annotations

import argparse
import functools
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lib.rows import write_row
from transformers import AutoConfig, AutoModelForCausalLM

from llmpq.kernels.native.library import best_level, library
from llmpq.models.model_spec import ModelSpec
from llmpq.plans.plan import QuantizationForm
from llmpq.precision import Precision
from llmpq.runtime.backends.build_stage import build_stage
from llmpq.runtime.launch.plans.manual_plan import manual_plan
from llmpq.runtime.models.stage_model import DTYPES
from llmpq.runtime.weights.layer_cache import KeptLayers
from llmpq.runtime.weights.sources import CheckpointSource
from llmpq.sizes.memory import Quantization, default_head_bits
from llmpq.sizes.pool_size import PoolSize
from llmpq.workload import Workload

STARTS = ("search", "cached first", "cached again")


def write_checkpoint(spec: ModelSpec, directory: Path, device: str) -> None:
    """Save random weights of the spec's shape, in shards as they are published."""
    options = {
        "hidden_size": spec.hidden,
        "intermediate_size": spec.ffn,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "vocab_size": spec.vocab,
        "tie_word_embeddings": spec.tied_embeddings,
    }
    config = AutoConfig.for_model(spec.family, **options)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[spec.dtype])
    model.save_pretrained(directory, max_shard_size="5GB")


def load(directory: Path, bits: str, dtype: str, head_bits: int | None, cache: Path | None) -> Any:
    """Load all layers as one stage, and return seconds and this process's memory."""
    library()
    torch.ones(64, 64) @ torch.ones(64, 64)
    spec, precision = ModelSpec.from_directory(directory), Precision.parse(bits)
    work = Workload(batch=1, prompt_len=64, gen_len=16, dtype=dtype)
    form = QuantizationForm.model_validate({"head_bits": head_bits})
    plan = manual_plan(spec, work, precision=precision, quantization=form)
    started_s, cpu_s = time.perf_counter(), time.process_time()
    source: Any = CheckpointSource(directory, spec)
    if cache is not None:
        schemes = dict.fromkeys(range(spec.num_layers), Quantization().scheme(precision))
        source = KeptLayers(source, cache, schemes, torch.device("cpu"))
    size = PoolSize(num_blocks=1, slots=1, max_len=80)
    stage, report = build_stage(plan, 0, spec, source, torch.device("cpu"), size)
    seconds, cpu_s = time.perf_counter() - started_s, time.process_time() - cpu_s
    status = Path("/proc/self/status").read_text().splitlines()
    kept = ("RssAnon", "RssFile", "VmHWM")
    pages = {
        line.split(":")[0]: int(line.split()[1]) << 10 for line in status if line.startswith(kept)
    }
    del stage
    return {
        "seconds": seconds, "weights": report.weights_bytes, "own": pages["RssAnon"],
        "mapped": pages["RssFile"], "peak": pages["VmHWM"], "cpu": cpu_s,
    }  # fmt: skip


def in_child(args: argparse.Namespace, directory: Path, bits: str, cache: Path | None) -> Any:
    """Load in a process of its own; return what it says."""
    child = [sys.executable, __file__, "--load", str(directory), "--bits", bits]
    child += ["--dtype", args.dtype]
    child += [] if args.head_bits is None else ["--head-bits", str(args.head_bits)]
    child += [] if cache is None else ["--cache", str(cache)]
    done = subprocess.run(child, check=True, stdout=subprocess.PIPE, text=True, timeout=600)
    return json.loads(done.stdout.splitlines()[-1])


def measure(args: argparse.Namespace, spec: ModelSpec, directory: Path, bits: str) -> None:
    """Load several times at one precision; write a row for each kind of start."""
    cache = directory / "kept"
    starts = STARTS if bits != "16" else STARTS[:1]
    found: dict[str, list[Any]] = {start: [] for start in starts}
    for _ in range(args.repeat):
        for start in starts:
            kept = None if start == "search" else cache
            found[start].append(in_child(args, directory, bits, kept))
        shutil.rmtree(cache, ignore_errors=True)
    level = best_level()
    head = args.head_bits or default_head_bits([Precision.parse(bits)], on_cpu=True)
    for start, loads in found.items():
        case = {
            "model": args.model, "layers": spec.num_layers, "bits": int(bits),
            "head bits": head, "dtype": args.dtype, "start": start,
            "threads": torch.get_num_threads(), "level": level.name if level else "torch",
        }  # fmt: skip
        write = functools.partial(write_row, "cpu.jsonl", case=case, noisy=args.noisy)
        middle = {key: statistics.median(one[key] for one in loads) for key in loads[0]}
        write(
            bench="cpu load",
            unit="s",
            samples=[one["seconds"] for one in loads],
            baselines={"of one CPU": middle["cpu"]},
        )
        write(
            bench="cpu load memory",
            unit="B",
            samples=[one["own"] for one in loads],
            baselines={name: middle[name] for name in ("weights", "mapped", "peak")},
        )
        sizes = {key: f"{value / 2**20:.0f} MiB" for key, value in middle.items() if value > 1e6}
        print(f"{case}: {middle['seconds']:.2f} s ({middle['cpu']:.2f} of a CPU), {sizes}")


def main() -> None:
    """Write a checkpoint, load it in children, append rows to results/cpu.jsonl."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="llama-3.2-1b", help="a built-in Llama-like name")
    parser.add_argument("--layers", type=int, help="fewer layers")
    parser.add_argument("--bits", default="16,8,4")
    parser.add_argument("--head-bits", type=int, choices=(8, 16), help="as plans have")
    parser.add_argument("--dtype", default="bfloat16", help="of the activations")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--noisy", action="store_true", help="the machine has other work")
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--cache", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.load is not None:
        print(json.dumps(load(args.load, args.bits, args.dtype, args.head_bits, args.cache)))
        return
    spec = ModelSpec.by_name(args.model)
    spec = replace(spec, num_layers=args.layers) if args.layers else spec
    with tempfile.TemporaryDirectory(prefix="llmpq-load-") as name:
        write_checkpoint(spec, Path(name), "cpu")
        for bits in args.bits.split(","):
            measure(args, spec, Path(name), bits)


if __name__ == "__main__":
    main()
