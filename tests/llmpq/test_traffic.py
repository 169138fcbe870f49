"""Traces of services: which files are read, and what is said of a bad one."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from llmpq.traffic import Arrival, at_rate, poisson_traffic, rate_of, read_traffic

pytestmark = pytest.mark.pure

FILES = {
    "ours.jsonl": '{"at_s": 3, "prompt_tokens": 7, "output_tokens": 2}\n\n'
    '{"at_s": 1.5, "prompt_tokens": 5, "output_tokens": 1}\n',
    "ours.csv": "arrival_ms,prompt_tokens,output_tokens\n1500,5,1\n3000,7,2\n",
    "azure.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:15:59.5000000,5,1\n2023-11-16 18:16:01.0000000,7,2\n",
    "azure_2024.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2024-05-10 00:00:59.500000+00:00,5,1\n2024-05-10 00:01:01+00:00,7,2\n",
    "mooncake.jsonl": '{"timestamp": 1500, "input_length": 5, "output_length": 1}\n'
    '{"timestamp": 3000, "input_length": 7, "output_length": 2}\n',
    "burst.csv": "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "1.5,ChatGPT,5,1,6,API log\n3,GPT-4,7,2,9,API log\n",
    "sim.jsonl": '{"input_toks": 5, "output_toks": 1, "arrival_time_ns": 1500000000}\n'
    '{"input_toks": 7, "output_toks": 2, "arrival_time_ns": 3000000000}\n',
}


@pytest.mark.parametrize("name", FILES)
def test_each_form_of_a_trace_is_read(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(FILES[name])
    assert read_traffic(path) == (Arrival(0.0, 5, 1), Arrival(1.5, 7, 2))


def test_blocks_of_a_trace_say_which_prompts_begin_alike(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    row = '{{"timestamp": 0, "input_length": 1000, "output_length": 1, "hash_ids": {}}}\n'
    path.write_text(row.format([4, 1]) + row.format([4, 2]))
    first, second = (one.prompt(50, n) for n, one in enumerate(read_traffic(path)))
    assert first[:512] == second[:512] and first[512:] != second[512:]
    assert len(first) == len(second) == 1000


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no requests"),
        ("a,b\n1,2\n", "line 2: no column of arrivals: got a, b, expected one of at_s"),
        ("arrival_ms,prompt_tokens\n1,2\n", "no column of the answer's tokens"),
        ("arrival_ms,prompt_tokens,output_tokens\n1,0,2\n", "at least 1, got '0'"),
        ("arrival_ms,prompt_tokens,output_tokens\n1,2.5,2\n", "whole number"),
        ("arrival_ms,prompt_tokens,output_tokens\n1,1e9,2\n", "of 1 to 16,777,216, got '1e9'"),
        ("arrival_ms,prompt_tokens,output_tokens\nnoon,2,2\n", "a date and time, got 'noon'"),
        (
            '{"at_s": 0, "prompt_tokens": 1, "output_tokens": 1}\nnot json\n',
            "line 2: expected a JS",
        ),
    ],
)
def test_a_bad_trace_is_named_by_its_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(ValueError, match=said.replace("(", r"\(")):
        read_traffic(path)


def test_a_trace_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot read the trace"):
        read_traffic(tmp_path / "none.csv")


def test_another_rate_stretches_the_distances() -> None:
    traffic = (Arrival(0.0, 5, 1), Arrival(1.0, 5, 1), Arrival(4.0, 5, 1))
    assert rate_of(traffic) == 0.5
    assert [one.at_s for one in at_rate(traffic, 1.0)] == [0.0, 0.5, 2.0]
    assert [one.at_s for one in at_rate(traffic, math.inf)] == [0.0] * 3
    at_once = at_rate(traffic, math.inf)
    assert [one.at_s for one in at_rate(at_once, 2.0)] == [0.0, 0.5, 1.0]


def test_drawn_traffic_has_its_rate_and_its_lengths() -> None:
    traffic = poisson_traffic([10, 20], [3], requests=4000, rate_per_s=5.0)
    assert rate_of(traffic) == pytest.approx(5.0, rel=0.06)
    assert {one.prompt_tokens for one in traffic} == {10, 20}
    assert {one.output_tokens for one in traffic} == {3}
    assert traffic == poisson_traffic([10, 20], [3], requests=4000, rate_per_s=5.0)
