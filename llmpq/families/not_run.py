"""Families and parts of models that llmpq does not run, by the feature that is missing."""

from __future__ import annotations

from llmpq.families.common.config_values import Config, is_given

LEFT_OUT = {
    "vision_config": "the vision tower: text only",
    "audio_config": "the audio tower: text only",
    "sound_config": "the audio tower: text only",
    "speech_config": "the speech tower: text only",
    "mm_tokens_per_image": "the vision tower: text only",
    "image_token_index": "the vision tower: text only",
    "boi_token_index": "the vision tower: text only",
    "eoi_token_index": "the vision tower: text only",
}
"""Config key -> what it brings that is not run, said to the user."""

FURTHER_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers")
MTP_LAYERS = (*FURTHER_LAYERS, "mtp_num_hidden_layers")
"""Keys that count the layers that predict further tokens: behind the model's layers, or beside
them."""

WITHOUT_EQUATION = (
    "a record of this family (what its layers compute and what its tensors are called)"
)

RECURRENT = "this family's form of recurrent layers (linear attention, state-space layers)"
_MAMBA1 = "Mamba-1 layers"
_ENCODER = "encoder layers: it runs decoder-only models"

FEATURE_OF = {
    "mamba": _MAMBA1,
    "mamba2": "models of Mamba-2 layers alone, without attention",
    "falcon_mamba": _MAMBA1,
    "jamba": _MAMBA1,
    "zamba2": "attention that layers share, each with an adapter of its own",
    "rwkv": "RWKV's layers",
    "recurrent_gemma": "gated linear recurrences (RG-LRU)",
    "mimo_v2_flash": "values of fewer channels than keys, and sinks on layers with a window alone",
    "cohere2_moe": "a mixture beside attention whose two parts are averaged",
    "olmo": "norms without weights",
    "nanochat": "norms without weights",
    "hrm_text": "norms without weights, and layers that run several times",
    "laguna": "gates of softplus, and a number of heads for each layer",
    "step3p5": "a number of heads for each layer, and clamps behind activations",
    "step3p7": "a number of heads for each layer, and clamps behind activations",
    "bailing_hybrid": "decays of KDA from one matrix",
    "kolibri1": "a router whose corrections are added to logits",
    "axk1": "a norm behind mixtures alone",
    "axk2": "norms with gates",
    "longcat_flash": "two attentions a layer, and experts that return what they are given",
    "diffllama": "attention that subtracts one softmax from another",
    "bitnet": "norms inside attention and MLP",
    "phimoe": "a router that masks its second choice (sparse mixer)",
    "paligemma": "attention in which all tokens of a prompt see each other",
    "t5": _ENCODER,
    "bart": _ENCODER,
    "bert": _ENCODER,
    "whisper": _ENCODER,
    "chatglm": "remote code: use the checkpoint that Transformers calls glm or glm4",
}
"""`model_type` -> what llmpq lacks for it."""

SIGNS = (
    (
        ("ssm_cfg", "state_size", "mamba_d_state", "linear_num_key_heads", "conv_L_cache"),
        RECURRENT,
    ),
    (("expand_k", "expand_v", "expand_ratio"), RECURRENT),
    (("is_encoder_decoder",), _ENCODER),
    (("num_kv_shared_layers",), "layers that share a KV cache"),
    (("hidden_size_per_layer_input",), "per-layer embeddings"),
    (("attention_k_eq_v",), "values that are the layer's keys"),
    (("enable_moe_block",), "a mixture of experts beside each layer's MLP"),
    (("index_topk", "sparse_attention_config"), "sparse attention over chosen tokens"),
)
"""Keys of a config that tell what a family needs, listed or not."""

KINDS_OF_LAYERS = {
    "linear_attention": RECURRENT,
    "mamba": RECURRENT,
    "recurrent": RECURRENT,
    "conv": RECURRENT,
    "chunked_attention": "attention in chunks",
    "0": RECURRENT,  # in MiniMax's attn_type_list, where 1 is softmax attention
}
"""A value of `LAYER_LISTS` -> what it needs."""
LAYER_LISTS = ("layer_types", "attn_type_list")

DRAFT_HEADS = ("draft_vocab_size", "eagle_config", "dflash_config")
"""Keys of layers that draft for another model: they have no tokens of their own."""

TOWERS = ("patch_size", "conv_stride", "depth")
"""Keys of what reads images or sound; without a vocabulary beside them, it is that alone."""


def no_language_model(config: Config) -> str | None:
    """Return what a config describes where that is no language model, in words."""
    for key in DRAFT_HEADS:
        if is_given(config.get(key)):
            return (
                f"'{key}' describes layers that draft for another model (EAGLE and its like), "
                "which llmpq does not run; give the model that they draft for"
            )
    if any(is_given(config.get(key)) for key in ("vocab_size", "text_config", "llm_config")):
        return None
    for key in TOWERS:
        if is_given(config.get(key)):
            return (
                f"'{key}' without 'vocab_size' describes a tower for images or sound, not a "
                "language model; give the directory of the whole model"
            )
    return None


def lacking(model_type: str, config: Config, text_type: str = "") -> str | None:
    """Return the features that a family needs and llmpq lacks, None where nothing tells.

    What llmpq runs of other families (experts, latent attention) is no lack of this one's.
    `text_type`: the `model_type` of the language model inside, where it has one of its own.
    """
    kinds = (model_type, text_type.removesuffix("_text"), model_type.removesuffix("_text"))
    found = [FEATURE_OF[kind] for kind in kinds if kind in FEATURE_OF]
    found += _signs(config)
    for layers in map(config.get, LAYER_LISTS):
        if isinstance(layers, list):
            found += [KINDS_OF_LAYERS[str(kind)] for kind in layers if str(kind) in KINDS_OF_LAYERS]
    found = list(dict.fromkeys(found))
    if any(kind in FEATURE_OF for kind in kinds):  # whose own features are named
        found = [one for one in found if one != RECURRENT]
    own = [one for one in found if not any(one in other for other in found if other != one)]
    return ", and ".join(own) or None


def _signs(config: Config) -> list[str]:
    return [says for keys, says in SIGNS if any(_is_on(config.get(key)) for key in keys)]


def _is_on(value: object) -> bool:
    """Whether a key switches something on; a section may switch itself off (`use_...`: false)."""
    off = isinstance(value, dict) and any(
        key.startswith("use_") and one is False for key, one in value.items()
    )
    return is_given(value) and not off
