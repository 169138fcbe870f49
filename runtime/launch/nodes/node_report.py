"""A Ray node's packages and the model that it would read, asked before a stage loads.

`report` runs on nodes whose llmpq may be another one, or none: it travels as code and imports
nothing but the standard library.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llmpq.errors import PlanMismatchError

SAME = ("llmpq", "torch", "ray", "Python", "NCCL")
"""What must not differ between hosts of one pipeline."""
_VOLATILE = ("_name_or_path", "transformers_version")
"""Keys of config.json that say nothing of the model."""


def report(model_dir: str | None) -> dict[str, Any]:
    """Return this host's name, versions, and the config.json of a model directory.

    Of a GGUF file, which has none: its size and the SHA-256 of its head, where its keys are.
    `problem` says why there is no `config`.
    """
    import hashlib
    import importlib.metadata
    import json
    import os
    import platform
    import socket

    versions = {"Python": ".".join(platform.python_version_tuple()[:2])}
    for name in ("llmpq", "torch", "ray"):
        try:
            # What follows a plus tells how it was built: 2.13.0+cpu and +cu130 go together.
            versions[name] = importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    config, problem = None, None
    if model_dir is not None:
        try:
            if os.path.isfile(model_dir):
                with open(model_dir, "rb") as file:
                    head = hashlib.sha256(file.read(2**20)).hexdigest()
                config = {"bytes": os.path.getsize(model_dir), "sha256 of its head": head}
        except OSError as error:
            problem = f"no readable '{model_dir}' ({error})"
    if model_dir is not None and config is None and problem is None:
        try:
            with open(os.path.join(model_dir, "config.json"), encoding="utf-8") as file:
                config = json.load(file)
        except (OSError, ValueError) as error:
            problem = f"no readable config.json in '{model_dir}' ({error})"
    if config is not None and problem is None and os.path.isdir(model_dir or ""):
        here = {name for name in os.listdir(model_dir) if name.endswith(".safetensors")}
        files = {"model.safetensors"} - here if not here else set()
        try:
            index = os.path.join(model_dir or "", "model.safetensors.index.json")
            with open(index, encoding="utf-8") as file:
                named = set(json.load(file)["weight_map"].values())
            if "model.safetensors" in named - here or "model.safetensors" not in here - named:
                files = named - here
        except (OSError, ValueError, KeyError, AttributeError):
            pass  # one file, or an index that loading refuses
        if files:
            problem = f"no {min(files)} in '{model_dir}'"
    return {
        "host": socket.gethostname(),
        "versions": versions,
        "config": config,
        "problem": problem,
    }


def versions_of(place: Mapping[str, Any]) -> dict[str, str | None]:
    """Return the versions of a probe's or a survey's look; NCCL's where it has a GPU."""
    found: dict[str, str | None] = {
        name: place["packages"].get(name) for name in SAME if name in place["packages"]
    }
    if "python" in place:
        found["Python"] = ".".join(place["python"].split(".")[:2])
    if place.get("gpu") or place.get("gpus"):
        found["NCCL"] = place["nccl"]
    return found


def differing(
    first: Mapping[str, str | None], other: Mapping[str, str | None]
) -> list[tuple[str, str | None, str | None]]:
    """Return each package whose version is not the same, with both; NCCL's between GPUs only.

    What follows a plus tells how a wheel was built: 2.13.0+cpu and 2.13.0+cu130 go together.
    """
    found = []
    for name in SAME:
        wanted, got = first.get(name), other.get(name)
        if name == "NCCL" and not (name in first and name in other):
            continue
        if (wanted or "").partition("+")[0] != (got or "").partition("+")[0]:
            found.append((name, wanted, got))
    return found


def require_alike(here: Mapping[str, Any], there: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    """Refuse nodes whose versions or model are not this host's.

    `there`: how each node is called, and its report. `PlanMismatchError` names the first that has
    another version or another config.json, `ValueError` the first without one.
    """
    for name, found in there:
        for package, wanted, got in differing(here["versions"], found["versions"]):
            raise PlanMismatchError(
                f"node {name} has {package} {got}, this host has {wanted}: install the same "
                "version on every node"
            )
    for name, found in there:
        if found["problem"] is not None:
            raise ValueError(
                f"node {name} has {found['problem']}; copy the model there, name its folder as the "
                "node's model_dir in the cluster file, or give --copy-weights"
            )
        key = _different(here["config"], found["config"])
        if key is not None:
            raise PlanMismatchError(
                f"node {name} has another model: '{key}' of its configuration is "
                f"{found['config'].get(key)!r}, here it is {here['config'].get(key)!r}; copy the "
                "right one there, or give --copy-weights"
            )


def _different(here: Mapping[str, Any] | None, there: Mapping[str, Any] | None) -> str | None:
    """Return the first key of two config.json that is not the same."""
    if here is None or there is None:
        return None
    for key in sorted({*here, *there} - set(_VOLATILE)):
        if here.get(key) != there.get(key):
            return key
    return None
