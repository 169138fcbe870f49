"""The sum over GPUs in one launch: what is sent and what is made of it, of each device in turn."""

import pytest
import torch
from triton import knobs

from llmpq.kernels.peer_sum import inbox_words, peer_sum, peer_sum_norm
from reference.fused_twins import rms_norm_reference

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.skipif(not knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
]
CAPACITY, PROGRAMS = 512, 3


def packed_words(part, number):
    """Return what a device writes into another's inbox, as int64: the twin of the kernel's."""
    words = part.view(-1).view(torch.int32).long() & 0xFFFFFFFF
    return words | (number << 32)


def launched(parts, member, number, inboxes, counters, residual=None, weight=None):
    """Run a device's launch with what the others have sent already; return its sum.

    With a norm's `weight` the sum of rows and their norm.
    """
    for sender, part in enumerate(parts):
        if sender != member:
            words = packed_words(part, number)
            at = ((number & 1) * len(parts) + sender) * CAPACITY
            inboxes[member][at : at + words.numel()] = words
    addresses = torch.tensor([inbox.data_ptr() for inbox in inboxes])
    own = (addresses, counters[member])
    how = {"member": member, "capacity": CAPACITY, "overlaps": False}
    if weight is not None:
        return peer_sum_norm(parts[member].clone(), residual, weight, 1e-6, *own, **how)
    return peer_sum(parts[member].clone(), residual, *own, **how, warps=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("members", [2, 3])
def test_a_sum_is_that_of_all_devices(members, dtype):
    torch.manual_seed(0)
    inboxes = [
        torch.zeros(inbox_words(members, CAPACITY), dtype=torch.long) for _ in range(members)
    ]
    counters = [torch.zeros(PROGRAMS, dtype=torch.int32) for _ in range(members)]
    for number, count in enumerate((496, 16, 408), start=1):
        parts = [torch.randn(count).to(dtype) for _ in range(members)]
        residual = torch.randn(count).to(dtype) if number != 2 else None
        exact = sum(part.float() for part in parts)
        exact = (exact if residual is None else exact + residual.float()).to(dtype)
        sums = [
            launched(parts, member, number, inboxes, counters, residual)
            for member in range(members)
        ]
        for member, total in enumerate(sums):
            assert torch.equal(total, exact)
            assert counters[member].tolist() == [number] * PROGRAMS
            for peer in range(members):  # what each has sent is what the others were given
                words = packed_words(parts[member], number)
                at = ((number & 1) * members + member) * CAPACITY
                assert torch.equal(inboxes[peer][at : at + words.numel()], words) or peer == member


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [64, 96])
def test_rows_are_summed_and_normed(columns, dtype):
    torch.manual_seed(0)
    inboxes = [torch.zeros(inbox_words(2, CAPACITY), dtype=torch.long) for _ in range(2)]
    counters = [torch.zeros(4, dtype=torch.int32) for _ in range(2)]
    weight = torch.randn(columns).to(dtype)
    for number, rows in enumerate((1, 3, 2), start=1):
        parts = [torch.randn(rows, columns).to(dtype) for _ in range(2)]
        residual = torch.randn(rows, columns).to(dtype)
        exact = (parts[0].float() + parts[1].float() + residual.float()).to(dtype)
        for member in range(2):
            total, normed = launched(parts, member, number, inboxes, counters, residual, weight)
            assert torch.equal(total, exact)
            torch.testing.assert_close(normed, rms_norm_reference(exact, weight, 1e-6))
            assert counters[member].tolist() == [number] * 4


def test_integers_of_one_device_come_to_all():
    tokens = torch.tensor([5, 0, 151_935, 7])
    parts = [tokens, torch.zeros_like(tokens)]
    inboxes = [torch.zeros(inbox_words(2, CAPACITY), dtype=torch.long) for _ in range(2)]
    counters = [torch.full((PROGRAMS,), -1, dtype=torch.int32) for _ in range(2)]
    for member in range(2):  # behind the last number comes 2: zero is what an inbox begins with
        assert torch.equal(launched(parts, member, 2, inboxes, counters), tokens)
    assert [counter.tolist() for counter in counters] == [[2] * PROGRAMS] * 2
