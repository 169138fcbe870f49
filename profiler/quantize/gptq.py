"""GPTQ: round a weight column by column, each error pushed onto the columns still to come.

    H = X^T X summed over calibration tokens, plus damping * mean(diag H) on its diagonal
    U = upper Cholesky factor of H^-1
    for k in order:  q_k = round(w_k);  w_j -= (w_k - q_k) / U_kk * U_kj  for every j > k

Frantar et al. 2023, with columns taken in the order they come: Atom's order, outliers last, makes
the error flow towards the channels that keep 8 bits. Scales of a group are fitted when its first
column is reached, to the weights as corrected so far.

Knows no model. N = out_features, K = in_features, B = columns of a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from llmpq.kernels.formats.atom_rounding import (
    Codes,
    fit_weight,
    normal_channels,
    round_outliers,
    weight_grid,
    weight_units,
)
from llmpq.kernels.formats.atom_scheme import AtomScheme
from llmpq.kernels.weights.round_to_nearest import quantize_codes
from llmpq.precision import WeightScheme, padded_k

BLOCK = 128
DAMPING = 0.01


class Rounding(Protocol):
    """How a group of columns is rounded."""

    @property
    def group_size(self) -> int | None:
        """Columns that share a scale; None: all of them."""

    def fit(self, w_NB: Tensor) -> tuple[Tensor, Tensor]:
        """Return scale and zero [N, 1] of a group."""

    @property
    def limits(self) -> tuple[float, float] | None:
        """Least and largest code where codes are whole numbers, else None."""

    def codes(self, w_N1: Tensor, scale_N1: Tensor, zero_N1: Tensor) -> Tensor:
        """Return the codes of columns, as floats."""


@dataclass(frozen=True)
class AtomRounding:
    """The normal channels of an Atom scheme: symmetric, zero at code 0."""

    scheme: AtomScheme
    scale_dtype: torch.dtype
    unit_N1: Tensor | None = None
    """What scales are whole multiples of, if anything."""

    @property
    def group_size(self) -> int | None:
        """Columns that share a scale."""
        return self.scheme.group_size

    def fit(self, w_NB: Tensor) -> tuple[Tensor, Tensor]:
        """Return scale and zero [N, 1]."""
        scale_N1 = fit_weight(w_NB, self.scheme, self.scale_dtype, self.unit_N1)
        return scale_N1, torch.zeros_like(scale_N1)

    @property
    def limits(self) -> tuple[float, float] | None:
        """Least and largest code; 4-bit floats have no such range."""
        half = 2.0 ** (self.scheme.weight_bits - 1)
        return (-half, half - 1) if self.scheme.number == "int" else None

    def codes(self, w_N1: Tensor, scale_N1: Tensor, zero_N1: Tensor) -> Tensor:
        """Return the signed codes."""
        return weight_grid(self.scheme).round(w_N1, scale_N1)


@dataclass(frozen=True)
class WeightRounding:
    """The runtime's own weight-only grids: codes 0 .. 2^b - 1 and a zero, clip search included."""

    scheme: WeightScheme
    scale_dtype: torch.dtype

    @property
    def group_size(self) -> int | None:
        """Columns that share a scale."""
        return self.scheme.group_size

    def fit(self, w_NB: Tensor) -> tuple[Tensor, Tensor]:
        """Return scale and zero [N, 1]."""
        whole = WeightScheme(
            bits=self.scheme.bits,
            group_size=None,
            symmetric=self.scheme.symmetric,
            clip_search=self.scheme.clip_search,
        )
        _, scale_N1, zero_N1 = quantize_codes(w_NB, whole, scale_dtype=self.scale_dtype)
        if zero_N1 is None:
            zero_N1 = torch.full_like(scale_N1, 2 ** (self.scheme.bits - 1))
        return scale_N1.float(), zero_N1.float()

    @property
    def limits(self) -> tuple[float, float] | None:
        """Least and largest code."""
        return 0.0, 2.0**self.scheme.bits - 1

    def codes(self, w_N1: Tensor, scale_N1: Tensor, zero_N1: Tensor) -> Tensor:
        """Return the unsigned codes."""
        return (w_N1 / scale_N1).round_().add_(zero_N1).clamp_(0, 2**self.scheme.bits - 1)


@dataclass(frozen=True, kw_only=True)
class Rounded:
    """What GPTQ leaves: codes [N, K] as floats, scales and zeros [N, G], the rest corrected."""

    codes: Tensor
    scale: Tensor
    zero: Tensor
    rest: Tensor
    """Columns behind the rounded ones, with all errors pushed onto them, [N, K - columns]."""


def gptq_atom(
    w_NK: Tensor, h_KK: Tensor, scheme: AtomScheme, *, scale_dtype: torch.dtype, damping: float
) -> Codes:
    """Round a reordered weight by a reordered Hessian; outliers are rounded last, to nearest."""
    normal = scheme.normal_features(w_NK.shape[1])
    columns = padded_k(normal)
    w_NK = torch.cat((normal_channels(w_NK, scheme), w_NK[:, normal:].float()), dim=1)
    h_KK = _normal_hessian(h_KK, scheme)
    rounding = AtomRounding(
        scheme, scale_dtype, weight_units(w_NK[:, :columns], scheme, scale_dtype)
    )
    found = gptq(w_NK, h_KK, rounding, columns=columns, damping=damping)
    outliers, outlier_scale = found.rest, None
    if scheme.outlier_bits == 8:
        outliers, outlier_scale = round_outliers(found.rest, scale_dtype)
    return Codes(
        rotated=scheme.rotation,
        in_features=normal + scheme.outliers,
        codes=found.codes.to(torch.int8),
        scale=found.scale.to(scale_dtype),
        outliers=outliers,
        outlier_scale=outlier_scale,
    )


def _normal_hessian(h_KK: Tensor, scheme: AtomScheme) -> Tensor:
    """Return the Hessian of padded, and if so asked rotated, normal channels and the outliers."""

    def rows(h: Tensor) -> Tensor:
        wide = normal_channels(h, scheme)
        return torch.cat((wide, h[:, scheme.normal_features(h.shape[1]) :].float()), dim=1)

    return rows(rows(h_KK).t().contiguous())


def gptq_codes(
    w_NK: Tensor, h_KK: Tensor, scheme: WeightScheme, *, scale_dtype: torch.dtype, damping: float
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return what `quantize_codes` does: codes uint8 [N, Kp], scales, zeros unless symmetric."""
    k = w_NK.shape[1]
    padding = padded_k(k) - k
    w_NK, h_KK = functional.pad(w_NK, (0, padding)), functional.pad(h_KK, (0, padding, 0, padding))
    rounding = WeightRounding(scheme, scale_dtype)
    found = gptq(w_NK, h_KK, rounding, columns=k + padding, damping=damping)
    zero = None if scheme.symmetric else found.zero.to(scale_dtype)
    return found.codes.to(torch.uint8), found.scale.to(scale_dtype), zero


def gptq(
    w_NK: Tensor, h_KK: Tensor, rounding: Rounding, *, columns: int, damping: float = DAMPING
) -> Rounded:
    """Round the first `columns` columns of w by the Hessian of its input; w is left as it was."""
    w = w_NK.float().clone()
    dead_K = h_KK.diagonal() == 0
    w[:, dead_K] = 0
    factor_KK = inverse_factor(h_KK, damping)
    codes = torch.empty(w.shape[0], columns, device=w.device)
    scales, zeros = [], []
    scale, zero = rounding.fit(w[:, :columns])
    group = rounding.group_size
    if group is None:
        scales, zeros = [scale], [zero]
    for start in range(0, columns, BLOCK):
        stop = min(columns, start + BLOCK)
        block_NB, u_BB = w[:, start:stop], factor_KK[start:stop, start:stop]
        errors_NB = torch.empty_like(block_NB)
        for at in range(0, stop - start, min(group or BLOCK, BLOCK)):
            end = min(stop - start, at + min(group or BLOCK, BLOCK))
            if group is not None and (start + at) % group == 0:
                scale, zero = rounding.fit(block_NB[:, at : at + group])
                scales.append(scale)
                zeros.append(zero)
            codes[:, start + at : start + end], errors_NB[:, at:end] = _round_columns(
                block_NB[:, at:end], u_BB[at:end, at:end], scale, zero, rounding
            )
            block_NB[:, end:] -= errors_NB[:, at:end] @ u_BB[at:end, end:]
        w[:, stop:] -= errors_NB @ factor_KK[start:stop, stop:]
    return Rounded(
        codes=codes, scale=torch.cat(scales, 1), zero=torch.cat(zeros, 1), rest=w[:, columns:]
    )


def _round_columns(
    w_NB: Tensor, u_BB: Tensor, scale_N1: Tensor, zero_N1: Tensor, rounding: Rounding
) -> tuple[Tensor, Tensor]:
    """Return codes and errors of columns that share a scale; each is corrected by those before."""
    if w_NB.is_cuda and rounding.limits and w_NB.shape[1].bit_count() == 1:
        # Triton is imported where a GPU runs it.
        from llmpq.kernels.fused.gptq_block import round_block

        return round_block(w_NB, u_BB, scale_N1, zero_N1, rounding.limits)
    w_NB = w_NB.clone()
    codes_NB, errors_NB = torch.empty_like(w_NB), torch.empty_like(w_NB)
    for at in range(w_NB.shape[1]):
        w_N1 = w_NB[:, at : at + 1]
        code_N1 = rounding.codes(w_N1, scale_N1, zero_N1)
        error_N1 = (w_N1 - (code_N1 - zero_N1) * scale_N1) / u_BB[at, at]
        w_NB[:, at + 1 :] -= error_N1 * u_BB[at, at + 1 :]
        codes_NB[:, at], errors_NB[:, at] = code_N1[:, 0], error_N1[:, 0]
    return codes_NB, errors_NB


def inverse_factor(h_KK: Tensor, damping: float) -> Tensor:
    """Return U, upper triangular, U^T U = (H + damping * mean(diag H) I)^-1, in float32.

    A channel that was never active gets a diagonal of one. Damping grows tenfold until H can be
    factored: one long-tailed channel can make it singular in float32.
    """
    h_KK = h_KK.float()
    diagonal_K = h_KK.diagonal()
    mean = float(diagonal_K.mean())
    if not mean > 0:
        raise ValueError("the calibration inputs of a layer are all zero; give other text")
    dead_K = (diagonal_K == 0).float()
    for attempt in range(5):
        damped = h_KK.clone()
        damped.diagonal().add_(dead_K + damping * 10**attempt * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not int(failed):
            del damped
            inverse = torch.cholesky_inverse(lower)
            del lower
            upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
            if not int(failed):
                return upper
    raise ValueError(
        f"the Hessian of a layer with {h_KK.shape[0]} inputs cannot be factored even with damping "
        f"{damping * 10**4}; its calibration inputs hold infinities, or give more text"
    )
