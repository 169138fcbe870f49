"""What GPUs report is no bug of the code: on CPU stages, with the real texts."""

from __future__ import annotations

import os

import pytest
import torch

from llmpq import LLM, SamplingParams
from llmpq.child import CallFailed, described_error, failure_of
from llmpq.errors import DoesNotFitError, StageLostError
from llmpq.runtime.launch.failures import loss_kind, lost_stage

BEHIND = """
Search for `cudaError' in https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html \
for more information.
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace \
below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Device-side assertion tracking was not enabled by user."""
"""What torch says behind an error of CUDA's."""
NCCL = "NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3690, "
REMOTE = NCCL + (
    "remote process exited or there was a network error, NCCL version 2.28.9\n"
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting "
    "prematurely.\nLast error:\nsocketProgress: Connection closed by remote peer"
)
UNHANDLED = NCCL + (
    "unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.28.9\n"
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure '{}'"
)
WATCHDOG = (
    "its process died (killed by SIGABRT): what():  [PG ID 0 PG GUID 0(default_pg) Rank 1] Process "
    "group watchdog thread terminated with exception: [Rank 1] Watchdog caught collective "
    "operation timeout: WorkNCCL(SeqNum=9, OpType=ALLREDUCE, NumelIn=1024, NumelOut=1024, "
    "Timeout(ms)=10000) ran for 10029 milliseconds before timing out."
)


def cuda(text: str) -> BaseException:
    return torch.AcceleratorError(f"CUDA error: {text}{BEHIND}")


RAISED = [
    (cuda("uncorrectable ECC error encountered"), "device", "nvidia-smi -q -i GPU-1"),
    (cuda("uncorrectable NVLink error detected during the execution"), "device", "Xid"),
    (cuda("hardware stack error"), "device", "reset the card"),
    (cuda("Invalid access of peer GPU memory over nvlink or a hardware error"), "device", "Xid"),
    (torch.distributed.DistBackendError(UNHANDLED.format("uncorrectable ECC error encountered")),
     "device", "reset the card"),
    (cuda("no CUDA-capable device is detected"), "device", "no longer answers"),
    (cuda("CUDA-capable device(s) is/are busy or unavailable"), "device", "another program"),
    (cuda("unknown error"), "device", "no longer answers"),
    (RuntimeError("Triton Error [CUDA]: unknown error"), "device", "no longer answers"),
    (cuda("unspecified launch failure"), "kernel", "ended a kernel"),
    (cuda("an illegal memory access was encountered"), "kernel", "ended a kernel"),
    (RuntimeError("Triton Error [CUDA]: misaligned address"), "kernel", "Xid"),
    (cuda("device-side assert triggered"), "kernel", "ended a kernel"),
    (cuda("misaligned address"), "kernel", "ended a kernel"),
    (cuda("the launch timed out and was terminated"), "kernel", "ended a kernel"),
    (cuda("out of memory"), "memory", "larger reserve"),
    (torch.cuda.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 15.77 GiB "
        "of which 1.02 GiB is free."), "memory", "larger reserve"),
    (torch.distributed.DistBackendError(UNHANDLED.format("out of memory")),
     "memory", "larger reserve"),
    (RuntimeError("[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't "
                  "allocate memory: you tried to allocate 8 bytes."), "memory", "larger reserve"),
    (torch.distributed.DistBackendError(REMOTE), "connection", "stage that ended first"),
    (RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by "
                  "peer [127.0.0.1]:38107"), "connection", "its connection to another stage broke"),
    (RuntimeError("mat1 and mat2 shapes cannot be multiplied (3x64 and 32x8)"), "error", "mat1"),
    (IndexError("index 40 is out of bounds for dimension 0 with size 8"), "error", "IndexError"),
    (AssertionError("drafts need enable_speculation"), "error", "AssertionError"),
    (ValueError("an unknown error of a request"), "error", "unknown error of a request"),
]  # fmt: skip


@pytest.mark.cpu
@pytest.mark.parametrize(
    "error, kind, said", RAISED, ids=[f"{kind}-{i}" for i, (_, kind, _) in enumerate(RAISED)]
)
def test_each_error_is_of_its_kind_and_says_what_to_do(error, kind, said, demo_model, make_plan):
    """As a stage's process sends it."""
    sent = described_error(error)
    failure = failure_of(sent["error"], sent["text"])
    assert loss_kind(failure) == kind
    plan = make_plan(demo_model, (3,))
    lost = lost_stage(failure, plan, 1, phase="decode", pid=7, card="GPU-1")
    assert said in str(lost) and "\n" not in str(lost)
    assert isinstance(lost, DoesNotFitError) == (kind == "memory")
    if not isinstance(error, ValueError):
        assert "stage 1 (CPU-1 on local, pid 7)" in str(lost) and "during decode" in str(lost)


@pytest.mark.cpu
@pytest.mark.parametrize(
    "obituary, kind",
    [
        ("its process died (killed by SIGKILL; the kernel's out-of-memory killer ...)", "process"),
        ("its process died (killed by SIGSEGV)", "process"),
        (WATCHDOG, "connection"),
    ],
)
def test_so_is_each_death(obituary, kind, demo_model, make_plan):
    failure = CallFailed(obituary)
    assert loss_kind(failure) == kind
    plan = make_plan(demo_model, (3,))
    assert obituary in str(lost_stage(failure, plan, 0, phase="decode", pid=7))


FAILING = """
import os, pathlib
import torch
from llmpq.runtime.backends.stage_runner import StageRunner
from llmpq.runtime.launch.stages.stage_worker import StageWorker

load, run = StageWorker.load, StageRunner.run
device, steps, once = "", 0, pathlib.Path({once!r})

def noted(self):
    global device
    device = self._stage.device
    return load(self)

def failing(self, message, hidden):
    global steps
    steps += bool(message.starts_B.any())  # not those of zeros
    if {when}:
        once.touch()
        raise {error}
    return run(self, message, hidden)

StageWorker.load, StageRunner.run = noted, failing
"""
"""What every Python begins with: stages that raise an error."""
ABORTED = (
    b"terminate called after throwing an instance of 'c10::AcceleratorError'\n"
    b"  what():  CUDA error: uncorrectable ECC error encountered\nSearch for ...\n\n"
    b"Exception raised from c10_cuda_check_implementation at ... (most recent call first):\n"
) + b"frame #1: <unknown function> + 0x129ecc (0x7f9ea8729ecc in /lib/libc.so.6)\n" * 40
"""What a process writes that ends by an error of CUDA's in a destructor (torch 2.11, H200)."""
ECC = 'torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered\\nSearch for ...")'
MEMORY = 'torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")'
ALWAYS, ONCE = (
    "device == 'CPU-1' and steps == 5",
    "device == 'CPU-1' and steps == 5 and not once.exists()",
)
POISON = "device == 'CPU-0' and 777 in message.tokens_T[: message.num_tokens]"
PROMPTS = [[3, 4, 5], [7, 777, 8], [9, 10], [11, 12]]
PARAMS = SamplingParams(temperature=0, max_tokens=24, logit_bias={777: -100}, ignore_eos=True)


@pytest.fixture
def plan(demo_model, make_plan):
    return make_plan(demo_model, (2, 5), batch=4, prompt_len=32, gen_len=24)


@pytest.fixture
def expected(demo_model, plan):
    with LLM(demo_model, plan=plan, backend="threads", use_tqdm=False) as llm:
        return [output.text for output in llm.generate(PROMPTS, PARAMS)]


@pytest.fixture
def stages_fail(tmp_path, monkeypatch):
    def fail(when: str, error: str) -> None:
        text = FAILING.format(when=when, error=error, once=str(tmp_path / "once"))
        (tmp_path / "sitecustomize.py").write_text(text)
        path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
        monkeypatch.setenv("PYTHONPATH", path)

    return fail


@pytest.mark.cluster
@pytest.mark.parametrize(
    "error, loss",
    [
        (ECC, "device"),
        ('IndexError("list index out of range")', "error"),
        *(
            pytest.param(error, loss, marks=pytest.mark.seldom)  # classified above
            for error, loss in (
                (
                    'torch.AcceleratorError("CUDA error: unspecified launch failure\\n...")',
                    "kernel",
                ),
                (
                    'RuntimeError("NCCL error in: ...: ncclRemoteError: A call failed")',
                    "connection",
                ),
                (MEMORY, "memory"),
                (f"os.write(2, {ABORTED!r}) and os.abort()", "device"),
            )
        ),
    ],
)
def test_what_happens_once_costs_a_pause(demo_model, plan, expected, stages_fail, error, loss):
    stages_fail(ONCE, error)
    with LLM(demo_model, plan=plan, backend="processes", use_tqdm=False) as llm:
        assert [one.text for one in llm.generate(PROMPTS, PARAMS)] == expected
        (recovery,) = llm.recoveries
        assert (recovery.loss, recovery.action, recovery.stage) == (loss, "restart", 1)
        assert recovery.as_report()["loss"] == loss


@pytest.mark.cluster
def test_a_device_that_reports_faults_is_given_up(demo_model, plan, expected, stages_fail):
    """It fails at its fifth step each time: no request is blamed for that."""
    stages_fail(ALWAYS, ECC)
    how = {"plan": plan, "backend": "processes", "on_loss": "replan", "use_tqdm": False}
    with LLM(demo_model, **how) as llm:
        assert [one.text for one in llm.generate(PROMPTS, PARAMS)] == expected
        assert [one.loss for one in llm.recoveries] == ["device", "device"]
        assert [one.action for one in llm.recoveries] == ["restart", "replan"]
        assert "CPU-1" not in {stage.device for stage in llm.plan.stages}


@pytest.mark.cluster
def test_or_is_the_end_where_no_other_may_take_over(demo_model, plan, stages_fail):
    stages_fail(ALWAYS, ECC)
    with LLM(demo_model, plan=plan, backend="processes", use_tqdm=False) as llm:
        said = r"stage 1 \(CPU-1 .* uncorrectable ECC .* fault 2 of this device .*on_loss replan"
        with pytest.raises(StageLostError, match=said):
            llm.generate(PROMPTS, PARAMS)


@pytest.mark.cluster
@pytest.mark.parametrize(
    "error",
    [
        'torch.AcceleratorError("CUDA error: an illegal memory access was encountered\\n...")',
        *(
            pytest.param(error, marks=pytest.mark.seldom)
            for error in (
                'ValueError("this input cannot be computed")',
                MEMORY,
            )
        ),
    ],
)
def test_what_one_input_raises_each_time_fails_that_request(
    demo_model, plan, expected, stages_fail, error
):
    stages_fail(POISON, error)
    how = {"plan": plan, "backend": "processes", "on_loss": "replan", "use_tqdm": False}
    with LLM(demo_model, **how) as llm:
        prepared = [llm.prepare(prompt, PARAMS) for prompt in PROMPTS]
        answers = dict(llm.as_completed(prepared))
        assert "ends every stage that gets it" in answers[1].failure
        assert [answers[i].text for i in (0, 2, 3)] == [expected[i] for i in (0, 2, 3)]
        assert {one.action for one in llm.recoveries} == {"restart"}
