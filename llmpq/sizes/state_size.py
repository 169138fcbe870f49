"""Bytes of recurrent state: the plan counts them and the runtime allocates by them.

    slots * (layers with state) * ((taps - 1) * channels * dtype + heads * key_dim * value_dim * 4)

They do not grow with a request's length.
"""

from __future__ import annotations

from collections.abc import Iterable

from llmpq.families.common.spec_values import Recurrent
from llmpq.models.model_spec import ModelSpec

PAIRED_TOKENS = 64
"""Tokens of a block of a prompt within which recurrent layers compute all pairs of tokens at once
(runtime/models/recurrence.py, on GPUs kernels/recurrent/state_scan.py)."""
PAIRED_BY_CHANNEL = 16
"""Tokens of such a block where every channel of keys has a decay of its own (KDA), so that a pair
takes a product for each channel."""
NOTED_TOKENS = 7
"""Drafted tokens of a request whose inputs are kept until they are accepted or refused; as many as
may be drafted at once (`plan.MAX_GAMMA`, which a test compares)."""


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
    """Return the bytes of what is kept to take drafted tokens back out of the states.

    A state cannot be cut as KV can: each layer notes its inputs of the drafts, and moves its state
    on by the accepted ones. One layer's notes more are the room in which all of them work.
    """
    if spec.recurrent is None:
        return 0
    each = NOTED_TOKENS * spec.recurrent.inputs * dtype_bytes
    count = len(layers_with_state(spec, layers))
    return slots * (count + (count > 0)) * each


def recurrence_bytes(form: Recurrent, rows: int, row_tokens: int) -> int:
    """Return the bytes of a step's temporaries in a recurrent layer, counted as float32.

    Per token: the convolution's inputs and outputs; queries and keys of every head; values, the
    recurrence's output and its gate; decays of channels. A chunk has three matrices of its pairs of
    tokens, rows of one token have a copy of their states each.
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
