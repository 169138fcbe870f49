"""What the Atom benchmarks share: models with quantised layers at hand, calibration and text."""

from __future__ import annotations

import argparse
import random
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from llmpq.kernels.atom.reference import atom_linear_reference
from llmpq.kernels.formats.quantized_weight import QuantizedWeight
from llmpq.model_spec import ModelSpec
from llmpq.profiler.quantize.layer_walk import CalibrationRun, random_windows
from llmpq.profiler.quantize.linears_in_turn import quantize
from llmpq.profiler.quantize.one_layer import Recipe, layer_bytes
from llmpq.runtime.cache.kv_cache import KVCache
from llmpq.runtime.models import layer_tensors as parts
from llmpq.runtime.models import layers
from llmpq.runtime.models.layers import DecoderLayer
from llmpq.runtime.models.linear import Weight
from llmpq.runtime.models.stage_model import DTYPES
from llmpq.runtime.step import Step
from llmpq.runtime.text.tokenizer import Tokenizer
from llmpq.runtime.weights.sources import CheckpointSource, TensorSource
from reference.inject_outliers import InjectedSource
from reference.pipeline import ReferencePipeline

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
INJECTED_FACTOR = 50.0
INJECTED_SHARE = 32
"""One channel in 32 behind every norm: as many as Atom keeps in 8 bits."""
WINDOW = 512
"""Tokens of a calibration window."""


@dataclass(frozen=True)
class Subject:
    """A model, the text it is calibrated on and the text it is judged by."""

    name: str
    spec: ModelSpec
    source: TensorSource
    windows_WT: Tensor
    tokens: list[int]
    device: torch.device
    commit: str | None

    def made(self) -> dict[str, str | None]:
        """Return what a row says of where it was made."""
        name = torch.cuda.get_device_name() if self.device.type == "cuda" else None
        return {"device": name, "made_at": self.commit}

    def pipeline(self, source: TensorSource) -> ReferencePipeline:
        """Return the model of these tensors in float32."""
        return ReferencePipeline.build(self.spec, source, device=self.device)


@dataclass(frozen=True)
class ReadyLayers:
    """A tensor source whose layers are quantised already."""

    source: TensorSource
    layers: tuple[dict[str, Any], ...]

    def embedding(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the embedding as it is."""
        return self.source.embedding(dtype)

    def layer(self, index: int, dtype: torch.dtype) -> dict[str, Any]:
        """Return a quantised layer."""
        return self.layers[index]

    def head(self, dtype: torch.dtype, *, with_output: bool = True) -> dict[str, Tensor]:
        """Return the head as it is."""
        return self.source.head(dtype, with_output=with_output)

    @property
    def nbytes(self) -> int:
        """Bytes of all layers."""
        return sum(layer_bytes(layer) for layer in self.layers)

    def changed(self, change: Callable[[Weight], Weight]) -> ReadyLayers:
        """Return the same model with every linear's weight changed."""
        layers = tuple(
            {name: t if isinstance(t, Tensor) else change(t) for name, t in layer.items()}
            for layer in self.layers
        )
        return ReadyLayers(self.source, layers)


@dataclass(frozen=True)
class CachedPipeline(ReferencePipeline):
    """A pipeline whose caches come from `make_cache(spec, layers, slots, max_len)`."""

    make_cache: Callable[[ModelSpec, int, int, int], KVCache]

    def caches(self, slots: int, max_len: int) -> list[KVCache]:
        """Return one cache per stage."""
        return [self.make_cache(self.spec, len(s.layers), slots, max_len) for s in self.stages]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare which models are measured, and where."""
    parser.add_argument("--model", action="append", help="model directory; may be repeated")
    parser.add_argument("--copy", choices=("plain", "injected"), help="default both")
    parser.add_argument("--text", type=Path, default=EXAMPLES / "heldout.txt")
    parser.add_argument(
        "--windows", type=int, default=128, help=f"calibration windows of {WINDOW} tokens (128)"
    )
    parser.add_argument("--group", type=int, choices=(32, 64, 128), default=64)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--commit", help="commit a row names, where git cannot tell")


def use_twins() -> None:
    """Have a GPU compute in float32 what the CPU does: the kernels' twins, layer by layer.

    Quality is the recipe's, not a kernel's, and not every number format here has a kernel.
    """

    def decoder_layer(
        self: DecoderLayer, x_BQh: Tensor, layer: int, step: Step, kv: KVCache
    ) -> Tensor:
        y = self.attention(self.attn_norm(x_BQh), layer, step, kv).add_(x_BQh)
        return y.add_(self.mlp(self.mlp_norm(y)))

    def restored(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
        return functional.linear(x, weight.dequantize(x.dtype), bias)

    for owner, name, twin in (
        (layers.DecoderLayer, "forward", decoder_layer),
        (layers, "atom_linear", atom_linear_reference),
        (layers, "linear", restored),
        (parts, "best_form", lambda weight: weight),
    ):
        setattr(owner, name, twin)


def subjects(args: argparse.Namespace, *, num_tokens: int) -> Iterator[Subject]:
    """Yield every model, plain and with outliers injected, as asked."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    if args.device != "cpu":
        use_twins()
    for directory in args.model or [str(EXAMPLES / "demo-7m")]:
        spec = ModelSpec.from_directory(directory)
        tokenizer = Tokenizer(directory)
        source = CheckpointSource(directory, spec)
        calibration = tokenizer.encode(calibration_text(), special=False)
        cut = random_windows(calibration, count=args.windows, length=WINDOW)
        tokens = tokenizer.encode(args.text.read_text(), special=False)[:num_tokens]
        injected = InjectedSource(source, spec, spec.hidden // INJECTED_SHARE, INJECTED_FACTOR)
        for copy, made_of in (("plain", source), ("injected", injected)):
            if args.copy in (None, copy):
                name = spec.name if copy == "plain" else f"{spec.name}-{copy}"
                device = torch.device(args.device)
                yield Subject(name, spec, made_of, cut, tokens, device, args.commit)


def calibration_text(limit: int = 3_000_000) -> str:
    """Return Python's own standard library, files in a seeded order: not the held-out text."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    random.Random(0).shuffle(files)
    return "\n".join(path.read_text(errors="replace") for path in files)[:limit]


def quantized(subject: Subject, recipe: Recipe) -> ReadyLayers:
    """Quantise a subject's layers, each calibrated behind those before it."""
    run = CalibrationRun(subject.spec, subject.source, subject.windows_WT, device=subject.device)
    layers = []
    for index in range(subject.spec.num_layers):
        layer = quantize(run, run.view(index), recipe, dtype=DTYPES[subject.spec.dtype])
        run.advance(layer)
        layers.append(layer)
    return ReadyLayers(subject.source, tuple(layers))
