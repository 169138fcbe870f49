"""A decode step's attention over latents (MLA) on a GPU: packed ones beside those of 16 bits.

python benchmarks/latents_gpu.py rows,one [--file latents_gpu.jsonl]

rows      deepseek-v2-lite (16 heads) and v3 (128): 8, 4 and 2 bits, the kernel for heads of any
          size beside it, and 16 bits; the floor is what is read, once
one       errors and times of some launches: operands ahead, splits, bits; no rows
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
from lib.rows import write_row

from llmpq.devices.device_spec import canonical_kind, device_specs
from llmpq.kernels.formats.kv_block import KVFormat
from llmpq.kernels.gpu_timing import copies_for, time_launches
from llmpq.kernels.kv import ruled_attend
from llmpq.kernels.kv.low_bit import latent_codes
from llmpq.kernels.kv.low_bit.any_size_attend import attend_any_size
from llmpq.kernels.kv.low_bit.low_bit_cache import QuantizedKVCache
from llmpq.precision import KVPrecision
from llmpq.sizes.kv_format import BLOCK_TOKENS

RANK, DIM = 512, 576
CASES = ((16, 32, 8192), (128, 8, 8192))
"""Query heads, requests, tokens of each."""


def packed(kv: KVPrecision, heads: int, batch: int, context: int) -> tuple[Any, ...]:
    """Return a cache of random codes, what attention over one of its layers is given, and bytes."""
    fmt = KVFormat(precision=kv, head_dim=DIM)
    nbytes = int(batch * context * fmt.block_bytes(1) / BLOCK_TOKENS)
    cache = QuantizedKVCache(
        fmt, num_layers=copies_for(nbytes), kv_heads=1, slots=batch, max_len=context + 1,
        dtype=torch.bfloat16, device="cuda",
    )  # fmt: skip
    for layer in cache.layers:
        for words in (layer.k_words_PGW, layer.v_words_PGW):
            words.random_(-(2**31), 2**31 - 1)
        for params in (layer.k_params_PG, layer.v_params_PG):
            params.uniform_(0.001, 0.01)
    slots = torch.arange(batch, device="cuda")
    start = torch.full_like(slots, context - 1)
    plan = cache.plan(slots, start, torch.ones_like(slots), q_len=1, fresh=False, max_end=context)
    q = torch.randn(batch, 1, heads, DIM, device="cuda", dtype=torch.bfloat16)
    return cache, (q, plan.device_rows), nbytes


def sixteen_us(heads: int, batch: int, context: int) -> float:
    """Return the microseconds of the same step in 16 bits."""
    sets = copies_for(2 * batch * context * DIM)
    caches = [torch.randn(batch, 1, context, DIM, device="cuda").bfloat16() for _ in range(sets)]
    q = torch.randn(batch, 1, heads, DIM, device="cuda", dtype=torch.bfloat16)
    slots = torch.arange(batch, dtype=torch.int32, device="cuda")
    start, new = torch.full_like(slots, context - 1), torch.ones_like(slots)
    own = {"max_end": context, "scale": DIM**-0.5, "value_dim": RANK}

    def attend(i: int) -> torch.Tensor:
        return ruled_attend.ruled_attend(q, caches[i], caches[i], slots, start, new, **own)

    return statistics.median(time_launches(attend, sets))


def rows(args: argparse.Namespace) -> None:
    """Keep rows."""
    name = torch.cuda.get_device_name()
    rate = device_specs()[canonical_kind(name)].mem_gbps
    for heads, batch, context in CASES:
        plain = sixteen_us(heads, batch, context)
        for kv in (KVPrecision.KV4, KVPrecision.KV8, KVPrecision.KV2):
            cache, (q, where), nbytes = packed(kv, heads, batch, context)
            own = {"max_end": context, "scale": DIM**-0.5}

            def given(i: int) -> tuple[Any, ...]:
                return cache.fmt, cache.layers[i], cache.table_SN, q, where  # noqa: B023

            samples, gathered = (
                time_launches(lambda i: way(*given(i), **own), len(cache.layers), repeats=10)  # noqa: B023
                for way in (latent_codes.attend_latent_codes, attend_any_size)
            )
            told = {"16 bits": plain, "any size": statistics.median(gathered)}
            what = {"heads": heads, "batch": batch, "context": context, "kv": kv.value}
            write_row(args.file, bench="packed latents", case=what, unit="us", samples=samples,
                      device=name, floor=nbytes / rate / 1e3, baselines=told)  # fmt: skip
            print(f"latents {heads} heads {batch} x {context} {kv.value}: "
                  f"{statistics.median(samples):.1f} us, floor {nbytes / rate / 1e3:.1f}, "
                  + ", ".join(f"{w} {us:.1f}" for w, us in told.items()), flush=True)  # fmt: skip


def checked(kv: KVPrecision) -> tuple[Any, ...]:
    """Return what attention over a small cache of true latents is given, and should give."""
    fmt, lengths = KVFormat(precision=kv, head_dim=DIM), torch.tensor([900, 129, 20, 512, 1331])
    cache = QuantizedKVCache(
        fmt, num_layers=1, kv_heads=1, slots=5, max_len=1400, dtype=torch.bfloat16, device="cuda"
    )
    slots, counts = torch.arange(5, device="cuda"), lengths.cuda()
    told = {"q_len": 1331, "fresh": True, "max_end": 1331}
    k = torch.randn(5, 1331, 1, DIM, device="cuda", dtype=torch.bfloat16)
    cache.append(cache.plan(slots, counts * 0, counts, **told), 0, k, k)
    plan = cache.plan(slots, counts, counts * 0 + 1, q_len=1, fresh=False, max_end=1332)
    cache.append(plan, 0, k[:, :1], k[:, :1])
    q = 2 * torch.randn(5, 1, 16, DIM, device="cuda", dtype=torch.bfloat16)
    given = (fmt, cache.layers[0], cache.table_SN, q, plan.device_rows)
    own = {"max_end": 1332, "scale": DIM**-0.5}
    return given, own, attend_any_size(*given, **own).double()


def one(args: argparse.Namespace) -> None:
    """Print the errors and the times of some launches."""
    for words in args.launch.split():
        look, splits, bits = map(int, words.split(","))
        kv = KVPrecision.parse(str(bits))
        told = {"look": look, "splits": splits or None}
        given, own, want = checked(kv)
        got = latent_codes.attend_latent_codes(*given, **own, **told).double()
        error = float((got - want).norm() / want.norm())
        cache, (q, where), _ = packed(kv, *CASES[0])

        def attend(i: int) -> torch.Tensor:
            layer = cache.layers[i]  # noqa: B023
            given = (cache.fmt, layer, cache.table_SN, q, where)  # noqa: B023
            own = {"max_end": CASES[0][2], "scale": DIM**-0.5, **told}  # noqa: B023
            return latent_codes.attend_latent_codes(*given, **own)

        took = time_launches(attend, len(cache.layers), repeats=5)
        print(f"one {words}: error {error:.2g}, {statistics.median(took):.1f} us", flush=True)


def main() -> None:
    """Run the parts that are asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("parts")
    parser.add_argument("--file", default="latents_gpu.jsonl")
    parser.add_argument("--launch", default="3,0,4")
    args = parser.parse_args()
    torch.manual_seed(0)
    for part in args.parts.split(","):
        {"rows": rows, "one": one}[part](args)


if __name__ == "__main__":
    main()
