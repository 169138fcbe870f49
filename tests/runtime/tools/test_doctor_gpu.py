"""The doctor calls GPUs that work usable, and what it tries on them is right in every dtype."""

from __future__ import annotations

import json

import pytest
import torch

from llmpq.runtime.cli.main import main
from llmpq.runtime.launch.stages.node_survey import try_products

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def test_cards_that_work_are_usable_in_every_dtype(capsys):
    for index in range(torch.cuda.device_count()):
        assert try_products(torch.device("cuda", index), DTYPES) is None
    code = main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    errors = [found["text"] for found in report["findings"] if found["level"] == "error"]
    assert (code, errors) == (0, [])
    tried = report["nodes"][0]["tried"]
    assert tried == [{"gpu": i, "problem": None} for i in range(torch.cuda.device_count())]
    assert all(line["usable"] for line in report["devices"]) and len(report["devices"]) > 1
