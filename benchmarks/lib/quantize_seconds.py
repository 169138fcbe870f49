"""Seconds and peak GPU memory of `llmpq-quantize --scheme w4a4` on an 8B-shaped model.

    python benchmarks/command_seconds.py quantize --out /tmp/quantised

Random weights of the architecture stand in for a checkpoint's; everything else is the command's own
way: 128 windows of 2048 tokens, GPTQ, layer by layer, each layer written to `--out`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path

import torch
from lib.rows import RESULTS
from torch import Tensor

from llmpq.kernels.gpu_timing import write_row
from llmpq.models.model_spec import ModelSpec, builtin_configs
from llmpq.precision import Precision
from llmpq.profiler.quantize.recipes import Settings
from llmpq.profiler.quantize.whole_model import QuantizeJob, quantize_model, spread
from llmpq.runtime.weights.sources import RandomSource


class RandomCheckpoint(RandomSource):
    """Random weights that look like a checkpoint: layers come from host memory."""

    root = "model."

    def __init__(self, spec: ModelSpec, directory: Path) -> None:
        super().__init__(spec, device="cuda")
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        config = dict(builtin_configs()[spec.name]) | {"num_hidden_layers": spec.num_layers}
        (directory / "config.json").write_text(json.dumps(config))
        names = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
        self.file_of = dict.fromkeys(names, "config.json")

    def layer(self, index: int, dtype: torch.dtype) -> dict[str, Tensor]:
        """Make one decoder layer's parts, on the host."""
        return {name: tensor.cpu() for name, tensor in super().layer(index, dtype).items()}

    def read(self, name: str) -> Tensor:
        """Make the embedding or a part of the head."""
        dtype = torch.bfloat16
        if name == "model.embed_tokens.weight":
            return self.embedding(dtype)["tokens.weight"]
        head = self.head(dtype)
        return head["norm.weight" if name == "model.norm.weight" else "output.weight"]


def main(words: list[str], program: str) -> None:
    """Quantise and write the row."""
    parser = argparse.ArgumentParser(prog=program, description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=128)
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--commit", help="to name in rows where git is not at hand")
    args = parser.parse_args(words)
    spec = ModelSpec.by_name(args.model)
    if args.layers is not None:
        config = dict(builtin_configs()[args.model]) | {"num_hidden_layers": args.layers}
        spec = ModelSpec.from_config(config, name=args.model)
    shutil.rmtree(args.out, ignore_errors=True)
    torch.manual_seed(0)
    job = QuantizeJob(
        spec=spec,
        precisions=spread((Precision.W4A4,), spec.num_layers),
        settings=Settings(),
        windows_WT=torch.randint(0, spec.vocab, (args.windows, args.window)),
    )
    seconds: list[float] = []

    def on_layer(index: int, size: int, resumed: bool) -> None:
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
        peak = torch.cuda.max_memory_allocated() / 1e9
        print(
            f"layer {index}: {seconds[-1]:.1f} s, {size / 1e6:.0f} MB, peak {peak:.2f} GB",
            flush=True,
        )

    started = time.perf_counter()
    with torch.inference_mode():
        quantize_model(
            job,
            RandomCheckpoint(spec, args.out.parent / "random-checkpoint"),  # type: ignore[arg-type]
            args.out,
            device="cuda",
            dtype=torch.bfloat16,
            on_layer=on_layer,
        )
    total = time.perf_counter() - started
    size = sum(path.stat().st_size for path in args.out.glob("*.safetensors"))
    write_row(
        RESULTS / "atom_quantize.jsonl",
        bench="atom_quantize",
        case={
            "model": spec.name,
            "layers": spec.num_layers,
            "windows": args.windows,
            "window": args.window,
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
            "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
            "written_bytes": size,
        },
        unit="s",
        samples=[total],
        commit=args.commit,
        program="python benchmarks/command_seconds.py quantize",
    )
    print(f"{total:.1f} s, peak {torch.cuda.max_memory_reserved() / 1e9:.2f} GB reserved")
    shutil.rmtree(args.out, ignore_errors=True)
