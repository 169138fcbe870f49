"""Atom's rounding in plain torch: weights and activations to codes and scales, and back.

    code = clamp(round(x / scale), -2^(b-1), 2^(b-1) - 1)        int
    code = nearest of 0 1 2 3 4 6 8 12 to x / scale, signed      e2m1: codes are twice the number

Every function works along the last dimension K, whose last `outliers` channels are the outliers.
Knows nothing of packing. N = out_features, M = tokens, G = groups of a row, Kp = K padded.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from llmpq.kernels.formats.atom_scheme import AtomScheme, Number
from llmpq.precision import K_PADDING, padded_k

OUTLIER_LEVELS = 127
STEPS = 15
"""The largest integer scale: times a code of -8, it is still an int8 number."""
LEAST_UNIT = float(torch.finfo(torch.float32).tiny)
"""Of a row or token of zeros: nothing is divided by 0."""

_CLIPS = tuple(1 - 0.025 * step for step in range(21))
_ROWS_AT_ONCE = 1 << 18
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, kw_only=True)
class Codes:
    """Rounded rows [R, K]: normal channels padded to a multiple of 128, then the outliers."""

    rotated: bool
    in_features: int
    codes: Tensor
    """int8 [R, Kp]."""
    scale: Tensor
    """[R, G] (G = 1 without groups)."""
    outliers: Tensor
    """int8 [R, outliers], or the unrounded values when outliers keep 16 bits."""
    outlier_scale: Tensor | None
    """[R], absent when outliers keep 16 bits."""


@dataclass(frozen=True)
class Grid:
    """The representable values of one operand: bits, number kind and where max|x| lies."""

    bits: int
    number: Number
    largest: float
    """The code of max|x| before clipping; negative: the scale takes a sign so that it fits."""

    def fit(
        self, x_RG: Tensor, clip: float, scale_dtype: torch.dtype, unit_R1: Tensor | None = None
    ) -> Tensor:
        """Return the scale [R, 1] of each row, as it will be stored; whole units if any."""
        if self.largest < 0:
            low, high = x_RG.aminmax(dim=-1, keepdim=True)
            top = torch.where(high >= -low, high, low)
        else:
            top = x_RG.abs().amax(dim=-1, keepdim=True)
        scale = (top.float() * (clip / self.largest)).to(scale_dtype).float()
        # A row of zeros, or one whose scale underflows, gets the least usable scale.
        least = float(torch.finfo(scale_dtype).tiny)
        scale = torch.where(scale.abs() < least, least, scale)
        if unit_R1 is None:
            return scale
        return (_steps(scale, unit_R1) * unit_R1).to(scale_dtype).float()

    def search(
        self, x_RG: Tensor, scale_dtype: torch.dtype, unit_R1: Tensor | None = None
    ) -> Tensor:
        """Return the scale [R, 1] whose clip has the least squared error."""
        best = self.fit(x_RG, 1.0, scale_dtype, unit_R1)
        least = torch.full_like(best, float("inf"))
        for clip in _CLIPS:
            scale = self.fit(x_RG, clip, scale_dtype, unit_R1)
            error = self.round(x_RG, scale).mul_(scale).sub_(x_RG).square_().sum(-1, keepdim=True)
            best = torch.where(error < least, scale, best)
            least = torch.minimum(error, least)
        return best

    def round(self, x: Tensor, scale: Tensor) -> Tensor:
        """Return codes as floats."""
        if self.number == "e2m1":
            return _nearest_e2m1(torch.div(x, scale))
        low = -(2 ** (self.bits - 1))
        return torch.div(x, scale).round_().clamp_(low, -low - 1)


def weight_grid(scheme: AtomScheme) -> Grid:
    """Return the grid of the weights' normal channels."""
    return _grid(scheme, scheme.weight_bits, (2**scheme.weight_bits - 1) / 2)


def activation_grid(scheme: AtomScheme) -> Grid:
    """Return the grid of the activations' normal channels."""
    return _grid(scheme, scheme.activation_bits, 2.0 ** (scheme.activation_bits - 1) - 1)


def _grid(scheme: AtomScheme, bits: int, largest: float) -> Grid:
    if scheme.number == "e2m1":
        return Grid(bits, scheme.number, 12.0)
    return Grid(bits, scheme.number, -(2.0 ** (bits - 1)) if scheme.signed_scale else largest)


def fit_weight(
    w_RG: Tensor, scheme: AtomScheme, scale_dtype: torch.dtype, unit_R1: Tensor | None = None
) -> Tensor:
    """Return the scale [R, 1] of one group of weights of each row, in whole units if any."""
    grid = weight_grid(scheme)
    if scheme.weight_clip is None:
        return grid.search(w_RG, scale_dtype, unit_R1)
    return grid.fit(w_RG, scheme.weight_clip, scale_dtype, unit_R1)


def weight_units(w_NK: Tensor, scheme: AtomScheme, scale_dtype: torch.dtype) -> Tensor | None:
    """Return the unit [N, 1] of a row's scales, from its padded normal channels; None if any go."""
    if not scheme.integer_scales:
        return None
    assert scheme.group_size is not None
    scale_R1 = _fit_groups(w_NK.reshape(-1, scheme.group_size), scheme, scale_dtype)
    return integer_scales(scale_R1.view(w_NK.shape[0], -1))[1]


def integer_scales(scale_RG: Tensor) -> tuple[Tensor, Tensor]:
    """Return integers [R, G], 0 to STEPS in size, and units [R, 1]: nearest to the scales.

    Of activations: a group below half a unit is left out, since its codes would be multiplied.
    """
    scale_RG = scale_RG.float()
    # A product, as in the kernel: on a GPU torch divides by a number in one way, Triton in another,
    # and maxima of 16-bit inputs do lie half way between two steps (one group in some hundred).
    unit_R1 = scale_RG.abs().amax(dim=1, keepdim=True) * (1 / STEPS)
    unit_R1 = unit_R1.clamp_(min=LEAST_UNIT)
    return _steps(scale_RG, unit_R1, least=0), unit_R1


def stored_integers(scale_NG: Tensor) -> tuple[Tensor, Tensor]:
    """Return the integers and the units of a weight's scales, as they were before rounding.

    GPTQ may leave a row without a scale of STEPS units: the unit is that of the best fit.
    """
    scale_NG = scale_NG.float()
    top_N1 = scale_NG.abs().amax(dim=1, keepdim=True)
    unit_N1 = (top_N1 * (1 / STEPS)).clamp_(min=LEAST_UNIT)
    steps_NG = _steps(scale_NG, unit_N1)
    least_N1 = (steps_NG * unit_N1 - scale_NG).square().sum(1, keepdim=True)
    for largest in range(STEPS - 1, 0, -1):
        unit = (top_N1 / largest).clamp_(min=LEAST_UNIT)
        steps = _steps(scale_NG, unit)
        error = (steps * unit - scale_NG).square().sum(1, keepdim=True)
        better = error < least_N1
        steps_NG = torch.where(better, steps, steps_NG)
        unit_N1 = torch.where(better, unit, unit_N1)
        least_N1 = torch.minimum(error, least_N1)
    return steps_NG, unit_N1


def _steps(scale: Tensor, unit: Tensor, least: int = 1) -> Tensor:
    return (scale.abs() / unit).round_().clamp_(least, STEPS).copysign_(scale)


def _fit_groups(
    w_RG: Tensor, scheme: AtomScheme, scale_dtype: torch.dtype, unit_R1: Tensor | None = None
) -> Tensor:
    """As `fit_weight`, some rows at a time."""
    rows = w_RG.split(_ROWS_AT_ONCE)
    units = [None] * len(rows) if unit_R1 is None else unit_R1.split(_ROWS_AT_ONCE)
    both = zip(rows, units, strict=True)
    return torch.cat([fit_weight(w, scheme, scale_dtype, unit) for w, unit in both])


def round_weight(w_NK: Tensor, scheme: AtomScheme, *, scale_dtype: torch.dtype) -> Codes:
    """Round a reordered weight [N, K] to nearest."""
    groups_RG = _groups(w_NK, scheme)
    unit_R1 = weight_units(groups_RG.view(w_NK.shape[0], -1), scheme, scale_dtype)
    if unit_R1 is not None:
        unit_R1 = unit_R1.repeat_interleave(groups_RG.shape[0] // w_NK.shape[0], dim=0)
    scale = _fit_groups(groups_RG, scheme, scale_dtype, unit_R1)
    codes = weight_grid(scheme).round(groups_RG, scale)
    return _assemble(codes, scale, w_NK, scheme, scale_dtype)


def round_activations(x_MK: Tensor, scheme: AtomScheme) -> Codes:
    """Round reordered activations [M, K] dynamically; the scales are float32."""
    if scheme.activation_bits == 16:
        raise ValueError("activations of 16 bits are not rounded; choose 3, 4 or 8 bits")
    grid = activation_grid(scheme)
    groups_RG = _groups(x_MK, scheme)
    if scheme.activation_rule == "compressed":
        codes, scale = _compressed(groups_RG, x_MK.dtype)
        return _assemble(codes, scale, x_MK, scheme, torch.float32)
    scale = grid.fit(groups_RG, scheme.activation_clip, torch.float32)
    codes = grid.round(groups_RG, scale)
    if scheme.takes_integers(x_MK.shape[0]):
        steps, unit = integer_scales(scale.view(x_MK.shape[0], -1))
        scale = steps * unit
    return _assemble(codes, scale, x_MK, scheme, torch.float32)


def _compressed(x_MK: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return int8 codes and scales [M, 1] as compressed-tensors defines them for inputs of `dtype`.

    Of float32 values that are exact in `dtype`: each quotient is rounded to it, as torch does.
    """
    scale_M1 = (x_MK.abs().amax(dim=1, keepdim=True) / 127.5).to(dtype)
    scale_M1 = torch.where(scale_M1 == 0, torch.finfo(dtype).eps, scale_M1).float()
    return (x_MK / scale_M1).to(dtype).float().round_().clamp_(-128, 127), scale_M1


def restore(codes: Codes) -> Tensor:
    """Return the float32 values [R, K] that codes stand for."""
    rows, groups = codes.scale.shape
    wide = codes.codes.float().view(rows, groups, -1).mul_(codes.scale.float()[:, :, None])
    normal = wide.view(rows, -1)
    if codes.rotated:
        normal = rotate(normal)
    normal = normal[:, : codes.in_features - codes.outliers.shape[1]]
    outliers = codes.outliers.float()
    if codes.outlier_scale is not None:
        outliers = outliers * codes.outlier_scale.float()[:, None]
    return torch.cat((normal, outliers), dim=1)


def round_outliers(x_RO: Tensor, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return int8 codes [R, O] and scales [R] of outlier channels: symmetric, one scale a row."""
    if x_RO.shape[1] == 0:
        empty = torch.empty(x_RO.shape, dtype=torch.int8, device=x_RO.device)
        return empty, torch.ones(x_RO.shape[0], dtype=scale_dtype, device=x_RO.device)
    scale = x_RO.float().abs().amax(dim=1) / OUTLIER_LEVELS
    scale = scale.to(scale_dtype).float().clamp_(min=float(torch.finfo(scale_dtype).tiny))
    codes = (x_RO.float() / scale[:, None]).round_().clamp_(-128, 127)
    return codes.to(torch.int8), scale.to(scale_dtype)


def _groups(x_RK: Tensor, scheme: AtomScheme) -> Tensor:
    """Return the normal channels cut into groups, [R * G, group]."""
    padded = normal_channels(x_RK, scheme)
    return padded.reshape(-1, scheme.group_size or padded.shape[1])


def normal_channels(x_RK: Tensor, scheme: AtomScheme) -> Tensor:
    """Return the channels that are rounded to few bits, [R, Kp] in float32, rotated if so asked."""
    normal = scheme.normal_features(x_RK.shape[1])
    padded = functional.pad(x_RK[:, :normal].float(), (0, padded_k(normal) - normal))
    return rotate(padded) if scheme.rotation else padded


def rotate(x_RK: Tensor) -> Tensor:
    """Multiply every 128 channels by the Hadamard matrix / sqrt(128), which is its own inverse."""
    # Signs first: sums of 16-bit values are then exact but for the last bits of a float32.
    signs = hadamard(x_RK.device).sign()
    rotated = (x_RK.view(x_RK.shape[0], -1, K_PADDING) @ signs) * K_PADDING**-0.5
    return rotated.view_as(x_RK)


@functools.cache
def hadamard(device: torch.device) -> Tensor:
    """Return Sylvester's Hadamard matrix [128, 128] over sqrt(128): symmetric, orthogonal."""
    h = torch.ones(1, 1)
    while h.shape[0] < K_PADDING:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    return (h / K_PADDING**0.5).to(device)


def _assemble(
    codes_RG: Tensor, scale: Tensor, x_RK: Tensor, scheme: AtomScheme, dtype: torch.dtype
) -> Codes:
    rows, in_features = x_RK.shape
    rest_RO = x_RK[:, scheme.normal_features(in_features) :]
    outliers: Tensor = rest_RO
    outlier_scale = None
    if scheme.outlier_bits == 8:
        outliers, outlier_scale = round_outliers(rest_RO, dtype)
    return Codes(
        rotated=scheme.rotation,
        in_features=in_features,
        codes=codes_RG.to(torch.int8).view(rows, -1),
        scale=scale.to(dtype).view(rows, -1),
        outliers=outliers,
        outlier_scale=outlier_scale,
    )


def _nearest_e2m1(x: Tensor) -> Tensor:
    """Return twice the e2m1 value nearest to x / 2."""
    doubled = torch.tensor(_E2M1, device=x.device) * 2
    edges = (doubled[1:] + doubled[:-1]) / 2
    return doubled[torch.bucketize(x.abs(), edges)].copysign_(x)
