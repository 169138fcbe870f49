"""Time factors of GPU layers whose codes are not integers in groups of 128.

Costs are measured and estimated for integers in groups of 128. A layer with other codes (a
codebook, E4M3, small groups) takes a factor longer: medians over the shapes of Llama-3.1-8B on an
H200 (d2231297:benchmarks/table_products_gpu.py, docs/lab-book/kernels.md), decode of 1 to 32 rows,
prompts of 512 rows and more. The factor is on everything of a layer but its attention. Factors
below one are Hopper's, whose kernel reads the codes; other GPUs dequantise them and get at least
one. CPUs take all forms alike.
"""

from __future__ import annotations

from dataclasses import replace

from llmpq.cost_model import LatencyEntry, Phase
from llmpq.devices.device_spec import DeviceSpec
from llmpq.memory import Quantization
from llmpq.precision import Precision

GROUP = 128
FACTORS: dict[str, dict[Phase, float]] = {
    "small": {Phase.DECODE: 1.06, Phase.PREFILL: 0.95},
    "small3": {Phase.DECODE: 1.10, Phase.PREFILL: 1.20},
    "mxfp4": {Phase.DECODE: 1.06, Phase.PREFILL: 0.93},
    "nvfp4": {Phase.DECODE: 1.18, Phase.PREFILL: 1.18},
    "nf4": {Phase.DECODE: 1.62, Phase.PREFILL: 1.11},
    "fp4": {Phase.DECODE: 1.62, Phase.PREFILL: 1.11},
    "iq4": {Phase.DECODE: 1.69, Phase.PREFILL: 1.13},
    "e4m3": {Phase.DECODE: 1.13, Phase.PREFILL: 1.09},
}
"""Form -> phase -> time over that of integers of as many bits in groups of 128 (H200)."""
BITS = {"e4m3": 8}
"""Bits of a form; of others 4."""


def form_of(quantization: Quantization, precision: Precision) -> str | None:
    """Return the form of a layer's codes; None for 16 bits and integers in groups of 128."""
    if precision.activation_bits != 16 or precision.weight_bits not in (3, 4, 8):
        return None
    codes = quantization.codes
    if codes is not None and BITS.get(codes, 4) == precision.weight_bits:
        return codes
    small = quantization.group_size is not None and quantization.group_size < GROUP
    if not small:
        return None
    return "small3" if precision.weight_bits == 3 else "small"


def as_group_128(
    quantization: Quantization, precision: Precision, device: DeviceSpec
) -> Quantization:
    """Return the settings that a layer's cost is estimated at: integers in groups of 128.

    `FACTORS` were measured with the bytes of scales: those are not counted twice.
    """
    if device.is_cpu or form_of(quantization, precision) is None:
        return quantization
    return replace(quantization, group_size=GROUP, codes=None, stored=())


def with_code_factor(
    entry: LatencyEntry, device: DeviceSpec, quantization: Quantization
) -> LatencyEntry:
    """Return a layer's entry with the factor of its codes."""
    form = None if device.is_cpu else form_of(quantization, entry.precision)
    if form is None:
        return entry
    own = FACTORS[form]
    factor = own[Phase.PREFILL if entry.phase is Phase.PREFILL else Phase.DECODE]
    if device.unpacks_weights:
        factor = max(factor, 1.0)
    return entry if factor == 1.0 else entry.with_products(factor)
