"""The head that predicts a further token (MTP): one layer behind the model, which drafts.

    x_i = W [norm(E(t_(i+1))); norm(h_i)]     h: what the model's head is given, behind its norm
    y_i = layer(x)_i;  logits of t_(i+2) = output(norm(y_i))

DeepSeek-V3 (arXiv 2412.19437, equations 21 to 25) and Qwen3-Next. A token further on is predicted
by the same head once more: of what it has drafted, and of y_i, or of norm(y_i) as Qwen3-Next has
it, in place of h. Embedding and output matrix are the model's.

Legend: T tokens of a step, h hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from llmpq.families import FAMILIES
from llmpq.precision import WeightScheme
from llmpq.runtime.cache.kv_cache import KVCache
from llmpq.runtime.models.layer_tensors import LayerTensors
from llmpq.runtime.models.layers import DecoderLayer, Embedding, Head, nbytes_of
from llmpq.runtime.models.linear import Linear
from llmpq.runtime.models.norms import Norm
from llmpq.runtime.models.stage_model import StageModel
from llmpq.runtime.models.wiring import Wiring
from llmpq.runtime.steps.step import Step


class MtpHead(nn.Module):
    """The head on the last stage, over a cache of one layer."""

    def __init__(
        self,
        embedding: Embedding,
        norms: tuple[Norm, Norm],
        join: Linear,
        layer: DecoderLayer,
        head: Head,
        *,
        model_norm: Norm,
        goes_on_normed: bool,
    ) -> None:
        """`norms`: of token and hidden state. `head`: its own norm and the output matrix."""
        super().__init__()
        self.embedding, (self.token_norm, self.hidden_norm) = embedding, norms
        self.join = join
        self.layer = layer
        self.head = head
        self.model_norm, self.goes_on_normed = model_norm, goes_on_normed

    @classmethod
    def build(
        cls,
        model: StageModel,
        tensors: dict[str, Any],
        embedding: dict[str, Tensor] | None,
        *,
        scheme: WeightScheme | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> MtpHead:
        """Wire a head to the last stage; `embedding`: its tensors where the stage has none."""
        assert model.head is not None
        spec, runner = model.whole_spec, model.head.runner
        wiring = Wiring(spec.of_mtp(), device, runner)
        parts = LayerTensors(
            tensors={**tensors, **(embedding or {})},
            scheme=scheme,
            dtype=dtype,
            device=device,
            norm_eps=spec.norm_eps,
        )
        names = FAMILIES[spec.family].names.mtp
        assert names is not None
        own = model.embedding
        return cls(
            wiring.embedding(parts) if own is None else own,
            (parts.norm("token_norm"), parts.norm("hidden_norm")),
            parts.linear("join"),
            wiring.layer(parts, 0),
            Head(
                parts.norm("norm"),
                model.head.output,
                runner,
                factor=spec.logit_factor,
                cap=spec.logit_cap,
                suppressed_N=model.head.suppressed_N,
            ),
            model_norm=model.head.norm,
            goes_on_normed=names.goes_on_normed,
        )

    def own_nbytes(self, model: StageModel) -> int:
        """Return the bytes of what it does not share with its stage."""
        return nbytes_of(self, but=model)

    def first(self, hidden_1Th: Tensor) -> Tensor:
        """Return the model's hidden states as the head takes them, behind the model's norm."""
        return self.head.runner.norm(self.model_norm, hidden_1Th)

    def forward(self, tokens_1T: Tensor, hidden_1Th: Tensor, step: Step, kv: KVCache) -> Tensor:
        """Return y [1, T, h] of hidden states and the tokens behind them."""
        norm = self.head.runner.norm
        token_1Th = norm(self.token_norm, self.embedding(tokens_1T, step))
        joined = torch.cat((token_1Th, norm(self.hidden_norm, hidden_1Th)), dim=-1)
        out: Tensor = self.layer(self.join(joined), 0, step, kv)
        return out

    def goes_on(self, out_1Th: Tensor) -> Tensor:
        """Return what a further token is predicted from in place of the model's hidden states."""
        return self.head.runner.norm(self.head.norm, out_1Th) if self.goes_on_normed else out_1Th

    def logits(self, out_Nh: Tensor) -> Tensor:
        """Return the logits [N, V] of the tokens behind those that the head was given."""
        logits: Tensor = self.head(out_Nh)
        return logits
