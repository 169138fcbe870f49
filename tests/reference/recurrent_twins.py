"""Plain-torch twins of the kernels of recurrent layers, token by token."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from llmpq.kernels.recurrent.delta_step import Convolution, GatedNorm, StepProduct
from llmpq.kernels.recurrent.notes import Notes
from llmpq.kernels.recurrent.state_walk import Recurrence


def convolve_rows_reference(
    x_TE: Tensor,
    weight_C1K: Tensor,
    bias_C: Tensor | None,
    tails_SKC: Tensor,
    rows_FR: Tensor,
    *,
    gated: bool = False,
    notes: Notes | None = None,
) -> Tensor:
    """The twin, token by token: float32 arithmetic, one rounding; padding gets zeros."""
    channels, _, taps = weight_C1K.shape
    out = torch.zeros((len(x_TE), channels), dtype=x_TE.dtype, device=x_TE.device)
    for row, (slot, start, count, first) in enumerate(rows_FR[:4].T.tolist()):
        if slot < 0 or count == 0:
            continue
        own, before, settled = x_TE[first : first + count], 0, count
        fed = own[:, :channels] * own[:, 2 * channels :] if gated else own
        if notes is not None:
            before, settled = notes.rows_FR[:2, row].tolist()
            fed = torch.cat((notes.noted_SME[slot, :before, :channels], fed))
        tail = tails_SKC[slot] if start else torch.zeros_like(tails_SKC[slot])
        seen = torch.cat((tail, fed)).float()
        for i in range(before if gated else 0, len(fed)):
            y = (seen[i : i + taps] * weight_C1K[:, 0].t().float()).sum(0)
            y = y if bias_C is None else y + bias_C.float()
            y = y * own[i - before, channels : 2 * channels].float() if gated else y * y.sigmoid()
            if i < before:
                assert notes is not None
                notes.mixed_SME[slot, i, :channels] = y.to(out.dtype)
            else:
                out[first + i - before] = y.to(out.dtype)
        tails_SKC[slot] = seen[settled : settled + taps - 1].to(tails_SKC.dtype)
    return out


LENGTH_EPS = 1e-6


def walk_rows_reference(
    mixed_TE: Tensor,
    steps_TJ: Tensor,
    form: Recurrence,
    states_SHNP: Tensor,
    rows_FR: Tensor,
    *,
    notes: Notes | None = None,
) -> Tensor:
    """The twin, in float32, row by row and token by token; padding gets zeros."""
    if notes is not None:
        return _walk_noted(mixed_TE, steps_TJ, form, states_SHNP, rows_FR, notes)
    _, heads, key_dim, value_dim = states_SHNP.shape
    keys, inner = form.key_heads * key_dim, heads * value_dim
    ahead = form.delta or form.fixed
    sizes = [keys, keys, inner] if ahead else [inner, keys, keys]
    parts = mixed_TE.float().split(sizes, dim=1)
    q, k, v = parts if ahead else parts[::-1]
    q, k = (
        x.unflatten(1, (form.key_heads, key_dim)).repeat_interleave(heads // form.key_heads, 1)
        for x in (q, k)
    )
    v, rate = v.unflatten(1, (heads, value_dim)), -form.decay_H.float().exp()[:, None]
    if form.bias_H is None:
        step = torch.ones((len(mixed_TE), heads))
    elif form.delta:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + LENGTH_EPS) for x in (q, k))
        q = q * key_dim**-0.5
        beta, step = steps_TJ.float().tensor_split([heads], dim=1)
        step = torch.nn.functional.softplus(step + form.bias_H.float())
    else:
        step = torch.nn.functional.softplus(steps_TJ.float() + form.bias_H.float())
    out = torch.zeros((len(mixed_TE), inner), dtype=mixed_TE.dtype, device=mixed_TE.device)
    for slot, start, count, first in rows_FR[:4].T.tolist():
        if slot < 0 or count == 0:
            continue
        s = states_SHNP[slot] if start else torch.zeros_like(states_SHNP[slot])
        for t in range(first, first + count):
            s = s * (rate * step[t].view(heads, -1)).exp()[:, :, None]
            if form.delta:
                said = torch.einsum("hn,hnp->hp", k[t], s)
                u = (v[t] - said) * beta[t].sigmoid()[:, None] * form.beta_factor
            else:
                u = v[t] * step[t][:, None]
            s = s + k[t][:, :, None] * u[:, None]
            o = torch.einsum("hn,hnp->hp", q[t], s)
            if form.skip_H is not None:
                o = o + v[t] * form.skip_H.float()[:, None]
            out[t] = o.flatten().to(out.dtype)
        states_SHNP[slot] = s
    return out


def _walk_noted(
    mixed_TE: Tensor,
    steps_TJ: Tensor,
    form: Recurrence,
    states_SHNP: Tensor,
    rows_FR: Tensor,
    notes: Notes,
) -> Tensor:
    """Walk each row by itself: over the tokens that its state moves on by, then over the rest."""
    channels = mixed_TE.shape[1]
    _, heads, _, value_dim = states_SHNP.shape
    out = torch.zeros((len(mixed_TE), heads * value_dim), dtype=mixed_TE.dtype)
    for row, (slot, start, count, first) in enumerate(rows_FR[:4].T.tolist()):
        if slot < 0 or count == 0:
            continue
        before, settled = notes.rows_FR[:2, row].tolist()
        own, noted = slice(first, first + count), notes.noted_SME[slot, :before, channels:]
        mixed = torch.cat((notes.mixed_SME[slot, :before, :channels], mixed_TE[own]))
        steps = torch.cat((noted, steps_TJ[own])) if noted.shape[1] else mixed
        state, made = states_SHNP[slot : slot + 1].clone(), []
        for part, settles in ((slice(0, settled), True), (slice(settled, len(mixed)), False)):
            begins = start + part.start
            rows = torch.tensor([[0], [begins], [len(mixed[part])], [0]])
            made.append(walk_rows_reference(mixed[part], steps[part], form, state, rows))
            if settles:
                states_SHNP[slot] = state[0]
        out[own] = torch.cat(made)[before:]
    return out


def gated_norm_reference(
    x_TC: Tensor,
    gate_TC: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    groups: int,
    norm_first: bool,
    gate: Literal["silu", "sigmoid"] = "silu",
) -> Tensor:
    """The twin: float32 arithmetic, one rounding."""
    y, z = x_TC.float(), _gated(gate_TC.float(), gate)
    y = y if norm_first else y * z
    if weight is not None:
        by_group = y.unflatten(-1, (groups, -1))
        by_group = by_group * torch.rsqrt(by_group.square().mean(-1, keepdim=True) + eps)
        own = weight.float()
        shared = own.numel() == by_group.shape[-1]
        y = (by_group * own).flatten(1) if shared else by_group.flatten(1) * own
    return (y * z if norm_first else y).to(x_TC.dtype)


def note_rows_reference(
    x_TE: Tensor,
    steps_TJ: Tensor,
    notes: Notes,
    rows_FR: Tensor,
    *,
    channels: int,
    gated: bool = False,
) -> None:
    """The twin, row by row."""
    inputs = notes.noted_SME.shape[2]
    own = x_TE[:, :channels] * x_TE[:, 2 * channels :] if gated else x_TE[:, :channels]
    whole = torch.cat((own, steps_TJ[:, : inputs - channels]), dim=1)
    rows = zip(rows_FR[:4].T.tolist(), notes.rows_FR.T.tolist(), strict=True)
    for (slot, _, count, first), (_, _, certain, place) in rows:
        if slot >= 0 and count > certain:
            behind = place + count - certain
            notes.noted_SME[slot, place:behind] = whole[first + certain : first + count]


def _gated(gate_TC: Tensor, gate: str) -> Tensor:
    return gate_TC.sigmoid() if gate == "sigmoid" else functional.silu(gate_TC)


def delta_step_reference(
    x_TE: Tensor,
    steps: Tensor | StepProduct,
    convolution: Convolution,
    form: Recurrence,
    norm: GatedNorm,
    tails_SKC: Tensor,
    states_SHNP: Tensor,
    rows_FR: Tensor,
) -> Tensor:
    """The twin: one after the other what three launches do; padding gets zeros."""
    weights = convolution.weight_C1K, convolution.bias_C
    mixed = convolve_rows_reference(x_TE, *weights, tails_SKC, rows_FR)
    if isinstance(steps, StepProduct):
        steps = (steps.given_Th.float() @ steps.weight_Jh.float().T).to(x_TE.dtype)
    out = walk_rows_reference(mixed, steps, form, states_SHNP, rows_FR)
    given = norm.gate_TC, norm.weight_P, norm.eps
    heads = states_SHNP.shape[1]
    return gated_norm_reference(out, *given, groups=heads, norm_first=True, gate=norm.gate)
