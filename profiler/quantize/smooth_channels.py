"""Channels balanced between a norm and the linears that read it, before both are rounded to 8 bits.

A few channels of a large model's activations are many times larger than the others, and one scale
per token has to hold them all. Dividing channel k of a norm's weight (and bias) by s_k and
multiplying the columns that read it by s_k changes no output and costs nothing when the model
runs (Xiao et al., "SmoothQuant", 2023):

    s_k = 2 ^ round(log2( x_k^a / w_k^(1-a) ))       a = 1/2; relative to the middle channel

x_k is the root mean square of the channel over calibration tokens, w_k its largest weight. Powers
of two, so that norms in 16 bits stay exact. Inputs of `o` and `down` are left as they are.

K = in_features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from llmpq.profiler.quantize.layer_walk import Hessian, LayerView

READERS = {
    "attn_norm": (
        *("qkv", "qk", "q", "q_a", "kv_a", "mixer_in", "step"),
        *("index_k", "index_weights", "head_gate"),
    ),
    "mlp_norm": ("gate_up", "up", "router", "shared_gate"),
}
"""Norm -> the matrices that read it, of every expert."""


def smoothed(view: LayerView, *, share: float = 0.5) -> LayerView:
    """Return the same layer with balanced channels; `share` is a, what activations give away."""
    if view.norms_go_on:
        return view
    tensors, hessians = dict(view.tensors), dict(view.hessians)
    # An MLP beside attention may read attention's norm.
    shared = "mlp_norm.weight" not in tensors
    for norm, own in READERS.items():
        if f"{norm}.weight" not in tensors:
            continue  # a layer whose norms stand behind attention and MLP
        readers = own + READERS["mlp_norm"] if shared else own
        names = [part.removesuffix(".weight") for part in tensors if _kind(part) in readers]
        factor_K = factors(
            [hessians[name] for name in names if name in hessians],
            [tensors[f"{name}.weight"] for name in names if name in hessians],
            share,
        )
        for kind in ("weight", "bias"):
            if f"{norm}.{kind}" in tensors:
                made = tensors[f"{norm}.{kind}"]
                tensors[f"{norm}.{kind}"] = made / factor_K.to(made)
        for name in names:
            read = tensors[f"{name}.weight"]
            tensors[f"{name}.weight"] = read * factor_K.to(read)
            if name in hessians:
                hessians[name] = _scaled(hessians[name], factor_K)
    return replace(view, tensors=tensors, hessians=hessians)


def factors(hessians: Sequence[Hessian], weights: Sequence[Tensor], share: float) -> Tensor:
    """Return s [K], powers of two; 1 for a channel that is never active or never read."""
    tokens = max(1, sum(hessian.tokens for hessian in hessians))
    square_K = torch.stack([hessian.sum_KK.diagonal() for hessian in hessians]).sum(0) / tokens
    largest_K = torch.stack([w.abs().amax(0).float() for w in weights]).amax(0).to(square_K.device)
    wanted_K = share * square_K.sqrt().log2() - (1 - share) * largest_K.log2()
    known_K = wanted_K.isfinite()
    middle = wanted_K[known_K].median() if bool(known_K.any()) else 0.0
    return torch.where(known_K, wanted_K - middle, 0.0).round().exp2()


def _scaled(hessian: Hessian, factor_K: Tensor) -> Hessian:
    """Return the sums of the divided inputs."""
    scaled = Hessian(0, hessian.sum_KK.device)
    scaled.sum_KK = hessian.sum_KK / (factor_K[:, None] * factor_K)
    scaled.tokens = hessian.tokens
    return scaled


def _kind(part: str) -> str:
    """Return what a weight belongs to, whichever expert's it is; nothing for biases."""
    name, _, field = part.rpartition(".")
    return name.rpartition(".")[2] if field == "weight" else ""
