"""Model families: one record each. A new one is a file here and a line in `FAMILIES`."""

from __future__ import annotations

from llmpq.families import bloom, llama, mixtral, opt, qwen2, qwen3
from llmpq.families.record import Family

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        opt.FAMILY,
        bloom.FAMILY,
        llama.FAMILY,
        qwen2.FAMILY,
        qwen3.FAMILY,
        mixtral.FAMILY,
    )
}
"""Name -> record."""

BY_MODEL_TYPE = {kind: family for family in FAMILIES.values() for kind in family.model_types}
"""`model_type` of `config.json` -> record."""
