"""Reads a profile of LLMServingSim 2.0: dense.csv, per_sequence.csv and attention.csv of tp1/.

Times are microseconds of one layer's kernels on one GPU, under vLLM, of the model it names.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path

from llmpq.costs.cost_model import CostModel
from llmpq.models.model_spec import ModelSpec
from llmpq.planner.costs.imported import (
    AttentionTimes,
    Curve,
    end_entries,
    layer_entries,
    summed,
    thinned,
)
from llmpq.precision import Precision
from llmpq.sizes.attended_keys import windows_of

FILES = ("dense.csv", "per_sequence.csv", "attention.csv")
LAYER = {
    "layernorm": 2,
    "qkv_proj": 1,
    "qk_norm": 1,
    "rotary_emb": 1,
    "o_proj": 1,
    "gate_up_proj": 1,
    "act_fn": 1,
    "down_proj": 1,
}
"""How often a decoder layer runs each part that the table has."""
NEEDED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")


def is_profile(folder: Path) -> bool:
    """Whether a folder has such a profile."""
    return all((folder / "tp1" / name).is_file() for name in FILES)


def read_profile(folder: Path, spec: ModelSpec, kind: str) -> CostModel:
    """Return the costs of a profile; `ValueError` if it is not of this model's shapes."""
    if spec.experts or spec.differs_in_attention:
        raise ValueError(
            f"profiles of LLMServingSim are read of models whose layers are alike and dense, "
            f"{spec.name} is another: use its tables of a dense model, or llmpq-profile"
        )
    dense = _curves(folder / "tp1" / "dense.csv", "tokens")
    ends = _curves(folder / "tp1" / "per_sequence.csv", "sequences")
    lacking = [name for name in NEEDED if name not in dense]
    if lacking or "lm_head" not in ends:
        raise ValueError(
            f"'{folder}' has no times of {', '.join(lacking) or 'lm_head'}; expected a profile of "
            "LLMServingSim 2.0, with one line a layer and number of tokens"
        )
    layer = thinned(
        summed([c for name, n in LAYER.items() if name in dense for c in [dense[name]] * n])
    )
    head = summed([ends[name] for name in ("lm_head", "sampler") if name in ends])
    dtype = spec.dtype
    entries = layer_entries(kind, {Precision.W16A16: layer}, _attention(folder, spec), dtype=dtype)
    entries += end_entries(kind, "embedding", thinned(dense["embedding"]), dtype=dtype)
    entries += end_entries(kind, "head", thinned(head), dtype=dtype)
    return CostModel(
        model=spec.name,
        model_fingerprint=spec.fingerprint(),
        entries=tuple(entries),
        versions={"imported": f"LLMServingSim, {'/'.join(folder.parts[-4:])}"},
    )


def _curves(path: Path, unit: str) -> dict[str, Curve]:
    points: dict[str, list[tuple[float, float]]] = defaultdict(list)
    with path.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            points[row["layer"]].append((float(row[unit]), float(row["time_us"]) * 1e-6))
    return {name: tuple(sorted(own)) for name, own in points.items()}


def _attention(folder: Path, spec: ModelSpec) -> AttentionTimes:
    prompts, decoding, mixed = [], [], []
    with (folder / "tp1" / "attention.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            chunk, before, rows, keys = (
                int(row[name]) for name in ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
            )
            seconds = float(row["time_us"]) * 1e-6
            if chunk and not rows:
                prompts.append((1, chunk, before, seconds))
            elif rows and not chunk:
                decoding.append((rows, keys, seconds))
            else:
                mixed.append((chunk, before, rows, keys, seconds))
    return AttentionTimes(prompts=prompts, decoding=decoding, mixed=mixed, windows=windows_of(spec))
