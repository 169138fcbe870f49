"""Which kernel is chosen, the tuned tables, and the custom op's fake: no GPU needed."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from llmpq.kernels.gemm import choice as gemm_config
from llmpq.kernels.gemm import linear_gpu
from llmpq.kernels.gemm.choice import M_BUCKETS, bucket, rounded_rows
from llmpq.kernels.gemm.ranking.config import Config, config_entry
from llmpq.kernels.gemm.ranking.machine import REFERENCE, Machine
from llmpq.kernels.gemm.ranking.predict import Product
from llmpq.kernels.weights import quantized_weight
from reference.kernel_commands import main as kernels_main

pytestmark = pytest.mark.cpu

TUNED = sorted((Path(linear_gpu.__file__).parent / "tuned").glob("*.json"))


def test_buckets_hold_every_row_count():
    assert [bucket(m) for m in (1, 3, 64, 65, 300, 4096)] == [1, 4, 64, 128, 320, 4096]
    assert [bucket(m) for m in (256, 321, 1153, 2047, 2049)] == [256, 384, 1280, 2048, 4096]
    assert bucket(5000) is None


def test_plans_are_made_for_numbers_of_rows_that_are_not_less():
    for rows in range(1, 5000, 7):
        assert rows <= rounded_rows(rows) <= max(2 * rows, 16)
        assert rounded_rows(rounded_rows(rows)) == rounded_rows(rows)
    assert [rounded_rows(m) for m in (1, 3, 9, 96, 97, 777, 1025)] == [1, 4, 16, 96, 112, 800, 1056]


@pytest.mark.parametrize("path", TUNED, ids=lambda p: p.name)
def test_tuned_tables_parse_and_fit_their_shapes(path):
    table = json.loads(path.read_text())
    assert table["schema"] == 2 and table["reason"] and table["measured_on"]
    assert table["multiprocessors"] > 0 and len(table["capability"]) == 2
    for entry in table["entries"]:
        config = Config(**entry["config"])
        assert entry["m"] in M_BUCKETS and entry["bits"] in (3, 4, 8)
        assert entry.get("form") in (None, "fp16 zeros", "bf16", "bf16 zeros")
        assert config_entry(config) == entry["config"]
        groups = entry["k"] // 128
        if config.kernel == "splitk_gemm":
            assert entry["n"] % (16 * config.blocks * config.warps) == 0
            assert config.split <= groups // (config.depth if config.stages == 1 else 1)
            assert config.bm >= min(entry["m"], 16) and (
                config.split == 1 or config.bm >= entry["m"]
            )
        elif config.kernel == "gemv":
            assert entry["m"] <= 8 and groups % config.warps == 0


def test_a_near_measurement_goes_before_the_model(monkeypatch):
    def config(split):
        return Config(kernel="splitk_gemm", split=split)

    key = partial(gemm_config._Key, (9, 0, 132), n=64, k=1024, m=16)
    table = {key(4): config(1), key(4, form="bf16 zeros"): config(2), key(8): config(3)}
    table |= {key(4, m=512): config(4), key(4, m=768): config(5)}
    monkeypatch.setattr(gemm_config, "_tuned", lambda: table)

    def split(bits, form, rows=16, machine=REFERENCE):
        found = gemm_config._measured(machine, Product(bits, 64, 1024, rows, form))
        return found and found.split

    assert split(4, "fp16") == split(4, "bf16") == split(3, "fp16") == 1
    assert split(4, "bf16 zeros") == split(3, "bf16 zeros") == 2
    assert split(8, "bf16 zeros") == 3, "8 bits do not take those of 4"
    assert [split(4, "fp16", m) for m in (400, 450, 512, 600, 700, 900)] == [
        None,
        4,
        4,
        None,
        5,
        None,
    ]
    assert split(4, "fp16", 9) == 1 and split(4, "fp16", 17) is None
    assert split(4, "fp16", machine=Machine(multiprocessors=114)) is None
    other = Machine(capability=(8, 0))
    assert split(4, "fp16", machine=other) is None


@pytest.mark.parametrize("more", [{"bm": 224}, {"bm": 160, "blocks": 2}, {"bm": 132}])
def test_tiles_of_two_parts_that_the_kernel_does_not_know_are_refused(more):
    assert Config(kernel="wgmma_gemm", bm=160).bm == 160
    with pytest.raises(ValueError, match="sum of two"):
        Config(kernel="wgmma_gemm", **more)


def test_a_loop_known_to_sum_wrongly_is_refused():
    with pytest.raises(ValueError, match="wrong sums"):
        Config(kernel="splitk_gemm", stages=3, scale_w=True)


def test_the_custom_op_has_a_fake():
    with FakeTensorMode():
        x = torch.empty(5, 256, dtype=torch.float16)
        planes = [torch.empty(64 * 256 // 2, dtype=torch.uint8)]
        scale = torch.empty(128, dtype=torch.float16)
        y = quantized_weight.quantized_linear(x, planes, scale, None, None, None, 4, False, 64)
    assert y.shape == (5, 64) and y.dtype == torch.float16


def test_commands_without_a_gpu(capsys):
    if torch.cuda.is_available():
        pytest.skip("this is what happens without one")
    assert kernels_main(["check", "gemm", "--bits", "4", "--dtype", "fp32"]) == 0
    assert "0 wrong" in capsys.readouterr().out
