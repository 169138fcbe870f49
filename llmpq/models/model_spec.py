"""A model's architecture: the shapes that decide bytes, time and wiring.

Read from a Hugging Face `config.json` (`ModelSpec.from_directory`) or by name from `models.yaml`
(`ModelSpec.by_name`). Anything the code relies on is checked here, once, with a helpful error.

Symbols: L layers, h hidden, H query heads, G key/value heads, D head_dim, F ffn, V vocabulary,
E experts.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal

from llmpq.checkpoints.adapters import adapter_beside
from llmpq.checkpoints.gguf_file import is_gguf
from llmpq.checkpoints.hub import name_of, require_named
from llmpq.checkpoints.model_config import read_config, spec_fields, with_stored_head
from llmpq.errors import unknown_name
from llmpq.families.common.spec_values import (
    AltUp,
    Indexer,
    Latent,
    Mixer,
    NormedStream,
    QueryGrowth,
    Recurrent,
    RopeScaling,
    Router,
)
from llmpq.shipped_table import shipped_table

Positions = Literal["learned", "alibi", "rotary", "none"]
Norm = Literal["layernorm", "rmsnorm"]
NormOrder = Literal["pre", "post", "both"]
FIRST_OPTIONAL = ("qk_norm", "embedding_norm", "rope_theta", "rope_scaling")
"""Fields with a default that every fingerprint counts."""
KEPT_MATRICES = ("kv_b", "step", "mixer_decay", "mixer_gate")
"""Matrices beside the linears that every token is multiplied with; they are never quantised."""
SHARED = "shared."
"""What the names of the linears begin with that every token goes through beside its experts."""
Activation = Literal[
    "relu", "gelu", "gelu_erf", "silu", "gelu_tanh", "clamped_silu", "relu2", "xielu"
]
"""`gelu`: by tanh, in an MLP without a gate; `gelu_tanh`: the same of a gate; `gelu_erf`: exact."""


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

    @property
    def of_expert(self) -> bool:
        """Whether it belongs to an MLP that only some tokens go through."""
        return self.name.startswith("experts.")

    @property
    def kind(self) -> str:
        """Its name without the number of its expert: `experts.down`."""
        return f"experts.{self.name.split('.', 2)[2]}" if self.of_expert else self.name


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
    activation: Activation
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
    latent_experts: int = 0
    """Features that experts read and give, between two matrices of a layer; 0: its hidden ones."""
    router: Router = Router()
    shared_ffn: int = 0
    """Width of an MLP that every token goes through beside its experts."""
    dense_layers: tuple[int, ...] = ()
    """Layers of a model with experts that have one MLP of width `dense_ffn` instead."""
    dense_ffn: int = 0
    norm_order: NormOrder = "pre"
    """Where a layer has norms: before attention and MLP, behind them, or both."""
    o_bias: bool | None = None
    """Whether `o` has a bias where the MLP's linears differ from it."""
    qk_norm_whole: bool = False
    """The norms of queries and keys are over all heads at once."""
    windows: tuple[int, ...] = ()
    """Tokens each layer sees, itself included, 0 for all; nothing where every layer sees all."""
    score_factor: float | None = None
    """What scores are multiplied by; None: 1 / sqrt(head_dim)."""
    score_cap: float = 0.0
    """Scores s become cap * tanh(s / cap)."""
    logit_cap: float = 0.0
    sinks: bool = False
    """Each head has a score that takes part in the softmax and brings no value."""
    rotary_dim: int | None = None
    """Channels of a head that are rotated, the first ones; None: all."""
    window_rope_theta: float | None = None
    """Layers with a window rotate by this theta, unscaled."""
    embedding_factor: float = 1.0
    residual_factor: float = 1.0
    """What attention and MLP add to the residual stream is multiplied by this."""
    logit_factor: float = 1.0
    activation_limit: float = 0.0
    """clamped_silu: gate and up are kept below this, up above its negative, too."""
    activation_slope: float = 1.0
    """clamped_silu: gate * sigmoid(slope * gate)."""
    latent: Latent | None = None
    """What keys and values are made of; `kv_heads` is then 1 and `head_dim` what a token caches."""
    attention_factor: float = 1.0
    """What attention gives is multiplied by this, where layers have a recurrence beside it."""
    gate_factor: float = 1.0
    """A gated MLP's gate is multiplied by this before its activation."""
    mlp_factor: float = 1.0
    """What the MLP gives is multiplied by this."""
    attention_gate: bool = False
    """Attention's output times the sigmoid of a gate of its own, made beside the queries."""
    head_gate: bool = False
    """Attention's output, head by head, times the sigmoid of a number of its own, made of what
    attention reads."""
    shared_gate: bool = False
    """What the shared MLP gives is multiplied by the sigmoid of one number a token."""
    recurrent: Recurrent | None = None
    """The form of layers whose memory of a request has a fixed size; None where none has."""
    mixers: tuple[Mixer, ...] = ()
    """What mixes tokens, layer by layer; nothing where all layers have `mixer`."""
    mixer: Mixer = "attention"
    without_mlp: tuple[int, ...] = ()
    """Layers that mix tokens and have neither MLP nor experts."""
    global_head_dim: int | None = None
    """Channels of a head on layers that see all tokens, where windowed ones have `head_dim`."""
    global_kv_heads: int | None = None
    """Key and value heads of layers that see all tokens, where windowed ones have `kv_heads`."""
    value_is_key: bool = False
    """Layers that see all tokens make no values: theirs are the keys before norm and positions."""
    value_norm: bool = False
    """Values are normalised head by head, by a norm without a weight."""
    kv_sources: tuple[int, ...] = ()
    """The layer whose keys and values each attends to; nothing where each has its own."""
    reads_kv: bool = False
    """Layers make queries alone: keys and values are another layer's (`of_layer` says so)."""
    ffns: tuple[int, ...] = ()
    """Widths of the layers' MLPs, of those beside experts too; nothing where all have one."""
    mixture_beside: bool = False
    """Experts run beside the shared MLP on the same residual stream, each with its own norms."""
    per_layer_dim: int = 0
    """Channels of an input that every layer has of its own, made of a token and its embedding."""
    per_layer_vocab: int = 0
    """Rows of the table of those; 0 where there are none."""
    layer_scalar: bool = False
    """What a layer returns is multiplied by a number of its own."""
    chunked_windows: bool = False
    """Windows begin at multiples of their size instead of moving with each token."""
    without_positions: tuple[int, ...] = ()
    """Layers whose queries and keys are not rotated, among rotary ones."""
    qk_unit_norm: bool = False
    """Queries and keys that are rotated are then normalised head by head, without a weight."""
    indexer: Indexer | None = None
    """What chooses the tokens that latent attention looks at; None where it looks at all."""
    altup: AltUp | None = None
    """How several streams of a token pass through layers; None where it has one."""
    gate_sparsities: tuple[float, ...] = ()
    """The share of each layer's gates that is cut off, as of a normal distribution; nothing where
    none is."""
    gate_sparsity: float = 0.0
    """... of layers that are all alike."""
    query_growth: QueryGrowth | None = None
    """How queries grow with their position; None where they do not."""
    parallel_norms: int = 0
    """Norms in front of attention and MLP that run side by side on one input, one that both read or
    one of each; 0: the MLP runs on what attention gave."""
    norm_bias: bool = True
    """Whether LayerNorms have a bias beside their weight."""
    qk_norm_centred: bool = False
    """The norms of queries and keys are LayerNorms, not RMSNorms."""
    qk_norm_bias: bool = False
    """... which have biases."""
    qk_norm_apart: bool = False
    """The norms of queries and keys have weights of their own for every head."""
    qk_norm_late: bool = False
    """Queries and keys are rotated first, then normalised."""
    normed_stream: NormedStream | None = None
    """How the residual stream goes on from what norms give; None: from what they are given."""
    recurrent_norm_order: NormOrder | None = None
    """Where layers of a recurrence have norms, if not where others have them."""
    qkv_limit: float = 0.0
    """Queries and keys, behind their norms, and values are kept within +-limit; 0: as they come."""
    head_bias: bool = False
    """Whether the output matrix has a bias."""
    position_offset: int = 2
    """Rows of learned positions in front of that of position 0 (OPT: two)."""
    further_layers: int = field(default=0, compare=False)
    """Layers behind the last one that a checkpoint has beside the model's (MTP)."""
    mtp_layers: int = field(default=0, compare=False)
    """Layers that predict further tokens, behind the last one or in a module of their own."""
    from_class: tuple[str, ...] = field(default=(), compare=False)
    """Numbers that `config.json` leaves to Transformers' class of its `model_type`: `key=value`."""
    left_out: tuple[str, ...] = field(default=(), compare=False)
    """Parts of the checkpoint that are not run; commands list them."""
    dtype: Literal["float16", "bfloat16", "float32"] = "float16"
    eos_token_ids: tuple[int, ...] = field(default=(), compare=False)
    suppressed: tuple[int, ...] = field(default=(), compare=False)
    """Tokens that are never chosen (generation_config.json's `suppress_tokens`)."""

    def left_out_notes(self) -> list[str]:
        """Return what is said of each part that is not run."""
        return [f"left out: {part}" for part in self.left_out]

    def linears(self) -> tuple[LinearShape, ...]:
        """Return the fused matrices of a decoder layer: qkv, o, up (or gate and up) and down.

        Every expert has its own up and down. The router, [E, h], is not among them: it is never
        quantised.
        """
        shapes = self._attention_linears() if self.mixer in ("attention", "both") else []
        if self.recurrent is not None and self.mixer in ("recurrent", "both"):
            own = self.recurrent
            shapes += [
                ("mixer_in", own.in_features, self.hidden, own.bias),
                ("mixer_out", self.hidden, own.inner, own.bias),
            ]
        up_out = 2 * self.ffn if self.gated else self.ffn
        up = "gate_up" if self.gated else "up"
        for owner in self.mlps() if self.has_mlp else ():
            shapes += [
                (f"{owner}{up}", up_out, self.mlp_hidden, self.linear_bias),
                (f"{owner}down", self.mlp_hidden, self.ffn, self.linear_bias),
            ]
        if self.experts and self.latent_experts:
            shapes += [
                ("latent_in", self.latent_experts, self.hidden, self.linear_bias),
                ("latent_out", self.hidden, self.latent_experts, self.linear_bias),
            ]
        if self.shared_ffn:
            wide = 2 * self.shared_ffn if self.gated else self.shared_ffn
            shapes += [
                (f"{SHARED}{up}", wide, self.hidden, False),
                (f"{SHARED}down", self.hidden, self.shared_ffn, False),
            ]
        if self.per_layer_dim:
            shapes += [
                ("per_layer_gate", self.per_layer_dim, self.hidden, False),
                ("per_layer_out", self.hidden, self.per_layer_dim, False),
            ]
        return tuple(
            LinearShape(name=name, out_features=n, in_features=k, bias=bias)
            for name, n, k, bias in shapes
        )

    def _attention_linears(self) -> list[tuple[str, int, int, bool]]:
        """Return name, out_features, in_features and bias of attention's fused matrices."""
        o_bias = self.linear_bias if self.o_bias is None else self.o_bias
        h = self.hidden
        if self.latent is None:
            q_out, kv_out = self.heads * self.head_dim, self.kv_heads * self.head_dim
            gate, made = q_out if self.attention_gate else 0, self.attention_input
            out = q_out + gate + {"q": 0, "qk": 1, "qkv": 2}[made] * kv_out
            return [(made, out, h, self.qkv_bias), ("o", h, q_out, o_bias)]
        latent, q_out = self.latent, self.heads * self.latent.q_head_dim
        queries = [("q", q_out, h, False)]
        if latent.q_rank:
            queries = [("q_a", latent.q_rank, h, False), ("q_b", q_out, latent.q_rank, False)]
        if self.indexer is not None:
            wide = self.indexer.heads * self.indexer.dim
            queries.append(("index_q", wide, latent.q_rank, False))
        return [
            *queries,
            ("kv_a", latent.dim, h, False),
            ("o", h, self.heads * latent.v_dim, o_bias),
        ]

    @property
    def attention_input(self) -> str:
        """What a layer's attention makes of its input, and what the matrix is called."""
        return "q" if self.reads_kv else "qk" if self.value_is_key else "qkv"

    @property
    def mlp_hidden(self) -> int:
        """Features that a layer's MLP, or each of its experts, reads and gives."""
        return (self.latent_experts if self.experts else 0) or self.hidden

    def at_length(self, max_len: int) -> ModelSpec:
        """Return the spec of a run whose requests may have `max_len` tokens."""
        if self.rope_scaling is None:
            return self
        return replace(self, rope_scaling=self.rope_scaling.at_length(max_len))

    def of_layer(self, index: int) -> ModelSpec:
        """Return the spec of a model whose layers are all like layer `index`."""
        dense, bare = index in self.dense_layers, index in self.without_mlp
        unlike = self.differs_in_attention or self.ffns or self.gate_sparsities
        if not dense and not bare and not unlike:
            return self
        return _layer_like(
            self,
            self.mixer_of(index),
            dense=dense,
            bare=bare,
            sees_all=not self.is_windowed(index),
            reads=self.kv_source(index) != index,
            width=self.ffns[index] if self.ffns else 0,
            sparsity=self.gate_sparsities[index] if self.gate_sparsities else 0.0,
        )

    @property
    def differs_in_attention(self) -> bool:
        """Whether layers mix tokens in unlike ways, windows left out."""
        wide = self.global_head_dim or self.global_kv_heads or self.value_is_key
        return bool(self.mixers or self.kv_sources or wide)

    def kv_source(self, layer: int) -> int:
        """Return the layer whose keys and values a layer attends to."""
        return self.kv_sources[layer] if self.kv_sources else layer

    def may_cut(self, layer: int) -> bool:
        """Whether a stage may begin with a layer: none behind it reads a cache in front of it."""
        return all(source >= layer for source in self.kv_sources[layer:])

    def last_cut(self, layer: int) -> int:
        """Return the last layer up to `layer` that a stage may begin with."""
        return next(i for i in range(layer, -1, -1) if self.may_cut(i))

    def require_cut(self, layer: int, where: str) -> None:
        """Raise `ValueError` for a stage that would begin with a layer and may not."""
        if not self.may_cut(layer):
            readers = [i for i in range(layer, self.num_layers) if self.kv_sources[i] < layer]
            source = self.kv_sources[readers[0]]
            raise ValueError(
                f"{where}: a stage begins with layer {layer}, but layer {readers[0]} attends to "
                f"the keys and values of layer {source}; expected both on one stage. Cut in front "
                f"of layer {self.last_cut(layer)} instead, or plan again"
            )

    def kv_shape(self, layer: int) -> tuple[int, int]:
        """Return key/value heads and channels of a head as a layer's cache has them."""
        one = self.of_layer(layer)
        return one.kv_heads, one.head_dim

    @property
    def hop_features(self) -> int:
        """Numbers of a token that go from stage to stage: its streams, inputs of all layers."""
        return self.stream_features + self.num_layers * self.per_layer_dim

    @property
    def stream_features(self) -> int:
        """Numbers of a token that go from layer to layer."""
        return self.hidden * (1 if self.altup is None else self.altup.streams)

    @property
    def stream_params(self) -> int:
        """Parameters that make streams of an embedding; as many bring them back for the head."""
        return (self.stream_features - self.hidden) * self.hidden

    def of_mtp(self) -> ModelSpec:
        """Return the spec of a model of one layer: that of a head that predicts a further token.

        Such layers have attention over all tokens, and a mixture where layers have one.
        """
        one = replace(self, mixers=(), mixer="attention", without_mlp=(), recurrent=None)
        return replace(one, num_layers=1, dense_layers=(), dense_ffn=0, windows=())

    @property
    def mtp_join(self) -> LinearShape:
        """The matrix that such a head has behind the norms of token and hidden state."""
        h = self.hidden
        return LinearShape(name="join", out_features=h, in_features=2 * h, bias=False)

    @property
    def has_mlp(self) -> bool:
        """Whether a layer like this one has an MLP, or experts."""
        return self.ffn > 0

    def mixer_of(self, layer: int) -> Mixer:
        """Return what mixes the tokens of a layer."""
        return self.mixers[layer] if self.mixers else self.mixer

    def has_kv(self, layer: int) -> bool:
        """Whether a layer keeps keys and values of its own."""
        own = self.kv_source(layer) == layer and not self.reads_kv
        return own and self.attends(layer)

    def attends(self, layer: int) -> bool:
        """Whether a layer has attention, to keys and values of its own or another's."""
        return self.mixer_of(layer) in ("attention", "both")

    def has_state(self, layer: int) -> bool:
        """Whether a layer keeps a recurrent state."""
        return self.mixer_of(layer) in ("recurrent", "both")

    def mlps(self) -> tuple[str, ...]:
        """Return what the names of each routed MLP's linears begin with: `experts.0.`, or ``."""
        return tuple(f"experts.{number}." for number in range(self.experts)) or ("",)

    @property
    def overflows_float16(self) -> bool:
        """Whether values leave float16's range.

        A norm behind each sublayer, as well as one before it, lets what sublayers add up to grow
        (Gemma 2 and 3, GLM-4-0414; vLLM refuses those). Gates that are clamped bound what an
        expert gives, not the sum: gpt-oss-120b's is 45,344 behind layer 34 and beyond 65,504
        behind the last, so that all scores are NaN (onnxruntime-genai's pull request 2444).
        """
        return self.norm_order == "both" or self.activation == "clamped_silu"

    @property
    def norm_params(self) -> int:
        """Parameters of one norm over the hidden size: weight, and bias where it has one."""
        return self.hidden * (2 if self.norm == "layernorm" and self.norm_bias else 1)

    @property
    def layer_norms(self) -> tuple[str, ...]:
        """Names of a layer's norms over the hidden size, in the order they are used."""
        before, behind = ("attn_norm", "mlp_norm"), ("attn_out_norm", "mlp_out_norm")
        both = (before[0], behind[0], before[1], behind[1])
        names = {"pre": before, "post": behind, "both": both}[self.norm_order]
        has = {"attn": self.mixer != "none", "mlp": self.has_mlp and self.parallel_norms != 1}
        found = tuple(name for name in names if has[name.partition("_")[0]])
        if self.mixture_beside:
            found += ("shared_out_norm", "experts_norm", "experts_out_norm")
        if self.altup is not None:
            found += ("altup_norm", "laurel_norm")
        return (*found, "per_layer_out_norm") if self.per_layer_dim else found

    @property
    def kept_whole(self) -> dict[str, tuple[int, ...]]:
        """Shapes of a layer's parts that are never quantised, beside norms and biases of linears.

        Norms of queries and keys, router, sinks, gates of heads, the matrix that makes keys and
        values, and the two numbers of a learned activation.
        """
        shapes: dict[str, tuple[int, ...]] = {}
        if self.activation == "xielu" and self.has_mlp:
            shapes |= {"xielu.positive": (1,), "xielu.negative": (1,)}
        if self.shared_gate:
            shapes["shared_gate.weight"] = (1, self.hidden)
        if self.recurrent is not None and self.mixer in ("recurrent", "both"):
            shapes |= self.recurrent.kept_whole(self.hidden)
        if self.experts:
            shapes["router.weight"] = (self.experts, self.hidden)
            if self.router.bias:
                shapes["router.bias"] = (self.experts,)
            if self.router.correction:
                shapes["router.correction"] = (self.experts,)
            if self.router.normed:
                shapes["router.scale"] = (self.hidden,)
            if self.router.expert_scale:
                shapes["router.expert_scale"] = (self.experts,)
        if self.altup is not None:
            streams, rank = self.altup.streams, self.altup.laurel_rank
            shapes |= {
                "altup.router.weight": (streams, self.hidden),
                "altup.predict.weight": (streams * streams, streams),
                "altup.correct.weight": (streams, streams),
                "altup.scale": (self.hidden,),
                "laurel.left.weight": (rank, self.hidden),
                "laurel.right.weight": (self.hidden, rank),
            }
        if self.layer_scalar:
            shapes["scalar"] = (1,)
        if self.mixer not in ("attention", "both"):
            return shapes
        if self.qk_norm:
            normed = (("q_norm", self.heads), ("k_norm", self.kv_heads))
            for name, heads in normed[:1] if self.reads_kv else normed:
                many = self.qk_norm_whole or self.qk_norm_apart
                shape = (heads * self.head_dim if many else self.head_dim,)
                shapes[f"{name}.weight"] = shape
                if self.qk_norm_bias:
                    shapes[f"{name}.bias"] = shape
        if self.sinks:
            shapes["sinks"] = (self.heads,)
        if self.head_gate:
            shapes["head_gate.weight"] = (self.heads, self.hidden)
        if self.latent is not None:
            shapes["kv_norm.weight"] = (self.latent.kv_rank,)
            made = self.heads * (self.latent.nope_dim + self.latent.v_dim)
            shapes["kv_b.weight"] = (made, self.latent.kv_rank)
            if self.latent.q_rank:
                shapes["q_norm.weight"] = (self.latent.q_rank,)
        if self.indexer is not None:
            shapes |= {
                "index_k.weight": (self.indexer.dim, self.hidden),
                "index_norm.weight": (self.indexer.dim,),
                "index_norm.bias": (self.indexer.dim,),
                "index_weights.weight": (self.indexer.heads, self.hidden),
            }
        return shapes

    @property
    def layer_params(self) -> int:
        """Parameters of one decoder layer, biases and norms included."""
        linear = sum(s.num_weights + (s.out_features if s.bias else 0) for s in self.linears())
        whole = sum(math.prod(shape) for shape in self.kept_whole.values())
        return linear + len(self.layer_norms) * self.norm_params + whole

    @cached_property
    def weights_per_token(self) -> int:
        """Weights of a layer that one token is multiplied with: those of its experts only."""
        shares = [
            s.num_weights * (self.experts_per_token / self.experts if s.of_expert else 1)
            for s in self.linears()
        ]
        whole = self.kept_whole
        made = sum(math.prod(whole.get(f"{part}.weight", (0,))) for part in KEPT_MATRICES)
        return round(sum(shares)) + self.experts * self.hidden + made

    @property
    def embedding_params(self) -> int:
        """Parameters the first stage owns beyond its layers: tokens, positions, embedding norm."""
        rows = self.max_positions + self.position_offset
        learned = rows * self.hidden if self.positions == "learned" else 0
        norm = self.norm_params if self.embedding_norm else 0
        made = self.per_layer_params + self.stream_params
        return self.vocab * self.hidden + learned + norm + made

    @property
    def per_layer_params(self) -> int:
        """Parameters that make the layers' own inputs, on the first stage: table, matrix, norm."""
        wide = self.num_layers * self.per_layer_dim
        return wide * (self.per_layer_vocab + self.hidden) + self.per_layer_dim

    @property
    def head_params(self) -> int:
        """Parameters the last stage owns beyond its layers: final norm, output matrix and its bias.

        Tied embeddings are counted here as well: with several stages the matrix exists twice.
        """
        bias = self.vocab if self.head_bias else 0
        return self.vocab * self.hidden + bias + self.norm_params + self.stream_params

    @property
    def widest_window(self) -> int:
        """Tokens that layers with a window see at most; 0 where every layer sees all."""
        return max(self.windows, default=0)

    def is_windowed(self, layer: int) -> bool:
        """Whether a layer sees the last tokens only."""
        return bool(self.windows) and self.windows[layer] > 0

    @property
    def kv_vectors(self) -> int:
        """Vectors that a token caches a head: key and value, or MLA's latent, which is both."""
        return 2 if self.latent is None else 1

    @property
    def num_params(self) -> int:
        """Parameters of the whole model, tied embeddings counted once."""
        tied = self.vocab * self.hidden if self.tied_embeddings else 0
        unlike: Sequence[int] = self.dense_layers
        if self.differs_in_attention or self.ffns:
            unlike = range(self.num_layers)
        layers = sum(self.of_layer(i).layer_params for i in unlike)
        layers += (self.num_layers - len(unlike)) * self.layer_params
        return layers + self.embedding_params + self.head_params - tied

    def fingerprint(self) -> str:
        """Return a short hash of the architecture; name and end-of-text ids do not count."""
        content = {k: v for k, v in asdict(self).items() if k not in NOT_ARCHITECTURE}
        # A model that does not have what a later version added keeps the fingerprint it had.
        for added, default in ADDED.items():
            if content[added] == default:
                del content[added]
        if content["rope_scaling"] is not None:
            content["rope_scaling"] = {
                k: v for k, v in content["rope_scaling"].items() if v != SCALING_ADDED.get(k)
            }
        if content.get("recurrent") is not None:
            content["recurrent"] = {
                k: v
                for k, v in content["recurrent"].items()
                if k not in RECURRENT_ADDED or v != RECURRENT_ADDED[k]
            }
        if "router" in content:
            content["router"] = {
                k: v for k, v in content["router"].items() if k not in ROUTER_ADDED or v
            }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    @classmethod
    def from_directory(cls, path: str | Path) -> ModelSpec:
        """Read `config.json` of a local Hugging Face model directory, or a GGUF file's metadata."""
        config = read_config(path)
        try:
            spec = cls.from_config(with_stored_head(config, path), name=name_of(path))
        except ValueError as error:
            said = str(error).replace("config.json", "its metadata") if is_gguf(path) else error
            raise ValueError(f"'{path}': {said}") from None
        adapter = adapter_beside(Path(path))
        return spec if adapter is None else replace(spec, left_out=(*spec.left_out, adapter))

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, name: str) -> ModelSpec:
        """Read the keys of a Hugging Face config; `ValueError` names what is not supported."""
        return cls(**spec_fields(config, name))

    @classmethod
    def from_fields(cls, data: Mapping[str, Any]) -> ModelSpec:
        """Return the spec that `dataclasses.asdict` wrote, lists for tuples."""
        made: dict[str, Any] = {k: _frozen(v) for k, v in data.items()}
        kinds: tuple[tuple[str, Any], ...] = (
            ("rope_scaling", RopeScaling),
            ("router", Router),
            ("latent", Latent),
            ("recurrent", Recurrent),
            ("query_growth", QueryGrowth),
            ("altup", AltUp),
            ("indexer", Indexer),
            ("normed_stream", NormedStream),
        )
        for name, kind in kinds:
            if made[name] is not None:
                made[name] = kind(**{k: _frozen(v) for k, v in made[name].items()})
        return cls(**made)

    @classmethod
    def by_name(cls, name: str, size: str | None = None) -> ModelSpec:
        """Return a built-in spec: `opt-30b`, `Qwen/Qwen3-32B`, or the paper's `opt` and `30b`."""
        require_named(name)
        full = f"{name}-{size}" if size else name
        known, found = builtin_configs(), builtin_name(full)
        if found is None:
            see = (
                f"llmpq-algo models lists the {len(known)} known names; others by a directory with "
                "their config.json, or by their name on Hugging Face's hub, such as Qwen/Qwen3-32B"
            )
            raise unknown_name("model", full.lower().rsplit("/", 1)[-1], known, see)
        return cls.from_config(known[found], name=found)


NOT_ARCHITECTURE = (
    "name",
    "eos_token_ids",
    "suppressed",
    "left_out",
    "further_layers",
    "mtp_layers",
    "from_class",
)
ADDED: Mapping[str, Any] = {
    found.name: asdict(found.default) if isinstance(found.default, Router) else found.default
    for found in fields(ModelSpec)
    if found.default is not MISSING
    and found.name not in (*NOT_ARCHITECTURE, *FIRST_OPTIONAL, "dtype")
}
"""Fields that came after the first fingerprints were written -> what a model without them has."""
SCALING_ADDED = {
    found.name: found.default
    for found in fields(RopeScaling)
    if found.default is not MISSING
    and found.name not in ("low_freq_factor", "high_freq_factor", "original_max_positions")
}
RECURRENT_ADDED = {
    found.name: found.default
    for found in fields(Recurrent)
    if found.name in ("norm_eps", "gate", "beta_factor", "low_rank")
}
"""Of a recurrence, what came after the first fingerprints."""
ROUTER_ADDED = ("normed", "expert_scale", "weighs_input")
"""Flags of a router that came after the first fingerprints."""


@lru_cache(maxsize=1 << 8)  # planners ask for every layer
def _layer_like(
    spec: ModelSpec,
    mixer: Mixer,
    *,
    dense: bool,
    bare: bool,
    sees_all: bool,
    reads: bool,
    width: int,
    sparsity: float,
) -> ModelSpec:
    """Return a model of only layers with this mixer; `dense`: no experts, `bare`: no MLP either.

    `sees_all`: without a window; `reads`: of another layer's keys and values; `width`: of its MLP
    where widths differ; where experts run beside an MLP, of that one.
    """
    one = replace(
        spec,
        mixers=(),
        mixer=mixer,
        without_mlp=(),
        head_dim=(spec.global_head_dim if sees_all else None) or spec.head_dim,
        kv_heads=(spec.global_kv_heads if sees_all else None) or spec.kv_heads,
        norm_order=(spec.recurrent_norm_order if mixer == "recurrent" else None) or spec.norm_order,
        recurrent_norm_order=None,
        global_head_dim=None,
        global_kv_heads=None,
        value_is_key=spec.value_is_key and sees_all,
        kv_sources=(),
        reads_kv=reads,
        ffns=(),
        gate_sparsities=(),
        gate_sparsity=sparsity,
        ffn=width if width and not spec.mixture_beside else spec.ffn,
        shared_ffn=width if width and spec.mixture_beside else spec.shared_ffn,
    )
    if not dense and not bare:
        return one
    return replace(
        one,
        ffn=0 if bare else spec.dense_ffn,
        experts=0,
        experts_per_token=0,
        router=Router(),
        shared_ffn=0,
        shared_gate=False,
        dense_layers=(),
        dense_ffn=0,
    )


def _frozen(value: Any) -> Any:
    """Return a tuple for a list."""
    return tuple(value) if isinstance(value, list) else value


def builtin_name(name: str) -> str | None:
    """Return the built-in name that a name or a Hugging Face id means, None where none does."""
    known, short = builtin_configs(), name.lower().rsplit("/", 1)[-1]
    if short in known:
        return short
    ids = {i.lower(): own for own, listed in builtin_ids().items() if own in known for i in listed}
    return ids.get(name.lower()) or {i.rsplit("/", 1)[-1]: own for i, own in ids.items()}.get(short)


@lru_cache(maxsize=1)
def builtin_configs() -> Mapping[str, Mapping[str, Any]]:
    """Return the configs shipped in `models.yaml`, by name."""
    return shipped_table("llmpq", "models.yaml")


@lru_cache(maxsize=1)
def builtin_ids() -> Mapping[str, tuple[str, ...]]:
    """Return the Hugging Face ids of the built-in models, by built-in name; the first is its own.

    The others have the same architecture: instruction-tuned, or older spellings.
    """
    return {name: tuple(ids) for name, ids in shipped_table("llmpq", "model_ids.yaml").items()}
