"""Recurrent mixers on a GPU: what recurrent.py does, over rows that only the device knows.

    convolution   of all rows, each from its tail      kernels/recurrent/convolve.py
    recurrence    of short rows token by token, their states      state_walk.py
                  read once and written once; of long rows by     state_scan.py
                  blocks of tokens, but where channels decay
                  apart (KDA)
    gate          with its norm                                   gated_norm.py
    all three     of a delta rule's few rows of one token,        delta_step.py
                  without drafts, and what their steps are made of
    drafts        noted, their state moved on by when they are    notes.py
                  accepted, in the next step's own launches

Nothing asks the device for a value, so steps are captured, those with chunks too. Steps that are
not of a pool (a calibration's whole prompts) run in torch's operators.

Legend: T places, C channels, h hidden.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from llmpq.families.common.spec_values import Recurrent
from llmpq.kernels.recurrent.convolve import convolve_rows
from llmpq.kernels.recurrent.delta_step import (
    Convolution,
    GatedNorm,
    StepProduct,
    delta_step,
    takes,
)
from llmpq.kernels.recurrent.gated_norm import gated_norm
from llmpq.kernels.recurrent.notes import Notes, note_rows
from llmpq.kernels.recurrent.state_scan import FROM_TOKENS, scan_rows, scans
from llmpq.kernels.recurrent.state_walk import Recurrence, walk_rows
from llmpq.plans.plan import MAX_GAMMA
from llmpq.runtime.cache.kv_cache import KVCache
from llmpq.runtime.cache.recurrent_states import LayerState
from llmpq.runtime.models.recurrent import RecurrentMixer, in_factors
from llmpq.runtime.steps.paged_step import PagedStep
from llmpq.runtime.steps.step import Step


def _at_once(part: RecurrentMixer, step: PagedStep) -> bool:
    """Whether a step of a layer is one launch between its products: a token a row, no drafts."""
    form, norm = part.form, part.mixer_norm
    if step.chunks or step.noted_FR is not None:
        return False
    by_heads = norm is not None and not norm.centred and norm.shape == (form.value_dim,)
    delta = form.is_delta and part.conv_weight_C1K is not None
    num_rows = step.rows_FR.shape[1]
    return delta and by_heads and takes(num_rows, form.heads, form.key_dim, form.value_dim)


def mix(
    part: RecurrentMixer,
    x_BQh: Tensor,
    into_BQE: Tensor,
    step: Step,
    kv: KVCache,
) -> Tensor:
    """Return what `mixer_out` takes [B, Q, C]; `into_BQE`: what `mixer_in` gave.

    `RecurrentMixer.forward` is its twin.
    """
    assert isinstance(step, PagedStep) and kv.states is not None
    form, states = part.form, kv.states.layer(part.place)
    if _at_once(part, step):
        return _delta_step(part, x_BQh[0], into_BQE[0], states, step, kv.states.moves_1)
    into_TE, delta = into_BQE[0], form.is_delta

    def convolved(inputs_TE: Tensor) -> Tensor:
        if part.conv_weight_C1K is None:
            return functional.silu(inputs_TE)
        return convolve_rows(
            inputs_TE,
            part.conv_weight_C1K,
            part.conv_bias_C,
            states.tail_SKC,
            step.rows_FR,
            moves_1,
            chunks=step.chunks,
            gated=form.kind == "short_conv",
            notes=notes,
        )

    def note(inputs_TE: Tensor, steps_TJ: Tensor) -> None:
        if notes is not None and step.notes:
            gated = form.kind == "short_conv"
            given = inputs_TE, steps_TJ, notes, step.rows_FR, moves_1
            note_rows(*given, channels=form.channels, gated=gated)

    moves_1, notes = kv.states.moves_1, _notes(part, states, step)
    if form.kind == "short_conv":
        out_TC = convolved(into_TE)
        note(into_TE, into_TE)
        return out_TC[None]
    if delta:
        gate_TC, steps_TJ = part.gate_and_steps(x_BQh[0], into_TE)
        inputs_TC = into_TE[:, : form.channels]
    elif form.kind == "lightning":
        inputs_TC, gate_TC = into_TE.split([form.channels, form.inner], dim=1)
        steps_TJ = inputs_TC  # unread
    else:
        if form.in_factors:
            into_TE.mul_(_factors(form, into_TE.dtype, into_TE.device))
        gate_TC, inputs_TC, steps_TJ = into_TE.split([form.inner, form.channels, form.heads], dim=1)
    mixed_TC = convolved(inputs_TC)
    out_TC = _recurrence(part, mixed_TC, steps_TJ, states.matrix_SHNP, step, moves_1, notes)
    note(inputs_TC if part.conv_weight_C1K is not None else mixed_TC, steps_TJ)
    norm = part.mixer_norm
    return gated_norm(
        out_TC,
        gate_TC,
        None if norm is None else norm.weight,
        0.0 if norm is None else norm.eps,
        groups=form.heads if delta else form.norm_groups,
        norm_first=delta or form.norm_first,
        gate=form.gate,
    )[None]


def _delta_step(
    part: RecurrentMixer,
    x_Th: Tensor,
    into_TE: Tensor,
    states: LayerState,
    step: PagedStep,
    moves_1: Tensor,
) -> Tensor:
    """Return [1, T, H P] of a delta rule's rows of one token, in one launch."""
    form, norm, weight_C1K = part.form, part.mixer_norm, part.conv_weight_C1K
    assert norm is not None and weight_C1K is not None
    steps: Tensor | StepProduct
    if form.kind == "gated_delta":
        assert part.step_weight is not None
        gate_TC = into_TE[:, form.channels :]
        steps = StepProduct(given_Th=x_Th, weight_Jh=part.step_weight)
    else:
        gate_TC, steps = part.gate_and_steps(x_Th, into_TE)
    return delta_step(
        into_TE[:, : form.channels],
        steps,
        Convolution(weight_C1K=weight_C1K, bias_C=part.conv_bias_C),
        _form_of(part),
        GatedNorm(weight_P=norm.weight, eps=norm.eps, gate_TC=gate_TC, gate=form.gate),
        states.tail_SKC,
        states.matrix_SHNP,
        step.rows_FR,
        moves_1,
    )[None]


def _recurrence(
    part: RecurrentMixer,
    mixed_TC: Tensor,
    steps_TJ: Tensor,
    matrix_SHNP: Tensor,
    step: PagedStep,
    moves_1: Tensor,
    notes: Notes | None,
) -> Tensor:
    """Return what every place reads of its row's state, which moves on."""
    recurrence, rows_FR = _form_of(part), step.rows_FR
    if not step.chunks or recurrence.by_channel or not scans(mixed_TC.device):
        return walk_rows(mixed_TC, steps_TJ, recurrence, matrix_SHNP, rows_FR, moves_1, notes=notes)
    short = FROM_TOKENS - 1
    out_TC = walk_rows(
        *(mixed_TC, steps_TJ, recurrence, matrix_SHNP, rows_FR, moves_1),
        longest=short,
        notes=notes,
    )
    slots_T = step.where.slots_T
    scan_rows(mixed_TC, steps_TJ, recurrence, matrix_SHNP, rows_FR, slots_T, moves_1, out_TC)
    return out_TC


def _form_of(part: RecurrentMixer) -> Recurrence:
    """Return a layer's recurrence as kernels take it."""
    form = part.form
    decay_H = part.decay_H if part.fixed_decay_H is None else part.fixed_decay_H
    assert decay_H is not None
    return Recurrence(
        delta=form.is_delta,
        key_heads=form.key_heads,
        decay_H=decay_H,
        bias_H=part.step_bias_H,
        skip_H=part.skip_H,
        by_channel=form.kind == "kda",
        beta_factor=form.beta_factor,
    )


assert MAX_GAMMA + 1 < FROM_TOKENS, "rows with drafts are walked"


def _notes(part: RecurrentMixer, state: LayerState, step: PagedStep) -> Notes | None:
    """Return a layer's notes of tokens that may be taken back, None without drafts."""
    noted_SME, mixed_SME = state.noted_SME, state.mixed_SME
    if step.noted_FR is None or noted_SME is None or mixed_SME is None:
        return None
    convolved = part.conv_weight_C1K is not None
    return Notes(
        noted_SME=noted_SME,
        mixed_SME=mixed_SME if convolved else noted_SME,
        rows_FR=step.noted_FR,
    )


@lru_cache(maxsize=64)
def _factors(form: Recurrent, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return Mamba-2's factors of what the matrix in front gives, once for all of a device."""
    return in_factors(form, torch.empty(0, dtype=dtype, device=device))
