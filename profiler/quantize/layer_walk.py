"""Calibration text through a model, layer by layer, each layer quantised before the next one runs.

What enters a layer comes from layers already quantised, as it will when the model runs. One
layer's weights and one Hessian per linear are in memory at a time, with the hidden states of all
windows, whatever the model's size.

W windows, T tokens of a window, h hidden, K in_features.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from llmpq.kernels.weights.weight import Weight
from llmpq.models.model_spec import ModelSpec
from llmpq.runtime.backends.backend import backend_of
from llmpq.runtime.cache.fresh_attention import FreshAttention
from llmpq.runtime.models.layer_tensors import LayerTensors, TensorSource
from llmpq.runtime.models.layers import Attention, DecoderLayer
from llmpq.runtime.models.linear import Linear
from llmpq.runtime.models.wiring import Wiring
from llmpq.runtime.steps.step import Step

WINDOWS_AT_ONCE = 4
MAX_WINDOWS = 1 << 14
"""More than any recipe asks for: a slip of the keyboard should not fill the memory."""


class Hessian:
    """X^T Z of one linear, summed in float32: of its input with itself, or with another input."""

    def __init__(self, in_features: int, device: torch.device) -> None:
        self.sum_KK = torch.zeros(in_features, in_features, device=device)
        self.tokens = 0

    def add(self, x: Tensor, other: Tensor | None = None) -> None:
        """Add the tokens of x [..., K], or of the pair x, other."""
        x_TK = x.detach().reshape(-1, x.shape[-1]).float()
        z_TK = x_TK if other is None else other.detach().reshape(x_TK.shape).float()
        with _tensor_cores():
            self.sum_KK.addmm_(x_TK.t(), z_TK)
        self.tokens += x_TK.shape[0]


@dataclass(frozen=True, kw_only=True)
class LayerView:
    """One layer's host tensors by part name and the Hessians of its linears, by linear name."""

    index: int
    tensors: Mapping[str, Tensor]
    hessians: Mapping[str, Hessian]
    norms_go_on: bool = False
    """What norms give goes on in the residual stream, beside the linears that read it."""


class CalibrationRun:
    """The hidden states of all windows, moved through the model one layer at a time."""

    def __init__(
        self,
        spec: ModelSpec,
        source: TensorSource,
        windows_WT: Tensor,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.spec = spec
        self.source = source
        self.dtype = dtype
        self.device = torch.device(device)
        self._index = 0
        """The layer that is being quantised: the one that `view` read last."""
        self._wiring = Wiring(spec, self.device, backend_of(self.device).layers())
        embedding = self._wiring.embedding(self._parts(source.embedding(dtype)))
        # Hidden states stay where the layers run: 128 windows of 2048 tokens of an 8B model take
        # 2.1 GB in 16 bits.
        batches = windows_WT.split(WINDOWS_AT_ONCE)
        self._steps = [Step.of_prompts(*tokens.shape, device=self.device) for tokens in batches]
        self._hidden = [
            embedding(tokens.to(self.device), step)
            for tokens, step in zip(batches, self._steps, strict=True)
        ]

    def view(self, index: int) -> LayerView:
        """Read layer `index`, run it unquantised and return what its linears saw."""
        self._index = index
        tensors = self.source.layer(index, self.dtype)
        layer = self._layer(tensors)
        found = {
            name: Hessian(tensors[f"{name}.weight"].shape[1], self.device)
            for name in linears(layer)
        }
        with _watching(layer, lambda name, x: found[name].add(x)):
            for x, step in self._batches:
                layer(x, 0, step, FRESH)
        norms_go_on = self.spec.normed_stream is not None
        return LayerView(index=index, tensors=tensors, hessians=found, norms_go_on=norms_go_on)

    def inputs(self, tensors: Mapping[str, Tensor | Weight], name: str) -> Iterator[Tensor]:
        """Yield what a layer of these tensors feeds its linear `name`, [T, K], batch by batch."""
        layer = self._layer(tensors)
        for x, step in self._batches:
            seen: list[Tensor] = []

            def keep(found: str, given: Tensor, seen: list[Tensor] = seen) -> None:
                if found == name:
                    seen.append(given)
                    raise _EnoughSeen

            with _watching(layer, keep), suppress(_EnoughSeen):
                layer(x, 0, step, FRESH)
            yield seen[0].reshape(-1, seen[0].shape[-1])

    def advance(self, tensors: Mapping[str, Tensor | Weight]) -> None:
        """Replace the hidden states by what a layer of these tensors makes of them."""
        layer = self._layer(tensors)
        for number, (x, step) in enumerate(self._batches):
            self._hidden[number] = layer(x, 0, step, FRESH)

    @property
    def _batches(self) -> list[tuple[Tensor, Step]]:
        """Hidden states of windows, with the step whose memo has what layers leave to others."""
        return list(zip(self._hidden, self._steps, strict=True))

    def _layer(self, tensors: Mapping[str, Tensor | Weight]) -> DecoderLayer:
        return self._wiring.layer(self._parts(tensors), self._index)

    def _parts(self, tensors: Mapping[str, Tensor | Weight]) -> LayerTensors:
        return LayerTensors(
            tensors=tensors,
            scheme=None,
            dtype=self.dtype,
            device=self.device,
            norm_eps=self.spec.norm_eps,
        )


class _EnoughSeen(Exception):
    """Ends a forward whose remainder is not needed."""


FRESH = FreshAttention()


def linears(layer: DecoderLayer) -> dict[str, Linear]:
    """Return a layer's linears by part name: qkv, qk or q, o, gate_up or up, experts.0.down, ..."""
    found = {}
    for path, part in layer.named_modules():
        if isinstance(part, Linear):
            before, _, last = path.rpartition(".")
            owner = layer.get_submodule(before)
            called = owner.called if isinstance(owner, Attention) and last == "qkv" else last
            name = f"{before}.{called}".partition(".")[2]
            name = name.removeprefix("attention.").removeprefix("recurrent.")
            found[name.replace("index.", "index_")] = part
    return found


def random_windows(tokens: Sequence[int], *, count: int, length: int, seed: int = 0) -> Tensor:
    """Return `count` windows [W, T] at seeded random offsets of a token stream."""
    if not 1 <= count <= MAX_WINDOWS or length < 1:
        raise ValueError(
            f"got {count} calibration windows of {length} tokens, expected 1 to {MAX_WINDOWS} "
            "windows of at least one token"
        )
    if len(tokens) < length:
        raise ValueError(
            f"the calibration text has {len(tokens)} tokens, one window takes {length}; give a "
            "longer text or a smaller --window"
        )
    rng = random.Random(seed)
    starts = [rng.randrange(len(tokens) - length + 1) for _ in range(count)]
    return torch.tensor([list(tokens[start : start + length]) for start in starts])


@contextmanager
def _tensor_cores() -> Iterator[None]:
    """Let float32 products use tensor cores: TF32 holds 16-bit inputs exactly."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def _watching(layer: DecoderLayer, on_input: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Call `on_input(name, x)` with the input of every linear while the block runs."""

    def hook(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda _, inputs: on_input(name, inputs[0])

    with ExitStack() as stack:
        for name, linear in linears(layer).items():
            stack.callback(linear.register_forward_pre_hook(hook(name)).remove)
        yield
