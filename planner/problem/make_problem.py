"""The one builder of a `Problem`: of values (`build_problem`), or of a request (`make_problem`).

`make_problem` reads the files that a request names, and so serves the command line and
`llmpq.make_plan`; a run without a plan has the values already (`plan_workload`). Knows nothing of
solvers. Every error names the flag and what to do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Literal

from llmpq.checkpoints.gguf_file import is_gguf, open_gguf
from llmpq.checkpoints.gguf_tokenizer import require_tokenizer
from llmpq.costs.cost_model import CostModel
from llmpq.costs.costs_cache import cache_folder, cached_costs
from llmpq.costs.cpu_rates import CpuRates
from llmpq.devices.cluster import Cluster
from llmpq.devices.default_dtype import default_dtype, dtype_note, without_bfloat16
from llmpq.devices.joined_devices import crowded_notes, joined, members_of
from llmpq.devices.this_machine import assumed, is_this_machine
from llmpq.models.model_spec import ModelSpec
from llmpq.models.tensor_parallel import parse_shares
from llmpq.planner.costs.cost_book import CostBook, alone_kinds
from llmpq.planner.costs.group_costs import unmeasured_groups, with_groups_measured
from llmpq.planner.costs.probed import estimated_costs, outdated_rates, rates_for
from llmpq.planner.problem import limits
from llmpq.planner.problem.checkpoint_codes import (
    LayerCodes,
    checkpoint_codes,
    has_others_beside,
    rounded_shares,
    with_checkpoint_codes,
)
from llmpq.planner.problem.limits import positions_note
from llmpq.planner.problem.named_inputs import read_devices_of, read_model
from llmpq.planner.problem.problem import Objective, Problem
from llmpq.planner.problem.requests import PlanRequest
from llmpq.planner.problem.stored_precisions import (
    Source,
    StoredLayer,
    kept_grid,
    names_of,
    offered,
    rounded_note,
    rounded_of_gguf,
    stored_layers,
    tells_layers,
)
from llmpq.plans.able_devices import Forced, able_devices
from llmpq.plans.capabilities import (
    PACKED_KV,
    ExecutionMode,
    Lack,
    execution_modes,
    lack_of,
    lacking_sentence,
    packed_kv_sentence,
    without_tensor_cores,
)
from llmpq.precision import (
    K_PADDING,
    WEIGHT_ONLY,
    KVPrecision,
    Precision,
    default_outliers,
    kv_bits_of,
)
from llmpq.sensitivity import Sensitivity
from llmpq.sizes.memory import CpuActivations, Quantization
from llmpq.sizes.pool_size import READS_KV4
from llmpq.workload import Dtype, Workload

GENERIC_NOTE = (
    "the quality loss is a guess, by the generic indicator: the variance of rounding, equal for "
    "all layers (1 = every layer at 4 bits); llmpq-profile indicator measures it"
)


@dataclass(frozen=True, kw_only=True)
class ProblemInputs:
    """The values that a problem is built of, wherever they come from: flags, or a run's own."""

    spec: ModelSpec
    cluster: Cluster
    workload: Workload
    source: Source | None = None
    """The model's directory, GGUF file or config, which say how a quantised one is stored."""
    bits: tuple[Precision, ...] | None = None
    """Precisions allowed; None: as stored, or all that costs and sensitivity know."""
    kvs: tuple[KVPrecision, ...] = ()
    """KV precisions allowed; none: the workload's."""
    profile: CostModel | None = None
    """Measured costs, of some kinds of device or all; the others are estimated."""
    sensitivity: Sensitivity | None = None
    """Measured quality losses; None: generic ones."""
    theta: float = 0.0
    objective: Objective = "makespan"
    group: int = 1
    max_devices: int | None = None
    pins: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    prefill_microbatch: int | None = None
    decode_microbatch: int | None = None
    symmetric: bool = False
    weight_group_size: int | None = None
    head_bits: Literal[8, 16] | None = None
    cpu_activations: CpuActivations = "exact"
    outliers: int | None = None
    probe_cpu: bool = False
    """Measure this machine's CPU now."""
    shares: tuple[int, ...] = ()
    """Of as many devices of a node that share each stage in tensor parallel; none: one each."""


@dataclass(frozen=True, kw_only=True)
class BuiltProblem:
    """A problem, and what to say about the values that were not given."""

    problem: Problem
    left_out: tuple[str, ...]
    """Devices, and precisions, that do not run the job."""
    notes: tuple[str, ...]
    """Of a checkpoint's stored precisions, and of quality losses that are guessed."""
    rates: tuple[CpuRates, ...]
    """Measured rates of CPUs that times are estimated by."""

    def cost_notes(self, workload: Workload) -> list[str]:
        """Return where times come from, and how far off they may be for a job."""
        costs, cluster = self.problem.costs, self.problem.cluster
        known = () if costs.profile is None else costs.profile.device_kinds
        return [
            *(found.text() for found in self.rates),
            *outdated_rates(cluster, workload.dtype, profiled=known, taken=self.rates),
            *costs.unprofiled(cluster.devices),
            *costs.warnings(cluster.devices, workload),
        ]


def build_problem(inputs: ProblemInputs) -> BuiltProblem:
    """Return the problem of these values, with what was not given filled in."""
    spec, cluster, workload = inputs.spec, inputs.cluster, inputs.workload
    source, kvs = inputs.source, inputs.kvs or (workload.kv,)
    kept = None
    if source is not None and tells_layers(source):
        kept = kept_grid(source, spec, cluster.devices, inputs.weight_group_size)
    stored = _stored(source, spec, inputs.bits, kept)
    codes = checkpoint_codes(source, spec) if stored and source is not None else []
    stored = tuple(
        replace(one, others_beside=has_others_beside(own, spec.of_layer(index)))
        for index, (one, own) in enumerate(zip(stored, codes, strict=True))
    )
    layers = offered(stored, inputs.bits) if stored else ()
    allowed = layers or ((inputs.bits,) if inputs.bits else ())
    forced = Forced(
        spec=spec, kvs=kvs, dtype=workload.dtype, layers=allowed, max_len=workload.max_len
    )
    cluster, left_out = able_devices(cluster, forced, inputs.pins)
    bits, layers, no_rounding = _without_rounded(spec, cluster, inputs.bits, layers)
    if inputs.shares:
        cluster = joined(cluster, inputs.shares, spec)
    profile = with_groups_measured(inputs.profile, cluster.devices, spec)
    choices = _all_of(layers) or bits or default_bits(inputs.sensitivity, profile, cluster)
    quantization = replace(
        _grid(inputs, kept),
        outliers=_outliers(inputs.outliers, choices, spec),
        head_bits=open_head(choices, inputs.head_bits),
        cpu_activations=inputs.cpu_activations,
    )
    _require_few_bits(cluster, spec, quantization.outliers)
    if codes:
        quantization = with_checkpoint_codes(
            quantization, codes, spec, choices, workload.dtype_bytes
        )
    known = () if profile is None else profile.device_kinds
    rates = rates_for(cluster, workload.dtype, profiled=known, probing=inputs.probe_cpu)
    estimate = estimated_costs(
        spec,
        cluster.devices,
        rates,
        dtype=workload.dtype,
        precisions=choices,
        kvs=kvs,
        quantization=quantization,
    )
    costs = CostBook(
        estimate=estimate,
        profile=profile,
        quantization=quantization,
        alone=alone_kinds(inputs.cluster.devices),
    )
    rounded = _rounded_shares(stored, codes, spec, quantization)
    problem = Problem(
        spec=spec,
        cluster=cluster,
        workload=workload,
        choices=tuple(choices),
        sensitivity=inputs.sensitivity or generic_sensitivity(spec, choices, kvs, rounded=rounded),
        costs=costs,
        theta=inputs.theta,
        objective=inputs.objective,
        quantization=quantization,
        group=limits.positive("--group", inputs.group),
        max_devices=limits.positive_if_given("--max-devices", inputs.max_devices),
        pins=inputs.pins,
        prefill_microbatch=_within(
            "--prefill-microbatch", inputs.prefill_microbatch, workload.batch
        ),
        decode_microbatch=_within("--decode-microbatch", inputs.decode_microbatch, workload.batch),
        offered=layers,
    )
    _require_groups_agree(problem)
    notes = [rounded_note(stored, layers, rounded or {})]
    rounds = not stored or any(
        problem.sensitivity.omega(layer, p) for layer, own in enumerate(layers) for p in own
    )
    if inputs.sensitivity is None and rounds:
        notes.append(GENERIC_NOTE)
    return BuiltProblem(
        problem=problem,
        left_out=(*left_out, *([no_rounding] if no_rounding else ())),
        notes=tuple(n for n in notes if n),
        rates=tuple(rates),
    )


def _without_rounded(
    spec: ModelSpec,
    cluster: Cluster,
    bits: tuple[Precision, ...] | None,
    layers: tuple[tuple[Precision, ...], ...],
) -> tuple[tuple[Precision, ...] | None, tuple[tuple[Precision, ...], ...], str | None]:
    """Return the precisions allowed, in all and of each layer, and what to say of those that go.

    Rounded activations go where a GPU does not run the model with them and others are allowed.
    """

    def kept(own: tuple[Precision, ...]) -> tuple[Precision, ...]:
        return tuple(p for p in own if p.activation_bits == 16) or own

    gpus = [d for d in cluster.devices if not d.spec.is_cpu and d.spec.export_only is None]
    modes: tuple[ExecutionMode, ...] = ("gpu_rounded",) if gpus else ()
    lack = lack_of(spec, modes)
    named = [p for own in (bits or (), *layers) for p in own if p not in kept(own)]
    if lack is None or not named:
        return bits, layers, None
    said = f"no plan has {names_of(list(dict.fromkeys(named)))}: {lack.why}; {lack.remedy}"
    return None if bits is None else kept(bits), tuple(map(kept, layers)), said


def make_problem(
    request: PlanRequest, devices: Cluster | None = None, *, usual_context: int | None = None
) -> tuple[Problem, str | None, list[str]]:
    """Return the problem that a request names, the model's directory, and notes for the user.

    `devices`: instead of those that the request names, what was to be left free taken off.
    `usual_context`: tokens of prompt and answer instead of the request's, fewer of a model that
    has fewer positions.
    """
    early = read_model(request) if _names_model(request) else None
    named = read_devices_of(request)
    found = early or read_model(_with_model_of(named.cluster, request))
    spec, path = found.spec, found.path
    cluster = devices or named.cluster
    if usual_context is not None:
        request = replace(request, context=min(usual_context, spec.max_positions))
    request = _with_prompt_of_context(request)
    limits.check_job(request.batch, request.prompt_len, request.gen_len)
    pins = parse_pins(request.pin, cluster, spec)
    forced = _forced_by(request, spec)
    cluster, left_out = able_devices(cluster, forced, pins)
    profile, remarks = _measured(request, cluster, spec)
    workload = _workload(request, cluster, spec, profile)
    omega = _omega_path(request, cluster, spec)
    sensitivity = read_omega(omega, spec) if omega else None
    too_long = positions_note(spec, workload, names_context=request.context is not None)
    built = build_problem(
        ProblemInputs(
            spec=spec,
            cluster=cluster,
            workload=workload,
            source=found.source,
            bits=None if request.bits is None else parse_bits(request.bits),
            kvs=parse_kv(request.kv),
            profile=profile,
            sensitivity=sensitivity,
            theta=stated_theta(request, cluster) or 0.0,
            objective=request.objective,
            group=request.group,
            max_devices=request.max_devices,
            pins=pins,
            prefill_microbatch=request.prefill_microbatch,
            decode_microbatch=request.decode_microbatch,
            symmetric=request.symmetric,
            weight_group_size=request.weight_group_size,
            head_bits=request.head_bits,
            cpu_activations=request.cpu_activations,
            outliers=request.outliers,
            probe_cpu=request.probe_cpu,
            shares=parse_shares(request.tensor_parallel),
        )
    )
    notes = (
        remarks
        + left_out
        + [*built.left_out]
        + [f"assumed: {line}" for line in named.assumptions]
        + [note for note in (dtype_note(spec, cluster, workload.dtype), too_long) if note]
        + _not_run(spec, cluster, workload)
        + kv_left_out(built.problem, request.kv)
        + _left_to_the_class(path, spec)
        + _tokenizer_lack(path)
        + crowded_notes(built.problem.cluster)
        + [*built.notes]
        + built.cost_notes(workload)
    )
    if request.tensor_parallel is None:
        notes += unmeasured_groups(profile, cluster.devices, spec)
    return built.problem, path, notes


def _forced_by(request: PlanRequest, spec: ModelSpec) -> Forced:
    """Return what a request forces on every device; a dtype that is left open forces nothing."""
    return Forced(
        spec=spec,
        kvs=parse_kv(request.kv),
        dtype=None if request.dtype == "auto" else request.dtype,
        layers=() if request.bits is None else (parse_bits(request.bits),),
        copies=request.speculate if request.speculate in READS_KV4 else None,
        max_len=request.prompt_len + request.gen_len,
    )


def _with_prompt_of_context(request: PlanRequest) -> PlanRequest:
    """Return the request with the prompt that `--context` and `--gen-len` leave."""
    if request.context is None:
        return request
    most = limits.MAX_TOKENS + min(max(request.gen_len, 0), limits.MAX_TOKENS)
    limits.whole("--context", request.context, most)
    if request.context <= request.gen_len:
        raise ValueError(
            f"--context {request.context} has no room for a prompt before the {request.gen_len} "
            "tokens of --gen-len; give a larger --context or a smaller --gen-len"
        )
    return replace(request, prompt_len=request.context - request.gen_len)


def _not_run(spec: ModelSpec, cluster: Cluster, workload: Workload) -> list[str]:
    """Return what of the model is left out, and what this version's runtime does not run yet."""
    notes = spec.left_out_notes()
    if spec.recurrent is not None:
        packed = workload.kv is not KVPrecision.KV16
        if packed:
            notes.append("prefix cache: states of recurrent layers are not kept with --kv below 16")
    notes += [
        f"warning: llmpq-dist does not run on {kind}: export the plan (llmpq-algo export --to "
        f"{engine})"
        for kind, engine in dict.fromkeys((d.kind, d.spec.export_only) for d in cluster.devices)
        if engine is not None
    ]
    gpu = any(not device.spec.is_cpu for device in cluster.devices)
    modes = execution_modes(gpu=gpu, kv=KVPrecision.KV16, drafts=False)
    lacking = lacking_sentence(spec, modes, max_len=workload.max_len)
    notes += [] if lacking is None else [f"warning: {lacking}"]
    dense = dense_note(spec, cluster)
    return notes + ([] if dense is None else [dense])


def dense_note(spec: ModelSpec, cluster: Cluster) -> str | None:
    """Say what few bits and experts cost on GPUs whose tensor cores Triton does not drive."""
    kinds = without_tensor_cores([(device.kind, device.spec) for device in cluster.devices])
    if not kinds:
        return None
    more = ", and experts run one by one" if spec.experts else ""
    return (
        f"{', '.join(kinds)}: on GPUs before Ampere llmpq-dist reads weights of few bits as they "
        "are stored for few rows at once alone (64 on T4s, 16 on V100s, none on older ones); for "
        f"more it makes them dense, which saves memory and no time{more}; times are of that, those "
        "of other engines may be shorter"
    )


def _left_to_the_class(path: str | None, spec: ModelSpec) -> list[str]:
    """Say which numbers a model's configuration leaves to Transformers' class of its model_type."""
    if path is None or not spec.from_class or is_gguf(path):  # whose keys we name ourselves
        return []
    return [
        f"the configuration in '{path}' leaves these to Transformers' class of its model_type: "
        f"{', '.join(spec.from_class)}"
    ]


def _tokenizer_lack(path: str | None) -> list[str]:
    """Return why a GGUF file's texts cannot be run, nothing where they can."""
    if path is None or not is_gguf(path):
        return []
    try:
        require_tokenizer(open_gguf(path))
    except ValueError as error:
        return [str(error)]
    return []


def _dtype_of(measured: CostModel) -> Dtype | None:
    """Return the dtype that all times are of, None where they are of several."""
    dtypes = {entry.dtype for entry in measured.entries}
    return dtypes.pop() if len(dtypes) == 1 else None


def _workload(
    request: PlanRequest, cluster: Cluster, spec: ModelSpec, measured: CostModel | None
) -> Workload:
    """Return the job, in the dtype in which times were measured where none is named."""
    dtype = request.dtype
    if dtype == "auto":
        timed = None if request.costs is None or measured is None else _dtype_of(measured)
        no_bfloat16 = timed == "bfloat16" and without_bfloat16(cluster)
        if no_bfloat16 or (timed == "float16" and spec.overflows_float16):
            timed = None
        dtype = timed or default_dtype(spec, cluster)
    kvs, forced = parse_kv(request.kv), _forced_by(request, spec)
    run = [kv for kv in kvs if not any(forced.lack_of_kv(device, kv) for device in cluster.devices)]
    return Workload(
        batch=request.batch,
        prompt_len=request.prompt_len,
        gen_len=request.gen_len,
        kv=(run or kvs)[0],
        dtype=dtype,
    )


def _measured(
    request: PlanRequest, cluster: Cluster, spec: ModelSpec
) -> tuple[CostModel | None, list[str]]:
    """Return the costs of `--costs`; for this machine, else, those that a run has kept."""
    if request.costs is not None:
        profile = read_costs(request.costs, spec)
        return profile, _timed_exactly(request, cluster, profile)
    if not is_this_machine(cluster):
        return None, []
    kept, notes = cached_costs(spec.fingerprint(), {d.profile_kind for d in cluster.devices})
    notes += assumed(cluster)
    if kept is not None:
        notes.append(f"costs measured here before: {cache_folder() / spec.fingerprint()}")
    return kept, notes + _timed_exactly(request, cluster, kept)


def _timed_exactly(request: PlanRequest, cluster: Cluster, profile: CostModel | None) -> list[str]:
    """Say that a profile timed CPUs with activations that the plan does not have."""
    measured = set(profile.device_kinds if profile is not None else ())
    kinds = sorted({d.profile_kind for d in cluster.devices if d.spec.is_cpu} & measured)
    timed = "exact" if profile is None else profile.cpu_activations
    if request.cpu_activations == timed or not kinds:
        return []
    return [
        f"the times of {', '.join(kinds)} were measured with {timed} activations, the plan's are "
        f"{request.cpu_activations}: llmpq-profile --cpu-activations measures them, or, without "
        "these costs, --probe-cpu"
    ]


def _stored(
    source: Source | None,
    spec: ModelSpec,
    asked: Sequence[Precision] | None,
    kept: Quantization | None,
) -> tuple[StoredLayer, ...]:
    """Return how each layer of a quantised model is stored; nothing where all may have all bits."""
    if source is None or (asked is not None and not tells_layers(source)):
        return ()
    return stored_layers(source, spec, kept=kept) or ()


def _all_of(layers: Sequence[Sequence[Precision]]) -> tuple[Precision, ...]:
    """Return every precision that some layer may have."""
    return tuple(p for p in Precision if any(p in own for own in layers))


def _require_groups_agree(p: Problem) -> None:
    """Refuse a `--group` of layers that have no precision in common."""
    for (start, end), choices in zip(p.groups, p.open, strict=True):
        if not choices.any():
            raise ValueError(
                f"--group {p.group}: layers {start}-{end - 1} are stored at different precisions, "
                "expected a common one; leave --group out"
            )


def _grid(inputs: ProblemInputs, kept: Quantization | None) -> Quantization:
    """Return how weights are stored: as asked, or as a checkpoint's codes are kept."""
    asked, symmetric = inputs.weight_group_size, inputs.symmetric
    if kept is not None:
        return replace(kept, symmetric=symmetric or kept.symmetric)
    size = K_PADDING if asked is None else asked
    if size not in (0, 32, 64, K_PADDING):
        raise ValueError(f"--weight-group-size {size}: expected 128, 64, 32, or 0 for a channel")
    return Quantization(group_size=size or None, symmetric=symmetric)


def _outliers(asked: int | None, choices: Sequence[Precision], spec: ModelSpec) -> int:
    """Return how many channels a w4a4 layer keeps in 8 bits: as many as llmpq-quantize would."""
    if asked is None:
        return default_outliers(spec.hidden) if Precision.W4A4 in choices else 0
    if Precision.W4A4 not in choices:
        raise ValueError(
            "--outliers does nothing without w4a4 among the --bits; add it or leave --outliers out"
        )
    if not 0 <= asked < spec.hidden:
        raise ValueError(
            f"--outliers {asked}: expected 0 to {spec.hidden - 1}, fewer than the {spec.hidden} "
            f"channels of {spec.name}"
        )
    return asked


def _require_few_bits(cluster: Cluster, spec: ModelSpec, outliers: int) -> None:
    """Refuse shares with which a device has only outliers of a w4a4 matrix."""
    for group in cluster.devices:
        members = members_of(spec, group.shares) if group.joined else ()
        for device, member in zip(group.joined, members, strict=True):
            if not member.has_few_bits(outliers):
                raise ValueError(
                    f"tensor parallel of shares {':'.join(map(str, group.shares))}: {device.name} "
                    f"would have only outliers of w4a4 layers, which are the last {outliers} "
                    "inputs of a matrix; give it a larger share, or fewer --outliers"
                )


def read_costs(path: str, spec: ModelSpec) -> CostModel:
    """Read a profile and check that it was made for this model."""
    profile = CostModel.load_json(path)
    if profile.model_fingerprint != spec.fingerprint():
        raise ValueError(
            f"'{path}' was profiled for model {profile.model} ({profile.model_fingerprint}), got "
            f"{spec.name} ({spec.fingerprint()}); profile it with llmpq-profile --model"
        )
    for entry in profile.entries:
        if entry.part == "layer" and not entry.seconds(v=1, length=1) > 0:
            raise ValueError(
                f"'{path}': a {entry.precision.value} layer takes no time in {entry.phase.value} "
                f"on {entry.device_kind}, expected seconds above 0; profile it anew with "
                "llmpq-profile"
            )
    return profile


def read_omega(path: Path, spec: ModelSpec) -> Sensitivity:
    """Read an omega file and check that it was made for this model."""
    listed = Sensitivity.load(path, num_layers=spec.num_layers)
    listed.require_model(spec.name, spec.fingerprint(), where=str(path))
    return listed


def open_head(
    choices: Sequence[Precision], asked: Literal[8, 16] | None = None
) -> Literal[8, 16] | None:
    """Return the output matrix's bits: as asked, or none (8 on CPUs) if layers are rounded."""
    return asked or (None if any(p.weight_bits <= 8 for p in choices) else 16)


def parse_bits(text: str) -> tuple[Precision, ...]:
    """Read `3,4,8,16` or `w8a8,w4a16`."""
    return tuple(dict.fromkeys(map(Precision.parse, _listed(text, "--bits", "4 or 3,4,8"))))


def _listed(text: str, flag: str, example: str) -> list[str]:
    """Return what stands between commas, of which there may be one too many."""
    parts = [part for part in text.replace(" ", "").split(",") if part]
    if not parts:
        raise ValueError(f"{flag} is empty; expected bits such as {example}, or leave it out")
    return parts


def parse_kv(text: str) -> tuple[KVPrecision, ...]:
    """Read `16,8`; most precise first."""
    found = set(map(KVPrecision.parse, _listed(text, "--kv", "8 or 16,8")))
    return tuple(sorted(found, key=lambda kv: -kv.mean_bits))


def runs_kv(p: Problem, kv: KVPrecision) -> bool:
    """Whether all of the job's devices run its model with a KV cache of these bits."""
    return not any(_lacks_of_kv(p, kv))


def _lacks_of_kv(p: Problem, kv: KVPrecision) -> Iterator[Lack]:
    """Yield why devices of a job do not run a KV cache of these bits; an exported plan may have it.

    16 bits are what a refusal offers: never asked about.
    """
    work = p.workload
    forced = Forced(spec=p.spec, kvs=(kv,), dtype=work.dtype, max_len=work.max_len)
    for device in p.cluster.devices:
        lack = forced.lack_of_kv(device, kv)
        if lack is not None:
            yield lack


def kvs_to_plan(p: Problem, text: str) -> tuple[KVPrecision, ...]:
    """Return the KV bits of `--kv` to choose among, most precise first.

    Where others are allowed, too, none that one of the job's devices does not run.
    """
    kvs = parse_kv(text)
    return tuple(kv for kv in kvs if kv is KVPrecision.KV16 or runs_kv(p, kv)) or kvs


def kv_left_out(p: Problem, text: str) -> list[str]:
    """Say which KV bits that are allowed no plan has, and why."""
    kept = kvs_to_plan(p, text)
    gone = [kv for kv in parse_kv(text) if kv not in kept]
    if not gone:
        return []
    lack = next(_lacks_of_kv(p, min(gone, key=lambda kv: kv.is_apart)))
    why = f"{lack.why}; {lack.remedy}"
    if lack.why == PACKED_KV:
        why = str(packed_kv_sentence((d.kind, d.spec) for d in p.cluster.devices))
    return [f"no plan has a KV cache of {kv_bits_of(gone)}: {why}"]


def default_bits(
    sensitivity: Sensitivity | None, profile: CostModel | None, cluster: Cluster
) -> tuple[Precision, ...]:
    """Return the weight-only precisions that the omega file and the profile both know.

    Three bits lose so much that a model must be asked for with them (`--bits`).
    """
    allowed = [p for p in WEIGHT_ONLY if p is not Precision.W3A16]
    if sensitivity is not None:
        listed = {*sensitivity.weights, Precision.W16A16}
        allowed = [p for p in allowed if p in listed]
    kinds = {d.profile_kind for d in cluster.devices}
    for kind in kinds & set(profile.device_kinds if profile else ()):
        assert profile is not None
        known = {
            e.precision for e in profile.entries if e.device_kind == kind and e.part == "layer"
        }
        allowed = [p for p in allowed if p in known]
    if not allowed:
        raise ValueError("the costs and the omega file have no precision in common; give --bits")
    return tuple(allowed)


def generic_sensitivity(
    spec: ModelSpec,
    choices: Sequence[Precision],
    kvs: Sequence[KVPrecision],
    *,
    rounded: Mapping[Precision, Sequence[float]] | None = None,
) -> Sensitivity:
    """Return omega = (15 / (2^bits - 1))^2 / L: the variance of rounding, equal for all layers.

    `rounded`: of each layer, the share of weights that a precision rounds, where a checkpoint has
    codes that it keeps; what those lose, the checkpoint has lost.
    """
    layers = spec.num_layers

    def column(bits: int) -> tuple[float, ...]:
        return ((0.0 if bits >= 16 else (15 / (2**bits - 1)) ** 2 / layers),) * layers

    def of_weights(p: Precision) -> tuple[float, ...]:
        whole = column(min(p.weight_bits, p.activation_bits))
        if rounded is None or p not in rounded:
            return whole
        return tuple(loss * share for loss, share in zip(whole, rounded[p], strict=True))

    def of_cache(kv: KVPrecision) -> tuple[float, ...]:
        both = zip(column(kv.key_bits), column(kv.value_bits), strict=True)
        return tuple((keys + values) / 2 / 4 for keys, values in both)

    return Sensitivity(
        indicator="generic",
        model=spec.name,
        num_layers=layers,
        weights={
            p: of_weights(p) for p in dict.fromkeys((*choices, Precision.W8A16, Precision.W4A16))
        },
        kv={kv: of_cache(kv) for kv in kvs},
    )


def _rounded_shares(
    stored: Sequence[StoredLayer],
    codes: Sequence[LayerCodes],
    spec: ModelSpec,
    quantization: Quantization,
) -> dict[Precision, tuple[float, ...]] | None:
    """Return of each layer the share of weights that each precision rounds; None: all weights.

    Layers whose codes say nothing of linears (Atom's) are kept where they are served as they are
    stored.
    """
    if not stored:
        return None
    found = {}
    for precision in Precision:
        scheme = quantization.scheme(precision)
        if scheme is not None:
            shares = rounded_shares(codes, spec, scheme)
            found[precision] = tuple(
                rounded_of_gguf(layer, scheme)
                if layer.kinds
                else share
                if own
                else float(layer.stored is not precision)
                for share, own, layer in zip(shares, codes, stored, strict=True)
            )
    return found


def parse_pins(
    texts: Sequence[str], cluster: Cluster, spec: ModelSpec
) -> dict[str, tuple[int, int]]:
    """Read `0-3=T4-0` (inclusive) or `5=node:1`; a device's pins are joined."""
    pins: dict[str, tuple[int, int]] = {}
    for text in texts:
        layers, equals, name = text.partition("=")
        low, _, high = layers.partition("-")
        if not (equals and low.isdecimal() and (high or low).isdecimal()):
            raise ValueError(f"--pin {text}: expected LAYERS=DEVICE, such as 0-3=T4-0")
        start, end = int(low), int(high or low) + 1
        if end <= start:
            raise ValueError(f"--pin {text}: expected the first layer before the last")
        if end > spec.num_layers:
            raise ValueError(f"--pin {text}: {spec.name} has layers 0-{spec.num_layers - 1}")
        device = cluster.device(name).name
        old = pins.get(device, (start, end))
        pins[device] = (min(start, old[0]), max(end, old[1]))
    for (one, its), (other, others) in combinations(pins.items(), 2):
        if its[0] < others[1] and others[0] < its[1]:
            raise ValueError(
                f"--pin gives layers {its[0]}-{its[1] - 1} to {one} and {others[0]}-"
                f"{others[1] - 1} to {other}, a device's pins joined; give each layer to one device"
            )
    return pins


def _names_model(request: PlanRequest) -> bool:
    return request.model is not None or request.model_name is not None


def _with_model_of(cluster: Cluster, request: PlanRequest) -> PlanRequest:
    """Return the request with the cluster's own model where it names none."""
    if request.model or request.model_name or request.model_size or not cluster.planning.model:
        return request
    return replace(request, model=cluster.planning.model)


def _omega_path(request: PlanRequest, cluster: Cluster, spec: ModelSpec) -> Path | None:
    """Return the omega file: the flag, or the cluster's hint when it is for this model."""
    if request.omega_file is not None:
        return Path(request.omega_file)
    hint = cluster.planning
    if request.cluster and hint.omega_file and hint.model == spec.name:
        return Path(request.cluster).parent / hint.omega_file
    return None


def stated_theta(request: PlanRequest, cluster: Cluster) -> float | None:
    """Return seconds per unit of omega: the flag, or the cluster's hint; None if neither says."""
    asked, hint = request.theta, cluster.planning.theta
    if asked is None and (hint is None or request.prefer is not None):
        return None
    where = "--theta" if asked is not None else f"'{request.cluster}': planning.theta"
    theta = hint if asked is None else asked
    assert theta is not None, "one of the two says it"
    return float(limits.within(where, theta, limits.MAX_THETA, " seconds per unit of omega"))


def _within(flag: str, value: int | None, batch: int) -> int | None:
    if value is not None and not 1 <= value <= batch:
        raise ValueError(f"{flag} must be between 1 and the batch of {batch}, got {value}")
    return value
