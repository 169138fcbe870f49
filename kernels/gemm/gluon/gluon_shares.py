"""Work of persistent Gluon programs whose last tiles' K is cut up, so that all end together.

    tiles 0 .. whole - 1    programs take turns
    the others              their k-groups, one long row, are cut into equal runs; float32 sums of
                            shared tiles lie in a workspace, the last program adds them in order

A program's segments are its whole tiles, then the pieces of its run: at most two unfinished tiles.
Knows nothing of what a tile computes.
"""

# mypy: ignore-errors
# ruff: noqa: SIM102
# (A Gluon body is not Python: SPLIT is a constant, the other condition is not.)
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Triton's name since 3.9, else that of 3.6.
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@gluon.jit
def work(tiles, groups, whole, SPLIT: gl.constexpr):
    """Segments of this program, and where its run of the last tiles' k-groups starts."""
    pid, programs = gl.program_id(0), gl.num_programs(0)
    segments = gl.maximum(whole - pid + programs - 1, 0) // programs
    at = cut(pid, tiles - whole, groups)
    if SPLIT:
        end = cut(pid + 1, tiles - whole, groups)
        if end > at:
            segments += (end - 1) // groups - at // groups + 1
    return segments, at


@gluon.jit
def segment_of(i, at, m_tiles, n_tiles, groups, whole, together, SPLIT: gl.constexpr = True):
    """Segment i of this program: tiles of x and w, first and last k-group, where the next starts.

    Programs take turns at the first `whole` tiles; the others' k-groups, one long row, are cut
    into equal runs (there are none without SPLIT). `together` tiles of x take turns under a tile
    of w: both stay in the L2.
    """
    pid, programs = gl.program_id(0), gl.num_programs(0)
    tile = pid + i * programs
    first, last, after = at * 0, groups, at
    if SPLIT:
        if tile >= whole:
            end = cut(pid + 1, m_tiles * n_tiles - whole, groups)
            tile = at // groups
            first, last = at - tile * groups, gl.minimum(groups, end - tile * groups)
            after = tile * groups + last
            tile += whole
    tile = gl.minimum(tile, m_tiles * n_tiles - 1)  # past the end: any that exists
    wide = together * n_tiles
    start = tile // wide * together
    size = gl.minimum(m_tiles - start, together)
    inner = tile % wide
    return start + inner % size, inner // size, first, last, after, tile


@gluon.jit
def cut(program, tiles, groups):
    """Where a program's run of the k-groups of `tiles` starts."""
    return program * (tiles * groups) // gl.num_programs(0)


@gluon.jit
def owner(unit, tiles, groups):
    """The program whose run holds a k-group."""
    return ((unit + 1) * gl.num_programs(0) - 1) // (tiles * groups)


@gluon.jit
def add_shares(
    acc,
    PARTIAL,
    ARRIVED,
    tile,
    tiles,
    groups,
    PART: gl.constexpr,
    PARTS: gl.constexpr,
    BT: gl.constexpr,
):
    """Return a shared tile's sums, and whether this program is the last at it and stores them.

    acc: this program's sums [64, BT]. PARTIAL: the workspace, [2 * programs, PARTS, 64 * BT].
    ARRIVED: counters [tiles, PARTS], zero before and after. PART: which 64 rows of w of the tile.
    """
    ACC: gl.constexpr = acc.type.layout
    n = gl.arange(0, 64, layout=gl.SliceLayout(1, ACC))
    m = gl.arange(0, BT, layout=gl.SliceLayout(0, ACC))
    pid = gl.program_id(0)
    begin = owner(tile * groups, tiles, groups)
    end = owner((tile + 1) * groups - 1, tiles, groups) + 1
    last = True
    if end - begin > 1:
        # A program has at most two unfinished tiles: that in which its run starts, another one.
        at = n[:, None] // 16 * 64 + n[:, None] % 8 * 8 + m[None, :] % 8  # a warp's store is a run
        at += (m[None, :] // 8 * 2 + n[:, None] // 8 % 2) * 256
        at += PARTIAL + PART * (64 * BT)
        mine = 2 * pid + (cut(pid, tiles, groups) // groups != tile).to(gl.int32)
        gl.store(at + mine * (PARTS * 64 * BT), acc)
        _barrier()  # every thread's sums are written before this program counts itself
        arrived = ARRIVED + tile * PARTS + PART
        last = gl.atomic_add(arrived, 1, sem="acq_rel") == end - begin - 1
        if last:
            acc = gl.zeros([64, BT], gl.float32, layout=ACC)
            for program in range(begin, end):
                start = cut(program, tiles, groups) // groups
                its = 2 * program + (start != tile).to(gl.int32)
                acc += gl.load(at + its * (PARTS * 64 * BT), cache_modifier=".cg")
            gl.store(arrived, 0)
    return acc, last
