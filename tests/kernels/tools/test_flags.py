"""`python -m llmpq.kernels`: a shared check leaves nothing out; help needs no torch."""

from __future__ import annotations

import pytest

from llmpq.kernels.__main__ import main
from llmpq.kernels.tools.flags import COMMANDS, check_kv, share

pytestmark = pytest.mark.pure


def test_parts_make_up_the_whole() -> None:
    parts = [list(share(range(17), check_kv().read(["--part", f"{i}/4"]).part)) for i in range(4)]
    assert sorted(sum(parts, [])) == list(range(17))
    assert list(share(range(17), check_kv().read([]).part)) == list(range(17))


@pytest.mark.parametrize("text", ["4/4", "1", "a/2", "-1/2", "1/0"])
def test_a_part_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=rf"--part: got '{text}', expected I/N"):
        check_kv().read([f"--part={text}"])


@pytest.mark.parametrize("words", [["bench"], ["bench", "all"], ["time", "gemm"]])
def test_unknown_commands_name_the_known_ones(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    said = capsys.readouterr().err
    assert all(" ".join(command) in said for command in COMMANDS)
