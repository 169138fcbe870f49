"""A result that is still on its way from a device to the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class CopyEvent(Protocol):
    """What tells that a copy has arrived (a `torch.cuda.Event`)."""

    def synchronize(self) -> None:
        """Wait for it."""
        ...


@dataclass(frozen=True)
class Pending:
    """A result in host memory, valid once its copy has arrived."""

    value: Tensor
    copied: CopyEvent

    def wait(self) -> Tensor:
        """Return the result once it has arrived."""
        self.copied.synchronize()
        return self.value


def arrived(result: Tensor | Pending) -> Tensor:
    """Return a result, waiting for it if need be."""
    return result.wait() if isinstance(result, Pending) else result
