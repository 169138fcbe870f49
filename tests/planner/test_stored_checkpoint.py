"""A quantised directory is planned at the precisions its layers are stored in."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from llmpq.models.model_spec import ModelSpec
from llmpq.planner.__main__ import main
from llmpq.planner.evaluate.fits import fits
from llmpq.planner.exact.search import solve_exact
from llmpq.planner.front.front import pareto_front
from llmpq.planner.ilp.solve import solve_ilp
from llmpq.planner.problem.outcome import Infeasible
from llmpq.planner.problem.problem import Problem
from llmpq.planner.problem.stored_precisions import StoredLayer, offered, stored_layers
from llmpq.planner.solving.methods import PLANNERS, SolveOptions, solve
from llmpq.planner.solving.problem_json import parse_problem, problem_data
from llmpq.plans.plan import Plan
from llmpq.precision import Precision
from reference.brute_force import brute_force
from reference.random_problems import random_problem

Seeds = Callable[[Sequence[int]], Sequence[int]]

pytestmark = [pytest.mark.pure, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "examples" / "demo-7m"
CLUSTER = ["--cluster", str(ROOT / "examples" / "cpu-two-stages.yaml")]
JOB = ["--global-bz", "4", "--s", "16", "--n", "4"]
W16A16, W8A16, W4A16, W3A16, W8A8, W4A4 = Precision
LAYERS = 8
K = 256

Tensors = dict[str, tuple[str, list[int], bytes]]
"""Name -> dtype, shape, bytes (nothing where no one reads them)."""


def _run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(list(words))
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def _save(path: Path, tensors: Tensors, metadata: Mapping[str, str]) -> None:
    """Write a safetensors file."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    data = b""
    for name, (dtype, shape, content) in tensors.items():
        span = [len(data), len(data) + len(content)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": span}
        data += content
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def _packed(stem: str, bits: int) -> Tensors:
    shape = K.to_bytes(8, "little") * 2
    return {
        f"{stem}.weight_packed": ("I32", [K, K * bits // 32], b""),
        f"{stem}.weight_shape": ("I64", [2], shape),
    }


def _linear(layer: int, precision: Precision) -> tuple[Tensors, dict[str, str]]:
    """Return a layer's linear in the form llmpq-quantize stores its precision in."""
    stem = f"model.layers.{layer}.self_attn.o_proj"
    if precision is W16A16:
        return {f"{stem}.weight": ("BF16", [K, K], b"")}, {}
    if precision is W8A8:
        scale = ("BF16", [K, 1], b"")
        return {f"{stem}.weight": ("I8", [K, K], b""), f"{stem}.weight_scale": scale}, {}
    if precision is W4A4:
        scheme = {"o": {"weight_bits": 4, "activation_bits": 4}}
        codes = ("U8", [K, K // 2], b"")
        return {f"llmpq.layers.{layer}.o.codes": codes}, {"llmpq_schemes": json.dumps(scheme)}
    return _packed(stem, precision.weight_bits), {}


def _directory(path: Path, precisions: Sequence[Precision], *, index: bool = True) -> Path:
    """Write a model directory with a file a layer, as llmpq-quantize does."""
    path.mkdir()
    _write_config(path, {"quant_method": "compressed-tensors"})
    weight_map = {}
    for layer, precision in enumerate(precisions):
        tensors, metadata = _linear(layer, precision)
        name = f"model-layer-{layer:04}.safetensors"
        _save(path / name, tensors, metadata)
        weight_map |= dict.fromkeys(tensors, name)
    if index:
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


def _write_config(path: Path, described: Mapping[str, Any]) -> None:
    config = json.loads((DEMO / "config.json").read_text())
    text = json.dumps({**config, "quantization_config": dict(described)})
    (path / "config.json").write_text(text)


def _planned(capsys: pytest.CaptureFixture[str], path: Path, *words: str) -> tuple[Plan, str]:
    """Plan a directory; return the plan and what stderr said."""
    out = path / "plan.json"
    words = ("--engines", "1", *words)
    code, _, err = _run(capsys, *CLUSTER, *JOB, "--model", str(path), "-o", str(out), *words)
    assert code == 0, err
    return Plan.load(out), err


def _precisions(plan: Plan) -> list[Precision]:
    return [precision for stage in plan.stages for precision in stage.precisions]


@pytest.mark.parametrize("precision", [W8A8, W3A16])
def test_a_uniform_directory_is_planned_as_it_is_stored(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, precision: Precision
) -> None:
    path = _directory(tmp_path / "model", [precision] * LAYERS)
    plan, err = _planned(capsys, path)
    assert _precisions(plan) == [precision] * LAYERS
    stored = precision.value
    assert err == f"llmpq-algo: '{path}' is stored at {stored}: every layer is planned at it\n"
    assert plan.solver.status == "optimal"


MIXED = [W4A16, W16A16, W4A16, W8A16, W4A4, W8A8, W4A16, W3A16]


@pytest.mark.parametrize("method", ["exact", "heuristic"])
def test_a_mixed_directory_has_each_layer_at_its_own(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, method: str
) -> None:
    path = _directory(tmp_path / "model", MIXED)
    plan, err = _planned(capsys, path, "--method", method)
    assert _precisions(plan) == MIXED
    assert err == (
        f"llmpq-algo: '{path}' is stored at w16a16 on 1 layer, w8a16 on 1 layer, w4a16 on 3 "
        "layers, w3a16 on 1 layer, w8a8 on 1 layer, w4a4 on 1 layer: each layer is planned at its "
        "own\n"
    )


def test_every_method_beside_the_others(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = _directory(tmp_path / "model", MIXED)
    code, text, _ = _run(capsys, *CLUSTER, *JOB, "--model", str(path), "--method", "all")
    assert code == 0 and "w4a4" in text and "flexgen" not in text
    code, _, err = _run(capsys, *CLUSTER, *JOB, "--model", str(path), "--method", "uniform")
    assert code == 5 and err.endswith(
        "no precision is one that all layers of model are stored at, which methods of one "
        "precision need; use --method exact\n"
    )


def test_bits_may_say_what_a_stored_layer_can_be_served_at(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = _directory(tmp_path / "model", [W4A4] * 4 + [W4A16] * 4)
    plan, err = _planned(capsys, path, "--bits", "4")  # w4a16: Atom's weights alone
    assert _precisions(plan) == [W4A16] * LAYERS and err == ""
    plan, _ = _planned(capsys, path, "--bits", "w4a4,w4a16")
    assert _precisions(plan)[4:] == [W4A16] * 4


REFUSED = {
    "16": (
        "--bits w16a16: layer 0 is stored at w4a16, expected w4a16 among them; leave --bits out to "
        "plan every layer as it is stored, or plan the unquantised model"
    ),
    "w4a16": (
        "--bits w4a16: layer 4 is stored at w8a8, expected w8a8 or w8a16 among them; leave --bits "
        "out to plan every layer as it is stored, or plan the unquantised model"
    ),
    "3,4,8": (
        "--bits w8a16,w4a16,w3a16: no layer can be served at w3a16, they are stored at w4a16,w8a8; "
        "leave w3a16 out, or plan the unquantised model"
    ),
}


@pytest.mark.parametrize("bits", REFUSED)
def test_bits_that_a_stored_layer_cannot_have(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, bits: str
) -> None:
    path = _directory(tmp_path / "model", [W4A16] * 4 + [W8A8] * 4)
    words = [*CLUSTER, *JOB, "--model", str(path), "--bits", bits]
    assert _run(capsys, *words) == (2, "", f"llmpq-algo: {REFUSED[bits]}\n")


def test_groups_of_unlike_layers_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = _directory(tmp_path / "model", [W4A16] * 3 + [W8A8] * 5)
    code, _, err = _run(capsys, *CLUSTER, *JOB, "--model", str(path), "--group", "2")
    assert (code, err) == (
        2,
        "llmpq-algo: --group 2: layers 2-3 are stored at different precisions, expected a common "
        "one; leave --group out\n",
    )


def test_a_quantised_model_that_does_not_fit(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = _directory(tmp_path / "model", [W8A16] * LAYERS)
    words = [*CLUSTER, *JOB, "--model", str(path), "--max-devices", "1", "--reserve", "12MiB"]
    code, _, err = _run(capsys, *words)
    assert code != 0 and "--bits" not in err.splitlines()[-1]


def test_gptq_and_awq_say_their_bits(tmp_path: Path) -> None:
    spec = ModelSpec.from_directory(DEMO)
    names = [f"model.layers.{i}.mlp.down_proj.qweight" for i in range(LAYERS)]
    _save(tmp_path / "model.safetensors", {name: ("I32", [8, 8], b"") for name in names}, {})
    for described, stored in (
        ({"quant_method": "gptq", "bits": 8}, W8A16),
        ({"quant_method": "gptq", "bits": 3}, W3A16),
        ({"quant_method": "awq", "bits": 4}, W4A16),
    ):
        _write_config(tmp_path, described)
        found = stored_layers(tmp_path, spec)
        assert found == (StoredLayer(stored=stored, served=(stored,)),) * LAYERS


@pytest.mark.parametrize("precision", [W4A16, W8A8])
def test_a_linear_may_be_cut_into_two_files(tmp_path: Path, precision: Precision) -> None:
    """Shards end where they are full: between a linear's tensors, too."""
    spec = ModelSpec.from_directory(DEMO)
    _write_config(tmp_path, {"quant_method": "compressed-tensors"})
    tensors = {k: t for layer in range(LAYERS) for k, t in _linear(layer, precision)[0].items()}
    names = list(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, own in parts.items():
        _save(tmp_path / file, {name: tensors[name] for name in own}, {})
    weight_map = {name: file for file, own in parts.items() for name in own}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    found = stored_layers(tmp_path, spec)
    assert found is not None and [layer.stored for layer in found] == [precision] * LAYERS


def test_an_unquantised_directory_may_have_everything(tmp_path: Path) -> None:
    assert stored_layers(DEMO, ModelSpec.from_directory(DEMO)) is None
    (tmp_path / "config.json").write_text((DEMO / "config.json").read_text())
    assert stored_layers(tmp_path, ModelSpec.from_directory(tmp_path)) is None


def _other_method(path: Path) -> str:
    _write_config(path, {"quant_method": "hqq"})
    return "quantization method 'hqq' is not supported; expected one of compressed-tensors"


def _no_weights(path: Path) -> str:
    for file in path.glob("*.safetensors*"):
        file.unlink()
    return "no model.safetensors, whose header says at how many bits each layer is stored"


def _no_file(path: Path) -> str:
    (path / "model-layer-0003.safetensors").unlink()
    return "no such file"


def _cut_off(path: Path) -> str:
    (path / "model-layer-0003.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    return "model-layer-0003.safetensors' is not a safetensors file"


def _odd_bits(path: Path) -> str:
    _save(path / "model-layer-0003.safetensors", _packed("model.layers.3.mlp.up_proj", 2), {})
    return "has 2-bit weights for 16-bit activations, expected one of w16a16"


def _no_shape(path: Path) -> str:
    tensors = _packed("model.layers.3.mlp.up_proj", 4)
    del tensors["model.layers.3.mlp.up_proj.weight_shape"]
    _save(path / "model-layer-0003.safetensors", tensors, {})
    return "does not say how 'model.layers.3.mlp.up_proj.weight_packed' is quantised"


def _two_in_a_layer(path: Path) -> str:
    more = _packed("model.layers.3.mlp.up_proj", 8) | _packed("model.layers.3.mlp.down_proj", 4)
    _save(path / "model-layer-0003.safetensors", more, {})
    return "layer 3 is stored at w8a16,w4a16 together, expected one precision a layer"


def _of_another_dtype(path: Path) -> str:
    stem = "model.layers.3.mlp.up_proj"
    scale = ("BF16", [K, 1], b"")
    tensors: Tensors = {f"{stem}.weight": ("I16", [K, K], b""), f"{stem}.weight_scale": scale}
    _save(path / "model-layer-0003.safetensors", tensors, {})
    return f"tensor '{stem}.weight' is I16 with a scale, expected I8"


def _no_map(path: Path) -> str:
    (path / "model.safetensors.index.json").write_text("[]")
    return "has no 'weight_map'"


@pytest.mark.parametrize(
    "spoil",
    [
        _other_method,
        _no_weights,
        _no_file,
        _cut_off,
        _odd_bits,
        _no_shape,
        _two_in_a_layer,
        _of_another_dtype,
        _no_map,
    ],
)
def test_directories_that_do_not_say(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, spoil: Callable[[Path], str]
) -> None:
    path = _directory(tmp_path / "model", [W4A16] * LAYERS)
    said = spoil(path)
    code, out, err = _run(capsys, *CLUSTER, *JOB, "--model", str(path))
    assert (code, out, err.count("\n")) == (2, "", 1) and said in err


def test_a_directory_without_weights_is_planned_at_the_bits_said(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = _directory(tmp_path / "model", [])
    for file in path.glob("*.index.json"):
        file.unlink()
    plan, _ = _planned(capsys, path, "--bits", "4")
    assert _precisions(plan) == [W4A16] * LAYERS


def test_what_is_offered() -> None:
    atom = StoredLayer(stored=W4A4, served=(W4A4, W4A16))
    dense = StoredLayer(stored=W16A16, served=tuple(Precision))
    assert offered([atom, dense], None) == ((W4A4,), (W16A16,))
    assert offered([atom, dense], [W8A16, W4A16]) == ((W4A16,), (W8A16, W4A16))


def _restricted(seed: int) -> Problem:
    """Return a random problem whose layers may have one choice, or two."""
    rng = random.Random(seed)
    p = random_problem(rng, layers=(3, 5), kinds=(1, 2), devices=(1, 2), batch=2)
    width = rng.choice([1, 1, 2])
    own = tuple(tuple(rng.sample(p.choices, width)) for _ in range(p.spec.num_layers))
    return p.with_changes(offered=own, theta=rng.choice([0.0, p.theta]))


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
def test_restricted_layers_are_planned_as_well_as_by_trying_everything(seeds: Seeds) -> None:
    solved = 0
    for seed in seeds(range(40)):
        p = _restricted(seed)
        assert parse_problem(json.loads(json.dumps(problem_data(p)))).offered == p.offered
        best, found = brute_force(p)
        for search in (solve_exact, solve_ilp):
            if found is None:
                with pytest.raises(Infeasible):
                    search(p)
                continue
            outcome = search(p)
            assert math.isclose(outcome.value, best, rel_tol=2e-6)
            assert outcome.bound is not None and outcome.bound <= best * (1 + 1e-9)
            solved += 1
    assert solved > 13


def test_no_method_gives_a_layer_what_it_may_not_have(seeds: Seeds) -> None:
    solved = dict.fromkeys(PLANNERS, 0)
    for seed in seeds(range(40)):
        p = _restricted(seed)
        for method in PLANNERS:
            try:
                outcome = solve(p, SolveOptions(method=method))
            except Infeasible:
                continue
            assert fits(p, outcome.assignment)
            given = [p.choices[b] for b in outcome.assignment.choices]
            assert all(b in own for b, own in zip(given, p.offered, strict=True))
            solved[method] += 1
    assert min(solved[m] for m in ("exact", "ilp", "heuristic", "adabits")) > 3


@pytest.mark.slow
def test_the_front_of_layers_that_have_no_choice_is_one_sum_of_omega() -> None:
    seeds = (seed for seed in range(40) if brute_force(_restricted(seed))[1] is not None)
    for seed in islice(seeds, 4):
        p = _restricted(seed)
        own = tuple((choices[0],) for choices in p.offered)
        try:
            front = pareto_front(p.with_changes(offered=own, theta=0.0), time_limit_s=10.0)
        except Infeasible:
            continue
        assert len(front.points) == 1


@pytest.mark.parametrize("bits", ["4", "8"])
def test_published_codes_of_a_built_in_name(capsys: pytest.CaptureFixture[str], bits: str) -> None:
    """gpt-oss is published in MXFP4: layers of 4 and 8 bits keep its experts' codes."""
    words = ["--model", "gpt-oss-20b", "--devices", "4080", "--prefer", "quality", *JOB]
    code, out, err = _run(capsys, *words)
    assert code == 0 and "24 x w8a16" in out
    assert err.startswith("llmpq-algo: 'gpt-oss-20b' is stored at w4a16 beside linears of more")
    code, out, _ = _run(capsys, *words, "--bits", bits)
    assert code == 0 and "all layers at 8 bits 0.0001117, at 4 bits 0.03226" in out


def test_a_quantised_model_of_the_hub_is_planned_by_its_config(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama-2-7b's sizes in GPTQ; only config.json is in the cache, or an index as well."""
    hub = tmp_path / "hub"
    snapshot = hub / "models--someone--Seven-GPTQ" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    config = {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 32000,
        "torch_dtype": "float16",
    }
    words = ["--model", "someone/Seven-GPTQ", "--devices", "3060", *JOB]
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}
    for described in (gptq, None):
        extra = {} if described is None else {"quantization_config": described}
        (snapshot / "config.json").write_text(json.dumps(config | extra))
        weights = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
        (snapshot / "model.safetensors.index.json").write_text(json.dumps(weights))
        code, out, err = _run(capsys, *words)
        assert code == 0 and ("is stored at w4a16" in err) == (described is not None)
        assert ("keeps the checkpoint's own codes" in out) == (described is not None)
