"""The weight kernels' assembly, executed instruction by instruction on the CPU, against the codes.

The interpreter tier replaces the assembly and only a GPU runs it, so this is where a wrong mask,
magic number or constant is seen without one: all codes, all zeros, both dtypes.
"""

import itertools
import re

import numpy as np
import pytest
import torch

from llmpq.kernels.gemm import unpack_assembly as texts

pytestmark = pytest.mark.cpu


def _halves(words, kind):
    bits = words.astype(np.uint32).view(np.uint16).reshape(-1, 2)
    if kind == "f16x2":
        return bits.view(np.float16).astype(np.float64)
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def _words(values, kind):
    if kind == "f16x2":
        bits = values.astype(np.float16).view(np.uint16)
    else:
        bits = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    return np.ascontiguousarray(bits).view(np.uint32).reshape(-1)


def _permute_bytes(a, b, selector):
    pool = [(source >> 8 * i) & 255 for source in (a, b) for i in range(4)]
    return sum(pool[selector >> 4 * i & 7] << np.uint32(8 * i) for i in range(4))


def execute(text, inputs, outputs):
    """Run `text`; inputs are uint32 arrays of operands $outputs.., returns {operand: values}."""
    registers = {f"${outputs + i}": value for i, value in enumerate(inputs)}
    size = len(inputs[0])

    def get(name):
        if name.startswith("0x") or name.isdigit():
            return np.full(size, int(name, 0), np.uint32)
        return registers[name]

    for line in text.strip("{}").replace("{$", "$").replace("},", ",").split(";"):
        line = line.strip().lstrip("{").strip()
        if not line or line.startswith(".reg"):
            continue
        name, _, rest = line.partition(" ")
        operands = re.split(r",\s*", rest.strip())
        target, *sources = operands
        operation, kind = name.split(".")[0], name.split(".")[-1]
        if operation == "mov" and len(operands) == 3:  # {low, high}, pair
            pair = get(operands[2])
            registers[operands[0]], registers[operands[1]] = pair & 0xFFFF, pair >> 16
            continue
        values = [get(source) for source in sources]
        if operation == "mov":
            result = values[0]
        elif operation == "shr":
            result = values[0] >> values[1]
        elif operation == "shl":
            result = values[0] << values[1]
        elif operation == "and":
            result = values[0] & values[1]
        elif operation == "or":
            result = values[0] | values[1]
        elif operation == "lop3":
            assert sources[3] == "0xea"  # (a & b) | c
            result = values[0] & values[1] | values[2]
        elif operation == "prmt":
            result = _permute_bytes(values[0], values[1], int(sources[2], 0))
        elif operation == "cvt":
            assert name == "cvt.rzi.u32.f32"
            result = values[0].view(np.float32).astype(np.uint32)
        elif operation == "sub":
            result = _words(_halves(values[0], kind) - _halves(values[1], kind), kind)
        elif operation == "fma":
            a, b, c = (_halves(v, kind) for v in values)
            result = _words(a * b + c, kind)
        else:
            raise AssertionError(f"unknown instruction {line}")
        registers[target] = result.astype(np.uint32)
    return {name: registers[name] for name in registers if name.startswith("$")}


def _outputs_as_numbers(result, count, kind):
    bits = np.stack([result[f"${i}"] for i in range(count)], 1).astype(np.uint16)
    if kind == "f16x2":
        return bits.view(np.float16).astype(np.float64)
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def _random(shape, high, seed=0):
    return np.random.default_rng(seed).integers(0, high, shape).astype(np.uint32)


def _words_and_rows(bits, codes):
    """Words of codes [cases, outputs] in the order the assembly emits them; the row of each."""
    cases = codes.shape[0]
    if bits == 3:  # (p, k0): p = 5 word + field, the last pair in the top bits
        words = [np.zeros(cases, np.uint32) for _ in range(3)]
        for p, k0 in itertools.product(range(16), range(2)):
            code = codes[:, 2 * p + k0]
            for i in range(3):
                if p < 15 and p // 5 == i:
                    words[i] |= code << np.uint32(16 * k0 + 3 * (p % 5))
                elif p == 15:
                    words[i] |= (code >> np.uint32(i) & 1) << np.uint32(16 * k0 + 15)
        return words, [o // 2 % 2 for o in range(32)]
    planes = [codes >> 4, codes & 15] if bits == 8 else [codes]
    words = [np.zeros(cases, np.uint32) for _ in planes]
    for word, nibbles in zip(words, planes, strict=True):
        for pair, k0 in itertools.product(range(4), range(2)):
            word |= nibbles[:, 2 * pair + k0] << np.uint32(16 * k0 + 4 * pair)
    return words, [o // 2 % 2 for o in range(8)]


def _unpacked(bits, letter, zeros=None, spoil=lambda text: text):
    """(what the assembly makes, code - zero) for random codes; zeros [cases, 2] or symmetric."""
    kind = {"F": "f16x2", "B": "bf16x2"}[letter]
    outputs = 32 if bits == 3 else 8
    codes = _random((1024 if zeros is None else len(zeros), outputs), 1 << bits)
    words, rows = _words_and_rows(bits, codes)
    inputs, expected_zero = list(words), np.full((len(codes), 2), 1 << bits - 1)
    name = f"{letter}{bits}"
    if zeros is not None:
        makers = {"F3": 6, "B3": 4, "F4": 2, "B4": 2, "F8": 2, "B8": 4}
        maker = getattr(texts, {"B4": "BZ4"}.get(name, f"{letter}Z{bits}")).value
        pair = _words(zeros.astype(np.float64), kind)
        made = execute(maker, [pair], makers[name])
        inputs += [made[f"${i}"] for i in range(makers[name])]
        expected_zero, name = zeros, name + "Z"
    result = execute(spoil(getattr(texts, name).value), inputs, outputs)
    expected = codes.astype(np.int64) - expected_zero[:, rows]
    return _outputs_as_numbers(result, outputs, kind), expected


@pytest.mark.parametrize("bits,letter", itertools.product((3, 4, 8), "FB"))
def test_symmetric_codes(bits, letter):
    got, expected = _unpacked(bits, letter)
    assert np.array_equal(got, expected)


@pytest.mark.parametrize("bits,letter", itertools.product((3, 4, 8), "FB"))
def test_every_zero_is_exact(bits, letter):
    both = np.arange(1 << bits)
    zeros = np.stack([np.repeat(both, 4), np.repeat(both[::-1], 4)], 1).astype(np.int64)
    got, expected = _unpacked(bits, letter, zeros)
    assert np.array_equal(got, expected)


@pytest.mark.parametrize("old,new", [("0x000f000f", "0x00070007"), ("0x64086408", "0x64076407")])
def test_a_wrong_mask_or_constant_is_seen(old, new):
    got, expected = _unpacked(4, "F", spoil=lambda text: text.replace(old, new))
    assert not np.array_equal(got, expected)
