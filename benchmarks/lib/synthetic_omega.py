"""Writes the synthetic omega files of `clusters/paper/`: no weights were looked at.

omega[layer, bits] = total_3bit * w[layer] * f[bits] / (sum w * f[3]), f[bits] = (2^bits - 1)^-2
(the variance of rounding) and w log-normal around a rise with depth, seeded by the model's name.
`total_3bit` is what all layers at 3 bits cost, chosen per model so that at theta = 1 the paper's
clusters mix precisions. Run: python benchmarks/lib/synthetic_omega.py
"""

from __future__ import annotations

import math
import random
from pathlib import Path

from llmpq.models.model_spec import ModelSpec
from llmpq.precision import KVPrecision, Precision
from llmpq.sensitivity import Sensitivity

TOTAL_3BIT = {"opt-13b": 5.0, "opt-30b": 30.0, "opt-66b": 30.0, "bloom-176b": 40.0}
FOLDER = Path(__file__).parents[2] / "clusters" / "paper"


def synthetic_omega(model: str, total_3bit: float) -> Sensitivity:
    """Return the table of one model; the same name gives the same numbers."""
    layers = ModelSpec.by_name(model).num_layers
    rng = random.Random(model)
    weights = [math.exp(rng.gauss(0, 0.5)) * (0.5 + i / layers) for i in range(layers)]
    unit = total_3bit / (sum(weights) * (2**3 - 1) ** -2)

    def column(bits: int, scale: float = 1.0) -> tuple[float, ...]:
        return tuple(round(scale * unit * w * (2**bits - 1) ** -2, 9) for w in weights)

    return Sensitivity(
        indicator="synthetic",
        model=model,
        num_layers=layers,
        weights={
            Precision.W3A16: column(3),
            Precision.W4A16: column(4),
            Precision.W8A16: column(8),
            Precision.W16A16: (0.0,) * layers,
        },
        kv={
            KVPrecision.KV8: column(8, 0.25),
            KVPrecision.KV4: column(4, 0.25),
            KVPrecision.KV2: column(2, 0.25),
        },
        note="synthetic, made by benchmarks/lib/synthetic_omega.py; "
        "says nothing about the real model",
    )


def main() -> None:
    """Write one file per paper model."""
    for model, total in TOTAL_3BIT.items():
        synthetic_omega(model, total).save_json(FOLDER / f"omega-{model}.json")


if __name__ == "__main__":
    main()
