"""Drafts of a model's own head (MTP) that agrees with the model in a known share of tokens.

    python benchmarks/mtp_drafts.py --write
    python benchmarks/mtp_drafts.py --gpu --layers 16 --hidden 4096 --ffn 14336 --write
    ... --gpu --stages 2 --backend processes

A checkpoint is written into a temporary folder: its token embeddings are orthonormal and what
attention and MLPs give is zero, so that the next token is a permutation of the last one, and the
head predicts the same permutation, but for a random share of tokens. All products are computed as
of any weights. One request is decoded over two stages, each a thread (`--gpu`: by one stage, whose
own times choose; of several each has all of the first GPU, whose turns they take), in turn plainly,
with drafts and with drafts of a length chosen by the clock; the value is the median of the ratios
of neighbouring runs, the tokens of all of them must be equal.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parent))
from lib.rows import write_row

from llmpq import LLM, SamplingParams
from llmpq.costs.cost_model import CostModel, LatencyEntry, Phase, Regime
from llmpq.models.model_spec import ModelSpec
from llmpq.plans.plan import Plan
from llmpq.plans.speculation import expected_tokens
from llmpq.precision import KVPrecision, Precision
from llmpq.runtime.launch.plans.manual_plan import manual_plan, on_gpu
from llmpq.runtime.models.stage_model import DTYPES
from llmpq.workload import Dtype, Workload

CONFIG: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "vocab_size": 1024,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "moe_intermediate_size": 512,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "attention_bias": False,
    "use_qk_norm": False,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
"""Layers are dense, the head's has a small mixture."""


def write_model(
    folder: Path,
    layers: int,
    agreement: float,
    *,
    hidden: int = 1024,
    ffn: int = 2048,
    dtype: str = "float32",
) -> None:
    """Write the checkpoint; `agreement`: in which share of tokens the head is right.

    There are as many tokens as channels of the hidden state.
    """
    torch.manual_seed(0)
    said = {**CONFIG, "num_hidden_layers": layers, "first_k_dense_replace": layers}
    said |= {"hidden_size": hidden, "vocab_size": hidden, "intermediate_size": ffn}
    said["torch_dtype"] = dtype
    vocab = hidden
    embedding_Vh = torch.linalg.qr(torch.randn(hidden, hidden))[0][:vocab] * 8
    order = torch.randperm(vocab)
    following = torch.empty(vocab, dtype=torch.long)
    following[order] = order.roll(-1)  # one cycle through all tokens
    output_Vh = torch.empty_like(embedding_Vh)
    output_Vh[following] = embedding_Vh
    wrong = torch.rand(vocab) >= agreement
    taken_for = torch.where(wrong, torch.arange(vocab).roll(7), torch.arange(vocab))
    tensors = {
        "model.embed_tokens.weight": embedding_Vh,
        "lm_head.weight": output_Vh,
        "model.norm.weight": torch.ones(hidden),
    }
    for layer in range(layers + 1):
        tensors |= _layer(f"model.layers.{layer}.", said, sparse=layer == layers)
    head = f"model.layers.{layers}."
    join = embedding_Vh[taken_for].t() @ embedding_Vh / 8
    tensors[f"{head}eh_proj.weight"] = torch.cat((join, torch.zeros_like(join)), dim=1)
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{head}{norm}.weight"] = torch.ones(hidden)
    stored = {k: v.to(DTYPES[dtype], copy=True).contiguous() for k, v in tensors.items()}
    save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(said))


@cache
def _random(rows: int, columns: int) -> torch.Tensor:
    """Return small random weights, the same for all matrices of a size."""
    return 0.02 * torch.randn(rows, columns)


def _layer(prefix: str, said: dict[str, Any], *, sparse: bool) -> dict[str, torch.Tensor]:
    """Return a layer's weights; what it gives is zero."""
    hidden, dim = said["hidden_size"], said["head_dim"]
    wide = {"q": said["num_attention_heads"] * dim, "k": said["num_key_value_heads"] * dim}
    wide["v"] = wide["k"]
    found = {f"self_attn.{n}_proj": _random(rows, hidden) for n, rows in wide.items()}
    found["self_attn.o_proj"] = torch.zeros(hidden, wide["q"])
    ffn = said["moe_intermediate_size" if sparse else "intermediate_size"]
    owners = ["mlp.shared_experts", *(f"mlp.experts.{e}" for e in range(4))] if sparse else ["mlp"]
    for owner in owners:
        for part in ("gate", "up"):
            found[f"{owner}.{part}_proj"] = _random(ffn, hidden)
        found[f"{owner}.down_proj"] = torch.zeros(hidden, ffn)
    if sparse:
        found["mlp.gate"] = 0.02 * torch.randn(4, hidden)
    for norm in ("input_layernorm", "post_attention_layernorm"):
        found[norm] = torch.ones(hidden)
    weights = {f"{prefix}{name}.weight": value for name, value in found.items()}
    return weights | (
        {f"{prefix}mlp.gate.e_score_correction_bias": torch.zeros(4)} if sparse else {}
    )


def measure(args: argparse.Namespace, agreement: float) -> dict[str, Any]:
    """Return tokens/s of each way, ratios and what came of the drafts."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        dtype: Dtype = "bfloat16" if args.gpu else "float32"
        sizes = {"hidden": args.hidden, "ffn": args.ffn}
        write_model(folder, args.layers, agreement, dtype=dtype, **sizes)
        spec = ModelSpec.from_directory(folder)
        plan = manual_plan(
            spec,
            splits=[args.layers * stage // args.stages for stage in range(1, args.stages)],
            precision=Precision.parse(args.bits),
            prefill_microbatch=1,
            decode_microbatch=1,
            model_dir=str(folder),
            workload=Workload(batch=1, prompt_len=32, gen_len=args.tokens, dtype=dtype),
        )
        plan = _on_first_gpu(plan) if args.gpu else plan
        costs = folder / "costs.json"
        _costs(plan).save_json(costs)
        times = {} if args.gpu and args.stages == 1 else {"costs": str(costs)}
        ways: dict[str, dict[str, Any]] = {
            "plain": {},
            "mtp": {"speculate": "mtp", "gamma": args.gamma},
            "auto": {"speculate": "mtp", "gamma": "auto", **times},
        }
        start = partial(LLM, plan=plan, backend=args.backend, links=args.links)
        with ThreadPoolExecutor(len(ways) if args.backend == "processes" else 1) as pool:
            started = {way: pool.submit(start, **more) for way, more in ways.items()}
        engines = {way: engine.result() for way, engine in started.items()}
        params = SamplingParams(max_tokens=args.tokens, temperature=0, ignore_eos=True)
        rates: dict[str, list[float]] = {way: [] for way in ways}
        try:
            tokens, seen = set(), {}
            for run in range(args.runs + 1):
                for way, engine in engines.items():
                    since = time.perf_counter()
                    (answer,) = engine.generate([list(range(5, 37))], params, use_tqdm=False)
                    took = time.perf_counter() - since
                    tokens.add(tuple(answer.outputs[0].token_ids))
                    if way == "mtp":
                        seen = engine.job_report([answer])["speculation"]
                    if run:  # the first one warms up
                        rates[way].append(args.tokens / took)
        finally:
            for engine in engines.values():
                engine.close()
        assert len(tokens) == 1, "drafts changed a token"
    medians = {way: statistics.median(found) for way, found in rates.items()}
    ratios = {
        way: [a / b for a, b in zip(rates[way], rates["plain"], strict=True)]
        for way in ("mtp", "auto")
    }
    return {"tokens_per_s": medians, "ratios": ratios, "speculation": seen}


def _on_first_gpu(plan: Plan) -> Plan:
    """Return the plan with all stages on the first GPU."""
    plan = on_gpu(plan)
    stages = [stage.model_copy(update={"device_index": 0}) for stage in plan.stages]
    return plan.model_copy(update={"stages": tuple(stages)})


def _costs(plan: Plan) -> CostModel:
    """Return a decode step of 1 ms a layer: where drafts lose, the clock says so."""
    kinds = {stage.profile_kind for stage in plan.stages}
    entries = [
        LatencyEntry(
            device_kind=kind,
            part="layer",
            phase=phase,
            precision=plan.stages[0].precisions[0],
            kv=KVPrecision.KV16,
            dtype=plan.workload.dtype,
            regimes=(Regime(terms={"1": seconds}),),
            source="profile",
        )
        for kind in kinds
        for phase, seconds in ((Phase.DECODE, 1e-3), (Phase.VERIFY, 1.2e-3))
    ]
    return CostModel(
        model=plan.model.name, model_fingerprint=plan.model.fingerprint, entries=tuple(entries)
    )


def main() -> None:
    """Measure, print, write rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--ffn", type=int, default=2048)
    parser.add_argument("--gpu", action="store_true", help="on one GPU in bfloat16")
    parser.add_argument("--stages", type=int, help="default: 2, with --gpu 1")
    parser.add_argument("--backend", choices=("threads", "processes"), default="threads")
    parser.add_argument("--links", choices=("auto", "gloo"), default="auto")
    parser.add_argument("--bits", default="w16a16")
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--gamma", type=int, default=2)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--agreement", type=float, nargs="+", default=[0.8, 0.0])
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    args.stages = args.stages or (1 if args.gpu else 2)
    for agreement in args.agreement:
        found = measure(args, agreement)
        for way, ratios in found["ratios"].items():
            value = statistics.median(ratios)
            row: dict[str, Any] = {
                "agreement": agreement,
                "way": way,
                "stages": args.stages,
                "layers": args.layers,
                "bits": args.bits,
                "tokens": args.tokens,
            }
            if args.backend != "threads":
                row["backend"] = args.backend
            if args.links != "auto":
                row["links"] = args.links
            if args.gpu and args.stages > 1:
                row["gpus"] = 1
            if args.gpu:
                row |= {"hidden": args.hidden, "ffn": args.ffn}
            seen = found["speculation"]
            if way == "mtp":
                row |= {
                    "gamma": args.gamma,
                    "tokens_per_verify": seen.get("tokens_per_verify"),
                    "tokens_per_verify_predicted": expected_tokens(agreement, args.gamma),
                    "acceptance_by_place": seen.get("acceptance_by_place"),
                }
            print(f"{agreement:.0%} {way}: {value:.2f}x of plain; {found['tokens_per_s']}; {row}")
            if args.write:
                write_row(
                    "engine.jsonl",
                    bench="mtp_drafts",
                    case=row,
                    unit="x of plain decoding",
                    samples=ratios,
                    device=torch.cuda.get_device_name(0) if args.gpu else None,
                    baselines={"plain tokens/s": found["tokens_per_s"]["plain"]},
                )


if __name__ == "__main__":
    main()
