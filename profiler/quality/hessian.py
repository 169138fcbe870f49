"""The Hessian indicator the paper compares with: top eigenvalue times squared weight error.

    omega[i, b] = sum_o lambda_max(H_o) |Q(W_o) - W_o|^2,  H_o = 2 X^T X / T

H is that of the operator's squared output error per token; Q is the quantiser the runtime uses,
clip search included. K = in_features, T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmpq.kernels.weights.round_to_nearest import quantize_codes
from llmpq.precision import WeightScheme

POWER_STEPS = 100


class HessianSum:
    """H of one operator, summed over batches in float32 [K, K]."""

    def __init__(self, in_features: int, device: torch.device | str = "cpu") -> None:
        self._sum_KK = torch.zeros(in_features, in_features, device=device)
        self.tokens = 0

    def add(self, x: Tensor) -> None:
        """Add the tokens of x [..., K]."""
        x_TK = x.detach().reshape(-1, x.shape[-1]).float()
        self._sum_KK.addmm_(x_TK.t(), x_TK)
        self.tokens += x_TK.shape[0]

    def top_eigenvalue(self) -> float:
        """Return lambda_max by power iteration from a seeded start."""
        h_KK = self._sum_KK * (2 / self.tokens)
        generator = torch.Generator().manual_seed(0)
        x_K = torch.randn(h_KK.shape[0], generator=generator).to(h_KK.device)
        value = 0.0
        for _ in range(POWER_STEPS):
            y_K = h_KK @ (x_K / x_K.norm())
            new = float(y_K.norm())
            if new == 0 or abs(new - value) < 1e-6 * new:
                return new
            x_K, value = y_K, new
        return value

    def mean_eigenvalue(self) -> float:
        """Return trace(H) / K: what an error in a random direction costs."""
        return float(self._sum_KK.diagonal().double().mean()) * 2 / self.tokens


def squared_error(w_NK: Tensor, scheme: WeightScheme) -> float:
    """Return |Q(W) - W|^2 of the runtime's quantiser."""
    codes, scale, zero = quantize_codes(w_NK, scheme, scale_dtype=torch.float32)
    n, groups = scale.shape
    w_NGK = codes.view(n, groups, -1).float()
    w_NGK -= 2 ** (scheme.bits - 1) if zero is None else zero[:, :, None]
    w_NGK *= scale[:, :, None]
    restored = w_NGK.view(n, -1)[:, : w_NK.shape[1]]
    return float((restored - w_NK.float()).double().square().sum())
