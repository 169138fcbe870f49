"""Plain-torch twins of the kernels in kernels/fused/."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from llmpq.kernels.atom.reference import rounded
from llmpq.kernels.formats.atom_scheme import AtomScheme
from llmpq.kernels.fused.norm_behind import Following
from llmpq.kernels.fused.weighted_sum import Shared


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The twin: float32 arithmetic, one rounding."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)


def layer_norm_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    *,
    before: Tensor | None = None,
    after: Tensor | None = None,
) -> Tensor:
    """The twin: float32 arithmetic, one rounding of each result."""
    total = x.float() if before is None else x.float() + before.float()
    out = functional.layer_norm(total, (x.shape[-1],), weight.float(), bias.float(), eps)
    if before is not None or after is not None:
        x.copy_(total if after is None else total + after.float())
    return out.to(x.dtype)


def norm_behind_reference(
    a: Tensor, x: Tensor, weight: Tensor, eps: float, following: Following | None = None
) -> tuple[Tensor, Tensor]:
    """The twin, not in place: three passes, each rounded."""
    y = x + rms_norm_reference(a, weight, eps)
    return y, y if following is None else rms_norm_reference(y, *following)


def head_norm_reference(
    qkv_TNd: Tensor, q_weight: Tensor, k_weight: Tensor, heads: int, eps: float
) -> Tensor:
    """The twin, not in place: float32 arithmetic, one rounding."""
    groups = (qkv_TNd.shape[1] - heads) // 2
    wide = qkv_TNd[:, : heads + groups].float()
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    normed[:, :heads] *= q_weight.float()
    normed[:, heads:] *= k_weight.float()
    return torch.cat((normed.to(qkv_TNd.dtype), qkv_TNd[:, heads + groups :]), dim=1)


def gate_mul_reference(
    gate_up: Tensor, activation: str = "silu", *, limit: float = 0.0, slope: float = 1.0
) -> Tensor:
    """The twin: float32 arithmetic, one rounding."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    if activation == "clamped_silu":
        gate = gate.clamp(max=limit)
        product = gate * torch.sigmoid(slope * gate) * (up.clamp(-limit, limit) + 1)
    elif activation == "gelu_tanh":
        product = functional.gelu(gate, approximate="tanh") * up
    else:
        product = functional.silu(gate) * up
    return product.to(gate_up.dtype)


def weighted_sum_reference(
    weight_Tk: Tensor, made_Ch: Tensor, x_Th: Tensor | None = None, *, shared: Shared | None = None
) -> Tensor:
    """The twin: float32 sums, one rounding."""
    total_Th = (weight_Tk.float()[:, :, None] * made_Ch.float().view(*weight_Tk.shape, -1)).sum(1)
    if shared is not None:
        own_Th = shared.made_Th.float()
        if shared.given_Th is not None and shared.gate_1h is not None:
            own_Th = own_Th * (shared.given_Th.float() @ shared.gate_1h.float().t()).sigmoid()
        total_Th = total_Th + own_Th
    return (total_Th if x_Th is None else x_Th.float() + total_Th).to(made_Ch.dtype)


def rope_append_pages_reference(
    q_TND: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    places_T: Tensor,
    positions_T: Tensor,
    inv_freq: Tensor | None,
    factor: float = 1.0,
    *,
    keep: bool = False,
) -> Tensor:
    """The twin of `rope_append_pages`, in plain torch."""
    q, k, page = q_TND, k_TGD, k_pool.shape[2]
    if inv_freq is not None:
        rotated = rope_reference(q[:, None], k[:, None], positions_T, inv_freq, factor)
        q, k = (x[:, 0] for x in rotated)
    live = places_T >= 0
    blocks, tokens = places_T[live] // page, places_T[live] % page
    k_pool[blocks, :, tokens] = k[live]
    v_pool[blocks, :, tokens] = v_TGD[live]
    if keep:
        k_TGD[live] = k[live]
    return q


def rope_reference(
    q_BQHD: Tensor, k_BQGD: Tensor, start_B: Tensor, inv_freq: Tensor, factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The twin of `rope`: float32 arithmetic, one rounding."""
    positions_BQ = start_B[:, None] + torch.arange(q_BQHD.shape[1], device=start_B.device)
    angle = (positions_BQ[:, :, None].float() * inv_freq.unsqueeze(-2))[:, :, None]
    cos, sin = angle.cos() * factor, angle.sin() * factor
    rotated = 2 * inv_freq.shape[-1]

    def rotate(x: Tensor) -> Tensor:
        a, b = x[..., :rotated].float().chunk(2, dim=-1)
        made = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
        return torch.cat((made, x[..., rotated:]), dim=-1)

    return rotate(q_BQHD), rotate(k_BQGD)


def round_restore_reference(x: Tensor, scheme: AtomScheme) -> Tensor:
    """The twin."""
    return rounded(x.reshape(-1, x.shape[-1]), scheme).view(x.shape)


def round_block_reference(
    w_NB: Tensor, u_BB: Tensor, scale_N1: Tensor, zero_N1: Tensor, limits: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """The twin: a column at a time."""
    w = w_NB.clone()
    codes, errors = torch.zeros_like(w), torch.zeros_like(w)
    for k in range(w.shape[1]):
        w_N1 = w[:, k : k + 1]
        code_N1 = (w_N1 / scale_N1).round_().add_(zero_N1).clamp_(*limits)
        error_N1 = (w_N1 - (code_N1 - zero_N1) * scale_N1) / u_BB[k, k]
        w[:, k + 1 :] -= error_N1 * u_BB[k, k + 1 :]
        codes[:, k], errors[:, k] = code_N1[:, 0], error_N1[:, 0]
    return codes, errors


def argmax_reference(x_BV: Tensor) -> Tensor:
    """The twin."""
    return x_BV.argmax(dim=-1)


def sample_rows_reference(logits_BV: Tensor, how_4B: Tensor) -> Tensor:
    """The twin, in float64 and by sorting."""
    chosen = []
    for logits_V, (temperature, k, p, number) in zip(logits_BV, how_4B.T.tolist(), strict=True):
        sorted_V, order = logits_V.double().sort(descending=True, stable=True)
        weight = torch.exp((sorted_V - sorted_V[0]) / temperature)
        weight[int(k) :] = 0
        if p < 1:
            kept = weight.cumsum(0) - weight < p * weight.sum()
            kept[0] = True
            weight *= kept
        weight = torch.zeros_like(weight).scatter_(0, order, weight)
        up_to = weight.cumsum(0)
        passed = int((up_to <= number * up_to[-1]).sum())
        chosen.append(min(passed, int(weight.nonzero()[-1])))
    return torch.tensor(chosen)
