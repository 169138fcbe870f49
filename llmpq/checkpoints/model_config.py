"""From a Hugging Face `config.json` to the fields of `ModelSpec`, by its family's record.

A config is read as Transformers' class of its `model_type` reads it. A key that neither the class
nor its model reads changes nothing; one that they read and the family's record does not is refused,
unless it is switched off, has the class's default or is `BOOKKEEPING`. What is left out is named.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmpq.checkpoints.adapters import adapter_instead
from llmpq.checkpoints.gguf_config import config_of_gguf
from llmpq.checkpoints.gguf_file import is_gguf, models_in, open_gguf
from llmpq.checkpoints.tensor_names import tensor_names
from llmpq.errors import short_repr, shortened
from llmpq.families import BY_MODEL_TYPE, WRAPPERS
from llmpq.families.common.class_defaults import ConfigClass, config_class
from llmpq.families.common.config_values import (
    Config,
    head_size,
    is_given,
    section,
    size,
    token_ids,
)
from llmpq.families.common.record import Family
from llmpq.families.not_run import (
    FURTHER_LAYERS,
    LEFT_OUT,
    MTP_LAYERS,
    WITHOUT_EQUATION,
    lacking,
    no_language_model,
)
from llmpq.file_form import broken_link, lfs_pointer

BOOKKEEPING = frozenset(
    [
        "init_std",
        "gradient_clipping",
        "rescale_prenorm_residual",
        "time_step_floor",
        "num_logits_to_keep",
        "use_mamba_kernels",
        "mamba_ssm_cache_dtype",
        "moe_shared_expert_overlap",
        "use_cache",
        "pretraining_tp",
        "output_router_logits",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "slow_but_exact",
        "max_window_layers",
        "vision_config",
        "text_config",
        "llm_config",
        "deepstack_visual_indexes",
    ]
)
"""Keys that config classes read and that change nothing of what a trained model computes."""

BOOKKEEPING_KINDS = re.compile(r"^_|drop(out|$)|layerdrop|_token_ids?$|initializer")
"""Kinds of such keys: of the file itself, of training, of tokens."""

CHANGING = frozenset(
    [
        "is_bidirectional",
        "bidirectional",
        "use_bidirectional_attention",
        "alibi",
        "use_alibi",
        "attention_sinks",
        "attention_chunk_size",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "logit_scale",
        "clip_qkv",
        "embedding_multiplier",
        "residual_multiplier",
        "attention_multiplier",
        "logits_scaling",
        "attn_temperature_tuning",
        "no_rope_layers",
        "qk_layernorm",
        "use_parallel_residual",
        "parallel_attn",
        "num_kv_shared_layers",
        "index_topk",
        "kv_lora_rank",
    ]
)
"""Keys that change the arithmetic of the families that read them; refused in others' configs."""

TIED = "tie_word_embeddings"
NOT_CAUSAL = ("is_causal", "causal", "use_causal_mask")
"""Keys whose false switches the causal mask off."""


class _Read(Mapping[str, Any]):
    """A config as Transformers' class of its `model_type` reads it.

    An absent key has the class's default. It remembers which of its keys were asked for, and which
    of those had the class's default.
    """

    def __init__(self, config: Config, kind: ConfigClass) -> None:
        self._config, self._kind = config, kind
        self.asked: set[str] = set()
        self.defaulted: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        defaults = self._kind.defaults
        if key in self._config:
            given = self._config[key]
            if given is not None or key not in defaults or key in self._kind.nullable:
                return given
        if any(self._config.get(other) is not None for other in self._kind.same_as(key)):
            raise KeyError(key)
        self.defaulted[key] = defaults[key]
        return defaults[key]

    def __iter__(self) -> Iterator[str]:
        return iter({**self._kind.defaults, **self._config})

    def __len__(self) -> int:
        return len({**self._kind.defaults, **self._config})


MOST_LAYERS = 10_000
"""Layers of which every one is planned; published models have up to 130."""


def _require_countable(config: Config) -> None:
    """Raise `ValueError` for more layers than any model has: lists of them would fill memory."""
    for key in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"):
        count = config.get(key)
        if isinstance(count, int) and count > MOST_LAYERS:
            raise ValueError(
                f"config.json: {key}={short_repr(count)}, expected {MOST_LAYERS:,} layers at most; "
                "correct it or download config.json again"
            )


def spec_fields(config: Config, name: str) -> dict[str, Any]:
    """Return the `ModelSpec` fields for a config; `ValueError` if it is not supported."""
    other = no_language_model(config)
    if other is not None:
        raise ValueError(f"config.json: {other}")
    model_type, inner = _language_model(config)
    family = BY_MODEL_TYPE.get(model_type)
    if family is None:
        raise _unknown_family(model_type, config, inner)
    _require_countable(inner)
    section(config, "quantization_config")  # The runtime reads it; a plan is refused already.
    kind = config_class(model_type)
    read = _Read(inner, kind)
    _require_agreement(inner, kind)
    _require_sound(read, family.fields(read))
    fields = _counted(_shapes(family, read))
    left_out = _left_out(config, inner)
    _require_known(inner, read.asked, kind, model_type)
    ends = token_ids(inner if inner.get("eos_token_id") else config, "eos_token_id")
    found = {
        "name": name,
        "family": family.name,
        "dtype": _dtype(config, inner),
        "eos_token_ids": ends,
        "left_out": left_out,
        "further_layers": _further_layers(config, inner),
        "mtp_layers": _count(config, inner, MTP_LAYERS),
        "from_class": _from_class(family, inner, kind, read.defaulted, fields),
    }
    return {**found, **fields}


MOST = 2**24
"""Positions, rows and columns that a plan counts to: a published model has 10 million positions."""


def _counted(fields: dict[str, Any]) -> dict[str, Any]:
    """Return fields without more positions than are counted: a bound beyond them is none.

    `ValueError` for another size that no model has.
    """
    for key, value in fields.items():
        if type(value) is int and value > MOST and key != "max_positions":
            raise ValueError(
                f"config.json: {key}={value:,}, expected {MOST:,} at most; correct it or download "
                "config.json again"
            )
    windows = tuple(min(window, MOST) for window in fields.get("windows", ()))
    return {**fields, "max_positions": min(fields["max_positions"], MOST)} | (
        {"windows": windows} if windows else {}
    )


def _shapes(family: Family, read: _Read) -> dict[str, Any]:
    """Return the fields that a family's record reads, with a head's channels."""
    fields = family.fields(read)
    own_head = {} if "head_dim" in fields else {"head_dim": head_size(read)}
    return {**own_head, **fields}


def inside(config: Config) -> Config | None:
    """Return the section of a language model inside; Nemotron Omni's older configs call it so."""
    return section(config, "text_config") or section(config, "llm_config")


def _language_model(config: Config) -> tuple[str, dict[str, Any]]:
    """Return the `model_type` and the keys of the language model: a section's, or the whole's."""
    model_type = str(config.get("model_type"))
    if model_type not in WRAPPERS:
        return model_type, dict(config)
    inner = {**(inside(config) or config)}
    own = inner.get("model_type", model_type)
    model_type = str(config_class(model_type).text if own == model_type else own)
    if TIED in config:  # the whole model's word counts
        inner[TIED] = config[TIED]
    return model_type, {**inner, "model_type": model_type}


def with_stored_head(config: dict[str, Any], directory: str | Path) -> dict[str, Any]:
    """Return a config that says whether a directory stores an output matrix of its own.

    Where a wrapper says, or by its class's default, that there is none, and the language model
    inside that there is one, Transformers goes by the tensors.
    """
    model_type = str(config.get("model_type"))
    text_type, inner = _language_model(config)
    if model_type not in WRAPPERS or text_type not in BY_MODEL_TYPE:
        return config
    whole = config.get(TIED, config_class(model_type).defaults.get(TIED))
    own = (inside(config) or inner).get(TIED)
    own = config_class(text_type).defaults.get(TIED) if own is None else own
    names = tensor_names(Path(directory)) if whole and not own else frozenset()
    if not names:
        return config
    return {**config, TIED: not any(name.endswith("lm_head.weight") for name in names)}


def _require_agreement(config: Config, kind: ConfigClass) -> None:
    """Refuse a config whose key and alias say different things."""
    for alias, key in kind.aliases.items():
        both = [config.get(alias), config.get(key)]
        if None not in both and both[0] != both[1]:
            raise ValueError(
                f"config.json: '{alias}'={short_repr(both[0])} and '{key}'={short_repr(both[1])} "
                "are two names of one value; remove the wrong one or download config.json again"
            )


def _unknown_family(model_type: str, config: Config, inner: Config) -> ValueError:
    """Say which family it is and what of it llmpq lacks, not which family has a similar name."""
    known = ", ".join(sorted([*BY_MODEL_TYPE, *WRAPPERS]))
    text = inside(config) or {}
    text_type = str(text.get("model_type", ""))
    runs = text_type in BY_MODEL_TYPE
    # What a language model inside has that is run is no lack.
    feature = lacking(model_type, config if runs else {**config, **text, **inner}, text_type)
    if feature is None and runs:
        feature = f"{WITHOUT_EQUATION}; '{text_type}' inside is run if saved as a model of its own"
    elif feature is None:
        feature = WITHOUT_EQUATION
    if is_given(config.get("vision_config")):
        feature += ", and would leave out its vision tower"
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
    return _count(config, inner, FURTHER_LAYERS)


def _count(config: Config, inner: Config, keys: tuple[str, ...]) -> int:
    """Return the number of the first key that is there; 0 without one."""
    for source in (config, inner):
        for key in keys:
            if is_given(source.get(key)):
                return size(source, key)
    return 0


def _from_class(
    family: Family, config: Config, kind: ConfigClass, defaulted: Mapping[str, Any], fields: Any
) -> tuple[str, ...]:
    """Return the numbers that the config left to its class and that decide something: `key=value`.

    With another default the model would be another one, or none. Flags and names are left out:
    nearly every config leaves some.
    """

    def decides(key: str, value: float) -> bool:
        other = replace(kind, defaults={**kind.defaults, key: 2 * value + 1})
        try:
            return _shapes(family, _Read(config, other)) != fields
        except (ValueError, KeyError):
            return True

    numbers = {key: v for key, v in defaulted.items() if type(v) in (int, float)}
    return tuple(f"{key}={value}" for key, value in numbers.items() if decides(key, value))


def _require_known(config: Config, asked: set[str], kind: ConfigClass, model_type: str) -> None:
    """Refuse a key that changes what the model computes and that its family does not read.

    A key that Transformers' class and model do not read changes nothing.
    """
    left = {k: v for k, v in config.items() if k not in asked and not _is_bookkeeping(k)}
    for key, value in left.items():
        read = key in kind.reads and key not in LEFT_OUT and key not in MTP_LAYERS
        changing = read or key in CHANGING or key in NOT_CAUSAL
        beyond = key == "sliding_window" and _is_beyond(value, config)
        if changing and not beyond and not _is_neutral(key, value, kind):
            raise ValueError(
                f"config.json: '{shortened(key)}'={short_repr(value)} changes what a model "
                f"computes, and llmpq does not run {model_type} with it; remove it from "
                "config.json if the model was trained without it"
            )


def _is_bookkeeping(key: str) -> bool:
    """Whether a key that its family does not read says nothing of what a trained model computes."""
    return key in BOOKKEEPING or BOOKKEEPING_KINDS.search(key) is not None


def _is_beyond(window: Any, config: Config) -> bool:
    """Whether a window holds all positions of the model."""
    longest = config.get("max_position_embeddings")
    return type(window) is int and type(longest) is int and window >= longest


def _is_neutral(key: str, value: Any, kind: ConfigClass) -> bool:
    """Whether a key that its family does not read says what the family is run with."""
    if key in NOT_CAUSAL:
        return value is not False
    if key == "layer_types":
        return value in (None, []) or set(value) == {"full_attention"}
    return not is_given(value) or (key in kind.defaults and value == kind.defaults[key])


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
            f"config.json: head_dim={head_dim} is odd; rotary positions rotate pairs of "
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
        raise ValueError(lfs_pointer(path) or f"'{path}' is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"'{path}': got {type(config).__name__}, expected an object")
    return config


def _nothing_to_read(path: Path) -> str:
    """Say what is missing where a model should be."""
    if path.suffix == ".gguf":
        return f"no such file: '{path}'; expected a GGUF file, or a model directory"
    found = models_in(path) if path.is_dir() else []
    if found:
        return f"no config.json in '{path}', but GGUF files: give one itself, '{found[0]}'"
    return (
        other_form(path)
        or f"no config.json in '{path}': expected a local Hugging Face model directory"
    )


THEIR_OWN = {
    "consolidated*.safetensors": "Mistral",
    "consolidated.*.pth": "Meta",
    "weights*.npz": "MLX",
    "*.onnx": "ONNX",
    "openvino_model.bin": "OpenVINO",
    "tf_model.h5": "TensorFlow",
    "flax_model.msgpack": "Flax",
}
"""Files of weights that are no Hugging Face safetensors -> whose form that is."""
MODEL_SUFFIXES = (".json", ".safetensors", ".gguf")
INNER = tuple(
    f"{folder}*/{file}"
    for folder in ("", "snapshots/", "*/snapshots/")
    for file in ("config.json", "*.gguf")
)
"""Where a folder has a model in it, a repository's folder of Hugging Face's cache too."""


def other_form(path: Path) -> str | None:
    """Say what a directory holds where that is no model in Hugging Face's form."""
    files = sorted(file for file in path.glob("*") if file.suffix in MODEL_SUFFIXES)
    broken = next(filter(None, map(broken_link, files)), None)
    if broken is not None:
        return broken
    adapter = adapter_instead(path)
    if adapter is not None:
        return adapter
    for pattern, whose in THEIR_OWN.items():
        held = sorted(path.glob(pattern))
        if held:
            return (
                f"'{path}' has its weights in {whose}'s own form ('{held[0].name}'); llmpq reads "
                "Hugging Face's (config.json and model.safetensors): download that, or convert "
                "with the script that Transformers has for the model"
            )
    for pattern in INNER:
        inner = sorted(path.glob(pattern))
        if inner:
            model = inner[0].parent if inner[0].name == "config.json" else inner[0]
            return f"'{path}' is no model itself: give one in it, such as '{model}'"
    return None
