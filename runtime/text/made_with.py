"""What an answer was made with: model, precision, sampling.

Every output line carries it, and `--resume` keeps only answers made alike: two models' cannot mix
in one file unnoticed. An option that changes nothing is left out: greedy tokens have no seed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from llmpq.checkpoints.gguf_file import is_gguf, open_gguf
from llmpq.plans.plan import Plan
from llmpq.precision import Precision
from llmpq.runtime.text.batch_rows import BatchRow

INSTEAD_OF = "instead_of"
"""What an answer was planned to be made with, where devices came or went."""
_SAMPLES, _SAMPLE_BYTES = 16, 4096


def made_by(plan: Plan, model_dir: str | Path) -> dict[str, Any]:
    """Return what all answers of a run are made with."""
    work, quantization = plan.workload, plan.quantization
    runs = [(p, len(list(run))) for p, run in groupby(plan.precisions)]
    weights = ", ".join(f"{p.value} x{count}" for p, count in runs)
    if any(p is not Precision.W16A16 for p, _ in runs):
        weights += f"; groups of {quantization.group_size or 'a channel'}"
        weights += ", symmetric" if quantization.symmetric else ""
        weights += f", {quantization.outliers} outliers" if quantization.outliers else ""
    weights += ", output matrix in 8 bits" if plan.settings().head_bits == 8 else ""
    weights += ", int8 activations on CPUs" if quantization.cpu_activations == "int8" else ""
    return {
        "model": f"{plan.model.name} {digest(model_dir)}",
        "weights": weights,
        "kv": work.kv.value,
        "dtype": work.dtype,
    }


def made_with(row: BatchRow, common: Mapping[str, Any], default_tokens: int) -> dict[str, Any]:
    """Return what a row's answer is made with; `default_tokens` are those of rows that ask none."""
    choice = row.sampling
    fields: dict[str, Any] = {**common, "max_tokens": row.max_tokens or default_tokens}
    fields["temperature"] = choice.temperature
    if choice.temperature > 0:
        fields |= {"top_k": choice.top_k, "top_p": choice.top_p, "seed": choice.seed}
    fields |= {"stop": list(row.stop)} if row.stop else {}
    fields |= {"ignore_eos": True} if row.ignore_eos else {}
    return fields | dict(row.more)


def replaced(planned: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return what answers are made with once another plan has taken the place of a run's own.

    It says what it stands for, so that the run can go on with its own plan (`--resume`).
    """
    other = {key: value for key, value in planned.items() if now.get(key) != value}
    return {**now, INSTEAD_OF: other} if other else dict(now)


def differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Return what an answer was made with and would not be now, a phrase each.

    One that was made under a plan that took another one's place counts as that one's.
    """
    planned = found.get(INSTEAD_OF)
    if isinstance(planned, Mapping):
        found = {**{key: value for key, value in found.items() if key != INSTEAD_OF}, **planned}
    keys = dict.fromkeys([*wanted, *found])
    return [
        f"{key} was {_shown(found.get(key))}, now it is {_shown(wanted.get(key))}"
        for key in keys
        if _compared(key, found.get(key)) != _compared(key, wanted.get(key))
    ]


def _compared(key: str, value: object) -> object:
    """Return what counts of a field: a model is its digest, whatever its folder is called."""
    return value.rpartition(" ")[2] if key == "model" and isinstance(value, str) else value


def digest(model_dir: str | Path) -> str:
    """Return 12 hex digits that differ where a model's configuration or weights do.

    Of the weights, sizes and samples from all over each file are read, not every byte.
    """
    state = hashlib.sha256()
    folder = Path(model_dir)
    described = [folder / "config.json", *folder.glob("*.safetensors")]
    for path in open_gguf(folder).parts if is_gguf(folder) else sorted(described):
        if not path.is_file():
            continue
        size = path.stat().st_size
        state.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            for index in range(_SAMPLES):
                file.seek(max(0, size - _SAMPLE_BYTES) * index // (_SAMPLES - 1))
                state.update(file.read(_SAMPLE_BYTES))
    return state.hexdigest()[:12]


def _shown(value: object) -> str:
    return "not given" if value is None else f"'{value}'" if isinstance(value, str) else str(value)
