"""What a refusal names fits: every change is typed and planned."""

from __future__ import annotations

import json
import re
import time

import pytest

from llmpq.planner.__main__ import main
from llmpq.plans import capabilities
from llmpq.plans.capabilities import Feature
from llmpq.plans.plan import Plan

pytestmark = pytest.mark.pure

JOB = "--time-limit 5"
REFUSED = {
    "a big model, two small cards": "--devices 4090,3060 --model llama-3.3-70b --bits 4 --batch 1",
    "one card": "--devices 3060 --model qwen3-14b --bits 8 --batch 4",
    "a long answer": "--devices 4060 --model qwen3-8b --bits 4 --batch 1 --gen-len 30000",
    "many requests": "--devices 3060,4060 --model qwen3-8b --bits 4,8 --kv 16,8 --batch 400",
    "a mixture": "--devices 4060:2 --model gpt-oss-20b --batch 2",
    "requests of bits that fit by none alone": "--devices 4070 --model qwen3-14b --bits 4 "
    "--context 16k --batch 16",
    "no bfloat16": "--devices t4:2 --model qwen3-32b --batch 1",
    "a CPU too small": "--devices 4060,cpu=8GB+4threads --model qwen3-32b --bits 4 --batch 1",
    "a fixed micro-batch": "--devices 3060 --model qwen3-14b --batch 200 --decode-microbatch 200",
}
FEW = ("one card", "a big model, two small cards")


def refusal(capsys: pytest.CaptureFixture[str], words: list[str]) -> str:
    code = main(words)
    err = capsys.readouterr().err.strip().splitlines()
    assert code == 5, err
    return err[-1]


def typed(words: list[str], way: str) -> list[str]:
    """Return the words of a command after a change that a refusal names."""
    at = words.index("--devices") + 1
    cpu, more = re.match(r"cpu=\d+GB", way), re.match(r"(one|\d+) more (.*)", way)
    if cpu is not None:
        devices = [name for name in words[at].split(",") if not name.startswith("cpu")]
        return [*words[:at], ",".join([*devices, f"{cpu[0]}+4threads"]), *words[at + 1 :]]
    if more is not None:
        count = "1" if more[1] == "one" else more[1]
        return [*words[:at], f"{words[at]},{more[2]}:{count}", *words[at + 1 :]]
    return [*words, *way.split()]


@pytest.mark.parametrize(
    "name", [n if n in FEW else pytest.param(n, marks=pytest.mark.seldom) for n in REFUSED]
)
def test_every_change_that_a_refusal_names_fits(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    words = [*REFUSED[name].split(), *JOB.split()]
    line = refusal(capsys, words)
    ways = line.partition("what fits: ")[2].split(", or ")
    assert len(ways) >= 2, line
    for way in ways:
        assert main(typed(words, way)) == 0, (way, capsys.readouterr().err)
    given = set(re.findall(r"--[a-z-]+", line.partition("what fits")[0]))
    assert given <= set(words), "no flag that was not typed"


@pytest.mark.parametrize(
    ("job", "instead"),
    [
        ("--devices m4-max=36GB --model llama-3.1-70b --bits 4", "M4-Max=64GB"),
        ("--devices strix-halo=32GB --model qwen3-32b --bits 4,8 --context 40k", "Strix-Halo=64GB"),
        ("--devices gb10 --model llama-3.1-405b --bits 4", None),
    ],
)
def test_a_machine_whose_gpu_has_the_hosts_memory_gets_no_card_and_no_more_of_it(
    capsys: pytest.CaptureFixture[str], job: str, instead: str | None
) -> None:
    words = [*job.split(), "--batch", "1", *JOB.split()]
    line = refusal(capsys, words)
    assert "more " not in line.partition("; what fits")[2] and "cpu=" not in line
    assert (instead is not None) == (f"{instead} instead" in line)
    if instead is not None:
        assert main([words[0], instead, *words[2:]]) == 0


def test_cards_that_share_stages_get_as_many_more_as_share_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Changes are planned with shared stages, too; a group of cards is no card."""
    words = ["--devices", "3060:2", "--tensor-parallel", "2", "--model", "llama-3.3-70b"]
    words += ["--bits", "4", "--batch", "1", *JOB.split()]
    line = refusal(capsys, words)
    assert ", or " in line and "what fits: 2 more RTX-3060, or cpu=" in line
    assert main(typed(words, "2 more RTX-3060")) == 0


def test_a_card_that_shares_a_stage_has_its_own_driver_s_memory(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A 3060 beside a 5090, whose driver takes 0.1 GiB more, was refused its share for that."""
    words = "--devices 5090,3060 --tensor-parallel 3:1 --model llama-3.3-70b --bits 4 --batch 1"
    assert main([*words.split(), "--json", *JOB.split()]) == 0
    (stage,) = json.loads(capsys.readouterr().out)["stages"]
    taken = [member["memory"]["context_bytes"] for member in stage["devices"]]
    assert taken[0] > taken[1] == 1 << 29


def test_a_refusal_takes_no_search(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--devices 4090,3060 --model llama-3.3-70b --bits 4 --batch 1 --time-limit 60"
    start = time.process_time()
    line = refusal(capsys, words.split())
    assert time.process_time() - start < 5, "the fewest bits are counted, not searched"
    assert "--bits 3,4" in line and "cpu=" in line


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("--max-devices 1", "; what fits: leaving out --max-devices, or --bits "),
        ("--pin 0-31=RTX-4060-0", "only without --pin; leave it out"),
        ("--group 32", "only without --group; leave it out"),
        ("--max-devices 1 --group 2", "; what fits: leaving out --max-devices, or --bits "),
    ],
)
def test_limits_that_were_given_are_named_and_no_other(
    capsys: pytest.CaptureFixture[str], flags: str, text: str
) -> None:
    words = "--devices 4060:2 --model llama-3.1-8b --bits 8 --batch 64 --prompt-len 180 --gen-len 8"
    line = refusal(capsys, [*words.split(), *flags.split()])
    assert text in line
    assert set(re.findall(r"--[a-z-]+", line)) <= {*flags.split(), "--bits", "--kv", "--batch"}


def test_a_context_is_refused_and_mended_as_a_context(capsys: pytest.CaptureFixture[str]) -> None:
    """Beyond the model's positions no remedy leads, and no flag is named that was not typed."""
    words = [
        "--devices",
        "4090",
        "--model",
        "mistral-small-24b",
        "--batch",
        "1",
        "--context",
        "128k",
    ]
    line = refusal(capsys, words)
    assert "131072 tokens are also beyond the model's 32768 positions" in line
    assert "--context 32768" in line and "--prompt-len" not in line
    assert main([*words[:-1], "32768", "--time-limit", "5"]) == 0
    assert "beyond" not in capsys.readouterr().out
    answers = "--devices 3060 --model qwen3-8b --bits 8 --batch 1 --context 40k --gen-len 39k"
    ways = refusal(capsys, answers.split()).partition("what fits: ")[2].split(", or ")
    (longest,) = [way for way in ways if "--gen-len" in way]
    assert main([*answers.split(), *longest.split(), *JOB.split()]) == 0
    assert "first token after" in next(way for way in ways if way.startswith("cpu="))


@pytest.mark.parametrize(
    ("devices", "job", "unit"),
    [
        ("4090,3090:2", "--model llama-3.3-70b --context 128k", "hours"),
        ("4060", "--model qwen3-30b-a3b --context 4k", "s"),
    ],
)
def test_a_cpu_is_offered_last_with_its_speed(
    capsys: pytest.CaptureFixture[str], devices: str, job: str, unit: str
) -> None:
    line = refusal(capsys, ["--devices", devices, "--batch", "1", *job.split()])
    ways = line.partition("what fits: ")[2].split(", or ")
    assert len(ways) > 1 and not any(way.startswith("cpu=") for way in ways[:-1])
    said = r"cpu=\d+GB among the devices \(first token after ([\d.]+) (\w+), then ([\d.]+) .*\)"
    found = re.fullmatch(said, ways[-1])
    assert found is not None and found[2] == unit, ways
    wait_s, rate = float(found[1]) * {"s": 1, "hours": 3600}[unit], float(found[3])
    words = [*job.split(), "--batch", "1", "--prefer", "speed", "--json", *JOB.split()]
    assert main(["--devices", f"{devices},{ways[-1].split()[0]}", *words]) == 0
    plan = Plan.parse_data(json.loads(capsys.readouterr().out), where="test")
    assert plan.predicted is not None
    assert plan.predicted.total_s <= 1.02 * (wait_s + 99 / rate)  # a search finds no worse


def test_a_changed_length_is_planned_whichever_flag_gave_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [
        "--devices",
        "4090",
        "--model",
        "llama-3.1-8b",
        "--batch",
        "1",
        "--context",
        "4k",
        "--what-if",
    ]
    lines = []
    for change in ("prompt-len=8092", "context=8192"):
        assert main([*words, change]) == 0
        lines += [x for x in capsys.readouterr().out.splitlines() if x.startswith("what if")]
    assert len({line.partition(": ")[2] for line in lines}) == 1 and "(+0.0%)" not in lines[0]


def test_what_llmpq_does_not_run_stands_above_the_plan(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = Feature(name="odd layers", met=lambda spec, _: True, without=frozenset({"gpu"}))
    monkeypatch.setattr(capabilities, "FEATURES", (*capabilities.FEATURES, odd))
    assert main(["--devices", "4090", "--model", "qwen3.5-27b", "--batch", "1", "--bits", "4"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("warning: qwen3.5-27b (qwen3_5) has odd layers, which llmpq does not")
    assert text.count("has odd layers") == 1
