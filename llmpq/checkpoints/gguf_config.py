"""From a GGUF file's metadata to what the model's `config.json` would say.

A key that no line here reads, and that may change what a layer computes, is refused. What the
format leaves out is taken as llama.cpp takes it (`ARCHITECTURES`): files are made for that.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from llmpq.checkpoints.gguf_file import GgufFile
from llmpq.checkpoints.gguf_gemma import gemma, gemma3n, gemma4, layer_types
from llmpq.checkpoints.gguf_hybrids import (
    falcon_h1,
    granite_hybrid,
    kimi_linear,
    lfm2,
    lfm2_moe,
    nemotron_h,
    qwen3_5,
    qwen3_5_moe,
    qwen3_next,
)
from llmpq.checkpoints.gguf_metadata import REAL, Metadata
from llmpq.checkpoints.gguf_mixtures import (
    deepseek2,
    dots1,
    ernie4_5_moe,
    glm4moe,
    gpt_oss,
    hunyuan_moe,
    llama4,
    minimax_m2,
    olmoe,
)
from llmpq.errors import shortened

FACTORS = {"long": "rope_factors_long.weight", "short": "rope_factors_short.weight"}
FREQUENCIES = "rope_freqs.weight"
AT_REST = 1e29
"""By how much a frequency is divided that is not to turn, at least."""
DTYPE_CODES = ("F32", "F16", "BF16")
"""Types whose values are the weights."""
NOT_MODELS = {
    "adapter": "a LoRA adapter, not a model (general.type 'adapter'): merge it into its model",
    "mmproj": "a projector of images or sound, not a language model (general.type 'mmproj')",
    "imatrix": "a table of activations for quantising, not a model (general.type 'imatrix')",
}
"""`general.type` of files that hold something else -> what they are."""
UNREAD = frozenset([FREQUENCIES, *FACTORS.values()])
"""Tensors that say how positions rotate; the config carries their numbers."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """What a value of `general.architecture` means."""

    model_type: str
    also: Callable[[Metadata, dict[str, Any]], None] = lambda metadata, config: None
    """Adds what only this one has."""
    pairs: bool = False
    """Whether rows of queries and keys lie in pairs of rotated channels, llama.cpp's order."""
    above_one: bool = False
    """Whether norms are stored as 1 + w."""
    latent: bool = False
    """Whether attention is over latents, whose keys and values differ in size."""
    layer_norm: str = ""
    """What config.json calls the epsilon of LayerNorms; empty: the model has RMSNorms."""
    by_layer: bool = False
    """Whether layers may differ in heads of keys and feed-forward channels, which `also` reads."""
    recurrent: bool = False
    """Whether layers without key and value heads are recurrent ones."""
    by_turns: bool = False
    """Whether the delta rule's heads of values lie by turns: one of every key head, then the next
    one of each."""
    experts_apart: bool = False
    """Whether gates and ups of experts are tensors of their own, as in quantised checkpoints."""
    further: bool = False
    """Whether `block_count` counts layers that predict further tokens, which a file may lack."""


def config_of_gguf(file: GgufFile) -> dict[str, Any]:
    """Return a config with Hugging Face's keys; `ValueError` for what llmpq does not run."""
    name, architecture = architecture_of(file)
    metadata = Metadata(file, name)
    config = _common(metadata, architecture)
    architecture.also(metadata, config)
    # What the file does not say is said here, or the config class's default would count.
    scaling = _scaling(metadata, config) or {"rope_type": "default"}
    config.pop("yarn", None)
    config["rope_scaling"] = scaling
    if "original_max_position_embeddings" in scaling:
        key = "original_max_position_embeddings"
        config[key] = scaling[key]
    metadata.require_known()
    return config


def is_quantised(file: GgufFile) -> bool:
    """Whether any tensor is quantised."""
    return any(tensor.kind not in DTYPE_CODES for tensor in file.tensors.values())


def architecture_of(file: GgufFile) -> tuple[str, Architecture]:
    """Return what the file calls its architecture, and what that means."""
    kind = file.metadata.get("general.type", "model")
    if kind in NOT_MODELS:
        raise ValueError(f"'{file.path}' is {NOT_MODELS[kind]}; give the model's own file")
    name = file.metadata.get("general.architecture")
    if name is None:
        raise ValueError(
            f"'{file.path}' has no metadata 'general.architecture': it is not a language model, or "
            "not whole; download it again"
        )
    found = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if found is None or not isinstance(name, str):
        raise ValueError(
            f"'{file.path}': architecture {shortened(repr(name))} is not read from GGUF files; "
            f"llmpq reads {', '.join(ARCHITECTURES)}. Get the model as safetensors"
        )
    return name, found


def _common(metadata: Metadata, architecture: Architecture) -> dict[str, Any]:
    """Return what all architectures have."""
    file = metadata.file
    vocabulary = file.tensors.get("token_embd.weight")
    if vocabulary is None:
        raise ValueError(
            f"'{file.path}' has no tensor 'token_embd.weight': it is not a whole language model; "
            "give the model's own file (of a model in parts, any of them)"
        )
    hidden, heads = metadata.number("embedding_length"), metadata.number("attention.head_count")
    if vocabulary.shape[-1] != hidden:
        raise ValueError(
            f"'{file.path}': metadata 'embedding_length' is {hidden}, the tensor "
            f"'token_embd.weight' has rows of {vocabulary.shape[-1]}; the file is damaged: "
            "download it again"
        )
    head_dim = metadata.number("attention.key_length", default=_head_dim(metadata, hidden, heads))
    values = metadata.number("attention.value_length", default=head_dim)
    if values != head_dim and not architecture.latent:
        raise ValueError(f"'{file.path}': keys and values of different sizes are not supported")
    config = {
        "model_type": architecture.model_type,
        "num_hidden_layers": _layers(metadata, architecture),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": _of_layers(metadata, architecture, "attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": metadata.number("context_length"),
        **_epsilon(metadata, architecture),
        "vocab_size": vocabulary.shape[0],
        "rope_theta": metadata.number("rope.freq_base", REAL, default=10000.0),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "torch_dtype": _dtype(file),
        "eos_token_id": _ends(file) or None,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
    }
    if is_quantised(file):
        config["quantization_config"] = {"quant_method": "gguf"}
    rotated = metadata.number("rope.dimension_count", default=head_dim)
    config["partial_rotary_factor"] = rotated / head_dim
    if architecture.model_type != "qwen2":
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    config["mlp_bias"] = "blk.0.ffn_down.bias" in file.tensors
    # Mixtures may have no such key: their experts' size is another.
    experts = metadata.get("expert_feed_forward_length")
    wide = _of_layers(metadata, architecture, "feed_forward_length", experts)
    config["intermediate_size"] = wide
    return config


def _of_layers(metadata: Metadata, architecture: Architecture, key: str, default: Any) -> int:
    """Return a number that layers have, of those that have any where some are recurrent."""
    given = metadata.get(key)
    if architecture.by_layer and given is not None:
        return metadata.of_layers(key, metadata.number("block_count"))[0]
    if not architecture.recurrent or not isinstance(given, list):
        return int(metadata.number(key, default=default))
    found = {number for number in given if number}
    if len(found) > 1 or not all(type(number) is int and number > 0 for number in found):
        raise ValueError(
            f"'{metadata.file.path}': {key} is {sorted(found)[:4]} in different layers; expected "
            "one number, and 0 in layers of other kinds"
        )
    return found.pop() if found else int(default)


def _epsilon(metadata: Metadata, architecture: Architecture) -> dict[str, float]:
    """Return what norms add to what they divide by, under its name in config.json."""
    if architecture.layer_norm:
        return {architecture.layer_norm: metadata.number("attention.layer_norm_epsilon", REAL)}
    return {"rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon", REAL)}


def _layers(metadata: Metadata, architecture: Architecture) -> int:
    """Return how many layers there are; `ValueError` for more than the file has tensors of."""
    count: int = metadata.number("block_count")
    further = 0
    if architecture.further and metadata.get("nextn_predict_layers"):
        further = metadata.number("nextn_predict_layers")
    numbers = (name.split(".", 2)[1] for name in metadata.file.tensors if name.startswith("blk."))
    held = 1 + max((int(number) for number in numbers if number.isdigit()), default=-1)
    if count - further > held:
        raise ValueError(
            f"'{metadata.file.path}': metadata 'block_count' is {count}, its tensors are of {held} "
            "layers; the file is damaged or not whole: download it again"
        )
    return count


def _head_dim(metadata: Metadata, hidden: int, heads: int) -> int:
    if hidden % heads:
        raise ValueError(
            f"'{metadata.file.path}': embedding_length={hidden} is not a multiple of "
            f"head_count={heads} and attention.key_length is not given; the file is damaged"
        )
    return hidden // heads


def _dtype(file: GgufFile) -> str:
    """Return the dtype to compute in: that of most stored bytes, bfloat16 for quantised tensors."""
    bytes_of: Counter[str] = Counter()
    for tensor in file.tensors.values():
        bytes_of[tensor.kind] += tensor.nbytes
    ((kind, _),) = bytes_of.most_common(1)
    return {"F32": "float32", "F16": "float16"}.get(kind, "bfloat16")


def _ends(file: GgufFile) -> list[int]:
    """Return the tokens that end an answer: of a text, of a turn."""
    found = [file.metadata.get(f"tokenizer.ggml.{end}_token_id") for end in ("eos", "eot")]
    return list(dict.fromkeys(token for token in found if type(token) is int))


def _scaling(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return `rope_scaling`, None where positions rotate as they are."""
    file, scaled = metadata.file, "rope.scaling."
    kind = metadata.get(scaled + "type")
    asked = ("factor", "original_context_length", "attn_factor", "yarn_beta_fast", "yarn_beta_slow")
    factor, original, attention, fast, slow = (metadata.get(scaled + key) for key in asked)
    longest = config["max_position_embeddings"]
    longrope = all(name in file.tensors for name in FACTORS.values())
    if attention not in (None, 0, 1, 1.0) and not longrope:
        raise ValueError(
            f"'{file.path}': rope.scaling.attn_factor={attention} is not supported without the "
            "tensors of longrope"
        )
    if FREQUENCIES in file.tensors:  # what Llama 3 stretches its positions by, worked out already
        if kind not in (None, "none", "linear"):
            raise ValueError(
                f"'{file.path}': {shortened(repr(kind))} rope scaling beside the tensor "
                f"'{FREQUENCIES}' is not supported; expected one of the two"
            )
        both = factor if kind == "linear" else 1.0
        factors = [each * both for each in _factors(metadata, FREQUENCIES, config)]
        turned = [factor for factor in factors if factor < AT_REST]
        if turned == factors[: len(turned)] and len(set(turned)) == 1:
            share = len(turned) / len(factors)
            return {
                "rope_type": "proportional",
                "partial_rotary_factor": share,
                "factor": turned[0],
            }
        return _stretched(factors, factors, longest, 1.0)
    if longrope:
        long, short = (_factors(metadata, FACTORS[end], config) for end in ("long", "short"))
        return _stretched(short, long, original or longest, attention)
    if kind in (None, "none"):
        if factor not in (None, 0, 1, 1.0):
            raise ValueError(
                f"'{file.path}': rope.scaling.factor={factor} without rope.scaling.type; the file "
                "does not say how its positions are stretched"
            )
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise ValueError(
            f"'{file.path}': rope scaling {shortened(repr(kind))} is not supported; expected "
            "'none', 'linear' or 'yarn', or the tensors of longrope"
        )
    found = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    found |= config.get("yarn") or {}
    over = metadata.get(scaled + "yarn_log_multiplier")
    if over and "mscale" not in found:
        found |= {"mscale": over, "mscale_all_dim": over}
    ends = {"beta_fast": fast, "beta_slow": slow}
    return found | {key: value for key, value in ends.items() if value is not None}


def _factors(metadata: Metadata, name: str, config: Mapping[str, Any]) -> list[float]:
    """Return what a tensor divides the frequencies by: one positive number for each."""
    found = metadata.file.floats(name)
    count = metadata.number("rope.dimension_count", default=config["head_dim"]) // 2
    if len(found) != count or not all(0 < factor < math.inf for factor in found):
        raise ValueError(
            f"'{metadata.file.path}': tensor '{name}' must be {count} positive numbers, one for "
            f"each pair of a head's rotated channels, got {shortened(str(found))}; the file is "
            "damaged: download it again"
        )
    return found


def _stretched(
    short: list[float], long: list[float], original: int, attention: float | None
) -> dict[str, Any]:
    found = {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": original,
    }
    return found if attention is None else {**found, "attention_factor": attention}


def _llama(metadata: Metadata, config: dict[str, Any]) -> None:
    """Llama, Mistral and, with experts, Mixtral."""
    if metadata.get("attention.sliding_window"):
        config |= {
            "model_type": "mistral",
            "sliding_window": metadata.get("attention.sliding_window"),
        }
    if metadata.get("expert_count"):
        config |= {
            "model_type": "mixtral",
            "num_local_experts": metadata.number("expert_count"),
            "num_experts_per_tok": metadata.number("expert_used_count"),
        }
    _output_bias(metadata, config)
    if "attention_out_bias" in config and config["model_type"] == "llama":
        config["model_type"] = "seed_oss"  # Llama's layer; Transformers has no Llama of this form


def _output_bias(metadata: Metadata, config: dict[str, Any]) -> None:
    """Say whether attention's output has a bias, where it has not what queries have."""
    biased = "blk.0.attn_output.bias" in metadata.file.tensors
    if biased != config["attention_bias"]:
        config["attention_out_bias"] = biased


def _qwen3moe(metadata: Metadata, config: dict[str, Any]) -> None:
    _require_softmax(metadata)
    config |= {
        "num_experts": metadata.number("expert_count"),
        "num_experts_per_tok": metadata.number("expert_used_count"),
        "moe_intermediate_size": metadata.number("expert_feed_forward_length"),
        "norm_topk_prob": metadata.get("expert_weights_norm") is not False,
    }


def _require_softmax(metadata: Metadata) -> None:
    if metadata.get("expert_gating_func") not in (None, 1):
        raise ValueError(
            f"'{metadata.file.path}': experts are not chosen by softmax, as Qwen3's are"
        )


def _window(metadata: Metadata, config: dict[str, Any]) -> None:
    """Phi 3; Ministral 3 without a temperature that grows with the length, refused as unknown."""
    config["sliding_window"] = metadata.get("attention.sliding_window")


def _granite(metadata: Metadata, config: dict[str, Any]) -> None:
    config |= {
        "embedding_multiplier": metadata.number("embedding_scale", REAL, default=1.0),
        "attention_multiplier": metadata.number("attention.scale", REAL, default=1.0),
        "residual_multiplier": metadata.number("residual_scale", REAL, default=1.0),
        "logits_scaling": metadata.number("logit_scale", REAL, default=1.0),
    }


NO_POSITIONS_EVERY = 4
"""llama.cpp rotates no queries and keys of every fourth layer of SmolLM3."""


def _smollm3(metadata: Metadata, config: dict[str, Any]) -> None:
    config["no_rope_layer_interval"] = NO_POSITIONS_EVERY


def _cohere(metadata: Metadata, config: dict[str, Any]) -> None:
    config["logit_scale"] = metadata.number("logit_scale", REAL)
    config["use_qk_norm"] = "blk.0.attn_q_norm.weight" in metadata.file.tensors


def _cohere2(metadata: Metadata, config: dict[str, Any]) -> None:
    layer_types(metadata, config)
    config["logit_scale"] = metadata.number("logit_scale", REAL)


def _seed_oss(metadata: Metadata, config: dict[str, Any]) -> None:
    config["attention_out_bias"] = "blk.0.attn_output.bias" in metadata.file.tensors


def _ernie4_5(metadata: Metadata, config: dict[str, Any]) -> None:
    config["use_bias"] = config.pop("attention_bias")
    config.pop("mlp_bias")


def _stablelm(metadata: Metadata, config: dict[str, Any]) -> None:
    tensors = metadata.file.tensors
    metadata.get("use_parallel_residual")  # newer files say what their tensors tell
    config["use_parallel_residual"] = "blk.0.ffn_norm.weight" not in tensors
    config["qk_layernorm"] = "blk.0.attn_q_norm.weight" in tensors
    config["use_qkv_bias"] = config.pop("attention_bias")


def _starcoder2(metadata: Metadata, config: dict[str, Any]) -> None:
    config["use_bias"] = config.pop("attention_bias")
    config["sliding_window"] = metadata.get("attention.sliding_window")
    config.pop("mlp_bias")


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(model_type="llama", also=_llama, pairs=True),
    "qwen2": Architecture(model_type="qwen2"),
    "qwen3": Architecture(model_type="qwen3"),
    "qwen3moe": Architecture(model_type="qwen3_moe", also=_qwen3moe),
    "gemma2": Architecture(model_type="gemma2", also=gemma("gemma2"), above_one=True),
    "gemma3": Architecture(model_type="gemma3_text", also=gemma("gemma3"), above_one=True),
    "gemma3n": Architecture(model_type="gemma3n_text", also=gemma3n, by_layer=True),
    "gemma4": Architecture(
        model_type="gemma4_text", also=gemma4, by_layer=True, experts_apart=True
    ),
    "phi3": Architecture(model_type="phi3", also=_window),
    "glm4": Architecture(model_type="glm4"),
    "granite": Architecture(model_type="granite", also=_granite, pairs=True),
    "olmo2": Architecture(model_type="olmo2"),
    "llama4": Architecture(model_type="llama4_text", also=llama4, experts_apart=True),
    "mistral3": Architecture(model_type="mistral", also=_window, pairs=True),
    "gpt-oss": Architecture(model_type="gpt_oss", also=gpt_oss),
    "glm4moe": Architecture(model_type="glm4_moe", also=glm4moe, further=True),
    "deepseek2": Architecture(model_type="deepseek_v2", also=deepseek2, latent=True),
    "smollm3": Architecture(model_type="smollm3", also=_smollm3, pairs=True),
    "exaone4": Architecture(model_type="exaone4", also=layer_types),
    "arcee": Architecture(model_type="arcee", pairs=True),
    "seed_oss": Architecture(model_type="seed_oss", also=_seed_oss),
    "ernie4_5": Architecture(model_type="ernie4_5", also=_ernie4_5),
    "ernie4_5-moe": Architecture(model_type="ernie4_5_moe", also=ernie4_5_moe),
    "hunyuan-dense": Architecture(model_type="hunyuan_v1_dense"),
    "hunyuan-moe": Architecture(model_type="hunyuan_v1_moe", also=hunyuan_moe),
    "minimax-m2": Architecture(model_type="minimax_m2", also=minimax_m2),
    "olmoe": Architecture(model_type="olmoe", also=olmoe),
    "dots1": Architecture(model_type="dots1", also=dots1),
    "lfm2": Architecture(model_type="lfm2", also=lfm2, recurrent=True),
    "lfm2moe": Architecture(model_type="lfm2_moe", also=lfm2_moe, recurrent=True),
    "granitehybrid": Architecture(
        model_type="granitemoehybrid", also=granite_hybrid, pairs=True, recurrent=True
    ),
    "qwen3next": Architecture(model_type="qwen3_next", also=qwen3_next, above_one=True),
    "qwen35": Architecture(
        model_type="qwen3_5_text", also=qwen3_5, above_one=True, by_turns=True, further=True
    ),
    "qwen35moe": Architecture(
        model_type="qwen3_5_moe_text",
        also=qwen3_5_moe,
        above_one=True,
        by_turns=True,
        experts_apart=True,
        further=True,
    ),
    "falcon-h1": Architecture(model_type="falcon_h1", also=falcon_h1),
    "kimi-linear": Architecture(
        model_type="kimi_linear", also=kimi_linear, latent=True, recurrent=True
    ),
    "nemotron_h": Architecture(model_type="nemotron_h", also=nemotron_h, recurrent=True),
    "nemotron_h_moe": Architecture(
        model_type="nemotron_h", also=nemotron_h, recurrent=True, further=True
    ),
    "command-r": Architecture(model_type="cohere", also=_cohere, layer_norm="layer_norm_eps"),
    "cohere2": Architecture(model_type="cohere2", also=_cohere2, layer_norm="layer_norm_eps"),
    "stablelm": Architecture(model_type="stablelm", also=_stablelm, layer_norm="layer_norm_eps"),
    "starcoder2": Architecture(
        model_type="starcoder2", also=_starcoder2, layer_norm="norm_epsilon"
    ),
}
"""`general.architecture` -> what it means."""
