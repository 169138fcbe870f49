"""How much longer a layer takes on a GPU whose codes are no integers in groups of 128.

Costs are measured and estimated for those. What a checkpoint's own codes take beside them is the
products' affair: their times on an H200 at N x K of Llama-3.1-8B, as medians of shapes
(d2231297:benchmarks/table_products_gpu.py, docs/lab-book/kernels.md), decode of 1 to 32 rows,
prompts of 512 rows and more. All of a layer but its attention is priced so, its launches too: near
the truth where it matters. CPUs take all forms alike. Prompts that are quicker than integers in
groups of 128 are so on Hopper only, whose kernel reads the codes; others dequantise them.
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


def as_measured(
    quantization: Quantization, precision: Precision, device: DeviceSpec
) -> Quantization:
    """Return what is estimated of a layer before it is `priced`: integers in groups of 128.

    Bytes of scales are in the measured times; they are not to be counted twice.
    """
    if device.is_cpu or form_of(quantization, precision) is None:
        return quantization
    return replace(quantization, group_size=GROUP, codes=None, stored=())


def priced(entry: LatencyEntry, device: DeviceSpec, quantization: Quantization) -> LatencyEntry:
    """Return a layer's entry as its codes' form has it."""
    form = None if device.is_cpu else form_of(quantization, entry.precision)
    if form is None:
        return entry
    own = FACTORS[form]
    factor = own[Phase.PREFILL if entry.phase is Phase.PREFILL else Phase.DECODE]
    if device.unpacks_weights:
        factor = max(factor, 1.0)
    return entry if factor == 1.0 else entry.with_products(factor)
