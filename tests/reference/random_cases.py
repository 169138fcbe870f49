"""Small random problems of every kind a person can state, for proofs against brute force.

Equal cards in several nodes, nodes of several kinds, links that differ from pair to pair, measured
links, a choice of KV precisions, quality budgets, models with experts, layers of given precisions,
pins, and micro-batch sizes free or fixed. Seeded: a seed's case is the same wherever it is drawn.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from llmpq.costs.cost_model import TERMS, CostModel, LatencyEntry, LinkCost, Phase, Regime
from llmpq.devices.cluster import Cluster
from llmpq.models.model_spec import ModelSpec
from llmpq.planner.costs.cost_book import CostBook
from llmpq.planner.costs.roofline import estimate_costs
from llmpq.planner.problem.problem import Objective, Problem
from llmpq.precision import WEIGHT_ONLY, KVPrecision, Precision
from llmpq.sensitivity import Sensitivity
from llmpq.sizes.memory import Quantization
from llmpq.workload import Workload

KVS = (KVPrecision.KV16, KVPrecision.KV8, KVPrecision.KV4)
ROOMY = 2**36


@dataclass(frozen=True, kw_only=True)
class RandomCase:
    """A problem as a person states it: with a choice of KV precisions and perhaps a budget."""

    problem: Problem
    kvs: tuple[KVPrecision, ...]
    budget: float | None

    def priced(self, kv: KVPrecision) -> Problem:
        """Return the problem at one KV precision."""
        work = self.problem.workload.model_copy(update={"kv": kv})
        theta = self.problem.theta if self.budget is None else 0.0
        return self.problem.with_changes(workload=work, theta=theta)


def random_case(seed: int, *, objective: Objective | None = None) -> RandomCase:
    """Return the case of a seed: at most 4 devices, 5 layers, 3 precisions, a batch of 6."""
    rng = random.Random(seed)
    spec = _spec(rng, rng.randint(2, 5))
    choices = tuple(
        sorted(rng.sample(WEIGHT_ONLY, rng.choice([1, 2, 2, 3])), key=lambda c: -c.weight_bits)
    )
    kvs = tuple(sorted(rng.sample(KVS, rng.choice([1, 1, 2, 3])), key=lambda kv: -kv.mean_bits))
    nodes = _nodes(rng)
    work = Workload(
        batch=rng.choice([1, 2, 3, 4, 6]),
        prompt_len=rng.choice([16, 64]),
        gen_len=rng.choice([1, 2, 3, 8, 20]),
        kv=kvs[0],
        dtype="float16",
    )
    links = _links(rng, [node["name"] for node in nodes])
    objectives: tuple[Objective, ...] = ("makespan", "makespan", "makespan", "paper")
    drawn = rng.choice(objectives)
    data = {"name": "random", "nodes": nodes, "links": links}
    cluster = Cluster.parse_data(data, where="random")
    p = Problem(
        spec=spec,
        cluster=cluster,
        workload=work,
        choices=choices,
        sensitivity=_sensitivity(rng, spec, choices, kvs),
        costs=_costs(rng, spec, cluster, choices, kvs),
        theta=rng.choice([0.0, 0.1, 1.0, 5.0]),
        objective=objective or drawn,
        max_devices=rng.choice([None, None, None, 1, 2]),
        **_microbatches(rng, work.batch),
    )
    p = p.with_changes(cluster=_tight(rng, p, data))
    p = p.with_changes(offered=_offered(rng, p), pins=_pins(rng, p))
    return RandomCase(problem=p, kvs=kvs, budget=_budget(rng, p) if rng.random() < 0.3 else None)


def _spec(rng: random.Random, layers: int) -> ModelSpec:
    config: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": rng.choice([2, 4]),
        "vocab_size": rng.choice([64, 1024]),
        "max_position_embeddings": 256,
        "torch_dtype": "float16",
    }
    if rng.random() < 0.3:
        experts = rng.choice([4, 8, 16])
        config |= {
            "model_type": "mixtral",
            "num_local_experts": experts,
            "num_experts_per_tok": rng.choice([1, 2]),
        }
    return ModelSpec.from_config(config, name=f"random-{layers}")


def _nodes(rng: random.Random) -> list[dict[str, Any]]:
    """One to four devices of one to three kinds, over one to three nodes."""
    kinds = rng.randint(1, 3)
    specs = [
        {
            "memory": ROOMY,
            "mem_gbps": rng.choice([1, 3, 10]),
            "fp16_tflops": rng.choice([0.05, 0.2, 1]),
            "capability": "8.0",
        }
        for _ in range(kinds)
    ]
    members: dict[int, list[int]] = {}
    for _ in range(rng.choice([1, 2, 2, 3, 3, 4])):
        members.setdefault(rng.randrange(3), []).append(rng.randrange(kinds))
    return [
        {
            "name": f"node-{node}",
            "devices": [
                {"kind": f"K{k}", "count": own.count(k), "spec": specs[k]} for k in sorted({*own})
            ],
        }
        for node, own in sorted(members.items())
    ]


def _links(rng: random.Random, nodes: list[str]) -> dict[str, Any]:
    def link() -> dict[str, Any]:
        return {
            "gbps": rng.choice([0.01, 0.1, 1, 100]),
            "latency_us": rng.choice([0, 5, 300, 2000]),
        }

    ends = [(a, b) for i, a in enumerate(nodes) for b in nodes[i:]]
    pairs = [{"between": list(e), **link()} for e in ends if rng.random() < 0.3]
    within = link() if rng.random() < 0.5 else {"gbps": 800, "latency_us": 0}
    return {"within_node": within, "between_nodes": link(), "pairs": pairs}


def _sensitivity(
    rng: random.Random,
    spec: ModelSpec,
    choices: tuple[Precision, ...],
    kvs: tuple[KVPrecision, ...],
) -> Sensitivity:
    layers, uneven = spec.num_layers, rng.random() < 0.6

    def column(bits: float) -> tuple[float, ...]:
        loss = 0.0 if bits >= 16 else 1e-2 / 2 ** (bits - 3)
        return tuple(loss * (rng.uniform(0.2, 2.0) if uneven else 1.0) for _ in range(layers))

    return Sensitivity(
        indicator="random",
        model=spec.name,
        num_layers=layers,
        weights={choice: column(choice.weight_bits) for choice in choices},
        kv={kv: tuple(x / 4 for x in column(kv.mean_bits)) for kv in kvs},
    )


def _costs(
    rng: random.Random,
    spec: ModelSpec,
    cluster: Cluster,
    choices: tuple[Precision, ...],
    kvs: tuple[KVPrecision, ...],
) -> CostBook:
    """Estimates from specifications, or random entries; sometimes measured links beside them."""
    kinds = sorted({device.profile_kind for device in cluster.devices})
    if rng.random() < 0.5:
        estimate = estimate_costs(
            spec,
            cluster.devices,
            dtype="float16",
            precisions=choices,
            kvs=kvs,
            quantization=Quantization(),
        )
    else:
        estimate = CostModel(
            model=spec.name,
            model_fingerprint=spec.fingerprint(),
            entries=tuple(e for kind in kinds for e in _entries(rng, kind, choices, kvs)),
        )
    links = [
        LinkCost(
            source_kind=one,
            target_kind=other,
            same_node=same,
            alpha_s=rng.choice([0.0, 1e-4, 2e-3]),
            beta_s_per_byte=rng.choice([1e-9, 1e-7]),
        )
        for i, one in enumerate(kinds)
        for other in kinds[i:]
        for same in (True, False)
        if rng.random() < 0.1
    ]
    if not links:
        return CostBook(estimate=estimate)
    profile = CostModel(
        model=spec.name, model_fingerprint=spec.fingerprint(), entries=(), links=tuple(links)
    )
    return CostBook(estimate=estimate, profile=profile)


def _entries(
    rng: random.Random, kind: str, choices: tuple[Precision, ...], kvs: tuple[KVPrecision, ...]
) -> list[LatencyEntry]:
    """Random coefficients of a millisecond or so per layer; kinds differ by up to ten times."""
    speed = 10 ** rng.uniform(-0.5, 0.5)

    def regime(phase: Phase) -> Regime:
        terms = {term: 0.0 for term in TERMS[phase]}
        terms["1"] = rng.uniform(0, 1e-3) / speed
        terms["v"] = rng.uniform(0, 4e-4) / speed
        if phase is Phase.DECODE:
            terms["v*(t+s)"] = rng.uniform(0, 1e-6) / speed
        return Regime(terms=terms)

    keys = [
        ("layer", phase, choice, kv)
        for phase in (Phase.PREFILL, Phase.DECODE)
        for choice in choices
        for kv in (kvs if phase is Phase.DECODE else (KVPrecision.KV16,))
    ]
    keys += [
        (part, phase, Precision.W16A16, KVPrecision.KV16)
        for part in ("embedding", "head")
        for phase in (Phase.PREFILL, Phase.DECODE)
    ]
    return [
        LatencyEntry(
            device_kind=kind,
            part=part,
            phase=phase,
            precision=precision,
            kv=kv,
            dtype="float16",
            regimes=tuple(regime(phase) for _ in range(rng.choice([1, 2]))),
            source="profile",
        )
        for part, phase, precision, kv in keys
    ]


def _microbatches(rng: random.Random, batch: int) -> dict[str, Any]:
    """Sizes left free, or one of them or both fixed; prefill may be the larger one."""
    fixed = {}
    if rng.random() < 0.2:
        fixed["prefill_microbatch"] = rng.randint(1, batch)
    if rng.random() < 0.2:
        fixed["decode_microbatch"] = rng.randint(1, batch)
    return fixed


def _tight(rng: random.Random, p: Problem, data: dict[str, Any]) -> Cluster:
    """Memory that holds from a little too few to somewhat more layers than needed."""
    batch = p.workload.batch
    left = p.numbers(batch, batch).capacity
    sizes = p.all_layer_bytes
    share = p.num_layers / len(p.cluster.devices)
    fixed = ROOMY - int(left.reshape(-1).max())
    nodes = []
    for node in data["nodes"]:
        groups = []
        for group in node["devices"]:
            held = rng.uniform(0.5, 2.5) * share * int(rng.choice(list(sizes[0])))
            groups.append({**group, "memory": fixed + int(held) + 1})
        nodes.append({**node, "devices": groups})
    if rng.random() < 0.5:  # cards that are equal stay equal, wherever they are
        of_kind: dict[str, int] = {}
        for node in nodes:
            for group in node["devices"]:
                group["memory"] = of_kind.setdefault(group["kind"], group["memory"])
    return Cluster.parse_data({**data, "nodes": nodes}, where="random")


def _offered(rng: random.Random, p: Problem) -> tuple[tuple[Precision, ...], ...]:
    if rng.random() > 0.1:
        return ()
    return tuple(
        tuple(rng.sample(p.choices, rng.randint(1, len(p.choices)))) for _ in range(p.num_layers)
    )


def _pins(rng: random.Random, p: Problem) -> dict[str, tuple[int, int]]:
    if rng.random() > 0.1:
        return {}
    start = rng.randrange(p.num_layers)
    device = rng.choice(p.cluster.devices).name
    return {device: (start, rng.randint(start + 1, p.num_layers))}


def _budget(rng: random.Random, p: Problem) -> float:
    """A sum of omega between the least and the most there is, a little beyond, or one attained."""
    omega = p.omega
    low, high = float(omega.min(axis=1).sum()), float(omega.max(axis=1).sum())
    if rng.random() < 0.3:
        return float(sum(omega[i, rng.randrange(omega.shape[1])] for i in range(len(omega))))
    return max(0.0, low + rng.uniform(-0.05, 1.05) * (high - low))
