"""The same unpacking as unpack_assembly.py by shifts and masks, for Triton's interpreter.

Results are tuples or joined tensors in the assembly's output order: 4 and 8 bit (h, r3, k0), 3 bit
(p, k0) for the pairs p of formats/weight_layout.py, k0 fastest. z: the zeros of rows r3 = 0 and 1.
"""

# mypy: ignore-errors
# ruff: noqa: SIM300
# (A Triton body is not Python: values change type as it is traced; DT is no constant.)
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def join8(a, b, c, d, e, f, g, h):
    """Eight tensors [...] to [..., 2, 2, 2], the first varying fastest along the first new axis."""
    low = tl.join(tl.join(a, b), tl.join(c, d))
    return tl.join(low, tl.join(tl.join(e, f), tl.join(g, h)))


@triton.jit
def join32(o):
    """Thirty-two tensors to five new axes, as `join8`."""
    a = join8(o[0], o[1], o[2], o[3], o[4], o[5], o[6], o[7])
    b = join8(o[8], o[9], o[10], o[11], o[12], o[13], o[14], o[15])
    c = join8(o[16], o[17], o[18], o[19], o[20], o[21], o[22], o[23])
    d = join8(o[24], o[25], o[26], o[27], o[28], o[29], o[30], o[31])
    return tl.join(tl.join(a, b), tl.join(c, d))


@triton.jit
def _code(word, shift: tl.constexpr, mask: tl.constexpr, zero, DT: tl.constexpr):
    return (((word >> shift) & mask).to(tl.float32) - zero).to(DT)


@triton.jit
def interpret4(w, z, DT: tl.constexpr):
    """(h, r3, k0) of a 4-bit word by shifts and masks."""
    a, b = _code(w, 0, 15, z[0], DT), _code(w, 16, 15, z[0], DT)
    c, d = _code(w, 4, 15, z[1], DT), _code(w, 20, 15, z[1], DT)
    e, f = _code(w, 8, 15, z[0], DT), _code(w, 24, 15, z[0], DT)
    return join8(a, b, c, d, e, f, _code(w, 12, 15, z[1], DT), _code(w, 28, 15, z[1], DT))


@triton.jit
def interpret8(high, low, z, DT: tl.constexpr):
    """(h, r3, k0) of the words of the high and the low nibble plane."""
    out = ()
    for i in tl.static_range(4):
        for k0 in tl.static_range(2):
            shift: tl.constexpr = 4 * i + 16 * k0
            code = ((high >> shift) & 15) * 16 + ((low >> shift) & 15)
            out = out + ((code.to(tl.float32) - z[i % 2]).to(DT),)
    return join8(out[0], out[1], out[2], out[3], out[4], out[5], out[6], out[7])


@triton.jit
def interpret3(words, z, DT: tl.constexpr):
    """(p, k0) of three words, as a tuple of 32."""
    out = ()
    for p in tl.static_range(16):
        for k0 in tl.static_range(2):
            if p < 15:
                code = (words[p // 5] >> (16 * k0 + 3 * (p % 5))) & 7
            else:
                code = (words[0] >> (16 * k0 + 15)) & 1
                code += ((words[1] >> (16 * k0 + 15)) & 1) * 2
                code += ((words[2] >> (16 * k0 + 15)) & 1) * 4
            out = out + ((code.to(tl.float32) - z[p % 2]).to(DT),)
    return out
