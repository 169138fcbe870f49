"""What a checkpoint's own codes take in memory, where layers of a plan keep them.

    codes            of a matrix [N, K], bytes, K rounded up to 128 but for E4M3
    MXFP4            N K / 2 + N K / 32
    NVFP4            N K / 2 + N K / 16 + 4 N
    NF4, FP4, IQ4    N K / 2 + N K / block scales of the dtype
    E4M3             N K + 4 bytes a scale
    integers         N K bits / 8 + scales and, if there are any, zero points of the dtype
    16 bits          N K of the dtype

Tables (MXFP4 to IQ4) are kept by layers of 4 and of 8 bits, IQ4 by 4 bits in groups of 32 only;
E4M3 by 8 bits, integers by as many bits as they have. Where a layer's integers are kept, so is its
E4M3, and beside either its linears of 16 bits (beside tables a plan chooses 4 or 8 bits for those).
What is not kept is rounded on the plan's grid and takes what that says (`WeightScheme.nbytes`).
The runtime decides alike in runtime/weights/quantized_checkpoint.py and gguf_checkpoint.py; tests
compare the bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, get_args

from llmpq.checkpoints.gguf_file import GgufFile, open_gguf
from llmpq.checkpoints.quantization_config import (
    fp8_block,
    is_centred,
    is_kept_block,
    quantization_of,
)
from llmpq.checkpoints.stored_forms import CodesForm, integer_codes, stored_form
from llmpq.families import FAMILIES
from llmpq.families.common.record import AS_IT_IS
from llmpq.models.model_spec import LinearShape, ModelSpec
from llmpq.planner.problem.stored_precisions import (
    Headers,
    Source,
    headers_of,
    is_gguf_file,
)
from llmpq.precision import Precision, WeightScheme, padded_k
from llmpq.sizes.memory import CodesName, Quantization, StoredBytes

TABLE_BITS, TABLE_GROUP = 4, 32
BESIDE_PLAIN = ("", "e4m3")
"""Names of codes beside which plain linears stay as they are."""
PLAIN, PLAIN_DTYPES = "plain", ("F16", "BF16", "F32")
"""Linears that a checkpoint leaves in floats of 16 bits or more beside codes."""
MXFP4_GROUP, NVFP4_GROUP = 32, 16
GGUF_LINEARS = {
    "qkv": ("attn_q", "attn_k", "attn_v", "attn_qkv"),
    "qk": ("attn_q", "attn_k"),
    "o": ("attn_output",),
    "mixer_in": (
        *("ssm_in", "attn_qkv", "attn_gate", "shortconv.in_proj"),
        *("attn_q", "attn_k", "attn_v"),
    ),
    "mixer_out": ("ssm_out", "shortconv.out_proj", "attn_output"),
    "gate_up": ("ffn_gate", "ffn_up"),
    "up": ("ffn_up",),
    "down": ("ffn_down",),
    "q": ("attn_q",),
    "q_a": ("attn_q_a",),
    "q_b": ("attn_q_b",),
    "kv_a": ("attn_kv_a_mqa",),
    "experts.gate_up": ("ffn_gate_exps", "ffn_up_exps", "ffn_gate_up_exps"),
    "experts.up": ("ffn_up_exps",),
    "experts.down": ("ffn_down_exps",),
    "shared.gate_up": ("ffn_gate_shexp", "ffn_up_shexp", "ffn_gate", "ffn_up"),
    "shared.up": ("ffn_up_shexp",),
    "shared.down": ("ffn_down_shexp", "ffn_down"),
    "latent_in": ("ffn_latent_down",),
    "latent_out": ("ffn_latent_up",),
    "per_layer_gate": ("inp_gate",),
    "per_layer_out": ("proj",),
}
"""A layer's fused linear -> what its pieces may be called in a GGUF file."""


@dataclass(frozen=True, kw_only=True)
class OwnCodes:
    """A linear's codes as its checkpoint has them."""

    name: str
    """`mxfp4`, `nvfp4`, `nf4`, `fp4`, `iq4`, `e4m3`; "" for integers, `PLAIN` for none."""
    bits: int
    group_size: int | None
    """Weights that share a scale; None for a whole row."""
    fixed_bytes: int
    """Codes, and scales that are the same for every dtype."""
    scales: int = 0
    """Scales and zero points that the dtype sizes."""
    centred: bool = True
    """Whether they have no zero points."""

    def is_kept(self, scheme: WeightScheme) -> bool:
        """Whether a layer of this scheme keeps them, whatever is beside them."""
        if scheme.activation_bits != 16 or self.name == PLAIN:
            return False
        if self.name == "iq4":
            return scheme.bits == TABLE_BITS and scheme.group_size == TABLE_GROUP
        if self.name == "":
            own_grid = self.has_usual_groups or (
                self.group_size == scheme.group_size and scheme.symmetric <= self.centred
            )
            return scheme.bits == self.bits and own_grid
        return scheme.bits == self.bits or (self.name != "e4m3" and scheme.bits == 8)

    @property
    def has_usual_groups(self) -> bool:
        """Whether groups are those of every grid, so that zero points are those of the codes."""
        return self.group_size in (128, None)

    def nbytes(self, dtype_bytes: int) -> int:
        """Return the bytes of the whole linear."""
        return self.fixed_bytes + self.scales * dtype_bytes


LayerCodes = Mapping[str, OwnCodes]
"""Linear -> its codes, of those of a layer that have codes of their own; plain ones beside
integers and E4M3."""


def kept_codes(own: LayerCodes, scheme: WeightScheme) -> LayerCodes:
    """Return what a layer of this scheme keeps as it is stored: codes, and floats beside them."""
    kept = {kind: codes for kind, codes in own.items() if codes.is_kept(scheme)}
    names = {codes.name for codes in kept.values()}
    beside = {PLAIN, "e4m3"} if "" in names else {PLAIN} if names else set()
    return {kind: codes for kind, codes in own.items() if kind in kept or codes.name in beside}


def with_checkpoint_codes(
    grid: Quantization,
    layers: Sequence[LayerCodes],
    spec: ModelSpec,
    precisions: Sequence[Precision],
    dtype_bytes: int,
) -> Quantization:
    """Return the grid with the bytes of the checkpoint's own codes, and what most of them are."""
    runs: list[StoredBytes] = []
    for precision in precisions:
        scheme = grid.scheme(precision)
        if scheme is None:
            continue
        for index, own in enumerate(layers):
            found = tuple(_other_bytes(spec.of_layer(index), own, scheme, dtype_bytes))
            last = runs[-1] if runs else None
            if last and (last.precision, last.linears, last.layers[1]) == (precision, found, index):
                runs[-1] = replace(last, layers=(last.layers[0], index + 1))
            elif found:
                one = (index, index + 1)
                runs.append(StoredBytes(layers=one, precision=precision, linears=found))
    return replace(grid, codes=_most(layers, spec, grid), stored=tuple(runs))


def _other_bytes(
    spec: ModelSpec, own: LayerCodes, scheme: WeightScheme, dtype_bytes: int
) -> Iterator[tuple[str, int]]:
    """Yield the linears of a layer that take other bytes than the scheme says, and how many."""
    kept = kept_codes(own, scheme)
    for linear in _each_once(spec):
        codes = kept.get(linear.kind)
        if codes is not None:
            if codes.name == "" and not codes.has_usual_groups:
                continue
            taken = codes.nbytes(dtype_bytes)
            if taken != scheme.nbytes(linear.out_features, linear.in_features, dtype_bytes):
                yield linear.kind, taken


def _each_once(spec: ModelSpec) -> Iterator[LinearShape]:
    """Yield a layer's linears, those of all experts once."""
    for linear in spec.linears():
        if not linear.of_expert or linear.name.startswith("experts.0."):
            yield linear


def _most(layers: Sequence[LayerCodes], spec: ModelSpec, grid: Quantization) -> CodesName | None:
    """Return what codes most weights of the layers have; None for integers and numbers."""
    weights: Counter[str] = Counter()
    for index, own in enumerate(layers):
        for linear in _each_once(spec.of_layer(index)):
            codes = own.get(linear.kind)
            scheme = None if codes is None else grid.scheme(Precision(f"w{codes.bits}a16"))
            kept = codes is not None and scheme is not None and codes.is_kept(scheme)
            count = spec.experts if linear.of_expert else 1
            weights[codes.name if codes and kept else ""] += count * linear.num_weights
    most = max(weights, key=lambda name: weights[name], default="")
    return next((name for name in get_args(CodesName) if name == most), None)


def rounded_shares(
    layers: Sequence[LayerCodes], spec: ModelSpec, scheme: WeightScheme
) -> tuple[float, ...]:
    """Return of each layer the share of weights that a scheme rounds: those whose codes go."""
    return tuple(_rounded(own, spec.of_layer(index), scheme) for index, own in enumerate(layers))


def _rounded(own: LayerCodes, spec: ModelSpec, scheme: WeightScheme) -> float:
    weights, kept = {True: 0, False: 0}, kept_codes(own, scheme)
    for linear in _each_once(spec):
        count = linear.num_weights * (spec.experts if linear.of_expert else 1)
        weights[linear.kind not in kept] += count
    return weights[True] / max(1, sum(weights.values()))


def has_others_beside(own: LayerCodes, spec: ModelSpec) -> bool:
    """Whether a layer has 4-bit codes of a table, and linears without such."""
    tables = [kind for kind, codes in own.items() if codes.name not in (*BESIDE_PLAIN, PLAIN)]
    return bool(tables) and any(linear.kind not in tables for linear in _each_once(spec))


def checkpoint_codes(source: Source, spec: ModelSpec) -> list[LayerCodes]:
    """Return every layer's linears that have codes of their own."""
    if is_gguf_file(source):
        file = open_gguf(source)
        return [dict(_of_gguf(file, spec.of_layer(i), i)) for i in range(spec.num_layers)]
    described = quantization_of(source)
    if described is None:
        return [{} for _ in range(spec.num_layers)]
    directory = _Directory(headers_of(source, spec), described, spec)
    return [_with_plain(dict(directory.of_layer(index))) for index in range(spec.num_layers)]


def _with_plain(found: LayerCodes) -> LayerCodes:
    """Return a layer's codes, plain linears only beside such as leave them plain."""
    codes = {kind: own for kind, own in found.items() if own.name != PLAIN}
    beside = codes and all(own.name in BESIDE_PLAIN for own in codes.values())
    return found if beside else codes


def _of_gguf(file: GgufFile, spec: ModelSpec, index: int) -> Iterator[tuple[str, OwnCodes]]:
    for linear in _each_once(spec):
        names = (f"blk.{index}.{name}.weight" for name in GGUF_LINEARS.get(linear.kind, ()))
        kinds = {file.tensors[name].kind for name in names if name in file.tensors}
        if kinds == {"MXFP4"}:
            yield linear.kind, _table("mxfp4", linear, MXFP4_GROUP)
        elif kinds and kinds <= {"IQ4_NL", "IQ4_XS"}:
            yield linear.kind, _table("iq4", linear, TABLE_GROUP)


def _table(name: str, linear: LinearShape, group: int) -> OwnCodes:
    """Return 4-bit codes of a table with a scale of `group` weights."""
    n, k = linear.out_features, padded_k(linear.in_features)
    fixed, scales = n * k * TABLE_BITS // 8, n * (k // group)
    in_bytes = {"mxfp4": scales, "nvfp4": scales + 4 * n}.get(name)
    return OwnCodes(
        name=name,
        bits=TABLE_BITS,
        group_size=group,
        fixed_bytes=fixed + (in_bytes or 0),
        scales=scales if in_bytes is None else 0,
    )


class _Directory:
    """The headers of a safetensors checkpoint, asked for a layer's linears."""

    def __init__(self, headers: Headers, described: Mapping[str, Any], spec: ModelSpec) -> None:
        held = headers.file_of
        self._headers = headers
        self._described = described
        self._spec = spec
        self._names = FAMILIES[spec.family].names.used_in(held)
        (token_name,) = self._names.embedding["tokens.weight"]
        roots = (root for root in self._names.roots if root + token_name in held)
        self._root = next(roots, self._names.roots[0])

    def of_layer(self, index: int) -> Iterator[tuple[str, OwnCodes]]:
        """Yield the layer's linears with codes of their own."""
        table = self._names.of_layer(self._spec, index)
        for linear in _each_once(self._spec.of_layer(index)):
            part = f"{linear.name}.weight"
            names = [self._root + name for name in table.get(part, ())]
            stems = [name.removesuffix(".weight") for name in names]
            if names and all(map(self._is_plain, names)):
                weights = linear.num_weights
                yield (
                    linear.kind,
                    OwnCodes(name=PLAIN, bits=16, group_size=None, fixed_bytes=0, scales=weights),
                )
                continue
            for read in (self._floats, self._tables, self._integers):
                codes = read(linear, stems) if stems else None
                if codes is not None:
                    yield linear.kind, codes
                    break

    def _is_plain(self, name: str) -> bool:
        """Whether a tensor, or the one that a row is of, has floats."""
        stored = self._headers.header(name.partition("[")[0].removesuffix("^T"))
        return stored is not None and stored[0] in PLAIN_DTYPES

    def _floats(self, linear: LinearShape, stems: Sequence[str]) -> OwnCodes | None:
        """Return E4M3 codes of a linear whose pieces all have such."""
        block = fp8_block(self._described)
        stored = [self._headers.header(f"{stem}.weight") for stem in stems]
        if not is_kept_block(block) or any(s is None or s[0] != "F8_E4M3" for s in stored):
            return None
        scales, shared = 0, self._names.arranged(f"{linear.name}.weight") == AS_IT_IS
        forms, by_row = set(), 1
        for stem, piece in zip(stems, stored, strict=True):
            names = (f"{stem}.weight_scale_inv", f"{stem}.weight_scale")
            found = next((h for h in map(self._headers.header, names) if h is not None), None)
            if found is None or piece is None:
                return None
            scale, rows = found[1], piece[1][0]
            table = block is not None and len(scale) == 2
            each = block[0] if table and block else rows if prod(scale) == 1 else 1
            by_row = scale[1] if table else 1
            forms.add((each, by_row))
            scales += prod(scale)
            shared &= len(stems) == 1 or rows % each == 0
        if not shared or len(forms) > 1:
            scales = linear.out_features * by_row
        return OwnCodes(
            name="e4m3", bits=8, group_size=None, fixed_bytes=linear.num_weights + 4 * scales
        )

    def _tables(self, linear: LinearShape, stems: Sequence[str]) -> OwnCodes | None:
        """Return 4-bit codes of a linear whose pieces all have the same table."""
        forms = {stored_form(stem, self._headers) for stem in stems}
        form = forms.pop() if len(forms) == 1 else None
        if form is None or not form.is_table:
            return None
        if form in (CodesForm.MXFP4, CodesForm.NVFP4):
            group = MXFP4_GROUP if form is CodesForm.MXFP4 else NVFP4_GROUP
            return _table(form.value, linear, group)
        headers = [self._headers.header(f"{stem}.weight.absmax") for stem in stems]
        blocks = sum(prod(header[1]) for header in headers if header is not None)
        return _table(form.value, linear, linear.num_weights // blocks) if blocks else None

    def _integers(self, linear: LinearShape, stems: Sequence[str]) -> OwnCodes | None:
        """Return integers in groups that kernels take."""
        if any(stored_form(stem, self._headers) is not CodesForm.INTEGERS for stem in stems):
            return None
        found = [integer_codes(stem, self._headers, self._described) for stem in stems]
        forms = {(codes.bits, codes.group_size) for codes in found}
        bits, size = forms.pop()
        if forms or not bits or size is None:
            return None
        zeros = any(f"{stem}.weight_zero_point" in self._headers.file_of for stem in stems)
        centred = is_centred(self._described, zeros)
        scheme = WeightScheme(bits=bits, group_size=size or None, symmetric=centred)
        n, k = linear.out_features, linear.in_features
        fixed = scheme.nbytes(n, k, 0)
        return OwnCodes(
            name="",
            bits=bits,
            group_size=size or None,
            fixed_bytes=fixed,
            scales=scheme.nbytes(n, k, 1) - fixed,
            centred=centred,
        )
