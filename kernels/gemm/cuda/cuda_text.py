"""The CUDA C++ of a kernel: constants, shared parts, and Triton's assembly as C++ has it."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
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


def zero_constants(known: Sequence[int], assembly: str | None) -> str:
    """Return the device function that makes what unpacking subtracts of a pair of zero points.

    `known`: what it is for symmetric words. `assembly`: Triton's, which makes as many of the pair;
    None for symmetric words.
    """
    start = "__device__ __forceinline__ void zero_constants(u32 (&z)[ZC], u32 pairs) {\n"
    if assembly is None:
        return (
            start
            + "".join(f"  z[{i}] = {value:#010x}u;\n" for i, value in enumerate(known))
            + "}\n"
        )
    outputs = ", ".join(f'"=&r"(z[{i}])' for i in range(len(known)))
    return f'{start}  asm("{numbered(assembly)}" : {outputs} : "r"(pairs));\n}}\n'
