"""Run calibration text through a model layer by layer and observe what enters each operator.

One layer's weights are in memory at a time, with the hidden states of all windows: a few layers at
most, whatever the model's size. The layers are the runtime's own.

B windows at once, Q tokens of a window, h hidden, K in_features, T tokens, G key/value heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from llmpq.models.model_spec import ModelSpec
from llmpq.precision import Precision
from llmpq.runtime.backends.backend import backend_of
from llmpq.runtime.cache.fresh_attention import FreshAttention
from llmpq.runtime.cache.kv_cache import AttentionInputs
from llmpq.runtime.models.layer_tensors import TensorSource
from llmpq.runtime.models.linear import Linear
from llmpq.runtime.models.stage_model import StageModel
from llmpq.runtime.steps.step import Step
from llmpq.sizes.memory import Quantization

WINDOWS_AT_ONCE = 4


class _Recorded(FreshAttention):
    """Attention within windows; it holds the keys and values [B, Q, G, D] of the last layer."""

    def attend(self, layer: int, inputs: AttentionInputs, step: Step) -> Tensor:
        """As `FreshAttention.attend`."""
        self.k_BQGD, self.v_BQGD = inputs.k_BQGD, inputs.v_BQGD
        return super().attend(layer, inputs, step)


class Observer(Protocol):
    """Hears of each layer: its weights, then inputs and cached tensors, then its end."""

    def begin(self, index: int, weights: Mapping[str, Tensor]) -> None:
        """Take the operators' unquantised weights [N, K], by name (`attention.qkv`, `mlp.down`)."""

    def on_input(self, name: str, x: Tensor) -> None:
        """Take one batch of an operator's inputs [..., K]."""

    def on_cache(self, k_TGD: Tensor, v_TGD: Tensor) -> None:
        """Take the keys and values of one window, as they are cached."""

    def end(self) -> None:
        """Finish the layer: all windows have passed."""


@torch.inference_mode()
def observe(
    spec: ModelSpec,
    source: TensorSource,
    windows: Sequence[Sequence[int]],
    observer: Observer,
    *,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    on_layer: Callable[[int], None] | None = None,
) -> None:
    """Show every layer to the observer, in order; `on_layer` is called after each."""
    tokens = torch.tensor([list(window) for window in windows], device=device)
    cache = _Recorded()
    embedding = _stage(spec, source, range(0), device, dtype)
    hidden = [embedding(batch, _step(batch), cache) for batch in tokens.split(WINDOWS_AT_ONCE)]
    del embedding
    for index in range(spec.num_layers):
        stage = _stage(spec, source, range(index, index + 1), device, dtype)
        operators = {
            name.removeprefix("layers.0."): module
            for name, module in stage.named_modules()
            if isinstance(module, Linear)
        }
        observer.begin(index, {name: _dense(module) for name, module in operators.items()})
        with _listening(operators, observer):
            for number, batch in enumerate(hidden):
                hidden[number] = stage(batch, _step(batch), cache)
                # MLA's latents are keys and values at once.
                values = cache.v_BQGD if spec.kv_vectors == 2 else cache.k_BQGD
                for k_QGD, v_QGD in zip(cache.k_BQGD, values, strict=True):
                    observer.on_cache(k_QGD, v_QGD)
        observer.end()
        if on_layer is not None:
            on_layer(index)


def cut_windows(tokens: Sequence[int], *, count: int, length: int, where: Path) -> list[list[int]]:
    """Return `count` windows spread evenly over the text, fewer if it is shorter."""
    available = len(tokens) // length
    if available < 1:
        raise ValueError(
            f"'{where}' has {len(tokens)} tokens, calibration needs a window of at least {length}; "
            "give a longer text, or a smaller --window"
        )
    chosen = min(count, available)
    starts = [length * (i * available // chosen) for i in range(chosen)]
    return [list(tokens[start : start + length]) for start in starts]


@contextmanager
def _listening(operators: Mapping[str, Linear], observer: Observer) -> Iterator[None]:
    """Hand every operator's input to the observer while the block runs."""

    def hook(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda _module, inputs: observer.on_input(name, inputs[0])

    handles = [module.register_forward_pre_hook(hook(name)) for name, module in operators.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _stage(
    spec: ModelSpec,
    source: TensorSource,
    indices: range,
    device: torch.device,
    dtype: torch.dtype,
) -> StageModel:
    """Build layers unquantised, or the embedding when there are no indices."""
    return StageModel.build(
        spec,
        indices,
        [Precision.W16A16] * len(indices),
        first=len(indices) == 0,
        last=False,
        dtype=dtype,
        device=device,
        scheme=Quantization().scheme,
        source=source,
        runner=backend_of(device).layers(),
    )


def _step(x: Tensor) -> Step:
    return Step.of_prompts(x.shape[0], x.shape[1], device=x.device)


def _dense(module: Linear) -> Tensor:
    return module.weight.dequantize(module.weight.dtype)
