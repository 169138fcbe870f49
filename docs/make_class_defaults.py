"""Writes `llmpq/families/class_defaults.json`: what Transformers' config classes take and read.

    python docs/make_class_defaults.py

For every `model_type` that a family of llmpq runs: the class's default of each key, the keys that
may be null, the further keys that its class or its model reads, and its aliases. The planner reads
the file, so that it needs no Transformers; a test compares it with the installed one.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import transformers
from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from llmpq.families import BY_MODEL_TYPE, WRAPPERS
from llmpq.families.common.class_defaults import SAME_CLASS, TABLE

WRITTEN = Path(__file__).parent.parent / "llmpq" / "families" / TABLE
SHARED = ("masking_utils", "cache_utils")
"""Modules of Transformers that read every model's config."""
READS = re.compile(r"config\.([a-z_]\w*)|getattr\(\s*\w*config, \"(\w+)\"")
KEYWORDS = re.compile(r"kwargs\.(?:get|pop|setdefault)\(\s*\"(\w+)\"")
OF_BASE = frozenset(dir(PretrainedConfig)) | {f.name for f in dataclasses.fields(PretrainedConfig)}
"""Names that every config has; none says what a layer computes."""


def table() -> dict[str, Any]:
    """Return what the file holds."""
    kinds = sorted({SAME_CLASS.get(kind, kind) for kind in [*BY_MODEL_TYPE, *WRAPPERS]})
    found: dict[str, Any] = {}
    for kind in kinds:
        found[kind] = described(CONFIG_MAPPING[kind])
        text = found[kind].get("text")
        if text and text not in found:
            found[text] = described(CONFIG_MAPPING[text])
    return {
        "transformers": transformers.__version__,
        "read_by_all": sorted(set().union(*map(_read_in, map(_module_path, SHARED)))),
        "classes": dict(sorted(found.items())),
    }


def described(kind: Any) -> dict[str, Any]:
    """Return one class's defaults, nullable keys, further keys and aliases."""
    fields = [f for f in dataclasses.fields(kind) if f.name not in OF_BASE - {"rope_parameters"}]
    defaults = {f.name: f.default for f in fields if _is_json(f.default)} | _rope_defaults(kind)
    reads = _keywords(kind) | _read_in(_modelling(kind))
    found = {
        "defaults": defaults,
        "nullable": sorted(f.name for f in fields if _takes_null(kind, f)),
        "reads": sorted(reads - set(defaults)),
        "aliases": dict(kind.attribute_map),
    }
    if "text_config" in kind.sub_configs:
        found["text"] = kind().get_text_config().model_type
    return found


def _rope_defaults(kind: Any) -> dict[str, Any]:
    """Return what a class takes for positions; `rope_parameters` without what stands beside it."""
    if not hasattr(kind(), "rope_parameters"):
        return {}
    default, plain = kind().rope_parameters, kind(rope_parameters={"rope_type": "default"})
    nested = {k: dict(v) for k, v in default.items() if isinstance(v, dict)}
    whole = nested.get("full_attention", dict(default))
    found = {"rope_theta": whole.pop("rope_theta")}
    if "sliding_attention" in nested:
        own = nested["sliding_attention"].pop("rope_theta")
        if own != found["rope_theta"]:
            found["rope_local_base_freq"] = own
    share = plain.rope_parameters.get("partial_rotary_factor")
    if whole.get("rope_type") != "proportional":  # of which the share is a part
        whole.pop("partial_rotary_factor", None)
    if share is not None:
        found["partial_rotary_factor"] = share
    whole.pop("type", None)
    return {**found, "rope_parameters": None if whole == {"rope_type": "default"} else whole}


def _keywords(kind: Any) -> set[str]:
    """Return the names that a class takes out of its keywords."""
    own = [k for k in kind.__mro__ if k.__module__.startswith("transformers.models.")]
    return {name for k in own for name in KEYWORDS.findall(inspect.getsource(k))} - OF_BASE


def _modelling(kind: Any) -> Path:
    """Return the file of a config's model: its own, or that of the class that it is made of."""
    for own in kind.__mro__:
        path = Path(inspect.getsourcefile(own) or "")
        model = path.with_name(path.name.replace("configuration_", "modeling_"))
        if model != path and model.exists():
            return model
    raise ValueError(f"no model of {kind.__name__} is installed")


def _module_path(name: str) -> Path:
    return Path(transformers.__file__).with_name(f"{name}.py")


def _read_in(path: Path) -> set[str]:
    """Return the names that a file reads of a config."""
    found = READS.findall(path.read_text(encoding="utf-8"))
    return {name for pair in found for name in pair if name} - OF_BASE


def _takes_null(kind: Any, field: dataclasses.Field[Any]) -> bool:
    if "None" in str(field.type):  # which may need other keys beside it (EXAONE 4's windows)
        return True
    try:
        kind(**{field.name: None})
    except Exception:  # whatever the class trips over: it does not take null
        return False
    return True


def _is_json(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, bool | int | str | list | dict)


def main() -> None:
    """Write the file."""
    text = json.dumps(table(), indent=1, sort_keys=True)
    WRITTEN.write_text(text + "\n", encoding="utf-8")
    sys.stdout.write(f"wrote {WRITTEN}\n")


if __name__ == "__main__":
    main()
