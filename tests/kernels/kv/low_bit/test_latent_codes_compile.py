"""Attention over packed latents compiles for every listed architecture; shared memory fits."""

import pytest

pytest.importorskip("triton")
from llmpq.kernels.kv.low_bit.latent_codes import LOOK, WARPS  # noqa: E402
from llmpq.kernels.kv.paged import packed_latent_append, packed_latent_pages  # noqa: E402
from llmpq.kernels.kv.paged.packed_pages_plan import WORD_K_WIDTH  # noqa: E402
from reference.cubin import (  # noqa: E402
    ARCHITECTURES,
    CONSUMER_BLACKWELL,
    SHARED_LIMIT,
    compile_kernel,
)

pytestmark = pytest.mark.compile
KINDS = (
    dict.fromkeys(("k_words", "v_words", "table", "slots", "starts", "counts"), "*i32")
    | dict.fromkeys(("k_params", "v_params"), "*fp16")
    | dict.fromkeys(("part_ptr", "lse_ptr"), "*fp32")
    | dict.fromkeys(("table_width", "splits"), "i32")
    | {"scale": "fp32", "rows": "*i32", "to_ptr": "*fp32", "q_ptr": "*fp16"}
    | dict.fromkeys(("num_rows", "columns", "stride"), "i32")
)


def seldom(case):
    """In `make test-all` only: its like is in `make test`."""
    return pytest.param(*case, marks=pytest.mark.seldom)


SHAPE = {"D": 576, "C": 576, "BITS": 4}
FEWER = pytest.mark.parametrize("channels", [192, pytest.param(576, marks=pytest.mark.seldom)])
"""Of latents: every channel is in the code by itself, of 576 a compiler needs six times longer."""


def fits(made, arch, channels):
    """Whether memory is enough for 576 channels: what a row of queries needs grows as they do."""
    return made.cubin and made.shared_bytes * 576 <= SHARED_LIMIT[arch] * channels


def compiled(kernel, arch, constants, warps):
    names = [name for name in kernel.arg_names if name not in constants]
    given = {name: KINDS.get(name, "*bf16") for name in names}
    aligned = tuple(name for name, kind in given.items() if kind.startswith("*"))
    options = {"num_warps": warps}
    return compile_kernel(kernel, arch, given, constants, aligned=aligned, options=options)


@pytest.mark.thin
@pytest.mark.parametrize("arch", (*ARCHITECTURES, CONSUMER_BLACKWELL))
@pytest.mark.parametrize(
    ("kernel", "own"),
    [
        (packed_latent_append.append_ring, {"D": 576, "PADDED": 1024}),
        (packed_latent_append.make_scales, SHAPE | {"ROWS": 64, "PADDED": 1024, "TAIL": 17}),
        (packed_latent_append.make_words, SHAPE | {"ROWS": 64, "PIECES": 18}),
        (packed_latent_append.keep_rings, {"D": 576, "PADDED": 1024}),
    ],
)
def test_what_a_pool_keeps_is_made(arch, kernel, own):
    made = compiled(kernel, arch, own, 8)
    assert made.cubin and made.shared_bytes <= SHARED_LIMIT[arch]


@FEWER
@pytest.mark.parametrize(
    ("arch", "chunks"), [(90, True), *map(seldom, ((86, False), (80, True), (90, False)))]
)
def test_a_pool_fits(arch, chunks, channels):
    constants = {
        "D": channels,
        "C": channels,
        "BITS": 4,
        "H": 16,
        "V": channels - 64,
        "R": 16,
        "HEADS": 16,
        "CHUNKS": chunks,
        "ROWS": 64,
        "LOOK": LOOK,
        "KW": WORD_K_WIDTH,
        "EMULATE": False,
    }
    assert fits(compiled(packed_latent_pages.attend, arch, constants, WARPS), arch, channels)
