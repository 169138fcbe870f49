"""One token of each row through a recurrent mixer, its products left out (native/recurrent.cpp).

Convolution, gates, state and norm are one call, where torch's operators take about thirty, each
longer than its arithmetic for a user's one row. Roundings on the way are those of
runtime/models/recurrent.py, sums have another order.

Legend: B rows, T tokens of a step, E inputs of a token, C channels, H heads, N key_dim,
P value_dim, K taps, S slots.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from llmpq.families.common.spec_values import Recurrent
from llmpq.kernels.native.library import DTYPE_CODES, address, call, library

KINDS = {"gated_delta": 0, "kda": 1, "lightning": 2, "mamba2": 3, "short_conv": 4}
"""What recurrent.cpp calls them."""
_ADDRESS, _NUMBER, _REAL = ctypes.c_size_t, ctypes.c_int64, ctypes.c_double


class _Mixer(ctypes.Structure):
    _fields_ = [
        (name, _NUMBER)
        for name in (
            *("kind", "dtype", "heads", "key_heads", "key_dim", "value_dim", "channels", "taps"),
            *("sigmoid", "norm_groups", "norm_first", "steps_in_dtype"),
        )
    ]
    _fields_ += [
        (name, _ADDRESS) for name in ("conv", "conv_bias", "rate", "step_bias", "skip", "norm")
    ]
    _fields_ += [("norm_eps", _REAL), ("beta_factor", _REAL)]


class _Tokens(ctypes.Structure):
    _fields_ = [("rows", _NUMBER), ("threads", _NUMBER)]
    _fields_ += [(name, _ADDRESS) for name in ("at", "slots", "fresh", "x", "gate", "steps")]
    _fields_ += [(name, _NUMBER) for name in ("x_pitch", "gate_pitch", "steps_pitch")]
    _fields_ += [(name, _ADDRESS) for name in ("tails", "matrices", "out")]


@dataclass(frozen=True, kw_only=True, eq=False)
class MixerWeights:
    """What a recurrent mixer is made of, its products left out."""

    form: Recurrent
    dtype: torch.dtype
    conv_weight_C1K: Tensor | None
    conv_bias_C: Tensor | None
    decay_H: Tensor | None
    """Logarithms of how fast heads forget."""
    step_bias_H: Tensor | None
    """KDA's of every channel of keys, H N of them."""
    skip_H: Tensor | None
    norm_weight: Tensor | None
    """[P] of every head of delta rules, [H P] of the others."""
    norm_eps: float


@dataclass(frozen=True, eq=False)
class SingleRows:
    """Rows of one token each, int64: which token is a row's, its slot, whether it is fresh."""

    at_B: Tensor
    slots_B: Tensor
    fresh_B: Tensor


class RecurrentStep:
    """A mixer that the library takes (`recurrent_step`)."""

    def __init__(self, mixer: MixerWeights) -> None:
        self._held: list[Tensor] = []
        form = mixer.form
        self.inner, self.dtype = form.inner, mixer.dtype
        weight, bias, norm = mixer.conv_weight_C1K, mixer.step_bias_H, mixer.norm_weight
        if norm is not None and form.is_delta:
            norm = norm.to(mixer.dtype)
        self._mixer = _Mixer(
            KINDS[form.kind],
            DTYPE_CODES[mixer.dtype],
            form.heads,
            form.key_heads or form.heads,
            form.key_dim,
            form.value_dim,
            form.channels,
            form.taps,
            form.gate == "sigmoid",
            form.norm_groups,
            form.norm_first,
            bias is not None and bias.dtype == mixer.dtype,
            self._floats(None if weight is None else weight[:, 0].t()),
            self._floats(mixer.conv_bias_C),
            self._floats(None if mixer.decay_H is None else mixer.decay_H.float().exp()),
            self._floats(bias),
            self._floats(mixer.skip_H),
            self._kept(norm, form.is_delta),
            mixer.norm_eps,
            form.beta_factor,
        )
        self.address = ctypes.addressof(self._mixer)

    def __call__(
        self,
        x_TE: Tensor,
        gate_TC: Tensor,
        steps_TE: Tensor,
        rows: SingleRows,
        tail_SKC: Tensor,
        matrix_SHNP: Tensor,
    ) -> Tensor:
        """Return [T, H P] (short convolutions: [T, C]); states move on; zeros where no row is.

        Each token's numbers lie side by side. A short convolution's x is all three of its inputs.
        """
        tokens, alone = len(x_TE), rows.at_B.shape[0] == len(x_TE)
        size = (tokens, self.inner)
        out = x_TE.new_empty(size) if alone else x_TE.new_zeros(size)
        given = _Tokens(
            rows.at_B.shape[0],
            torch.get_num_threads(),
            rows.at_B.data_ptr(),
            rows.slots_B.data_ptr(),
            rows.fresh_B.data_ptr(),
            x_TE.data_ptr(),
            gate_TC.data_ptr(),
            steps_TE.data_ptr(),
            x_TE.stride(0),
            gate_TC.stride(0),
            steps_TE.stride(0),
            tail_SKC.data_ptr(),
            matrix_SHNP.data_ptr(),
            out.data_ptr(),
        )
        call("llmpq_recurrent", self.address, ctypes.addressof(given))
        return out

    def _floats(self, tensor: Tensor | None) -> int:
        return self._kept(tensor, in_dtype=False)

    def _kept(self, tensor: Tensor | None, in_dtype: bool) -> int:
        if tensor is not None:
            tensor = (tensor if in_dtype else tensor.float()).contiguous()
            self._held.append(tensor)
        return address(tensor)


def recurrent_step(mixer: MixerWeights) -> RecurrentStep | None:
    """Return a mixer in the library's form; None where there is none, or it is not for it."""
    given = (mixer.conv_weight_C1K, mixer.decay_H, mixer.norm_weight)
    here = all(tensor is None or tensor.device.type == "cpu" for tensor in given)
    if mixer.dtype not in DTYPE_CODES or not here or library() is None:
        return None
    return RecurrentStep(mixer)
