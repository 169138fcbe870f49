"""Words of tables compile for every listed architecture; shared memory fits, operands stay."""

import pytest

pytest.importorskip("triton")
from llmpq.kernels.formats.table_weight import Values  # noqa: E402
from llmpq.kernels.gemm.float_codes.table_tile import (  # noqa: E402
    lookup_assembly,
    table_tile_kernel,
    table_words_kernel,
)
from llmpq.kernels.gemm.float_codes.table_tile_launch import (  # noqa: E402
    BLOCKS,
    WARPS,
    has_mma_sync,
    tile_of,
)
from llmpq.kernels.tools.cubin import (  # noqa: E402
    ARCHITECTURES,
    CONSUMER_BLACKWELL,
    SHARED_LIMIT,
    compile_kernel,
)
from llmpq.kernels.tools.machine_code import overwritten, product_loops  # noqa: E402

pytestmark = pytest.mark.compile
NUMBERS = ("M", "N", "K", "blocks", "groups", "split")
POINTERS = {
    "P": "*i32",
    "S": "*i32",
    "T": "*fp32",
    "F": "*fp32",
    "PARTIAL": "*fp32",
    "ARRIVED": "*i32",
}
FORMS = {"mxfp4": (0, None), "nvfp4": (8, None), "nf4": (2, Values.NF4), "iq4": (4, Values.IQ4)}


def build(kernel, arch, form, dtype, own, **options):
    parts, values = FORMS[form]
    kind = "f16" if dtype == "fp16" else "bf16"
    constants = {"PARTS": parts, "EVEN_K": True, "INTERPRET": False} | own
    for half in range(2):
        text = "" if values is None else lookup_assembly(values.table, kind, half)
        constants[f"ASM{half}"] = text
    kinds = POINTERS | dict.fromkeys(NUMBERS, "i32")
    kinds |= dict.fromkeys(("X", "Y", "BIAS", "RESIDUAL", "OUT"), f"*{dtype}")
    given = {n: kinds[n] for n in kernel.arg_names if n in kinds and n not in constants}
    aligned = tuple(n for n, t in given.items() if t.startswith("*") or n in ("N", "K"))
    made = compile_kernel(kernel, arch, given, constants, aligned=aligned, options=options)
    assert made.cubin and made.shared_bytes <= SHARED_LIMIT[arch]
    return made


def product(arch, form, dtype, rows):
    tile = tile_of(rows)
    own = {
        "HAS_BIAS": True, "HAS_RESIDUAL": True, "SPLIT": rows <= 64, "BH": BLOCKS, "WM": WARPS,
        "BM": tile.bm, "STAGES": tile.stages, "PDL": arch >= 90,
        "KWIDTH4": has_mma_sync(divmod(arch, 10)),
    }  # fmt: skip
    options = {"num_warps": WARPS, "num_stages": tile.stages}
    return build(table_tile_kernel, arch, form, dtype, own, **options)


@pytest.mark.parametrize("arch", (*ARCHITECTURES, CONSUMER_BLACKWELL))
@pytest.mark.parametrize("form", FORMS)
def test_everything_compiles(arch, form):
    for dtype, rows in (("bf16", 8), ("fp16", 32), ("bf16", 128)):
        product(arch, form, dtype, rows)
    build(table_words_kernel, arch, form, "bf16", {"BH": 1, "WM": 2}, num_warps=2)


@pytest.mark.parametrize("rows", [16, 32, 64, 128])
@pytest.mark.parametrize("form", FORMS)
def test_products_in_flight_keep_their_operands(form, rows):
    code = product(90, form, "bf16", rows).machine_code()
    assert product_loops(code) and overwritten(code) == []
    assert code.count("STL") <= 16, "a few addresses may go by memory"
