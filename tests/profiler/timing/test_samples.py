"""Samples survive a stop, and the grid covers what was asked."""

import json
from pathlib import Path
from typing import Any

import pytest

from llmpq.costs.cost_model import Phase
from llmpq.devices.cluster import Cluster
from llmpq.models.model_spec import ModelSpec
from llmpq.precision import KVPrecision, Precision
from llmpq.profiler.timing import profile_host as session
from llmpq.profiler.timing.cases import CaseTime, Conditions, Sample, Sampling, Target, TimedCase
from llmpq.profiler.timing.sample_file import SampleLog
from llmpq.profiler.timing.shape_grid import (
    Reach,
    ShapeGrid,
    cases,
    fitted_terms,
    make_grid,
)
from llmpq.sizes.step_padding import gpu_padded

pytestmark = pytest.mark.pure

TARGET = Target(device_kind="CPU@1t", part="layer", phase=Phase.DECODE, dtype="float32")
GREEDY, NUCLEUS = Sampling(), Sampling(temperature=0.7, top_p=0.9)
CASES = [TimedCase(target=TARGET, v=v, length=64) for v in (1, 2, 4)]


HERE = Conditions(model_fingerprint="f", machine="here", copies=2)


def sample(case: TimedCase, *, seconds: float = 1e-3, **changed: Any) -> Sample:
    timing = CaseTime(seconds=seconds, low_s=seconds, high_s=seconds, repeats=5)
    return Sample(conditions=HERE.model_copy(update=changed), case=case, timing=timing)


def taken(log: SampleLog, **changed: Any) -> dict[TimedCase, Sample]:
    return log.taken(CASES, HERE.model_copy(update=changed))


def test_a_stopped_run_resumes_after_a_truncated_line(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    with SampleLog(path) as log:
        log.append(sample(CASES[0]))
        log.append(sample(CASES[1]))
    whole = path.read_text()
    path.write_text(whole[: len(whole) - 30])
    with SampleLog(path) as log:
        assert set(taken(log)) == {CASES[0]}
        log.append(sample(CASES[2]))
    assert [json.loads(line)["case"]["v"] for line in path.read_text().splitlines()] == [1, 4]
    with SampleLog(path) as log:
        assert set(taken(log)) == {CASES[0], CASES[2]}


def test_only_samples_taken_under_the_same_conditions_count(tmp_path: Path) -> None:
    with SampleLog(tmp_path / "s.jsonl") as log:
        log.append(sample(CASES[0], machine="elsewhere"))
        assert not taken(log)
        assert taken(log, machine="elsewhere")
        assert not taken(log, machine="elsewhere", copies=1)
        assert not taken(log, machine="elsewhere", model_fingerprint="g")
        assert not taken(log, machine="elsewhere", rest_s=1e-3)
        assert not taken(log, machine="elsewhere", kernels="newer")


def test_how_tokens_are_picked_matters_to_the_head_alone(tmp_path: Path) -> None:
    head = CASES[0].model_copy(update={"target": TARGET.model_copy(update={"part": "head"})})
    with SampleLog(tmp_path / "s.jsonl") as log:
        log.append(sample(CASES[0]))
        log.append(sample(head))
        for sampling, found in ((GREEDY, {CASES[0], head}), (NUCLEUS, {CASES[0]})):
            conditions = HERE.model_copy(update={"sampling": sampling})
            assert set(log.taken([CASES[0], head], conditions)) == found


def test_the_newest_sample_of_a_case_counts(tmp_path: Path) -> None:
    with SampleLog(tmp_path / "s.jsonl") as log:
        log.append(sample(CASES[0], seconds=1.0))
        log.append(sample(CASES[0], seconds=2.0))
        assert taken(log)[CASES[0]].timing.seconds == 2.0


def test_a_line_that_is_no_sample_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    path.write_text("{}\nnot json\n")
    with pytest.raises(ValueError, match=r"s.jsonl:1: 'conditions': Field required"):
        SampleLog(path)
    path.write_text("not json\n")
    with pytest.raises(ValueError, match=r"s.jsonl:1: not a sample .* expected one JSON object"):
        SampleLog(path)


def grid_cases(grid: ShapeGrid) -> list[TimedCase]:
    return cases(
        grid,
        device_kind="T4",
        dtype="float16",
        precisions=(Precision.W16A16, Precision.W4A16),
        kv=(KVPrecision.KV16,),
    )


@pytest.mark.parametrize("quick", [True, False])
def test_the_grid_covers_what_was_asked(quick: bool) -> None:
    spec = ModelSpec.by_name("opt-30b")
    found = grid_cases(
        make_grid(spec, Reach(max_batch=24, max_len=300), quick=quick, verify_q=(2, 5))
    )
    assert len(set(found)) == len(found)
    targets = {case.target for case in found}
    assert len(targets) == 2 * 3 + 2 * 3, "two precisions and two ends, three phases each"
    assert max(case.v for case in found) == 24
    assert max(case.length for case in found) == 300
    assert {case.q_len for case in found if case.target.phase is Phase.VERIFY} == {2, 5}
    for target in targets:
        shapes = {(c.v, c.length, c.q_len) for c in found if c.target == target}
        terms = fitted_terms(target)
        assert len(shapes) >= (5 if terms is None else len(terms)), target.title


def test_the_grid_respects_the_model_and_the_token_limit() -> None:
    spec = ModelSpec.by_name("opt-30b")
    grid = make_grid(spec, Reach(max_batch=64, max_len=100_000, max_tokens=2048), quick=False)
    found = grid_cases(grid)
    assert max(case.length for case in found) == spec.max_positions
    prefills = [c for c in found if c.target.phase is Phase.PREFILL]
    assert max(case.new_tokens for case in prefills) == 2048


@pytest.mark.parametrize("on_gpu", [True, False])
def test_a_job_needs_its_own_prompts_and_caches_only(on_gpu: bool) -> None:
    spec = ModelSpec.by_name("opt-30b")
    grid = make_grid(spec, Reach(max_batch=32, job=(1500, 100)), quick=False, on_gpu=on_gpu)
    layers = [c for c in grid_cases(grid) if c.target.part == "layer"]
    lengths = {phase: {c.length for c in layers if c.target.phase is phase} for phase in Phase}
    assert lengths[Phase.PREFILL] == {1500, 750, 375, 512, 128}
    assert {c.start for c in layers if c.length == 512} == {0, 750, 1500 - 512}
    assert lengths[Phase.DECODE] == {1501, 1600}
    assert {1, 32} <= {c.v for c in layers if c.target.phase is Phase.DECODE}


def test_a_long_prompt_is_timed_in_the_chunks_it_may_be_planned_in() -> None:
    spec = ModelSpec.by_name("llama-3.1-8b")
    grid = make_grid(spec, Reach(max_batch=1, max_tokens=8192, job=(30000, 100)), quick=False)
    assert max(v * length for v, length, _ in grid.prefill) == 8192
    for chunk in (128, 512, 2048, 8192):
        assert {s for _, length, s in grid.prefill if length == chunk} == {0, 15000, 30000 - chunk}


@pytest.mark.parametrize(("max_batch", "max_len"), [(32, None), (8, 1024), (1, 4096)])
@pytest.mark.parametrize("quick", [False, True])
def test_a_gpu_is_timed_at_every_number_of_places(
    max_batch: int, max_len: int | None, quick: bool
) -> None:
    spec = ModelSpec.by_name("llama-3.1-8b")
    grid = make_grid(spec, Reach(max_batch=max_batch, max_len=max_len), quick=quick, on_gpu=True)
    found = [c for c in grid_cases(grid) if c.target.phase is Phase.PREFILL]
    assert len(set(found)) == len(found)
    tokens = {c.new_tokens for c in found if c.target.part == "layer" and c.start == 0}
    least = {gpu_padded(n) for n in range(9, 513)}
    assert least <= tokens
    assert quick or {gpu_padded(n) for n in range(513, 4096)} <= tokens
    ends = [c.new_tokens for c in found if c.target.part == "head"]
    assert ends and len(set(ends)) < len(tokens) / (1 if quick else 2)


def test_a_length_too_short_to_fit() -> None:
    with pytest.raises(ValueError, match="--max-len must be at least 16 tokens, got 8"):
        make_grid(ModelSpec.by_name("opt-30b"), Reach(max_batch=4, max_len=8), quick=True)


def test_a_device_is_chosen_by_its_profile_kind_before_its_kind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        "schema: 1\nname: shares\nnodes:\n  - name: a\n    devices:\n      - {kind: H200}\n"
        "      - {kind: H200, emulate: {sms: 16}}\n"
    )
    monkeypatch.setattr(session, "visible_gpus", lambda: ("NVIDIA H200",))
    monkeypatch.setattr(session, "gpus_of", lambda _: [0])
    cluster = Cluster.load(path)

    def chosen(wanted: str | None) -> list[str]:
        return [d.profile_kind for d in session.devices_here(cluster, wanted)]

    assert chosen("h200") == ["H200"]
    assert chosen("H200@16sm") == ["H200@16sm"]
    assert chosen(None) == ["H200", "H200@16sm"]


@pytest.mark.parametrize("content", [b"# notes\nof mine", b"\x88\x01\x00", b"{'a'"])
def test_what_is_no_log_of_samples_is_left_as_it_was(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="sample"):
        SampleLog(path)
    assert path.read_bytes() == content


def test_targets_have_names_of_their_own() -> None:
    """The output matrix is timed in 16 and 8 bits, in rows of one table."""
    grid = make_grid(ModelSpec.by_name("opt-30b"), Reach(max_batch=4, max_len=64), quick=True)
    found = cases(
        grid,
        device_kind="A100",
        dtype="float16",
        precisions=(Precision.W16A16, Precision.W8A16),
        kv=(KVPrecision.KV16,),
    )
    targets = {case.target for case in found}
    assert len({target.title for target in targets}) == len(targets)
    assert sum(" head decode w" in target.title for target in targets) == 2
