"""The Triton KV kernels in the interpreter, against the plain-torch cache and the whole history."""

import pytest
import torch
from llmpq.kernels import kv_reference
from llmpq.kernels.kv_formats import KVFormat
from llmpq.kernels.kv_oracle import attend_from_history, relative_error
from llmpq.kernels.kv_storage import allocate_layer
from llmpq.kv_format import packed_blocks
from llmpq.precision import KVPrecision

triton = pytest.importorskip("triton")
if not triton.knobs.runtime.interpret:
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

from llmpq.kernels.kv_ops import DeviceRows, plan_attend, run_append, run_attend  # noqa: E402

pytestmark = pytest.mark.interpret
MAX_LEN = 600
# fp16 operands: 2**-11 a rounding, averaged; the target of the real kernel is the same
TOLERANCE = 2e-3
CPU = torch.device("cpu")


def build(fmt, slots, kv_heads, dtype, seed=0):
    blocks = packed_blocks(MAX_LEN)
    gen = torch.Generator().manual_seed(seed)
    table = torch.randperm(slots * blocks, generator=gen).int().reshape(slots, blocks)
    layers = [
        allocate_layer(fmt, pages=slots * blocks, slots=slots, kv_heads=kv_heads, dtype=dtype, device="cpu")
        for _ in range(2)
    ]
    return gen, table, layers


def run(fmt, *, heads, kv_heads, dtype, steps, alibi=False, paged=True):
    """Run steps (start, count) per request through kernels and twin; return the worst errors."""
    slots = len(steps[0])
    gen, table, (layer, twin) = build(fmt, slots, kv_heads, dtype)
    if not paged:
        table = torch.arange(table.numel(), dtype=torch.int32).reshape(table.shape)
    dim = fmt.head_dim
    slopes = torch.linspace(0.01, 0.1, heads) if alibi else None
    past = torch.zeros(2, slots, MAX_LEN, kv_heads, dim, dtype=dtype)
    worst = 0.0
    for step in steps:
        start, count = (torch.tensor(x) for x in zip(*step, strict=True))
        q_len = int(count.max())
        q = torch.randn(slots, q_len, heads, dim, generator=gen).to(dtype)
        kv = torch.randn(2, slots, q_len, kv_heads, dim, generator=gen).to(dtype)
        for b, (first, num) in enumerate(step):
            past[:, b, first : first + num] = kv[:, b, :num]
        rows = DeviceRows(slots=torch.arange(slots).int(), starts=start.int(), counts=count.int())
        run_append(fmt, layer, table, *kv, rows, paged=paged)
        twin_rows = kv_reference.Rows(slots_B=torch.arange(slots), start_B=start, num_new_B=count)
        kv_reference.append(fmt, twin, table, *kv, twin_rows)
        assert torch.equal(layer.k_ring_SGRD, twin.k_ring_SGRD)
        same = (layer.v_words_PGW == twin.v_words_PGW).float().mean()
        assert same > 0.995, f"value words differ from the twin's: {same}"
        same = (layer.k_words_PGW == twin.k_words_PGW).float().mean()
        assert same > 0.995, f"key words differ from the twin's: {same}"
        assert relative_error(layer.k_params_PG, twin.k_params_PG) < 1e-3
        if q_len > 16:
            continue
        plan = plan_attend(
            batch=slots,
            q_len=q_len,
            heads=heads,
            kv_heads=kv_heads,
            max_end=int((start + count).max()),
            device=CPU,
        )
        got = run_attend(
            fmt, layer, table, q, rows, plan, scale=dim**-0.5, paged=paged, slopes=slopes
        )
        for b, (first, num) in enumerate(step):
            want = attend_from_history(
                fmt, q[b, :num], *past[:, b], start=first, scale=dim**-0.5, alibi_slopes_H=slopes
            )
            worst = max(worst, relative_error(got[b, :num], want))
    return worst


STEPS = [[(0, 400), (0, 20)], [(400, 1), (20, 1)]]
P = KVPrecision


@pytest.mark.parametrize("precision", [P.KV8, P.KV4, P.KV2], ids=lambda p: p.value)
@pytest.mark.parametrize("key_group", [128, 64, 32, None])
def test_every_format(precision, key_group):
    fmt = KVFormat(precision=precision, head_dim=64, key_group=key_group)
    assert run(fmt, heads=4, kv_heads=2, dtype=torch.float16, steps=STEPS) < TOLERANCE


@pytest.mark.parametrize(
    ("heads", "kv_heads", "q_len"), [(8, 2, 1), (2, 2, 4), (8, 1, 1), (8, 2, 4), (12, 2, 3), (4, 2, 8)]
)
def test_heads_and_verified_tokens(heads, kv_heads, q_len):
    """GQA, MHA and MQA, one to several column chunks, across the line at 400 = 2 * 128 + 144."""
    fmt = KVFormat(precision=P.KV4, head_dim=64)
    steps = [[(0, 396), (0, 150)], [(396, q_len), (150, q_len)], [(398, q_len), (150, 1)]]
    assert run(fmt, heads=heads, kv_heads=kv_heads, dtype=torch.float16, steps=steps) < TOLERANCE


def test_bf16_head_dim_128_contiguous_and_alibi():
    fmt = KVFormat(precision=P.KV4, head_dim=128)
    assert run(fmt, heads=2, kv_heads=1, dtype=torch.bfloat16, steps=STEPS, paged=False, alibi=True) < 4e-3


@pytest.mark.parametrize("length", [127, 128, 143, 144, 145, 272, 273])
def test_lengths_around_the_lines(length):
    fmt = KVFormat(precision=P.KV2, head_dim=64)
    steps = [[(0, length), (0, 1)], [(length, 2), (1, 2)]]
    assert run(fmt, heads=2, kv_heads=1, dtype=torch.float16, steps=steps) < TOLERANCE


def test_a_chunk_continues_a_block():
    fmt = KVFormat(precision=P.KV4, head_dim=64)
    steps = [[(0, 100)], [(100, 200)], [(300, 1)], [(301, 100)], [(401, 1)]]
    assert run(fmt, heads=2, kv_heads=1, dtype=torch.float16, steps=steps) < TOLERANCE
