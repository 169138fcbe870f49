"""What the Atom benchmarks share: models with quantised layers at hand, calibration and text."""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmpq.model_spec import ModelSpec
from llmpq.profiler.atom import Recipe, layer_bytes
from llmpq.profiler.calibrate import CalibrationRun, random_windows
from llmpq.profiler.in_turn import quantize
from llmpq.profiler.inject_outliers import InjectedSource
from llmpq.runtime.generate import LocalPipeline
from llmpq.runtime.kv_cache import KVCache
from llmpq.runtime.layers import Weight
from llmpq.runtime.loader import CheckpointSource, TensorSource
from llmpq.runtime.stage_model import DTYPES
from llmpq.runtime.tokenizer import Tokenizer

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
INJECTED_FACTOR = 50.0


@dataclass(frozen=True)
class Subject:
    """A model, the text it is calibrated on and the text it is judged by."""

    name: str
    spec: ModelSpec
    source: TensorSource
    windows_WT: Tensor
    tokens: list[int]


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
class CachedPipeline(LocalPipeline):
    """A pipeline whose caches come from `make_cache(spec, layers, slots, max_len)`."""

    make_cache: Callable[[ModelSpec, int, int, int], KVCache]

    def caches(self, slots: int, max_len: int) -> list[KVCache]:
        """Return one cache per stage."""
        return [self.make_cache(self.spec, len(s.layers), slots, max_len) for s in self.stages]


def subjects(
    models: list[str], *, text: Path, num_tokens: int, windows: int, window: int
) -> list[Subject]:
    """Return every model, plain and with outliers injected."""
    found = []
    for directory in models:
        spec = ModelSpec.from_directory(directory)
        tokenizer = Tokenizer(directory)
        source = CheckpointSource(directory, spec)
        cut = random_windows(
            tokenizer.encode(calibration_text(), special=False), count=windows, length=window
        )
        tokens = tokenizer.encode(text.read_text(), special=False)[:num_tokens]
        injected = InjectedSource(source, spec, spec.hidden // 64, INJECTED_FACTOR)
        found.append(Subject(spec.name, spec, source, cut, tokens))
        found.append(Subject(f"{spec.name}-injected", spec, injected, cut, tokens))
    return found


def calibration_text(limit: int = 3_000_000) -> str:
    """Return Python's own standard library, files in a seeded order: not the held-out text."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    random.Random(0).shuffle(files)
    return "\n".join(path.read_text(errors="replace") for path in files)[:limit]


def quantized(subject: Subject, recipe: Recipe) -> ReadyLayers:
    """Quantise a subject's layers, each calibrated behind those before it."""
    run = CalibrationRun(subject.spec, subject.source, subject.windows_WT)
    layers = []
    for index in range(subject.spec.num_layers):
        layer = quantize(run, run.view(index), recipe, dtype=DTYPES[subject.spec.dtype])
        run.advance(layer)
        layers.append(layer)
    return ReadyLayers(subject.source, tuple(layers))
