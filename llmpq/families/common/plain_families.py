"""Shared by older families: LayerNorm with biases, and MLPs without a gate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from llmpq.errors import short_repr
from llmpq.families.common.config_values import Config, epsilon, flag, size

ACTIVATIONS = {
    "gelu": "gelu_erf",
    "gelu_new": "gelu",
    "gelu_fast": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_python_tanh": "gelu",
    "relu": "relu",
    "relu2": "relu2",
}
"""Transformers' name of an activation -> ours in an MLP without a gate; tanh forms are alike."""


def plain_activation(config: Config, key: str) -> str:
    """Return the activation of an MLP without a gate."""
    given = config.get(key)
    if given not in ACTIVATIONS:
        raise ValueError(
            f"config.json: {key}={short_repr(given)} is not supported; expected "
            + ", ".join(f"'{name}'" for name in ACTIVATIONS)
        )
    return ACTIVATIONS[given]


class Renamed(Mapping[str, Any]):
    """A config in which what others call one thing has another name."""

    def __init__(self, config: Config, names: Mapping[str, str]) -> None:
        """`names`: what is asked for -> what this config calls it, where it is there."""
        self._config, self._names = config, names

    def __getitem__(self, key: str) -> Any:
        own = self._config.get(self._names[key]) if key in self._names else None
        return self._config[key] if own is None else own

    def __iter__(self) -> Iterator[str]:
        return iter(self._config)

    def __len__(self) -> int:
        return len(self._config)


def gpt_fields(config: Config) -> dict[str, Any]:
    """Return the fields of families with GPT-2's keys: `n_embd`, `n_head`, `n_layer`, `n_inner`."""
    hidden = size(config, "n_embd", "hidden_size")
    heads = size(config, "n_head", "num_attention_heads")
    config.get("n_ctx")  # the same as n_positions, or unread
    return {
        "num_layers": size(config, "n_layer", "num_hidden_layers"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads,
        "ffn": size(config, "n_inner", default=4 * hidden),
        "vocab": size(config, "vocab_size"),
        "max_positions": size(config, "n_positions", "max_position_embeddings"),
        "norm": "layernorm",
        "norm_eps": epsilon(config, "layer_norm_epsilon"),
        "activation": plain_activation(config, "activation_function"),
        "gated": False,
        "qkv_bias": True,
        "linear_bias": True,
        "tied_embeddings": flag(config, "tie_word_embeddings", default=True),
    }


def by_head(qkv: Any, spec: Any) -> Any:
    """Return the fused rows as q, k, v; a checkpoint has q, k, v of head 0, of head 1, ..."""
    apart = qkv.view(spec.heads, 3, spec.head_dim, *qkv.shape[1:])
    return apart.transpose(0, 1).reshape(qkv.shape)
