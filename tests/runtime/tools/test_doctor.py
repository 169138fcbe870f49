"""The doctor names what cannot run, and what to do about it; what hangs has a deadline."""

from __future__ import annotations

import json
from concurrent.futures import Future

import pytest
import torch

from llmpq.devices import this_machine
from llmpq.runtime.cli.main import main
from llmpq.runtime.launch.stages.node_survey import try_products
from llmpq.runtime.tools import doctor
from llmpq.runtime.tools.diagnosis import (
    device_lines,
    differences,
    findings,
    products,
)
from llmpq.runtime.tools.doctor import examine

pytestmark = pytest.mark.cpu

GIB = 2**30
NOTHING_FOUND = {key: [] for key in ("nodes", "devices", "products", "links", "findings")}


def gpu(name: str = "NVIDIA H100 80GB HBM3", capability: str = "9.0", **fields):
    return {
        "index": 0, "uuid": "GPU-1", "reported": name, "total_bytes": 80 * GIB,
        "free_bytes": 79 * GIB, "driver": "570.1", "capability": capability, "kind": "H100-SXM",
    } | fields  # fmt: skip


def survey(*gpus, **fields):
    """Return a healthy node, but for some fields."""
    packages = {
        "llmpq": "0.1.0", "torch": "2.13.0", "ray": "2.60.0", "triton": "3.9.0",
        "safetensors": "0.5", "transformers": "5.0",
    }  # fmt: skip
    cpu = {
        "reported": "a CPU",
        "threads": 8,
        "total_bytes": 64 * GIB,
        "free_bytes": 60 * GIB,
        "compiled_for": "avx512_vnni",
        "quick_dtypes": [],
    }
    return {
        "host": "a", "machine": "a 1", "python": "3.12.1", "executable": "python",
        "packages": packages, "nccl": "2.27.3", "cpu": cpu, "gpus": list(gpus),
        "driver_cuda": "12.8", "torch_cuda": "12.8", "torch_sees": len(gpus),
        "torch_arches": ["sm_75", "sm_80", "sm_86", "sm_90"], "shm_bytes": 8 * GIB,
        "tried": [{"gpu": i, "problem": None} for i in range(len(gpus))],
    } | fields  # fmt: skip


def test_a_cpu_runs_the_dtypes_that_plans_choose_for_it():
    for quick, threads, runs, device in (
        ([], 8, "float32, all", "a CPU, 8 free threads"),
        (["bfloat16"], 1, "bfloat16, float32, all", "a CPU, 1 free thread"),
    ):
        node = survey()
        node["cpu"] |= {"quick_dtypes": quick, "threads": threads}
        (line,) = device_lines(node)
        assert line.runs.startswith(runs) and line.device == f"CPU: {device}"


def test_a_healthy_node_has_no_findings():
    node = survey(gpu())
    assert findings(node) == [] and differences([node, node]) == []
    card, cores = device_lines(node)
    assert card.usable and "w4a4" in card.runs and "bfloat16" in card.runs
    assert cores.usable


@pytest.mark.parametrize(
    ("name", "capability", "runs"),
    [
        ("NVIDIA GeForce RTX 4090", "8.9", "packed kernels w3a16 w4a16 w8a16, KV"),
        ("Tesla T4", "7.5", "cuBLAS"),
        ("NVIDIA B200", "10.0", "nothing"),  # no code for its generation
    ],
)
def test_cards_run_what_their_generation_has(name, capability, runs):
    (line, _) = device_lines(survey(gpu(name, capability)))
    assert runs in line.runs
    assert ("bfloat16" in line.runs) == (capability == "8.9")


@pytest.mark.parametrize(
    ("capability", "packages", "said"),
    [
        ("9.0", None, "multiplied by packed kernels"),
        ("8.0", None, "multiplied by packed kernels"),
        ("7.5", None, "unpacked by Triton"),
        ("7.0", None, "unpacked by torch operators"),
        ("9.0", {"torch": "2.13.0"}, "unpacked by torch operators"),
    ],
)
def test_every_card_says_what_becomes_of_number_formats(capability, packages, said):
    node = survey(gpu(capability=capability), torch_arches=["sm_70", "sm_75", "sm_80", "sm_90"])
    card, cores = device_lines(node if packages is None else {**node, "packages": packages})
    for line in (card, cores):
        assert all(form in line.stored for form in ("FP8", "NVFP4", "MXFP4", "NF4", "int4"))
    assert said in card.stored
    (dead, _) = device_lines(survey(gpu(), torch_cuda=None, torch_sees=0))
    assert dead.stored == ""


@pytest.mark.parametrize(
    ("node", "level", "named", "remedy"),
    [
        (survey(gpu("Tesla V100", "7.0")), "error", "capability 7.0", "whl/cu126"),
        (survey(gpu("NVIDIA B200", "10.0"), driver_cuda="13.0"), "error", "10.0", "whl/cu130"),
        (survey(gpu(), torch_cuda=None, torch_sees=0), "error", "has no CUDA", "whl/cu128"),
        (survey(gpu(), torch_cuda="13.0", torch_sees=0), "error", "driver 570.1", "update"),
        (survey(gpu(), torch_sees=0), "error", "torch sees none", "CUDA_VISIBLE_DEVICES"),
        (survey(gpu(kind=None)), "advice", "not in the table", "--profile"),
        (survey(gpu(free_bytes=GIB)), "advice", "1.0 GiB of 80.0 GiB free", "nvidia-smi"),
        (survey(shm_bytes=64 << 20), "advice", "/dev/shm", "--shm-size"),
    ],
)
def test_what_is_wrong_with_a_node_is_named(node, level, named, remedy):
    (found,) = findings(node)
    assert found.level == level and named in found.text and remedy in found.text
    if level == "error":
        assert not device_lines(node)[0].usable


@pytest.mark.parametrize(
    ("package", "version", "level", "remedy"),
    [
        ("torch", "2.9.1", "error", "torch>=2.11"),
        ("ray", "2.40.0", "error", "ray>=2.52"),
        ("ray", None, "advice", "llmpq[run]"),
        ("safetensors", None, "error", "llmpq[run]"),
        ("triton", None, "error", "llmpq[gpu]"),
    ],
)
def test_packages_that_are_old_or_missing_are_named(package, version, level, remedy):
    node = survey(gpu())
    packages = {**node["packages"], package: version}
    packages = {name: found for name, found in packages.items() if found is not None}
    (found,) = findings(survey(gpu(), packages=packages))
    assert found.level == level and remedy in found.text


def test_versions_that_differ_between_nodes_are_named():
    one = survey(gpu())
    other = survey(
        gpu(), host="b", python="3.11.9", nccl="2.21.5", packages={**one["packages"], "ray": "2.55"}
    )
    texts = [found.text for found in differences([one, other])]
    assert [text.split()[2] for text in texts] == ["ray", "Python", "NCCL"]
    assert all(text.startswith("b has ") and "same version" in text for text in texts)


def test_a_card_that_computes_nonsense_runs_nothing():
    node = survey(gpu(), gpu(), tried=[
        {"gpu": 0, "problem": None}, {"gpu": 1, "problem": "an illegal memory access"}
    ])  # fmt: skip
    well, line, _ = device_lines(node)
    assert well.usable and not line.usable and "illegal memory access" in line.runs
    (found,) = findings(node)
    assert found.level == "error" and "GPU 1" in found.text and "illegal" in found.text


def test_the_table_of_products_is_that_of_the_devices_here():
    found = products([survey(gpu(), gpu()), survey(gpu("Tesla T4", "7.5"))])
    assert [device["device"] for device in found] == [
        "NVIDIA H100 80GB HBM3 (sm_90)",
        "CPU (avx512_vnni)",
        "Tesla T4 (sm_75)",
    ]
    kernels = [{line["kernel"] for line in device["lines"]} for device in found]
    assert {"gemv", "wgmma_gemm", "fp8_wgmma"} <= kernels[0]
    assert "native" in kernels[1] and kernels[2] == {
        "cuda_gemv", "cuda_dequantize", "dequantize", "dequantize_torch", "torch", "int8_gemm",
        "reference",
    }  # fmt: skip
    (four_bits,) = [line for line in found[0]["summary"] if line["weight"].startswith("3, 4, 8")]
    assert "1-8 gemv *" in four_bits["kernels"] and "33+ wgmma_gemm *" in four_bits["kernels"]


def test_a_card_that_torch_cannot_open_is_an_error():
    (found,) = findings(survey(gpu(), gpu(), torch_sees=1))
    assert found.level == "error" and "1 of the driver's 2 GPUs" in found.text


DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def test_products_that_are_right_are_no_problem_in_any_dtype():
    assert try_products(torch.device("cpu"), DTYPES) is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_sum_that_is_wrong_is_found(monkeypatch, dtype):
    true = torch.Tensor.__matmul__

    def broken(left, right):
        product = true(left, right)
        if left.dtype == dtype:
            product[40, 3] += 1  # a bit of one sum
        return product

    monkeypatch.setattr(torch.Tensor, "__matmul__", broken)
    problem = try_products(torch.device("cpu"), DTYPES)
    assert problem is not None and str(dtype).removeprefix("torch.") in problem
    assert "1 of 4096 sums" in problem


class Node:
    """A node that answers some calls and leaves others open."""

    def __init__(self, look, **answers) -> None:
        self._answers = {"look": look, "open_rendezvous": 1234, **answers}

    def call(self, method: str, *args: object) -> Future[object]:
        answer: Future[object] = Future()
        if method in self._answers:
            value = self._answers[method]
            answer.set_exception(value) if isinstance(value, Exception) else answer.set_result(
                value
            )
        return answer

    def kill(self, pid: int) -> None:
        raise AssertionError


def test_what_hangs_or_fails_is_a_finding_and_the_rest_is_shown():
    link = {"from": 0, "to": 1, "latency_us": 30.0, "gbps": 9.0}
    well = Node(survey(), try_links=[link])
    silent = Node(survey(gpu(), host="b", machine="b 2"), try_links=RuntimeError("no route\nstack"))
    report = examine([well, silent], ["10.0.0.1", "10.0.0.2"], limit_s=0.2)
    assert [line["node"] for line in report["devices"]] == ["a", "b", "b"]
    assert report["links"][0] | {"from": "a", "to": "b"} == report["links"][0]
    texts = [item["text"] for item in report["findings"]]
    assert any("did not compute on its GPUs within 0 s" in text for text in texts)
    assert any("no route" in text and "firewall" in text for text in texts)
    assert not report["devices"][1]["usable"]


def test_this_machine_is_looked_at(capsys):
    code = main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert code == (6 if any(f["level"] == "error" for f in report["findings"]) else 0)
    assert len(report["nodes"]) == 1 and report["devices"]
    (link,) = report["links"]
    assert link["latency_us"] > 0 and link["gbps"] > 0


def test_a_timeout_that_cannot_be_waited_is_refused(capsys):
    assert main(["doctor", "--timeout", "0"]) == 2
    assert "--timeout" in capsys.readouterr().err


@pytest.mark.parametrize(("context", "code"), [("256", 0), ("900k", 5)])
def test_a_model_is_fitted_to_this_machine_as_it_is(capsys, monkeypatch, context, code):
    monkeypatch.setattr(doctor, "examine", lambda *_: NOTHING_FOUND)
    monkeypatch.setattr(this_machine, "host_memory", lambda: (GIB, 640 * 2**20))
    monkeypatch.setattr(this_machine, "_group_memory", lambda: (None, 0))
    words = ["doctor", "--json", "--model", "examples/demo-7m", "--context", context]
    assert main(words) == code
    out, err = capsys.readouterr()
    fits = json.loads(out)["fits"]
    (device,) = fits["devices"]
    assert fits["fits"] is (code == 0) and device["memory_bytes"] == GIB
    assert device["reserve_bytes"] == 512 * 2**20, "what others hold now, by 256 MiB"
    assert ("what fits: " in err) == (code == 5)


def test_a_model_is_needed_for_a_context(capsys):
    assert main(["doctor", "--context", "8k"]) == 2
    assert "no effect without --model" in capsys.readouterr().err
