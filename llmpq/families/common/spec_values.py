"""Values of a model that are more than a number: rope scaling, router, latent cache, recurrence."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

ScalingKind = Literal["llama3", "linear", "dynamic", "yarn", "longrope", "proportional"]


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies were stretched to longer texts (runtime/models/rotary.py).

    Fields that a kind does not name keep their defaults.
    """

    factor: float
    """How many times longer: linear, dynamic, llama3, yarn."""
    low_freq_factor: float = 0.0
    """llama3: waves with fewer turns within the original length are slowed by the whole factor."""
    high_freq_factor: float = 0.0
    """llama3: waves with more turns are unchanged."""
    original_max_positions: int = 0
    """Positions the model saw before it was stretched; dynamic: the model's maximum."""
    kind: ScalingKind = "llama3"
    attention_factor: float = 1.0
    """yarn, longrope: cosines and sines are this much larger."""
    beta_fast: float = 32.0
    """yarn: dimensions with more turns are unchanged."""
    beta_slow: float = 1.0
    """yarn: dimensions with fewer turns are slowed by the whole factor."""
    truncate: bool = True
    """yarn: the ramp starts and ends at whole dimensions."""
    short_factors: tuple[float, ...] = ()
    """longrope: what each frequency is divided by up to the original length, ..."""
    long_factors: tuple[float, ...] = ()
    """... and beyond it."""
    turned: float = 1.0
    """proportional: the share of a head's frequencies, the fastest, in use; others are zero."""

    @property
    def by_length(self) -> bool:
        """Whether a request's frequencies change with its length so far."""
        return self.kind == "dynamic" or self.short_factors != self.long_factors

    def at_length(self, max_len: int) -> RopeScaling:
        """Return the scaling of a run whose requests may have `max_len` tokens.

        Longrope's keys of short texts do not go with queries of long ones, so a run decides once.
        """
        if self.kind != "longrope":
            return self
        is_long = max_len > self.original_max_positions
        factors = self.long_factors if is_long else self.short_factors
        return replace(self, short_factors=factors, long_factors=factors)


@dataclass(frozen=True, kw_only=True)
class Router:
    """How a token's experts are chosen and weighed; the defaults are Mixtral's."""

    score: Literal["softmax", "sigmoid"] = "softmax"
    normalise: bool = True
    """The chosen experts' weights are made to sum to one."""
    scale: float = 1.0
    """Then they are multiplied by this."""
    groups: int = 1
    """Experts stand in so many groups, of which a token keeps only the best."""
    groups_kept: int = 1
    group_score: Literal["max", "top2"] = "max"
    """A group counts as its best expert, or as the sum of its two best."""
    bias: bool = False
    """The router's product has a bias."""
    correction: bool = False
    """A vector is added to the scores for the choice of experts, not for their weights."""
    normed: bool = False
    """Its input is normalised, times a vector and 1 / sqrt(hidden), and is not what experts see."""
    expert_scale: bool = False
    """An expert's weight is multiplied by a number of its own in the end."""
    weighs_input: bool = False
    """What an expert is given is multiplied by its weight, not what it gives."""


@dataclass(frozen=True, kw_only=True)
class Indexer:
    """Chooses the tokens that a query attends to (DeepSeek-V3.2), beside latent attention.

    A token caches a key of `dim` channels behind its latent. The score of a key is the sum over
    heads of weight times relu(query . key / sqrt(dim)); the `topk` best are attended to.
    """

    heads: int
    dim: int
    topk: int


@dataclass(frozen=True, kw_only=True)
class AltUp:
    """Alternating updates: several streams of a token, of which a layer works on one."""

    streams: int
    active: int
    """The one."""
    scaled: bool
    """It is multiplied by a vector before the layer's own input is added."""
    laurel_rank: int
    """Rows of the small matrix of LAuReL, a residual beside attention's."""


@dataclass(frozen=True, kw_only=True)
class QueryGrowth:
    """Queries scaled up with position: times 1 + beta log(1 + floor((p + ahead) / length))."""

    beta: float
    length: int
    """Positions up to which nothing grows, and after as many of which it grows on."""
    ahead: int = 0
    unturned_only: bool = False
    """Only on layers whose queries and keys have no rotary positions."""

    def applies_to(self, max_len: int) -> bool:
        """Whether a request of so many tokens has a query that grows."""
        return max_len - 1 + self.ahead >= self.length


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2): keys and values are made of one small vector.

    A token caches `dim` values. The first part of a query head (`nope_dim`) is
    multiplied by the matrix that would have made its keys, and is then scored against them.
    """

    q_rank: int
    """Size of the queries' own small vector; 0: queries are made of the hidden state."""
    kv_rank: int
    nope_dim: int
    """Channels of a query head without positions."""
    rope_dim: int
    """Channels of a query head with positions; their key is shared by all heads."""
    v_dim: int

    @property
    def dim(self) -> int:
        """Channels that a token caches, and that queries are scored against."""
        return self.kv_rank + self.rope_dim

    @property
    def q_head_dim(self) -> int:
        """Channels of a query head before its first part is multiplied by the keys' matrix."""
        return self.nope_dim + self.rope_dim


@dataclass(frozen=True, kw_only=True)
class NormedStream:
    """A residual stream that goes on from its norm: n = norm(x); x = carried n + added f(n).

    Each pair is (carried, added) of layers' attention, of their recurrences, of their MLPs.
    """

    attention: tuple[float, float]
    recurrent: tuple[float, float]
    mlp: tuple[float, float]


RecurrentKind = Literal["gated_delta", "kda", "mamba2", "lightning", "short_conv"]
DELTA_RULES = ("gated_delta", "kda")
"""Kinds whose state forgets what it says of a key before it takes the key's new value."""
Mixer = Literal["attention", "recurrent", "both", "none"]
"""What mixes the tokens of a layer: attention, a recurrence, both side by side, or nothing."""


@dataclass(frozen=True, kw_only=True)
class Recurrent:
    """Layers that keep a state of fixed size per request (runtime/models/recurrent.py).

    The state is the convolution's last `taps - 1` inputs and, but for short convolutions, one
    matrix [key_dim, value_dim] per head.
    """

    kind: RecurrentKind
    taps: int
    """Tokens that the causal convolution in front of the recurrence spans; 1: there is none."""
    channels: int
    """Channels of that convolution: queries, keys and values."""
    heads: int = 0
    key_heads: int = 0
    """Heads of queries and keys (Mamba-2: groups of B and C); each serves heads / key_heads."""
    key_dim: int = 0
    """Mamba-2: the state size N."""
    value_dim: int = 0
    bias: bool = False
    """Whether the matrices in front and behind have biases."""
    conv_bias: bool = False
    gated_norm: bool = True
    """Whether the recurrence's output is normalised beside its gate."""
    norm_first: bool = False
    """Normalised before it is gated (gated delta rule), or gated first (Mamba-2)."""
    in_factors: tuple[float, ...] = ()
    """Of Mamba-2: gate, x, B, C and time steps are multiplied by these."""
    out_factor: float = 1.0
    """What the matrix behind gives is multiplied by this."""
    norm_groups: int = 1
    """Of the norm of all channels: it normalises so many groups of them."""
    norm_eps: float = 0.0
    """What the norm of the recurrence's output adds; 0: what the model's norms add."""
    gate: Literal["silu", "sigmoid"] = "silu"
    """What becomes of the output's gate before the output is multiplied by it."""
    beta_factor: float = 1.0
    """Of delta rules: shares of what is forgotten and taken are sigmoids times this, up to 2."""
    low_rank: int = 0
    """Of KDA: channels between the two matrices that make decays, and those that make the gate."""

    @property
    def inner(self) -> int:
        """Channels of the recurrence's output."""
        return self.heads * self.value_dim if self.heads else self.channels

    @property
    def is_delta(self) -> bool:
        """Whether its state moves by a delta rule."""
        return self.kind in DELTA_RULES

    @property
    def in_features(self) -> int:
        """Outputs of the matrix in front: what is convolved, the gate, Mamba-2's time steps."""
        if self.kind == "short_conv":
            return 3 * self.channels
        if self.kind == "kda":
            return self.channels
        return self.channels + self.inner + (self.heads if self.kind == "mamba2" else 0)

    @property
    def decays(self) -> int:
        """Decays of a token that are computed: one of every head, KDA's of every key channel."""
        each = {"gated_delta": 1, "kda": self.key_dim, "mamba2": 1}.get(self.kind, 0)
        return each * self.heads

    @property
    def steps(self) -> int:
        """Numbers of a token beside what is convolved: shares and decays of heads."""
        return self.decays + (self.heads if self.is_delta else 0)

    @property
    def inputs(self) -> int:
        """Inputs that a token moves the state on by: what is convolved, and its steps."""
        return self.channels + self.steps

    @property
    def tail_elements(self) -> int:
        """Elements of the convolution's tail that a request keeps on a layer."""
        return (self.taps - 1) * self.channels

    @property
    def matrix_elements(self) -> int:
        """Elements of the matrix state that a request keeps on a layer, in float32."""
        return self.heads * self.key_dim * self.value_dim

    def rows_of_pieces(self, part: str, pieces: int) -> tuple[int, ...] | None:
        """Return the rows of each tensor of a checkpoint that a part stacks; None: equal ones."""
        qk, v = self.key_heads * self.key_dim, self.heads * self.value_dim
        known = {
            ("mixer_in", 2): (self.channels, self.inner),
            ("mixer_in", 3): (qk, qk, v),
            ("mixer_in", 4): (qk, qk, v, self.inner),
            ("conv", 3): (qk, qk, v),
            ("step", 3): (self.heads, self.low_rank, self.low_rank),
        }
        return known.get((part.partition(".")[0], pieces))

    def state_bytes(self, dtype_bytes: int) -> int:
        """Return the bytes that a request keeps on a layer, whatever its length."""
        return self.tail_elements * dtype_bytes + 4 * self.matrix_elements

    def kept_whole(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the parts that are never quantised."""
        shapes: dict[str, tuple[int, ...]] = {}
        if self.taps > 1:
            shapes["conv.weight"] = (self.channels, 1, self.taps)
        if self.conv_bias:
            shapes["conv.bias"] = (self.channels,)
        if self.kind == "short_conv":
            return shapes
        if self.decays:
            shapes |= {"decay": (self.heads,), "step_bias": (self.decays,)}
        if self.is_delta:
            small = 2 * self.low_rank if self.kind == "kda" else self.heads
            shapes["step.weight"] = (self.heads + small, hidden)
            shapes["mixer_norm.weight"] = (self.value_dim,)
            if self.kind == "kda":
                shapes["mixer_decay.weight"] = (self.decays, self.low_rank)
                shapes["mixer_gate.weight"] = (self.inner, self.low_rank)
            return shapes
        if self.kind == "mamba2":
            shapes["skip"] = (self.heads,)
        if self.gated_norm:
            shapes["mixer_norm.weight"] = (self.inner,)
        return shapes

    def flops(self) -> float:
        """Return the operations of one token beside the matrices: convolution and recurrence."""
        per_element = 8 if self.is_delta else 6
        return 2.0 * self.taps * self.channels + per_element * self.matrix_elements
