"""Layers of rounded inputs as a GPU computes them, kernels interpreted, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from triton import knobs

from llmpq.kernels.formats.atom_scheme import W8A8, AtomScheme
from llmpq.kernels.fused.gated_mlp import gate_mul
from llmpq.kernels.weights.atom_weight import AtomWeight, integer_linear, quantize_atom
from llmpq.models.model_spec import ModelSpec
from llmpq.runtime.backends.gpu import cuda_atom_layers
from llmpq.runtime.backends.gpu.cuda_layers import CudaLayers
from llmpq.runtime.backends.gpu.cuda_norms import norm
from llmpq.runtime.models.layer_tensors import LayerTensors
from llmpq.runtime.models.layers import DecoderLayer
from llmpq.runtime.models.linear import Linear
from llmpq.runtime.models.mlps import GatedMLP, GateFunction
from llmpq.runtime.models.wiring import Wiring
from llmpq.runtime.weights.sources import RandomSource

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.skipif(not knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
]
CPU = torch.device("cpu")
W4A4 = AtomScheme(group_size=64, outliers=8, signed_scale=True, activation_clip=0.95)


def made_layer(name: str, scheme: AtomScheme) -> DecoderLayer:
    """A narrow layer of a model's kind with weights of a scheme."""
    spec = replace(ModelSpec.by_name(name), num_layers=1, hidden=128, ffn=272, heads=4, vocab=64)
    spec = replace(spec, kv_heads=2 if spec.gated else 4, head_dim=32)
    parts = dict(RandomSource(spec).layer(0, torch.bfloat16))
    for one in [key for key in parts if key.endswith(".weight") and parts[key].ndim == 2]:
        w_NK = parts[one].float()
        ordered = scheme.outliers and "down" not in one
        order = torch.randperm(w_NK.shape[1]) if ordered else None
        parts[one] = quantize_atom(w_NK, scheme, dtype=torch.bfloat16, index_K=order)
    given = {"scheme": None, "dtype": torch.bfloat16, "device": CPU, "norm_eps": spec.norm_eps}
    made = LayerTensors(tensors=parts, **given)
    return Wiring(spec, CPU, CudaLayers()).layer(made, 0)


def by_itself(part: Linear, x_MK: Tensor) -> Tensor:
    """What a linear makes of inputs that it rounds itself."""
    assert isinstance(part.weight, AtomWeight)
    return integer_linear(x_MK.contiguous(), part.weight, part.bias)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "opt-30b"])
@pytest.mark.parametrize("scheme", [W8A8, W4A4])
def test_roundings_that_ride_along_are_those_of_passes_of_their_own(
    name: str, scheme: AtomScheme, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    layer = made_layer(name, scheme)
    assert not cuda_atom_layers.rounds_inputs(layer), "on a CPU no kernel rounds them"
    monkeypatch.setattr(AtomWeight, "takes_rounded_tokens", True)
    assert cuda_atom_layers.rounds_inputs(layer)
    part, mlp, x = layer.attention, layer.mlp, torch.randn(1, 5, 128).bfloat16()

    def attend(qkv: Tensor) -> Tensor:
        return qkv[..., -128:].contiguous()

    got = cuda_atom_layers.decoder_layer(layer, x, attend)
    x_MK = x[0]
    attended = attend(by_itself(part.qkv, norm(layer.attn_norm, x_MK)))
    y = by_itself(part.o, attended) + x_MK
    wide = by_itself(mlp.wide, norm(layer.mlp_norm, y))
    hidden = gate_mul(wide) if isinstance(mlp, GatedMLP) else torch.relu(wide)
    assert torch.equal(got[0], by_itself(mlp.down, hidden) + y)
    last = cuda_atom_layers.decoder_layer(layer, x, attend, last=lambda t: t[:, -1:].contiguous())
    assert torch.equal(last[0], got[0, -1:])


def test_layers_of_other_parts_round_in_their_linears(monkeypatch: pytest.MonkeyPatch) -> None:
    """What no kernel does as it rounds is done by itself: gates, norms, the order of parts."""
    monkeypatch.setattr(AtomWeight, "takes_rounded_tokens", True)
    layer = made_layer("llama-3.1-8b", W8A8)
    assert cuda_atom_layers.rounds_inputs(layer)
    layer.mlp.gate = GateFunction("gelu_tanh")
    assert not cuda_atom_layers.rounds_inputs(layer)
    layer.mlp.gate = GateFunction()
    layer.parallel_norms = 1
    assert not cuda_atom_layers.rounds_inputs(layer)
    layer.parallel_norms, layer.attn_norm.centred = 0, True
    assert not cuda_atom_layers.rounds_inputs(layer), "a LayerNorm without a bias"
    layer.attn_norm.centred = False
    hook = layer.attention.o.register_forward_pre_hook(lambda *_: None)
    assert not cuda_atom_layers.rounds_inputs(layer), "observed"
    hook.remove()
    assert cuda_atom_layers.rounds_inputs(layer)
