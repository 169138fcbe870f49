"""Error of attention over low-bit caches against the unquantised cache.

    python benchmarks/kv_error.py --model DIR --text FILE

On random N(0, 1) queries, keys and values (attention nearly uniform over 1024 tokens, outputs
small: the hardest case in relative terms), and on what the model's layers really produce for the
text. One row per format and source in results/kv_error.jsonl: ||low bit - plain|| / ||plain||.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from lib.rows import write_row
from torch import Tensor

from llmpq.kernels.formats.kv_block import KVFormat
from llmpq.precision import KVPrecision
from llmpq.runtime.cache.kv_cache import KVCache
from llmpq.runtime.step import Step
from llmpq.runtime.text.tokenizer import Tokenizer
from reference.kv_history import attend_from_history, relative_error
from reference.pipeline import ReferencePipeline

FORMATS = tuple(
    (kv, group)
    for kv in (KVPrecision.KV8, KVPrecision.KV4, KVPrecision.KV2)
    for group in (128, 32, None)
)
QUERIES = 64
"""Queries compared, the last of the context."""


@dataclass
class Recorder(KVCache):
    """A cache that keeps what the layers bring, and attends as the cache below it does."""

    inner: KVCache
    layers: list[tuple[Tensor, Tensor, Tensor, float]] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of the cache below."""
        return self.inner.nbytes

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, step: Step, *, scale: float,
        alibi_slopes_H: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Record and pass on."""
        self.layers.append((q[0], k[0], v[0], scale))
        slopes = alibi_slopes_H
        return self.inner.attend(layer, q, k, v, step, scale=scale, alibi_slopes_H=slopes)


def error(fmt: KVFormat, q: Tensor, k: Tensor, v: Tensor, scale: float) -> float:
    """Return the relative error of the last queries' outputs."""
    start = len(k) - QUERIES
    exact, low = (
        attend_from_history(fmt, q[start:], k, v, start=start, scale=scale, quantised=quantised)
        for quantised in (False, True)
    )
    return relative_error(low, exact)


def main() -> int:
    """Measure every format on both sources."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="local Hugging Face model directory")
    parser.add_argument("--text", required=True, help="text file to read")
    parser.add_argument("--tokens", type=int, default=1024, help="context (default 1024)")
    args = parser.parse_args()
    pipeline = ReferencePipeline.from_directory(args.model)
    text = Path(args.text).read_text(encoding="utf-8")
    tokens = Tokenizer(args.model).encode(text, special=False)[: args.tokens]
    recorder = Recorder(pipeline.caches(1, args.tokens)[0])
    step = Step.of([0], [0], [len(tokens)])
    pipeline.logits(torch.tensor([tokens]), step, [recorder])
    torch.manual_seed(0)
    spec = pipeline.spec
    shapes = [(args.tokens, heads, spec.head_dim) for heads in (spec.heads, *[spec.kv_heads] * 2)]
    q, k, v = (torch.randn(shape) for shape in shapes)
    sources = {"random": [(q, k, v, spec.head_dim**-0.5)], Path(args.model).name: recorder.layers}
    for kv, group in FORMATS:
        fmt = KVFormat(precision=kv, head_dim=spec.head_dim, key_group=group)
        keys = "kt" if group is None else f"kc{group}"
        for source, layers in sources.items():
            samples = [error(fmt, *layer) for layer in layers]
            case = {"source": source, "kv": kv.value, "keys": keys, "context": args.tokens}
            row = write_row(
                "kv_error.jsonl", bench="kv_error", case=case, unit="relative", samples=samples
            )
            sys.stdout.write(f"{kv.value} {keys:5} {source:10} median {row['value']:.2e}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
