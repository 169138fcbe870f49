"""Recurrent mixers of decoder layers: delta rules, Mamba-2, lightning attention, convolutions.

    gated delta  q, k, v = silu(conv(W x)); z = W' x; b, a = W'' x
                 log decay = -exp(A) softplus(a + bias); out = O (norm(delta rule) * silu(z))
    KDA          the same but q, k, v = silu(conv(W x)); b, f, g = W'' x; z = W_g g
                 log decay = -exp(A) softplus(W_f f + bias), of every channel of keys
                 out = O (norm(delta rule) * sigmoid(z))
    lightning    q, k, v = silu(W x); z = W' x; the decay of a head is a number that its layer has
                 out = O (norm(scan) * sigmoid(z)), of all channels
    Mamba-2      z, xBC, dt = W x; x, B, C = silu(conv(xBC)); dt = softplus(dt + bias)
                 log decay = -exp(A) dt; y = scan + D x; out = O norm(y * silu(z)), norm by groups
    short conv   b, c, x = W x; out = O (c * conv(b * x))

The arithmetic of the state is in recurrence.py. Rows of one token go together, every other row by
itself; products see all tokens of a step. A step of one token a row on a CPU is one call of our own
code (kernels/cpu/recurrent_step.py).

Legend: B rows, Q new tokens, T tokens of a step, h hidden, C channels, H heads, N key_dim,
P value_dim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from llmpq.families.common.spec_values import Recurrent
from llmpq.kernels.cpu.recurrent_step import (
    MixerWeights,
    RecurrentStep,
    SingleRows,
    recurrent_step,
)
from llmpq.runtime.cache.kv_cache import KVCache
from llmpq.runtime.cache.recurrent_states import LayerState, RecurrentStates, StateRun, StateRuns
from llmpq.runtime.models.linear import Linear
from llmpq.runtime.models.norms import Norm
from llmpq.runtime.models.recurrence import (
    convolve,
    convolve_step,
    scan,
    scan_step,
    unit_length,
)
from llmpq.runtime.steps.step import RaggedStep, Span, Step

_SMALL = 1 << 15
"""Elements of all rows' states up to which they are gathered and move on together."""


class RecurrentMixer(nn.Module):
    """A layer's mixer whose memory of a request is a slot of `RecurrentStates`."""

    def __init__(
        self,
        form: Recurrent,
        mixer_in: Linear,
        mixer_out: Linear,
        conv_weight_C1K: Tensor | None,
        conv_bias_C: Tensor | None,
        *,
        decay_H: Tensor | None = None,
        step_bias_H: Tensor | None = None,
        step_weight: Tensor | None = None,
        skip_H: Tensor | None = None,
        norm: Norm | None = None,
        decay_weight: Tensor | None = None,
        gate_weight: Tensor | None = None,
        fixed_decay_H: Tensor | None = None,
    ) -> None:
        """`step_weight` [2 H, h]: of the delta rule's b and a; KDA's [H + 2 R, h]: of b, f and g.

        `decay_weight` [H N, R], `gate_weight` [H P, R]: what KDA makes of f and g. `fixed_decay_H`:
        the logarithms of what lightning attention's heads lose each token; no checkpoint has them.
        """
        super().__init__()
        self.form = form
        self.mixer_in = mixer_in
        self.mixer_out = mixer_out
        self.conv_weight_C1K, self.conv_bias_C = conv_weight_C1K, conv_bias_C
        self.decay_H, self.step_bias_H = decay_H, step_bias_H
        self.fixed_decay_H = fixed_decay_H
        self.step_weight = step_weight
        self.decay_weight, self.gate_weight = decay_weight, gate_weight
        self.skip_H = skip_H
        self.mixer_norm = norm
        self.place = 0
        """Its number among the recurrent layers of its stage."""
        self._steps: dict[torch.dtype, RecurrentStep | None] = {}

    def forward(self, x_BQh: Tensor, layer: int, step: Step, kv: KVCache) -> Tensor:
        """Return [B, Q, h]; each row's state moves on by its tokens, but for drafts."""
        mixed: Tensor = self.mixer_out(self.read(x_BQh, layer, step, kv))
        mixed = mixed if self.form.out_factor == 1.0 else mixed * self.form.out_factor
        return mixed.view(x_BQh.shape)

    def read(self, x_BQh: Tensor, layer: int, step: Step, kv: KVCache) -> Tensor:
        """Return what the matrix behind is multiplied with, [T, H P] or [T, C]."""
        states = kv.states or self._fresh(spans_in(step), x_BQh)
        x_Th = x_BQh.reshape(-1, x_BQh.shape[-1])
        runs = runs_in(step, states, len(x_Th))
        into, state = self.mixer_in(x_Th), states.layer(self.place)
        if x_Th.device.type == "cpu" and runs.single is not None:
            native = self.native_step(x_Th.dtype)
            if native is not None:
                return self._step(native, x_Th, into, runs.single, state)
        split, read, finish = {
            "gated_delta": (self._split_delta, self._read_delta, self._finish_delta),
            "kda": (self._split_delta, self._read_delta, self._finish_delta),
            "lightning": (self._split_gate, self._read_lightning, self._finish_groups),
            "mamba2": (self._split_mamba2, self._read_mamba2, self._finish_groups),
            "short_conv": (self._split_conv, self._read_conv, self._finish_conv),
        }[self.form.kind]
        inputs_TE, gate_TC = split(x_Th, into)
        read_out = read(runs.with_noted(inputs_TE, state), runs.runs, state)
        return finish(runs.of_own(read_out), gate_TC).to(x_Th.dtype)

    def native_step(self, dtype: torch.dtype) -> RecurrentStep | None:
        """Return it as our own code takes it for rows of one token; None where that cannot."""
        if dtype not in self._steps:
            self._steps[dtype] = self._make_native(dtype)
        return self._steps[dtype]

    def _make_native(self, dtype: torch.dtype) -> RecurrentStep | None:
        form, norm = self.form, self.mixer_norm
        if norm is not None and (norm.centred or norm.weight.ndim > 1):
            return None
        decay_H = self.fixed_decay_H if form.kind == "lightning" else self.decay_H
        return recurrent_step(
            MixerWeights(
                form=form,
                dtype=dtype,
                conv_weight_C1K=self.conv_weight_C1K,
                conv_bias_C=self.conv_bias_C,
                decay_H=decay_H,
                step_bias_H=self.step_bias_H,
                skip_H=self.skip_H,
                norm_weight=None if norm is None else norm.weight,
                norm_eps=0.0 if norm is None else norm.eps,
            )
        )

    def _step(
        self,
        native: RecurrentStep,
        x_Th: Tensor,
        into: Tensor,
        rows: SingleRows,
        state: LayerState,
    ) -> Tensor:
        """Return what `read` does of rows of one token each."""
        form = self.form
        if form.kind == "short_conv":
            mixed, gate, steps = into, into[:, form.channels :], into
        elif form.kind == "mamba2":
            mixed, gate = self._split_mamba2(x_Th, into)
            steps = mixed[:, form.channels :]
        elif form.kind == "lightning":
            mixed, gate = self._split_gate(x_Th, into)
            steps = mixed
        else:
            mixed, (gate, steps) = into, self.gate_and_steps(x_Th, into)
        return native(mixed, gate, steps, rows, state.tail_SKC, state.matrix_SHNP)

    def _fresh(self, spans: Sequence[Span], x: Tensor) -> RecurrentStates:
        """Return slots for a step whose rows all begin at position 0 and are not gone on from."""
        assert all(span.start == 0 for span in spans), "a row goes on, and no state was kept"
        return RecurrentStates(
            self.form,
            num_layers=self.place + 1,
            slots=max(span.slot for span in spans) + 1,
            dtype=x.dtype,
            device=x.device,
        )

    def _split_conv(self, x_Th: Tensor, into: Tensor) -> tuple[Tensor, Tensor]:
        before, behind, x = into.chunk(3, dim=-1)
        return before * x, behind

    def _read_conv(self, inputs_TE: Tensor, runs: Sequence[StateRun], state: LayerState) -> Tensor:
        return self._convolved(inputs_TE, runs, state)

    def _finish_conv(self, out_TC: Tensor, gate_TC: Tensor) -> Tensor:
        return out_TC * gate_TC

    def _split_delta(self, x_Th: Tensor, into: Tensor) -> tuple[Tensor, Tensor]:
        gate, steps = self.gate_and_steps(x_Th, into)
        return torch.cat((into[:, : self.form.channels], steps), dim=-1), gate

    def gate_and_steps(self, x_Th: Tensor, into: Tensor) -> tuple[Tensor, Tensor]:
        """Return a delta rule's gate [T, H P], and its steps: b and a of every head, or channel."""
        assert self.step_weight is not None
        steps, form = functional.linear(x_Th, self.step_weight), self.form
        if form.kind == "gated_delta":
            return into[:, form.channels :], steps
        assert self.decay_weight is not None and self.gate_weight is not None
        beta, decay, gate = steps.split([form.heads, form.low_rank, form.low_rank], dim=-1)
        decays = functional.linear(decay, self.decay_weight)
        return functional.linear(gate, self.gate_weight), torch.cat((beta, decays), dim=-1)

    def _split_gate(self, x_Th: Tensor, into: Tensor) -> tuple[Tensor, Tensor]:
        mixed, gate = into.split([self.form.channels, self.form.inner], dim=-1)
        return mixed, gate

    def _read_lightning(
        self, inputs_TE: Tensor, runs: Sequence[StateRun], state: LayerState
    ) -> Tensor:
        form = self.form
        assert self.fixed_decay_H is not None
        mixed = functional.silu(inputs_TE).float().view(-1, 3, form.heads, form.key_dim)
        q, k, v = mixed.unbind(1)
        log_decay = -self.fixed_decay_H.exp().expand(len(mixed), -1)
        out = self._scanned(q, k, v, log_decay, None, runs, state)
        return out.flatten(1).to(inputs_TE.dtype)

    def _read_delta(self, inputs_TE: Tensor, runs: Sequence[StateRun], state: LayerState) -> Tensor:
        form = self.form
        assert self.decay_H is not None and self.step_bias_H is not None
        mixed, steps = inputs_TE.split([form.channels, form.steps], dim=-1)
        mixed = functional.silu(self._convolved(mixed, runs, state)).float()
        width = form.key_heads * form.key_dim
        q, k, v = mixed.split([width, width, form.inner], dim=-1)
        shared = form.heads // form.key_heads
        q, k = (
            unit_length(x.unflatten(-1, (form.key_heads, form.key_dim))).repeat_interleave(
                shared, 1
            )
            for x in (q, k)
        )
        b, a = steps.float().split([form.heads, form.decays], dim=-1)
        rate = -self.decay_H.float().exp()
        log_decay = functional.softplus(a + self.step_bias_H.float())
        if form.kind == "kda":
            log_decay = log_decay.unflatten(-1, (form.heads, form.key_dim)) * rate[:, None]
        else:
            log_decay = log_decay * rate
        return self._scanned(
            q * form.key_dim**-0.5,
            k,
            v.unflatten(-1, (form.heads, form.value_dim)),
            log_decay,
            b.sigmoid() * form.beta_factor,
            runs,
            state,
        ).to(inputs_TE.dtype)

    def _finish_delta(self, out_THP: Tensor, gate_TC: Tensor) -> Tensor:
        assert self.mixer_norm is not None
        normed = self.mixer_norm(out_THP).float()
        return (normed * self._gated(gate_TC.float()).view(normed.shape)).flatten(1)

    def _gated(self, gate_TC: Tensor) -> Tensor:
        return functional.silu(gate_TC) if self.form.gate == "silu" else gate_TC.sigmoid()

    def _split_mamba2(self, x_Th: Tensor, into: Tensor) -> tuple[Tensor, Tensor]:
        form = self.form
        if form.in_factors:
            into = into * in_factors(form, into)
        gate, inputs = into.split([form.inner, form.inputs], dim=-1)
        return inputs, gate

    def _read_mamba2(
        self, inputs_TE: Tensor, runs: Sequence[StateRun], state: LayerState
    ) -> Tensor:
        form = self.form
        assert self.decay_H is not None and self.step_bias_H is not None
        assert self.skip_H is not None
        mixed, dt = inputs_TE.split([form.channels, form.heads], dim=-1)
        mixed = functional.silu(self._convolved(mixed, runs, state)).float()
        width = form.key_heads * form.key_dim
        x, k, q = mixed.split([form.inner, width, width], dim=-1)
        shared = form.heads // form.key_heads
        q, k = (
            part.unflatten(-1, (form.key_heads, form.key_dim)).repeat_interleave(shared, 1)
            for part in (q, k)
        )
        dt = functional.softplus(dt + self.step_bias_H).float()
        x_THP = x.unflatten(-1, (form.heads, form.value_dim))
        log_decay = -self.decay_H.float().exp() * dt
        out = self._scanned(q, k, x_THP * dt[..., None], log_decay, None, runs, state)
        return (out + x_THP * self.skip_H.float()[:, None]).flatten(1)

    def _finish_groups(self, out_TC: Tensor, gate_TC: Tensor) -> Tensor:
        """Return the output, gated and normalised in the order that its family has."""
        form, norm = self.form, self.mixer_norm
        gate_TC = self._gated(gate_TC.float())
        if norm is None:
            return out_TC * gate_TC
        if not form.norm_first:
            out_TC = out_TC * gate_TC
        by_group = out_TC.unflatten(-1, (form.norm_groups, -1))
        scale = torch.rsqrt(by_group.square().mean(-1, keepdim=True) + norm.eps)
        normed = (by_group * scale).flatten(1) * norm.weight.float()
        return normed * gate_TC if form.norm_first else normed

    def _convolved(self, x_TC: Tensor, runs: Sequence[StateRun], state: LayerState) -> Tensor:
        """Return the convolution of every row, whose tail its slot has, and gets."""
        assert self.conv_weight_C1K is not None
        out, tails = torch.zeros_like(x_TC), state.tail_SKC
        weight, bias = self.conv_weight_C1K, self.conv_bias_C
        rows, slots = _single(runs)
        if rows:
            before = tails[slots]
            _begin(before, runs)
            out[rows], tails[slots] = convolve_step(x_TC[rows], before, weight, bias)
        for run in _longer(runs):
            tail = torch.zeros_like(tails[run.slot]) if run.fresh else tails[run.slot]
            for part, settles in _parts(run):
                out[part], tail = convolve(x_TC[part], tail, weight, bias)
                if settles:
                    tails[run.slot] = tail
        return out

    def _scanned(
        self,
        q_THN: Tensor,
        k_THN: Tensor,
        v_THP: Tensor,
        log_decay_TH: Tensor,
        beta_TH: Tensor | None,
        runs: Sequence[StateRun],
        state: LayerState,
    ) -> Tensor:
        """Return what every row reads of its state [T, H, P], which moves on by its tokens."""
        out, matrices = torch.zeros_like(v_THP), state.matrix_SHNP
        rows, slots = _single(runs)

        def of(part: slice | list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            return q_THN[part], k_THN[part], v_THP[part], log_decay_TH[part]

        if len(rows) * self.form.matrix_elements < _SMALL:
            parts = [(rows, slots)] if rows else []
        else:  # a row's state where it lies: copies of it cost more than calls
            parts = [([row], [slot]) for row, slot in zip(rows, slots, strict=True)]
        fresh = {run.slot for run in runs if run.fresh}
        for part_rows, part_slots in parts:
            alone = len(part_slots) == 1
            first = part_slots[0]
            states = matrices[first : first + 1] if alone else matrices[part_slots]
            if any(slot in fresh for slot in part_slots):
                states[[slot in fresh for slot in part_slots]] = 0
            q, k, v, decay = of(part_rows)
            beta = None if beta_TH is None else beta_TH[part_rows]
            out[part_rows] = scan_step(q, k, v, decay, states, beta)
            if not alone:
                matrices[part_slots] = states
        for run in _longer(runs):
            matrix = torch.zeros_like(matrices[run.slot]) if run.fresh else matrices[run.slot]
            for part, settles in _parts(run):
                q, k, v, decay = of(part)
                beta = None if beta_TH is None else beta_TH[part]
                out[part], matrix = scan(q, k, v, decay, matrix, beta)
                if settles:
                    matrices[run.slot] = matrix
        return out


def lightning_decays(heads: int, layer: int, num_layers: int) -> list[float]:
    """Return the logarithms of what lightning attention's heads lose of a token's step.

    Slopes are ALiBi's, less the deeper the layer (Qin et al., "Lightning Attention-2", 2024).
    """
    share = 1 - layer / (num_layers - 1 + 1e-5) + 1e-5
    return [math.log(2.0 ** (-8.0 * (head + 1) / heads) * share) for head in range(heads)]


def in_factors(form: Recurrent, like: Tensor) -> Tensor:
    """Return what each output of Mamba-2's matrix in front is multiplied by, `like` in dtype."""
    keys = form.key_heads * form.key_dim
    widths = (form.inner, form.inner, keys, keys, form.heads)
    pieces = [like.new_full((w,), f) for w, f in zip(widths, form.in_factors, strict=True)]
    return torch.cat(pieces)


def spans_in(step: Step) -> tuple[Span, ...]:
    """Return the rows of a step, found once."""
    return step.once("spans", lambda: spans_of(step))


def runs_in(step: Step, states: RecurrentStates, width: int) -> StateRuns:
    """Return how the rows of a step of `width` tokens move their states on, in all layers."""
    return step.once("state runs", lambda: states.begin(spans_in(step), width=width))


def spans_of(step: Step) -> tuple[Span, ...]:
    """Return a step's rows as they lie behind each other in its tokens."""
    if isinstance(step, RaggedStep):
        return step.spans
    rows = zip(step.slots_B.tolist(), step.start_B.tolist(), step.num_new_B.tolist(), strict=True)
    return tuple(
        Span(slot, start, count, row * step.q_len) for row, (slot, start, count) in enumerate(rows)
    )


def _single(runs: Sequence[StateRun]) -> tuple[list[int], list[int]]:
    """Return where the tokens of rows of one settled token are, and their slots."""
    single = [run for run in runs if run.count == run.settled == 1]
    return [run.first for run in single], [run.slot for run in single]


def _longer(runs: Sequence[StateRun]) -> list[StateRun]:
    return [run for run in runs if not run.count == run.settled == 1]


def _parts(run: StateRun) -> list[tuple[slice, bool]]:
    """Return the tokens that a state moves on by, and those behind them, if there are any."""
    cut, end = run.first + run.settled, run.first + run.count
    parts = [(slice(run.first, cut), True), (slice(cut, end), False)]
    return [(part, settles) for part, settles in parts if part.start < part.stop]


def _begin(states: Tensor, runs: Sequence[StateRun]) -> None:
    """Have the rows of one token that start at position 0 start from zeros."""
    fresh = [r.fresh for r in runs if r.count == r.settled == 1]
    if any(fresh):
        states[fresh] = 0
