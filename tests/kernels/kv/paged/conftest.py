"""What tests of kernels over pools share."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def new_memory_is_nan() -> Iterator[None]:
    """What a kernel did not write is NaN, not whatever was there."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def before_ampere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Latents' plans are those of cards before Ampere."""
    from llmpq.kernels.kv.paged import paged_latents

    monkeypatch.setattr(paged_latents, "older_than", lambda *_: True)
    paged_latents.LatentPlan.of.__func__.cache_clear()  # type: ignore[attr-defined]
    yield
    paged_latents.LatentPlan.of.__func__.cache_clear()  # type: ignore[attr-defined]
