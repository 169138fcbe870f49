"""The plain-torch low-bit cache against attention recomputed from the whole history."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmpq.kernels.formats.kv_block import KVFormat
from llmpq.kernels.kv import step_view as kv_view
from llmpq.kernels.kv.reference import Scoring, append, append_and_attend
from llmpq.kernels.kv.step_view import Rows
from llmpq.kernels.kv.storage import allocate_layer, contiguous_table
from llmpq.precision import KVPrecision
from llmpq.sizes.kv_format import packed_blocks, packed_end
from reference.kv_history import attend_from_history, relative_error

pytestmark = pytest.mark.cpu
TOLERANCE = (
    1e-5  # fp32 arithmetic on the same codes; a wrong line or token moves the output by > 1e-3
)
MAX_LEN = 600


class Bench:
    """A cache beside the history of what was written to it."""

    def __init__(self, fmt, slots=3, heads=4, kv_heads=2, seed=0):
        self.fmt, self.slots, self.heads, self.kv_heads = fmt, slots, heads, kv_heads
        blocks = packed_blocks(MAX_LEN)
        self.gen = torch.Generator().manual_seed(seed)
        self.layer = allocate_layer(
            fmt,
            pages=slots * blocks,
            slots=slots,
            kv_heads=kv_heads,
            dtype=torch.float32,
            device="cpu",
        )
        order = torch.randperm(slots * blocks, generator=self.gen).int()
        self.table = order.reshape(slots, blocks)
        shape = (slots, MAX_LEN, kv_heads, fmt.head_dim)
        self.history = [torch.zeros(shape), torch.zeros(shape)]
        self.slopes = torch.linspace(0.01, 0.1, heads)

    def randn(self, *shape):
        return torch.randn(*shape, generator=self.gen)

    def step(self, start, counts, slots=None, alibi=False):
        """Run one step and return its error against the history, worst request."""
        slots = list(range(len(start))) if slots is None else slots
        q_len, dim = max(counts), self.fmt.head_dim
        q = self.randn(len(start), q_len, self.heads, dim)
        k, v = (self.randn(len(start), q_len, self.kv_heads, dim) for _ in range(2))
        rows = Rows(
            slots_B=torch.tensor(slots), start_B=torch.tensor(start), num_new_B=torch.tensor(counts)
        )
        slopes = self.slopes if alibi else None
        got = append_and_attend(
            self.fmt, self.layer, self.table, q, k, v, rows, scoring=Scoring(dim**-0.5, slopes)
        )
        worst = 0.0
        for b, (slot, first, count) in enumerate(zip(slots, start, counts, strict=True)):
            for past, new in zip(self.history, (k, v), strict=True):
                past[slot, first : first + count] = new[b, :count]
            if not count:
                assert got[b].isfinite().all()
                continue
            past_k, past_v = (past[slot] for past in self.history)
            want = attend_from_history(
                self.fmt,
                q[b, :count],
                past_k,
                past_v,
                start=first,
                scale=dim**-0.5,
                alibi_slopes_H=slopes,
            )
            worst = max(worst, relative_error(got[b, :count], want))
        return worst


def formats(head_dim=32):
    return [
        KVFormat(precision=p, head_dim=head_dim) for p in KVPrecision if p is not KVPrecision.KV16
    ]


@pytest.mark.parametrize("fmt", formats(), ids=lambda f: f.precision.value)
def test_ragged_steps_around_every_boundary(fmt):
    bench = Bench(fmt)
    assert bench.step([0, 0, 0], [143, 272, 1]) < TOLERANCE
    assert bench.step([143, 272, 1], [1, 1, 1]) < TOLERANCE
    assert bench.step([144, 273, 2], [8, 5, 1], alibi=True) < TOLERANCE
    assert bench.step([152, 278, 3], [1, 40, 0]) < TOLERANCE


@pytest.mark.parametrize("head_dim", [16, 80])
def test_head_dims_that_need_padding(head_dim):
    bench = Bench(KVFormat(precision=KVPrecision.KV2, head_dim=head_dim))
    assert bench.step([0, 0, 0], [300, 5, 145]) < TOLERANCE
    assert bench.step([300, 5, 145], [3, 3, 3]) < TOLERANCE


def test_chunks_of_any_size_leave_the_same_bytes():
    """A prompt appended at once, in chunks or token by token gives one cache, bit for bit."""
    fmt = KVFormat(precision=KVPrecision.KV4, head_dim=32)
    torch.manual_seed(0)
    length = 420
    k, v = torch.randn(2, 1, length, 2, 32)
    caches = []
    for chunk in (length, 150, 16, 1):
        layer = allocate_layer(fmt, pages=3, slots=1, kv_heads=2, dtype=torch.float32, device="cpu")
        for at in range(0, length, chunk):
            new = slice(at, min(at + chunk, length))
            rows = Rows(
                slots_B=torch.tensor([0]),
                start_B=torch.tensor([at]),
                num_new_B=torch.tensor([new.stop - at]),
            )
            append(fmt, layer, contiguous_table(1, 3, "cpu"), k[:, new], v[:, new], rows)
        caches.append(layer)
    for other in caches[1:]:
        assert torch.equal(other.k_words_PGW, caches[0].k_words_PGW)
        assert torch.equal(other.v_params_PG, caches[0].v_params_PG)
        assert torch.equal(other.k_ring_SGRD, caches[0].k_ring_SGRD)


def test_verifying_several_tokens_equals_plain_decoding():
    fmt = KVFormat(precision=KVPrecision.KV2, head_dim=32)
    for start in (126, 140, 143, 144, 270, 272):
        one, many = Bench(fmt, seed=start), Bench(fmt, seed=start)
        one.step([0], [start])
        many.step([0], [start])
        q, k, v = torch.randn(3, 1, 8, 4, 32).unbind(0)
        k, v = k[:, :, :2], v[:, :, :2]

        def run(bench, first, last, q=q, k=k, v=v, start=start):
            rows = Rows(
                slots_B=torch.tensor([0]),
                start_B=torch.tensor([start + first]),
                num_new_B=torch.tensor([last - first]),
            )
            part = (x[:, first:last] for x in (q, k, v))
            return append_and_attend(
                bench.fmt, bench.layer, bench.table, *part, rows, scoring=Scoring(0.2)
            )

        together = run(many, 0, 8)
        apart = torch.cat([run(one, i, i + 1) for i in range(8)], 1)
        assert relative_error(together, apart) < TOLERANCE


STEP = st.tuples(st.integers(0, 2), st.integers(1, 8), st.integers(0, 8))


@settings(max_examples=25)
@given(
    lengths=st.lists(
        st.sampled_from([0, 1, 120, 127, 128, 143, 144, 150, 271, 272]), min_size=3, max_size=3
    ),
    steps=st.lists(STEP, min_size=1, max_size=12),
    fmt=st.sampled_from(formats()),
)
def test_random_drafts_and_truncations(lengths, steps, fmt):
    """Draft and verify, keep a part, and go on from there: each step equals the history."""
    bench = Bench(fmt)
    ends = [0, 0, 0]
    if any(lengths):
        assert bench.step([0, 0, 0], lengths) < TOLERANCE
        ends = list(lengths)
    for slot, count, forget in steps:
        assert bench.step([ends[slot]], [count], slots=[slot]) < TOLERANCE
        ends[slot] += max(0, count - forget)


@pytest.mark.parametrize("shift", [-128, -1, 1])
def test_a_line_that_is_off_is_caught(monkeypatch, shift):
    """The planted bug: another line between packed and 16-bit keys than the definition's."""
    bench = Bench(KVFormat(precision=KVPrecision.KV2, head_dim=32))
    assert bench.step([0], [290]) < TOLERANCE
    monkeypatch.setattr(kv_view, "packed_end", lambda p: max(0, packed_end(p) + shift))
    assert bench.step([290], [1]) > 100 * TOLERANCE
