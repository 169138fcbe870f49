"""Files of a model directory, each written whole or not at all.

What the system refuses is one sentence: the file, what it takes, what to do. A full disk's own
error names no file, or the one that was read; safetensors' is no `OSError` either.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from llmpq.commands.output_paths import cannot_write
from llmpq.file_form import NO_SPACE
from llmpq.units import format_size

_REFUSED = re.compile(r"I/O error: (.*) \(os error ([0-9]+)\)")
"""How safetensors words what the system refused."""


def write_tensors(
    tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str], *, remedy: str
) -> None:
    """Write a safetensors file; `ValueError` ends with the remedy."""
    size = sum(tensor.nbytes for tensor in tensors.values())
    with _whole(path, size, remedy) as unfinished:
        # safetensors makes files that only their owner reads, whatever the umask says.
        unfinished.touch()
        mode = unfinished.stat().st_mode
        try:
            save_file(dict(tensors), unfinished, metadata={"format": "pt", **metadata})
        except SafetensorError as error:
            refused = _REFUSED.search(str(error))
            if refused is None:
                raise
            raise OSError(int(refused[2]), refused[1]) from None
        unfinished.chmod(mode)


def write_text(text: str, path: Path, *, remedy: str) -> None:
    """Write a text file; `ValueError` ends with the remedy."""
    write_bytes(text.encode(), path, remedy=remedy)


def write_bytes(content: bytes, path: Path, *, remedy: str) -> None:
    """Write a file; `ValueError` ends with the remedy."""
    with _whole(path, len(content), remedy) as unfinished:
        unfinished.write_bytes(content)


@contextmanager
def _whole(path: Path, size: int, remedy: str) -> Iterator[Path]:
    """Yield the path to write to; what was written gets its name at the end, or is taken away."""
    unfinished = path.with_name(path.name + ".unfinished")
    try:
        yield unfinished
        unfinished.replace(path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise ValueError(
            f"{cannot_write(path, error)}{_lack(path, error, size)}; {remedy}"
        ) from None
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def _lack(path: Path, error: OSError, size: int) -> str:
    """Return what a full disk lacks; nothing where the system refused something else."""
    if error.errno not in NO_SPACE:
        return ""
    free = shutil.disk_usage(path.parent).free
    return f" ({format_size(size)} to write, {format_size(free)} free)"
