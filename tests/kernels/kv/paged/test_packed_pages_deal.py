"""Parts of a step's packed tiles and rings: every tile is in one part, parts are few and even."""

import random

import pytest

from llmpq.kernels.kv.paged.packed_pages_deal import ENTRY, deal

pytestmark = pytest.mark.pure


def parts_of(entries, tiles, programs):
    """Return (row, begin, stop, part, program) as the kernel walks a list of entries."""
    found = []
    for program in range(programs):
        entry = entries[program * ENTRY : (program + 1) * ENTRY]
        row, row_last, begin, last_stop, part = entry[:5]
        while row <= row_last:
            stop = last_stop if row == row_last else tiles[row]
            if begin < stop:
                found.append((row, begin, stop, part, program))
                part += 1
            row, begin = row + 1, 0
    return found


def check(tiles, rings, programs):
    made = deal(tuple(tiles), tuple(rings), programs)
    rows = range(len(tiles))
    entries = made.entries(
        programs, (rows, [7 * row for row in rows], [row + 5 for row in rows])
    ).tolist()
    half = programs * ENTRY
    for cut, own, values in (
        (made.packed, tiles, entries[:half]),
        (made.ring, rings, entries[half:]),
    ):
        found = parts_of(values, own, programs)
        assert [part for *_, part, _ in found] == list(range(len(found))), "parts follow each other"
        ends = [0, *cut.ends]
        for row, steps in enumerate(own):
            mine = [(begin, stop, part) for r, begin, stop, part, _ in found if r == row]
            assert [part for *_, part in mine] == list(range(ends[row], ends[row + 1]))
            edges = [0, *(stop for _, stop, _ in mine)]
            assert [begin for begin, *_ in mine] == edges[:-1] and edges[-1] == steps
        for program in {program for *_, program in found}:
            row = values[program * ENTRY]
            assert values[program * ENTRY + 5 : program * ENTRY + 8] == [row, 7 * row, row + 5]
    return made


@pytest.mark.parametrize("seed", range(40))
def test_every_tile_is_in_one_part(seed):
    rng = random.Random(seed)
    rows = rng.choice([1, 2, 5, 24, 96, 300])
    tiles = [rng.choice([0, 0, 1, 4, rng.randrange(600)]) for _ in range(rows)]
    rings = [rng.randrange(6) for _ in range(rows)]
    check(tiles, rings, rng.choice([1, 3, 16, 198, 1584]))


def test_nothing_to_read():
    check([0, 0], [0, 0], 4)
    check([0], [1], 4)


def test_short_rows_are_not_cut_and_rings_have_programs_of_their_own():
    """96 rows of 300 tokens: 4 tiles and 2 steps each, 198 programs."""
    made = check([4] * 96, [2] * 96, 198)
    assert made.packed.programs == made.ring.programs == 96
    assert made.packed.ends == made.ring.ends == list(range(1, 97))


def test_one_long_row_is_everybodys():
    made = check([1000, *[2] * 7], [3] * 8, 198)
    assert made.packed.programs > 150
    assert made.packed.cost <= 1000 // 150 + 3
