"""What a launcher tells its stages: settings once, requests as they come. Plain data, no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from llmpq.errors import unknown_name
from llmpq.plan import Plan
from llmpq.runtime.engine.slot_limits import SlotLimits
from llmpq.runtime.request import Request
from llmpq.runtime.sampling_params import SamplerConfig
from llmpq.runtime.token_rules import LogitsConstraints
from llmpq.speculation import SpeculationMode

LinkChoice = Literal["auto", "peer", "nccl", "gloo"]
LINK_CHOICES: tuple[LinkChoice, ...] = get_args(LinkChoice)
"""What `--links` takes: `auto` tries `device_links.KINDS` in turn, gloo is what always works."""


@dataclass(frozen=True, kw_only=True)
class StageSettings:
    """What a stage needs to know beyond the plan."""

    model_dir: str
    driver_model_dir: str | None = None
    """The directory on the driver's host, where a node may keep the model elsewhere."""
    copy_weights: bool = False
    """Take the stage's slice from the driver's directory; the layer cache keeps it."""
    trace: bool = False
    batching: str = "continuous"
    speculate: SpeculationMode | None = None
    gamma: int | None = None
    """Draft length; None lets the cost model of `costs` choose it, again and again."""
    costs: str | None = None
    load_format: Literal["auto", "dummy", "copies"] = "auto"
    """`dummy`: random weights made on the device; the model may be a built-in name. `copies`:
    likewise, but all layers of a precision are alike, which takes a moment."""
    end_ids: tuple[int, ...] | None = None
    """Tokens that end an answer, which guides choose, too; None: those of config.json."""
    graphs: bool = True
    """Capture decode steps in CUDA graphs, on a GPU."""
    layer_cache: str | None = None
    """Folder that keeps quantised layers, so that a restart need not quantise them again."""
    live: bool = False
    """Requests come as they like, of any lengths, instead of as the plan foresees."""
    max_model_len: int | None = None
    """Tokens of a live request's prompt and answer at most; None: the model's positions."""
    step_tokens: int | None = None
    """Tokens of a step of live requests, at most; None: as `pool_plan.PoolPlan` says."""
    prefix_cache: bool = True
    """Whether blocks of live requests are found again by others that begin alike."""
    gpu_pool: bool | None = None
    """Whether GPUs, too, keep KV in one pool of blocks, not in the plan's slots; None: for live
    requests wherever they can, for jobs known beforehand where the plan states a pool."""
    packed_prompts: bool = False
    """Prompts, too, attend to packed keys and values, query by query; with a pool they always do.
    """
    address: str | None = None
    """Its node's own address, at which other hosts' stages reach it; None: all are on this host."""
    network_interface: str | None = None
    """Over which stages of several hosts talk, where it is not the one of `address`."""
    links: LinkChoice = "auto"
    """How hidden states travel between GPUs; `auto` tries what is best first."""

    def __post_init__(self) -> None:
        if self.links not in LINK_CHOICES:
            raise unknown_name("links", self.links, LINK_CHOICES)


def limits_of(plan: Plan, batching: str = "continuous") -> SlotLimits:
    """Return the scheduler's limits under a plan."""
    assert batching in ("continuous", "static")
    return SlotLimits(
        num_slots=plan.workload.batch,
        prompt_len=plan.workload.prompt_len,
        max_len=plan.workload.max_len,
        prefill_microbatch=plan.prefill_microbatch,
        decode_microbatch=plan.decode_microbatch,
        num_stages=len(plan.stages),
        batching="static" if batching == "static" else "continuous",
    )


def write_request(request: Request) -> dict[str, Any]:
    """Return a request's fields as JSON data."""
    return {
        "id": request.id,
        "prompt": list(request.prompt),
        "max_new": request.max_new,
        "stop_ids": sorted(request.stop_ids),
        "stop_texts": list(request.stop_texts),
        "sampling": asdict(request.sampling),
        "rules": None if request.rules is None else request.rules.to_data(),
        "min_new": request.min_new,
        "priority": request.priority,
        "cache_salt": request.cache_salt,
        "timeout_s": request.timeout_s,
        "may_draft": request.may_draft,
        "stream": request.stream,
    }


def read_request(fields: dict[str, Any]) -> Request:
    """Return the request `write_request` wrote."""
    return Request(
        id=fields["id"],
        prompt=tuple(fields["prompt"]),
        max_new=fields["max_new"],
        stop_ids=frozenset(fields["stop_ids"]),
        stop_texts=tuple(fields["stop_texts"]),
        sampling=SamplerConfig(**fields["sampling"]),
        rules=None if fields["rules"] is None else LogitsConstraints.from_data(fields["rules"]),
        min_new=fields["min_new"],
        priority=fields["priority"],
        cache_salt=fields["cache_salt"],
        timeout_s=fields["timeout_s"],
        may_draft=fields["may_draft"],
        stream=fields["stream"],
    )
