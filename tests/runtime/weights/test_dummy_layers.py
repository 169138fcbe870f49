"""Copied dummy layers: as large as quantised ones, alike, each in its own memory."""

import pytest
import torch

from llmpq.kernels.weights.quantized_weight import QuantizedWeight
from llmpq.models.model_spec import ModelSpec
from llmpq.precision import Precision
from llmpq.runtime.weights.dummy import CopiedLayers
from llmpq.runtime.weights.sources import RandomSource
from llmpq.sizes.memory import Quantization, layer_weight_bytes

pytestmark = pytest.mark.cpu


def test_layers_of_a_precision_are_copies_and_no_more(tiny_models):
    spec = ModelSpec.from_directory(tiny_models.directory("llama"))
    bits = [Precision.W4A16, Precision.W16A16, Precision.W4A16]
    schemes = {index: Quantization().scheme(precision) for index, precision in enumerate(bits)}
    source = CopiedLayers(RandomSource(spec), schemes, torch.device("cpu"))
    first, dense, again = (source.layer(index, torch.float32) for index in range(3))
    for precision, parts in zip(bits, (first, dense, again), strict=True):
        want = layer_weight_bytes(spec, precision, Quantization(), 4)
        assert sum(part.nbytes for part in parts.values()) == want
    qkv, copy = first["qkv.weight"], again["qkv.weight"]
    assert isinstance(copy, QuantizedWeight) and torch.equal(copy.codes(), qkv.codes())
    assert copy.scale.data_ptr() != qkv.scale.data_ptr()
    assert copy.planes[0].data_ptr() != qkv.planes[0].data_ptr()
