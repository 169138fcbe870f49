"""From a Hugging Face `config.json` to the fields of `ModelSpec`, by its family's record.

Nothing in a config is passed over in silence: what no family reads must be known to change nothing
(`HARMLESS`), be switched off, or it is refused. What is known to be left out is named.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from llmpq.checkpoints.gguf_config import config_of_gguf
from llmpq.checkpoints.gguf_file import is_gguf, open_gguf
from llmpq.errors import short_repr, shortened
from llmpq.families import BY_MODEL_TYPE
from llmpq.families.common.config_values import (
    Config,
    head_size,
    is_given,
    section,
    size,
    token_ids,
)
from llmpq.families.not_run import FURTHER_LAYERS, LEFT_OUT, WITHOUT_EQUATION, lacking

HARMLESS = frozenset(
    [
        "_name_or_path",
        "_attn_implementation",
        "attn_implementation",
        "architectures",
        "auto_map",
        "model_type",
        "name",
        "transformers_version",
        "torch_dtype",
        "dtype",
        "torchscript",
        "use_cache",
        "cache_implementation",
        "use_bfloat16",
        "initializer_range",
        "initializer_factor",
        "init_std",
        "pretraining_tp",
        "quantization_config",
        "attention_dropout",
        "hidden_dropout",
        "hidden_dropout_prob",
        "attention_probs_dropout_prob",
        "dropout",
        "activation_dropout",
        "attn_pdrop",
        "resid_pdrop",
        "embd_pdrop",
        "layerdrop",
        "classifier_dropout",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "sep_token_id",
        "unk_token_id",
        "cls_token_id",
        "decoder_start_token_id",
        "mask_token_id",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "output_scores",
        "return_dict_in_generate",
        "output_router_logits",
        "router_aux_loss_coef",
        "aux_loss_alpha",
        "seq_aux",
        "router_jitter_noise",
        "router_z_loss_coef",
        "ep_size",
        "is_decoder",
        "is_encoder_decoder",
        "chunk_size_feed_forward",
        "id2label",
        "label2id",
        "num_labels",
        "problem_type",
        "finetuning_task",
        "tokenizer_class",
        "task_specific_params",
        "prefix",
        "max_length",
        "min_length",
        "do_sample",
        "early_stopping",
        "num_beams",
        "num_beam_groups",
        "diversity_penalty",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
        "repetition_penalty",
        "length_penalty",
        "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size",
        "bad_words_ids",
        "num_return_sequences",
        "exponential_decay_length_penalty",
        "suppress_tokens",
        "begin_suppress_tokens",
        "remove_invalid_values",
        "num_hidden_layers_original",
        "attention_softmax_in_fp32",
        "masked_softmax_fusion",
        "bias_dropout_fusion",
        "skip_bias_add",
        "skip_bias_add_qkv",
        "slow_but_exact",
        "unk_id",
        "offset_alibi",
        "use_flash_attn",
        "flash_attn",
        "gradient_checkpointing",
        "vocab_size_original",
        "max_window_layers",
    ]
)
"""Keys that say nothing of what a layer computes: training, generation, bookkeeping."""


class _Heard(Mapping[str, Any]):
    """A config that remembers which of its keys were asked for."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self.asked: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return self._config[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._config)

    def __len__(self) -> int:
        return len(self._config)


def spec_fields(config: Config, name: str) -> dict[str, Any]:
    """Return the `ModelSpec` fields for a config; `ValueError` if it is not supported."""
    model_type = str(config.get("model_type"))
    family = BY_MODEL_TYPE.get(model_type)
    if family is None:
        raise _unknown_family(model_type, config)
    section(config, "quantization_config")  # The runtime reads it; a plan is refused already.
    inner = config
    if family.text_section is not None:
        inner = {**(section(config, family.text_section) or config)}
        if "tie_word_embeddings" in config:  # the whole model's word counts
            inner["tie_word_embeddings"] = config["tie_word_embeddings"]
    heard = _Heard(inner)
    fields = family.fields(heard)
    _require_sound(heard, fields)
    own_head = {} if "head_dim" in fields else {"head_dim": head_size(heard)}
    left_out = _left_out(config, inner)
    _require_known(inner, heard.asked, family.name)
    found = {
        "name": name,
        "family": family.name,
        "dtype": _dtype(config, inner),
        "eos_token_ids": token_ids(inner if inner.get("eos_token_id") else config, "eos_token_id"),
        "left_out": left_out,
        "further_layers": _further_layers(config, inner),
    }
    return {**found, **own_head, **fields}


def _unknown_family(model_type: str, config: Config) -> ValueError:
    """Say which family it is and what of it llmpq lacks; a name that looks alike helps nobody."""
    known = ", ".join(sorted(BY_MODEL_TYPE))
    feature = lacking(model_type, config) or WITHOUT_EQUATION
    return ValueError(
        f"config.json: model_type '{shortened(model_type)}' is not supported: llmpq lacks "
        f"{feature}; it runs {known}. See `llmpq-algo models`"
    )


def _left_out(config: Config, inner: Config) -> tuple[str, ...]:
    """Return what of the checkpoint is not run, in words."""
    found = []
    for key, words in LEFT_OUT.items():
        value = config.get(key, inner.get(key))
        if is_given(value):
            found.append(words.format(value=value))
    return tuple(dict.fromkeys(found))


def _further_layers(config: Config, inner: Config) -> int:
    """Return how many layers behind the last one a checkpoint may have."""
    for source in (config, inner):
        for key in FURTHER_LAYERS:
            if is_given(source.get(key)):
                return size(source, key)
    return 0


def _require_known(config: Config, asked: set[str], family: str) -> None:
    """Refuse a key that nobody reads and that may change what the model computes."""
    known = asked | HARMLESS | set(LEFT_OUT)
    unknown = sorted(k for k in config if k not in known and is_given(config[k]))
    if unknown:
        key = unknown[0]
        raise ValueError(
            f"config.json: '{shortened(key)}'={short_repr(config[key])} is not known to llmpq's "
            f"{family} and may change what the model computes; remove it from config.json if it "
            "does not"
        )


def _require_sound(config: Config, fields: Mapping[str, Any]) -> None:
    """Refuse shapes that do not go together."""
    heads, kv_heads, hidden = fields["heads"], fields["kv_heads"], fields["hidden"]
    if fields.get("head_dim") is None and config.get("head_dim") is None and hidden % heads:
        raise ValueError(
            f"config.json: hidden_size={hidden} is not a multiple of num_attention_heads={heads}; "
            "correct them or download config.json again"
        )
    head_dim = fields.get("head_dim") or size(config, "head_dim", default=hidden // heads)
    if fields["positions"] == "rotary" and head_dim % 2:
        raise ValueError(
            f"config.json: head_dim={head_dim} is odd; rotary positions turn pairs of "
            "channels. Correct it or download config.json again"
        )
    if heads % kv_heads:
        raise ValueError(
            f"config.json: {heads} query heads do not share {kv_heads} key/value heads evenly; "
            "expected a multiple. Correct num_attention_heads or num_key_value_heads, or download "
            "config.json again"
        )


def _dtype(config: Config, inner: Config) -> str:
    given = [c.get(k) for c in (inner, config) for k in ("dtype", "torch_dtype")]
    dtype = str(next((d for d in given if d is not None), "float32")).removeprefix("torch.")
    if dtype not in ("float16", "bfloat16", "float32"):
        raise ValueError(f"model dtype '{dtype}' is not supported: float16, bfloat16 or float32")
    return dtype


def read_config(directory: str | Path) -> dict[str, Any]:
    """Return the `config.json` of a model directory, or what it would say of a GGUF file.

    `ValueError` if it is not a JSON object.
    """
    if is_gguf(directory):
        return config_of_gguf(open_gguf(directory))
    path = Path(directory) / "config.json"
    try:
        config = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(_nothing_to_read(Path(directory))) from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"'{path}' is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"'{path}': got {type(config).__name__}, expected an object")
    return config


def _nothing_to_read(path: Path) -> str:
    """Say what is missing where a model should be."""
    if path.suffix == ".gguf":
        return f"no such file: '{path}'; expected a GGUF file, or a model directory"
    found = sorted(path.glob("*.gguf")) if path.is_dir() else []
    if found:
        return f"no config.json in '{path}', but GGUF files: give one itself, '{found[0]}'"
    return f"no config.json in '{path}': expected a local Hugging Face model directory"
