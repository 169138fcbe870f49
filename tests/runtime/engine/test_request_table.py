"""Counters of requests: rows that grow in number, and what is said of many at once."""

from __future__ import annotations

import random

import numpy as np
import pytest

from llmpq.runtime.engine.request_table import RequestTable

pytestmark = pytest.mark.pure


def add(table: RequestTable, arrival: int, stop_ids: frozenset[int] = frozenset()) -> int:
    row = table.add(
        arrival=arrival, number=100 + arrival, num_prompt=5, max_new=9, stop_ids=stop_ids
    )
    table.slot[row] = arrival
    return row


def test_rows_keep_their_counters_as_the_table_grows_and_are_used_again():
    table, rng = RequestTable(), random.Random(0)
    rows: dict[int, int] = {}
    for arrival in range(500):
        if rows and rng.random() < 0.3:
            table.remove(rows.pop(rng.choice(list(rows))))
        rows[arrival] = add(table, arrival, frozenset(range(arrival, arrival + arrival % 4)))
        assert len(set(rows.values())) == len(rows)
    for arrival, row in rows.items():
        stops = set(table.stop_ids_NW[row].tolist()) - {-1}
        assert (table.arrival[row], table.number[row]) == (arrival, 100 + arrival)
        assert table.num_sampled[row] == 0 and table.newest[row] == -1
        assert stops == set(range(arrival, arrival + arrival % 4))


@pytest.mark.parametrize("tokens_ahead", [1, 2, 4])
def test_tokens_under_way_count_until_enough_are_or_the_last_one_is(tokens_ahead):
    """As many as a request has by one of its steps after the other."""
    table = RequestTable()
    rows = np.array([add(table, 0)])
    known, under_way = 0, 0
    for sampled in range(1, 10):
        if under_way == tokens_ahead:
            known, under_way = known + 1, under_way - 1
        under_way += 1
        table.num_sampled[rows], table.in_flight[rows] = sampled, under_way
        full = under_way == tokens_ahead or sampled == 9
        assert table.num_tokens(rows, tokens_ahead).tolist() == [5 + sampled - full]
    table.in_flight[rows] = 0
    table.num_sampled[rows] = 3
    assert table.num_tokens(rows, tokens_ahead).tolist() == [8]


def test_a_row_may_end_by_its_own_stop_tokens_its_limit_or_a_text():
    table = RequestTable()
    stops = (frozenset(), frozenset({3}), frozenset({4, 0, 7}), frozenset({3}))
    rows = np.array([add(table, arrival, stop) for arrival, stop in enumerate(stops)])
    table.ends_in_text[rows[3]] = True
    for token in range(9):
        tokens, steps = np.full(4, token), np.array([8, 1, 2, 3])
        expected = [True, token == 3, token in (0, 4, 7), True]
        assert table.constants(rows).may_end(tokens, steps).tolist() == expected
    steps = np.array([7, 8, 8, 8])
    assert table.constants(rows).may_end(np.full(4, 5), steps).tolist() == [False, True, True, True]


def test_tokens_are_published_of_those_who_asked():
    table = RequestTable()
    rows = np.array([add(table, arrival) for arrival in range(4)])
    table.publishes[rows[[1, 3]]] = True
    of = table.constants(rows)
    assert of.published.tolist() == [1, 3] and of.numbers == [101, 103] and not of.streams
    table.streams[rows[3]] = True
    assert table.constants(rows).streams
