"""`llmpq-algo models`: families and built-in models, and what each runs with.

The same table refuses a run (llmpq/plans/capabilities.py). A family's row is what its built-in
models have at full length; a single model, or shorter requests, may run with more.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

from llmpq.checkpoints.gguf_config import ARCHITECTURES
from llmpq.checkpoints.gguf_file import BLOCKS
from llmpq.checkpoints.stored_codes import KEPT
from llmpq.errors import unknown_name
from llmpq.families import FAMILIES
from llmpq.models.model_spec import ModelSpec, builtin_configs, builtin_ids
from llmpq.planner.problem.requests import ModelsRequest
from llmpq.plans.capabilities import EXECUTION_MODES, ExecutionMode, lacks

COLUMNS: dict[ExecutionMode, str] = {
    "gpu": "GPU",
    "packed_kv": "KV 8 4 2",
    "drafts": "speculation",
    "gpu_packed_kv": "GPU KV 8 4 2",
    "gpu_rounded": "GPU w8a8",
}
GGUF = {"architectures": "read from GGUF files", "types": "in blocks of"}
"""What of GGUF files is listed -> how it is called."""
ALL = "llmpq-algo models without a word lists all"


@dataclass(frozen=True, kw_only=True)
class ModelRow:
    """What one family or model runs with, on CPUs always with 16-bit KV."""

    name: str
    kind: str
    """A family's `model_type`s, or a model's parameters."""
    missing: dict[ExecutionMode, tuple[str, ...]]


def show_models(request: ModelsRequest) -> None:
    """Print the tables, or both as one JSON object; of a word: only names that have it."""
    families, models = _families(), [_model(name) for name in builtin_configs()]
    word = request.word
    if word is not None:
        families, models = _with(word, families), _with(word, models)
        if not models and not families:
            raise unknown_name("model", word, builtin_configs(), see=ALL)
    if request.json:
        found: dict[str, Any] = {
            kind: [
                {
                    "name": r.name,
                    "says": r.kind,
                    "missing": {mode: list(m) for mode, m in r.missing.items()},
                }
                for r in rows
            ]
            for kind, rows in (("families", families), ("models", models))
        }
        found["gguf"] = _gguf()
        found["kept"] = {precision.value: list(forms) for precision, forms in KEPT.items()}
        sys.stdout.write(json.dumps(found, indent=1) + "\n")
        return
    tables = [
        _table(title, kind, rows)
        for title, kind, rows in (
            ("family", "model_type in config.json", families),
            ("built-in model", "parameters", models),
        )
        if rows
    ]
    sys.stdout.write("\n".join(tables))
    if word is not None:
        why = _why(families or models)
        sys.stdout.write(f"\n{why}" if why.strip() else "")
        return
    for what, names in _gguf().items():
        sys.stdout.write(f"\n{GGUF[what]}: {' '.join(names)}")
    for precision, forms in KEPT.items():
        sys.stdout.write(f"\ncodes kept as stored at {precision.value}: {', '.join(forms)}")
    sys.stdout.write("\n\n" + _why(families))


def _with(word: str, rows: list[ModelRow]) -> list[ModelRow]:
    """Return the rows that have a word in their names or `model_type`s, dashes or none."""
    ids, plain = builtin_ids(), _plain(word)
    return [r for r in rows if plain in _plain(" ".join((r.name, r.kind, *ids.get(r.name, ()))))]


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "").replace(" ", "")


def _gguf() -> dict[str, list[str]]:
    """Return what GGUF files may be of and hold."""
    return {"architectures": [*ARCHITECTURES], "types": [kind for kind, _, _ in BLOCKS.values()]}


def _families() -> list[ModelRow]:
    specs = [ModelSpec.by_name(name) for name in builtin_configs()]
    rows = []
    for family in FAMILIES.values():
        own = [spec for spec in specs if spec.family == family.name]
        missing = {
            mode: tuple(dict.fromkeys(name for spec in own for name in lacks(spec, mode)))
            for mode in EXECUTION_MODES
        }
        rows.append(ModelRow(name=family.name, kind=" ".join(family.model_types), missing=missing))
    return rows


def _model(name: str) -> ModelRow:
    spec = ModelSpec.by_name(name)
    return ModelRow(
        name=name,
        kind=f"{spec.num_params / 1e9:.1f}e9",
        missing={mode: lacks(spec, mode) for mode in EXECUTION_MODES},
    )


def _table(title: str, kind: str, rows: list[ModelRow]) -> str:
    """Return rows of `yes` and `no` under the modes' names."""
    first = max(len(title), *(len(row.name) for row in rows)) + 2
    second = max(len(kind), *(len(row.kind) for row in rows)) + 2
    head = "".join(f"{name:<13}" for name in ("CPU", *COLUMNS.values())).rstrip()
    lines = [f"{title:<{first}}{kind:<{second}}{head}"]
    for row in rows:
        cells = ["yes", *("no" if row.missing[mode] else "yes" for mode in COLUMNS)]
        line = f"{row.name:<{first}}{row.kind:<{second}}" + "".join(f"{c:<13}" for c in cells)
        lines.append(line.rstrip())
    return "\n".join(lines) + "\n"


def _why(rows: list[ModelRow]) -> str:
    """Return, for each family, what the modes lack that do not run it."""
    lines = []
    for row in rows:
        for mode, missing in row.missing.items():
            if missing:
                lines.append(f"{row.name}: {EXECUTION_MODES[mode]} lacks {', '.join(missing)}")
    return "\n".join(lines) + "\n"
