"""FP8 weights on a GPU: codes beside 8-bit integers, 16 bits, and products of FP8 with FP8.

python benchmarks/fp8_gpu.py dense,experts,native,sweep [--file fp8_gpu.jsonl] [--seconds 300]

dense     a linear of blocks of 128 x 128, 1 to 2048 rows of x
experts   a layer's experts of qwen3-30b-a3b: up and gate, down
native    torch._scaled_mm with x rounded to E4M3 per token, beside the same in 16 bits
sweep     tiles of the dense product, for who looks for better ones; no rows
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from typing import Any

import torch
from lib.rows import write_row
from torch import Tensor

from llmpq.kernels.formats.fp8_weight import Fp8Weight
from llmpq.kernels.formats.round_to_nearest import quantize_weight
from llmpq.kernels.gemm.experts.expert_sent import assign
from llmpq.kernels.gemm.experts.expert_stack import ExpertStack
from llmpq.kernels.gemm.experts.gated import GateRule
from llmpq.kernels.gemm.float_codes import fp8_products
from llmpq.kernels.gemm.float_codes.fp8_products import Tile
from llmpq.kernels.gpu_timing import copies_for, time_launches
from llmpq.kernels.linear import linear
from llmpq.model_spec import ModelSpec
from llmpq.precision import WeightScheme

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
"""Of llama-3.1-8b; N, K."""
ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 2048)
NATIVE_ROWS = (512, 2048, 4096)


def blocks(n: int, k: int, kind: str = "blocks", *, whole: bool = True) -> Fp8Weight:
    """Return random codes with a scale of each block, channel, or one."""
    w = torch.randn(n, k, device="cuda")
    codes = w.clamp(-4, 4).mul(100).to(torch.float8_e4m3fn).view(torch.uint8)
    rows, columns = {"blocks": (128, 128), "channel": (1, k), "tensor": (n, k)}[kind]
    scale = torch.rand(-(-n // rows), -(-k // columns), device="cuda") * 1e-4 + 1e-4
    made = Fp8Weight(codes_NK=codes, scale=scale, rows=rows, columns=columns, dtype=torch.bfloat16)
    return made.in_fragments() if whole else made


def row(
    args: argparse.Namespace, bench: str, case: dict, samples: list[float], **more: Any
) -> None:
    """Keep a row."""
    name = torch.cuda.get_device_name()
    write_row(args.file, bench=bench, case=case, unit="us", samples=samples, device=name, **more)


def dense(args: argparse.Namespace) -> None:
    """Rows of linears."""
    for name in args.products.split(","):
        n, k = SHAPES[name]
        sets = copies_for(n * k)
        codes = [blocks(n, k) for _ in range(sets)]
        scheme = WeightScheme(bits=8, group_size=128, symmetric=False, clip_search=False)
        eight = [
            quantize_weight(q.dequantize(torch.bfloat16), scheme, dtype=torch.bfloat16)
            for q in codes
        ]
        sixteen = [q.dequantize(torch.bfloat16) for q in codes]
        for m in ROWS:
            x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
            ways = {
                "w8a16": time_launches(lambda i: linear(x, eight[i]), sets),  # noqa: B023
                "torch, 16 bits": time_launches(lambda i: x @ sixteen[i].t(), sets),  # noqa: B023
            }
            samples = time_launches(lambda i: linear(x, codes[i]), sets)  # noqa: B023
            told = {way: statistics.median(found) for way, found in ways.items()}
            case = {"product": name, "n": n, "k": k, "rows": m, "scales": "128 x 128"}
            row(args, "fp8 product", case, samples, baselines=told)
            print(f"{name} rows {m}: fp8 {statistics.median(samples):.1f} us, "
                  + ", ".join(f"{w} {us:.1f}" for w, us in told.items()), flush=True)  # fmt: skip


def experts(args: argparse.Namespace) -> None:
    """Rows of a mixture's products."""
    spec = ModelSpec.by_name("qwen3-30b-a3b")
    shapes = {"up": (2 * spec.ffn, spec.hidden), "down": (spec.hidden, spec.ffn)}
    for product, (n, k) in shapes.items():
        made = blocks(n, k)
        scheme = WeightScheme(bits=8, group_size=128, symmetric=False, clip_search=False)
        wide = made.dequantize(torch.bfloat16)
        kinds = {
            "fp8": made,
            "w8a16": quantize_weight(wide, scheme, dtype=torch.bfloat16),
            "16 bits": wide,
        }
        stacks = {}
        for kind, weight in kinds.items():
            stacks[kind] = ExpertStack(spec.experts)
            for e in range(spec.experts):
                stacks[kind].put(e, weight, None)
        for tokens in (1, 8, 32, 128, 512, 2048):
            wish = torch.rand(tokens, spec.experts, device="cuda")
            expert_TK = wish.topk(spec.experts_per_token, dim=1).indices
            sent = assign(expert_TK, spec.experts)
            rows = tokens if product == "up" else expert_TK.numel()
            x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
            took = {}
            for kind, stack in stacks.items():
                gate = GateRule() if product == "up" and stack.gates(x, sent) else None
                took[kind] = time_launches(
                    lambda _: stack.product(x, sent, back=product == "down", gate=gate),  # noqa: B023
                    1,
                )
            told = {kind: statistics.median(found) for kind, found in took.items() if kind != "fp8"}
            case = {"model": spec.name, "product": product, "tokens": tokens}
            row(args, "fp8 experts", case, took["fp8"], baselines=told)
            us = statistics.median(took["fp8"])
            print(f"experts {product} tokens {tokens}: fp8 {us:.1f} us, "
                  + ", ".join(f"{w} {us:.1f}" for w, us in told.items()), flush=True)  # fmt: skip


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x in E4M3 and a scale of each row."""
    scale = x.abs().amax(1, keepdim=True).float().clamp(min=1e-12) / 448
    return (x / scale).to(torch.float8_e4m3fn), scale


def native(args: argparse.Namespace) -> None:
    """Rows of FP8 times FP8, rounding included, beside ways without; their errors."""
    round_x = torch.compile(rounded, dynamic=False)
    for (name, (n, k)), m in itertools.product(SHAPES.items(), NATIVE_ROWS):
        q = blocks(n, k, "channel")
        codes, scale_1N = q.rows_of_codes().view(torch.float8_e4m3fn).t(), q.scale.t().contiguous()
        wide = q.dequantize(torch.bfloat16)
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)

        def product(_: int) -> Tensor:
            x8, scale_M1 = round_x(x)  # noqa: B023
            return torch._scaled_mm(  # noqa: SLF001
                x8,
                codes,  # noqa: B023
                scale_a=scale_M1,
                scale_b=scale_1N,  # noqa: B023
                out_dtype=torch.bfloat16,  # noqa: B023
            )

        exact = x.double() @ q.dequantize(torch.float64).t()
        error, plain = (
            float((y.double() - exact).norm() / exact.norm()) for y in (product(0), x @ wide.t())
        )
        del exact
        samples = time_launches(product, 1)
        told = {
            "torch, 16 bits": statistics.median(time_launches(lambda _: x @ wide.t(), 1)),  # noqa: B023
            "codes kept": statistics.median(time_launches(lambda _: linear(x, q), 1)),  # noqa: B023
        }
        case = {"product": name, "rows": m, "error": error, "error in 16 bits": plain}
        row(args, "fp8 times fp8", case, samples, baselines=told)
        print(f"native {name} rows {m}: {statistics.median(samples):.1f} us, error {error:.2g} "
              f"(16 bits {plain:.2g}), "
              + ", ".join(f"{w} {us:.1f}" for w, us in told.items()), flush=True)  # fmt: skip


TILES = {
    1: [(bn, 16, bk, st, w, p) for bn in (32, 64, 128) for bk in (128, 256) for st in (3, 4, 5)
        for w in (4, 8) for p in (1, 2, 4)],
    32: [(bn, 32, bk, st, w, p) for bn in (64, 128) for bk in (64, 128) for st in (3, 4)
         for w in (4, 8) for p in (1, 2, 3)],
    64: [(bn, 64, bk, st, w, p) for bn in (64, 128) for bk in (64, 128) for st in (3, 4)
         for w in (4, 8) for p in (1, 2)],
    256: [(bn, bm, bk, st, w, 1) for bn in (64, 128) for bm in (64, 128, 256) for bk in (64, 128)
          for st in (3, 4) for w in (4, 8)],
}  # fmt: skip
TILES[8], TILES[2048] = TILES[1], TILES[256]


def sweep(args: argparse.Namespace) -> None:
    """Print the best tiles of each number of rows."""
    end = time.monotonic() + args.seconds
    for m in (1, 32, 256, 64, 2048):
        for name in ("o", "gate_up", "down"):
            n, k = SHAPES[name]
            sets = copies_for(n * k)
            codes = [blocks(n, k, whole=False) for _ in range(sets)]
            x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
            found = []
            for numbers in TILES[m]:
                bn, bm, bk, stages, warps, per_sm = numbers
                if bk > 128 or time.monotonic() > end:
                    continue
                tile = Tile(bn=bn, bm=bm, bk=bk, stages=stages, warps=warps, per_sm=per_sm)
                try:
                    took = time_launches(
                        lambda i: fp8_products.multiply(x, codes[i], None, None, tile),  # noqa: B023
                        sets,
                        repeats=5,
                    )
                except Exception as error:  # noqa: BLE001 (does not fit)
                    print(numbers, str(error)[:60], flush=True)
                    continue
                found.append((statistics.median(took), numbers))
            best = ", ".join(f"{us:.1f} {numbers}" for us, numbers in sorted(found)[:5])
            print(f"sweep {name} rows {m}: {best}", flush=True)


def fragments(args: argparse.Namespace) -> None:
    """Print times of tiles of codes that lie as tensor cores take them."""
    end = time.monotonic() + args.seconds
    for m in (1, 16, 64, 256):
        for name in ("o", "gate_up", "down"):
            n, k = SHAPES[name]
            sets = copies_for(n * k)
            codes = [blocks(n, k) for _ in range(sets)]
            x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
            ways: list[tuple[object, ...]] = []
            if m <= 8:
                ways = [(depth,) for depth in (2, 4, 7)]
            else:
                bms = {16: (16,), 64: (32, 64), 256: (64, 128)}[m]
                ways = [
                    (high, warps, bm, stages, p)
                    for bm in bms for high in (1, 2) for warps in (4, 8)
                    for stages in (2, 3, 4) for p in (1, 2, 3)
                ]  # fmt: skip
            found = []
            for way in ways:
                if time.monotonic() > end:
                    break
                tile = None
                if m <= 8:
                    (fp8_products.DEPTH,) = way
                else:
                    high, warps, bm, stages, p = way
                    tile = fp8_products.Fragments(
                        high=high, warps=warps, bm=bm, stages=stages, per_sm=p
                    )
                try:
                    took = time_launches(
                        lambda i: fp8_products.multiply_fragments(x, codes[i], None, None, tile),  # noqa: B023
                        sets,
                        repeats=5,
                    )
                except Exception as error:  # noqa: BLE001 (does not fit)
                    print(way, str(error)[:60], flush=True)
                    continue
                found.append((statistics.median(took), way))
            best = ", ".join(f"{us:.1f} {way}" for us, way in sorted(found)[:4])
            print(f"fragments {name} rows {m}: {best}", flush=True)
        fp8_products.DEPTH = 4


def main() -> None:
    """Run the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("parts")
    parser.add_argument("--file", default="fp8_gpu.jsonl")
    parser.add_argument("--products", default=",".join(SHAPES), help="of `dense`")
    parser.add_argument("--seconds", type=float, default=200)
    args = parser.parse_args()
    torch.manual_seed(0)
    for part in args.parts.split(","):
        {
            "dense": dense,
            "experts": experts,
            "native": native,
            "sweep": sweep,
            "fragments": fragments,
        }[part](args)


if __name__ == "__main__":
    main()
