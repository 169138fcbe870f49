"""On a GPU: graphs are timed, and a share of its SMs is slower than all of them."""

from contextlib import ExitStack, closing
from typing import Any

import pytest
import torch

from llmpq.costs.cost_model import Phase
from llmpq.profiler.timing.cases import CaseTime, Ready, SetUp, Target, TimedCase
from llmpq.profiler.timing.latency_fit import fit_link
from llmpq.profiler.timing.worker_processes import Group, TimingProcess, time_link

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def time_layer(model: str, phase: Phase, *, sms: int | None, v: int, length: int) -> CaseTime:
    target = Target(device_kind="gpu", part="layer", phase=phase, dtype="float16")
    with Group(SetUp(model=model, cuda=True, sms=sms), copies=1, gpus=[0]) as group:
        assert group.ready.device_name == torch.cuda.get_device_name(0)
        return group.time(TimedCase(target=target, v=v, length=length))


@pytest.mark.parametrize("phase", [Phase.PREFILL, Phase.DECODE])
def test_a_layer_takes_some_microseconds(phase: Phase) -> None:
    timing = time_layer("opt-13b", phase, sms=None, v=8, length=512)
    assert 1e-5 < timing.seconds < 1e-2


def test_fewer_sms_are_slower() -> None:
    options: dict[str, Any] = {"v": 4, "length": 512}
    whole = time_layer("opt-13b", Phase.PREFILL, sms=None, **options)
    share = time_layer("opt-13b", Phase.PREFILL, sms=16, **options)
    assert share.seconds > 3 * whole.seconds


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_link_between_two_gpus_is_fast() -> None:
    set_up = SetUp(model="opt-13b", cuda=True)
    with ExitStack() as stack:
        children = [stack.enter_context(closing(TimingProcess(set_up, gpu=gpu))) for gpu in (0, 1)]
        for child in children:
            child.receive(Ready)
        found = time_link(children[0], children[1], hidden=5120, seconds=1.0, on_device=True)
    alpha_s, beta_s_per_byte = fit_link(found.sizes, found.seconds)
    assert 1e-6 < alpha_s < 2e-4
    assert 1e-12 < beta_s_per_byte < 1e-10, "10 GB/s to 1000 GB/s"
