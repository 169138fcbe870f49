"""Model families: one record each. A new one is a file here and a line in `FAMILIES`."""

from __future__ import annotations

from llmpq.families import (
    arcee,
    bamba,
    bloom,
    deepseek,
    dots1,
    falcon_h1,
    gemma,
    gemma3n,
    gemma4,
    glm4,
    glm4_moe,
    gpt_oss,
    granite,
    lfm2,
    llama,
    llama4,
    ministral3,
    mixtral,
    nemotron_h,
    olmo2,
    opt,
    phi3,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_moe,
    qwen3_next,
    stablelm,
)
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
        gemma.FAMILY,
        phi3.FAMILY,
        glm4.FAMILY,
        granite.FAMILY,
        olmo2.FAMILY,
        qwen3_moe.FAMILY,
        gpt_oss.FAMILY,
        glm4_moe.FAMILY,
        deepseek.FAMILY,
        gemma.FIRST,
        gemma3n.FAMILY,
        gemma4.FAMILY,
        llama4.FAMILY,
        ministral3.FAMILY,
        ministral3.LATENT,
        granite.HYBRID,
        arcee.FAMILY,
        dots1.FAMILY,
        stablelm.FAMILY,
        qwen3_next.FAMILY,
        qwen3_5.FAMILY,
        qwen3_5.MIXTURE,
        lfm2.FAMILY,
        lfm2.MIXTURE,
        bamba.FAMILY,
        falcon_h1.FAMILY,
        nemotron_h.FAMILY,
    )
}
"""Name -> record."""

WRAPPERS = (
    "gemma3",
    "gemma3n",
    "gemma4",
    "gemma4_unified",
    "llama4",
    "mistral3",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_5",
    "qwen3_5_moe",
)
"""`model_type` of models whose `text_config` is a language model; the rest of them is left out."""

BY_MODEL_TYPE = {kind: family for family in FAMILIES.values() for kind in family.model_types}
"""`model_type` of `config.json` -> record."""
