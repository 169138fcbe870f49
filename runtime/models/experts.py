"""Mixtures of experts: a router chooses, each expert runs once on its tokens, the sum goes on.

    p = score(W x + b)                 softmax or sigmoid over all experts
    chosen = the k largest of p + c    c: a correction for the choice alone; of the best groups only
    y = sum_e w_e expert_e(x) + shared(x),   w = p of the chosen, made to sum to one, times a scale

Legend: T tokens, E experts, k experts of a token, C = T k chosen (token, expert) pairs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from llmpq.families.common.spec_values import Router
from llmpq.runtime.models.linear import Linear, Reduce


class Routing(nn.Module):
    """Chooses each token's experts and weighs them, as a `Router` says."""

    def __init__(
        self,
        weight_Eh: Tensor,
        per_token: int,
        rule: Router | None = None,
        *,
        bias_E: Tensor | None = None,
        correction_E: Tensor | None = None,
        scale_h: Tensor | None = None,
        norm_eps: float = 0.0,
        expert_scale_E: Tensor | None = None,
    ) -> None:
        """`scale_h`: of a normed input; `expert_scale_E`: what weights are multiplied by."""
        super().__init__()
        self.scale_h = scale_h
        self.norm_eps = norm_eps
        self.expert_scale_E = expert_scale_E
        self.weight_Eh = weight_Eh
        self.per_token = per_token
        self.rule = rule or Router()
        self.bias_E, self.correction_E = bias_E, correction_E

    def forward(self, x_Th: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights and values [T, k] of each token's experts."""
        logits_TE = self.logits(x_Th).float()
        sigmoid = self.rule.score == "sigmoid"
        chance_TE = logits_TE.sigmoid() if sigmoid else logits_TE.softmax(dim=-1)
        score_TE = chance_TE
        if self.correction_E is not None:
            score_TE = chance_TE + self.correction_E.float()
        if self.rule.groups > 1:
            score_TE = self._best_groups(score_TE)
        if self.rule.weighs_input:  # scores near one are alike
            score_TE = logits_TE
        expert = score_TE.topk(self.per_token, dim=-1).indices
        weight = chance_TE.gather(1, expert)
        if self.rule.normalise:
            weight = weight / (weight.sum(-1, keepdim=True) + (1e-20 if sigmoid else 0.0))
        if self.expert_scale_E is not None:
            weight = weight * self.expert_scale_E[expert]
        return (weight * self.rule.scale).to(x_Th.dtype), expert

    def logits(self, x_Th: Tensor) -> Tensor:
        """Return the scores of all experts [T, E]."""
        if self.scale_h is not None:
            hidden = x_Th.shape[-1]
            normed = functional.rms_norm(x_Th.float(), (hidden,), None, self.norm_eps)
            x_Th = normed.to(x_Th.dtype) * self.scale_h * hidden**-0.5
        return functional.linear(x_Th, self.weight_Eh, self.bias_E)

    def _best_groups(self, score_TE: Tensor) -> Tensor:
        """Return router scores [T, E], -inf for experts outside the best groups of each token."""
        by_group = score_TE.unflatten(1, (self.rule.groups, -1))
        if self.rule.group_score == "max":
            score_TG = by_group.amax(-1)
        else:
            score_TG = by_group.topk(2, dim=-1).values.sum(-1)
        kept = score_TG.topk(self.rule.groups_kept, dim=-1).indices
        dropped = torch.ones_like(score_TG, dtype=torch.bool).scatter_(1, kept, False)
        return by_group.masked_fill(dropped[:, :, None], float("-inf")).flatten(1)


class SparseMLP(nn.Module):
    """Routing, experts, and an MLP that all tokens share, if any.

    Tokens are sorted by expert, so each expert runs once, on its tokens only. How many those are
    has to be known on the host: one wait for the device per layer, which is why steps of such
    layers are not captured in graphs. GPUs that stack experts do without (cuda_experts.py).
    """

    def __init__(
        self, routing: Routing, experts: Sequence[nn.Module], shared: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.routing, self.shared = routing, shared
        self.experts = nn.ModuleList(experts)
        self.reduce: Reduce | None = None
        """Sums over the devices of a stage, where each has a part of every expert."""

    @property
    def asks_host(self) -> bool:
        """Whether a step waits for the device, so that it cannot be captured in a graph."""
        return True

    def forward(self, x_BQh: Tensor) -> Tensor:
        """Return [B, Q, h]."""
        x_Th = x_BQh.reshape(-1, x_BQh.shape[-1])
        y_Th = self.mixed(x_Th, *self.routing(x_Th))
        if self.shared is not None:
            y_Th.add_(self.shared(x_Th))
        return self.summed(y_Th).view(x_BQh.shape)

    def summed(self, y_Th: Tensor) -> Tensor:
        """Return what experts give, over all devices that have parts of them."""
        return y_Th if self.reduce is None else self.reduce(y_Th)

    def mixed(self, x_Th: Tensor, weight: Tensor, expert: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts [T, h]; weights and experts [T, k]."""
        order_C = expert.flatten().argsort(stable=True)
        token_C, weight_C = order_C // expert.shape[1], weight.flatten()[order_C, None]
        counts = expert.flatten().bincount(minlength=len(self.experts)).tolist()
        y_Th = torch.zeros_like(x_Th)
        start = 0
        for mlp, count in zip(self.experts, counts, strict=True):
            if count:
                tokens = token_C[start : start + count]
                weights = weight_C[start : start + count]
                given_Ch = x_Th[tokens]
                if self.routing.rule.weighs_input:
                    y_Th.index_add_(0, tokens, mlp(given_Ch.mul_(weights)))
                else:
                    y_Th.index_add_(0, tokens, mlp(given_Ch).mul_(weights))
                start += count
        return y_Th


class LatentMixture(SparseMLP):
    """Experts on few features, between two matrices: out(experts(into(x))) + shared(x).

    Routed by x (Nemotron 3 Super).
    """

    def __init__(
        self, mixture: SparseMLP, shared: nn.Module | None, latent_in: Linear, latent_out: Linear
    ) -> None:
        """`mixture`: the experts alone."""
        super().__init__(mixture.routing, list(mixture.experts), shared)
        self.mixture = mixture
        self.latent_in, self.latent_out = latent_in, latent_out

    @property
    def asks_host(self) -> bool:
        """As of the mixture."""
        return self.mixture.asks_host

    def forward(self, x_BQh: Tensor) -> Tensor:
        """Return [B, Q, h]."""
        x_Th = x_BQh.reshape(-1, x_BQh.shape[-1])
        mixed = self.mixture.mixed(self.latent_in(x_Th), *self.routing(x_Th))
        y_Th: Tensor = self.latent_out(self.mixture.summed(mixed))
        if self.shared is not None:
            y_Th = y_Th + self.shared(x_Th)
        return y_Th.view(x_BQh.shape)


class MixtureBeside(SparseMLP):
    """Experts beside an MLP, each on a norm of its own of one residual stream (Gemma 4).

    norm_1(MLP(norm(x))) + norm_2(experts(norm_3(x))), routed by x
    """

    def __init__(
        self,
        mixture: SparseMLP,
        shared: nn.Module,
        norms: tuple[nn.Module, nn.Module, nn.Module, nn.Module],
    ) -> None:
        """`mixture`: the experts alone. `norms`: before and behind MLP, before and behind them."""
        super().__init__(mixture.routing, list(mixture.experts), shared)
        self.mixture = mixture
        self.shared_norm, self.shared_out_norm, self.experts_norm, self.experts_out_norm = norms

    @property
    def asks_host(self) -> bool:
        """As of the mixture."""
        return self.mixture.asks_host

    def forward(self, x_BQh: Tensor) -> Tensor:
        """Return [B, Q, h]."""
        assert self.shared is not None
        x_Th = x_BQh.reshape(-1, x_BQh.shape[-1])
        weight, expert = self.routing(x_Th)
        mixed = self.mixture.summed(self.mixture.mixed(self.experts_norm(x_Th), weight, expert))
        beside = self.shared_out_norm(self.shared(self.shared_norm(x_Th)))
        return (self.experts_out_norm(mixed) + beside).view(x_BQh.shape)
