"""The CUDA C++ of one form of `ring_gemv.cu`: its constants and unpacking before it."""

from __future__ import annotations

import functools

from llmpq.kernels.gemm.cuda.cuda_text import defined, numbered, part, zero_constants
from llmpq.kernels.gemm.gluon.gluon_unpack import CONSTANTS, plain_text, zero_text
from llmpq.kernels.gemm.ranking.ring_plan import RingForm


@functools.lru_cache(maxsize=256)
def text(form: RingForm) -> str:
    """Return the kernel's whole text."""
    constants = {
        "BITS": form.bits,
        "IS_BF16": int(form.kind == "bf16"),
        "KIND": f'"{form.kind}"',
        "ZEROS": int(form.zeros),
        "GROUPED": int(form.grouped),
        "ZC": len(CONSTANTS.get((form.bits, form.kind), ("",))),
        "NT": form.tiles,
        "W": form.warps,
        "KW": form.parts,
        "RING": form.ring,
        "PHASE": form.phase,
    }
    unpacking = "" if form.bits == 16 else _unpacking(form)
    return defined(constants) + part("shared_parts.cu") + unpacking + part("ring_gemv.cu")


def _unpacking(form: RingForm) -> str:
    """Return device functions from words to pairs of code - zero, and from zeros to constants."""
    constants = CONSTANTS[form.bits, form.kind]
    taken = [f'"r"(z[{i}])' for i in range(len(constants))]
    words = ['"r"(w)', '"r"(v)'] if form.bits == 8 else ['"r"(w)']
    found = ""
    for half in (0, 1):
        assembly = numbered(plain_text(form.bits, form.kind, half=half), pairs=2)
        found += (
            f"__device__ __forceinline__ void unpack{half}(u32 &p, u32 &q, u32 w, u32 v, "
            f'const u32 (&z)[ZC]) {{\n  asm("{assembly}" : "=&r"(p), "=&r"(q) : '
            f"{', '.join(words + taken)});\n}}\n"
        )
    made = zero_text(form.bits, form.kind) if form.zeros else None
    return found + zero_constants(constants, made)
