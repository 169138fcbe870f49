"""Classes for Ray actors that the driver itself does not import: most import torch.

That takes a second of a core, and only the actors' processes compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any


def actor_class(module: str, name: str, methods: Sequence[str]) -> type[Any]:
    """Return a class for `ray.remote` whose instances hold one of `module.name` and call it.

    Its name is that class's, which the system lists processes by. Ray sends it by value.
    """

    def construct(self: Any, *args: object, **options: object) -> None:
        self.held = getattr(import_module(module), name)(*args, **options)

    calls: dict[str, Any] = {method: _forwarded(method) for method in methods}
    return type(name, (), {"__init__": construct, "__doc__": f"`{module}.{name}`.", **calls})


def _forwarded(method: str) -> Callable[..., Any]:
    def call(self: Any, *args: object, **options: object) -> Any:
        return getattr(self.held, method)(*args, **options)

    call.__name__ = method
    return call
