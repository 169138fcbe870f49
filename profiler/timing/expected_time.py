"""About how long a profiling run takes, from its cases: warm-up, repeats, and what a call may take.

A call's time is that of its products at the device table's rates; attention is not counted, nor
compiling kernels, nor the links. Knows no torch and no clock.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmpq.cluster import Device
from llmpq.cost_model import Phase
from llmpq.model_spec import ModelSpec
from llmpq.profiler.timing.cases import Effort, TimedCase
from llmpq.profiler.timing.shape_grid import TIMED_LAYERS

WARM_UPS = 2
ROUNDS = {"cpu": 2, "gpu": 1}
"""Times that each case is timed (`profile_host`)."""
SET_UP_S = {"cpu": 0.05, "gpu": 0.2}
"""To make weights, caches and graphs of a case."""


def expected_s(
    spec: ModelSpec, device: Device, cases: Sequence[TimedCase], effort: Effort
) -> float:
    """Return about how many seconds the cases of a device take."""
    sort = "cpu" if device.spec.is_cpu else "gpu"
    return sum(
        ROUNDS[sort] * (SET_UP_S[sort] + _spent_s(_call_s(spec, device, case), effort))
        for case in cases
    )


def _spent_s(call_s: float, effort: Effort) -> float:
    """Return what warm-up and repeats of a call take (`stopwatch`)."""
    fewest = effort.min_repeats if call_s * effort.min_repeats <= 10 * effort.seconds else 2
    warm = min(WARM_UPS * call_s, max(call_s, effort.seconds))
    return warm + max(effort.seconds, fewest * (call_s + effort.rest_s))


def _call_s(spec: ModelSpec, device: Device, case: TimedCase) -> float:
    """Return what one call takes: the longer of computing and of reading weights."""
    target, card = case.target, device.spec
    layers = min(TIMED_LAYERS, spec.num_layers)
    if target.part == "layer":
        weights = layers * sum(shape.num_weights for shape in spec.linears())
        share = spec.experts_per_token / spec.experts if spec.experts else 1.0
        computed = layers * sum(
            shape.num_weights * (share if shape.of_expert else 1.0) for shape in spec.linears()
        )
    elif target.part == "head":
        weights, computed = spec.vocab * spec.hidden, float(spec.vocab * spec.hidden)
    else:
        weights, computed = 0, 0.0
    tokens = case.new_tokens
    if target.part == "head":
        tokens = case.v if target.phase is Phase.PREFILL else case.v * case.q_len
    cores = device.threads or 1
    rate = card.fp16_tflops * 1e12 * cores * card.matmul_efficiency
    read = weights * target.precision.weight_bits / 8
    return max(2 * computed * tokens / rate, read / (card.mem_gbps * 1e9 * card.memory_efficiency))
