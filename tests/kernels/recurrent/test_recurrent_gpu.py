"""The kernels of recurrent layers on a GPU, against their twins on the host."""

from dataclasses import replace

import pytest
import torch

from llmpq.kernels.recurrent.convolve import convolve_rows
from llmpq.kernels.recurrent.delta_step import delta_step
from llmpq.kernels.recurrent.gated_norm import gated_norm
from llmpq.kernels.recurrent.notes import note_rows
from llmpq.kernels.recurrent.state_scan import FROM_TOKENS, scan_rows
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
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
MANY = [(1, 0, 700), (3, 9, 1), (0, 64, 2), (4, 5, 400), (-1, 0, 3)]
"""Rows of which several programs take parts."""
SHAPES = {
    "tiny, float32": {"heads": 8, "key_heads": 2, "key_dim": 12, "value_dim": 16},
    "tiny": {"heads": 8, "key_heads": 2, "key_dim": 12, "value_dim": 16},
    "qwen3-next": {"heads": 32, "key_heads": 16, "key_dim": 128, "value_dim": 128},
    "nemotron": {"heads": 64, "key_heads": 8, "key_dim": 128, "value_dim": 64},
}
CLOSE = {
    torch.float32: {"rtol": 1e-4, "atol": 1e-4},
    torch.bfloat16: {"rtol": 3e-2, "atol": 3e-2},
}
"""Outputs of 16 bits are rounded once, and products of theirs to TF32."""


def assert_close(got, want, dtype):
    """Compare outputs of any size: sums are as exact as what is summed is large."""
    size = max(1.0, float(want.square().mean().sqrt()))
    torch.testing.assert_close(got.cpu().float() / size, want / size, **CLOSE[dtype])


def on_gpu(form):
    parts = {
        name: None if tensor is None else tensor.cuda()
        for name, tensor in vars(form).items()
        if name.endswith("_H")
    }
    return replace(form, **parts)


@pytest.mark.parametrize("rows", [SINGLE, CHUNKS, LONG], ids=["single", "chunks", "long"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_recurrence(rows, kind, shape):
    dtype = torch.float32 if shape.endswith("float32") else torch.bfloat16
    rows_FR, places = table(rows)
    mixed, steps, form, states = recurrent_inputs(places, kind, **SHAPES[shape])
    mixed, steps = mixed.to(dtype), steps.to(dtype)
    own, moves = states.cuda(), torch.ones(1, dtype=torch.int32, device="cuda")
    want = walk_rows_reference(mixed.float(), steps.float(), form, states, rows_FR)
    walked = rows is SINGLE or form.by_channel
    short = 1 << 30 if walked else FROM_TOKENS - 1
    given = mixed.cuda(), steps.cuda(), on_gpu(form), own, rows_FR.cuda()
    got = walk_rows(*given, moves, longest=short)
    if not walked:
        scan_rows(*given, slots_of(rows).cuda(), moves, got)
    assert len(states) == SLOTS
    assert_close(got, want, dtype)
    assert_close(own, states, dtype)


@pytest.mark.parametrize("rows", [SINGLE, CHUNKS, MANY], ids=["single", "chunks", "parts"])
@pytest.mark.parametrize(("taps", "gated"), [(4, False), (3, True)])
@pytest.mark.parametrize("channels", [70, 1024])
def test_convolution(rows, taps, gated, channels):
    rows_FR, places = table(rows)
    x = normal(places, 3 * channels, seed=1)[:, : (3 if gated else 1) * channels]
    weight, shift = normal(channels, 1, taps, seed=2), normal(channels, seed=3)
    tails = normal(SLOTS, taps - 1, channels, seed=4)
    own, moves = tails.cuda(), torch.ones(1, dtype=torch.int32, device="cuda")
    want = convolve_rows_reference(x, weight, shift, tails, rows_FR, gated=gated)
    given = x.cuda(), weight.cuda(), shift.cuda(), own, rows_FR.cuda(), moves
    got = convolve_rows(*given, chunks=rows is not SINGLE, gated=gated)
    torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(own.cpu(), tails)


@pytest.mark.parametrize("many", [False, True], ids=["few", "many"])
@pytest.mark.parametrize("kind", ["delta", "kda"])
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape != "nemotron"])
def test_a_delta_rules_step_at_once(shape, kind, many):
    """As the three launches it stands for, to the last bit of what they keep of a row's inputs."""
    dtype = torch.float32 if shape.endswith("float32") else torch.bfloat16
    rows = [(slot, 7 * slot % 5, 1) for slot in range(SLOTS)] if many else SINGLE
    rows_FR, places = table(rows)
    x, steps, form, states = recurrent_inputs(places, kind, **SHAPES[shape])
    convolution, norm, tails = around(places, states, x.shape[1], bias=kind == "kda")
    x, tails, parts = x.to(dtype), tails.to(dtype), steps.to(dtype)
    if kind == "delta":  # more columns than a program takes at a time, and fewer
        parts = step_product(places, states.shape[1], 2064 if many else 264, dtype)
    norm = replace(norm, gate_TC=norm.gate_TC.to(dtype))
    there = {
        part: replace(
            part,
            **{
                name: tensor.cuda()
                for name, tensor in vars(part).items()
                if isinstance(tensor, torch.Tensor)
            },
        )
        for part in (convolution, norm, parts)
        if not isinstance(part, torch.Tensor)
    }
    own, own_tails = states.cuda(), tails.cuda()
    moves = torch.ones(1, dtype=torch.int32, device="cuda")
    want = delta_step_reference(x, parts, convolution, form, norm, tails, states, rows_FR)
    steps = parts.cuda() if kind == "kda" else there[parts]
    given = x.cuda(), steps, there[convolution], on_gpu(form), there[norm]
    for _ in range(2):  # counters are left as they were found
        got = delta_step(*given, own_tails.clone(), own.clone(), rows_FR.cuda(), moves)
    got = delta_step(*given, own_tails, own, rows_FR.cuda(), moves)
    assert_close(got, want.float(), dtype)
    assert_close(own, states, dtype)
    assert torch.equal(own_tails.cpu(), tails)


BOTH = pytest.mark.parametrize(
    ("rows", "noted"), [(NOTED_ROWS, NOTED), (SINGLE_NOTED, ONE_EACH)], ids=["chunks", "single"]
)


@BOTH
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", ["tiny, float32", "qwen3-next"])
def test_recurrence_behind_noted_tokens(rows, noted, kind, shape):
    dtype = torch.float32 if shape.endswith("float32") else torch.bfloat16
    rows_FR, places = table(rows)
    mixed, steps, form, states = recurrent_inputs(places, kind, **SHAPES[shape])
    mixed, steps = mixed.to(dtype), steps.to(dtype)
    notes = some_notes(noted, mixed.shape[1], 0 if kind == "lightning" else steps.shape[1], dtype)
    own, moves = states.cuda(), torch.ones(1, dtype=torch.int32, device="cuda")
    exact = mixed.float(), steps.float(), form, states, rows_FR
    want = walk_rows_reference(*exact, notes=copy_of(notes, dtype=torch.float32))
    given = mixed.cuda(), steps.cuda(), on_gpu(form), own, rows_FR.cuda(), moves
    assert_close(walk_rows(*given, notes=copy_of(notes, "cuda")), want, dtype)
    assert_close(own, states, dtype)


@BOTH
@pytest.mark.parametrize(("taps", "gated"), [(4, False), (3, True)])
@pytest.mark.parametrize("channels", [70, 1024])
def test_convolution_and_notes_behind_noted_tokens(rows, noted, taps, gated, channels):
    rows_FR, places = table(rows)
    x = normal(places, 3 * channels, seed=1)[:, : (3 if gated else 1) * channels]
    weight, shift = normal(channels, 1, taps, seed=2), normal(channels, seed=3)
    tails, steps = normal(SLOTS, taps - 1, channels, seed=4), normal(places, 6, seed=5)
    notes = some_notes(noted, channels, 6)
    own, own_notes = tails.cuda(), copy_of(notes, "cuda")
    moves = torch.ones(1, dtype=torch.int32, device="cuda")
    want = convolve_rows_reference(x, weight, shift, tails, rows_FR, gated=gated, notes=notes)
    given = x.cuda(), weight.cuda(), shift.cuda(), own, rows_FR.cuda(), moves
    options = {"chunks": rows is NOTED_ROWS, "gated": gated}
    got = convolve_rows(*given, notes=own_notes, **options)
    torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(own.cpu(), tails)
    torch.testing.assert_close(own_notes.mixed_SME.cpu(), notes.mixed_SME, rtol=1e-4, atol=1e-4)
    note_rows_reference(x, steps, notes, rows_FR, channels=channels, gated=gated)
    given = x.cuda(), steps.cuda(), own_notes, rows_FR.cuda(), moves
    note_rows(*given, channels=channels, gated=gated)
    torch.testing.assert_close(own_notes.noted_SME.cpu(), notes.noted_SME)


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize(
    ("channels", "groups", "weights"),
    [(128, 1, 128), (96, 2, 96), (4096, 32, 128), (10240, 8, 10240), (5000, 1, 5000), (70, 1, 0)],
)
def test_gated_norm(norm_first, channels, groups, weights):
    x, gate = normal(9, channels), normal(9, 2 * channels + 24, seed=1)[:, :channels]
    weight = normal(weights, seed=2) if weights else None
    given = {"groups": groups, "norm_first": norm_first}
    want = gated_norm_reference(x, gate, weight, 1e-5, **given)
    wide = normal(9, 2 * channels + 24, seed=1).cuda()[:, :channels]
    got = gated_norm(x.cuda(), wide, None if weight is None else weight.cuda(), 1e-5, **given)
    torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-5)
