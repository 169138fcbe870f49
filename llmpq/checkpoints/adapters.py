"""Adapters as peft saves them: none is run. What one is called, and whether its model can take it.

Whether it can is peft's own: 0.21's classes that have no `merge`, or refuse it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llmpq.checkpoints.tensor_names import tensor_names
from llmpq.errors import shortened
from llmpq.file_form import read_json

DESCRIBED = "adapter_config.json"
FILES = ("adapter_model.safetensors", "adapter_model.bin", DESCRIBED)
BESIDE_WEIGHTS = frozenset(
    [
        "PROMPT_TUNING",
        "MULTITASK_PROMPT_TUNING",
        "P_TUNING",
        "PREFIX_TUNING",
        "CPT",
        "CARTRIDGE",
        "ADAPTION_PROMPT",
        "POLY",
        "XLORA",
        "SHADOW",
    ]
)
"""`peft_type`s of what stands beside the weights (prompts that were trained, routers): no merge."""
_NAMES = {"LORA": "LoRA"}


def adapter_instead(path: Path) -> str | None:
    """Say that a directory is an adapter, and what to do; None where it is none."""
    if not (path / DESCRIBED).is_file():
        return None
    described = _described(path)
    base = described.get("base_model_name_or_path")
    of = f" of '{shortened(str(base))}'" if base else ""
    said = f"'{path}' is {_named(described)}{of}, not a model"
    if _merges(described):
        return (
            f"{said}: merge it into its model (peft: merge_and_unload, then save_pretrained) and "
            "give that directory"
        )
    return (
        f"{said}, and peft cannot merge it into one, as it stands beside the weights: run it by "
        "peft, or give its model as it is"
    )


def adapter_beside(path: Path) -> str | None:
    """Say which adapter lies beside a directory's own weights and is not applied; None: none.

    `ValueError` for an adapter with its model's config.json, and without the model's weights.
    """
    held = next((name for name in FILES if (path / name).is_file()), None)
    if held is None:
        return None
    alone = adapter_instead(path)
    if alone is not None and not tensor_names(path) and not any(path.glob("pytorch_model*.bin")):
        raise ValueError(alone)
    described = _described(path)
    what = "merge it into the model, with peft's merge_and_unload say"
    if not _merges(described):
        what = "it stands beside the weights, so that peft cannot merge it"
    return f"{_named(described)} beside the model ({held}), which is not applied: {what}"


def _described(path: Path) -> dict[str, Any]:
    """Return what an adapter says of itself; empty where its description cannot be read."""
    try:
        found = read_json(path / DESCRIBED)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _named(described: dict[str, Any]) -> str:
    kind = str(described.get("peft_type") or "")
    if not kind:
        return "an adapter"
    name = shortened(_NAMES.get(kind, kind))
    return f"{'an' if name[0] in 'AEIO' else 'a'} {name} adapter"


def _merges(described: dict[str, Any]) -> bool:
    return described.get("peft_type") not in BESIDE_WEIGHTS
