"""The kernels of recurrent layers, interpreted, against their twins."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from triton import knobs

from llmpq.kernels.recurrent.convolve import convolve_rows
from llmpq.kernels.recurrent.delta_step import delta_step
from llmpq.kernels.recurrent.gated_norm import gated_norm
from llmpq.kernels.recurrent.notes import note_rows
from llmpq.kernels.recurrent.state_scan import FROM_TOKENS, scan_rows, scans
from llmpq.kernels.recurrent.state_walk import walk_rows
from reference.recurrent_rows import (
    CHUNKS,
    KINDS,
    LONG,
    NOTED,
    NOTED_ROWS,
    ONE_EACH,
    SINGLE,
    SINGLE_NOTED,
    SLOTS,
    around,
    copy_of,
    normal,
    recurrent_inputs,
    slots_of,
    some_notes,
    step_product,
    table,
)
from reference.recurrent_twins import (
    convolve_rows_reference,
    delta_step_reference,
    gated_norm_reference,
    note_rows_reference,
    walk_rows_reference,
)

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.skipif(not knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
]
MOVES, STAYS = torch.ones(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)


@pytest.mark.parametrize("rows", [SINGLE, CHUNKS], ids=["single", "chunks"])
@pytest.mark.parametrize(
    ("taps", "bias", "gated"), [(4, True, False), (2, False, False), (3, True, True)]
)
def test_convolution(rows, taps, bias, gated, monkeypatch):
    rows_FR, places = table(rows)
    channels = 70
    x = normal(places, 3 * channels + 5, seed=1)[:, : (3 if gated else 1) * channels]
    weight, shift = normal(channels, 1, taps, seed=2), normal(channels, seed=3) if bias else None
    if bias:  # each tap's side by side
        weight = weight.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    tails = normal(SLOTS, taps - 1, channels, seed=4)
    want_tails = tails.clone()
    want = convolve_rows_reference(x, weight, shift, want_tails, rows_FR, gated=gated)
    given = {"chunks": rows is CHUNKS, "gated": gated}
    for parts in (1, 3) if rows is CHUNKS else (1,):
        monkeypatch.setattr("llmpq.kernels.recurrent.convolve.PART_TOKENS", -(-places // parts))
        own = tails.clone()
        got = convolve_rows(x, weight, shift, own, rows_FR, STAYS, **given)
        torch.testing.assert_close(got, want)
        assert torch.equal(own, tails), "a tail moved on"
        assert torch.equal(convolve_rows(x, weight, shift, own, rows_FR, MOVES, **given), got)
        torch.testing.assert_close(own, want_tails)
    assert not torch.equal(want_tails, tails)


@pytest.mark.parametrize("rows", [SINGLE, CHUNKS], ids=["single", "chunks"])
@pytest.mark.parametrize("kind", KINDS)
def test_walk(rows, kind, monkeypatch):
    monkeypatch.setattr("llmpq.kernels.recurrent.state_walk.FEW_BLOCK_P", 16)
    rows_FR, places = table(rows)
    mixed, steps, form, states = recurrent_inputs(places, kind)
    want_states = states.clone()
    want = walk_rows_reference(mixed, steps, form, want_states, rows_FR)
    own = states.clone()
    got = walk_rows(mixed, steps, form, own, rows_FR, STAYS)
    torch.testing.assert_close(got, want)
    assert torch.equal(own, states), "a state moved on"
    walk_rows(mixed, steps, form, own, rows_FR, MOVES)
    torch.testing.assert_close(own, want_states)
    assert not torch.equal(want_states, states)


@pytest.mark.parametrize(
    ("kind", "key_heads", "given"), [("delta", 2, 40), ("delta", 1, 16), ("kda", 4, 0)]
)
def test_a_delta_rules_step_at_once(kind, key_heads, given, monkeypatch):
    """As by three launches; four heads share the queries and keys of one, two or four."""
    monkeypatch.setattr("llmpq.kernels.recurrent.delta_step.STEP_COLUMNS", 16)
    rows_FR, places = table(SINGLE)
    x, steps, form, states = recurrent_inputs(places, kind, key_heads=key_heads)
    convolution, norm, tails = around(places, states, x.shape[1], bias=kind == "kda")
    parts = step_product(places, states.shape[1], given, x.dtype) if given else steps
    want_tails, want_states = tails.clone(), states.clone()
    want = delta_step_reference(x, parts, convolution, form, norm, want_tails, want_states, rows_FR)
    own_tails, own = tails.clone(), states.clone()
    step = partial(delta_step, x, parts, convolution, form, norm, own_tails, own, rows_FR)
    torch.testing.assert_close(step(STAYS), want, rtol=1e-4, atol=1e-5)
    assert torch.equal(own, states) and torch.equal(own_tails, tails), "a row moved on"
    torch.testing.assert_close(step(MOVES), want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(own, want_states)
    torch.testing.assert_close(own_tails, want_tails)
    assert not torch.equal(want_states, states)
    assert not torch.equal(want_tails, tails)
    wrong = steps if given else step_product(places, 4, 16, x.dtype)
    with pytest.raises(ValueError, match="steps"):
        delta_step(x, wrong, convolution, form, norm, own_tails, own, rows_FR, MOVES)


BOTH = pytest.mark.parametrize(
    ("rows", "noted"), [(NOTED_ROWS, NOTED), (SINGLE_NOTED, ONE_EACH)], ids=["chunks", "single"]
)


@BOTH
@pytest.mark.parametrize(("taps", "gated"), [(4, False), (3, True)])
def test_convolution_behind_noted_tokens(rows, noted, taps, gated, monkeypatch):
    rows_FR, places = table(rows)
    channels = 70
    x = normal(places, 3 * channels + 5, seed=1)[:, : (3 if gated else 1) * channels]
    weight, shift = normal(channels, 1, taps, seed=2), normal(channels, seed=3)
    tails, notes = normal(SLOTS, taps - 1, channels, seed=4), some_notes(noted, channels, 6)
    want_tails, want_notes = tails.clone(), copy_of(notes)
    given = {"gated": gated}
    want = convolve_rows_reference(
        *(x, weight, shift, want_tails, rows_FR), notes=want_notes, **given
    )
    chunks = rows is NOTED_ROWS
    for parts in (1, 3) if chunks else (1,):
        monkeypatch.setattr("llmpq.kernels.recurrent.convolve.PART_TOKENS", -(-places // parts))
        own, own_notes = tails.clone(), copy_of(notes)
        options = {"chunks": chunks, "notes": own_notes, **given}
        convolve = partial(convolve_rows, x, weight, shift, own, rows_FR, **options)
        torch.testing.assert_close(convolve(STAYS), want)
        assert torch.equal(own, tails), "a tail moved on"
        convolve(MOVES)
        torch.testing.assert_close(own, want_tails)
        torch.testing.assert_close(own_notes.mixed_SME, want_notes.mixed_SME)
        assert torch.equal(own_notes.noted_SME, notes.noted_SME)
    assert not torch.equal(want_tails, tails)


@BOTH
@pytest.mark.parametrize("kind", KINDS)
def test_walk_behind_noted_tokens(rows, noted, kind):
    rows_FR, places = table(rows)
    mixed, steps, form, states = recurrent_inputs(places, kind)
    given = 0 if kind == "lightning" else steps.shape[1]
    notes, want_states = some_notes(noted, mixed.shape[1], given), states.clone()
    want = walk_rows_reference(mixed, steps, form, want_states, rows_FR, notes=notes)
    own = states.clone()
    got = walk_rows(mixed, steps, form, own, rows_FR, STAYS, notes=notes)
    torch.testing.assert_close(got, want)
    assert torch.equal(own, states), "a state moved on"
    walk_rows(mixed, steps, form, own, rows_FR, MOVES, notes=notes)
    torch.testing.assert_close(own, want_states)
    assert not torch.equal(want_states, states)


@BOTH
@pytest.mark.parametrize(("gated", "steps"), [(False, 6), (True, 0)])
def test_notes(rows, noted, gated, steps, monkeypatch):
    monkeypatch.setattr("llmpq.kernels.recurrent.notes.BLOCK", 32)
    rows_FR, places = table(rows)
    channels = 70
    x = normal(places, 3 * channels + 5, seed=1)[:, : (3 if gated else 1) * channels]
    given = x, normal(places, 9, seed=2)
    notes = some_notes(noted, channels, steps)
    want, own = copy_of(notes), copy_of(notes)
    note_rows_reference(*given, want, rows_FR, channels=channels, gated=gated)
    note_rows(*given, own, rows_FR, STAYS, channels=channels, gated=gated)
    assert torch.equal(own.noted_SME, notes.noted_SME), "something was noted"
    note_rows(*given, own, rows_FR, MOVES, channels=channels, gated=gated)
    torch.testing.assert_close(own.noted_SME, want.noted_SME)
    assert not torch.equal(want.noted_SME, notes.noted_SME)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "kda"])
def test_scan(kind, monkeypatch):
    """Long rows by blocks, short ones token by token: what all of them give one by one."""
    monkeypatch.setattr("llmpq.kernels.recurrent.state_scan.BLOCK_P", 16)
    rows_FR, places = table(LONG)
    slots_T = slots_of(LONG)
    mixed, steps, form, states = recurrent_inputs(places, kind, heads=2, key_heads=1)
    want_states = states.clone()
    want = walk_rows_reference(mixed, steps, form, want_states, rows_FR)
    own = states.clone()
    got = walk_rows(mixed, steps, form, own, rows_FR, MOVES, longest=FROM_TOKENS - 1)
    moved = own.clone()
    scan_rows(mixed, steps, form, own, rows_FR, slots_T, STAYS, got)
    assert torch.equal(own, moved), "a state moved on"
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    scan_rows(mixed, steps, form, own, rows_FR, slots_T, MOVES, got)
    torch.testing.assert_close(own, want_states, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("capability", "scanned"), [((7, 5), False), ((8, 6), True)])
def test_cards_without_tensor_cores_walk_long_rows(capability, scanned, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert scans(torch.device("cuda")) is scanned


def test_scan_of_keys_that_are_alike():
    """All keys are one, nothing decays, every value replaces the last: powers would cancel."""
    rows_FR, places = table([(0, 0, 130)])
    mixed, steps, form, states = recurrent_inputs(places, "delta", heads=2, key_heads=1)
    mixed[:, :24] = 1.0
    steps[:, :2], steps[:, 2:] = 9.0, -40.0
    form = replace(form, beta_factor=1.0)
    want_states, got = states.clone(), torch.empty(places, 40)
    want = walk_rows_reference(mixed, steps, form, want_states, rows_FR)
    slots_T = torch.zeros(places, dtype=torch.long)
    scan_rows(mixed, steps, form, states, rows_FR, slots_T, MOVES, got)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(states, want_states, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("groups", "weights", "norm_first", "act"),
    [
        (5, 12, True, "silu"),
        (5, 60, False, "silu"),
        (1, 60, True, "sigmoid"),
        (5, 12, True, "sigmoid"),
        (1, 0, False, "silu"),
    ],
)
def test_gated_norm(groups, weights, norm_first, act):
    x, gate = normal(7, 60), normal(7, 90, seed=1)[:, 10:70]
    weight = normal(weights, seed=2) if weights else None
    given = {"groups": groups, "norm_first": norm_first, "gate": act}
    got = gated_norm(x, gate, weight, 1e-5, **given)
    torch.testing.assert_close(got, gated_norm_reference(x, gate, weight, 1e-5, **given))
