"""`llmpq-profile tune`: the products of a model, searched on this GPU."""

from __future__ import annotations

import sys

from llmpq.errors import ExitCode
from llmpq.models.model_spec import ModelSpec
from llmpq.plans.plan import Plan, QuantizationForm
from llmpq.precision import Precision
from llmpq.profiler.cli.flags import TuneRequest, job_lengths
from llmpq.profiler.timing.cases import model_spec
from llmpq.runtime.backends.tune_products import TuneJob, job_of, line, tune, weight_only
from llmpq.workload import Workload


def main(request: TuneRequest) -> int:
    """Tune and print a line a product."""
    spec = model_spec(request.model)
    for found in tune(make_job(request, spec)):
        sys.stdout.write(line(found) + "\n")
    return ExitCode.DONE


def make_job(request: TuneRequest, spec: ModelSpec) -> TuneJob:
    """Return what is tuned: what the plan says, or the flags."""
    if request.seconds <= 0:
        raise ValueError(f"--seconds must be above 0, got {request.seconds:g}")
    if request.plan is not None:
        plan = Plan.load_json(request.plan)
        plan.require_model(spec)
        return job_of(plan, spec, request.seconds)
    if request.batch < 1:
        raise ValueError(f"--batch must be at least 1, got {request.batch}")
    prompt_len, gen_len = job_lengths(request.job)
    precisions = [Precision.parse(name) for name in request.bits.split(",")]
    workload = Workload(
        batch=request.batch, prompt_len=prompt_len, gen_len=gen_len, dtype=request.dtype
    )
    return TuneJob(
        spec=spec,
        precisions=weight_only(precisions),
        form=QuantizationForm(symmetric=request.symmetric),
        workload=workload,
        prefill_microbatch=request.batch,
        decode_microbatch=request.batch,
        seconds=request.seconds,
    )
