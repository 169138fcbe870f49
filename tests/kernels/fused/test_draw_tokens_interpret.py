"""The sampling kernel against its twin, and against the CPU's way of sampling."""

import pytest
import torch
from triton import knobs

from llmpq.kernels.fused.draw_tokens import KEY_BITS, sample_rows
from llmpq.runtime.models.sampling import SamplerConfig, sample, sampling_rows
from reference.fused_twins import sample_rows_reference

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.skipif(not knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
]
WAYS = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 20},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 0.9, "top_k": 40, "top_p": 0.9},
    {"temperature": 5.0, "top_p": 0.98},  # most columns
    {"temperature": 0.0},
    {"temperature": 1e-300, "top_p": 0.5},
    {"temperature": 100.0, "top_k": 3},
    {"temperature": 1.0, "top_k": 1_000_000},
    {"temperature": 1.0, "top_p": 1e-9},
]


def rows(dtype: torch.dtype, columns: int) -> tuple[torch.Tensor, list[SamplerConfig], list[int]]:
    """Return two rows of logits for every way of sampling."""
    params = [SamplerConfig(**way, seed=seed) for way in WAYS for seed in range(2)]
    generator = torch.Generator().manual_seed(columns)
    logits = torch.randn(len(params), columns, generator=generator) * 3
    return logits.to(dtype), params, list(range(len(params)))


def table_of(params: list[SamplerConfig], steps: list[int], columns: int) -> torch.Tensor:
    return torch.tensor(sampling_rows(params, steps, vocab=columns), dtype=torch.float64)


@pytest.mark.parametrize(
    ("dtype", "columns"), [*((dtype, 100) for dtype in KEY_BITS), (torch.float32, 777)]
)
def test_tokens_are_the_twins_and_the_cpus(dtype, columns):
    logits, params, steps = rows(dtype, columns)
    got = sample_rows(logits, table_of(params, steps, columns), block=256)
    assert torch.equal(got, sample_rows_reference(logits, table_of(params, steps, columns)))
    if dtype == torch.float32:  # 16 bits have equals, of which the CPU keeps any
        assert torch.equal(got, sample(logits, params, steps))
    moved = table_of(params[:4], [step + 1 for step in steps[:4]], columns)
    assert not torch.equal(got[:4], sample_rows(logits[:4], moved, block=256))


def test_of_equals_the_first_are_kept():
    logits = torch.zeros(4, 100)
    logits[:, 7] = 1.0
    equals = [column for column in range(100) if column != 7]
    # e for the largest and 1 for each other: half of e + 99 is e + 48.1, half of e + 39 e + 18.1
    for k, p, others in ((5, 1.0, 4), (100, 0.5, 49), (40, 0.5, 19)):
        how = torch.tensor([[1.0] * 4, [k] * 4, [p] * 4, [0.0, 0.3, 0.6, 1 - 2**-53]]).double()
        got = sample_rows(logits, how, block=64)
        assert got[0] == 0 and got[3] == max(7, equals[others - 1]), (k, p)
        assert torch.equal(got, sample_rows_reference(logits, how))


def test_columns_that_nothing_may_pick_are_never_picked():
    logits = torch.full((6, 130), -float("inf"))
    logits[:, 100:104] = torch.tensor([0.0, -1.0, -2.0, -200.0])
    numbers = torch.tensor([0.0, 0.3, 0.7, 0.9, 0.999999, 1 - 2**-53], dtype=torch.float64)
    for temperature, k, p in ((1.0, 130, 1.0), (1.0, 3, 0.9), (1e300, 130, 1.0), (1.0, 130, 0.9)):
        how = torch.tensor([[v] * 6 for v in (temperature, k, p)], dtype=torch.float64)
        got = sample_rows(logits, torch.cat((how, numbers[None])), block=64)
        assert set(got.tolist()) <= {100, 101, 102, 103}
        assert got[0] == 100


def test_a_row_with_nan_draws_one_of_its_columns():
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(7))
    logits[0, 3] = logits[1] = float("nan")
    params = [SamplerConfig(temperature=1.0, top_p=0.9), SamplerConfig(temperature=1.0, top_k=5)]
    how = table_of(params * 2, [0] * 4, 50)
    got = sample_rows(logits, how, block=64)
    assert ((got >= 0) & (got < 50)).all()
    assert torch.equal(got[2:], sample_rows_reference(logits, how)[2:])


def test_wrong_tables_are_refused():
    with pytest.raises(ValueError, match=r"float64 \[4, 2\]; got torch.float32 \[4, 2\]"):
        sample_rows(torch.zeros(2, 9), torch.zeros(4, 2))
    with pytest.raises(ValueError, match=r"got torch.float64 \[3, 2\]"):
        sample_rows(torch.zeros(2, 9), torch.zeros(3, 2).double())
    with pytest.raises(ValueError, match=r"logits are torch.float64, expected one of .*float32"):
        sample_rows(torch.zeros(2, 9).double(), torch.zeros(4, 2).double())


def test_a_share_that_float32_rounds_to_nothing_is_the_likeliest_token():
    how = torch.tensor([[1.0], [3], [1e-46], [0.5]], dtype=torch.float64)
    assert sample_rows(torch.tensor([[0.0, 3.0, 1.0]]), how, block=64).tolist() == [1]


def test_infinite_logits_are_the_likeliest():
    logits = torch.tensor([[0.0, 1.0, float("inf")]]).expand(3, 3)
    params = [SamplerConfig(), SamplerConfig(temperature=0.8), SamplerConfig(temperature=1.0)]
    got = sample_rows(logits, table_of(params, [0] * 3, 3), block=64)
    assert got.tolist() == [2, 2, 2] and torch.equal(got[:1], sample(logits[:1], params[:1], [0]))


def test_rounded_sums_do_not_pick_a_column_that_weighs_nothing():
    """Half of the columns weigh nothing; the numbers lie where the others' sums end."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.full((48, 128), -float("inf"), dtype=torch.bfloat16)
    logits[:, :45] = torch.randn(48, 45, generator=generator).bfloat16()
    logits[:, -1] = -12.0
    weights = (logits.double() - logits.double().amax(1, keepdim=True)).exp()
    ends = weights[:, :45].sum(1) / weights.sum(1)
    numbers = ends * (1 + torch.linspace(-2e-7, 2e-7, 48, dtype=torch.float64))
    how = torch.stack([torch.full((48,), v, dtype=torch.float64) for v in (1.0, 128, 1.0)])
    got = sample_rows(logits, torch.cat((how, numbers[None])), block=64)
    assert logits[torch.arange(48), got].isfinite().all()


def test_a_share_of_nearly_one_keeps_no_more_than_top_k():
    """16 equals in the largest one's lane: a sum in float32 does not hear of them."""
    logits = torch.full((1, 17 * 64), -18.0, dtype=torch.bfloat16)
    logits[:, 63::64] = -17.375
    logits[:, 63] = 0.0
    how = torch.tensor([[1.0], [17], [1 - 2**-24], [1e-7]], dtype=torch.float64)
    assert sample_rows(logits, how, block=64).tolist() == [63]
