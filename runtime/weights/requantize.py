"""A weight that a checkpoint stores quantised, run at the precision that the plan asks for."""

from __future__ import annotations

from llmpq.kernels.formats.atom_weight import AtomWeight
from llmpq.kernels.formats.codebook_weight import CodebookWeight
from llmpq.kernels.formats.fp8_weight import Fp8Weight
from llmpq.kernels.formats.quantized_weight import QuantizedWeight
from llmpq.precision import WeightScheme
from llmpq.runtime.weights.codebook_forms import keeps_codebooks


def requantize(
    weight: QuantizedWeight | AtomWeight | Fp8Weight | CodebookWeight,
    scheme: WeightScheme | None,
    name: str,
) -> QuantizedWeight | AtomWeight | Fp8Weight | CodebookWeight:
    """Return the weight with the plan's activation bits; no scheme means as it is stored.

    Weight bits cannot change. A weight-only plan (w4a16) may run Atom's weights, with activations
    left alone: the target of a w4a4 draft. Codes of a table have 4 bits under a plan of 8, too:
    eight would say the same values.
    """
    if scheme is None or (isinstance(weight, CodebookWeight) and keeps_codebooks(scheme)):
        return weight
    atom = isinstance(weight, AtomWeight)
    stored = weight.scheme.weight_bits if isinstance(weight, AtomWeight) else weight.bits
    if stored != scheme.bits or (scheme.activation_bits < 16 and not atom):
        kind = "that meet rounded activations" if atom else "for 16-bit activations"
        raise ValueError(
            f"{name}: the checkpoint stores {stored}-bit weights {kind}, the plan asks for "
            f"w{scheme.bits}a{scheme.activation_bits}; plan with the checkpoint's precision, or "
            "run the unquantised model"
        )
    if isinstance(weight, AtomWeight):
        return weight.with_activations(scheme.activation_bits)
    return weight
