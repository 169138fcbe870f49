"""A check shared among processes leaves nothing out and does nothing twice."""

import argparse

import pytest

from llmpq.kernels.tools.shared_check import add_part, share


def _part(*words: str) -> tuple[int, int]:
    parser = argparse.ArgumentParser()
    add_part(parser)
    part: tuple[int, int] = parser.parse_args(words).part
    return part


def test_parts_make_up_the_whole():
    parts = [list(share(range(17), _part("--part", f"{i}/4"))) for i in range(4)]
    assert sorted(sum(parts, [])) == list(range(17))
    assert list(share(range(17), _part())) == list(range(17))


@pytest.mark.parametrize("text", ["4/4", "1", "a/2", "-1/2", "1/0"])
def test_a_part_that_is_none_is_refused(text, capsys):
    with pytest.raises(SystemExit):
        _part(f"--part={text}")
    assert f"got {text!r}, expected I/N" in capsys.readouterr().err
