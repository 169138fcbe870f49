"""A plan's stages for engines that run on GPUs only: vLLM and SGLang."""

from __future__ import annotations

from itertools import groupby

from llmpq.devices.device_spec import OLDEST_BFLOAT16, DeviceSpec, device_specs
from llmpq.models.model_spec import ModelSpec
from llmpq.plans.plan import Plan, StagePlan

OLDEST_WHEEL = (7, 5)
"""Oldest compute capability that vLLM's wheel has code for, and that SGLang starts on."""


def require_gpus(plan: Plan, engine: str) -> None:
    """Raise `ValueError` for a CPU stage, GPUs of two makers, or bfloat16 where there is none."""
    cpus = [place.device for place in plan.places if place.is_cpu]
    if cpus:
        raise ValueError(
            f"{engine} runs no stage on a CPU beside GPUs, the plan has {', '.join(cpus)}; plan "
            "with a cluster of the GPUs alone, or export with --to llamacpp or --to accelerate"
        )
    for place in plan.places:
        spec = spec_of(plan, place)
        if spec is not None and spec.export_only is not None:
            raise ValueError(
                f"{engine} is exported for NVIDIA's and AMD's GPUs, the plan has {place.device} "
                f"({place.kind}); export with --to {spec.export_only}"
            )
    makers = {_maker(plan, place): place.device for place in plan.places}
    if len(makers) > 1:
        raise ValueError(
            f"{engine} is built for one maker's GPUs, the plan has {' and '.join(makers)} "
            f"({', '.join(makers.values())}); plan for one maker's, or export with --to llamacpp"
        )
    if plan.workload.dtype != "bfloat16":
        return
    for place in plan.places:
        spec = spec_of(plan, place)
        if spec is not None and not spec.has_bfloat16:
            raise ValueError(
                f"{engine} has no bfloat16 on {place.device} ({place.kind}, compute capability "
                f"{spec.capability}): it asks for {_text(OLDEST_BFLOAT16)} at least; plan with "
                "--dtype float16, or leave the device out"
            )


def tensor_parallel_size(plan: Plan, spec: ModelSpec, engine: str) -> int:
    """Return how many GPUs share each stage; `ValueError` where that is not even everywhere."""
    sizes = {len(stage.members) for stage in plan.stages}
    if len(sizes) > 1 or any(len(set(stage.shares)) > 1 for stage in plan.stages):
        parts = ", ".join(
            f"{stage.device} {':'.join(map(str, stage.shares)) or '1'}" for stage in plan.stages
        )
        raise ValueError(
            f"{engine} has as many GPUs in every stage, each with an equal share of its layers, "
            f"the plan's shares are {parts}; plan with --tensor-parallel N for equal ones, with "
            "--tensor-parallel 1 without, or run the plan with llmpq-dist"
        )
    (size,) = sizes
    if spec.heads % size or (spec.kv_heads % size and size % spec.kv_heads):
        raise ValueError(
            f"{engine} cuts the {spec.heads} heads and {spec.kv_heads} KV heads of {spec.name} "
            f"into equal parts, the plan has {size} GPUs in a stage; plan with another "
            "--tensor-parallel"
        )
    return size


MARLIN_INPUTS = 128
"""Inputs that the servers' kernels of few bits take at once (verify_marlin_supports_shape)."""


def cut_groups_line(plan: Plan, spec: ModelSpec, size: int, engine: str) -> str | None:
    """Say which matrix of few bits GPUs that share a stage have odd parts of, None where none."""
    packed = any(one.weight_bits < 16 and one.activation_bits == 16 for one in plan.precisions)
    if size < 2 or not packed:
        return None
    for linear in spec.linears():
        if linear.kind.rpartition(".")[2] not in ("o", "down"):
            continue
        own = linear.in_features / size
        if own % MARLIN_INPUTS:
            return (
                f"{engine}'s kernels of few bits read inputs in {MARLIN_INPUTS}s, each of {size} "
                f"GPUs has {own:g} of {linear.kind}'s: they may refuse it; plan with another "
                "--tensor-parallel"
            )
    return None


def old_line(plan: Plan, engine: str) -> str | None:
    """Say which devices the engine's present release has no code for."""
    old = [s for s in plan.places if (_capability(plan, s) or OLDEST_WHEEL) < OLDEST_WHEEL]
    if not old:
        return None
    names = ", ".join(
        f"{s.device} ({s.kind}, {_text(_capability(plan, s) or (0, 0))})" for s in old
    )
    return (
        f"{names}: {engine} runs on compute capability {_text(OLDEST_WHEEL)} and newer; an older "
        "release may still have code for them, llama.cpp has"
    )


def stages_by_node(plan: Plan, engine: str) -> list[tuple[str, list[StagePlan]]]:
    """Return each node with its stages; `ValueError` if the pipeline comes back to a node."""
    found = [(node, list(run)) for node, run in groupby(plan.stages, key=lambda s: s.node)]
    names = [node for node, _ in found]
    for node in names:
        if names.count(node) > 1:
            raise ValueError(
                f"{engine} gives a node stages that follow each other, the plan comes back to "
                f"{node} (nodes in order: {', '.join(names)}); plan for fewer nodes, or run the "
                "plan with llmpq-dist"
            )
    return found


def visible_devices(stages: list[StagePlan]) -> str:
    """Return the environment's words for a node's GPUs in the order of its stages.

    Numbers are nvidia-smi's, which go by the PCI bus; by default CUDA begins with the fastest.
    """
    numbers = ",".join(str(one.device_index) for s in stages for one in s.members)
    return f"CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES={numbers}"


def numbers_line(plan: Plan) -> str | None:
    """Say which number each GPU has, where a node has several kinds; None elsewhere."""
    own = [one for s in plan.stages for one in s.members if not one.is_cpu]
    kinds = {(one.node, one.kind) for one in own}
    mixed = [one for one in own if sum(node == one.node for node, _ in kinds) > 1]
    if not mixed:
        return None
    numbers = ", ".join(f"{one.device} {one.device_index}" for one in mixed)
    return (
        f"whose numbers are whose: {numbers}, in the order of --devices or of the cluster file; "
        "where nvidia-smi lists the cards in another order, write its numbers"
    )


def pipeline_comment(engine: str, version: str, plan: Plan) -> str:
    """Return the comment that says what the command is for."""
    stages = ", ".join(f"{'+'.join(s.device_names)}@{s.node}" for s in plan.stages)
    return f"# {engine} {version}: stages on {stages}"


def spec_of(plan: Plan, stage: StagePlan) -> DeviceSpec | None:
    """Return what the plan, or else the table, says of a stage's kind of device."""
    own = () if plan.inputs is None else plan.inputs.devices
    found = next((device.spec for device in own if device.name == stage.device), None)
    return found or device_specs().get(stage.kind)


def _maker(plan: Plan, stage: StagePlan) -> str:
    spec = spec_of(plan, stage)
    return "NVIDIA" if spec is None else spec.maker


def _capability(plan: Plan, stage: StagePlan) -> tuple[int, int] | None:
    """Return a GPU's compute capability, None where it is not NVIDIA's or not known."""
    spec = spec_of(plan, stage)
    if spec is None or spec.capability is None:
        return None
    major, _, minor = spec.capability.partition(".")
    return int(major), int(minor or 0)


def _text(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
