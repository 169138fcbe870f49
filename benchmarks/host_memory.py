"""Peak host memory of a stage that loads a checkpoint, against three of its layers and 1 GiB.

    python benchmarks/host_memory.py [--model llama-3.1-8b] [--layers 6] [--bits 4]

Writes a checkpoint of the model's shape (random weights, fewer layers) with transformers, then
loads all of it as one stage in a fresh process, whose own memory is watched: anonymous and shared
pages, pinned buffers among them, of everything the process has, torch and the CUDA context
included. Pages of the checkpoint itself are the system's cache, given back when it is short, and
are not counted. One row, in bytes; its floor is the limit.
"""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from llmpq.kernels.gpu_timing import write_row
from llmpq.model_spec import ModelSpec
from llmpq.precision import Precision
from llmpq.runtime.backends.build_stage import build_stage
from llmpq.runtime.launch.plans.hand_plan import hand_plan
from llmpq.runtime.models.stage_model import DTYPES
from llmpq.runtime.weights.sources import CheckpointSource
from llmpq.units import format_size
from llmpq.workload import Workload

RESULTS = Path(__file__).parent / "results" / "fidelity.jsonl"
LAYERS_ALLOWED = 3
BESIDE_BYTES = 1 << 30
EVERY_S = 1e-3


class Watch:
    """The most anonymous and shared memory of this process since it was made."""

    def __init__(self) -> None:
        self.peak_bytes = self.first_bytes = _own_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        """Return the peak."""
        self._stop.set()
        self._thread.join()
        return max(self.peak_bytes, _own_bytes())

    def _look(self) -> None:
        while not self._stop.wait(EVERY_S):
            self.peak_bytes = max(self.peak_bytes, _own_bytes())


def _own_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    kilobytes = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith("Rss")}
    return 1024 * (int(kilobytes["RssAnon"]) + int(kilobytes["RssShmem"]))


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


def load(directory: Path, bits: str, device: torch.device) -> tuple[int, int]:
    """Return this process's memory before loading, and its peak while loading."""
    spec = ModelSpec.from_directory(directory)
    work = Workload(batch=8, prompt_len=64, gen_len=16, dtype=spec.dtype)
    plan = hand_plan(spec, work, precision=Precision.parse(bits), model_dir=str(directory))
    torch.ones(64, 64, device=device) @ torch.ones(64, 64, device=device)  # context and libraries
    watch = Watch()
    build_stage(plan, 0, spec, CheckpointSource(directory, spec), device)
    return watch.first_bytes, watch.stop()


def main() -> None:
    """Write, load in a child, write the row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="llama-3.1-8b", help="a built-in Llama-like name")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--bits", default="4")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rows", type=Path, default=RESULTS)
    parser.add_argument("--commit")
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.load is not None:
        print(*load(args.load, args.bits, torch.device(args.device)))
        return
    full = ModelSpec.by_name(args.model)
    with tempfile.TemporaryDirectory() as name:
        write_checkpoint(dataclasses.replace(full, num_layers=args.layers), Path(name), args.device)
        child = [sys.executable, __file__, "--load", name, "--bits", args.bits]
        done = subprocess.run(
            [*child, "--device", args.device], check=True, stdout=subprocess.PIPE, text=True
        )
    before, peak = (int(word) for word in done.stdout.split()[-2:])
    layer = full.layer_params * DTYPES[full.dtype].itemsize
    limit = LAYERS_ALLOWED * layer + BESIDE_BYTES
    print(
        f"{args.model}, {args.layers} layers at {args.bits} bits: {format_size(before)} before "
        f"loading, peak {format_size(peak)}; three layers and 1 GiB: {format_size(limit)}"
    )
    write_row(
        args.rows,
        bench="host_memory",
        case={"model": args.model, "layers": args.layers, "bits": args.bits, "place": "alone"},
        unit="B",
        samples=[peak],
        floor=limit,
        baselines={"before loading": before},
        commit=args.commit,
        program="python benchmarks/host_memory.py",
    )


if __name__ == "__main__":
    main()
