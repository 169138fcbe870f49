"""A pool of packed latents on a GPU, against the twin of packed pools."""

import pytest
import torch

from llmpq.kernels.formats.kv_block import KVFormat
from llmpq.kernels.kv.storage import allocate_layer
from llmpq.precision import KVPrecision
from llmpq.sizes.kv_format import TAIL_TOKENS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
SLOTS, COLUMNS, PADDING = 6, 4, 3
STEPS = (
    [(0, 0, 272), (4, 0, 100), (5, 0, 130), (1, 0, 143)],
    [(0, 272, 1), (4, 100, 60), (3, 0, 1), (5, 130, 15), (2, 0, 2), (1, 143, 1)],
    [(0, 273, 1), (4, 160, 1), (3, 1, 1), (5, 145, 1), (1, 144, 1)],
)


@pytest.mark.timeout(600)  # Triton 3.6 compiles the kernels of 8 bits in 130 s of a core
@pytest.mark.parametrize("kv", [KVPrecision.KV4, KVPrecision.KV8])
@pytest.mark.parametrize("heads", [16, 40])
def test_chunks_and_decoding_rows(kv, heads):
    from llmpq.kernels.kv.paged.packed_latent_pages import attend_packed_latents
    from llmpq.kernels.kv.paged.packed_pages import PackedPages, PackedRows
    from llmpq.kernels.kv.paged.paged_latents import LatentPlan
    from reference.packed_pages import attend_packed_pages_reference

    torch.manual_seed(0)
    device, dtype, dim, rank = torch.device("cuda"), torch.bfloat16, 576, 512
    fmt = KVFormat(precision=kv, head_dim=dim)
    plan = LatentPlan.of(heads, dim, rank, dtype, device)
    pools = []
    for _ in range(2):
        layer = allocate_layer(
            fmt, pages=SLOTS * COLUMNS, slots=SLOTS, kv_heads=1, dtype=dtype, device=device
        )
        shape = (SLOTS * COLUMNS, 1, TAIL_TOKENS, dim)
        behind = [torch.zeros(shape, dtype=dtype, device=device) for _ in "kv"]
        pools.append(PackedPages(layer=layer, k_behind_PGTD=behind[0], v_behind_PGTD=behind[1]))
    table = torch.randperm(SLOTS * COLUMNS).view(SLOTS, COLUMNS).to(device, torch.int32)
    for rows in STEPS:
        used = sum(count for *_, count in rows)
        places = used + PADDING
        entries = plan.table(*zip(*rows, strict=True), num_rows=len(rows) + 2, num_places=places)
        step = PackedRows(
            rows_FR=torch.tensor(entries, dtype=torch.int32, device=device),
            work_split=torch.empty(0, dtype=torch.int32, device=device),
            table_SM=table,
            chunks=max(count for *_, count in rows) > 1,
        )
        q = torch.randn(places, heads, dim, device=device).to(dtype)
        k = torch.randn(places, 1, dim, device=device).to(dtype)
        want = attend_packed_pages_reference(q, k, k, pools[0], step, fmt, scale=dim**-0.5)
        got = attend_packed_latents(q, k[:, 0], pools[1], step, plan, fmt, scale=dim**-0.5)
        want = want[:used, :, :rank].double()
        assert float((got[:used].double() - want).norm() / want.norm()) < 1e-2
        assert not got[used:].any(), "padding gets zeros"
        for mine, theirs in zip(vars(pools[1].layer).values(), vars(pools[0].layer).values(),
                                strict=True):  # fmt: skip
            assert float((mine == theirs).float().mean()) > 0.999
