"""A pool of packed latents, interpreted, against the twin of packed pools: rows of any lengths."""

import pytest
import torch
from triton import knobs

from llmpq.kernels.formats.kv_block import KVFormat
from llmpq.kernels.kv.paged.packed_latent_pages import attend_packed_latents
from llmpq.kernels.kv.paged.packed_pages import PackedPages, PackedRows
from llmpq.kernels.kv.paged.paged_latents import LatentPlan
from llmpq.kernels.kv.storage import KVLayer, allocate_layer
from llmpq.precision import KVPrecision
from llmpq.sizes.kv_format import TAIL_TOKENS
from reference.latent_steps import error
from reference.packed_pages import attend_packed_pages_reference

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.skipif(not knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
]
SLOTS, COLUMNS, PADDING, CPU = 6, 4, 3, torch.device("cpu")
# (slot, start, count): rows before, at and behind the lines where blocks are packed (144, 272).
MIXES = {
    "decode": [(2, 0, 1), (0, 143, 1), (5, 144, 1), (1, 415, 1), (3, 272, 1)],
    "chunks": [(4, 0, 150), (1, 126, 40), (0, 300, 2)],
    "mixed": [(0, 272, 1), (4, 100, 60), (3, 0, 1), (5, 130, 15), (2, 0, 2)],
}


def normal(*shape, dtype, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def pool(fmt, dtype, prefix_cache):
    layer = allocate_layer(
        fmt, pages=SLOTS * COLUMNS, slots=SLOTS, kv_heads=1, dtype=dtype, device=CPU
    )
    shape = (SLOTS * COLUMNS if prefix_cache else 0, 1, TAIL_TOKENS, fmt.head_dim)
    behind = [torch.zeros(shape, dtype=dtype) for _ in "kv"]
    return PackedPages(layer=layer, k_behind_PGTD=behind[0], v_behind_PGTD=behind[1])


def copied(pages):
    layer = KVLayer(**{name: value.clone() for name, value in vars(pages.layer).items()})
    behind = (pages.k_behind_PGTD.clone(), pages.v_behind_PGTD.clone())
    return PackedPages(layer=layer, k_behind_PGTD=behind[0], v_behind_PGTD=behind[1])


def step_of(mix, plan, *, rows, places):
    table = plan.table(*zip(*mix, strict=True), num_rows=rows, num_places=places)
    blocks = torch.randperm(SLOTS * COLUMNS, generator=torch.Generator().manual_seed(0))
    return PackedRows(
        rows_FR=torch.tensor(table, dtype=torch.int32),
        work_split=torch.empty(0, dtype=torch.int32),
        table_SM=blocks.view(SLOTS, COLUMNS).to(torch.int32),
        chunks=max(count for *_, count in mix) > 1,
    )


def check(kv, mix, *, heads, dtype=torch.float16, dim=320, rank=256, prefix_cache=True):
    """Run a step by kernels and by the twin; compare all that they leave."""
    fmt, rows = KVFormat(precision=kv, head_dim=dim), MIXES[mix]
    plan = LatentPlan.of(heads, dim, rank, dtype, CPU)
    want_pages = pool(fmt, dtype, prefix_cache)
    for slot, start, _ in rows:
        if start:
            before = step_of([(slot, 0, start)], plan, rows=1, places=start)
            k = normal(start, 1, dim, dtype=dtype, seed=7 + slot)
            q = torch.zeros(start, heads, dim, dtype=dtype)
            attend_packed_pages_reference(q, k, k, want_pages, before, fmt, scale=1.0)
    got_pages = copied(want_pages)
    used = sum(count for *_, count in rows)
    step = step_of(rows, plan, rows=len(rows) + 2, places=used + PADDING)
    q = normal(used + PADDING, heads, dim, dtype=dtype, seed=1)
    k = normal(used + PADDING, 1, dim, dtype=dtype, seed=2)
    want = attend_packed_pages_reference(q, k, k, want_pages, step, fmt, scale=dim**-0.5)
    got = attend_packed_latents(q, k[:, 0], got_pages, step, plan, fmt, scale=dim**-0.5)
    assert error(got[:used], want[:used, :, :rank]) < (2e-3 if dtype is torch.float16 else 8e-3)
    assert not got[used:].any(), "padding gets zeros"
    for name, part in parts(got_pages).items():
        other = parts(want_pages)[name]
        if "words" in name:
            assert float((part == other).float().mean()) > 0.9999, name
        else:
            assert torch.allclose(part.float(), other.float(), atol=2e-3, rtol=2e-3), name
    return got, want


def parts(pages):
    return {**vars(pages.layer), "k_behind": pages.k_behind_PGTD, "v_behind": pages.v_behind_PGTD}


@pytest.mark.thin
@pytest.mark.parametrize("kv", [KVPrecision.KV8, KVPrecision.KV4, KVPrecision.KV2])
@pytest.mark.parametrize("mix", MIXES)
def test_every_precision_and_mix(kv, mix):
    check(kv, mix, heads=3)


def test_many_heads_bfloat16_and_no_prefix_cache():
    check(KVPrecision.KV4, "decode", heads=20, dtype=torch.bfloat16, prefix_cache=False)


def test_576_channels():
    check(KVPrecision.KV4, "mixed", heads=2, dim=576, rank=512)
