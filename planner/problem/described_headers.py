"""The tensors of a quantised checkpoint as its config alone describes them: no weights are here.

A model of a hub is planned before its weights are downloaded, a built-in name without any file.
What `quantization_config` says of linears is spelled out as the headers of safetensors files that
such a model has, so that everything else reads one form (stored_precisions.py and
checkpoint_codes.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

from llmpq.checkpoints.quantization_config import NVFP4, OWN_FORM, fp8_block
from llmpq.families import FAMILIES
from llmpq.models.model_spec import LinearShape, ModelSpec

Tensors = Iterator[tuple[str, str, list[int]]]
"""Name, dtype and shape of each."""
BNB_BLOCK = 64
"""Weights that share a scale of bitsandbytes."""
FP8_BY_ROW = "FP8_PER_CHANNEL_PER_TOKEN"
"""ModelOpt's `quant_algo` of a scale a row."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One linear as checkpoints have it: a q, a k, a gate."""

    name: str
    rows: int
    columns: int
    elsewhere: tuple[str, ...] = ()
    """What it is called in models that have the language model inside."""

    @property
    def module(self) -> str:
        """Its name without a row of a tensor."""
        return self.name.partition("[")[0]

    @property
    def modules(self) -> tuple[str, ...]:
        """What the modules that a config names are compared with."""
        return self.module, *(name.partition("[")[0] for name in self.elsewhere)


class DescribedHeader:
    """What a file's header would say; `tensors` as in safetensors."""

    def __init__(self, tensors: dict[str, Any]) -> None:
        self.path, self.metadata = Path("config.json"), dict[str, str]()
        self.tensors = tensors

    def whole_numbers(self, name: str) -> list[int]:
        """Return the rows and columns that a `weight_shape` holds."""
        rows, columns = self.tensors[name]["holds"]
        return [rows, columns]


def is_described(config: Mapping[str, Any]) -> bool:
    """Whether a config says how linears are quantised; of Atom's form the files alone do."""
    method = config.get("quant_method")
    needed = {"gptq": "bits", "compressed-tensors": "config_groups"}.get(str(method))
    return method != OWN_FORM and (needed is None or bool(config.get(needed)))


def described_headers(
    spec: ModelSpec, config: Mapping[str, Any], where: object
) -> dict[str, DescribedHeader]:
    """Return the tensors of the linears of a model whose `quantization_config` is `config`.

    Of a layer's experts, which are quantised alike, the first stands for all. `ValueError` where
    the config does not say enough.
    """
    if not is_described(config):
        raise ValueError(
            f"'{where}' is quantised but has no model.safetensors, whose header says at how many "
            "bits each layer is stored; get its weights, or say it with --bits"
        )
    method = config["quant_method"]
    tensors: dict[str, Any] = {}
    for piece in pieces(spec, experts_apart=method != "mxfp4"):
        described = list(METHODS[method](piece, config))
        for name, dtype, shape in described or _plain(piece):
            entry = {"dtype": dtype, "shape": shape, "data_offsets": [0, 0]}
            tensors[name] = entry | {"holds": [piece.rows, piece.columns]}
    header = DescribedHeader(tensors)
    return dict.fromkeys(tensors, header)


def pieces(spec: ModelSpec, *, experts_apart: bool) -> Iterator[Piece]:
    """Yield every linear of the layers as checkpoints name it, of experts the first one's."""
    names = FAMILIES[spec.family].names
    names = names.with_experts_apart() if experts_apart else names
    for index in range(spec.num_layers):
        table, own = names.of_layer(spec, index), spec.of_layer(index)
        for linear in own.linears():
            if linear.of_expert and not linear.name.startswith("experts.0."):
                continue
            stems = table.get(f"{linear.name}.weight", ())
            for stem, rows in zip(stems, _rows(own, linear, len(stems)), strict=True):
                name, *others = (root + stem.removesuffix(".weight") for root in names.roots)
                yield Piece(
                    name=name, rows=rows, columns=linear.in_features, elsewhere=tuple(others)
                )


def _rows(spec: ModelSpec, linear: LinearShape, count: int) -> list[int]:
    """Return the rows of each of the pieces that are stacked to a linear."""
    if linear.name == "qkv" and count == 3:
        kv = spec.kv_heads * spec.head_dim
        return [linear.out_features - 2 * kv, kv, kv]
    return [linear.out_features // count] * count if count else []


def _plain(piece: Piece) -> Tensors:
    """What is not quantised has floats."""
    name = piece.module if piece.name != piece.module else f"{piece.name}.weight"
    yield name, "BF16", [piece.rows, piece.columns]


def _is_named(piece: Piece, patterns: Any) -> bool:
    """Whether a list has a module: by parts of its name, a glob, or `re:` an expression."""
    names = piece.modules
    return any(_matches(name, str(pattern)) for pattern in patterns or () for name in names)


def _matches(module: str, pattern: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    if fnmatch(module, pattern):
        return True
    return fnmatch(f".{module}.", f"*.{pattern.strip('.')}.*")


def _scales(piece: Piece, group: int | None) -> int:
    """Return how many groups a row has."""
    return -(-piece.columns // group) if group and group > 0 else 1


def _fp8(piece: Piece, config: Mapping[str, Any], *, by_row: bool = False) -> Tensors:
    skipped = config.get("modules_to_not_convert") or config.get("ignored_layers")
    if not _is_named(piece, skipped):
        yield from _e4m3(piece, fp8_block(config), by_row=by_row)


def _e4m3(piece: Piece, block: Any, *, by_row: bool) -> Tensors:
    yield f"{piece.name}.weight", "F8_E4M3", [piece.rows, piece.columns]
    if block:
        shape = [-(-piece.rows // block[0]), -(-piece.columns // block[1])]
        yield f"{piece.name}.weight_scale_inv", "F32", shape
    else:
        yield f"{piece.name}.weight_scale", "F32", [piece.rows, 1] if by_row else [1]


def _mxfp4(piece: Piece, config: Mapping[str, Any]) -> Tensors:
    """OpenAI's form: the codes of a layer's experts in one tensor."""
    if ".experts" in piece.name and not _is_named(piece, config.get("modules_to_not_convert")):
        yield f"{piece.module}_blocks", "U8", [1, piece.rows, piece.columns // 32, 16]
        yield f"{piece.module}_scales", "U8", [1, piece.rows, piece.columns // 32]


def _gptq(piece: Piece, config: Mapping[str, Any]) -> Tensors:
    bits, dynamic = config["bits"], config.get("dynamic") or {}
    lists = config.get("modules_in_block_to_quantize") or ()
    chosen = [name for names in lists for name in names]
    left_out = [rule[2:] for rule in dynamic if rule.startswith("-:")]
    if any(re.match(rule, name) for rule in left_out for name in piece.modules):
        return
    if chosen and not _is_named(piece, chosen):
        return
    groups = _scales(piece, config.get("group_size"))
    yield f"{piece.name}.qweight", "I32", [piece.columns * bits // 32, piece.rows]
    yield f"{piece.name}.scales", "F16", [groups, piece.rows]


def _awq(piece: Piece, config: Mapping[str, Any]) -> Tensors:
    if not _is_named(piece, config.get("modules_to_not_convert")):
        yield f"{piece.name}.qweight", "I32", [piece.columns, piece.rows // 8]
        groups = _scales(piece, config.get("group_size", config.get("q_group_size")))
        yield f"{piece.name}.scales", "F16", [groups, piece.rows]


def _bitsandbytes(piece: Piece, config: Mapping[str, Any]) -> Tensors:
    if not _is_named(piece, config.get("llm_int8_skip_modules")):
        weights, kind = piece.rows * piece.columns, config.get("bnb_4bit_quant_type", "fp4")
        yield f"{piece.name}.weight", "U8", [weights // 2, 1]
        yield f"{piece.name}.weight.absmax", "U8", [-(-weights // BNB_BLOCK)]
        yield f"{piece.name}.weight.quant_state.bitsandbytes__{kind}", "U8", [1]


def _modelopt(piece: Piece, config: Mapping[str, Any]) -> Tensors:
    skipped = config.get("exclude_modules") or config.get("ignore")
    if _is_named(piece, skipped):
        return
    algorithm = str(config.get("quant_algo")).upper()
    for module, own in (config.get("quantized_layers") or {}).items():
        if _is_named(piece, [module]):
            algorithm = str(own.get("quant_algo")).upper()
            break
    else:
        if config.get("quantized_layers"):
            return
    if algorithm in NVFP4:
        yield f"{piece.name}.weight", "U8", [piece.rows, piece.columns // 2]
        yield f"{piece.name}.weight_scale", "F8_E4M3", [piece.rows, piece.columns // 16]
        yield f"{piece.name}.weight_scale_2", "F32", []
    else:
        block = config.get("weight_block_size")
        yield from _e4m3(piece, block, by_row=algorithm == FP8_BY_ROW)


def _compressed_tensors(piece: Piece, config: Mapping[str, Any]) -> Tensors:
    if _is_named(piece, config.get("ignore")):
        return
    groups = (config.get("config_groups") or {}).values()
    for group in groups:
        targets, weights = group.get("targets") or ["Linear"], group.get("weights") or {}
        if "Linear" in targets or _is_named(piece, targets):
            yield from _compressed(piece, weights, group.get("format") or config.get("format"))
            return


def _compressed(piece: Piece, weights: Mapping[str, Any], form: Any) -> Tensors:
    name, n, k, bits = piece.name, piece.rows, piece.columns, weights["num_bits"]
    if weights.get("type") == "float" and bits == 4:
        yield f"{name}.weight_packed", "U8", [n, k // 2]
        yield f"{name}.weight_scale", "F8_E4M3", [n, k // (weights.get("group_size") or 16)]
        if str(form).startswith("nvfp4"):
            yield f"{name}.weight_global_scale", "F32", [1]
    elif weights.get("type") == "float":
        by_row = weights.get("strategy") == "channel"
        yield from _e4m3(piece, weights.get("block_structure"), by_row=by_row)
    elif form == "int-quantized":
        yield f"{name}.weight", "I8", [n, k]
        yield f"{name}.weight_scale", "F32", [n, 1]
    else:
        yield f"{name}.weight_packed", "I32", [n, -(-k * bits // 32)]
        yield f"{name}.weight_scale", "F16", [n, _scales(piece, weights.get("group_size"))]
        yield f"{name}.weight_shape", "I64", [2]
        if not weights.get("symmetric", True):
            yield f"{name}.weight_zero_point", "I32", [1]
        if weights.get("actorder") in ("group", True):
            yield f"{name}.weight_g_idx", "I32", [k]


METHODS: Mapping[str, Callable[[Piece, Mapping[str, Any]], Tensors]] = {
    "fp8": _fp8,
    "fbgemm_fp8": partial(_fp8, by_row=True),
    "mxfp4": _mxfp4,
    "gptq": _gptq,
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    "modelopt": _modelopt,
    "compressed-tensors": _compressed_tensors,
}
"""`quant_method` -> the tensors of a linear."""
