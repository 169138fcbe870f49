"""`llmpq-profile` with flags that nothing heeds, files that are others, and a disk that is full."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from llmpq.devices.cluster import Cluster
from llmpq.devices.this_machine import this_machine
from llmpq.profiler.__main__ import main
from llmpq.profiler.cli import indicator, run_hosts
from llmpq.profiler.cli.flags import ProfileRequest, run_parser
from llmpq.profiler.cli.run import make_job
from llmpq.profiler.timing.sample_file import SampleLog

pytestmark = pytest.mark.cpu
CLUSTER = Path(__file__).parents[3] / "examples" / "cpu-two-stages.yaml"


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--kind random --windows 5", "--windows has no effect with another --kind: take"),
        ("--kind random --text none.txt", "--text has no effect with another --kind: take"),
        (
            "--kind variance --seed 4",
            "--seed has no effect with another --kind: take",
        ),
        ("--kind hessian --granularity tensor", "--granularity has no effect with another --kind"),
        ("--kind random --seed -1", "--seed must be at least 0, got -1"),
    ],
)
def test_flags_of_other_kinds(
    demo_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: str, words: str
) -> None:
    output = tmp_path / "omega.json"
    assert main(f"indicator --model {demo_model} -o {output} {flags}".split()) == 2
    assert words in capsys.readouterr().err
    assert not output.exists()


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--bits w16a16,w8a8", "no layer has low-bit weights and 16-bit inputs"),
        ("--bits w5a16", "w5a16"),
        ("--batch 0", "--batch must be at least 1, got 0"),
        ("--seconds 0", "--seconds must be above 0, got 0"),
        ("--job 512", "--job: expected prompt/new tokens such as 512/100, got '512'"),
        ("--plan none.json --bits w4a16", "--bits has no effect beside --plan"),
        ("--plan none.json", "none.json"),
    ],
)
def test_what_cannot_be_tuned(
    demo_model: Path, capsys: pytest.CaptureFixture[str], flags: str, words: str
) -> None:
    assert main(f"tune --model {demo_model} {flags}".split()) == 2
    assert words in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to tune")
def test_a_cpu_has_nothing_to_tune(demo_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(f"tune --model {demo_model}".split()) == 2
    assert "nothing to tune: this machine has no CUDA GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--output {out} --top-k 5", "--top-k has no effect on greedy tokens"),
        ("--output {out} --top-p 0.5", "--top-p has no effect on greedy tokens"),
        ("--output {cluster}", "--output and --cluster are the same file"),
        ("--output {out} --samples {cluster}", "--samples and --cluster are the same file"),
        ("--output {out} --samples {out}", "--samples and --output are the same file"),
    ],
)
def test_runs_that_would_lose_something(
    demo_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: str, words: str
) -> None:
    cluster, out = tmp_path / "c.yaml", tmp_path / "costs.json"
    cluster.write_text(CLUSTER.read_text())
    named = flags.format(cluster=cluster, out=out)
    assert main(f"run --model {demo_model} --cluster {cluster} {named}".split()) == 2
    assert words in capsys.readouterr().err
    assert cluster.read_text() == CLUSTER.read_text()


def test_no_memory_left_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(indicator, "_random", fail)
    words = f"indicator --kind random --model opt-13b -o {tmp_path / 'o.json'}"
    assert main(words.split()) == 5
    assert "llmpq-profile: out of memory: CUDA out of memory" in capsys.readouterr().err


class NoSample:
    """Stands for a sample: what is written of it does not matter."""

    def model_dump(self, **_: str) -> dict[str, int]:
        return {"conditions": 1}


def test_a_full_disk_names_the_samples(tmp_path: Path) -> None:
    link = tmp_path / "samples.jsonl"
    link.symlink_to("/dev/full")
    log = SampleLog.__new__(SampleLog)
    log._path, log._samples, log._file = link, [], link.open("a")
    said = "samples.jsonl': no space left on device; the samples before stay"
    with pytest.raises(ValueError, match=said), log:
        log.append(NoSample())  # type: ignore[arg-type]


def test_kv_that_no_pool_of_a_gpu_keeps_is_not_timed(tmp_path: Path) -> None:
    cluster = Cluster.from_counts(["RTX-3060"], [1])
    words = f"--cluster none.yaml --kv kv16,kv4 -o {tmp_path / 'c.json'} --model "
    request = run_parser().read_as(ProfileRequest, [*words.split(), "deepseek-v2-lite"])
    in_float32 = replace(request, dtype="float32")
    with pytest.raises(ValueError, match="latents in float32, which llmpq does not run with"):
        make_job(in_float32, cluster, devices=cluster.devices)
    make_job(replace(in_float32, kv="kv16"), cluster, devices=cluster.devices)
    job = make_job(replace(request, model="opt-2.7b"), cluster, devices=cluster.devices)
    assert max(v * length for v, length in job.grid.decode) * 2 * 32 * 80 * 2 * 4 <= 15 << 28


def test_without_a_cluster_file_this_machine_is_profiled(demo_model: Path) -> None:
    words = f"--model {demo_model} --kv kv16 -o costs.json"
    job = make_job(run_parser().read_as(ProfileRequest, words.split()))
    assert {device.name for device in job.devices} <= {d.name for d in this_machine().devices}


def test_hosts_of_a_ray_are_those_of_a_cluster_file() -> None:
    words = "--model opt-13b --ray-address 127.0.0.1:1 -o costs.json"
    with pytest.raises(ValueError, match="hosts of a cluster file: give --cluster YAML"):
        run_hosts.main(run_parser().read_as(ProfileRequest, words.split()))
