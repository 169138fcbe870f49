"""What Transformers calls a family's modules: decoder layers, what comes before and after them."""

from __future__ import annotations

from llmpq.model_spec import Family

LAYERS: dict[Family, str] = {
    "opt": "model.decoder.layers",
    "bloom": "transformer.h",
    "llama": "model.layers",
    "qwen3": "model.layers",
    "mixtral": "model.layers",
}
FIRST: dict[Family, tuple[str, ...]] = {
    "opt": ("model.decoder.embed_tokens", "model.decoder.embed_positions"),
    "bloom": ("transformer.word_embeddings", "transformer.word_embeddings_layernorm"),
    "llama": ("model.embed_tokens", "model.rotary_emb"),
    "qwen3": ("model.embed_tokens", "model.rotary_emb"),
    "mixtral": ("model.embed_tokens", "model.rotary_emb"),
}
LAST: dict[Family, tuple[str, ...]] = {
    "opt": ("model.decoder.final_layer_norm", "lm_head"),
    "bloom": ("transformer.ln_f", "lm_head"),
    "llama": ("model.norm", "lm_head"),
    "qwen3": ("model.norm", "lm_head"),
    "mixtral": ("model.norm", "lm_head"),
}


def layers_pattern(family: Family, layers: list[int], num_layers: int) -> str:
    """Return a regular expression of everything inside these layers of a model."""
    root = LAYERS[family].replace(".", "\\.")
    return f"{root}\\.{numbers_pattern(layers, num_layers)}\\..*"


def numbers_pattern(layers: list[int], num_layers: int) -> str:
    """Return a regular expression of these layers' numbers."""
    every = len(layers) == num_layers
    return "[0-9]+" if every else f"({'|'.join(str(i) for i in layers)})"
