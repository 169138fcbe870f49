"""Reads Hopper machine code (SASS): loops around wgmma, and operands overwritten while it reads.

Knows no kernel. wgmma is asynchronous: a register operand must stay until a wait says that it was
read. Compilers forget this now and then, and the sums are wrong on some runs only (Triton 3.6,
3.9); here it shows without a GPU.
"""

from __future__ import annotations

import re

Instruction = tuple[str, str]
"""Operation and operands."""


def product_loops(code: str) -> list[list[Instruction]]:
    """Return the bodies of the innermost loops around wgmma in nvdisasm's listing."""
    listing: list[Instruction] = []
    labels: dict[str, int] = {}
    loops = []
    for line in code.splitlines():
        label = re.match(r"\s*(\.L\w+):", line)
        instruction = re.match(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\d+ +)?([^ ;]+) *([^;]*?) *;", line)
        if label:
            labels[label[1]] = len(listing)
        elif instruction:
            listing.append((instruction[1], instruction[2]))
            target = re.search(r"\.L\w+", instruction[2])
            if instruction[1].startswith("BRA") and target and target[0] in labels:
                body = listing[labels[target[0]] : -1]
                names = " ".join(name for name, _ in body)
                if "HGMMA" in names and "UTMASTG" not in names:
                    loops.append(body)
    return loops


def overwritten(code: str) -> list[str]:
    """Return the loops' instructions that write a register which wgmma in flight still reads."""
    return [found for body in product_loops(code) for found in _overwritten(body * 3)]


def _overwritten(listing: list[Instruction]) -> list[str]:
    found: list[str] = []
    flight: list[set[int]] = []
    current: set[int] = set()
    for name, operands in listing:
        registers = [int(r) for r in re.findall(r"\bR(\d+)\b", operands)]
        if name.startswith("HGMMA"):
            current |= set(range(registers[1], registers[1] + 4))
            if "gsb0" in operands:
                flight.append(current)
                current = set()
        elif name == "WARPGROUP.DEPBAR.LE":
            left = int(operands.split(",")[1], 16)
            flight = flight[max(0, len(flight) - left) :]
        elif operands.startswith("R") and registers:
            width = 4 if ".128" in name else 2 if ".64" in name or "WIDE" in name else 1
            if set(range(registers[0], registers[0] + width)) & current.union(*flight):
                found.append(f"{name} {operands}")
    return found
