"""The sum over GPUs compiles for every listed architecture, its words of 64 bits never torn."""

import re

import pytest

from llmpq.kernels.peer_sum import peer_sum_kernel, peer_sum_norm_kernel
from reference.cubin import ARCHITECTURES, compile_kernel

pytestmark = pytest.mark.compile


@pytest.mark.thin
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("kind", ["fp32", "bf16", "fp16", "int"])
def test_words_are_written_and_read_whole(kind, arch):
    arguments = {"part": "*i32", "residual": "*i32", "inboxes": "*i64", "numbers": "*i32"}
    constants = {
        "MEMBER": 1,
        "MEMBERS": 2,
        "CAPACITY": 1 << 16,
        "KIND": kind,
        "WORDS": 64,
        "PROGRAMS": 16,
        "PDL": arch >= 90,
    }
    made = compile_kernel(
        peer_sum_kernel,
        arch,
        arguments | {"num_pieces": "i32"},
        constants,
        aligned=("part", "residual"),
        options={"num_warps": 1},
    )
    whole_words(made)


@pytest.mark.thin
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_rows_that_are_normed_are_too(arch):
    arguments = {name: "*i32" for name in ("part", "residual", "weight", "normed", "numbers")}
    arguments |= {"inboxes": "*i64", "num_rows": "i32", "columns": "i32", "eps": "fp32"}
    constants = {
        "MEMBER": 0,
        "MEMBERS": 2,
        "CAPACITY": 1 << 17,
        "KIND": "bf16",
        "ROW_WORDS": 2048,
        "WORDS": 2048,
        "PDL": arch >= 90,
    }
    aligned = ("part", "residual", "weight", "normed")
    options = {"num_warps": 32}
    whole_words(
        compile_kernel(
            peer_sum_norm_kernel, arch, arguments, constants, aligned=aligned, options=options
        )
    )


def whole_words(made):
    assert made.cubin and "multimem" not in made.ptx
    # Values and number in one access: a part of it must not come later than the rest.
    assert re.search(r"ld\.volatile\.global\.v2\.b64", made.ptx)
    assert re.search(r"st\.global\.v2\.b64", made.ptx)
    assert not re.search(r"ld\.volatile\.global[.a-z0-9]*\.b32", made.ptx)
