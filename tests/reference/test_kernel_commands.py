"""The flags of benchmarks/kernel_bench.py: a shared check leaves nothing out."""

from __future__ import annotations

import pytest

from reference.kernel_commands import check_gemm, share

pytestmark = pytest.mark.pure


def test_parts_make_up_the_whole() -> None:
    parts = [list(share(range(17), check_gemm().read(["--part", f"{i}/4"]).part)) for i in range(4)]
    assert sorted(sum(parts, [])) == list(range(17))
    assert list(share(range(17), check_gemm().read([]).part)) == list(range(17))


@pytest.mark.parametrize("text", ["4/4", "1", "a/2", "-1/2", "1/0"])
def test_a_part_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=rf"--part: got '{text}', expected I/N"):
        check_gemm().read([f"--part={text}"])
