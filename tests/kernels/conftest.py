"""Triton's interpreter rounds to bfloat16 here as a GPU does: to nearest, ties to even.

By itself it cuts the lower bits off, twice the error, all of it towards zero: the tests' limits
are those of rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session", autouse=True)
def _rounding_interpreter() -> Iterator[None]:
    from triton import knobs

    if not knobs.runtime.interpret:
        yield
        return
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    plain = InterpreterBuilder.cast_impl

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        if (src.dtype.scalar, dst_type.scalar) != (tl.float32, tl.bfloat16):
            return plain(self, src, dst_type)
        values = np.ascontiguousarray(src.data, dtype=np.float32)
        bits = values.view(np.uint32).astype(np.uint64)
        rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        kept = np.where(np.isnan(values), bits >> 16 | 0x40, rounded).astype(np.uint16)
        return TensorHandle(kept, dst_type.scalar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "cast_impl", cast_impl)
        yield
