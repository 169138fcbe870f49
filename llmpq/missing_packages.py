"""Install hints for a missing package: the extra of llmpq that installs it.

A plain `pip install` plans; running, serving and measuring import what the extras `run`, `serve`,
`gpu` and others bring. Standard library only.

    pip install 'llmpq[run]'        # adds to the llmpq that is installed, from source or not
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Sequence

_DISTRIBUTIONS = {"sklearn": "scikit-learn", "yaml": "PyYAML"}
"""Packages that are imported by another name than they are installed by."""


def require_modules(*names: str) -> None:
    """Raise `ModuleNotFoundError` for the first module that is not installed; imports none.

    For commands whose child processes import them: there the error would be a traceback.
    """
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)


def missing_package(error: ModuleNotFoundError, extras: Sequence[str] = ("run",)) -> str | None:
    """Return the sentence for a module that is not installed; None if it is one of llmpq's own.

    `extras`: those that the command needs as a whole, so that one command line installs them all.
    """
    module = (error.name or "").partition(".")[0]
    if module in ("", "llmpq"):
        return None
    package = _DISTRIBUTIONS.get(module, module)
    owners = _extras_with(package)
    if not owners:
        return f"{package} is not installed; add it with: pip install {package}"
    wanted = extras if set(owners) & set(extras) else owners[:1]
    return f"{package} is not installed; add it with: pip install 'llmpq[{','.join(wanted)}]'"


def _extras_with(package: str) -> list[str]:
    """Return the extras of llmpq that require a package, in the order of pyproject.toml."""
    try:
        required = importlib.metadata.requires("llmpq") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    found = []
    for line in required:
        name = re.match(r"[A-Za-z0-9._-]+", line)
        extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)['\"]", line)
        if name and extra and _normalized(name[0]) == _normalized(package):
            found.append(extra[1])
    return found


def _normalized(name: str) -> str:
    """Return a distribution's name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()
