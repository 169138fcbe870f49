"""Compile a Triton kernel to a cubin for a listed architecture, on a machine without a GPU."""

from __future__ import annotations

import ast
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

ARCHITECTURES = (80, 86, 89, 90, 100)
"""sm_80 A100, sm_86 A10/3090, sm_89 L4/4090, sm_90 H100/H200, sm_100 B200."""

CONSUMER_BLACKWELL = 120
"""RTX 5090: weight kernels are compiled for it, too."""

# Shared memory a block may use, in bytes (CUDA C programming guide, "maximum amount of shared
# memory per thread block").
SHARED_LIMIT = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}


@dataclass(frozen=True)
class Compiled:
    """What the compiler made: machine code, PTX and the resources it asks for."""

    cubin: bytes
    ptx: str
    shared_bytes: int

    def machine_code(self) -> str:
        """Return the cubin's listing; Triton's own stops at the first 64 KiB."""
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.cubin)
            file.flush()
            words = [triton.knobs.nvidia.nvdisasm.path, "-c", file.name]
            return subprocess.run(words, capture_output=True, text=True, check=True).stdout


def compile_kernel(
    kernel: Any,
    arch: int,
    arguments: Mapping[str, str],
    constants: Mapping[str, Any],
    *,
    aligned: tuple[str, ...] = (),
    options: Mapping[str, Any] | None = None,
) -> Compiled:
    """Compile a Triton or Gluon `kernel` for sm_`arch`.

    `arguments` maps run-time arguments to Triton types ("*fp16", "i32"), `constants` the
    constexpr ones to values; `aligned` names pointers and sizes divisible by 16, as a launch with
    real tensors would find them to be.
    """
    names = kernel.arg_names
    signature = {name: arguments.get(name, "constexpr") for name in names}
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    form = GluonASTSource if kernel.is_gluon() else ASTSource
    source = form(fn=kernel, signature=signature, constexprs=dict(constants), attrs=attrs)
    target = GPUTarget("cuda", arch, 32)
    made = triton.compile(source, target=target, options=dict(options or {}))
    assert not (apart := lanes_apart(made.asm["ttgir"])), f"Triton 3.6 reduces wrongly: {apart}"
    return Compiled(
        cubin=made.asm["cubin"],
        ptx=made.asm["ptx"],
        shared_bytes=made.metadata.shared,
    )


LAYOUT = re.compile(r"^(#linear\d*) = #ttg\.linear<\{register = .*?, lane = (.*?), warp", re.M)
REDUCTION = re.compile(
    r"\"tt\.reduce\"\(.*?<\{axis = (\d+).*?^ *\}\) : \(tensor<(.*?)>[,)]", re.M | re.S
)
SLICE = re.compile(r"#ttg\.slice<\{dim = (\d+), parent = (.*)\}>$")


def lanes_apart(ttgir: str) -> list[str]:
    """Return the types of operands whose reduced axis lies over lanes not next to each other.

    Triton 3.6 takes them to be neighbours (its first lane's distance, then powers of two) and
    reduces others without a word; later versions are right. Other layouts than #linear have
    neighbours only.
    """
    lanes = {name: ast.literal_eval(bases) for name, bases in LAYOUT.findall(ttgir)}
    found = []
    for axis, operand in REDUCTION.findall(ttgir):
        layout, own = operand.split(", ", 1)[1], int(axis)
        dropped = []
        while at := SLICE.match(layout):
            dropped.append(int(at[1]))
            layout = at[2]
        for dim in dropped:
            own += own >= dim
        on_axis = [bool(base[own]) for base in lanes.get(layout, [])]
        if sum(on_axis) > 1 and not all(on_axis[on_axis.index(True) :][: sum(on_axis)]):
            found.append(operand)
    return found
