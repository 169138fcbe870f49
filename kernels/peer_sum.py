"""The sum of a tensor over GPUs that see each other's memory, in one launch.

Every device writes its values into an inbox of each other one, then adds up what has come into its
own. A word of 64 bits carries 32 of values and the number of the sum, so that a device that waits
for a word sees values and arrival at once: no barrier, no fence, nothing that is set back.

    inbox of a device    [parity of the number, sender, CAPACITY] words of 64 bits
    word                 [number of the sum : 32 | two values of 16 bits, or one of 32 : 32]

A sum is numbered by a counter for each program, and every launch has all programs, so the numbers
are those of all launches, also where a graph repeats them. Two parities are enough: a device comes
to sum k + 2 once it has the words of sum k + 1 of each other one, which has then read sum k.

Bytes per device and sum of N words of 32 bits: 8 N (MEMBERS - 1) out, as many in. Values are added
in float32 in the order of the devices, so all devices get the same; one rounding.

No NVLink multicast: plain stores to peers.
"""

# Triton kernels take no annotations.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

KINDS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int64: "int"}
"""Types of values: integers are words that one device alone has, zeros on the others."""
WORD_BYTES = 8
"""Of an inbox, for 4 bytes of values."""
PIECE_WORDS = 4
"""Words that a tensor has a multiple of: it is read and written in accesses of 8 to 16 bytes."""
PIECE = tl.constexpr(PIECE_WORDS)
LANE_WORDS = 2
"""Of a thread at a time: 16 bytes of an inbox."""


@triton.jit
def _halves(word, KIND: tl.constexpr):
    """The values of words [W], as float32 [W] each; of 32-bit values the first alone."""
    if KIND == "fp32":
        low = word.to(tl.float32, bitcast=True)
        high = low
    elif KIND == "bf16":
        low = (word << 16).to(tl.float32, bitcast=True)
        high = (word & -65536).to(tl.float32, bitcast=True)
    else:
        low = word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        high = (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def _word(low, high, KIND: tl.constexpr):
    """The words of values, rounded."""
    if KIND == "fp32":
        word = low.to(tl.int32, bitcast=True)
    else:
        if KIND == "bf16":
            first = low.to(tl.bfloat16).to(tl.int16, bitcast=True)
            second = high.to(tl.bfloat16).to(tl.int16, bitcast=True)
        else:
            first = low.to(tl.float16).to(tl.int16, bitcast=True)
            second = high.to(tl.float16).to(tl.int16, bitcast=True)
        word = (first.to(tl.int32) & 0xFFFF) | (second.to(tl.int32) << 16)
    return word


@triton.jit(do_not_specialize=["num_pieces"])
def peer_sum_kernel(
    part,
    residual,
    inboxes,
    numbers,
    num_pieces,
    MEMBER: tl.constexpr,
    MEMBERS: tl.constexpr,
    CAPACITY: tl.constexpr,
    KIND: tl.constexpr,
    WORDS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sum `part` of int32, in pieces of PIECE, plus the residual if there is one, in its place.

    `inboxes` [MEMBERS]: where they begin; `numbers` [PROGRAMS]: of the last sum of each program.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    program = tl.program_id(0)
    num_words = num_pieces * PIECE
    number = tl.load(numbers + program) + 1
    number = tl.where(number == 0, 2, number)  # an inbox begins with zeros
    parity = number & 1
    tag = number.to(tl.int64) << 32
    lane = tl.arange(0, WORDS)
    for start in range(program * WORDS, num_words, PROGRAMS * WORDS):
        at = start + lane
        word = tl.load(part + at, mask=at < num_words, other=0)
        sent = (word.to(tl.int64) & 0xFFFFFFFF) | tag
        for step in tl.static_range(1, MEMBERS):
            peer = (MEMBER + step) % MEMBERS
            inbox = tl.load(inboxes + peer).to(tl.pointer_type(tl.int64))
            inbox = tl.multiple_of(inbox, 16)
            target = inbox + (parity * MEMBERS + MEMBER) * CAPACITY + at
            tl.store(target, sent, mask=at < num_words)
    own = tl.load(inboxes + MEMBER).to(tl.pointer_type(tl.int64))
    own = tl.multiple_of(own, 16)
    for start in range(program * WORDS, num_words, PROGRAMS * WORDS):
        at = start + lane
        live = at < num_words
        low = tl.zeros([WORDS], tl.float32)
        high = tl.zeros([WORDS], tl.float32)
        total = tl.zeros([WORDS], tl.int32)
        if residual is not None:
            added = tl.load(residual + at, mask=live, other=0)
        for sender in tl.static_range(MEMBERS):
            if sender == MEMBER:
                word = tl.load(part + at, mask=live, other=0)
            else:
                source = own + (parity * MEMBERS + sender) * CAPACITY + at
                came = tl.load(source, mask=live, other=0, volatile=True)
                while tl.max(tl.where(live & ((came >> 32).to(tl.int32) != number), 1, 0), 0) != 0:
                    came = tl.load(source, mask=live, other=0, volatile=True)
                word = came.to(tl.int32)
            if KIND == "int":
                total += word
            else:
                first, second = _halves(word, KIND)
                low += first
                high += second
        if residual is not None:
            first, second = _halves(added, KIND)
            low += first
            high += second
        if KIND != "int":
            total = _word(low, high, KIND)
        tl.store(part + at, total, mask=live)
    tl.store(numbers + program, number)


@triton.jit(do_not_specialize=["num_rows", "columns", "eps"])
def peer_sum_norm_kernel(
    part,
    residual,
    weight,
    normed,
    inboxes,
    numbers,
    num_rows,
    columns,
    eps,
    MEMBER: tl.constexpr,
    MEMBERS: tl.constexpr,
    CAPACITY: tl.constexpr,
    KIND: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    WORDS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sum rows of `part`, plus the residual, in its place; `normed` gets the sum's RMSNorm.

    A program takes a row. Everything else is as of `peer_sum_kernel`.
    """
    row = tl.program_id(0)
    lane = tl.arange(0, WORDS)
    live = lane < ROW_WORDS
    factors = tl.load(weight + lane, mask=live, other=0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    number = tl.load(numbers + row) + 1
    number = tl.where(number == 0, 2, number)
    parity = number & 1
    if row < num_rows:
        at = row * ROW_WORDS + lane
        word = tl.load(part + at, mask=live, other=0)
        sent = (word.to(tl.int64) & 0xFFFFFFFF) | (number.to(tl.int64) << 32)
        for step in tl.static_range(1, MEMBERS):
            peer = (MEMBER + step) % MEMBERS
            inbox = tl.load(inboxes + peer).to(tl.pointer_type(tl.int64))
            inbox = tl.multiple_of(inbox, 16)
            tl.store(inbox + (parity * MEMBERS + MEMBER) * CAPACITY + at, sent, mask=live)
        added = tl.load(residual + at, mask=live, other=0)
        own = tl.load(inboxes + MEMBER).to(tl.pointer_type(tl.int64))
        own = tl.multiple_of(own, 16)
        low = tl.zeros([WORDS], tl.float32)
        high = tl.zeros([WORDS], tl.float32)
        for sender in tl.static_range(MEMBERS):
            came = word
            if sender != MEMBER:
                source = own + (parity * MEMBERS + sender) * CAPACITY + at
                got = tl.load(source, mask=live, other=0, volatile=True)
                while tl.max(tl.where(live & ((got >> 32).to(tl.int32) != number), 1, 0), 0) != 0:
                    got = tl.load(source, mask=live, other=0, volatile=True)
                came = got.to(tl.int32)
            first, second = _halves(came, KIND)
            low += first
            high += second
        first, second = _halves(added, KIND)
        total = _word(low + first, high + second, KIND)
        tl.store(part + at, total, mask=live)
        low, high = _halves(total, KIND)
        squares = low * low if KIND == "fp32" else low * low + high * high
        scale = tl.rsqrt(tl.sum(squares, 0) / columns + eps)
        first, second = _halves(factors, KIND)
        tl.store(normed + at, _word(low * scale * first, high * scale * second, KIND), mask=live)
    tl.store(numbers + row, number)


def peer_sum_norm(
    part: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    inboxes: Tensor,
    numbers: Tensor,
    *,
    member: int,
    capacity: int,
    overlaps: bool,
) -> tuple[Tensor, Tensor]:
    """Sum rows [..., h] over devices as `peer_sum`, plus the residual; return them and their norm.

    `numbers`: of as many programs as there are rows at most; `weight` [h] of the RMSNorm.
    """
    columns = part.shape[-1]
    normed, row_words = torch.empty_like(part), columns * part.element_size() // 4
    words = triton.next_power_of_2(row_words)
    peer_sum_norm_kernel[(numbers.numel(),)](
        *(tensor.view(-1).view(torch.int32) for tensor in (part, residual, weight, normed)),
        inboxes,
        numbers,
        part.numel() // columns,
        columns,
        eps,
        MEMBER=member,
        MEMBERS=inboxes.numel(),
        CAPACITY=capacity,
        KIND=KINDS[part.dtype],
        ROW_WORDS=row_words,
        WORDS=words,
        PDL=overlaps,
        num_warps=max(1, min(32, words // (32 * LANE_WORDS))),
        launch_pdl=overlaps,
    )
    return part, normed


def peer_sum(
    part: Tensor,
    residual: Tensor | None,
    inboxes: Tensor,
    numbers: Tensor,
    *,
    member: int,
    capacity: int,
    warps: int,
    overlaps: bool,
) -> Tensor:
    """Sum a contiguous tensor of whole words over devices that all call this, in its place.

    `inboxes`: addresses on this device, of `capacity` words for each parity and sender; `numbers`:
    of as many programs as there are, of `warps` each.
    """
    flat = part.view(-1).view(torch.int32)
    assert fits(part, capacity)
    peer_sum_kernel[(numbers.numel(),)](
        flat,
        None if residual is None else residual.view(-1).view(torch.int32),
        inboxes,
        numbers,
        flat.numel() // PIECE_WORDS,
        MEMBER=member,
        MEMBERS=inboxes.numel(),
        CAPACITY=capacity,
        KIND=KINDS[part.dtype],
        WORDS=LANE_WORDS * 32 * warps,
        PROGRAMS=numbers.numel(),
        PDL=overlaps,
        num_warps=warps,
        launch_pdl=overlaps,
    )
    return part


def fits(part: Tensor, capacity: int) -> bool:
    """Whether a tensor can be summed by way of inboxes of so many words a sender."""
    count, rest = divmod(part.numel() * part.element_size(), 4 * PIECE_WORDS)
    aligned = rest == 0 and part.is_contiguous() and part.data_ptr() % 16 == 0
    return part.dtype in KINDS and aligned and count * PIECE_WORDS <= capacity


def inbox_words(members: int, capacity: int) -> int:
    """Return the words of an inbox."""
    return 2 * members * capacity
