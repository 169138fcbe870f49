"""Which Ray node each node of a plan is: by host, by labels, else by the kind of its devices.

Pure: plain values in, a match or one sentence out. A node of a plan is one Ray node and no two of
them are the same. Where a file gives a host and labels, both must hold.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from llmpq.devices.device_spec import device_specs, siblings
from llmpq.devices.this_machine import kind_of
from llmpq.plans.plan import NodePlan, StagePlan

_ACCELERATOR = "accelerator_type:"


@dataclass(frozen=True, kw_only=True)
class RayNode:
    """A node as Ray describes it."""

    id: str
    address: str
    """Its own address, which Ray's nodes reach it at."""
    hostname: str
    labels: Mapping[str, str] = field(default_factory=dict)
    num_gpus: int = 0
    gpu_kinds: frozenset[str] = frozenset()
    """The table's names of its GPUs; empty where Ray does not say, or the table has none."""
    is_here: bool = False
    """Whether this process runs on it."""

    def shown(self) -> str:
        """Return how messages call it: name, address, what it has."""
        kinds = "/".join(sorted(self.gpu_kinds)) or "GPU"
        devices = f"{self.num_gpus} x {kinds}" if self.num_gpus else "CPU only"
        own = {k: v for k, v in self.labels.items() if not k.startswith("ray.io/")}
        labels = f", labels {_text(own)}" if own else ""
        return f"{self.hostname} at {self.address} ({devices}{labels})"


@dataclass(frozen=True, kw_only=True)
class WantedNode:
    """A node of a plan, as far as it has stages."""

    node: NodePlan
    addresses: frozenset[str]
    """What its host stands for, as this machine resolves it."""
    stages: tuple[StagePlan, ...]

    @property
    def gpu_stages(self) -> tuple[StagePlan, ...]:
        """Its stages on GPUs."""
        return tuple(stage for stage in self.stages if not stage.is_cpu)

    @property
    def is_named(self) -> bool:
        """Whether the file says more than which devices it has."""
        return self.node.host is not None or bool(self.node.labels)

    def shown(self) -> str:
        """Return how messages call it."""
        said = [] if self.node.host is None else [f"host {self.node.host}"]
        said += [f"labels {_text(self.node.labels)}"] if self.node.labels else []
        said += [", ".join(stage.device for stage in self.stages)]
        return f"'{self.node.name}' ({'; '.join(said)})"


class Unmatched(Exception):
    """Not every node of a plan is a Ray node."""

    def __init__(self, text: str, *, for_good: bool) -> None:
        """`for_good`: no node that joins later changes it."""
        super().__init__(text)
        self.for_good = for_good


def ray_nodes(described: Iterable[Mapping[str, object]], here: str) -> list[RayNode]:
    """Return the nodes that are alive among `ray.nodes()`; `here` is this process's node."""
    found = []
    for node in described:
        if not node["Alive"]:
            continue
        resources, labels = _mapping(node.get("Resources")), _mapping(node.get("Labels"))
        types = [k.removeprefix(_ACCELERATOR) for k in resources if k.startswith(_ACCELERATOR)]
        kinds = (kind_of(name) for name in types)
        found.append(
            RayNode(
                id=str(node["NodeID"]),
                address=str(node["NodeManagerAddress"]),
                hostname=str(node["NodeManagerHostname"]),
                labels={key: str(value) for key, value in labels.items()},
                num_gpus=int(float(str(resources.get("GPU", 0)))),
                gpu_kinds=frozenset(kind for kind in kinds if kind is not None),
                is_here=node["NodeID"] == here,
            )
        )
    return sorted(found, key=lambda n: (not n.is_here, n.address, n.id))


def match_nodes(
    wanted: Sequence[WantedNode], nodes: Sequence[RayNode], local: Collection[str]
) -> dict[str, RayNode]:
    """Return the Ray node of every node of a plan, by the plan's names.

    `local`: addresses of this machine, loopback's among them. `Unmatched` says which node is
    missing and which there are.
    """
    own = frozenset(map(plain_address, local))
    fitting: dict[str, list[RayNode]] = {}
    for want in wanted:
        named = _named(want, nodes, own)
        fitting[want.node.name] = [node for node in named if lacks(want, node) is None]
        if want.is_named and named and not fitting[want.node.name]:
            raise Unmatched(_wrong_devices(want, named[0]), for_good=True)
    match: dict[str, tuple[WantedNode, RayNode]] = {}
    # Those with fewest choices first, so that the message is about the one that is to blame.
    for want in sorted(wanted, key=lambda w: len(fitting[w.node.name])):
        if not _assign(want, fitting, match, set()):
            taken = [match[n.id][0] for n in fitting[want.node.name]]
            raise Unmatched(_missing(want, taken, nodes), for_good=False)
    return {want.node.name: node for want, node in match.values()}


def plain_address(text: str) -> str:
    """Return an address in its shortest form, without brackets and zone; a name as it is."""
    bare = text.strip("[]").partition("%")[0]
    try:
        address = ipaddress.ip_address(bare)
    except ValueError:
        return bare.lower()
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def lacks(want: WantedNode, node: RayNode) -> str | None:
    """Return which devices of a plan's node a Ray node does not have."""
    stages = want.gpu_stages
    if len(stages) > node.num_gpus:
        return f"{len(stages)} x {stages[0].kind}"
    for stage in stages:
        if stage.kind not in device_specs():
            continue  # the stage itself looks
        kinds = {stage.kind, *siblings(stage.kind)}
        if node.gpu_kinds and not node.gpu_kinds & kinds:
            return stage.kind
    return None


def _named(want: WantedNode, nodes: Sequence[RayNode], local: frozenset[str]) -> list[RayNode]:
    """Return those whose host and labels are a plan's node's, as far as it gives them."""
    labelled = [node for node in nodes if want.node.labels.items() <= node.labels.items()]
    if want.node.host is None:
        return labelled
    host, at = plain_address(want.node.host), {plain_address(one) for one in want.addresses}
    found = [
        node
        for node in labelled
        if host in (plain_address(node.address), node.hostname.lower())
        or plain_address(node.address) in at
    ]
    if found or not any(_is_loopback(one) for one in at):
        return found
    # This host's own name, wherever its hosts file puts it; a name that Ray knows is no other's.
    if any(host == node.hostname.lower() for node in nodes):
        return []
    return [node for node in labelled if node.is_here or plain_address(node.address) in local]


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _assign(
    want: WantedNode,
    fitting: Mapping[str, Sequence[RayNode]],
    match: dict[str, tuple[WantedNode, RayNode]],
    tried: set[str],
) -> bool:
    """Give a plan's node a Ray node, moving others where they have another choice."""
    name = want.node.name
    choices = sorted(fitting[name], key=lambda n: (n.hostname != name, n.id in match))
    for node in choices:
        if node.id in tried:
            continue
        tried.add(node.id)
        if node.id not in match or _assign(match[node.id][0], fitting, match, tried):
            match[node.id] = (want, node)
            return True
    return False


def _missing(want: WantedNode, taken: Sequence[WantedNode], nodes: Sequence[RayNode]) -> str:
    """`taken`: the nodes of the plan that are the Ray nodes which fit this one."""
    there = "; ".join(node.shown() for node in nodes) or "none"
    if taken:
        others = " and ".join(f"'{other.node.name}'" for other in taken)
        why = f"every Ray node that fits it is another node of the plan ({others})"
    elif want.is_named or not want.gpu_stages:
        why = "no Ray node is it"
    else:
        why = f"no Ray node has {lacks(want, nodes[0]) if nodes else want.gpu_stages[0].kind}"
    labels = f" --labels {_text(want.node.labels)}" if want.node.labels else ""
    return (
        f"the plan's node {want.shown()} is missing: {why}; Ray has {len(nodes)}: {there}; start "
        f"it there with: ray start --address HOST:PORT{labels}"
    )


def _wrong_devices(want: WantedNode, node: RayNode) -> str:
    kinds = sorted({stage.kind for stage in want.gpu_stages})
    return (
        f"the plan's node {want.shown()} needs {len(want.gpu_stages)} x {'/'.join(kinds)}, Ray's "
        f"node is {node.shown()}; correct the cluster file or re-plan with llmpq-algo --cluster"
    )


def _text(labels: Mapping[str, str]) -> str:
    return ",".join(f"{key}={value}" for key, value in labels.items())


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}
