"""Perplexity of a model over low-bit KV caches.

    python benchmarks/kv_perplexity.py --model DIR --text FILE

Every token is predicted as decoding would: its query sees the keys below `packed_end` packed and
the newer ones in 16 bits (prompts are not exempt, unlike in serving). One row per format in
results/kv_perplexity.jsonl.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from lib.rows import write_row

from llmpq.precision import KVPrecision
from llmpq.runtime.cache.kv_cache import KVCache
from llmpq.runtime.cache.low_bit_kv import LowBitKV
from llmpq.runtime.models.stage_model import DTYPES
from llmpq.runtime.text.tokenizer import Tokenizer
from llmpq.runtime.tools.evaluate import perplexity
from reference.pipeline import ReferencePipeline

FORMATS: tuple[tuple[KVPrecision, int | None], ...] = (
    (KVPrecision.KV16, None),
    *(
        (kv, group)
        for kv in (KVPrecision.KV8, KVPrecision.KV4, KVPrecision.KV2)
        for group in (128, 32, None)
    ),
)
"""Precision, and tokens that share a channel's key scale (None: one scale per token)."""


@dataclass(frozen=True)
class LowBitPipeline(ReferencePipeline):
    """A pipeline whose prompts, too, attend to packed keys and values.

    `key_group` tokens share a channel's key scale; None: one scale per token.
    """

    kv: KVPrecision
    key_group: int | None = 128

    def caches(self, slots: int, max_len: int) -> list[KVCache]:
        """Return one empty cache per stage."""
        return [
            LowBitKV(
                self.spec,
                self.kv,
                num_layers=len(stage.layers),
                slots=slots,
                max_len=max_len,
                dtype=self.dtype,
                device=self.device,
                key_group=self.key_group,
                exact_prompt=False,
            )
            for stage in self.stages
        ]


def main() -> int:
    """Measure every format and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="local Hugging Face model directory")
    parser.add_argument("--text", required=True, help="text file to predict")
    parser.add_argument("--tokens", type=int, help="use only the first N tokens")
    parser.add_argument(
        "--window", type=int, default=1024, help="tokens of a window (default 1024)"
    )
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    text = Path(args.text).read_text(encoding="utf-8")
    tokens = Tokenizer(args.model).encode(text, special=False)[: args.tokens]
    pipeline = ReferencePipeline.from_directory(
        args.model, dtype=DTYPES[args.dtype], device=torch.device(args.device)
    )
    base = 0.0
    for kv, group in FORMATS:
        low_bit = kv is not KVPrecision.KV16
        parts = (pipeline.spec, pipeline.stages, pipeline.dtype, pipeline.device)
        measured = LowBitPipeline(*parts, kv, group) if low_bit else pipeline
        result = perplexity(measured.scores, tokens, window=args.window)
        base = base or result.value
        keys = "kt" if group is None else f"kc{group}"
        case = {
            "model": Path(args.model).name,
            "kv": kv.value,
            "keys": keys if low_bit else "",
            "tokens": result.num_tokens,
            "window": result.window,
            "dtype": args.dtype,
        }
        write_row(
            "kv_perplexity.jsonl",
            bench="kv_perplexity",
            case=case,
            unit="perplexity",
            samples=[result.value],
            baselines={"kv16": base},
        )
        change = 100 * (result.value / base - 1)
        sys.stdout.write(f"{kv.value:5} {case['keys']:6} {result.value:8.4f} {change:+7.2f} %\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
