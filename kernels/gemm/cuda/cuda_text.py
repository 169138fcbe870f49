"""The CUDA C++ of a kernel: constants, shared parts, and Triton's assembly as C++ has it."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path


def defined(constants: Mapping[str, object]) -> str:
    """Return a line for each constant."""
    return "".join(f"#define {name} {value}\n" for name, value in constants.items())


@functools.cache
def part(name: str) -> str:
    """Return the text of a file of this folder."""
    return Path(__file__).with_name(name).read_text()


def wgmma_parts() -> str:
    """Return what the kernels of wgmma share."""
    return part("shared_parts.cu") + part("wgmma_parts.cu")


def numbered(assembly: str, *, pairs: int = 0) -> str:
    """Return Triton's assembly with the operands of CUDA C++.

    Its first `pairs` results are two outputs of 16 bits each; here each is one of 32.
    """
    for i in range(pairs):
        assembly = assembly.replace(
            f"mov.b32 {{${2 * i}, ${2 * i + 1}}}, p{i};", f"mov.b32 %{i}, p{i};"
        )
    return re.sub(r"\$(\d+)", lambda found: f"%{int(found[1]) - pairs}", assembly)
