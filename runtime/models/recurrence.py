"""The arithmetic of recurrent layers in torch's operators: convolution, gated delta rule, Mamba-2.

Everything is float32 and exact from chunk to chunk: a prompt cut anywhere gives the same state.

    state      S_t = a_t S_(t-1) + k_t u_t^T          a_t = exp(log decay), one number per head,
    output     o_t = S_t^T q_t                        or one per head and channel of keys (KDA)
    Mamba-2    u_t = v_t                               q = C, k = B, v = dt x
    delta rule u_t = b_t (v_t - (a_t S_(t-1))^T k_t)   what the state already says is taken off

Over a chunk, with c_t the sum of log decays up to t and D_ts = exp(c_t - c_s) for s <= t:

    o = exp(c) q S + (D . q k^T) u;    S' = exp(c_T) S + sum_t exp(c_T - c_t) k_t u_t^T
    delta rule: (I + strictly lower (b D . k k^T)) u = b (v - exp(c) k S)

Where every channel n has its decay, D . k k^T stands for sum_n k_tn D_tsn k_sn.

Legend: B rows of one token, T tokens of one row, K taps, C channels, H heads, N key_dim,
P value_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmpq.sizes.state_size import PAIRED_BY_CHANNEL, PAIRED_TOKENS


def convolve(
    x_TC: Tensor, tail_KC: Tensor, weight_C1K: Tensor, bias_C: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return [T, C] of a causal convolution over each channel, and the new tail [K - 1, C]."""
    seen, count = torch.cat((tail_KC, x_TC)), len(x_TC)
    taps_KC = weight_C1K[:, 0].t().float()
    # Tap by tap: torch's own convolution of 16-bit channels by themselves takes 40 times as long.
    out = seen[:count] * taps_KC[0]
    for tap in range(1, len(taps_KC)):
        out.addcmul_(seen[tap : tap + count].float(), taps_KC[tap])
    out = out if bias_C is None else out.add_(bias_C.float())
    return out.to(x_TC.dtype), seen[count:]


def convolve_step(
    x_BC: Tensor, tail_BKC: Tensor, weight_C1K: Tensor, bias_C: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return [B, C] of rows of one token, and their new tails [B, K - 1, C]."""
    seen = torch.cat((tail_BKC, x_BC[:, None]), dim=1)
    out = (seen * weight_C1K[:, 0].t().float()).sum(dim=1)
    out = out if bias_C is None else out.add_(bias_C.float())
    return out.to(x_BC.dtype), seen[:, 1:]


def scan(
    q_THN: Tensor,
    k_THN: Tensor,
    v_THP: Tensor,
    log_decay_TH: Tensor,
    state_HNP: Tensor,
    beta_TH: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return o [T, H, P] of one row's tokens and the state behind them; `beta`: by delta rule.

    Log decays are [T, H], or [T, H, N] of channels of keys.
    """
    outs, by_channel = [], log_decay_TH.ndim > 2
    tokens = PAIRED_BY_CHANNEL if by_channel else PAIRED_TOKENS
    chunk = _chunk_by_channel if by_channel else _chunk
    for at in range(0, len(q_THN), tokens):
        part = slice(at, at + tokens)
        out, state_HNP = chunk(
            q_THN[part].transpose(0, 1),
            k_THN[part].transpose(0, 1),
            v_THP[part].transpose(0, 1),
            log_decay_TH[part].transpose(0, 1),
            state_HNP,
            None if beta_TH is None else beta_TH[part].t(),
        )
        outs.append(out.transpose(0, 1))
    return torch.cat(outs), state_HNP


def _chunk(
    q_HTN: Tensor,
    k_HTN: Tensor,
    v_HTP: Tensor,
    log_decay_HT: Tensor,
    state_HNP: Tensor,
    beta_HT: Tensor | None,
) -> tuple[Tensor, Tensor]:
    sums_HT = log_decay_HT.cumsum(dim=-1)
    pairs_HTT = (sums_HT[:, :, None] - sums_HT[:, None]).tril_()
    pairs_HTT = pairs_HTT.exp_().tril_()
    from_start = sums_HT.exp()[..., None]
    u_HTP = v_HTP
    if beta_HT is not None:
        system = torch.matmul(k_HTN, k_HTN.transpose(1, 2)).mul_(pairs_HTT)
        system.mul_(beta_HT[..., None])
        target = (v_HTP - torch.matmul(k_HTN, state_HNP).mul_(from_start)) * beta_HT[..., None]
        # Of the system only what is below the diagonal is read; the diagonal counts as ones.
        u_HTP = torch.linalg.solve_triangular(system, target, upper=False, unitriangular=True)
    out = torch.matmul(q_HTN, state_HNP).mul_(from_start)
    out += torch.matmul(torch.matmul(q_HTN, k_HTN.transpose(1, 2)).mul_(pairs_HTT), u_HTP)
    to_end = (sums_HT[:, -1:] - sums_HT).exp_()[..., None]
    state = state_HNP * from_start[:, -1:]
    return out, state + torch.matmul((k_HTN * to_end).transpose(1, 2), u_HTP)


def _chunk_by_channel(
    q_HTN: Tensor,
    k_HTN: Tensor,
    v_HTP: Tensor,
    log_decay_HTN: Tensor,
    state_HNP: Tensor,
    beta_HT: Tensor | None,
) -> tuple[Tensor, Tensor]:
    sums_HTN = log_decay_HTN.cumsum(dim=1)
    # Of a pair (t, s) the decay of what s brought, for s <= t: never above one.
    apart_HTTN = (sums_HTN[:, :, None] - sums_HTN[:, None]).clamp_(max=0.0).exp_()
    decayed_HTTN = apart_HTTN.mul_(k_HTN[:, None])
    from_start = sums_HTN.exp()
    u_HTP = v_HTP
    if beta_HT is not None:
        system = torch.einsum("htn,htsn->hts", k_HTN, decayed_HTTN).mul_(beta_HT[..., None])
        target = (v_HTP - torch.matmul(k_HTN * from_start, state_HNP)) * beta_HT[..., None]
        u_HTP = torch.linalg.solve_triangular(system, target, upper=False, unitriangular=True)
    scores = torch.einsum("htn,htsn->hts", q_HTN, decayed_HTTN).tril_()
    out = torch.matmul(q_HTN * from_start, state_HNP) + torch.matmul(scores, u_HTP)
    to_end = (sums_HTN[:, -1:] - sums_HTN).exp_()
    state = state_HNP * from_start[:, -1, :, None]
    return out, state + torch.matmul((k_HTN * to_end).transpose(1, 2), u_HTP)


def scan_step(
    q_BHN: Tensor,
    k_BHN: Tensor,
    v_BHP: Tensor,
    log_decay_BH: Tensor,
    state_BHNP: Tensor,
    beta_BH: Tensor | None = None,
) -> Tensor:
    """Return o [B, H, P] of rows of one token, whose states move on in place; decays as in `scan`.

        o = S'^T q = S^T (a q) + (q . k) u        so that a state is read once, then moved on

    One core, 16 heads of 128 x 128: 0.19 ms a row; with temporaries of a state's size 2.0 ms.
    """
    decay = log_decay_BH.exp()
    decay_BHN = decay[..., None] if decay.ndim == 2 else decay
    both_BH2N = torch.stack((q_BHN, k_BHN), dim=2) * decay_BHN[:, :, None]
    read_BH2P = torch.matmul(both_BH2N, state_BHNP)
    u_BHP = v_BHP if beta_BH is None else (v_BHP - read_BH2P[:, :, 1]) * beta_BH[..., None]
    state_BHNP.mul_(decay_BHN[..., None])
    heads = state_BHNP.view(-1, *state_BHNP.shape[2:])
    heads.baddbmm_(k_BHN.flatten(0, 1)[..., None], u_BHP.flatten(0, 1)[:, None])
    return read_BH2P[:, :, 0] + (q_BHN * k_BHN).sum(-1, keepdim=True) * u_BHP


def unit_length(x: Tensor) -> Tensor:
    """Return vectors of length one, as the delta rule wants queries and keys."""
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + 1e-6)
