"""A pool of packed blocks on a GPU, against its twin: rows of one token and chunks, every type."""

import pytest
import torch

from llmpq.kernels.formats.kv_block import pool_format
from llmpq.kernels.kv.storage import allocate_layer
from llmpq.precision import KVPrecision
from llmpq.sizes.kv_format import TAIL_TOKENS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
SLOTS, COLUMNS, PADDING = 6, 4, 3
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 4e-3, torch.float32: 2e-5}
"""16-bit operands are fp16; a bf16 output has an error of its own of 1.1e-3."""
SHAPES = [
    (2, 1, 128), (8, 2, 64), (4, 2, 256),
    (2, 2, 72), (4, 4, 80), (8, 2, 96), (7, 1, 112), (4, 1, 160), (4, 1, 192),
]  # fmt: skip
STEPS = (
    [(0, 0, 272), (4, 0, 100), (5, 0, 130), (1, 0, 143)],
    [(0, 272, 1), (4, 100, 60), (3, 0, 1), (5, 130, 15), (2, 0, 2), (1, 143, 1)],
    [(0, 273, 1), (4, 160, 1), (3, 1, 1), (5, 145, 1), (1, 144, 1)],
)


@pytest.mark.parametrize("kv", [kv for kv in KVPrecision if kv is not KVPrecision.KV16])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("heads,groups,dim", SHAPES)
def test_chunks_and_decoding_rows(kv, dtype, heads, groups, dim):
    from llmpq.kernels.kv.paged.packed_pages import PackedPages, PackedRows, attend_packed_pages
    from llmpq.kernels.kv.paged.packed_pages_plan import PackedPlan
    from reference.packed_pages import attend_packed_pages_reference

    torch.manual_seed(0)
    device, fmt = torch.device("cuda"), pool_format(kv, dim)
    plan = PackedPlan.of(fmt, heads, groups, dtype, device)
    pools = []
    for _ in range(2):
        layer = allocate_layer(
            fmt, pages=SLOTS * COLUMNS, slots=SLOTS, kv_heads=groups, dtype=dtype, device=device
        )
        shape = (SLOTS * COLUMNS, groups, TAIL_TOKENS, dim)
        behind = [torch.zeros(shape, dtype=dtype, device=device) for _ in "kv"]
        pools.append(PackedPages(layer=layer, k_behind_PGTD=behind[0], v_behind_PGTD=behind[1]))
    table = torch.randperm(SLOTS * COLUMNS).view(SLOTS, COLUMNS).to(device, torch.int32)
    for rows in STEPS:
        used = sum(count for *_, count in rows)
        places = used + PADDING
        values = plan.table(*zip(*rows, strict=True), num_rows=len(rows) + 2, num_places=places)
        step = PackedRows(
            rows_FR=torch.tensor(values, dtype=torch.int32, device=device),
            work_split=torch.tensor(plan.work_split(values), dtype=torch.int32, device=device),
            table_SM=table,
            chunks=max(count for *_, count in rows) > 1,
        )
        x = torch.randn(places, heads + 2 * groups, dim, device=device, dtype=dtype)
        q, k, v = x.split([heads, groups, groups], dim=1)
        want = attend_packed_pages_reference(q, k, v, pools[0], step, fmt, scale=dim**-0.5)
        got = attend_packed_pages(q, k, v, pools[1], step, plan, scale=dim**-0.5)
        for one in (True, False):  # rows of one token and chunks have kernels of their own
            own = torch.cat([torch.full((n,), (n == 1) == one) for *_, n in rows])
            mine, twins = (x[:used][own.to(device)].double() for x in (got, want))
            off = (mine - twins).norm() / twins.norm().clamp(min=1e-30)
            assert float(off) < TOLERANCE[dtype], (one, rows)
        assert not got[used:].any(), "padding gets zeros"
        for mine, twins in zip(
            vars(pools[1].layer).values(), vars(pools[0].layer).values(), strict=True
        ):
            if mine.dtype == torch.int32:
                assert float((mine == twins).float().mean()) > 0.999
