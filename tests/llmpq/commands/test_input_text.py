"""A text file that cannot be read: one sentence with the flag, the file and the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmpq.commands.input_text import text_of

pytestmark = pytest.mark.pure


def test_why_a_text_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    for content, why in ((None, "No such file or directory"), (b"a\xff", "it is not UTF-8 text: ")):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ValueError) as error:
            text_of("--text", path)
        assert str(error.value).startswith(f"--text '{path}' cannot be read: {why}")
        assert str(error.value).count("text.txt") == 1
    with pytest.raises(ValueError, match="cannot be read: Is a directory"):
        text_of("--text", tmp_path)
    path.write_text("é")
    assert text_of("--text", path) == "é"
