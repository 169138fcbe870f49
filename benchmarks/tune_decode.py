"""Configurations of weight products at decode sizes, timed where they run: in decoder layers.

    python benchmarks/tune_decode.py --precision w8a16 --rows 1 2 4 8 16 32 --out FILE

Timed alone, back to back (`kernel_bench.py bench gemm`), a product meets only its like. In
a layer small kernels run while the next product's weights are on their way, and another
configuration may be the fastest (H200, Llama-3.1-8B, 8 bits with zeros in bfloat16, 8 rows: 9 us
less a layer). Steps are captured. Products are searched one after the other, largest first; the
winners are printed and written as entries of `kernels/gemm/tuned/*.json`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from llmpq.kernels.gemm import choice as gemm_config
from llmpq.kernels.gemm.choice import form_name
from llmpq.kernels.gemm.config import Config, config_entry
from llmpq.kernels.gemm.ranking.machine import machine_of
from llmpq.memory import Quantization
from llmpq.model_spec import LinearShape, ModelSpec
from llmpq.precision import Precision
from llmpq.runtime.backends.backend import backend_of
from llmpq.runtime.backends.gpu.cuda_graphs import DecodeGraphs
from llmpq.runtime.backends.gpu.cuda_step_times import seconds_of, step_message
from llmpq.runtime.cache.plain_kv import PlainKVCache
from llmpq.runtime.drafts.draft_model import build_draft
from llmpq.runtime.models.stage_model import DTYPES, StageModel
from llmpq.runtime.weights.dummy import CopiedLayers
from llmpq.runtime.weights.sources import RandomSource

DEVICE = torch.device("cuda:0")
WORTH_A_CHANGE = 0.998
"""Of the step's time: what a new configuration must get under."""


@dataclass(frozen=True, kw_only=True)
class Layers:
    """Decoder layers, a head, and the cache that their steps attend to."""

    model: StageModel
    dtype: torch.dtype
    context: int

    def step_us(self, rows: int) -> float:
        """Capture a step of so many rows anew; return what it takes."""
        max_len = self.context + 16
        kv = PlainKVCache(
            self.model.spec,
            num_layers=len(self.model.layers),
            slots=rows,
            max_len=max_len,
            dtype=self.dtype,
            device=DEVICE,
        )
        options = {"num_slots": rows, "max_len": max_len, "max_rows": rows}
        graphs = DecodeGraphs(self.model, kv, **options, dtype=self.dtype, device=DEVICE)
        message = step_message(rows, self.context, 1)
        return seconds_of(lambda: graphs.run(message, None), repeats=24) * 1e6


def candidates(n: int, k: int, rows: int) -> Iterator[Config]:
    """Yield what may win: whole K in a program for few rows, else tiles that fill the GPU."""
    if rows <= 8:
        for warps in (4, 8):
            for depth, x_depth in ((2, 1), (2, 2), (4, 2), (6, 2), (8, 1)):
                yield Config(kernel="rows", warps=warps, depth=depth, x_depth=x_depth)
    if rows == 1:
        return
    bm = max(16, rows)
    for blocks, warps in ((1, 4), (1, 8), (2, 4)):
        tiles = -(-n // (16 * blocks * warps))
        for split in (1, 2, 4, 8):
            if tiles * split < 110 or (tiles * split > 600 and split > 1):
                continue
            tile = Config(kernel="tile", blocks=blocks, warps=warps, bm=bm, split=split)
            for depth in (1, 2):
                yield replace(tile, depth=depth)
                if warps == 8:
                    yield replace(tile, depth=depth, registers=128)
            if rows > 16:
                yield replace(tile, stages=4)


def search(layers: Layers, shape: LinearShape, rows: int, key: gemm_config._Key) -> Config | None:
    """Put the fastest configuration of a product into the table in use; None if none is faster."""
    table = gemm_config._tuned()
    before, took = table.get(key), {}
    base_us = layers.step_us(rows)
    for config in candidates(shape.out_features, shape.in_features, rows):
        use(key, config)
        took[config] = layers.step_us(rows)
    best = min(took, key=lambda config: took[config])
    use(key, best)
    again_us = layers.step_us(rows)
    won = again_us < base_us * WORTH_A_CHANGE
    if not won:
        use(key, before)
    print(f"{rows:3} {shape.name:12} {base_us:7.0f} -> {again_us:7.0f} us {config_entry(best)}")
    return best if won else None


def use(key: gemm_config._Key, config: Config | None) -> None:
    """Have products of a key run so; None: as if nobody had measured it."""
    table = gemm_config._tuned()
    if config is None:
        table.pop(key, None)
    else:
        table[key] = config
    gemm_config.plan.cache_clear()


def main() -> None:
    """Search every product at every number of rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama-3.1-8b", help="built-in architecture")
    parser.add_argument("--precision", default="w4a16")
    parser.add_argument("--symmetric", action="store_true")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument(
        "--head", action="store_true", help="w4a16: the output matrix in 4 bits, as drafts have it"
    )
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--context", type=int, default=600)
    parser.add_argument("--out", type=Path, required=True, help="file of the entries")
    args = parser.parse_args()
    spec = replace(ModelSpec.by_name(args.model), num_layers=args.layers)
    precision, dtype = Precision.parse(args.precision), DTYPES[args.dtype]
    scheme = Quantization(symmetric=args.symmetric).scheme
    schemes = dict.fromkeys(range(args.layers), scheme(precision))
    source = CopiedLayers(RandomSource(spec, device=DEVICE), schemes, DEVICE)
    model = StageModel.build(
        spec,
        range(args.layers),
        [precision] * args.layers,
        first=True,
        last=True,
        dtype=dtype,
        device=DEVICE,
        scheme=scheme,
        source=source,
        runner=backend_of(DEVICE).layers(),
    )
    products = list(spec.linears())
    if args.head:
        none = PlainKVCache(spec, num_layers=0, slots=1, max_len=1, dtype=dtype, device=DEVICE)
        model = build_draft("w4kv4", model, none).model  # 4-bit layers are left alone
        size = {"out_features": spec.vocab, "in_features": spec.hidden}
        products.append(LinearShape(name="head", **size, bias=False))
    layers = Layers(model=model, dtype=dtype, context=args.context)
    machine = machine_of(DEVICE)
    gpu = (*machine.capability, machine.multiprocessors)
    entries = []
    for rows in args.rows:
        shapes = sorted(products, key=lambda s: -s.num_weights)
        for shape in shapes:
            form = form_name(dtype, args.symmetric or shape.name == "head")
            size = {"n": shape.out_features, "k": shape.in_features, "m": rows}
            key = gemm_config._Key(gpu, precision.weight_bits, **size, form=form)
            found = search(layers, shape, rows, key)
            if found is not None:
                entry = {"bits": precision.weight_bits, **size, "form": form}
                entries.append(entry | {"config": config_entry(found)})
                args.out.write_text(json.dumps(entries, indent=1))


if __name__ == "__main__":
    main()
