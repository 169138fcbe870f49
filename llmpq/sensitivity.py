"""How much each layer's quality suffers at each precision: omega, the paper's indicator.

A larger omega is worse; w16a16 and kv16 are zero. Theta in the objective is seconds per unit of
omega. A group of layers has the sum of its layers' omega.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from llmpq.errors import short_repr
from llmpq.file_form import FileForm
from llmpq.precision import KVPrecision, Precision

REMEDY = "make one for this model with llmpq-profile indicator --model"

MAX_OMEGA = 1e15
"""Of one layer: beyond it a sum of omega loses what tells plans apart."""


class Sensitivity(FileForm):
    """omega[precision][layer] and omega[KV bits][layer], with where the numbers come from."""

    schema_version: int = Field(default=1, alias="schema", ge=1, le=1)
    indicator: str
    """Name of the method: `variance`, `hessian`, `random`, `synthetic`."""
    model: str
    model_fingerprint: str | None = None
    """The architecture it was measured on; absent where a table is written for a name."""
    num_layers: int = Field(gt=0)
    weights: Mapping[Precision, tuple[float, ...]]
    kv: Mapping[KVPrecision, tuple[float, ...]] = {}
    note: str = ""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        for table in (self.weights, self.kv):
            for precision, values in table.items():
                if len(values) != self.num_layers:
                    raise ValueError(
                        f"omega of {precision.value} has {len(values)} layers, expected "
                        f"{short_repr(self.num_layers)}"
                    )
                wrong = [v for v in values if not 0 <= v <= MAX_OMEGA]
                if wrong:
                    raise ValueError(
                        f"omega of {precision.value} must be finite and >= 0 (at most "
                        f"{MAX_OMEGA:g}), got {wrong[0]}; {REMEDY}"
                    )
        return self

    def omega(self, layer: int, precision: Precision) -> float:
        """Return omega of one layer; unquantised is zero, an unlisted precision is an error."""
        if precision in self.weights:
            return self.weights[precision][layer]
        if precision is Precision.W16A16:
            return 0.0
        listed = ", ".join(p.value for p in self.weights)
        raise ValueError(
            f"the omega file has no {precision.value} (it lists {listed}); "
            "re-make it with llmpq-profile indicator, or leave the precision out with --bits"
        )

    def kv_omega(self, layer: int, kv: KVPrecision) -> float:
        """Return omega of one layer's KV cache; kv16 is zero, an unlisted one is an error."""
        if kv in self.kv:
            return self.kv[kv][layer]
        if kv is KVPrecision.KV16:
            return 0.0
        listed = ", ".join(one.value for one in self.kv) or "no KV bits"
        raise ValueError(
            f"the omega file has no {kv.value} (it lists {listed}); re-make it with llmpq-profile "
            f"indicator --kv {kv.value}, or leave {kv.typed} out of --kv"
        )

    def four_bit_omega(self) -> float:
        """Return the sum of omega of all layers at 4 bits: the scale of this indicator.

        Where w4a16 is not listed, the nearest precision's by the variance of rounding.
        """
        for precision in sorted(self.weights, key=lambda p: abs(p.weight_bits - 4)):
            bits = min(precision.weight_bits, precision.activation_bits)
            total = sum(self.weights[precision])
            if bits < 16 and total > 0:
                return total / ((2**4 - 1) / (2**bits - 1)) ** 2
        return 0.0

    @classmethod
    def load(cls, path: str | Path, *, num_layers: int) -> Sensitivity:
        """Read an omega JSON and check that it fits a model of `num_layers`."""
        sensitivity = cls.load_json(path)
        if sensitivity.num_layers != num_layers:
            raise ValueError(
                f"'{path}' was made for {sensitivity.num_layers} layers ({sensitivity.model}), "
                f"the model has {num_layers}; {REMEDY}"
            )
        return sensitivity

    def require_model(self, name: str, fingerprint: str, *, where: str) -> None:
        """Raise `ValueError` unless this was made for a model: by architecture, else by name."""
        made_for = self.model_fingerprint
        same = self.model.lower() == name.lower() if made_for is None else made_for == fingerprint
        if not same:
            shown = self.model if made_for is None else f"{self.model} ({made_for})"
            got = name if made_for is None else f"{name} ({fingerprint})"
            raise ValueError(f"'{where}' was made for model {shown}, got {got}; {REMEDY}")

    @classmethod
    def zero(cls, model: str, num_layers: int, precisions: tuple[Precision, ...]) -> Sensitivity:
        """Return a table of zeros: plan for speed alone."""
        weights = {p: (0.0,) * num_layers for p in precisions}
        return cls(indicator="none", model=model, num_layers=num_layers, weights=weights)
