"""Seeded problems of real size: odd clusters, models from 7B to 405B, every flag of the command.

`python benchmarks/odd_clusters.py --files 17 DIR` writes seed 17's files into DIR and prints its
command. A seed's problem is the same everywhere. Problems that cannot fit are drawn again.
"""

from __future__ import annotations

import json
import random
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from llmpq.planner.check.refusal import too_big
from llmpq.planner.cli.arguments import plan_request
from llmpq.planner.problem.make_problem import make_problem, parse_kv
from llmpq.planner.problem.problem import Problem
from reference.random_cases import RandomCase

KINDS = (
    "CPU", "P40", "P100-16GB", "V100-16GB", "V100-32GB", "T4", "RTX-2080-Ti", "A10", "A30", "A40",
    "A100-40GB", "A100-80GB", "RTX-3060", "RTX-3090", "L4", "L40S", "RTX-4090", "RTX-5090", "H20",
    "H100-SXM", "H200", "MI210", "MI300X",
)  # fmt: skip
MODELS = (
    "llama-2-7b", "llama-2-13b", "llama-2-70b", "llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b",
    "qwen3-8b", "qwen3-14b", "mixtral-8x7b", "mixtral-8x22b", "opt-30b", "opt-66b", "bloom-176b",
)  # fmt: skip
ROTARY = {"vocab_size": 151936, "max_position_embeddings": 40960, "torch_dtype": "bfloat16"}
SHAPES: dict[str, dict[str, Any]] = {
    "moe-30b": {
        "model_type": "mixtral", "hidden_size": 2048, "intermediate_size": 768,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "num_local_experts": 128, "num_experts_per_tok": 8, **ROTARY,
    },
    "moe-235b": {
        "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 1536,
        "num_hidden_layers": 94, "num_attention_heads": 64, "num_key_value_heads": 4,
        "head_dim": 128, "num_local_experts": 128, "num_experts_per_tok": 8, **ROTARY,
    },
    "moe-fine": {
        "model_type": "mixtral", "hidden_size": 5120, "intermediate_size": 1024,
        "num_hidden_layers": 60, "num_attention_heads": 40, "num_key_value_heads": 8,
        "num_local_experts": 256, "num_experts_per_tok": 8, **ROTARY,
    },
    "dense-32b": {
        "model_type": "qwen3", "hidden_size": 5120, "intermediate_size": 25600,
        "num_hidden_layers": 64, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 128, **ROTARY,
    },
    "dense-123b": {
        "model_type": "llama", "hidden_size": 12288, "intermediate_size": 28672,
        "num_hidden_layers": 88, "num_attention_heads": 96, "num_key_value_heads": 8,
        "head_dim": 128, **ROTARY,
    },
}  # fmt: skip
"""Inline models: dense and with many small experts."""
BITS = ("", "", "3,4,8,16", "4", "8", "8,4", "16,8", "16,8,4", "16,4", "w8a8,w4a16")
KV = ("16", "16", "16", "16,8", "8", "8,4", "16,8,4,2")


@dataclass(frozen=True, kw_only=True)
class OddProblem:
    """A problem as a person states it, in files and flags."""

    seed: int
    cluster: dict[str, Any]
    model: str
    flags: tuple[str, ...]

    def write(self, folder: Path) -> list[str]:
        """Write the cluster, and the model if it is inline; return the command's words."""
        path = folder / f"cluster-{self.seed}.yaml"
        path.write_text(yaml.safe_dump(self.cluster, sort_keys=False))
        model = self.model
        if model in SHAPES:
            (folder / model).mkdir(exist_ok=True)
            (folder / model / "config.json").write_text(json.dumps(SHAPES[model]))
            model = str(folder / model)
        return ["--cluster", str(path), "--model", model, *self.flags]

    def case(self) -> RandomCase:
        """Return the problem, its KV precisions and its budget, as the command reads them."""
        with tempfile.TemporaryDirectory() as folder:
            return read_case(self.write(Path(folder)))


def read_case(words: list[str]) -> RandomCase:
    """Return the problem that a command states."""
    args = plan_request(words)
    return RandomCase(
        problem=make_problem(args)[0], kvs=parse_kv(args.kv), budget=args.quality_budget
    )


def odd_problem(seed: int) -> OddProblem:
    """Return the problem of a seed."""
    rng = random.Random(f"odd {seed}")
    while True:
        found = OddProblem(
            seed=seed,
            cluster=_cluster(rng, seed),
            model=rng.choice([*MODELS, *SHAPES]),
            flags=tuple(_job(rng)),
        )
        try:
            if fits_somehow(found.case()):
                return found
        except ValueError:  # more positions than a model has learned
            continue


def fits_somehow(case: RandomCase) -> bool:
    """Whether some plan has the memory, at one of the KV precisions."""
    return not all(too_big(case.priced(kv)) for kv in case.kvs)


def _cluster(rng: random.Random, seed: int) -> dict[str, Any]:
    """One to 16 devices of one to four kinds over one to eight nodes."""
    count = rng.choice([1, 2, 2, 3, 3, 4, 4, 5, 6, 7, 8, 8, 10, 12, 14, 16])
    number = min(rng.choice([1, 1, 2, 2, 3, 4, 6, 8]), count)
    kinds = rng.sample(KINDS, rng.choice([1, 2, 2, 3, 3, 4]))
    mixed = rng.random() < 0.3
    own = [rng.choice(kinds) for _ in range(number)]
    members: list[list[str]] = [[own[k]] for k in range(number)]
    for _ in range(count - number):
        k = rng.randrange(number)
        members[k].append(rng.choice(kinds) if mixed else own[k])
    cpu = {"threads": rng.choice([4, 8, 16, 64]), "memory": f"{rng.choice([16, 64, 256])} GiB"}
    nodes = []
    for k, devices in enumerate(members):
        groups = []
        for kind in dict.fromkeys(devices):
            some = {"kind": kind, "count": 1 if kind == "CPU" else devices.count(kind)}
            groups.append({**some, **(cpu if kind == "CPU" else {})})
        nodes.append({"name": f"n{k}", "devices": groups})
    return {"schema": 1, "name": f"odd-{seed}", "nodes": nodes, "links": _links(rng, number)}


def _links(rng: random.Random, number: int) -> dict[str, Any]:
    def link(gbps: list[float], latency_us: list[float]) -> dict[str, float]:
        return {"gbps": rng.choice(gbps), "latency_us": rng.choice(latency_us)}

    slow, quick = [1, 10, 25, 40, 100, 400], [64, 128, 200, 600, 1200, 3600]
    links: dict[str, Any] = {
        "within_node": link(quick, [5, 10, 20, 30]),
        "between_nodes": link(slow, [20, 50, 200, 500]),
    }
    if number > 2 and rng.random() < 0.25:
        ends = rng.sample(range(number), 2)
        faster = link(quick, [10, 50])
        links["pairs"] = [{"between": [f"n{k}" for k in ends], **faster}]
    return links


def _log_uniform(rng: random.Random, low: int, high: int) -> int:
    return round(low * (high / low) ** rng.random())


def _job(rng: random.Random) -> list[str]:
    batch = rng.choice([1, 2, 4, 8, 16, 32, 64, 128, 256, 512, _log_uniform(rng, 1, 512)])
    prompt, tokens = _log_uniform(rng, 32, 32768), _log_uniform(rng, 2, 2048)
    words = ["--global-bz", str(batch), "--s", str(prompt), "--n", str(tokens)]
    bits = rng.choice(BITS)
    words += ["--bits", bits] if bits else []
    words += ["--kv", rng.choice(KV)]
    if rng.random() < 0.2:
        words += ["--quality-budget", str(rng.choice([0.05, 0.1, 0.3, 0.5, 1.0, 2.0]))]
    else:
        words += ["--theta", str(rng.choice([0, 0.1, 1, 1, 10, 100]))]
    return words


def larger_pair(seed: int) -> tuple[RandomCase, RandomCase, str]:
    """Return a problem, the same one with more to choose from, and what is more."""
    for again in range(1000):
        rng = random.Random(f"more {seed} {again}")
        found = odd_problem(rng.randrange(10**6))
        one = found.case()
        if one.problem.workload.batch > 64 or len(one.problem.cluster.devices) > 8:
            continue
        larger = _larger(rng, found, one.problem)
        if larger is not None:
            other, what = larger
            flags = (*other.flags, "--dtype", one.problem.workload.dtype)
            return one, replace(other, flags=flags).case(), f"{found.seed}: {what}"
    raise AssertionError("some problem can be made larger")


def _larger(rng: random.Random, found: OddProblem, p: Problem) -> tuple[OddProblem, str] | None:
    """Add a device, memory, or a precision to a problem."""
    what = rng.choice(["device", "memory", "precision"])
    cluster = json.loads(json.dumps(found.cluster))
    group = rng.choice([g for node in cluster["nodes"] for g in node["devices"]])
    if what == "device":
        group["count"] += 1
        return replace(found, cluster=cluster), f"one more {group['kind']}"
    if what == "memory":
        now = max(d.memory_bytes for d in p.cluster.devices if d.kind == group["kind"])
        group["memory"] = int(now * 1.25)
        return replace(found, cluster=cluster), f"a quarter more memory of {group['kind']}"
    have = {choice.value for choice in p.choices}
    missing = [b for b in ("w16a16", "w8a16", "w4a16", "w3a16") if b not in have]
    if not missing:
        return None
    more = rng.choice(missing)
    bits = ",".join([*(c.value for c in p.choices), more])
    return replace(found, flags=(*found.flags, "--bits", bits)), f"{more} allowed"
