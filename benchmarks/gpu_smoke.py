"""What must hold on a GPU before a number counts: kernels, tokens, perplexity; and where time goes.

    python benchmarks/gpu_smoke.py kernels      fused kernels and attention against their twins
    python benchmarks/gpu_smoke.py tokens       demo model, fp32: CPU = eager = CUDA graphs = drafts
    python benchmarks/gpu_smoke.py perplexity [--model DIR]   bf16, against transformers on this GPU
    python benchmarks/gpu_smoke.py profile --bits w4a16    kernels of a decode step, by time

Exit code 0 if everything holds. Needs no Ray.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch

from llmpq.kernels.fused import argmax as fused_argmax
from llmpq.kernels.fused import gated_mlp, rms_norm
from llmpq.kernels.fused import rope_append as fused_rope
from llmpq.kernels.gemm.reference import relative_error
from llmpq.kernels.gpu_timing import write_row
from llmpq.kernels.kv import plain_attend
from llmpq.model_spec import ModelSpec
from llmpq.precision import KVPrecision, Precision
from llmpq.runtime.drafts.drafters import FixedDrafter
from llmpq.runtime.engine.scheduler import Scheduler
from llmpq.runtime.engine.slot_limits import Limits
from llmpq.runtime.launch.plans.hand_plan import hand_plan
from llmpq.runtime.launch.stages.stage_settings import limits_of
from llmpq.runtime.request import Request
from llmpq.runtime.text.tokenizer import Tokenizer
from llmpq.runtime.tools.evaluate import longest_window, perplexity
from llmpq.runtime.weights.quantized_checkpoint import open_checkpoint
from llmpq.runtime.weights.sources import RandomSource
from llmpq.speculation import SpeculationMode
from llmpq.workload import Workload
from reference.open_stages import OpenStages
from reference.pipeline import ReferencePipeline

EXAMPLES = Path(__file__).parents[1] / "examples"
DEMO = EXAMPLES / "demo-7m"
# One rounding each; attention also rounds probabilities.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def check_kernels() -> bool:
    """Compare every fused kernel with its twin on this GPU."""
    results = []
    for dtype, tolerance in TOLERANCE.items():
        results.append(("rope and append", dtype, _rope_error(dtype), tolerance))
        x = torch.randn(37, 4096, device="cuda", dtype=dtype)
        w = torch.randn(4096, device="cuda", dtype=dtype)
        got, want = rms_norm.rms_norm(x, w, 1e-5), rms_norm.rms_norm_reference(x, w, 1e-5)
        results.append(("norm", dtype, relative_error(got, want), tolerance))
        error = relative_error(gated_mlp.gate_mul(x), gated_mlp.gate_mul_reference(x))
        results.append(("silu and multiply", dtype, error, tolerance))
        logits = torch.randn(37, 128_256, device="cuda", dtype=dtype).clamp_(max=3.5)
        same = torch.equal(
            fused_argmax.argmax(logits), fused_argmax.argmax_reference(logits.cpu()).cuda()
        )
        results.append(("largest logit", dtype, 0.0 if same else 1.0, tolerance))
        for q_len, splits in ((1, 1), (1, 7), (5, None)):
            error = _attend_error(dtype, q_len, splits)
            results.append((f"attention q {q_len} splits {splits}", dtype, error, tolerance))
    for name, dtype, error, tolerance in results:
        print(f"{'ok ' if error < tolerance else 'BAD'} {name:28} {dtype} {error:.2e}")
    return all(error < tolerance for _, _, error, tolerance in results)


def _rope_error(dtype: torch.dtype) -> float:
    heads, groups, dim = 32, 8, 128
    qkv = torch.randn(5, 3, heads + 2 * groups, dim, device="cuda", dtype=dtype)
    q, k, v = qkv.split([heads, groups, groups], dim=2)
    caches = [torch.zeros(6, groups, 700, dim, device="cuda", dtype=dtype) for _ in range(4)]
    rows = [torch.tensor(x, device="cuda") for x in ([5, 0, 2, 1, 3], [0, 9, 600, 1, 64], [3] * 5)]
    inv_freq = 1.0 / 500000 ** torch.linspace(0, 1, dim // 2, device="cuda")
    got = fused_rope.rope_append(q, k, v, *caches[:2], *rows, inv_freq)
    want = fused_rope.rope_append_reference(q, k, v, *caches[2:], *rows, inv_freq)
    pairs = ((got, want), (caches[0], caches[2]), (caches[1], caches[3]))
    return max(relative_error(a, b) for a, b in pairs)


def _attend_error(dtype: torch.dtype, q_len: int, splits: int | None) -> float:
    heads, groups, dim = 32, 8, 128
    q = torch.randn(5, q_len, heads, dim, device="cuda", dtype=dtype)
    k, v = (torch.randn(6, groups, 700, dim, device="cuda", dtype=dtype) for _ in range(2))
    rows = [
        torch.tensor(x, device="cuda") for x in ([5, 0, 2, 1, 3], [0, 9, 600, 1, 64], [q_len] * 5)
    ]
    got = plain_attend.plain_attend(q, k, v, *rows, max_end=700, scale=dim**-0.5, splits=splits)
    return relative_error(got, plain_attend.plain_attend_reference(q, k, v, *rows, scale=dim**-0.5))


def check_tokens() -> bool:
    """Generate with the demo model in fp32 on the CPU, eagerly and from graphs on the GPU.

    Then with drafts. With low-bit caches (whose kernels multiply in fp16 whatever the dtype) and in
    bf16 with the drafts that need 16 bits (a verify's products have other shapes than a step's) the
    two sides round differently, so that near ties part them: how many rows agree is printed, not
    judged.
    """
    spec = ModelSpec.from_directory(DEMO)
    prompts = _prompts()
    torch.set_num_threads(8)
    want = ReferencePipeline.from_directory(DEMO).generate(prompts, max_new=48)
    good = True
    for mode in (None, "kv4", "ngram"):
        for graphs in (True, False):
            got, accepted = _serve(spec, prompts, 48, graphs=graphs, mode=mode)
            name = f"fp32 {'graphs' if graphs else 'eager'} {_described(mode, accepted)}"
            good &= _told(name, got, want)
    gpus = torch.cuda.device_count()
    for stages in (2, 4) if gpus > 1 else ():
        devices = tuple(f"cuda:{index * gpus // stages}" for index in range(stages))
        where = f"{stages} stages on {len(set(devices))} GPUs"
        for mode in (None, "kv4", "ngram"):
            got, accepted = _serve(spec, prompts, 48, graphs=True, mode=mode, device=devices)
            good &= _told(f"fp32 {where} {_described(mode, accepted)}", got, want)
    for kv in (KVPrecision.KV8, KVPrecision.KV4):
        on_cpu, _ = _serve(spec, prompts, 48, graphs=False, kv=kv, device="cpu")
        got, _ = _serve(spec, prompts, 48, graphs=True, kv=kv)
        _told(f"fp32 graphs {kv.value}", got, on_cpu, judged=False)
    for mode, bits in BF16_DRAFTS:
        target, dtype = Precision.parse(bits), "bfloat16"
        plain, _ = _serve(spec, prompts, 48, graphs=True, dtype=dtype, precision=target)
        got, accepted = _serve(
            spec, prompts, 48, graphs=True, dtype=dtype, precision=target, mode=mode
        )
        name = f"bf16 graphs {bits} {_described(mode, accepted)}"
        _told(name, got, plain, judged=False)
        good &= accepted is not None and accepted > 0.6
    return good


BF16_DRAFTS: tuple[tuple[SpeculationMode, str], ...] = (
    ("w4kv4", "w16a16"),
    ("w4kv4", "w8a16"),
    ("qspec", "w4a16"),
    ("kv4", "w4a16"),
)


def _prompts() -> list[list[int]]:
    text = Tokenizer(DEMO).encode((EXAMPLES / "heldout.txt").read_text(), special=False)
    lengths = (5, 64, 17, 33, 128, 7, 90, 50, 12, 100)
    return [text[i * 500 : i * 500 + length] for i, length in enumerate(lengths)]


def _described(mode: str | None, accepted: float | None) -> str:
    if mode is None:
        return "plain"
    return f"{mode} drafts ({accepted or 0:.2f} accepted)"


def _told(
    name: str, got: Sequence[Sequence[int]], want: Sequence[Sequence[int]], *, judged: bool = True
) -> bool:
    """Print how many rows agree; whether all do."""
    same = sum(a == b for a, b in zip(got, want, strict=True))
    verdict = ("ok " if same == len(want) else "BAD") if judged else "-- "
    print(f"{verdict} {name}: {same} of {len(want)} rows equal")
    return same == len(want)


def _serve(
    spec: ModelSpec,
    prompts: Sequence[Sequence[int]],
    max_new: int,
    *,
    graphs: bool,
    mode: SpeculationMode | None = None,
    kv: KVPrecision = KVPrecision.KV16,
    dtype: str = "float32",
    precision: Precision = Precision.W16A16,
    device: str | tuple[str, ...] = "cuda:0",
) -> tuple[list[list[int]], float | None]:
    """Return the tokens, and the share of judged drafts that were accepted."""
    workload = Workload(batch=6, prompt_len=128, gen_len=max_new, dtype=dtype, kv=kv)
    stages = 1 if isinstance(device, str) else len(device)
    plan = hand_plan(
        spec,
        workload,
        precision=precision,
        splits=[spec.num_layers * i // stages for i in range(1, stages)],
        prefill_microbatch=3,
        decode_microbatch=6 // stages,
    )
    source = open_checkpoint(DEMO, spec)
    engine = OpenStages(plan, spec, source, device=device, graphs=graphs, speculate=mode)
    requests = [Request(id=i, prompt=tuple(p), max_new=max_new) for i, p in enumerate(prompts)]
    drafter = None if mode is None else FixedDrafter(mode, 3)
    tokens = engine.run(Scheduler(limits_of(plan), drafter=drafter), requests).tokens
    rows = [tokens[index] for index in range(len(prompts))]
    return rows, None if drafter is None else drafter.acceptance.per_token


def _limits(workload: Workload, prefill: int, decode: int) -> Limits:
    return Limits(
        num_slots=workload.batch,
        prompt_len=workload.prompt_len,
        max_len=workload.max_len,
        prefill_microbatch=prefill,
        decode_microbatch=decode,
    )


def check_perplexity(model_dir: Path, rows: Path | None, commit: str | None) -> bool:
    """Compare a trained model's bf16 perplexity with transformers' on this GPU."""
    import transformers

    spec = ModelSpec.from_directory(model_dir)
    text = Tokenizer(model_dir).encode((EXAMPLES / "heldout.txt").read_text(), special=False)
    text = text[:40_000]
    pipeline = ReferencePipeline.from_directory(model_dir, dtype=torch.bfloat16, device="cuda:0")
    ours = perplexity(pipeline.scores, text, window=longest_window(spec))
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16)
    model = model.cuda()
    total = count = 0.0
    for start in range(0, len(text) - 1, ours.window):
        tokens = torch.tensor([text[start : start + ours.window]], device="cuda")
        if tokens.shape[1] > 1:
            with torch.inference_mode():
                logits = model(tokens).logits[0, :-1].float()
            loss = torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="sum")
            total, count = total + float(loss), count + tokens.shape[1] - 1
    theirs = float(torch.tensor(total / count, dtype=torch.float64).exp())
    ratio = ours.value / theirs - 1
    good = abs(ratio) < 0.003 and count == ours.num_tokens
    print(
        f"{'ok ' if good else 'BAD'} {spec.name} bf16 {ours.value:.4f}, transformers {theirs:.4f} "
        f"({ratio:+.3%})"
    )
    if rows is not None:
        case = {"model": spec.name, "precision": "w16a16", "dtype": "bfloat16"}
        write_row(
            rows,
            bench="gpu_perplexity",
            case=case,
            unit="perplexity",
            samples=[ours.value],
            baselines={"transformers": theirs},
            commit=commit,
            program="python benchmarks/gpu_smoke.py",
        )
    return good


def profile(bits: str, kv: str, layers: int) -> bool:
    """Print the kernels of decode steps of a few layers of Llama-3.1-8B, by time per step."""
    spec = dataclasses.replace(ModelSpec.by_name("llama-3.1-8b"), num_layers=layers)
    workload = Workload(batch=32, prompt_len=512, gen_len=100, dtype="bfloat16", kv=KVPrecision(kv))
    precision = Precision.parse(bits)
    plan = hand_plan(
        spec, workload, precision=precision, prefill_microbatch=32, decode_microbatch=32
    )
    engine = OpenStages(plan, spec, RandomSource(spec, device="cuda:0"), device="cuda:0")

    def job(new: int) -> None:
        requests = [Request(id=i, prompt=(i + 5,) * 512, max_new=new) for i in range(32)]
        engine.run(Scheduler(_limits(workload, 32, 32)), requests)

    job(3)
    for title, new in (("prefill", 1), ("prefill and 50 decode steps", 51)):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
            job(new)
            torch.cuda.synchronize()
        times: dict[str, list[float]] = defaultdict(list)
        for event in found.events():
            times[event.name].append(event.device_time)
        print(f"-- {bits} {kv}, {layers} layers: {title}: total, calls, mean us")
        ordered = sorted(times.items(), key=lambda item: -sum(item[1]))
        for name, each in ordered[:16]:
            print(f"{sum(each):10.0f} {len(each):6} {sum(each) / len(each):8.1f}  {name[:90]}")
    return True


def main() -> int:
    """Run one check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("kernels", "tokens", "perplexity", "profile"))
    parser.add_argument("--bits", default="w16a16")
    parser.add_argument("--kv", default="kv16")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--model", type=Path, default=DEMO, help="trained model of perplexity")
    parser.add_argument("--rows", type=Path, help="append result rows to this JSONL file")
    parser.add_argument("--commit")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    if args.what == "kernels":
        good = check_kernels()
    elif args.what == "tokens":
        good = check_tokens()
    elif args.what == "perplexity":
        good = check_perplexity(args.model, args.rows, args.commit)
    else:
        good = profile(args.bits, args.kv, args.layers)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
