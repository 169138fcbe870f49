"""Words, scales and zeros from memory to the registers of a warpgroup, for `wgmma_gemm_kernel`.

Registers bridge one k-group of time and the L2 the latency behind it: lines are prefetched into the
L2 several k-groups before registers load them. Legend as in wgmma_gemm.py. SYMMETRIC "e2m1" are
MXFP4's words and exponents (e2m1_operand.py): a thread's scale is two times four bytes. GROUPED:
scales of a k-group; of more than one, tuples.
"""

# mypy: ignore-errors
# ruff: noqa: SIM300
# (A Gluon body is not Python: values change type as it is traced.)
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def has_zeros(symmetric):
    """Whether zeros lie beside the scales; `symmetric` is a bool or a table's name."""
    return not symmetric


@gluon.jit
def _load_words(P0, P1, rows, lane, BITS: gl.constexpr, LANES: gl.constexpr):
    """A lane's words of one k-group: the last axis is (jj/2, jj%2, k3); 3 bit: h, in triples."""
    if BITS == 3:
        h = gl.arange(0, 2, layout=gl.SliceLayout(0, LANES))[None, :]
        at = rows[:, None] + (lane[:, None] * 2 + h)
        return (gl.load(P0 + at), gl.load(P0 + at + 64), gl.load(P0 + at + 128))
    else:
        w = gl.arange(0, 8, layout=gl.SliceLayout(0, LANES))[None, :]
        at = rows[:, None] + (w // 4 * 128 + lane[:, None] * 4 + w % 4)
        if BITS == 8:
            return (gl.load(P0 + at), gl.load(P1 + at))
        else:
            return (gl.load(P0 + at),)


@gluon.jit
def load(
    P0,
    P1,
    S,
    Z,
    block,
    blocks,
    groups,
    group,
    WG: gl.constexpr,
    BH: gl.constexpr,
    BITS: gl.constexpr,
    GROUPED: gl.constexpr,
    SYMMETRIC: gl.constexpr,
):
    """Words, scale and zero pairs of a warpgroup's rows of one k-group: BH tuples of tensors."""
    WORDS: gl.constexpr = 192 if BITS == 3 else 256
    OWN: gl.constexpr = 2 if BITS == 3 else 8
    LANES: gl.constexpr = gl.BlockedLayout([1, OWN], [32, 1], [4, 1], [1, 0])
    thread = gl.arange(0, 128, layout=gl.SliceLayout(1, LANES))
    lane = thread % 32
    start = (block.to(gl.int64) * groups + group) * WORDS
    EACH: gl.constexpr = GROUPED if GROUPED > 1 else 1
    s_groups = groups * EACH if GROUPED else 1
    s_start = (block * s_groups + (group * EACH if GROUPED else 0)) * 8
    out = ()
    for bh in gl.static_range(BH):
        inner = gl.minimum((WG * BH + bh) * 4 + thread // 32, blocks - 1 - block)
        words = _load_words(P0 + start, P1 + start, inner * groups * WORDS, lane, BITS, LANES)
        pair = inner * s_groups * 8 + lane // 4
        if SYMMETRIC == "e2m1":
            eight = S + (s_start + inner * s_groups * 8 + lane // 4) * 2
            scale = (gl.load(eight), gl.load(eight + 1))
            zero = 0
        elif GROUPED > 1:
            scale, zero = (), ()
            for part in gl.static_range(GROUPED):
                scale = scale + (gl.load(S + s_start + pair + 8 * part),)
                zero = zero + (
                    (gl.load(Z + s_start + pair + 8 * part) if has_zeros(SYMMETRIC) else 0),
                )
        else:
            scale = gl.load(S + s_start + pair)
            zero = scale if SYMMETRIC else gl.load(Z + s_start + pair)
        out = out + ((words, scale, zero),)
    return out


@gluon.jit
def _prefetch(pointers):
    """Bring the lines of addresses to the L2; no instruction waits for them."""
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1];mov.b32 $0, 0;",
        "=r,l",
        [pointers],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def prefetch_ahead(
    P0,
    P1,
    S,
    Z,
    block,
    blocks,
    groups,
    group,
    WG: gl.constexpr,
    BH: gl.constexpr,
    BITS: gl.constexpr,
    GROUPED: gl.constexpr,
    SYMMETRIC: gl.constexpr,
):
    """Bring what `load` will read to the L2: registers bridge less than the memory's latency."""
    WORDS: gl.constexpr = 192 if BITS == 3 else 256
    OWN: gl.constexpr = 2 if BITS == 3 else 8
    LANES: gl.constexpr = gl.BlockedLayout([1, OWN], [32, 1], [4, 1], [1, 0])
    thread = gl.arange(0, 128, layout=gl.SliceLayout(1, LANES))
    start = block.to(gl.int64) * groups + group
    EACH: gl.constexpr = GROUPED if GROUPED > 1 else 1
    for bh in gl.static_range(BH):
        inner = gl.minimum((WG * BH + bh) * 4 + thread // 32, blocks - 1 - block) * groups
        at = inner * WORDS + thread % 32 * (WORDS // 32)
        _prefetch(P0 + start * WORDS + at)
        if BITS == 8:
            _prefetch(P1 + start * WORDS + at)
        if SYMMETRIC == "e2m1":
            _prefetch(S + start * 16 + inner * 16)
        elif GROUPED:
            _prefetch(S + (start + inner) * (8 * EACH))
            if has_zeros(SYMMETRIC):
                _prefetch(Z + (start + inner) * (8 * EACH))


@gluon.jit
def load_first(
    P0,
    P1,
    S,
    Z,
    block,
    blocks,
    groups,
    first,
    last,
    WG: gl.constexpr,
    BH: gl.constexpr,
    BITS: gl.constexpr,
    GROUPED: gl.constexpr,
    SYMMETRIC: gl.constexpr,
    FAR: gl.constexpr,
):
    """Load a tile's first k-group and bring the next ones to the L2."""
    loaded = load(P0, P1, S, Z, block, blocks, groups, first, WG, BH, BITS, GROUPED, SYMMETRIC)
    for i in gl.static_range(1, FAR):
        group = gl.minimum(first + i, gl.maximum(last - 1, 0))
        prefetch_ahead(P0, P1, S, Z, block, blocks, groups, group, WG, BH, BITS, GROUPED, SYMMETRIC)
    return loaded
