"""What a model is made of: the shapes that decide bytes, time and wiring.

Read from a Hugging Face `config.json` (`ModelSpec.from_directory`) or by name from `models.yaml`
(`ModelSpec.by_name`). Anything the code relies on is checked here, once, with a helpful error.

Symbols: L layers, h hidden, H query heads, G key/value heads, D head_dim, F ffn, V vocabulary,
E experts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import yaml

from llmpq.errors import unknown_name
from llmpq.families.config_values import RopeScaling
from llmpq.model_config import spec_fields

Positions = Literal["learned", "alibi", "rotary"]
Norm = Literal["layernorm", "rmsnorm"]


@dataclass(frozen=True, kw_only=True)
class LinearShape:
    """One fused weight matrix of a decoder layer, [out_features, in_features]."""

    name: str
    """`qkv`, `o`, `gate_up` or `up`, `down`; of an expert `experts.3.down`."""
    out_features: int
    in_features: int
    bias: bool

    @property
    def num_weights(self) -> int:
        """Number of elements of the matrix."""
        return self.out_features * self.in_features


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The architecture of one decoder-only model; equal specs run the same plans."""

    name: str
    family: str
    """A name of `llmpq.families`."""
    num_layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    max_positions: int
    positions: Positions
    norm: Norm
    norm_eps: float
    activation: Literal["relu", "gelu", "silu"]
    gated: bool
    qkv_bias: bool
    linear_bias: bool
    tied_embeddings: bool
    qk_norm: bool = False
    embedding_norm: bool = False
    rope_theta: float | None = None
    rope_scaling: RopeScaling | None = None
    experts: int = 0
    """MLPs of a layer that a router chooses from for each token; 0: one MLP, no router."""
    experts_per_token: int = 0
    dtype: Literal["float16", "bfloat16", "float32"] = "float16"
    eos_token_ids: tuple[int, ...] = field(default=(), compare=False)

    def linears(self) -> tuple[LinearShape, ...]:
        """Return the fused matrices of a decoder layer: qkv, o, up (or gate and up) and down.

        Every expert has its own up and down. The router, [E, h], is not among them: it is never
        quantised.
        """
        q_out, kv_out = self.heads * self.head_dim, self.kv_heads * self.head_dim
        up_out = 2 * self.ffn if self.gated else self.ffn
        up = "gate_up" if self.gated else "up"
        shapes = [
            ("qkv", q_out + 2 * kv_out, self.hidden, self.qkv_bias),
            ("o", self.hidden, q_out, self.linear_bias),
        ]
        for owner in self.mlps():
            shapes += [
                (f"{owner}{up}", up_out, self.hidden, self.linear_bias),
                (f"{owner}down", self.hidden, self.ffn, self.linear_bias),
            ]
        return tuple(
            LinearShape(name=name, out_features=n, in_features=k, bias=bias)
            for name, n, k, bias in shapes
        )

    def mlps(self) -> tuple[str, ...]:
        """Return what the names of each MLP's linears begin with: `experts.0.`, or nothing."""
        return tuple(f"experts.{number}." for number in range(self.experts)) or ("",)

    @property
    def norm_params(self) -> int:
        """Parameters of one norm over the hidden size: weight, and bias where it has one."""
        return self.hidden * (2 if self.norm == "layernorm" else 1)

    @property
    def layer_params(self) -> int:
        """Parameters of one decoder layer, biases and norms included."""
        linear = sum(s.num_weights + (s.out_features if s.bias else 0) for s in self.linears())
        qk = 2 * self.head_dim if self.qk_norm else 0
        return linear + 2 * self.norm_params + qk + self.experts * self.hidden

    @property
    def weights_per_token(self) -> int:
        """Weights of a layer that one token is multiplied with: those of its experts only."""
        shares = [
            s.num_weights * (self.experts_per_token / self.experts if "." in s.name else 1)
            for s in self.linears()
        ]
        return round(sum(shares)) + self.experts * self.hidden

    @property
    def embedding_params(self) -> int:
        """Parameters the first stage owns beyond its layers: tokens, positions, embedding norm."""
        learned = (self.max_positions + 2) * self.hidden if self.positions == "learned" else 0
        norm = self.norm_params if self.embedding_norm else 0
        return self.vocab * self.hidden + learned + norm

    @property
    def head_params(self) -> int:
        """Parameters the last stage owns beyond its layers: final norm and output matrix.

        Tied embeddings are counted here as well: with several stages the matrix exists twice.
        """
        return self.vocab * self.hidden + self.norm_params

    @property
    def num_params(self) -> int:
        """Parameters of the whole model, tied embeddings counted once."""
        tied = self.vocab * self.hidden if self.tied_embeddings else 0
        return self.num_layers * self.layer_params + self.embedding_params + self.head_params - tied

    def fingerprint(self) -> str:
        """Return a short hash of the architecture; name and end-of-text ids do not count."""
        ignored = {"name", "eos_token_ids"}
        if not self.experts:
            # Dense models keep the fingerprint they had before there were experts.
            ignored |= {"experts", "experts_per_token"}
        content = {k: v for k, v in asdict(self).items() if k not in ignored}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    @classmethod
    def from_directory(cls, path: str | Path) -> ModelSpec:
        """Read `config.json` of a local Hugging Face model directory."""
        config = read_config(path)
        try:
            return cls.from_config(config, name=Path(path).resolve().name)
        except ValueError as error:
            raise ValueError(f"'{path}': {error}") from None

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, name: str) -> ModelSpec:
        """Read the keys of a Hugging Face config; `ValueError` names what is not supported."""
        return cls(**spec_fields(config, name))

    @classmethod
    def by_name(cls, name: str, size: str | None = None) -> ModelSpec:
        """Return a built-in spec: `opt-30b`, `Qwen/Qwen3-32B`, or the paper's `opt` and `30b`."""
        full = f"{name}-{size}" if size else name
        known, found = builtin_configs(), builtin_name(full)
        if found is None:
            raise unknown_name("model", full.lower().rsplit("/", 1)[-1], known)
        return cls.from_config(known[found], name=found)


def builtin_name(name: str) -> str | None:
    """Return the built-in name that a name or a Hugging Face id means, None where none does."""
    known, short = builtin_configs(), name.lower().rsplit("/", 1)[-1]
    if short in known:
        return short
    ids = {i.lower(): own for own, listed in builtin_ids().items() if own in known for i in listed}
    return ids.get(name.lower()) or {i.rsplit("/", 1)[-1]: own for i, own in ids.items()}.get(short)


def read_config(directory: str | Path) -> dict[str, Any]:
    """Return the `config.json` of a model directory; `ValueError` if it is not a JSON object."""
    path = Path(directory) / "config.json"
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(
            f"no config.json in '{directory}': expected a local Hugging Face model directory"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"'{path}' is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"'{path}': got {type(config).__name__}, expected an object")
    return config


@lru_cache(maxsize=1)
def builtin_configs() -> Mapping[str, Mapping[str, Any]]:
    """Return the configs shipped in `models.yaml`, by name."""
    text = resources.files("llmpq").joinpath("models.yaml").read_text()
    configs: Mapping[str, Mapping[str, Any]] = yaml.safe_load(text)
    return configs


@lru_cache(maxsize=1)
def builtin_ids() -> Mapping[str, tuple[str, ...]]:
    """Return the Hugging Face ids of the built-in models, by built-in name; the first is its own.

    The others have the same architecture: instruction-tuned, or older spellings.
    """
    text = resources.files("llmpq").joinpath("model_ids.yaml").read_text()
    return {name: tuple(ids) for name, ids in yaml.safe_load(text).items()}
