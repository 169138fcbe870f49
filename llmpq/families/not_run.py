"""What llmpq does not run: families by the feature it lacks, and parts of models it leaves out."""

from __future__ import annotations

from llmpq.families.common.config_values import Config, is_given

LEFT_OUT = {
    "vision_config": "the vision tower: text only",
    "audio_config": "the audio tower: text only",
    "speech_config": "the speech tower: text only",
    "mm_tokens_per_image": "the vision tower: text only",
    "image_token_index": "the vision tower: text only",
    "boi_token_index": "the vision tower: text only",
    "eoi_token_index": "the vision tower: text only",
    "num_nextn_predict_layers": "{value} layers that predict further tokens (MTP)",
    "num_mtp_layers": "{value} layers that predict further tokens (MTP)",
}
"""Config key -> what it brings that is not run, said to the user."""

FURTHER_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers")

WITHOUT_EQUATION = (
    "a record of this family (what its layers compute and what its tensors are called)"
)

_RECURRENT = "recurrent state beside the KV cache (linear attention, state-space layers)"
_PARALLEL = "attention and MLP side by side on one norm (a parallel residual)"
_ENCODER = "encoder layers: it runs decoder-only models"
_NO_POSITIONS = "layers without positions among rotary ones"

FEATURE_OF = {
    "qwen3_next": _RECURRENT,
    "qwen3_5": _RECURRENT,
    "mamba": _RECURRENT,
    "mamba2": _RECURRENT,
    "falcon_mamba": _RECURRENT,
    "jamba": _RECURRENT,
    "bamba": _RECURRENT,
    "zamba2": _RECURRENT,
    "rwkv": _RECURRENT,
    "recurrent_gemma": _RECURRENT,
    "granitemoehybrid": _RECURRENT,
    "nemotron_h": _RECURRENT,
    "minimax": _RECURRENT,
    "lfm2": _RECURRENT,
    "kimi_linear": _RECURRENT,
    "falcon_h1": _RECURRENT,
    "falcon": _PARALLEL,
    "gpt_neox": _PARALLEL,
    "gptj": _PARALLEL,
    "phi": _PARALLEL,
    "cohere": _PARALLEL,
    "cohere2": _PARALLEL,
    "stablelm": "norms of each head with weights of their own, and a parallel residual",
    "llama4": "attention in chunks, and layers without positions among rotary ones",
    "llama4_text": "attention in chunks, and layers without positions among rotary ones",
    "smollm3": _NO_POSITIONS,
    "exaone4": _NO_POSITIONS,
    "gemma3n": "per-layer embeddings and layers that share a KV cache",
    "gemma4": "layers that share a KV cache",
    "phimoe": "a router that masks its second choice (sparse mixer)",
    "dbrx": "a mixture whose norms have no bias beside LayerNorm",
    "deepseek_v32": "sparse attention over chosen tokens",
    "t5": _ENCODER,
    "bart": _ENCODER,
    "bert": _ENCODER,
    "whisper": _ENCODER,
    "gpt2": "fused projections stored transposed, and learned positions without an offset",
    "mpt": "ALiBi with fused projections and norms without biases",
    "chatglm": "remote code: use the checkpoint that Transformers calls glm or glm4",
}
"""`model_type` -> what llmpq lacks for it."""

SIGNS = (
    (("ssm_cfg", "state_size", "mamba_d_state", "linear_num_key_heads"), _RECURRENT),
    (("is_encoder_decoder",), _ENCODER),
    (("parallel_attn", "use_parallel_residual"), _PARALLEL),
    (("kv_lora_rank",), "this family's form of latent attention"),
    (("num_experts", "num_local_experts", "n_routed_experts"), "this family's mixture of experts"),
    (("vision_config",), "this family's text model beside a vision tower"),
)
"""Keys of a config that tell what a family nobody has listed needs."""


def lacking(model_type: str, config: Config) -> str | None:
    """Return the feature that a family needs and llmpq lacks, None where nothing tells."""
    if model_type in FEATURE_OF:
        return FEATURE_OF[model_type]
    for keys, feature in SIGNS:
        if any(is_given(config.get(key)) for key in keys):
            return feature
    return None
