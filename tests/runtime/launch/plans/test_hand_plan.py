"""Plans that nobody planned: what they say of the output matrix, on CPUs and on GPUs."""

import pytest

from llmpq.devices.cluster import Cluster
from llmpq.models.model_spec import ModelSpec
from llmpq.plans.plan import QuantizationForm
from llmpq.precision import Precision
from llmpq.runtime.launch.plans.auto_plan import able_to
from llmpq.runtime.launch.plans.complete_plan import complete_plan
from llmpq.runtime.launch.plans.manual_plan import manual_plan
from llmpq.runtime.options.engine_options import EngineOptions
from llmpq.runtime.text.made_with import made_by
from llmpq.workload import Workload

pytestmark = pytest.mark.pure
SPEC = ModelSpec.by_name("llama-3.2-1b")


def planned(precision, head_bits=None, **options):
    job = Workload(batch=1, prompt_len=8, gen_len=8)
    form = QuantizationForm(head_bits=head_bits)
    return manual_plan(SPEC, job, precision=precision, quantization=form, **options)


@pytest.mark.parametrize(
    "precision, asked, bits",
    [
        (Precision.W4A16, None, 8),
        (Precision.W8A8, None, 8),
        (Precision.W16A16, None, 16),
        (Precision.W4A16, 16, 16),
        (Precision.W16A16, 8, 8),
        ([Precision.W16A16] * 15 + [Precision.W3A16], None, 8),
    ],
)
def test_the_output_matrix_has_eight_bits_where_a_layer_is_rounded(precision, asked, bits):
    assert planned(precision, asked).settings().head_bits == bits
    assert planned(precision, asked, splits=[8]).settings().head_bits == bits


def test_a_gpu_keeps_it_whole():
    plan = planned(Precision.W4A16, splits=[8])
    gpu = {"kind": "A100-40GB", "threads": None}
    last = plan.stages[-1].model_copy(update=gpu)
    assert not last.is_cpu
    mixed = plan.model_copy(update={"stages": (plan.stages[0], last)})
    assert mixed.settings().head_bits == 16
    first = plan.stages[0].model_copy(update=gpu)
    assert plan.model_copy(update={"stages": (first, plan.stages[1])}).settings().head_bits == 8


@pytest.mark.parametrize(("kind", "runs"), [("V100-32GB", False), ("A100-40GB", True)])
def test_a_packed_cache_is_refused_before_anything_is_loaded(kind, runs):
    plan = planned(Precision.W16A16)
    on_gpu = plan.stages[0].model_copy(update={"kind": kind, "threads": None})
    plan = plan.model_copy(update={"stages": (on_gpu,)})
    for options in (EngineOptions(kv_cache_dtype="kv8"), EngineOptions(speculate="kv4")):
        if runs:
            complete_plan(plan, SPEC, options)
            continue
        with pytest.raises(ValueError, match=rf"before Ampere \({kind}\): plan with --kv 16"):
            complete_plan(plan, SPEC, options)
    complete_plan(plan, SPEC, EngineOptions())


@pytest.mark.parametrize(
    "asked", [{"kv_cache_dtype": "kv8"}, {"speculate": "kv4"}, {"dtype": "bfloat16"}]
)
def test_a_plan_made_here_is_of_the_devices_that_run_what_is_asked(asked, caplog):
    devices = [{"kind": "V100-32GB"}, {"kind": "A100-40GB"}]

    def of(some):
        return Cluster.parse_data(
            {"name": "x", "nodes": [{"name": "n", "devices": some}]}, where=""
        )

    cluster = of(devices)
    assert able_to(SPEC, EngineOptions(), cluster) is cluster
    (left,) = able_to(SPEC, EngineOptions(**asked), cluster).devices
    assert (left.kind, left.index) == ("A100-40GB", 1)
    assert "V100-32GB left out: " in caplog.text
    with pytest.raises(ValueError, match="V100-32GB"):
        able_to(SPEC, EngineOptions(**asked), of(devices[:1]))


def test_answers_name_it(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert "output matrix in 8 bits" in made_by(planned(Precision.W4A16), tmp_path)["weights"]
    assert "output matrix" not in made_by(planned(Precision.W4A16, 16), tmp_path)["weights"]
