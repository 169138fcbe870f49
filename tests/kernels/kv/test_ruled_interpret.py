"""Attention by a `ScoreRule` in the interpreter against its twin: windows, caps, sinks, latents."""

import pytest
import torch

from llmpq.kernels.kv.reference import ScoreRule

triton = pytest.importorskip("triton")
if not triton.knobs.runtime.interpret:
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

from llmpq.kernels.kv import ruled_attend as module  # noqa: E402
from llmpq.kernels.kv.ruled_attend import ruled_attend, ruled_attend_reference  # noqa: E402

pytestmark = pytest.mark.interpret
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}
"""Of the largest output: float32 sums, and one rounding of shares to float16 (2^-11)."""
PLAIN, WINDOW, CAP = ScoreRule(), ScoreRule(window=37), ScoreRule(cap=3.0)


def sinks(heads):
    return ScoreRule(window=50, cap=5.0, sinks_H=torch.linspace(-2, 4, heads))


def error_of(
    rule, *, heads=4, groups=2, dim=64, rows=((0, 90), (130, 3), (64, 1)), latent=False,
    dtype=torch.float32, value_dim=None, splits=None,
):  # fmt: skip
    """Return the largest difference of valid rows, over the twin's largest output."""
    torch.manual_seed(dim + heads)
    q_len, end = max(n for _, n in rows), max(start + n for start, n in rows)
    slots = torch.randperm(len(rows) + 1)[: len(rows)]
    shape = (len(rows) + 1, groups, end, dim)
    k = torch.randn(shape).to(dtype)
    v = k if latent else torch.randn(shape).to(dtype)
    q = torch.randn(len(rows), q_len, heads, dim).to(dtype)
    start, count = (torch.tensor(column) for column in zip(*rows, strict=True))
    options = {"scale": 2 * dim**-0.5, "rule": rule, "value_dim": value_dim}
    where = (q, k, v, slots, start, count)
    got = ruled_attend(*where, max_end=end, splits=splits, **options)
    expected = ruled_attend_reference(*where, **options)
    assert got.shape == expected.shape
    difference = torch.cat(
        [(got[i, :n] - expected[i, :n]).float().flatten() for i, (_, n) in enumerate(rows)]
    )
    return float(difference.abs().max() / expected.float().abs().max())


@pytest.mark.parametrize("rule", [PLAIN, WINDOW, CAP, sinks(4)], ids=["plain", "w", "cap", "all"])
@pytest.mark.parametrize("splits", [None, 1, 5])
def test_rules(rule, splits):
    assert error_of(rule, splits=splits) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("dim", [8, 24, 64, 80, 96, 128, 192, 256])
def test_head_dims(dim):
    assert error_of(sinks(2), heads=2, groups=1, dim=dim) < TOLERANCE[torch.float32]


@pytest.mark.parametrize(("dim", "value_dim"), [(576, 512), (48, 32), (40, 24)])
@pytest.mark.parametrize("splits", [None, 3])
def test_latents_are_their_own_values(dim, value_dim, splits):
    rows = ((0, 5), (70, 2), (33, 1))
    kind = {"heads": 6, "groups": 1, "dim": dim, "value_dim": value_dim, "latent": True}
    assert error_of(PLAIN, rows=rows, splits=splits, **kind) < TOLERANCE[torch.float32]


@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (5, 1), (6, 2), (8, 8), (14, 2)])
def test_heads_and_decoding_rows(heads, groups):
    rows = ((199, 1), (0, 1), (37, 1), (36, 1))
    assert error_of(sinks(heads), heads=heads, groups=groups, rows=rows) < TOLERANCE[torch.float32]


def test_float16():
    assert error_of(sinks(4), dim=128, dtype=torch.float16) < TOLERANCE[torch.float16]


@pytest.mark.parametrize("window", [1, 2, 64, 65, 1000])
def test_windows(window):
    assert error_of(ScoreRule(window=window), splits=2) < TOLERANCE[torch.float32]


def test_a_window_off_by_one_would_be_caught(monkeypatch):
    def wider(*arrays, rule, **options):
        return twin(*arrays, rule=ScoreRule(window=rule.window + 1), **options)

    twin = ruled_attend_reference
    monkeypatch.setattr(f"{__name__}.ruled_attend_reference", wider)
    assert error_of(WINDOW) > 100 * TOLERANCE[torch.float32]


def test_every_program_fits_the_smallest_card():
    """99 KiB: RTX cards; two pieces of a head, queries of a whole prompt."""
    for dim in (64, 80, 96, 128, 192, 256, 576):
        for item in (2, 4):
            for rows in (1, 16, 17, 64, 4096):
                tiles = module.choose_tiles(dim, item, rows, latent=dim == 576, block=99 << 10)
                assert tiles.rows >= min(rows, 16)
    with pytest.raises(ValueError, match="bytes shared"):
        module.choose_tiles(576, 4, 1, latent=False, block=48 << 10)


def test_caches_of_unlike_strides_are_refused():
    q, k = torch.zeros(1, 1, 2, 16), torch.zeros(1, 2, 8, 16)
    where = torch.zeros(1, dtype=torch.long)
    with pytest.raises(ValueError, match="strides"):
        ruled_attend(*(q, k, k.transpose(1, 2), where, where, where + 1), max_end=1, scale=1.0)
