"""The model of one stage: layers [start, end), with the embedding and the head where it has them.

Knows nothing of other stages, of requests or of devices other than its own.

Legend: B rows, Q new tokens, h hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from llmpq.kernels.cpu.pack_contiguous import pack_contiguous
from llmpq.kernels.kv.reference import ScoreRule
from llmpq.models.model_spec import ModelSpec
from llmpq.precision import Precision, WeightScheme
from llmpq.runtime.cache.kv_cache import KVCache
from llmpq.runtime.models.cut_head import CutHead
from llmpq.runtime.models.experts import SparseMLP
from llmpq.runtime.models.layer_tensors import LayerTensors, TensorSource
from llmpq.runtime.models.layers import (
    FOLLOWING,
    PER_LAYER,
    Attention,
    DecoderLayer,
    Embedding,
    Head,
    LayerRunner,
    held_weights,
    nbytes_of,
    recurrence_of,
)
from llmpq.runtime.models.linear import Linear, Reduce
from llmpq.runtime.models.wiring import Split, Wiring
from llmpq.runtime.steps.step import Step

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
"""Workload dtype -> torch dtype."""

Reader = Callable[[], dict[str, Tensor]]
Part = TypeVar("Part", DecoderLayer, Head)
HeadKey = tuple[WeightScheme | None, bool]
"""How an output matrix is stored, and whether it is the embedding's."""


class StageModel(nn.Module):
    """Layers of a model that run on one device."""

    def __init__(
        self,
        spec: ModelSpec,
        layers: Sequence[DecoderLayer],
        embedding: Embedding | None,
        head: Head | None,
        *,
        whole: ModelSpec | None = None,
        is_last: bool | None = None,
        reduce: Reduce | None = None,
        held: HeldParts | None = None,
    ) -> None:
        """`whole`: the model's spec, where `spec` is what one of a stage's devices has of it.

        `is_last`: whether these are the model's last layers, of which a stage's first device alone
        has the head; by default where there is a head. `reduce`: the sum over a stage's devices,
        where it has several. `held`: the same parts, for a stage that takes this one's place.
        """
        super().__init__()
        self.held = held
        self.num_held = 0
        """Layers that were on the device before this stage was made."""
        self.spec, self.whole_spec = spec, whole or spec
        self.is_last = head is not None if is_last is None else is_last
        self.reduce = reduce
        self.cut_head: CutHead | None = None
        """A part of the head, where the devices of the last stage share it, too."""
        self.embedding = embedding
        self.head = head
        self.layers = nn.ModuleList(layers)
        self._places = _places(layers)
        """Of each layer its number among those of the stage that keep what it keeps."""

    @classmethod
    def build(
        cls,
        spec: ModelSpec,
        layers: range,
        precisions: Sequence[Precision],
        *,
        first: bool,
        last: bool,
        has_head: bool = True,
        cuts_head: bool = False,
        dtype: torch.dtype,
        device: torch.device | str,
        scheme: Callable[[Precision], WeightScheme | None],
        head_precision: Precision = Precision.W16A16,
        source: TensorSource,
        on_layer: Callable[[int | None], None] | None = None,
        runner: LayerRunner | None = None,
        split: Split | None = None,
        held: HeldParts | None = None,
    ) -> StageModel:
        """Read and quantise layer by layer, while the next part is being read.

        The head is read last and alone: beside the embedding it would be the most host memory.

        `scheme` says how a precision is stored (`Quantization.scheme`), `head_precision` the output
        matrix's, which is then a copy of its own where it is tied; `on_layer` hears of every
        finished layer; `runner` computes the layers, torch's operators by default; `split`: how
        the layers are shared with other devices, of which one of the last stage `has_head`, and
        each a part of it where that `cuts_head`. `held`: what the device has of the model from the
        stage before on it; of that, what is wanted is not read again, and the rest is freed.
        """
        if len(precisions) != len(layers):
            raise ValueError(f"{len(precisions)} precisions for {len(layers)} layers")
        if layers:
            spec.require_cut(layers.start, spec.name)
        place = torch.device(device)
        on_matrix = None if on_layer is None else partial(on_layer, None)
        own = spec if split is None else split.member.own
        if split is not None:
            source.take_member(split.member)
        builder = _Builder(Wiring(own, place, runner, split=split), own, dtype, place, on_matrix)
        schemes = dict(zip(layers, map(scheme, precisions), strict=True))
        tied = first and last and spec.tied_embeddings
        with_head = last and has_head
        head_key: HeadKey | None = (scheme(head_precision), tied) if with_head else None
        found = None
        if held is not None:  # what is not wanted is freed before anything is read
            like = held.builder.is_like(builder, split)
            found = held.take(schemes if like else {}, first=first and like, head_key=head_key)
            builder = replace(found.builder, on_matrix=on_matrix) if like else builder
        held_layers = {} if found is None else found.layers
        source.keep_codes(schemes)
        missing = [index for index in layers if index not in held_layers]
        readers: list[Reader] = [partial(source.layer, index, dtype) for index in missing]
        embedding = None if found is None else found.embedding
        if first and embedding is None:
            readers.append(partial(source.embedding, dtype))
        parts = _one_ahead([_on_this_stream(reader, builder.device) for reader in readers])
        built: dict[int, DecoderLayer] = {}
        for index in layers:
            known = held_layers.get(index)
            built[index] = known or builder.layer(next(parts), schemes[index], index)
            if on_layer is not None:
                on_layer(index)
        if first and embedding is None:
            embedding = builder.embedding(next(parts))
        head = None if found is None else found.head
        if head_key is not None and head is None:
            shared = {}
            if tied:
                assert embedding is not None
                shared = {"output.weight": embedding.tokens_Vh}
            tensors = source.head(dtype, with_output=not shared)
            head = builder.head(tensors, shared, scheme(head_precision))
        made_by = replace(builder, on_matrix=None)  # who reports progress may hold the model
        made = cls(
            own,
            [*built.values()],
            embedding,
            head,
            whole=spec,
            is_last=last,
            reduce=None if split is None else split.reduce,
            held=HeldParts(made_by, schemes, built, embedding, head, head_key),
        )
        made.num_held = len(built) - len(missing)
        if split is not None and last and cuts_head and scheme(head_precision) is None:
            tokens = split.member.tokens
            if head is not None:
                made.cut_head = CutHead.of_whole(head, tokens, split.reduce)
            else:
                made.cut_head = builder.cut_head(source, embedding, tokens, split.reduce)
        return made

    def abridged(self) -> StageModel:
        """Return a stage of the first layer, the last and one of each kind between them.

        They are this stage's own and call the kernels that all of them call. All layers where some
        attend to others' keys and values.
        """
        layers = cast("Sequence[DecoderLayer]", self.layers)
        readers = (layer.attention for layer in layers if isinstance(layer.attention, Attention))
        if any(attention.sharing.source is not None for attention in readers):
            return self
        between: dict[object, int] = {}
        for place, layer in enumerate(layers[1:-1], start=1):
            between.setdefault(_kind(layer), place)
        chosen = sorted({0, *between.values(), len(layers) - 1}) if len(layers) else []
        ends = self.embedding, self.head
        short = StageModel(self.spec, [], *ends, is_last=self.is_last, reduce=self.reduce)
        short.layers = nn.ModuleList(layers[place] for place in chosen)
        short._places = [self._places[place] for place in chosen]
        return short

    @property
    def asks_host(self) -> bool:
        """Whether a step waits for the device: then it cannot be captured in a graph."""
        mixtures = (layer.mlp for layer in self.layers if isinstance(layer.mlp, SparseMLP))
        return any(mlp.asks_host for mlp in mixtures)

    @torch.inference_mode()
    def forward(self, x: Tensor, step: Step, kv: KVCache, *, last_only: bool = False) -> Tensor:
        """Return hidden states [B, Q, h] of tokens [B, Q] (first stage) or hidden states.

        `last_only`: only `logits` of the last tokens will be asked; a GPU's last layer then
        computes no others and returns [B, 1, h].
        """
        self._check_positions(step)
        if self.embedding is not None:
            x = self.embedding(x, step)
        elif self.spec.per_layer_dim:
            width = self.spec.stream_features
            step.memo[PER_LAYER] = x[..., width:]
            x = x[..., :width].contiguous()
        done = self._all_layers(x, step, kv)
        if done is not None:
            return done
        for index, layer in enumerate(self.layers):
            options = {"last_only": True} if last_only and index + 1 == len(self.layers) else {}
            if self.reduce is not None:
                behind = self.layers[index + 1] if index + 1 < len(self.layers) else None
                step.memo[FOLLOWING] = None if behind is None else behind.attn_norm
            x = layer(x, self._places[index], step, kv, in_place=index > 0, **options)
        if self.spec.per_layer_dim and self.head is None:
            x = torch.cat((x, step.memo[PER_LAYER]), dim=-1)
        return x

    def _all_layers(self, x: Tensor, step: Step, kv: KVCache) -> Tensor | None:
        layers = cast("Sequence[DecoderLayer]", self.layers)
        return layers[0].runner.all_layers(layers, x, step, kv) if len(layers) > 0 else None

    @torch.inference_mode()
    def logits(self, hidden_BQh: Tensor, step: Step, *, all_positions: bool = False) -> Tensor:
        """Return logits [B, V] at each row's last valid token, or [B, Q, V] at every one."""
        if self.head is None:
            raise ValueError("only the last stage has a head; build it with last=True")
        if not all_positions:
            hidden_BQh = _last_of_rows(hidden_BQh, step)
        output: Tensor = self.head(hidden_BQh)
        return output

    @torch.inference_mode()
    def logits_together(self, hidden_BQh: Tensor, step: Step) -> Tensor | None:
        """Return logits as `logits` where all devices of the stage make them; None elsewhere."""
        if self.cut_head is None:
            return None
        hidden_Rh = _last_of_rows(hidden_BQh, step)
        return self.cut_head.logits(hidden_Rh) if self.cut_head.takes(len(hidden_Rh)) else None

    @property
    def weight_nbytes(self) -> int:
        """Bytes of all weights this stage holds, a shared matrix counted once."""
        return nbytes_of(self)

    def _check_positions(self, step: Step) -> None:
        if self.spec.positions == "learned" and step.max_end > self.spec.max_positions:
            raise ValueError(
                f"a request of {step.max_end} tokens exceeds the {self.spec.max_positions} learned "
                f"positions of {self.spec.name}; shorten the prompt or generate fewer tokens"
            )


def _last_of_rows(hidden_BQh: Tensor, step: Step) -> Tensor:
    """Return [R, h]: each row at its last valid token."""
    return hidden_BQh[:, -1] if hidden_BQh.shape[1] == 1 else step.last_valid(hidden_BQh)


def _kind(layer: DecoderLayer) -> object:
    """Return what a layer's kernels hang on: its parts, bytes of weights, rules of scores."""
    kind = []
    for name, part in layer.named_modules():
        rule = getattr(part, "rule", None)
        scores: tuple[bool, ...] = ()
        if isinstance(rule, ScoreRule):  # a mixture's router has a rule, too
            scores = (rule.window > 0, rule.cap > 0, rule.chunked)
        weights = tuple(held.nbytes for held in held_weights(part))
        kind.append((name, type(part), type(getattr(part, "weight", None)), weights, scores))
    return tuple(kind)


def _places(layers: Sequence[DecoderLayer]) -> list[int]:
    """Return each layer's number in the KV cache, or among recurrent layers, which learn theirs."""
    places: list[int] = []
    num_kv, num_states = 0, 0
    by_number: dict[int, int] = {}
    for layer in layers:
        attention = layer.attention
        if isinstance(attention, Attention) and attention.sharing.source is not None:
            places.append(by_number[attention.sharing.source])
            continue
        if isinstance(attention, Attention):
            by_number[attention.sharing.own] = num_kv
        recurrent = recurrence_of(layer)
        alone = recurrent is not None and recurrent is layer.attention
        places.append(num_states if alone else num_kv)
        num_kv += layer.attention is not None and not alone
        if recurrent is not None:
            recurrent.place = num_states
            num_states += 1
    return places


@dataclass(frozen=True)
class _Builder:
    """Turns host tensors into the parts of a stage on its device."""

    wiring: Wiring
    spec: ModelSpec
    dtype: torch.dtype
    device: torch.device
    on_matrix: Callable[[], None] | None

    def is_like(self, other: _Builder, split: Split | None) -> bool:
        """Whether its parts are those that another one would make; `split`: of the other."""
        own = (self.spec, self.dtype, self.device)
        return own == (other.spec, other.dtype, other.device) and self.wiring.split == split

    def layer(
        self, tensors: dict[str, Tensor], scheme: WeightScheme | None, index: int
    ) -> DecoderLayer:
        parts, split = self._parts(tensors, scheme), self.wiring.split
        if scheme is not None and scheme.outliers and split is not None:
            parts = replace(parts, input_schemes=split.member.input_schemes(index, scheme))
        return _together(self.wiring.layer(parts, index))

    def embedding(self, tensors: dict[str, Tensor]) -> Embedding:
        return self.wiring.embedding(self._parts(tensors, None))

    def head(
        self, tensors: dict[str, Tensor], tied: dict[str, Tensor], scheme: WeightScheme | None
    ) -> Head:
        return _together(self.wiring.head(self._parts(tensors, scheme, tied)))

    def cut_head(
        self, source: TensorSource, embedding: Embedding | None, tokens: range, reduce: Reduce
    ) -> CutHead | None:
        """Return a part of the head; None where the matrix is stored as codes."""
        tied = embedding is not None and self.spec.tied_embeddings
        tensors = source.head(self.dtype, with_output=not tied)
        if embedding is not None and tied:
            tensors["output.weight"] = embedding.tokens_Vh
        whole = tensors["output.weight"]
        if not isinstance(whole, Tensor):
            return None
        vocab, part = whole.shape[0], slice(tokens.start, tokens.stop)
        for name in ("output.weight", "output.bias"):
            if name in tensors:
                rows = tensors[name][part]
                tensors[name] = rows if tied else rows.clone()  # what others have of it is freed
        shared = frozenset({"output.weight"} if tied else ())
        own = self.wiring.head(replace(self._parts(tensors, None), shared=shared))
        return CutHead(own, tokens.start, vocab, reduce)

    def _parts(
        self,
        tensors: dict[str, Tensor],
        scheme: WeightScheme | None,
        tied: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> LayerTensors:
        return LayerTensors(
            tensors={**tensors, **tied},
            shared=frozenset(tied),
            scheme=scheme,
            dtype=self.dtype,
            device=self.device,
            norm_eps=self.spec.norm_eps,
            on_matrix=self.on_matrix,
        )


@dataclass
class HeldParts:
    """Parts of a model that lie on a device, and how they were made."""

    builder: _Builder
    schemes: Mapping[int, WeightScheme | None]
    """How each layer is stored, by its number in the model."""
    layers: Mapping[int, DecoderLayer]
    embedding: Embedding | None
    head: Head | None
    head_key: HeadKey | None

    def take(
        self,
        schemes: Mapping[int, WeightScheme | None],
        *,
        first: bool,
        head_key: HeadKey | None,
    ) -> HeldParts:
        """Return what of it a stage of these layers uses, and let go of everything."""
        layers = {
            index: layer
            for index, layer in self.layers.items()
            if index in schemes and schemes[index] == self.schemes[index]
        }
        embedding = self.embedding if first else None
        head = self.head if head_key is not None and head_key == self.head_key else None
        found = replace(self, layers=layers, embedding=embedding, head=head)
        self.layers, self.embedding, self.head = {}, None, None
        return found


def _together(part: Part) -> Part:
    """Return a part whose quantised weights lie as a CPU reads them best."""
    linears = [module for module in part.modules() if isinstance(module, Linear)]
    linears = [linear for linear in linears if linear.weight.relocates]
    weights = [linear.weight for linear in linears]
    for linear, weight in zip(linears, pack_contiguous(weights), strict=True):
        linear.weight = weight
    return part


def _on_this_stream(reader: Reader, device: torch.device) -> Reader:
    """Return a reader whose kernels, if it has any, run in order with this thread's.

    A random or copied layer is made on the GPU; the stage uses it and frees it on its own stream.
    """
    if device.type != "cuda":
        return reader
    stream = torch.cuda.current_stream(device)

    def read() -> dict[str, Tensor]:
        with torch.cuda.stream(stream):
            return reader()

    return read


def _one_ahead(readers: Sequence[Reader]) -> Iterator[dict[str, Tensor]]:
    """Yield what each reader returns, the next one already reading in a thread."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        ahead = pool.submit(readers[0]) if readers else None
        for following in [*readers[1:], None]:
            if ahead is None:
                return
            held = [ahead.result()]
            ahead = pool.submit(following) if following is not None else None
            yield held.pop()  # the caller has the only reference
