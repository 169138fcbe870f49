"""Errors of the command, word for word: what, got, expected, what to do; one line, exit code."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.constants import HF_HUB_CACHE

from llmpq.devices import device_spec
from llmpq.models import model_spec
from llmpq.planner.__main__ import main
from llmpq.shipped_table import shipped_table

pytestmark = pytest.mark.pure

ROOT = Path(__file__).resolve().parents[3]
PAPER = ROOT / "clusters" / "paper"
JOB = ["--global_bz", "8", "--s", "512", "--n", "100"]
SMALL = ["--device-names", "T4", "V100", "--device-numbers", "1", "1", "--model", "opt-13b", *JOB]
NOT_CACHED = (
    f"it is not, or not whole, in Hugging Face's cache ({HF_HUB_CACHE}), and HF_HUB_OFFLINE is "
    "set: with a network, type: "
)
CARDS, MODELS = shipped_table("llmpq.clusters", "gpus.yaml"), shipped_table("llmpq", "models.yaml")
FEW = {
    "gpus.yaml": {
        "T4": CARDS["T4"] | {"aliases": ["Tesla_T4"]},
        "V100-32GB": CARDS["V100-32GB"] | {"aliases": ["V100"]},
    },
    "models.yaml": {name: MODELS[name] for name in ("opt-1.3b", "opt-13b", "opt-30b")},
}
"""Some of what is shipped, so that lists of known names stay as they are when some are added."""


@pytest.fixture
def few_names(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ship less. The files are others, not the functions: who is imported meanwhile keeps those."""
    tables = (device_spec.device_specs, model_spec.builtin_configs)
    with monkeypatch.context() as patch:
        for module in (device_spec, model_spec):
            patch.setattr(module, "shipped_table", _few)
        for table in tables:
            table.cache_clear()
        yield
    for table in tables:
        table.cache_clear()


def _few(package: str, name: str) -> dict[str, Any]:
    return FEW.get(name) or shipped_table(package, name)


def _run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(list(words))
    shown = capsys.readouterr()
    return code, shown.out, shown.err


ERRORS = {
    "unknown device": (
        ["--device-names", "V10", "--device-numbers", "1", "--model", "opt-13b"],
        2,
        "llmpq-algo: unknown device 'V10': nearest: V100-32GB (all: llmpq-algo devices --known); "
        "describe a card that is not in the table by 'spec' in a cluster YAML: spec: {memory: ... "
        "GiB, mem_gbps: ..., fp16_tflops: ...}\n",
    ),
    "unknown card": (
        ["--devices", "V100,T5:2", "--model", "opt-13b"],
        2,
        "llmpq-algo: --devices T5:2: unknown device 'T5': nearest: T4 (all: llmpq-algo devices "
        "--known); describe it as t5=...GB+...GB/s+...TFLOPS, its memory, bandwidth and dense "
        "16-bit rate\n",
    ),
    "unknown model": (
        ["--device-names", "T4", "--device-numbers", "1", "--model", "opt-31b"],
        2,
        "llmpq-algo: unknown model 'opt-31b': did you mean 'opt-30b'? known: opt-1.3b, opt-13b, "
        "opt-30b\n",
    ),
    "no model": (
        ["--device-names", "T4", "--device-numbers", "1"],
        2,
        "llmpq-algo: --model is missing: a Hugging Face directory, or a name such as opt-30b\n",
    ),
    "a model of no letters": (
        ["--device-names", "T4", "--device-numbers", "1", "--model", ""],
        2,
        "llmpq-algo: the model's name is empty: expected a directory, a GGUF file, or a name such "
        "as Qwen/Qwen3-0.6B\n",
    ),
    "two ways to give devices": (
        ["--model", "opt-13b", "--devices", "4090", "--from-ray"],
        2,
        "llmpq-algo: give the devices in one way: --devices 4090,3090:2,cpu, --cluster FILE, "
        "--device-names with --device-numbers, or --from-ray\n",
    ),
    "unequal lists": (
        ["--device-names", "T4", "V100", "--device-numbers", "1", "--model", "opt-13b"],
        2,
        "llmpq-algo: --device_names has 2 names and --device_numbers 1 numbers; expected as many "
        "of each\n",
    ),
    "does not fit": (
        ["--device-names", "T4", "--device-numbers", "1", "--model", "opt-30b"],
        5,
        "llmpq-algo: opt-30b does not fit T4x1: even at w4a16 and kv16, T4-0 is short by 14.5 GiB, "
        "whatever the context; what fits: --bits 3,4 --batch 2, or 2 more T4\n",
    ),
    "bad pin": (
        [*SMALL, "--pin", "0-99=T4-0"],
        2,
        "llmpq-algo: --pin 0-99=T4-0: opt-13b has layers 0-39\n",
    ),
    "bad pin form": (
        [*SMALL, "--pin", "T4-0"],
        2,
        "llmpq-algo: --pin T4-0: expected LAYERS=DEVICE, such as 0-3=T4-0\n",
    ),
    "pinned device unknown": (
        [*SMALL, "--pin", "0-3=T4-7"],
        2,
        "llmpq-algo: unknown device 'T4-7': did you mean 'T4-0'? known: T4-0, V100-32GB-0\n",
    ),
    "bad bits": (
        [*SMALL, "--bits", "4,5"],
        2,
        "llmpq-algo: unknown precision '5': known: 16, 3, 4, 8, w4a4, w8a8\n",
    ),
    "bad what-if": (
        [*SMALL, "--what-if", "rows=3"],
        2,
        "llmpq-algo: --what-if rows=3: expected +KIND, +KIND:2, -KIND, -DEVICE, -NODE, or another "
        "value of a flag, such as batch=16, prompt-len=8000, bits=8 or kv=8, or several of these "
        "with commas\n",
    ),
    "negative theta": (
        [*SMALL, "--theta", "-1"],
        2,
        "llmpq-algo: --theta must be between 0 and 1e+15 seconds per unit of omega, got -1\n",
    ),
    "impossible budget": (
        [*SMALL, "--bits", "3", "--quality-budget", "0.1"],
        5,
        "llmpq-algo: no plan has a sum of omega of at most 0.1: the smallest that these devices "
        "and precisions allow is 4.59184; give --quality-budget 4.592 or more\n",
    ),
    "flexgen has no plan": (
        [*SMALL, "--method", "flexgen"],
        2,
        "llmpq-algo: --method flexgen is an estimate of offloading, not a plan; see it with "
        "--method all\n",
    ),
    "omega of another model": (
        [*SMALL, "--omega-file", str(PAPER / "omega-opt-30b.json")],
        2,
        f"llmpq-algo: '{PAPER / 'omega-opt-30b.json'}' was made for 48 layers (opt-30b), the model "
        "has 40; make one for this model with llmpq-profile indicator --model\n",
    ),
    "too long": (
        ["--device-names", "V100", "--device-numbers", "1", "--model", "opt-13b", "--s", "2048"],
        2,
        "llmpq-algo: prompts of 2048 and answers of 100 tokens are beyond the 2048 positions of "
        "opt-13b; give a smaller --s or --gen-len\n",
    ),
    "what-if without a known device": (
        [*SMALL, "--what-if", "-T4-7"],
        2,
        "llmpq-algo: --what-if -T4-7: unknown device 'T4-7': did you mean 'T4-0'? known: T4-0, "
        "V100-32GB-0\n",
    ),
    "what-if of an unknown kind": (
        [*SMALL, "--what-if", "+V10"],
        2,
        "llmpq-algo: --what-if V10: unknown device 'V10': nearest: V100-32GB (all: llmpq-algo "
        "devices --known); describe it as v10=...GB+...GB/s+...TFLOPS, its memory, bandwidth and "
        "dense 16-bit rate\n",
    ),
    "what-if without any device": (
        ["--device-names", "V100", "--device-numbers", "1", "--model", "opt-13b", *JOB]
        + ["--what-if", "-V100-32GB-0"],
        2,
        "llmpq-algo: --what-if would leave no device\n",
    ),
    "no such cluster file": (
        ["--cluster", "nowhere.yaml", "--model", "opt-13b"],
        2,
        "llmpq-algo: no such cluster file: 'nowhere.yaml'\n",
    ),
    "model given twice": (
        ["--model", "opt-13b", "--model-name", "opt", "--model-size", "13b"],
        2,
        "llmpq-algo: give either --model or --model-name with --model-size, not both\n",
    ),
    "no such model directory": (
        ["--model", "models/mine"],
        2,
        f"llmpq-algo: no such model directory: 'models/mine'; {NOT_CACHED}"
        "hf download models/mine\n",
    ),
    "no such model on the hub": (
        ["--model", "facebook/opt-31b"],
        2,
        f"llmpq-algo: no such model directory: 'facebook/opt-31b'; {NOT_CACHED}"
        "hf download facebook/opt-31b; or a built-in model: did you mean 'opt-30b'?\n",
    ),
    "no requests": (
        [*SMALL, "--global_bz", "0"],
        2,
        "llmpq-algo: --global_bz must be between 1 and 10,000, got 0; it counts the requests in "
        "flight, and a plan runs any number of them\n",
    ),
    "micro-batch beyond the batch": (
        [*SMALL, "--prefill-microbatch", "9"],
        2,
        "llmpq-algo: --prefill-microbatch must be between 1 and the batch of 8, got 9\n",
    ),
    "only the constraints forbid it": (
        [*SMALL, "--bits", "8", "--pin", "0-39=T4-0"],
        5,
        "llmpq-algo: opt-13b fits T4x1-V100x1 only without --pin; leave it out\n",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_say_what_and_what_to_do(
    capsys: pytest.CaptureFixture[str], few_names: None, name: str
) -> None:
    words, code, text = ERRORS[name]
    got, _, err = _run(capsys, *words)
    assert (got, err) == (code, text)


@pytest.mark.parametrize("flag", ["-o", "--report", "--pareto"])
def test_a_full_disk_is_said_with_the_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, flag: str
) -> None:
    full = tmp_path / "full.html"
    full.symlink_to("/dev/full")
    words = [flag, str(full)] if flag != "--pareto" else ["--pareto", "-o", str(full)]
    code, _, err = _run(capsys, *SMALL, *words)
    assert code == 2
    assert f"cannot write '{full}': no space left on device; what it held is kept" in err


def test_a_full_disk_is_said_with_the_file_of_an_export(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = str(ROOT / "docs" / "plan.json")
    code, _, err = _run(capsys, "export", plan, "--to", "vllm", "-o", "/dev/full")
    assert (code, "cannot write '/dev/full': no space left on device" in err) == (2, True)
