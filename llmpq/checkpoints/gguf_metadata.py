"""An architecture's keys in a GGUF file's metadata, each asked for once and checked."""

from __future__ import annotations

from typing import Any

from llmpq.checkpoints.gguf_file import GgufFile
from llmpq.errors import short_repr, shortened

SAYS_NOTHING = frozenset(
    ["vocab_size", "rope.scaling.finetuned", "tensor_data_layout", "attention.value_length"]
)
"""Keys of an architecture that change nothing, or that are checked beside another."""
WHOLE, REAL = (int,), (int, float)
"""Kinds of numbers that a key may have."""


class Metadata:
    """An architecture's keys, and which of them were asked for."""

    def __init__(self, file: GgufFile, arch: str) -> None:
        self.file, self._prefix = file, arch + "."
        self.asked: set[str] = set()

    def get(self, key: str) -> Any:
        """Return a value, None where the file has none."""
        self.asked.add(key)
        return self.file.metadata.get(self._prefix + key)

    def number(self, key: str, kinds: tuple[type, ...] = WHOLE, default: Any = None) -> Any:
        """Return a positive number; `ValueError` where there is none."""
        value = self.get(key)
        if value is None and default is None:
            raise ValueError(
                f"'{self.file.path}': metadata '{self._prefix}{key}', which the model needs, is "
                "missing; download the file again, or convert the model again"
            )
        if value is None:
            value = default
        if isinstance(value, list) and len(set(value)) == 1:  # one for each layer, all alike
            value = value[0]
        if type(value) not in kinds or not 0 < value < 1e12:
            kind = "a positive number below 10^12, the same for every layer"
            raise ValueError(
                f"'{self.file.path}': metadata '{self._prefix}{key}' is {short_repr(value)}, "
                f"expected {kind}; llmpq does not run models whose layers differ in it, and other "
                "values mean that the file is damaged"
            )
        return value

    def of_layers(self, key: str, count: int) -> list[int]:
        """Return a whole number for each of `count` layers, which may all have the same one."""
        given = self.get(key)
        numbers = given if isinstance(given, list) else [self.number(key)] * count
        if len(numbers) != count or not all(type(n) is int and 0 <= n < 1e12 for n in numbers):
            raise ValueError(
                f"'{self.file.path}': metadata '{self._prefix}{key}' is {short_repr(given)}, "
                f"expected one number, or a number for each of {count} layers; the file is "
                "damaged: download it again"
            )
        return numbers

    def require_known(self) -> None:
        """Refuse keys that change what the model computes: those that nothing here reads, too."""
        if self.get("attention.causal") is False:
            raise ValueError(
                f"'{self.file.path}': metadata '{self._prefix}attention.causal' is false: tokens "
                "see those behind them (an embedding model), which llmpq does not run"
            )
        known = self.asked | SAYS_NOTHING
        mine = [k.removeprefix(self._prefix) for k in self.file.metadata if self._is_mine(k)]
        for key in sorted(set(mine) - known):
            value = self.file.metadata[self._prefix + key]
            if value not in (None, False, 0, "", []):
                raise ValueError(
                    f"'{self.file.path}': metadata '{shortened(self._prefix + key)}'="
                    f"{short_repr(value)} is not known to llmpq and may change what the model "
                    "computes; get the model as safetensors, or as another GGUF file"
                )

    def _is_mine(self, key: str) -> bool:
        return key.startswith(self._prefix)
