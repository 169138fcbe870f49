"""Models whose layers differ are timed kind by kind; a layer takes the mean."""

from __future__ import annotations

import pytest
import torch

from llmpq.costs.cost_model import Phase
from llmpq.models.model_spec import ModelSpec
from llmpq.profiler.timing.cases import CaseTime, Effort, Part, Sampling, Target, TimedCase
from llmpq.profiler.timing.timed_layers import TimedModel, kinds_of
from llmpq.sizes.memory import Quantization
from reference.unlike_layers import DENSE, NANO, NEXT

pytestmark = pytest.mark.cpu
ONCE = Effort(seconds=1e-4, min_repeats=1)


@pytest.mark.parametrize(
    ("spec", "counts"),
    [
        (ModelSpec.by_name("qwen3-next-80b-a3b"), {("recurrent", 0): 36, ("attention", 0): 12}),
        (
            ModelSpec.by_name("nemotron-3-nano-30b-a3b"),
            {("recurrent", 0): 23, ("none", 0): 23, ("attention", 0): 6},
        ),
        (
            ModelSpec.by_name("gemma-4-31b"),
            {("attention", 1024): 50, ("attention", 0): 10},
        ),
        (ModelSpec.by_name("llama-3.1-8b"), {("attention", 0): 32}),
    ],
)
def test_every_layer_is_of_a_kind(spec: ModelSpec, counts: dict[tuple[str, int], int]) -> None:
    found = {(one.mixer, one.widest_window): count for one, count in kinds_of(spec).items()}
    assert found == counts
    for one in kinds_of(spec):
        layers = range(one.num_layers)
        assert len({(one.mixer_of(n), one.has_state(n), one.has_kv(n)) for n in layers}) == 1


@pytest.mark.parametrize("spec", [NEXT, DENSE, NANO], ids=lambda spec: spec.name)
def test_all_phases_are_timed_again_and_again(spec: ModelSpec) -> None:
    """A verify's drafts are noted anew each time."""
    torch.set_num_threads(1)
    timed = TimedModel(spec, torch.device("cpu"), Quantization(), Sampling())
    shapes: list[tuple[Phase, dict[str, int]]] = [
        (Phase.DECODE, {"length": 6}),
        (Phase.PREFILL, {"length": 3}),
        (Phase.PREFILL, {"length": 2, "start": 5}),
        (Phase.VERIFY, {"length": 9, "q_len": 4}),
    ]
    parts: tuple[Part, ...] = ("layer", "embedding", "head")
    for phase, sizes in shapes:
        for part in parts:
            target = Target(device_kind="c", part=part, phase=phase, dtype="float32")
            timing = timed.time(TimedCase(target=target, v=2, **sizes), ONCE)
            assert timing.seconds > 0
            assert part != "layer" or timing.layers == spec.num_layers


def test_a_layer_takes_the_mean_of_its_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of four layers are recurrent here."""
    own = TimedModel.time
    times = {"recurrent": 1e-3, "attention": 5e-3}

    def time(self: TimedModel, case: TimedCase, effort: Effort) -> CaseTime:
        if len(kinds_of(self.spec)) > 1:
            return own(self, case, effort)
        s = times[self.spec.mixer_of(0)]
        return CaseTime(seconds=s, low_s=s, high_s=2 * s, repeats=7, layers=4)

    monkeypatch.setattr(TimedModel, "time", time)
    timed = TimedModel(NEXT, torch.device("cpu"), Quantization(), Sampling())
    target = Target(device_kind="c", part="layer", phase=Phase.DECODE, dtype="float32")
    found = timed.time(TimedCase(target=target, v=2, length=9), ONCE)
    assert found.seconds == pytest.approx((3 * 1e-3 + 5e-3) / 4)
    assert found.high_s == pytest.approx(2 * found.seconds) and found.repeats == 7


def test_layers_that_read_others_are_refused() -> None:
    spec = ModelSpec.by_name("gemma-4-e2b")
    with pytest.raises(ValueError, match="layers that read what others made"):
        TimedModel(spec, torch.device("cpu"), Quantization(), Sampling())
