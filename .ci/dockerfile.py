"""Check the Dockerfile without a daemon: what hadolint would say of it, and that its files exist.

    python3 .ci/dockerfile.py [Dockerfile]

Prints a line for every fault; the exit code is 1 where there is one.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

KNOWN = {
    *("FROM", "ARG", "ENV", "RUN", "COPY", "WORKDIR", "USER", "ENTRYPOINT", "CMD", "EXPOSE"),
    *("LABEL", "VOLUME", "HEALTHCHECK", "STOPSIGNAL", "SHELL"),
}
"""ADD and MAINTAINER are not among them: COPY and LABEL say what they do."""


def instructions(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield (line, instruction, arguments), lines that go on joined, comments left out."""
    number, joined = 0, ""
    for at, line in enumerate(text.splitlines(), start=1):
        if line.lstrip().startswith("#") or (not joined and not line.strip()):
            continue
        number = number if joined else at
        joined += line.rstrip().removesuffix("\\")
        if not line.rstrip().endswith("\\"):
            name, _, arguments = joined.strip().partition(" ")
            yield number, name, " ".join(arguments.split())
            joined = ""
    if joined:
        yield number, "", joined


def faults(text: str, root: Path) -> list[str]:
    """Return what is wrong with a Dockerfile whose context is `root`."""
    found: list[str] = []
    stages: list[str] = []
    users: dict[str, str] = {}
    bases: dict[str, str] = {}
    declared: set[str] = set()
    begun = False
    for line, name, arguments in instructions(text):
        if name not in KNOWN:
            found.append(f"{line}: '{name}' is no instruction that is used here")
        elif name == "FROM":
            begun = True
            match = re.fullmatch(r"(?:--platform=\S+ )?(\S+)(?: AS (\S+))?", arguments)
            if match is None or match[2] is None:
                found.append(f"{line}: FROM needs an image and AS a name")
                continue
            image, stage = match[1], match[2]
            if image not in stages and (":" not in image or image.endswith(":latest")):
                found.append(f"{line}: image {image} has no fixed tag")
            stages.append(stage)
            bases[stage] = image
            users[stage] = users.get(image, "root")
            declared = set()
        elif not begun and name != "ARG":
            found.append(f"{line}: {name} stands before the first FROM")
        elif name == "ARG":
            declared.add(arguments.partition("=")[0])
        elif name == "RUN":
            found += [f"{line}: {said}" for said in run_faults(arguments, declared)]
        elif name == "COPY":
            found += [f"{line}: {said}" for said in copy_faults(arguments, stages, root)]
        elif name == "WORKDIR" and not arguments.startswith("/"):
            found.append(f"{line}: WORKDIR {arguments} is not absolute")
        elif name in ("ENTRYPOINT", "CMD"):
            try:
                words = json.loads(arguments)
            except ValueError:
                words = None
            if not isinstance(words, list) or not all(isinstance(w, str) for w in words):
                found.append(
                    f"{line}: {name} is not a JSON list: a shell would stand between it and signals"
                )
        elif name == "USER":
            users[stages[-1]] = arguments
    inner = set(bases.values())
    ends = [stage for stage in stages if stage not in inner and f"--from={stage}" not in text]
    found += [f"stage {s} ends as root" for s in ends if users[s] in ("root", "0")]
    return found if stages else [*found, "there is no FROM"]


def run_faults(command: str, declared: set[str]) -> Iterator[str]:
    """Yield what is wrong with a RUN."""
    if "apt-get install" in command:
        if "apt-get update" not in command:
            yield "apt-get install without update in the same RUN"
        if "--no-install-recommends" not in command or " -y" not in command:
            yield "apt-get install without -y --no-install-recommends"
        if "rm -rf /var/lib/apt/lists" not in command:
            yield "package lists are left in the layer"
    for part in re.split(r"&&|;|\|\|", command):
        if re.search(r"\bpip (install|wheel)\b", part) and "--no-cache-dir" not in part:
            yield "pip without --no-cache-dir"
        if re.match(r"\s*(sudo|cd)\b", part):
            yield f"'{part.split()[0]}' in a RUN: take USER or WORKDIR"
    for name in re.findall(r"\$\{?([A-Z_]+)", command):
        if name not in declared:
            yield f"${name} is no ARG of this stage"


def copy_faults(arguments: str, stages: list[str], root: Path) -> Iterator[str]:
    """Yield what is wrong with a COPY: another stage's, or files of the context."""
    words = arguments.split()
    stage = next((w.removeprefix("--from=") for w in words if w.startswith("--from=")), None)
    sources = [w for w in words if not w.startswith("--")][:-1]
    if not sources:
        yield "COPY needs a source and a target"
    if stage is not None:
        if stage not in stages:
            yield f"COPY --from={stage}: no stage before it is called so"
        return
    kept = allowed(root)
    for source in sources:
        if not (root / source).exists():
            yield f"COPY {source}: there is no such file"
        elif kept is not None and source.split("/")[0] not in kept:
            yield f"COPY {source}: .dockerignore leaves it out"


def allowed(root: Path) -> set[str] | None:
    """Return what a `.dockerignore` that begins with `*` lets through; None without one."""
    path = root / ".dockerignore"
    lines = path.read_text().split() if path.exists() else []
    return {line[1:] for line in lines if line.startswith("!")} if lines[:1] == ["*"] else None


def main() -> int:
    """Check one file."""
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "Dockerfile")
    found = faults(path.read_text(), path.resolve().parent)
    for said in found:
        sys.stdout.write(f"{path}:{said}\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
