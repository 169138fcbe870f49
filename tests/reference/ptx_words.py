"""Runs the PTX that takes words apart, instruction by instruction, on arrays of words."""

import re

import numpy as np
import torch


def floats(words, kind):
    """Return words as rows of two numbers."""
    bits = words.astype(np.uint32).view(np.uint16).reshape(-1, 2)
    if kind == "f16":
        return bits.view(np.float16).astype(np.float64)
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def pairs(values, kind):
    """Return rows of two numbers as words, rounded."""
    dtype = torch.float16 if kind == "f16" else torch.bfloat16
    bits = torch.from_numpy(values).to(dtype).view(torch.int16).numpy()
    return np.ascontiguousarray(bits).view(np.uint32).reshape(-1)


def _bytes_of(a, b, selector):
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    at = [np.uint64(8 * (selector >> 4 * i & 7)) for i in range(4)]
    return sum((both >> at[i] & np.uint64(255)) << np.uint64(8 * i) for i in range(4))


def _logic(a, b, c, table):
    """Bit i of the table is what bits a, b, c of i = 4 a + 2 b + c give."""
    found = np.zeros_like(a)
    for i in range(8):
        if int(table[0]) >> i & 1:
            own = [v if i >> 2 - n & 1 else ~v for n, v in enumerate((a, b, c))]
            found |= own[0] & own[1] & own[2]
    return found


def execute(text, inputs, outputs):
    """Run PTX on uint32 arrays; inputs are operands $outputs.. and on; returns the outputs."""
    registers = {f"${outputs + i}": value for i, value in enumerate(inputs)}

    def get(name):
        fixed = name.startswith("0x") or name.isdigit()
        return np.full(len(inputs[0]), int(name, 0), np.uint32) if fixed else registers[name]

    for line in re.split(r";", text.strip("{}").replace("{$", "$").replace("},", ",")):
        name, _, rest = line.strip().lstrip("{").partition(" ")
        if not name or name == ".reg":
            continue
        target, *sources = re.split(r",\s*", rest.strip())
        operation, kind = name.split(".")[0], name.split(".")[-1].removesuffix("x2")
        if operation == "mov" and len(sources) == 2:
            registers[target] = get(sources[1]) & 0xFFFF
            registers[sources[0]] = get(sources[1]) >> 16
            continue
        if operation == "prmt":
            registers[target] = _bytes_of(
                get(sources[0]), get(sources[1]), int(sources[2], 0)
            ).astype(np.uint32)
            continue
        values = [get(source) for source in sources]
        if operation in ("sub", "mul", "fma"):
            a, b, *c = (floats(v, kind) for v in values)
            number = a - b if operation == "sub" else a * b + c[0] if c else a * b
            registers[target] = pairs(number, kind)
            continue
        registers[target] = {
            "mov": lambda a: a,
            "shr": lambda a, b: a >> b,
            "shl": lambda a, b: a << b,
            "and": lambda a, b: a & b,
            "or": lambda a, b: a | b,
            "lop3": _logic,
            "cvt": lambda a: a.view(np.float32).astype(np.uint32),
        }[operation](*values).astype(np.uint32)
    return [registers[f"${i}"] for i in range(outputs)]
