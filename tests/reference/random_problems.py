"""Small random problems through the whole stack of nouns: for property tests and benchmarks."""

from __future__ import annotations

import random
from typing import Any

from llmpq.costs.cost_model import TERMS, CostModel, LatencyEntry, Phase, Regime
from llmpq.devices.cluster import Cluster
from llmpq.models.model_spec import ModelSpec
from llmpq.planner.costs.cost_book import CostBook
from llmpq.planner.problem.numbers import distinct_sizes
from llmpq.planner.problem.problem import Objective, Problem
from llmpq.planner.problem.stage_memory import capacity, layer_bytes
from llmpq.precision import WEIGHT_ONLY, Precision
from llmpq.sensitivity import Sensitivity
from llmpq.workload import Workload


def random_problem(
    rng: random.Random,
    *,
    layers: tuple[int, int] = (3, 8),
    kinds: tuple[int, int] = (1, 3),
    devices: tuple[int, int] = (1, 3),
    precisions: int = 3,
    batch: int = 4,
    objective: Objective = "makespan",
    separable: bool = False,
) -> Problem:
    """Return a problem with random costs, memory tight enough to matter, and random omega."""
    spec = _spec(rng, rng.randint(*layers))
    choices = tuple(sorted(rng.sample(WEIGHT_ONLY, precisions), key=lambda c: -c.weight_bits))
    work = Workload(
        batch=batch,
        prompt_len=rng.choice([16, 64]),
        gen_len=rng.choice([1, 2, 3, 8, 20]),
        dtype="float16",
    )
    number = rng.randint(*kinds)
    counts = [rng.randint(*devices) for _ in range(number)]
    problem = Problem(
        spec=spec,
        cluster=_cluster(rng, counts, [2**34] * number),
        workload=work,
        choices=choices,
        sensitivity=_sensitivity(rng, spec, choices, separable),
        costs=CostBook(estimate=_costs(rng, spec, choices, number)),
        theta=rng.choice([0.0, 0.1, 1.0, 5.0]),
        objective=objective,
    )
    cluster = _cluster(rng, counts, _tight_memory(rng, problem, counts))
    sizes = distinct_sizes(batch)
    fixed = rng.random() < 0.3
    return problem.with_changes(
        cluster=cluster,
        prefill_microbatch=rng.choice(sizes) if fixed else None,
        decode_microbatch=rng.choice(sizes) if fixed else None,
    )


def _spec(rng: random.Random, layers: int) -> ModelSpec:
    config = {
        "model_type": "opt",
        "hidden_size": 256,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "ffn_dim": 512,
        "vocab_size": rng.choice([64, 1024]),
        "max_position_embeddings": 256,
        "torch_dtype": "float16",
    }
    return ModelSpec.from_config(config, name=f"random-{layers}")


def _cluster(rng: random.Random, counts: list[int], memory: list[int]) -> Cluster:
    nodes: list[dict[str, Any]] = []
    for k, count in enumerate(counts):
        spec = {"memory": memory[k], "mem_gbps": 100, "fp16_tflops": 10, "capability": "8.0"}
        group = {"kind": f"K{k}", "count": count, "spec": spec}
        nodes.append({"name": f"node-{k}", "devices": [group]})
    links = {
        "within_node": {"gbps": 800, "latency_us": rng.choice([0, 5])},
        "between_nodes": {"gbps": rng.choice([0.05, 1, 100]), "latency_us": rng.choice([5, 2000])},
    }
    return Cluster.parse_data({"name": "random", "nodes": nodes, "links": links}, where="random")


def _costs(
    rng: random.Random, spec: ModelSpec, choices: tuple[Precision, ...], kinds: int
) -> CostModel:
    """Random coefficients of a millisecond or so per layer; kinds differ by up to ten times."""
    entries = []
    for k in range(kinds):
        speed = 10 ** rng.uniform(-0.5, 0.5)
        for part in ("layer", "embedding", "head"):
            for phase in (Phase.PREFILL, Phase.DECODE):
                for precision in choices if part == "layer" else (Precision.W16A16,):
                    terms = {t: 0.0 for t in TERMS[phase]}
                    terms["1"] = rng.uniform(0, 1e-3) / speed
                    terms["v"] = rng.uniform(0, 4e-4) / speed
                    if phase is Phase.DECODE:
                        terms["v*(t+s)"] = rng.uniform(0, 1e-6) / speed
                    entries.append(
                        LatencyEntry(
                            device_kind=f"K{k}",
                            part=part,
                            phase=phase,
                            precision=precision,
                            dtype="float16",
                            regimes=(Regime(terms=terms),),
                            source="profile",
                        )
                    )
    return CostModel(model=spec.name, model_fingerprint=spec.fingerprint(), entries=tuple(entries))


def _sensitivity(
    rng: random.Random, spec: ModelSpec, choices: tuple[Precision, ...], separable: bool
) -> Sensitivity:
    layers = spec.num_layers
    weights = [rng.uniform(0.2, 2.0) for _ in range(layers)]
    tables: dict[Precision, tuple[float, ...]] = {}
    for choice in choices:
        loss = 1e-2 / (2 ** (choice.weight_bits - 3))
        if choice is Precision.W16A16:
            tables[choice] = (0.0,) * layers
        elif separable:
            tables[choice] = tuple(loss * w for w in weights)
        else:
            tables[choice] = tuple(loss * rng.uniform(0.2, 2.0) for _ in range(layers))
    return Sensitivity(indicator="random", model=spec.name, num_layers=layers, weights=tables)


def _tight_memory(rng: random.Random, p: Problem, counts: list[int]) -> list[int]:
    """Memory that holds from a little too few to somewhat more layers than needed."""
    batch = p.workload.batch
    fixed = 2**34 - int(capacity(p, batch, batch)[:, 1, 1].max(axis=-1).min())
    sizes = layer_bytes(p)
    share = p.num_layers / sum(counts)
    return [
        fixed + int(rng.uniform(0.5, 2.5) * share * rng.choice(list(sizes))) + 1 for _ in counts
    ]
