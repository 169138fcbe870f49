"""Steps of one token a row of recurrent mixers: our own code beside torch's operators."""

from __future__ import annotations

import pytest
import torch

from llmpq.families.common.spec_values import Recurrent
from llmpq.kernels.native.library import library
from llmpq.runtime.cache.recurrent_states import RecurrentStates
from llmpq.runtime.models.linear import Linear
from llmpq.runtime.models.norms import Norm
from llmpq.runtime.models.recurrent import RecurrentMixer
from llmpq.runtime.steps.step import RaggedStep

pytestmark = pytest.mark.skipif(library() is None, reason="needs a C++ compiler and AVX2")
HIDDEN, SLOTS = 24, 5
DELTA = {"heads": 4, "key_heads": 2, "key_dim": 6, "value_dim": 11, "norm_first": True}
FORMS = {
    "gated delta": Recurrent(kind="gated_delta", taps=4, channels=2 * 12 + 44, **DELTA),
    "gated delta, sigmoid, shares up to 2": Recurrent(
        kind="gated_delta",
        taps=2,
        channels=2 * 12 + 44,
        gate="sigmoid",
        beta_factor=2.0,
        conv_bias=True,
        **DELTA,
    ),
    "kda": Recurrent(
        kind="kda",
        taps=4,
        channels=3 * 24,
        heads=4,
        key_heads=4,
        key_dim=6,
        value_dim=6,
        gate="sigmoid",
        low_rank=5,
    ),
    "lightning": Recurrent(
        kind="lightning",
        taps=1,
        channels=3 * 24,
        heads=3,
        key_heads=3,
        key_dim=8,
        value_dim=8,
        gate="sigmoid",
        norm_first=True,
    ),
    "mamba2": Recurrent(
        kind="mamba2",
        taps=4,
        channels=30 + 2 * 14,
        heads=6,
        key_heads=2,
        key_dim=7,
        value_dim=5,
        conv_bias=True,
        norm_groups=2,
    ),
    "mamba2, norm first, factors": Recurrent(
        kind="mamba2",
        taps=3,
        channels=30 + 2 * 7,
        heads=6,
        key_heads=1,
        key_dim=7,
        value_dim=5,
        norm_first=True,
        in_factors=(0.5, 2.0, 0.25, 1.5, 0.75),
    ),
    "mamba2, no norm": Recurrent(
        kind="mamba2",
        taps=4,
        channels=30 + 2 * 7,
        heads=6,
        key_heads=1,
        key_dim=7,
        value_dim=5,
        gated_norm=False,
    ),
    "short convolution": Recurrent(kind="short_conv", taps=3, channels=21, conv_bias=True),
}


def mixer_of(form: Recurrent, dtype: torch.dtype, biases: torch.dtype) -> RecurrentMixer:
    """Return a mixer of random weights; `biases`: dtype of steps' biases and decays."""
    torch.manual_seed(3)

    def some(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return (torch.randn(shape) * 0.5).to(of)

    delta, heads = form.is_delta, form.heads
    kda, mamba = form.kind == "kda", form.kind == "mamba2"
    steps = {"gated_delta": 2 * heads, "kda": heads + 2 * form.low_rank}.get(form.kind, 0)
    width = form.value_dim if delta else form.inner
    normed = form.gated_norm and form.kind != "short_conv"
    return RecurrentMixer(
        form,
        Linear(some(form.in_features, HIDDEN), None),
        Linear(some(HIDDEN, form.inner), None),
        some(form.channels, 1, form.taps) if form.taps > 1 else None,
        some(form.channels) if form.conv_bias else None,
        decay_H=some(heads, of=biases) if delta or mamba else None,
        step_bias_H=some(form.decays, of=biases) if delta or mamba else None,
        step_weight=some(steps, HIDDEN) if steps else None,
        skip_H=some(heads, of=biases) if mamba else None,
        norm=Norm(some(width), None, 1e-5) if normed else None,
        decay_weight=some(heads * form.key_dim, form.low_rank) if kda else None,
        gate_weight=some(form.inner, form.low_rank) if kda else None,
        fixed_decay_H=some(heads, of=torch.float32) if form.kind == "lightning" else None,
    )


class Kept:
    """A cache that keeps states alone."""

    def __init__(self, form: Recurrent, dtype: torch.dtype) -> None:
        self.states = RecurrentStates(form, num_layers=1, slots=SLOTS, dtype=dtype)
        for held in (self.states._tails, self.states._matrices):
            held.copy_(torch.randn(held.shape, generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FORMS)
def test_outputs_and_states_are_those_of_torchs_operators(name, dtype, monkeypatch):
    form = FORMS[name]
    for biases in {dtype, torch.float32}:
        mixer = mixer_of(form, dtype, biases)
        steps = [  # rows in any slots, fresh ones among them; then more rows, and padding
            RaggedStep.of_rows([3, 0], [0, 7], [1, 1], wanted=[1, 1]),
            RaggedStep.of_rows([0, 4, 3], [8, 0, 1], [1, 1, 1], wanted=[1, 1, 1], width=5),
            RaggedStep.of_rows([4], [1], [1], wanted=[1]),
        ]
        torch.manual_seed(5)
        inputs = [torch.randn(1, step.q_len, HIDDEN).to(dtype) for step in steps]
        ways = {}
        for way in ("torch", "own"):
            kept, used = Kept(form, dtype), []
            with monkeypatch.context() as patch, torch.inference_mode():
                if way == "torch":
                    patch.setattr(mixer, "native_step", lambda dtype: None)
                for step, x in zip(steps, inputs, strict=True):
                    step.memo.clear()
                    used.append(mixer.read(x, 0, step, kept)[: len(step.spans)])
            ways[way] = [*used, kept.states._tails, kept.states._matrices]
        assert mixer._steps[dtype] is not None
        near = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
        for own, other in zip(ways["own"], ways["torch"], strict=True):
            scale = max(other.float().abs().max().item() if other.numel() else 0.0, 1e-3)
            torch.testing.assert_close(own, other, rtol=near, atol=near * scale)


def test_a_step_with_a_longer_row_is_torchs(monkeypatch):
    form = FORMS["gated delta"]
    mixer = mixer_of(form, torch.float32, torch.float32)
    monkeypatch.setattr(mixer, "_step", lambda *args: pytest.fail("it has a row of two tokens"))
    step = RaggedStep.of_rows([0, 1], [3, 0], [1, 2], wanted=[1, 1])
    with torch.inference_mode():
        mixer.read(torch.randn(1, 3, HIDDEN), 0, step, Kept(form, torch.float32))
