"""Attention by a `ScoreRule` compiles for every listed architecture with the tiles it chooses."""

import pytest

from llmpq.kernels.kv import ruled_attend

pytest.importorskip("triton")
from reference.cubin import ARCHITECTURES, SHARED_LIMIT, compile_kernel  # noqa: E402

pytestmark = pytest.mark.compile
POINTERS = {
    "slots": "*i64", "starts": "*i64", "counts": "*i64", "sinks": "*bf16", "part_ptr": "*fp32",
    "lse_ptr": "*fp32",
}  # fmt: skip
SCALARS = dict.fromkeys(
    ("window", "slot_stride", "head_stride", "token_stride", "Q", "chunks", "splits"), "i32"
)
KINDS = {
    "gpt-oss": {"H": 64, "G": 8, "D": 64, "CAPPED": False, "SINKS": True},
    "gemma-2": {"H": 16, "G": 8, "D": 256, "CAPPED": True, "SINKS": False},
    "phi": {"H": 24, "G": 8, "D": 96, "CAPPED": False, "SINKS": False},
    "deepseek": {"H": 128, "G": 1, "D": 576, "CAPPED": False, "SINKS": False},
}


def build(arch, kind, *, rows, dtype="bf16", split=False):
    """Compile for `rows` rows of a key/value head."""
    constants = dict(KINDS[kind])
    dim, latent = constants["D"], kind == "deepseek"
    value_dim = 512 if latent else dim
    item, limit = 4 if dtype == "fp32" else 2, SHARED_LIMIT[arch]
    tiles = ruled_attend.choose_tiles(dim, item, rows, latent=latent, block=limit)
    main, rest = ruled_attend.halves(dim)
    constants |= {
        "V": value_dim, "MAIN": main, "REST": rest, "PADDED": 1 << (value_dim - 1).bit_length(),
        "R": tiles.rows, "N": tiles.keys, "STAGES": tiles.stages, "SPLIT": split,
        "LATENT": latent, "PDL": arch >= 90,
    }  # fmt: skip
    typed = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), f"*{dtype}")
    arguments = {**typed, **POINTERS, "scale": "fp32", "cap": "fp32", **SCALARS}
    kernel = ruled_attend.ruled_attend_kernel
    arguments = {name: arguments[name] for name in kernel.arg_names if name in arguments}
    aligned = tuple(n for n, t in arguments.items() if t.startswith("*") or "stride" in n)
    options = {"num_warps": tiles.warps}
    made = compile_kernel(kernel, arch, arguments, constants, aligned=aligned, options=options)
    assert made.shared_bytes <= limit
    return made


NARROW = ("gpt-oss", "phi")
SMALLEST = 89
"""Of the least shared memory; one kind is compiled everywhere, the others there and for Hopper."""


@pytest.mark.thin(apart=True)
@pytest.mark.parametrize(
    ("arch", "kind"),
    [
        pytest.param(a, k, marks=[pytest.mark.seldom] if k == "phi" else [])
        for a in ARCHITECTURES
        for k in KINDS
        if k == "gpt-oss" or a in (SMALLEST, 90)
    ],
)
def test_decoding_and_prompts_compile_everywhere(arch, kind):
    assert build(arch, kind, rows=8, split=True).cubin
    assert build(arch, kind, rows=4096).cubin


@pytest.mark.parametrize(
    "kind", ["gemma-2", "deepseek", *(pytest.param(k, marks=pytest.mark.seldom) for k in NARROW)]
)
def test_float32_compiles_within_the_smallest_card(kind):
    assert build(SMALLEST, kind, rows=4096, dtype="fp32").cubin
