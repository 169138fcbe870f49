"""A stage that takes the place of another on its device reads only what is not there."""

import pytest
import torch

from llmpq.models.model_spec import ModelSpec
from llmpq.precision import Precision
from llmpq.runtime.models.stage_model import StageModel
from llmpq.runtime.weights.sources import CheckpointSource
from llmpq.sizes.memory import Quantization

pytestmark = pytest.mark.cpu
W8, W4 = Precision.W8A16, Precision.W4A16


class CountingSource(CheckpointSource):
    """Notes what is read from the checkpoint."""

    def __init__(self, *given):
        super().__init__(*given)
        self.parts_read = []

    def layer(self, index, dtype):
        self.parts_read.append(index)
        return super().layer(index, dtype)

    def embedding(self, dtype):
        self.parts_read.append("embedding")
        return super().embedding(dtype)

    def head(self, dtype, *, with_output=True):
        self.parts_read.append("head")
        return super().head(dtype, with_output=with_output)


class Stages:
    """Builds stages of one model."""

    def __init__(self, directory):
        self.directory, self.spec = directory, ModelSpec.from_directory(directory)

    def build(self, layers, bits, *, first=False, last=False, held=None, dtype=torch.float32):
        source = CountingSource(self.directory, self.spec)
        model = StageModel.build(
            self.spec,
            range(*layers),
            bits,
            first=first,
            last=last,
            dtype=dtype,
            device="cpu",
            scheme=Quantization().scheme,
            source=source,
            held=held,
        )
        return model, sorted(source.parts_read, key=str)


def same(one: StageModel, other: StageModel) -> bool:
    """Whether two stages have equal tensors in equal places."""

    def tensors(model):
        return [
            tensor
            for part in model.modules()
            if hasattr(part, "weight")
            for tensor in (
                [part.weight] if torch.is_tensor(part.weight) else part.weight.tensors.values()
            )
        ]

    pairs = zip(tensors(one), tensors(other), strict=True)
    return len(tensors(one)) > 0 and all(torch.equal(a, b) for a, b in pairs)


@pytest.fixture(params=["llama"])
def stages(request, tiny_models):
    return Stages(tiny_models.directory(request.param))


def test_layers_that_stay_are_not_read_again(stages):
    count = stages.spec.num_layers
    before, _ = stages.build((0, count - 1), [W8] * (count - 1), first=True)
    kept = before.layers[0]
    now, read = stages.build((0, count), [W8] * count, first=True, last=True, held=before.held)
    assert read == sorted([count - 1, "head"], key=str) and now.num_held == count - 1
    assert now.layers[0] is kept
    fresh, _ = stages.build((0, count), [W8] * count, first=True, last=True)
    assert same(now, fresh)
    assert now.layers[-1].attention.rotary is now.layers[0].attention.rotary


def test_another_precision_is_read(stages):
    count = stages.spec.num_layers
    before, _ = stages.build((0, count), [W8] * count, first=True, last=True)
    bits = [W4, *[W8] * (count - 1)]
    now, read = stages.build((0, count), bits, first=True, last=True, held=before.held)
    assert read == [0] and now.num_held == count - 1
    assert same(now, stages.build((0, count), bits, first=True, last=True)[0])


def test_what_is_not_wanted_is_freed_before_anything_is_read(stages):
    count = stages.spec.num_layers
    before, _ = stages.build((0, count), [W8] * count, first=True, last=True)
    held = before.held
    stages.build((count - 1, count), [W8], held=held)
    assert not held.layers and held.embedding is None and held.head is None


@pytest.mark.parametrize("change", [{"dtype": torch.bfloat16}, {"held": None}])
def test_parts_of_another_kind_are_not_used(stages, change):
    count = stages.spec.num_layers
    before, _ = stages.build((0, count), [W8] * count)
    now, read = stages.build((0, count), [W8] * count, **{"held": before.held, **change})
    assert read == [*range(count)] and now.num_held == 0
