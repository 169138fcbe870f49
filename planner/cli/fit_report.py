"""Whether a model fits devices, how far, how fast, and what would make it fit: counted, no search.

The bytes are a plan's, which the runtime allocates by (llmpq/sizes/memory.py); the times are those
of the quickest simple plan (planner/exact/start/starts.py), so that `llmpq-algo plan` finds no
slower one. Of the bits that are allowed the most precise that fit are taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from llmpq.devices.cluster import Device
from llmpq.errors import DoesNotFitError
from llmpq.models.model_spec import ModelSpec
from llmpq.planner.check.refusal import (
    PlanRefusal,
    counted_plan,
    refusal_of,
    repriced,
    too_big_in_any_chunks,
)
from llmpq.planner.cli.own_dtype import instead_of_float32, where_unused
from llmpq.planner.cli.report import mtp_notes
from llmpq.planner.cli.what_if import share_of
from llmpq.planner.evaluate.fits import longest_context
from llmpq.planner.evaluate.objective import job_time, sum_omega
from llmpq.planner.exact.start.starts import quick_plan
from llmpq.planner.problem.make_problem import (
    GENERIC_NOTE,
    kvs_to_plan,
    make_problem,
    runs_kv,
)
from llmpq.planner.problem.outcome import Assignment
from llmpq.planner.problem.problem import Problem
from llmpq.planner.problem.requests import FITS_CONTEXT, FitsRequest, PlanRequest
from llmpq.planner.problem.stored_precisions import stored_line
from llmpq.planner.solving.methods import SolveOptions
from llmpq.planner.solving.plan_search import search_plan, with_head_of_16_bits
from llmpq.plans.plan import Plan, StagePlan
from llmpq.plans.prefix_states import prefix_notes
from llmpq.precision import WEIGHT_ONLY, KVPrecision, Precision, bits_of, kv_bits_of
from llmpq.sizes.kv_format import BLOCK_TOKENS
from llmpq.sizes.pool_size import planned_kv_bytes
from llmpq.sizes.state_size import state_bytes

USUAL_BATCH = 8
"""Requests at once that are looked at beside a single one, where no batch is asked for."""
LISTED_KV = (KVPrecision.KV16, KVPrecision.KV8, KVPrecision.KV4)
_Counted = tuple[Problem, Assignment]
"""A job in the chunks that it needs, and a plan of it."""
SEARCH_S = 1.0
"""Seconds of search where counting neither finds a plan nor proves that there is none."""


@dataclass(frozen=True, kw_only=True)
class DeviceFit:
    """What one device holds of the plan; zeros and no layers where it is left out."""

    device: str
    kind: str
    layers: tuple[int, int] | None
    """The first, and the one behind the last."""
    memory_bytes: int
    reserve_bytes: int
    """Left free: for a screen, or what others hold of it now."""
    weights_bytes: int = 0
    embedding_bytes: int = 0
    """Embedding on the first stage, norm and head on the last."""
    kv_bytes: int = 0
    """All requests' keys, values and states."""
    kv_bytes_per_token: int = 0
    state_bytes_per_request: int = 0
    """Of recurrent layers, whatever the request's length."""
    prefix_bytes: int = 0
    """States of recurrent layers kept of prefixes, for which all devices have room."""
    workspace_bytes: int = 0
    context_bytes: int = 0
    """What CUDA and the framework take for themselves."""
    total_bytes: int = 0
    free_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class BatchFit:
    """What some requests at once would get."""

    batch: int
    longest_context: int
    """Tokens of each, prompt and answer together; 0: none fits."""
    first_token_s: float | None = None
    """Until the last of them has its first token; None where the context asked for does not fit."""
    tokens_per_s: float | None = None
    """All of them together, decoding at the context asked for."""


@dataclass(frozen=True, kw_only=True)
class BitsFit:
    """One choice of bits."""

    weights: str
    """`8 bits`, `w8a8`, or a mix as a checkpoint stores it."""
    kv: str
    flags: str
    """Flags that allow it, where those given do not: `--kv 8`; empty where they do."""
    fits: bool
    """All requests asked for."""
    quality_loss: float
    loads: tuple[BatchFit, ...]


@dataclass(frozen=True, kw_only=True)
class FitReport:
    """The answer to `llmpq-algo fits`."""

    model: str
    cluster: str
    dtype: str
    batch: int
    context: int
    max_context: int
    """The model's own longest."""
    fits: bool
    form: str | None
    """The bits of the plan that is shown: the most precise allowed that fit."""
    kv_bytes_per_token: int
    """All devices together, at the bits shown or, where nothing fits, at those nearest to it."""
    state_bytes_per_request: int
    window_bytes_per_request: int
    """Of a long request: what layers with a window keep, whatever its length."""
    devices: tuple[DeviceFit, ...]
    forms: tuple[BitsFit, ...]
    estimated: bool
    """Whether any time is an estimate from the table of devices."""
    indicator: str
    """What quality losses come from."""
    engines: str | None
    """Several engines, each on a share of the devices, where they are faster."""
    said: str
    """The answer in one sentence."""
    short_device: str | None = None
    short_bytes: int = 0
    remedies: tuple[str, ...] = ()
    """Changes that fit, cheapest first; each was planned."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class FitAnswer:
    """The report, and the plan whose bytes it shows; none where nothing fits."""

    report: FitReport
    plan: Plan | None
    refusal: str | None
    """One sentence: what is short and what fits."""


def fit_answer(request: FitsRequest) -> FitAnswer:
    """Return what fits of a request's model on its devices; `ValueError` for what is wrong."""
    asked = plan_request(request)
    says_length = request.context is not None or request.prompt_len is not None
    usual = None if says_length else FITS_CONTEXT
    problem, path, notes = make_problem(asked, usual_context=usual)
    problem, notes = instead_of_float32(asked, problem, notes, usual_context=usual)
    if problem.offered and asked.bits is None:
        notes = [*notes, stored_line(path or problem.spec.name, problem.offered)]
    kvs = kvs_to_plan(problem, asked.kv)
    context = problem.workload.prompt_len + problem.workload.gen_len
    rows = list(_rows(problem, kvs, listed=request.kv is None))
    batches = (1, problem.workload.batch if problem.workload.batch > 1 else USUAL_BATCH)
    forms, best = [], None
    for row in rows:
        found, hopeless = None, too_big_in_any_chunks(row.problem)
        if not hopeless:
            found = quick_plan(row.problem)
        if found is None and row.allowed and not hopeless:
            found = _searched(row.problem)
        if found is not None and row.allowed:
            loss = sum_omega(*found)
            best = (loss, found) if best is None or loss < best[0] else best
        forms.append(_form(row, batches, context, found))
    plan, refusal, dtype = None, None, problem.workload.dtype
    if best is None:
        refusal = refusal_of(problem, kvs, names_context=request.prompt_len is None)
    else:
        plan = counted_plan(*best[1], model_path=path)
        dtype, notes = where_unused(asked, problem, plan, notes, usual_context=usual)
        notes = [*notes, *mtp_notes(plan, problem.spec), *prefix_notes(plan, problem.spec)]
    return FitAnswer(
        report=replace(_report(problem, rows, tuple(forms), plan, refusal, notes), dtype=dtype),
        plan=plan,
        refusal=None if refusal is None else refusal.text,
    )


def plan_request(request: FitsRequest) -> PlanRequest:
    """Return what `llmpq-algo plan` would be asked for the same requests."""
    own = (
        "model",
        "model_name",
        "model_size",
        "devices",
        "cluster",
        "device_names",
        "device_numbers",
        "from_ray",
        "batch",
        "dtype",
        "bits",
        "symmetric",
        "weight_group_size",
        "head_bits",
        "reserve",
        "costs",
        "omega_file",
        "gpu_memory_utilization",
        "probe_cpu",
    )
    same = {name: getattr(request, name) for name in own}
    lengths: dict[str, Any] = {"context": request.context, "gen_len": request.gen_len}
    if request.prompt_len is not None:
        lengths["prompt_len"] = request.prompt_len
    return PlanRequest(kv=request.kv or "16", **lengths, **same)


@dataclass(frozen=True, kw_only=True)
class _Row:
    """A job at one choice of bits."""

    problem: Problem
    flags: str

    @property
    def allowed(self) -> bool:
        """Whether the flags that were given allow it."""
        return not self.flags


def _rows(p: Problem, kvs: Sequence[KVPrecision], *, listed: bool) -> Iterator[_Row]:
    """Yield the job at each choice of bits worth looking at, most precise first.

    Those allowed and, `listed`, a KV cache of fewer bits, not below the weights'; 3 bits where
    they may be chosen.
    """
    more = [kv for kv in LISTED_KV if kv not in kvs and runs_kv(p, kv)] if listed else []
    all_kvs = sorted({*kvs, *more}, key=lambda kv: -kv.mean_bits)
    choices: list[tuple[Precision, ...]]
    if p.offered:
        p = repriced(p, all_kvs)
        common = [c for b, c in enumerate(p.choices) if p.open[:, b].all()]
        choices = [(c,) for c in common] or [p.choices]
    else:
        own = p.choices
        weights = sorted({*own, Precision.W3A16} if _usual(own) else own, key=_precise)
        p = repriced(p.with_changes(choices=tuple(weights)), all_kvs)
        choices = [(choice,) for choice in weights]
    allowed = {c for c in p.choices} if p.offered else set(own)
    for choice in choices:
        for kv in all_kvs:
            if kv not in kvs and kv.mean_bits < min(c.weight_bits for c in choice):
                continue
            job = p.with_job(choices=choice, kv=kv)
            if job.offered:
                job = job.with_changes(
                    offered=tuple(choice if len(choice) == 1 else o for o in p.offered)
                )
            if choice == (Precision.W16A16,) and job.quantization.head_bits is None:
                job = with_head_of_16_bits(job)
            bits = "" if set(choice) <= allowed else f"--bits {choice[0].weight_bits}"
            packed_kv = "" if kv in kvs else f"--kv {kv.typed}"
            yield _Row(problem=job, flags=" ".join(filter(None, (bits, packed_kv))))


def _usual(choices: Sequence[Precision]) -> bool:
    """Whether the choices are the default ones: all weight-only precisions but 3 bits."""
    return set(choices) == set(WEIGHT_ONLY) - {Precision.W3A16}


def _precise(precision: Precision) -> tuple[int, int]:
    return -precision.weight_bits, -precision.activation_bits


def _searched(p: Problem) -> _Counted | None:
    """Return a plan that a short search finds, where counting is not enough."""
    with suppress(DoesNotFitError):
        found = search_plan(p, SolveOptions(time_limit_s=SEARCH_S, gap=0.1))
        return found.problem, found.outcome.assignment
    return None


def _form(row: _Row, batches: Sequence[int], context: int, found: _Counted | None) -> BitsFit:
    """`found`: the plan of the requests asked for."""
    p = row.problem
    own = p.workload.batch
    return BitsFit(
        weights=_weights(p),
        kv=p.kv.value,
        flags=row.flags,
        fits=found is not None,
        quality_loss=float(p.open_omega.min(axis=1).sum()),
        loads=tuple(
            _load(p.with_job(batch=batch), context, found if batch == own else None)
            for batch in batches
        ),
    )


def _weights(p: Problem) -> str:
    if len(p.choices) == 1:
        return p.choices[0].title
    return bits_of([own[0] for own in p.offered])


def _load(p: Problem, context: int, found: _Counted | None) -> BatchFit:
    """Return the longest context of a batch, and its times at the context asked for."""
    longest = longest_context(p, max(p.spec.max_positions, context))
    if found is not None:  # by a search where counting finds less
        longest = max(longest, context)
    load = BatchFit(batch=p.workload.batch, longest_context=longest)
    found = found or (quick_plan(p) if longest >= context else None)
    return load if found is None else replace(load, **_times(*found))


def _times(p: Problem, a: Assignment) -> dict[str, Any]:
    times, work = job_time(p, a), p.workload
    steps = work.batch * (work.gen_len - 1)
    rate = steps / times.decode_s if times.decode_s > 0 else None
    return {"first_token_s": times.prefill_s, "tokens_per_s": rate}


def _report(
    p: Problem,
    rows: Sequence[_Row],
    forms: tuple[BitsFit, ...],
    plan: Plan | None,
    refusal: PlanRefusal | None,
    notes: Sequence[str],
) -> FitReport:
    work = p.workload
    shown = _job_of(p, plan) if plan is not None else _nearest(rows)
    stages = {} if plan is None else {stage.device: stage for stage in plan.stages}
    devices = tuple(_device(shown, d, stages.get(d.name)) for d in p.cluster.devices)
    layers = range(p.spec.num_layers)
    form = None if plan is None else f"{bits_of(plan.precisions)}, {work_kv(plan)}"
    return FitReport(
        model=p.spec.name,
        cluster=p.cluster.name,
        dtype=work.dtype,
        batch=work.batch,
        context=work.prompt_len + work.gen_len,
        max_context=p.spec.max_positions,
        fits=plan is not None,
        form=form,
        kv_bytes_per_token=token_bytes(shown, layers),
        state_bytes_per_request=_state_bytes(shown, layers),
        window_bytes_per_request=_window_bytes(shown, layers),
        devices=devices,
        forms=forms,
        estimated=plan is None or plan.predicted is None or plan.predicted.estimated,
        indicator=p.sensitivity.indicator,
        engines=None if plan is None else _engines(shown, plan),
        said=_sentence(p, plan) if refusal is None else refusal.said,
        short_device=None if refusal is None else refusal.device,
        short_bytes=0 if refusal is None else refusal.missing_bytes,
        remedies=() if refusal is None else refusal.ways,
        notes=(*(n for n in notes if n != GENERIC_NOTE), *_packed_notes(p.spec, forms)),
    )


def _packed_notes(spec: ModelSpec, forms: Sequence[BitsFit]) -> Iterator[str]:
    """Yield a note where a KV cache of fewer bits leaves shorter contexts than one of 16."""
    full = {form.weights: form.loads for form in forms if form.kv == KVPrecision.KV16.value}
    less = [
        KVPrecision(form.kv)
        for form in forms
        for own, of_16 in zip(form.loads, full.get(form.weights, ()), strict=False)
        if own.longest_context < of_16.longest_context
    ]
    why = ""
    if spec.widest_window:
        why = ": in fewer bits layers with a window keep all tokens, in 16 the newest alone"
    elif spec.latent is not None:
        why = ": in fewer bits latents are kept twice, as keys and as values"
    if why and not full:
        yield f"contexts may be longer with --kv 16{why}"
    if less:
        bits = kv_bits_of(list(dict.fromkeys(less)))
        yield f"contexts are shorter with a KV cache of {bits} than of 16{why}"


def work_kv(plan: Plan) -> str:
    """Return the KV cache's bits in words."""
    return f"KV cache in {plan.workload.kv.title}"


def _sentence(p: Problem, plan: Plan | None) -> str:
    assert plan is not None, "what fits has a plan"
    work = plan.workload
    return (
        f"{p.spec.name} fits {p.cluster.name}: {work.requests} of "
        f"{work.prompt_len + work.gen_len:,} tokens with weights in {bits_of(plan.precisions)} "
        f"and a {work_kv(plan)}"
    )


def _job_of(p: Problem, plan: Plan) -> Problem:
    """Return the job as a plan has it."""
    return p.with_changes(
        workload=plan.workload, chunk=plan.prefill_chunk or p.chunk, choices=p.choices
    )


def _nearest(rows: Sequence[_Row]) -> Problem:
    """Return the allowed form of the fewest bits."""
    return [row.problem for row in rows if row.allowed][-1]


def _device(p: Problem, device: Device, stage: StagePlan | None) -> DeviceFit:
    empty = DeviceFit(
        device=device.name,
        kind=device.kind,
        layers=None,
        memory_bytes=device.memory_bytes,
        reserve_bytes=device.reserve_bytes,
        free_bytes=device.limit_bytes,
    )
    if stage is None or stage.memory is None:
        return empty
    memory, layers = stage.memory, range(*stage.layers)
    return replace(
        empty,
        layers=stage.layers,
        weights_bytes=memory.weights_bytes,
        embedding_bytes=memory.embedding_bytes,
        kv_bytes=memory.kv_bytes,
        kv_bytes_per_token=token_bytes(p, layers),
        state_bytes_per_request=_state_bytes(p, layers),
        prefix_bytes=memory.prefix_bytes,
        workspace_bytes=memory.workspace_bytes,
        context_bytes=memory.context_bytes,
        total_bytes=memory.total_bytes,
        free_bytes=device.limit_bytes - memory.total_bytes,
    )


def token_bytes(p: Problem, layers: Sequence[int]) -> int:
    """Return by how much a token more of every request makes the layers' KV larger, each.

    Of the longest requests: layers with a window, or a recurrent state, take no more for it.
    """
    work = p.workload
    long = work.model_copy(update={"gen_len": work.gen_len + p.spec.max_positions})
    longer = long.model_copy(update={"gen_len": long.gen_len + BLOCK_TOKENS})
    counted = [
        planned_kv_bytes(p.spec, job, layers, chunk=p.chunk, prefill_microbatch=1)
        for job in (long, longer)
    ]
    return (counted[1] - counted[0]) // (work.batch * BLOCK_TOKENS)


def _window_bytes(p: Problem, layers: Sequence[int]) -> int:
    """Return what a long request takes in layers with a window; 0 where they keep all tokens."""
    if p.workload.kv is not KVPrecision.KV16 or not p.spec.widest_window:
        return 0
    tokens = BLOCK_TOKENS * -(-p.spec.max_positions // BLOCK_TOKENS)
    one = p.workload.model_copy(update={"batch": 1, "prompt_len": 1, "gen_len": tokens})
    held = planned_kv_bytes(p.spec, one, layers, chunk=p.chunk, prefill_microbatch=1)
    grown = tokens * token_bytes(p, layers)
    return max(0, held - grown - _state_bytes(p, layers))


def _state_bytes(p: Problem, layers: Sequence[int]) -> int:
    return state_bytes(p.spec, layers, slots=1, dtype_bytes=p.workload.dtype_bytes)


def _engines(p: Problem, plan: Plan) -> str | None:
    """Return what several engines on equal shares of the devices would give, if that is more."""
    shares = math.gcd(*(cls.count for cls in p.classes))
    batch, own = p.workload.batch, _rate_of(plan)
    kept = dict.fromkeys(plan.precisions)
    job = p.with_changes(choices=tuple(kept)) if not p.offered else p
    best: tuple[float, str] | None = None
    for engines in range(2, min(shares, batch) + 1):
        if shares % engines:
            continue
        each = -(-batch // engines)
        one = job.with_job(cluster=share_of(p, engines), batch=each)
        found = quick_plan(one) if not too_big_in_any_chunks(one) else None
        rate = None if found is None else _times(*found)["tokens_per_s"]
        if rate is not None and (best is None or engines * rate > best[0]):
            where = f"{engines} engines, each on {one.cluster.name} with {each} requests at once"
            best = (engines * rate, where)
    if best is None or own is None or best[0] <= own:
        return None
    return f"{best[1]}: {best[0]:.0f} tokens/s instead of {own:.0f}"


def _rate_of(plan: Plan) -> float | None:
    work, predicted = plan.workload, plan.predicted
    if predicted is None or predicted.decode_s <= 0:
        return None
    return work.batch * (work.gen_len - 1) / predicted.decode_s
