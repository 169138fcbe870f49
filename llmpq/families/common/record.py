"""A model family as one record, read by the spec, the runtime, checkpoints and exports.

A part is one tensor of ours: a norm's weight, a fused matrix, a bias. A family's `NameTable` says
what each is called in a Hugging Face checkpoint; what parts there are, the spec's fields decide.
Sources of one part are stacked along its first dimension. `NAME[3]` is row 3 of a tensor's first
dimension, `NAME^T` and `NAME[3]^T` are a tensor or that row transposed. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from llmpq.families.common.config_values import Config

Rows = Callable[[Any, Any], Any]
"""A tensor and the spec to the tensor with its rows in our order."""
EXPERT = re.compile(r"experts\.[0-9]+\.")


@dataclass(frozen=True, kw_only=True)
class Arrange:
    """How a stored part becomes ours: rows in another order, a number added, other values."""

    rows: Rows | None = None
    offset: float = 0.0
    values: tuple[Rows, Rows] | None = None
    """What makes our values of the stored ones, and those of ours."""

    def ours(self, tensor: Any, spec: Any) -> Any:
        """Return a checkpoint's stacked tensor in our form."""
        if self.offset:
            return tensor + self.offset
        if self.values is not None:
            return self.values[0](tensor, spec)
        return tensor if self.rows is None else self.rows(tensor, spec)


AS_IT_IS = Arrange()
ABOVE_ONE = Arrange(offset=1.0)
"""Gemma stores what its norms' weights exceed one by."""


@dataclass(frozen=True, kw_only=True)
class MtpNames:
    """What the head that predicts a further token (MTP) is called in a checkpoint.

    Its decoder layer has the parts of the model's layers of attention.
    """

    parts: Mapping[str, tuple[str, ...]]
    """Norms of token and hidden state, the matrix behind both, the norm behind the layer."""
    block: str = "layers.{i}"
    """What the layer is called where others are `layers.{i}`; `{i}`: the number of layers."""
    rooted: bool = True
    """Whether its names stand behind the checkpoint's root."""
    goes_on_normed: bool = False
    """What the next token is predicted from is the layer's output behind its norm."""


LAYER_MTP = MtpNames(
    parts={
        "token_norm.weight": ("layers.{i}.enorm.weight",),
        "hidden_norm.weight": ("layers.{i}.hnorm.weight",),
        "join.weight": ("layers.{i}.eh_proj.weight",),
        "norm.weight": ("layers.{i}.shared_head.norm.weight",),
    }
)
"""DeepSeek-V3's: a layer behind the last one (arXiv 2412.19437, equations 21 to 25)."""
MODULE_MTP = MtpNames(
    parts={
        "token_norm.weight": ("mtp.pre_fc_norm_embedding.weight",),
        "hidden_norm.weight": ("mtp.pre_fc_norm_hidden.weight",),
        "join.weight": ("mtp.fc.weight",),
        "norm.weight": ("mtp.norm.weight",),
    },
    block="mtp.layers.0",
    rooted=False,
    goes_on_normed=True,
)
"""Qwen3-Next's: a module beside the model."""


@dataclass(frozen=True, kw_only=True)
class NameTable:
    """Checkpoint names of a family: part -> the tensors it is stacked from."""

    roots: tuple[str, ...]
    """Prefixes a checkpoint may keep everything under; the first that has the embedding counts."""
    embedding: Mapping[str, tuple[str, ...]]
    layer: Mapping[str, tuple[str, ...]]
    """`{i}` is the layer's number; parts and names with `{e}` stand for one of every expert, names
    with `{h}` for one of every query or key head."""
    head: Mapping[str, tuple[str, ...]]
    dense: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The table of `ModelSpec.dense_layers`, where a model has such."""
    two_norms: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Entries that are called otherwise where attention and MLP side by side have a norm each."""
    output: str = "lm_head.weight"
    """The untied output matrix, beside the root."""
    arrange: Mapping[str, Arrange] = field(default_factory=dict)
    """Parts that are stored in another form than ours (q, then k, then v)."""
    buffers: Mapping[str, float] = field(default_factory=dict)
    """Last words of the names of constants that checkpoints carry, and the value that each has."""
    apart: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Parts of experts as quantised checkpoints call them, where others keep all in one tensor."""
    otherwise: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Parts -> what they are called in a checkpoint that has nothing by the names of the table; in
    our form."""
    mtp: MtpNames | None = None
    """Of a head that predicts a further token; None where no checkpoint of the family has one."""

    def with_experts_apart(self) -> NameTable:
        """Return the table of a quantised checkpoint; its rows are in our order."""
        arrange = {part: how for part, how in self.arrange.items() if part not in self.apart}
        return replace(self, layer={**self.layer, **self.apart}, arrange=arrange, apart={})

    def used_in(self, stored: Collection[str]) -> NameTable:
        """Return the table that a checkpoint's tensors are called by."""
        # Behind the layer's number: the first layers may have no experts.
        first = [
            name.partition("{i}")[2].format(e=0) for names in self.apart.values() for name in names
        ]
        stems = tuple({f"{name.rpartition('.')[0]}." for name in first})
        apart = any(stem in name for name in stored if ".experts.0." in name for stem in stems)
        used = self.with_experts_apart() if apart else self
        # Codes and scales of a weight stand for it.
        names = {n for one in stored for n in (one, f"{one.rpartition('.')[0]}.weight")}
        tails = {_tail_of(name) for name in names} if self.otherwise else set()
        renamed = {
            part: names
            for part, names in self.otherwise.items()
            if _tail_of(self._named(part)) not in tails
        }
        if not renamed:
            return used
        layer, dense = (
            {part: renamed.get(part, names) for part, names in table.items()}
            for table in (used.layer, used.dense)
        )
        arrange = {part: how for part, how in used.arrange.items() if part not in renamed}
        return replace(used, layer=layer, dense=dense, arrange=arrange)

    def _named(self, part: str) -> str:
        """Return the first name of a part in the tables of layers."""
        return (self.dense.get(part) or self.layer[part])[0]

    def of_layer(self, spec: Any, index: int) -> dict[str, tuple[str, ...]]:
        """Return the entries of decoder layer `index`, those of every expert spelled out."""
        table: dict[str, tuple[str, ...]] = {}
        own = self.dense if index in spec.dense_layers else self.layer
        own = {**own, **self.two_norms} if spec.parallel_norms > 1 else own
        for part, names in own.items():
            heads = spec.kv_heads if part.startswith("k_") else spec.heads
            for expert in range(spec.experts) if "{e}" in part else (0,):
                table[part.format(e=expert)] = tuple(
                    name.format(i=index, e=expert, h=head)
                    for name in names
                    for head in (range(heads) if "{h}" in name else (0,))
                )
        return table

    def of_mtp(self, spec: Any) -> dict[str, tuple[str, ...]]:
        """Return the entries of the head that predicts a further token, below no root."""
        assert self.mtp is not None
        block, count = self.mtp.block, spec.num_layers
        table = {
            part: tuple(name.format(i=count) for name in names)
            for part, names in self.mtp.parts.items()
        }
        for part, names in self.layer.items():
            for expert in range(spec.experts) if "{e}" in part else (0,):
                table[part.format(e=expert)] = tuple(
                    name.replace("layers.{i}", block).format(i=count, e=expert) for name in names
                )
        return table

    def never_quantised(self, spec: Any) -> list[str]:
        """Return patterns of the matrices of layers that stay whole: compressed-tensors' `ignore`.

        By the last word of a name, or by two where that is a word such as `gate`.
        """
        words = set()
        for index in range(spec.num_layers):
            table = self.dense if index in spec.dense_layers else self.layer
            for part, shape in spec.of_layer(index).kept_whole.items():
                for name in table[part] if len(shape) > 1 else ():
                    two = name.removesuffix(".weight").split(".")[-2:]
                    words.add(two[1] if "_" in two[1] else ".".join(two))
        return [rf"re:.*\.{re.escape(found)}$" for found in sorted(words)]

    @property
    def layer_prefix(self) -> str:
        """What every tensor of a layer is called up to the layer's number."""
        return next(iter(self.layer.values()))[0].partition("{i}")[0]

    def arranged(self, part: str) -> Arrange:
        """Return how a part is put in our form, whichever expert it is of."""
        return self.arrange.get(EXPERT.sub("experts.{e}.", part), AS_IT_IS)


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model family."""

    name: str
    model_types: tuple[str, ...]
    """Values of `model_type` in `config.json`."""
    fields: Callable[[Config], dict[str, Any]]
    """`config.json` to the fields of `ModelSpec`: activation, norms, biases, positions, experts."""
    names: NameTable
    layers_at: str
    """What Transformers calls the list of decoder layers."""
    before: tuple[str, ...]
    """Its modules in front of the layers."""
    behind: tuple[str, ...]
    """And behind them."""
    published_as: str | None = None
    """The form in which its makers publish experts, where it is not 16 bits: `mxfp4`."""
    codes_unread: str | None = None
    """What Transformers does not read in a quantised copy (experts: where a model has such)."""


def _tail_of(name: str) -> str:
    """Return what stands behind a layer's number, or its place in a table of names."""
    return re.split(r"layers\.(?:\{i\}|[0-9]+)(?=\.)", name, maxsplit=1)[-1]


def norm_names(*parts: tuple[str, str]) -> dict[str, tuple[str, ...]]:
    """Return the entries of norms: (ours, theirs), weight and bias each."""
    return {
        f"{ours}.{kind}": (f"{theirs}.{kind}",)
        for ours, theirs in parts
        for kind in ("weight", "bias")
    }


def linear_names(*parts: tuple[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Return the entries of fused linears: (ours, theirs in stacking order)."""
    return {
        f"{ours}.{kind}": tuple(f"{name}.{kind}" for name in theirs)
        for ours, theirs in parts
        for kind in ("weight", "bias")
    }
