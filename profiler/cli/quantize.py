"""`llmpq-quantize MODEL OUT --scheme w4a4 --text FILE`: a quantised copy of a model directory.

Schemes: w4a4 (Atom: 4-bit weights and activations, outlier channels in 8 bits), w8a8, and weights
alone: w8a16, w4a16, w3a16. One for all layers, one per layer with commas, or a plan's own.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from llmpq.errors import ExitCode, LlmpqError
from llmpq.memory import Quantization
from llmpq.model_spec import ModelSpec
from llmpq.output_paths import refusal
from llmpq.plan import Plan
from llmpq.precision import K_PADDING, KVPrecision, Precision
from llmpq.units import format_size

log = logging.getLogger("llmpq.quantize")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    args = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        return _quantize(args)
    except (ValueError, LlmpqError) as error:
        code = error.exit_code if isinstance(error, LlmpqError) else ExitCode.USAGE
        sys.stderr.write(f"llmpq-quantize: {error}\n")
        return int(code)
    except OSError as error:
        sys.stderr.write(f"llmpq-quantize: {refusal(error)}\n")
        return int(ExitCode.USAGE)
    except (RuntimeError, MemoryError) as error:
        from llmpq.out_of_memory import out_of_memory

        if not out_of_memory(error):
            raise
        sys.stderr.write(
            f"llmpq-quantize: out of memory on {args.device}: calibrate with fewer --windows or a "
            "shorter --window, or on another --device; into a new directory if layers are there\n"
        )
        return int(ExitCode.DOES_NOT_FIT)
    except KeyboardInterrupt:
        sys.stderr.write("llmpq-quantize: stopped; run the same command again to continue\n")
        return int(ExitCode.INTERRUPTED)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="llmpq-quantize",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", type=Path, help="Hugging Face model directory")
    parser.add_argument("output", type=Path, help="directory to write; a stopped run continues")
    parser.add_argument("--scheme", help="w4a4, w8a8, w8a16, w4a16, w3a16; or one per layer")
    parser.add_argument(
        "--strat_file_name",
        type=Path,
        help="take the precisions of this plan, and its group size, symmetry and outliers",
    )
    parser.add_argument("--text", type=Path, required=True, nargs="+", help="calibration text")
    parser.add_argument("--method", choices=("gptq", "rtn"), default="gptq")
    parser.add_argument(
        "--variant",
        choices=("improved", "paper"),
        help="w4a4: Atom's recipe to the letter, or with searched clips, signed scales, a "
        "rotation before `down` and balanced norms (default)",
    )
    parser.add_argument(
        "--in-turn",
        action="store_true",
        help="w4a4: fit each linear to the rounded inputs it will get (less perplexity on some "
        "models, fewer drafts accepted on some)",
    )
    parser.add_argument(
        "--integer-scales",
        action="store_true",
        help="w4a4: groups' scales are whole numbers to 15 times a row's unit, and in products of "
        "many tokens a token's: faster prompts on Hopper, which plans do not count; measure the "
        "perplexity",
    )
    parser.add_argument("--group-size", help="128 or channel; w4a4 also 64, 32 (128)")
    parser.add_argument("--outliers", type=int, help="w4a4: channels in 8 bits (hidden/32, <=128)")
    parser.add_argument(
        "--asymmetric",
        action="store_true",
        help="zero points in w3/w4/w8a16 layers: less error, but Transformers cannot load them "
        "(compressed-tensors 0.20 expects them unpacked)",
    )
    parser.add_argument(
        "--kv-cache-dtype",
        help="bits of the KV cache that config.json names: 16, 8, 4, 2 (default the plan's, or 16)",
    )
    parser.add_argument("--windows", type=int, default=128, help="calibration windows (128)")
    parser.add_argument("--window", type=int, default=2048, help="tokens of a window (2048)")
    parser.add_argument("--seed", type=int, default=0, help="where the windows are taken (0)")
    parser.add_argument("--device", default="cpu", help="torch device (cpu)")
    return parser


def _quantize(args: argparse.Namespace) -> int:
    import torch

    from llmpq.profiler.quantize.layer_progress import QuantizeProgress
    from llmpq.profiler.quantize.layer_walk import random_windows
    from llmpq.profiler.quantize.recipes import Settings
    from llmpq.profiler.quantize.whole_model import Job, quantize_model, spread
    from llmpq.runtime.tools.evaluate import usable_device
    from llmpq.runtime.weights.sources import CheckpointSource

    device = usable_device(args.device)
    if args.output.exists() and not args.output.is_dir():
        raise ValueError(f"'{args.output}' is a file, expected a directory to write")
    spec = ModelSpec.from_directory(args.model)
    plan = _plan(args, spec)
    named = plan.precisions if plan else [Precision.parse(p) for p in args.scheme.split(",")]
    _refuse_unheeded(args, named)
    planned = plan.quantization.settings() if plan else Quantization(symmetric=True)
    asked = planned.outliers if plan and args.outliers is None else args.outliers
    group_size = _group_size(args.group_size) if args.group_size else planned.group_size
    _require_packed(group_size, named)
    _require_whole_groups(args.integer_scales, group_size)
    job = Job(
        spec=spec,
        precisions=spread(named, spec.num_layers),
        settings=Settings(
            method=args.method,
            variant=args.variant or "improved",
            in_turn=args.in_turn,
            integer_scales=args.integer_scales,
            group_size=group_size,
            symmetric=planned.symmetric and not args.asymmetric,
            outliers=asked,
        ),
        kv=_kv(args, plan),
        windows_WT=random_windows(
            _tokens(args),
            count=args.windows,
            length=min(args.window, spec.max_positions),
            seed=args.seed,
        ),
    )
    started = time.perf_counter()
    with torch.inference_mode(), QuantizeProgress(spec.num_layers) as progress:
        quantize_model(
            job,
            CheckpointSource(args.model, spec),
            args.output,
            device=device,
            dtype=torch.float32 if device.type == "cpu" else torch.bfloat16,
            on_layer=progress.update,
        )
    if not job.settings.symmetric and any(_weight_only(p) for p in job.precisions):
        log.info("its zero points are read by llmpq-dist, not by Transformers: plan --symmetric")
    size = sum(path.stat().st_size for path in args.output.glob("*.safetensors"))
    log.info("wrote %s: %s, %.0f s", args.output, format_size(size), time.perf_counter() - started)
    return int(ExitCode.DONE)


def _plan(args: argparse.Namespace, spec: ModelSpec) -> Plan | None:
    if (args.scheme is None) == (args.strat_file_name is None):
        raise ValueError("give either --scheme (say, w4a4) or --strat_file_name plan.json")
    if args.strat_file_name is None:
        return None
    plan = Plan.load(args.strat_file_name)
    plan.require_model(spec)
    return plan


def _refuse_unheeded(args: argparse.Namespace, precisions: Sequence[Precision]) -> None:
    """Refuse options that no layer of these precisions takes."""
    w4a4 = Precision.W4A4 in precisions
    weight_only = any(_weight_only(p) for p in precisions)
    for option, given, heeded, what in (
        ("--variant", args.variant, w4a4, "w4a4 layers"),
        ("--outliers", args.outliers is not None, w4a4, "w4a4 layers"),
        ("--in-turn", args.in_turn, w4a4 and args.method == "gptq", "w4a4 layers and gptq"),
        ("--integer-scales", args.integer_scales, w4a4, "w4a4 layers"),
        ("--asymmetric", args.asymmetric, weight_only, "w3a16, w4a16 and w8a16 layers"),
        ("--group-size", args.group_size, w4a4 or weight_only, "w4a4 and weight-only layers"),
    ):
        if given and not heeded:
            raise ValueError(f"{option} is for {what}, there are none here; leave it out")


def _require_whole_groups(integer_scales: bool, group_size: int | None) -> None:
    """Refuse integer scales of groups that no kernel makes faster."""
    if integer_scales and group_size != K_PADDING:
        raise ValueError(
            f"--integer-scales: got groups of {group_size or 'a channel'}, expected {K_PADDING}: "
            "no kernel gains by others; set --group-size"
        )


def _require_packed(group_size: int | None, precisions: Sequence[Precision]) -> None:
    """Refuse groups that weight-only layers cannot have, before anything is rounded."""
    if group_size in (None, K_PADDING):
        return
    for precision in precisions:
        if _weight_only(precision):
            raise ValueError(
                f"--group-size: got {group_size}, {precision.value} layers have {K_PADDING} or "
                "channel: the packed kernels know no other"
            )


def _weight_only(precision: Precision) -> bool:
    return precision.weight_bits < precision.activation_bits


def _kv(args: argparse.Namespace, plan: Plan | None) -> KVPrecision:
    if args.kv_cache_dtype:
        return KVPrecision.parse(args.kv_cache_dtype)
    return plan.workload.kv if plan else KVPrecision.KV16


def _group_size(text: str) -> int | None:
    if text == "channel":
        return None
    if text not in ("32", "64", "128"):
        raise ValueError(f"--group-size '{text}': expected 128, 64, 32 or channel")
    return int(text)


def _tokens(args: argparse.Namespace) -> list[int]:
    from llmpq.runtime.text.tokenizer import Tokenizer

    texts = []
    for path in args.text:
        try:
            texts.append(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--text '{path}' cannot be read as UTF-8 text: {error}") from None
    return Tokenizer(args.model).encode("\n\n".join(texts), special=False)


if __name__ == "__main__":
    sys.exit(main())
