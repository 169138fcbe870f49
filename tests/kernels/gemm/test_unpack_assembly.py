"""The weight kernels' assembly, executed instruction by instruction on the CPU, against the codes.

The interpreter tier replaces the assembly and only a GPU runs it, so this is where a wrong mask,
magic number or constant is seen without one: all codes, all zeros, both dtypes.
"""

import itertools
import re

import numpy as np
import pytest
import torch

from llmpq.kernels.formats.codebooks import Codebook, paired
from llmpq.kernels.gemm.operands import unpack_assembly as texts
from llmpq.kernels.gemm.operands.code_assembly import word_assembly

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
    """A selector's bit 3 asks for the byte's sign instead, eight times."""
    pool = np.stack([(source >> 8 * i) & 255 for source in (a, b) for i in range(4)])
    made = np.zeros_like(a)
    for i in range(4):
        field = selector >> np.uint32(4 * i)
        byte = np.take_along_axis(pool, (field & 7).astype(np.int64)[None], 0)[0]
        byte = np.where(field & 8, (byte >> 7) * 255, byte)
        made |= byte.astype(np.uint32) << np.uint32(8 * i)
    return made


def execute(text, inputs, outputs):
    """Run `text`; inputs are uint32 arrays of operands $outputs.., returns {operand: values}."""
    registers = {f"${outputs + i}": value for i, value in enumerate(inputs)}
    size = len(inputs[0])

    def get(name):
        if name.startswith("0x") or name.isdigit():
            return np.full(size, int(name, 0), np.uint32)
        return registers[name]

    for line in text.strip("{}").replace("{$", "$").replace("},", ",").split(";"):
        line = line.strip().lstrip("}").lstrip("{").strip()
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
            a, b, c = values[:3]
            result = {"0xea": a & b | c, "0xd8": c & b | ~c & a}[sources[3]]
        elif operation == "prmt":
            result = _permute_bytes(*values)
        elif operation == "cvt":
            assert name == "cvt.rzi.u32.f32"
            result = values[0].view(np.float32).astype(np.uint32)
        elif operation == "mul":
            result = _words(_halves(values[0], kind) * _halves(values[1], kind), kind)
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


def _scaled_words(form, bits, kind, cases):
    """Words of random codes, and these codes (h, r3, k0)."""
    codes = _random((cases, 8), 1 << bits, seed=3)
    if form != "parts":
        plane = torch.from_numpy(_words_and_rows(4, codes)[0][0])
        packed = paired(plane.view(torch.int32).view(torch.uint8)).view(torch.int32)
        return [packed.numpy().view(np.uint32)], codes
    return _words_and_rows(bits, codes)[0], codes


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("form", ["nf4", "fp4", "iq4"])
def test_codes_of_tables(form, kind):
    """Exact numbers of the table in 16 bits, times scales that the product rounds once."""
    words, codes = _scaled_words(form, 4, kind, 512)
    scales = np.random.default_rng(1).uniform(0.1, 3, 4).astype(np.float16).astype(np.float64)
    dtype = torch.float16 if kind == "f16" else torch.bfloat16
    whole = torch.from_numpy(scales).to(dtype).double().numpy()
    given = []
    for half in range(2):  # scales of r3, and of bfloat16 what they lack
        for part in (whole, scales - whole)[: 1 if kind == "f16" else 2]:
            given += [np.full(512, v) for v in part[2 * half : 2 * half + 2]]
    pairs = [_words(np.stack((v, v), 1).reshape(-1), f"{kind}x2") for v in given]
    text = word_assembly(form, 4, kind, True, 4)
    made = _outputs_as_numbers(execute(text, [*words, *pairs], 8), 8, f"{kind}x2")
    table = torch.tensor(Codebook(form).values).to(dtype).double().numpy()
    expected = table[codes] * scales[[0, 0, 1, 1, 2, 2, 3, 3]]
    assert (
        np.abs(made - expected).max() <= np.abs(expected).max() * 2.0 ** (-11, -8)[kind == "bf16"]
    )
    assert np.allclose(made, expected, rtol=2.0 ** (-11, -8)[kind == "bf16"], atol=1e-6)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("bits,symmetric", itertools.product((4, 8), (True, False)))
def test_codes_of_small_groups(bits, symmetric, kind):
    """Scales of 1, 2, 4 and 8 and zeros of whole numbers: nothing is rounded."""
    words, codes = _scaled_words("parts", bits, kind, 512)
    zeros = np.array([3, 0, (1 << bits) - 1, 7] if not symmetric else [1 << bits - 1] * 4)
    scales, given = np.array([1.0, 2.0, 4.0, 8.0]), []
    for half in range(2):
        for values in ([] if symmetric else [zeros]) + [scales]:
            given += [np.full(512, float(v)) for v in values[2 * half : 2 * half + 2]]
    pairs = [_words(np.stack((v, v), 1).reshape(-1), f"{kind}x2") for v in given]
    text = word_assembly("parts", bits, kind, symmetric, 4)
    made = _outputs_as_numbers(execute(text, [*words, *pairs], 8), 8, f"{kind}x2")
    rows = [0, 0, 1, 1, 2, 2, 3, 3]
    assert np.array_equal(made, (codes.astype(np.int64) - zeros[rows]) * scales[rows])


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("parts,symmetric", itertools.product((2, 4), (True, False)))
def test_three_bits_of_small_groups(parts, symmetric, kind):
    """A half h of a k-group, whose first and second 32 weights have groups of their own, or one."""
    codes, shares = _random((512, 32), 8, seed=5), parts // 2
    words, rows = _words_and_rows(3, codes)
    zeros = np.array([3, 0, 7, 5][: 2 * shares] if not symmetric else [4] * (2 * shares))
    scales = np.array([1.0, 2.0, 4.0, 8.0])[: 2 * shares]
    given = [np.full(512, float(v)) for v in ([] if symmetric else [*zeros]) + [*scales]]
    pairs = [_words(np.stack((v, v), 1).reshape(-1), f"{kind}x2") for v in given]
    text = word_assembly("parts", 3, kind, symmetric, parts)
    made = _outputs_as_numbers(execute(text, [*words, *pairs], 32), 32, f"{kind}x2")
    own = [2 * (o // 16 if shares == 2 else 0) + row for o, row in enumerate(rows)]
    assert np.array_equal(made, (codes.astype(np.int64) - zeros[own]) * scales[own])
