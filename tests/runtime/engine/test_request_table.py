"""Counters of requests: rows that grow in number, and what is said of many at once."""

from __future__ import annotations

import random

import numpy as np
import pytest

from llmpq.runtime.engine.request_table import RequestTable

pytestmark = pytest.mark.pure


def add(table: RequestTable, arrival: int) -> int:
    row = table.add(arrival=arrival, number=100 + arrival, num_prompt=5, max_new=9)
    table.slot[row] = arrival
    return row


def test_rows_keep_their_counters_as_the_table_grows_and_are_used_again():
    table, rng = RequestTable(), random.Random(0)
    rows: dict[int, int] = {}
    for arrival in range(500):
        if rows and rng.random() < 0.3:
            table.remove(rows.pop(rng.choice(list(rows))))
        rows[arrival] = add(table, arrival)
        assert len(set(rows.values())) == len(rows)
    for arrival, row in rows.items():
        assert (table.arrival[row], table.number[row]) == (arrival, 100 + arrival)
        assert table.num_sampled[row] == 0 and table.newest[row] == -1


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


def test_a_row_may_end_by_a_stop_token_its_limit_or_a_text():
    """Whose stop token it is the scheduler asks its request."""
    table = RequestTable()
    rows = np.array([add(table, arrival) for arrival in range(4)])
    table.ends_in_text[rows[3]] = True
    of, steps = table.constants(rows, frozenset({3, 4})), np.array([8, 1, 2, 3])
    assert of.may_end([5, 5, 5, 5], steps) == [0, 3]
    assert of.may_end([3, 5, 4, 3], steps) == [0, 2, 3]
    assert of.may_end([5, 5, 5, 5], steps + 6) == [2, 3]
    table.ends_in_text[rows[3]] = False
    assert table.constants(rows, frozenset()).may_end([3, 3, 3, 3], steps - 1) == []


def test_tokens_are_published_of_those_who_asked():
    table = RequestTable()
    rows = np.array([add(table, arrival) for arrival in range(4)])
    table.publishes[rows[[1, 3]]] = True
    of = table.constants(rows, frozenset())
    assert of.published == [1, 3] and of.numbers == [101, 103] and not of.streams
    table.streams[rows[3]] = True
    assert table.constants(rows, frozenset()).streams
