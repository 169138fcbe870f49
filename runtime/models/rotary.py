"""Rotary positions: cos and sin of a step's positions, made once per step, and the rotation itself.

    channel i of the first half and of the second, angle a = position * frequency[i]
        (x, y) -> (x cos a - y sin a, y cos a + x sin a)

A scaling changes the frequencies (linear, llama3: Meta's; yarn: Peng et al. 2023; longrope: Ding et
al. 2024). Dynamic rotates a step's tokens by the length that the request has with the step, and
cached keys stay as they were rotated, as in Transformers. So does longrope unless a run has decided
for one of its two sets (`RopeScaling.at_length`); no request may then cross from one to the other.

Legend: B rows, Q new tokens, N heads, D channels that are rotated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from llmpq.families.common.spec_values import RopeScaling
from llmpq.kernels.cpu import row_wise
from llmpq.runtime.steps.step import Step


@dataclass(frozen=True, eq=False)
class StepRotation:
    """Rotary positions that a cache is to give a step's queries and keys."""

    inv_freq: Tensor
    """[D / 2], or [T, D / 2] where a request's length decides."""
    factor: float
    """On cosines and sines."""


class Rotary:
    """Rotary positions of one kind of layer."""

    def __init__(
        self,
        dim: int,
        theta: float,
        scaling: RopeScaling | None,
        device: torch.device,
        *,
        name: str = "",
    ) -> None:
        """`dim`: channels of a head that are rotated; `name`: apart from others of the model."""
        _choose_cos_and_sin()
        self.dim = dim
        self._theta = theta
        self._scaling = scaling
        self._name = name
        self.factor = 1.0 if scaling is None else scaling.attention_factor
        self.inv_freq = scaled_frequencies(dim, theta, scaling).to(device)

    @property
    def by_length(self) -> bool:
        """Whether a request's length decides the frequencies; else `inv_freq` holds them all."""
        return self._scaling is not None and self._scaling.by_length

    @property
    def is_dynamic(self) -> bool:
        """Whether a step's frequencies can be made where its lengths are: `step_frequencies`."""
        return self._scaling is not None and self._scaling.kind == "dynamic"

    def step_frequencies(self, step: Step) -> Tensor:
        """Return the frequencies [D / 2], or of every row [B, D / 2], or of every place [T, D / 2].

        Made of the lengths on the device, so that a captured step serves rows of any.
        """
        if not self.is_dynamic:
            return self.inv_freq
        return step.once(f"frequencies{self._name}", lambda: self._by_device(step.ends))

    def rotation_of(self, step: Step) -> StepRotation:
        """Return what kernels that append a step's keys rotate them by."""
        return StepRotation(self.step_frequencies(step), self.factor)

    def _by_device(self, length_R: Tensor) -> Tensor:
        scaling, dim = self._scaling, self.dim
        assert scaling is not None
        longest = float(scaling.original_max_positions)
        beyond_R = length_R.double().clamp(min=longest) / longest
        stretched_R = scaling.factor * beyond_R - (scaling.factor - 1)
        channel = torch.arange(0, dim, 2, dtype=torch.float64, device=length_R.device)
        slower_RD = stretched_R[:, None] ** (channel / (2 - dim))
        return (self._theta ** (-channel / dim) * slower_RD).float()

    def is_plain(self, head_dim: int) -> bool:
        """Whether `inv_freq` says all: whole heads, cosines as they are, one set of frequencies."""
        return self.dim == head_dim and self.factor == 1.0 and not self.by_length

    def rotate(self, x_BQND: Tensor, step: Step) -> Tensor:
        """Return queries or keys [B, Q, N heads, channels] rotated to their positions."""
        cos, sin = self.angles(step, x_BQND)
        if row_wise.can_rotate(x_BQND, cos):
            return row_wise.rotate(x_BQND, cos, sin)
        out = torch.empty(x_BQND.shape, dtype=x_BQND.dtype, device=x_BQND.device)
        if self.dim < x_BQND.shape[-1]:
            out[..., self.dim :] = x_BQND[..., self.dim :]
        first, second = x_BQND[..., : self.dim].chunk(2, dim=-1)
        low, high = out[..., : self.dim].chunk(2, dim=-1)
        torch.mul(first, cos, out=low).addcmul_(second, sin, value=-1)
        torch.mul(second, cos, out=high).addcmul_(first, sin)
        return out

    def angles(self, step: Step, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosine and sine of the step's positions [B or 1, Q, 1, D / 2] in a dtype."""
        cos, sin = f"cos{self._name}", f"sin{self._name}"
        if cos not in step.memo:
            angle = (step.positions_BQ[:, :, None].float() * self._frequencies(step))[:, :, None]
            for key, rotated in ((cos, angle.cos()), (sin, angle.sin_())):
                scaled = rotated if self.factor == 1.0 else rotated.mul_(self.factor)
                step.memo[key] = scaled.to(like.dtype)
        return step.memo[cos], step.memo[sin]

    def _frequencies(self, step: Step) -> Tensor:
        """Return [D/2], or [B, Q, D/2] where a request's length decides, Q 1 if alike."""
        if self._scaling is None or not self._scaling.by_length:
            return self.inv_freq
        if self.is_dynamic and step.start_B.is_cuda:
            made = self.step_frequencies(step)
            return made[None] if step.ends_by_place else made[:, None]
        longest = self._scaling.original_max_positions
        if step.max_end <= longest:
            return self.inv_freq
        lengths_BQ = step.lengths_BQ
        found = [
            scaled_frequencies(self.dim, self._theta, self._scaling, length=length)
            for length in lengths_BQ.flatten().tolist()
        ]
        return torch.stack(found).view(*lengths_BQ.shape, -1).to(self.inv_freq.device)


def _choose_cos_and_sin() -> None:
    """Let MKL choose its cos and sin on one thread.

    It does so at a function's first call; threads that share that call can get different code, up
    to 4000 ulp apart, and a prompt other tokens than the next time (PyTorch issue 188792).
    """
    torch.zeros(1).cos_().sin_()


def scaled_frequencies(
    dim: int, theta: float, scaling: RopeScaling | None, *, length: int = 0
) -> Tensor:
    """Return the frequencies [dim / 2] of a request of `length` tokens."""
    exponent = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    if scaling is None:
        return 1.0 / (theta**exponent)
    if scaling.kind == "dynamic":
        beyond = max(length, scaling.original_max_positions) / scaling.original_max_positions
        stretched = scaling.factor * beyond - (scaling.factor - 1)
        return 1.0 / ((theta * stretched ** (dim / (dim - 2))) ** exponent)
    if scaling.kind == "longrope":
        is_long = length > scaling.original_max_positions
        factors = scaling.long_factors if is_long else scaling.short_factors
        return 1.0 / (torch.tensor(factors, dtype=torch.float32) * theta**exponent)
    inv_freq = 1.0 / (theta**exponent)
    if scaling.kind == "proportional":
        inv_freq[int(scaling.turned * dim // 2) :] = 0.0
        return inv_freq / scaling.factor
    if scaling.kind == "linear":
        return inv_freq / scaling.factor
    if scaling.kind == "yarn":
        kept = 1.0 - _yarn_ramp(dim, theta, scaling)
        return inv_freq / scaling.factor * (1 - kept) + inv_freq * kept
    turns = scaling.original_max_positions * inv_freq / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    if low == high:  # Llama 4 Scout: no wave is between
        return torch.where(turns < low, inv_freq / scaling.factor, inv_freq)
    ramp = ((turns - low) / (high - low)).clamp(0, 1)
    return inv_freq * (ramp + (1 - ramp) / scaling.factor)


def _yarn_ramp(dim: int, theta: float, scaling: RopeScaling) -> Tensor:
    """Return 0 for dimensions left alone, 1 for those slowed by the whole factor, [dim / 2]."""

    def dimension(turns: float) -> float:
        """Which dimension makes so many turns within the original length."""
        length = scaling.original_max_positions / (turns * 2 * math.pi)
        return dim * math.log(length) / (2 * math.log(theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low or 0.001
    return ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
