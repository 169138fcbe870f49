"""The parts decoder layers are wired from: norms, linears, rotary positions, attention, MLPs.

Parts hold tensors and know nothing of files, families or stages. Weights are plain attributes, not
parameters: they are never trained, moved or saved, and a plain attribute is the cheapest to read.

Legend: B rows, Q new tokens, h hidden, H query heads, G key/value heads, D head_dim, V vocabulary.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from llmpq.kernels.atom.product import AtomWeight, atom_linear
from llmpq.kernels.cpu.dense import dense_linear
from llmpq.kernels.linear import QuantizedWeight, linear
from llmpq.model_spec import ModelSpec, RopeScaling
from llmpq.runtime.cache.plain_kv import KVCache
from llmpq.runtime.step import Step

Weight = Tensor | QuantizedWeight | AtomWeight
"""A dense weight (kernels/cpu/dense.py), one of few bits, or one that meets rounded activations."""

_LARGE = 1 << 14
"""Elements from which passes over memory cost more than calls (8 x 256: 7 us against 22)."""


class Norm(nn.Module):
    """RMSNorm, or LayerNorm when it has a bias, over the last dimension."""

    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = weight, bias, eps
        self.shape = tuple(weight.shape)

    def forward(self, x: Tensor) -> Tensor:
        """Return x normalised, in x's dtype."""
        if self.bias is not None:
            return functional.layer_norm(x, self.shape, self.weight, self.bias, self.eps)
        if x.is_cuda or x.numel() < _LARGE:
            return functional.rms_norm(x, self.shape, self.weight, self.eps)
        return _rms_norm(x, self.weight, self.eps)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm with one float32 temporary; the CPU's own makes three.

    (8, 64, 4096), one core: float32 1.09 ms against 1.82, bfloat16 2.56 against 3.17.
    """
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    inverse = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (x * inverse).to(x.dtype).mul_(weight)


class Linear(nn.Module):
    """y = x W^T + b with a dense or a quantised W [N, K]."""

    def __init__(self, weight: Weight, bias: Tensor | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        """Return y [..., N] in x's dtype."""
        if isinstance(self.weight, Tensor):
            return dense_linear(x, self.weight, self.bias)
        if isinstance(self.weight, AtomWeight):
            return atom_linear(x, self.weight, self.bias)
        return linear(x, self.weight, self.bias)


class Rotary:
    """Rotary positions of one model: cos and sin of a step's positions, made once per step."""

    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        assert spec.rope_theta is not None
        _choose_cos_and_sin()
        exponent = torch.arange(0, spec.head_dim, 2, dtype=torch.float32) / spec.head_dim
        inv_freq = 1.0 / (spec.rope_theta**exponent)
        if spec.rope_scaling is not None:
            inv_freq = scaled_frequencies(inv_freq, spec.rope_scaling)
        self.inv_freq = inv_freq.to(device)

    def rotate(self, x_BQND: Tensor, step: Step) -> Tensor:
        """Return queries or keys [B, Q, N heads, D] rotated to their positions."""
        cos, sin = self._angles(step, x_BQND)
        first, second = x_BQND.chunk(2, dim=-1)
        out = torch.empty(x_BQND.shape, dtype=x_BQND.dtype, device=x_BQND.device)
        low, high = out.chunk(2, dim=-1)
        torch.mul(first, cos, out=low).addcmul_(second, sin, value=-1)
        torch.mul(second, cos, out=high).addcmul_(first, sin)
        return out

    def _angles(self, step: Step, like: Tensor) -> tuple[Tensor, Tensor]:
        if "cos" not in step.memo:
            angle = (step.positions_BQ[:, :, None].float() * self.inv_freq)[:, :, None]
            step.memo["cos"] = angle.cos().to(like.dtype)
            step.memo["sin"] = angle.sin_().to(like.dtype)
        return step.memo["cos"], step.memo["sin"]


def _choose_cos_and_sin() -> None:
    """Let MKL choose its cos and sin on one thread.

    It does so at a function's first call; threads that share that call can get different code, up
    to 4000 ulp apart, and a prompt other tokens than the next time (PyTorch issue 188792).
    """
    torch.zeros(1).cos_().sin_()


def scaled_frequencies(inv_freq: Tensor, scaling: RopeScaling) -> Tensor:
    """Return Llama 3.1's frequencies: long waves slowed by `factor`, a smooth ramp between."""
    turns = scaling.original_max_positions * inv_freq / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    ramp = ((turns - low) / (high - low)).clamp(0, 1)
    return inv_freq * (ramp + (1 - ramp) / scaling.factor)


class Attention(nn.Module):
    """Fused qkv, optional q/k norms and rotary positions, attention through the cache, output."""

    def __init__(
        self,
        spec: ModelSpec,
        qkv: Linear,
        o: Linear,
        *,
        rotary: Rotary | None = None,
        alibi_slopes_H: Tensor | None = None,
        q_norm: Norm | None = None,
        k_norm: Norm | None = None,
    ) -> None:
        super().__init__()
        self.qkv, self.o, self.q_norm, self.k_norm = qkv, o, q_norm, k_norm
        self.rotary, self.alibi_slopes_H = rotary, alibi_slopes_H
        self.heads, self.kv_heads, self.head_dim = spec.heads, spec.kv_heads, spec.head_dim
        self.scale = spec.head_dim**-0.5

    def forward(self, x_BQh: Tensor, layer: int, step: Step, kv: KVCache) -> Tensor:
        """Return o(attention(q, k, v)) [B, Q, h] of cache layer `layer`."""
        batch, q_len, _ = x_BQh.shape
        qkv = self.qkv(x_BQh).view(batch, q_len, self.heads + 2 * self.kv_heads, self.head_dim)
        q, k, v = self._positioned(qkv, step)
        del qkv, x_BQh
        out_BQHD = kv.attend(
            layer, q, k, v, step, scale=self.scale, alibi_slopes_H=self.alibi_slopes_H
        )
        del q, k, v
        return self.o(out_BQHD.reshape(batch, q_len, self.heads * self.head_dim))

    def _positioned(self, qkv_BQND: Tensor, step: Step) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k with their norms and positions applied, and v."""
        split = [self.heads, self.kv_heads, self.kv_heads]
        q, k, v = qkv_BQND.split(split, dim=2)
        if self.rotary is None:
            return q, k, v
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
            return self.rotary.rotate(q, step), self.rotary.rotate(k, step), v
        qk = self.rotary.rotate(qkv_BQND[:, :, : self.heads + self.kv_heads], step)
        q, k = qk.split(split[:2], dim=2)
        return q, k, v


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "relu": Tensor.relu_,
    "gelu": functools.partial(functional.gelu, approximate="tanh"),
}
"""What an MLP without a gate applies, in place where that can be."""


def require_activation(name: str, known: Collection[str], where: str) -> None:
    """Refuse an activation that nobody here computes: another one in its place would be wrong."""
    if name not in known:
        raise ValueError(
            f"activation '{name}' is not supported in {where}; expected {' or '.join(known)}"
        )


class MLP(nn.Module):
    """down(act(up(x))): ReLU (OPT) or the tanh form of GELU (BLOOM)."""

    def __init__(self, up: Linear, down: Linear, activation: str) -> None:
        super().__init__()
        self.up, self.down, self.activation = up, down, activation
        require_activation(activation, ACTIVATIONS, "an MLP")

    def forward(self, x_BQh: Tensor) -> Tensor:
        """Return [B, Q, h]."""
        return self.down(ACTIVATIONS[self.activation](self.up(x_BQh)))


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)) with gate and up fused into one matrix [2 F, h]."""

    def __init__(self, gate_up: Linear, down: Linear, activation: str = "silu") -> None:
        super().__init__()
        self.gate_up, self.down, self.activation = gate_up, down, activation
        require_activation(activation, ("silu",), "a gated MLP")

    def forward(self, x_BQh: Tensor) -> Tensor:
        """Return [B, Q, h]."""
        gate, up = self.gate_up(x_BQh).chunk(2, dim=-1)
        # Out of place: the halves are strided views, and `down` wants rows without gaps.
        hidden = functional.silu(gate).mul_(up)
        del gate, up
        return self.down(hidden)


class SparseMLP(nn.Module):
    """A router and experts: y = sum of the chosen experts' outputs, each times its weight.

    A token's weights are the softmax over all experts, of which the `per_token` largest are kept
    and made to sum to one. Tokens are sorted by expert, so each expert runs once, on its tokens
    only. How many those are has to be known on the host: one wait for the device per layer, which
    is why steps of such layers are not captured in graphs.

    Legend: T tokens, E experts, C = T * per_token chosen (token, expert) pairs.
    """

    def __init__(self, router_Eh: Tensor, experts: Sequence[nn.Module], per_token: int) -> None:
        super().__init__()
        self.router_Eh, self.per_token = router_Eh, per_token
        self.experts = nn.ModuleList(experts)

    def forward(self, x_BQh: Tensor) -> Tensor:
        """Return [B, Q, h]."""
        x_Th = x_BQh.reshape(-1, x_BQh.shape[-1])
        chance_TE = functional.linear(x_Th, self.router_Eh).float().softmax(dim=-1)
        weight, expert = chance_TE.topk(self.per_token, dim=-1)
        weight = (weight / weight.sum(-1, keepdim=True)).to(x_Th.dtype)
        order_C = expert.flatten().argsort(stable=True)
        token_C, weight_C = order_C // self.per_token, weight.flatten()[order_C, None]
        counts = expert.flatten().bincount(minlength=len(self.experts)).tolist()
        y_Th = torch.zeros_like(x_Th)
        start = 0
        for mlp, count in zip(self.experts, counts, strict=True):
            if count:
                tokens = token_C[start : start + count]
                weights = weight_C[start : start + count]
                y_Th.index_add_(0, tokens, mlp(x_Th[tokens]).mul_(weights))
                start += count
        return y_Th.view(x_BQh.shape)


class DecoderLayer(nn.Module):
    """A pre-norm decoder layer: x += attention(norm(x)); x += mlp(norm(x))."""

    def __init__(
        self,
        attn_norm: Norm,
        attention: Attention,
        mlp_norm: Norm,
        mlp: MLP | GatedMLP | SparseMLP,
        runner: LayerRunner,
    ) -> None:
        super().__init__()
        self.attn_norm, self.attention = attn_norm, attention
        self.mlp_norm, self.mlp = mlp_norm, mlp
        self.runner = runner

    def forward(
        self,
        x_BQh: Tensor,
        layer: int,
        step: Step,
        kv: KVCache,
        *,
        last_only: bool = False,
        in_place: bool = False,
    ) -> Tensor:
        """Return a new residual stream [B, Q, h].

        `last_only`: nobody reads but the last valid token of each row, [B, 1, h] will do.
        `in_place`: nobody reads the input again, it need not be left as it was.
        """
        return self.runner.decoder_layer(
            self, x_BQh, layer, step, kv, last_only=last_only, in_place=in_place
        )


class LayerRunner(Protocol):
    """Who computes layers: torch's operators here, fused kernels of a backend elsewhere."""

    def decoder_layer(
        self,
        layer: DecoderLayer,
        x_BQh: Tensor,
        index: int,
        step: Step,
        kv: KVCache,
        *,
        last_only: bool = False,
        in_place: bool = False,
    ) -> Tensor:
        """Return the new residual stream of a layer (see `DecoderLayer.forward`)."""
        ...

    def norm(self, part: Norm, x: Tensor) -> Tensor:
        """Return x normalised."""
        ...


class PlainLayers:
    """Torch's operators, one after the other: the CPU's way, and the twin of every other."""

    def decoder_layer(
        self,
        layer: DecoderLayer,
        x_BQh: Tensor,
        index: int,
        step: Step,
        kv: KVCache,
        *,
        last_only: bool = False,
        in_place: bool = False,
    ) -> Tensor:
        """Return the new residual stream; all tokens go on, the input stays as it was."""
        y: Tensor = layer.attention(layer.attn_norm(x_BQh), index, step, kv)
        y.add_(x_BQh)
        return y.add_(layer.mlp(layer.mlp_norm(y)))

    def norm(self, part: Norm, x: Tensor) -> Tensor:
        """Return x normalised."""
        normed: Tensor = part(x)
        return normed


class Embedding(nn.Module):
    """Token embedding, learned positions (offset by two, as OPT stores them), embedding norm."""

    def __init__(
        self, tokens_Vh: Tensor, positions_Ph: Tensor | None = None, norm: Norm | None = None
    ) -> None:
        super().__init__()
        self.tokens_Vh, self.positions_Ph, self.norm = tokens_Vh, positions_Ph, norm

    def forward(self, tokens_BQ: Tensor, step: Step) -> Tensor:
        """Return the residual stream [B, Q, h]."""
        x = functional.embedding(tokens_BQ, self.tokens_Vh)
        if self.positions_Ph is not None:
            last = self.positions_Ph.shape[0] - 1
            # Clamped for the padding of rows that end at the last position.
            x += functional.embedding((step.positions_BQ + 2).clamp_(max=last), self.positions_Ph)
        return x if self.norm is None else self.norm(x)


def held_weights(part: nn.Module) -> list[Weight]:
    """Return the weights a part itself holds, those of the parts inside it left out."""
    if not isinstance(part, (Norm, Linear, Embedding, SparseMLP)):
        return []
    return [held for held in vars(part).values() if isinstance(held, Weight)]


class Head(nn.Module):
    """Final norm and output matrix."""

    def __init__(self, norm: Norm, output: Linear, runner: LayerRunner) -> None:
        super().__init__()
        self.norm, self.output, self.runner = norm, output, runner

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [..., V]."""
        return self.output(self.runner.norm(self.norm, x))
