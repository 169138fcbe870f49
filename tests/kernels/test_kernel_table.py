"""The table of kernels: every form is multiplied everywhere, by files that are there."""

from pathlib import Path

import pytest

from llmpq.devices.device_spec import device_specs
from llmpq.kernels import kernel_table
from llmpq.kernels.kernel_table import (
    CPU_LEVELS,
    HELP,
    TABLE,
    Kernel,
    KernelForm,
    cpu,
    eligible,
    gpu,
)

pytestmark = pytest.mark.pure

KERNELS = Path(kernel_table.__file__).resolve().parent
CARDS = [gpu(c) for c in ((6, 0), (7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))]
CPUS = [cpu(level) for level in CPU_LEVELS]
ROWS = (1, 2, 8, 9, 16, 17, 32, 33, 64, 65, 256, 257, 4096)
WORDS = {
    KernelForm.WORDS,
    KernelForm.WORDS_BF16_ZEROS,
    KernelForm.PARTS,
    KernelForm.PARTS_3,
    KernelForm.MXFP4,
    KernelForm.NVFP4,
    KernelForm.LOOKED_UP,
}
HOPPER_ONLY = {form for form in KernelForm if form.name.startswith(("ATOM_TILES", "ATOM_INTEGER"))}
EXPERTS = {form for form in KernelForm if form.name.startswith("EXPERTS")}
ON_CPUS = {
    KernelForm.WORDS,
    KernelForm.PARTS,
    KernelForm.PARTS_3,
    KernelForm.ROWS,
    KernelForm.FP8_ROWS,
    KernelForm.E2M1_ROWS,
    KernelForm.CODEBOOK_ROWS,
    KernelForm.ATOM,
    KernelForm.ATOM_OTHER,
    KernelForm.DENSE,
}


@pytest.mark.parametrize("rows", ROWS)
def test_every_form_is_multiplied_wherever_it_may_be(rows: int) -> None:
    """Without a condition, last of all: what a line needs may fail."""
    for device in CARDS + CPUS:
        for form in KernelForm:
            needed = form in ON_CPUS if device in CPUS else form not in HOPPER_ONLY
            needed = needed or (form in HOPPER_ONLY and device == gpu((9, 0)))
            needed = needed and (form not in EXPERTS or device >= gpu((8, 0)))
            lines = kernel_table.lines_of(form, device, rows)
            assert not needed or lines, (form, device)
            assert not needed or not lines[-1].needs, (form, device)


def test_files_and_words_are_there() -> None:
    assert {line.file for line in TABLE if not (KERNELS / line.file).is_file()} == set()
    assert {line.kernel for line in TABLE} == set(Kernel) == set(HELP)


def test_kernels_by_device_and_rows() -> None:
    """What was measured to be right: gemm/README and the rows that constants name."""
    hopper, ada, turing = gpu((9, 0)), gpu((8, 9)), gpu((7, 5))
    few = (Kernel.GEMV, Kernel.RING_GEMV, Kernel.SPLITK_GEMM)
    assert eligible(KernelForm.WORDS, hopper, 1)[:3] == few
    assert Kernel.RING_GEMV not in eligible(KernelForm.WORDS, ada, 1)
    assert Kernel.GEMV not in eligible(KernelForm.WORDS_BF16_ZEROS, hopper, 3)
    assert eligible(KernelForm.WORDS, hopper, 257)[0] is Kernel.WGMMA_GEMM
    assert eligible(KernelForm.NVFP4, hopper, 257) == (Kernel.DEQUANTIZE,)
    assert Kernel.SPLITK_GEMM not in eligible(KernelForm.LOOKED_UP, hopper, 65)
    assert Kernel.SPLITK_GEMM in eligible(KernelForm.LOOKED_UP, ada, 65)
    assert eligible(KernelForm.WORDS, ada, 257) == (Kernel.DEQUANTIZE,)
    few, made = Kernel.CUDA_GEMV, Kernel.CUDA_DEQUANTIZE
    assert eligible(KernelForm.WORDS, turing, 1) == (few, made, Kernel.DEQUANTIZE)
    assert eligible(KernelForm.PARTS, turing, 1) == (few, made, Kernel.DEQUANTIZE_TORCH)
    assert eligible(KernelForm.MXFP4, turing, 1) == (Kernel.DEQUANTIZE_TORCH,)
    assert eligible(KernelForm.WORDS, gpu((6, 1)), 1) == (Kernel.DEQUANTIZE_TORCH,)
    assert eligible(KernelForm.FP8_WORDS, ada, 8)[0] is Kernel.GEMV
    assert eligible(KernelForm.FP8_WORDS, ada, 9)[0] is Kernel.SPLITK_GEMM
    assert eligible(KernelForm.ATOM_INTEGER, hopper, 257) == (Kernel.INT8_WGMMA,)
    assert eligible(KernelForm.ATOM_TILES, hopper, 257) == (Kernel.FP8_WGMMA,)
    assert eligible(KernelForm.WORDS, cpu("no compiler"), 1) == (Kernel.DEQUANTIZE_TORCH,)


@pytest.mark.parametrize("card", CARDS)
def test_plans_count_as_many_packed_rows_as_the_table_has(card: tuple[str, int, int]) -> None:
    spec = device_specs()["T4"].model_copy(update={"capability": f"{card[1]}.{card[2]}"})
    assert (spec.most_packed_rows is None) == (Kernel.GEMV in eligible(KernelForm.WORDS, card, 1))
    rows = [m for m in range(200) if Kernel.CUDA_GEMV in eligible(KernelForm.WORDS, card, m)]
    assert (spec.most_packed_rows or 0) == max(rows, default=0)


def test_a_line_is_for_its_kind_of_device_only() -> None:
    for line in TABLE:
        assert line.since[0] == line.before[0] and line.since < line.before
    assert all(line.since[0] == "cpu" for line in kernel_table.device_lines(cpu("avx2")))
