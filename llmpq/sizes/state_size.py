"""Bytes of recurrent state: the plan counts them and the runtime allocates by them.

    slots * (layers with state) * ((taps - 1) * channels * dtype + heads * key_dim * value_dim * 4)

They do not grow with a request's length.
"""

from __future__ import annotations

from collections.abc import Iterable

from llmpq.families.common.spec_values import Recurrent
from llmpq.model_spec import ModelSpec

PAIRED_TOKENS = 64
"""Tokens of a prompt that recurrent layers look at in pairs (runtime/models/recurrence.py, on GPUs
kernels/recurrent/state_scan.py)."""
PAIRED_BY_CHANNEL = 16
"""... where every channel of keys has a decay of its own: a pair is as many products."""
NOTED_TOKENS = 7
"""Tokens of a request that may be drafts at once: `plan.MAX_GAMMA`, as a test holds."""


def layers_with_state(spec: ModelSpec, layers: Iterable[int]) -> list[int]:
    """Return those of the layers that keep a recurrent state."""
    return [layer for layer in layers if spec.has_state(layer)]


def layers_with_kv(spec: ModelSpec, layers: Iterable[int]) -> list[int]:
    """Return those of the layers that keep keys and values."""
    return [layer for layer in layers if spec.has_kv(layer)]


def state_bytes(spec: ModelSpec, layers: Iterable[int], *, slots: int, dtype_bytes: int) -> int:
    """Return the bytes of `slots` requests' states on layers, by their numbers."""
    if spec.recurrent is None:
        return 0
    each = spec.recurrent.state_bytes(dtype_bytes)
    return slots * len(layers_with_state(spec, layers)) * each


def note_bytes(spec: ModelSpec, layers: Iterable[int], *, slots: int, dtype_bytes: int) -> int:
    """Return the bytes of notes of drafts, which layers with state may have to take back.

    One layer's more, which all of them work in.
    """
    if spec.recurrent is None:
        return 0
    each = NOTED_TOKENS * spec.recurrent.inputs * dtype_bytes
    count = len(layers_with_state(spec, layers))
    return slots * (count + (count > 0)) * each


def recurrence_bytes(form: Recurrent, rows: int, row_tokens: int) -> int:
    """Return what a step's recurrence needs beside its matrices, mostly float32.

    What is convolved and what comes of it; queries and keys for every head; values, what is read
    and its gate; decays of channels. Of a chunk the pairs of its tokens thrice, of rows of one
    token their states.
    """
    wide = 3 * form.channels + 2 * form.heads * form.key_dim + 4 * form.inner
    by_channel = form.decays > form.heads
    wide += 4 * form.decays if by_channel else 0
    single = row_tokens == 1
    states = rows if single else 1
    each = form.decays if by_channel else form.heads
    most = PAIRED_BY_CHANNEL if by_channel else PAIRED_TOKENS
    pairs = 0 if single else 3 * each * min(row_tokens, most) ** 2
    kept = 3 * form.matrix_elements + 2 * (form.tail_elements + form.channels)
    return 4 * (rows * row_tokens * wide + pairs + states * kept)
