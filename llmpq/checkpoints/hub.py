"""A model by the name it has on Hugging Face's hub: found in its cache here, or downloaded.

    local_model("Qwen/Qwen3-0.6B")                       # a folder of Hugging Face's cache
    local_model("Qwen/Qwen3-0.6B@main")                  # a branch, tag or commit
    local_model("Qwen/Qwen3-0.6B-GGUF/Qwen3-0.6B-Q8_0.gguf")

Through `huggingface_hub`, which reads HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE, HF_ENDPOINT, HF_TOKEN.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from llmpq.checkpoints.gguf_file import is_model
from llmpq.errors import nearest, shortened
from llmpq.file_form import broken_link
from llmpq.shipped_table import shipped_table

_NAME = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:/(?P<file>[^@]+\.gguf))?"
    r"(?:@(?P<revision>[\w./-]+))?"
)
CONFIG_FILES = ("*.json",)
"""What a plan needs."""
MODEL_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
"""What a run needs."""


def require_named(model: str | Path) -> None:
    """Raise `ValueError` for a model whose name is empty, as where a variable is not set."""
    if not str(model).strip():
        raise ValueError(
            "the model's name is empty: expected a directory, a GGUF file, or a name such as "
            "Qwen/Qwen3-0.6B"
        )


def at_revision(model: str | Path, revision: str | None) -> str:
    """Return what a model of the hub is called at a revision; `ValueError` for any other model."""
    if revision is None:
        return str(model)
    require_named(model)
    if is_model(model):
        where = "which is on this machine"
    elif not _NAME.fullmatch(str(model)):
        where = "which is no name on Hugging Face's hub"
    elif "@" in str(model):
        where = "which names one itself"
    else:
        return f"{model}@{revision}"
    raise ValueError(
        f"revision '{revision}' has no effect on '{shortened(str(model))}', {where}: leave it out"
    )


def local_model(model: str | Path, *, config_only: bool = False) -> Path:
    """Return the absolute path of a model: a directory or a GGUF file of this machine.

    `ValueError` says in one sentence why there is none, and what to type.
    """
    require_named(model)
    if is_model(model):
        return absolute(model)
    broken = broken_link(Path(model))
    if broken is not None:
        raise ValueError(broken)
    if Path(model).is_file():
        raise ValueError(
            f"'{shortened(str(model))}' is a file, and its name does not end in .gguf: expected a "
            f"GGUF file, or a model's directory{_instead_of_file(Path(model))}"
        )
    near = _near(Path(model))
    named = None if os.path.isabs(model) else _NAME.fullmatch(str(model))
    if named is None or named["repo"].endswith(".gguf"):
        near = near or _spelled_otherwise(str(model))
        other = "expected one of this machine, a GGUF file, or a name on Hugging Face's hub such as"
        raise ValueError(
            f"no such model directory: '{shortened(str(model))}'; "
            f"{near or f'{other} {_weights_of(str(model))}'}"
        )
    try:
        return _from_hub(named["repo"], named["file"], named["revision"], config_only=config_only)
    except ValueError as error:
        raise ValueError(f"{error}; {near}" if near else str(error)) from None


def _instead_of_file(path: Path) -> str:
    """Return what to give instead of a file, with its comma; empty if nothing is known."""
    if (path.parent / "config.json").is_file():
        return f", such as its own, '{path.parent}'"
    return "; a plan is given by --plan" if path.suffix == ".json" else ""


def _near(path: Path) -> str:
    """Return a hint at a model of the same folder that is called nearly so; empty for none."""
    try:
        others = [other for other in path.parent.iterdir() if is_model(other)]
    except OSError:
        return ""
    hint = nearest(path.name, [other.name for other in others])
    meant = [str(other) for other in others if f"'{other.name}'" in hint]
    return f"did you mean '{meant[0]}'?" if meant else ""


def _spelled_otherwise(name: str) -> str:
    """Return how a model of the hub is called here that other programs call `hf.co/NAME:Q4_K_M`."""
    place = re.sub(r"^(https?://)?(huggingface\.co|hf\.co)/", "", name)
    repo, _, tag = place.partition(":")
    if place == repo == name or not _NAME.fullmatch(repo):
        return ""
    if tag:
        return f"a GGUF file of the hub is named with its repository: {repo}/FILE.gguf"
    return f"a model of the hub is named without its address: {repo}"


def _weights_of(name: str) -> str:
    """Return where the hub has the weights of a name that can be planned; else an example.

    Ollama's names are near to those: `qwen3:30b`.
    """
    known = shipped_table("llmpq", "model_ids.yaml")
    letters = re.sub(r"[:_-]", "", name.lower())
    for one in sorted(known, key=len) if letters else ():
        if one.replace("-", "").startswith(letters) and known[one]:
            return next(iter(known[one]))
    return "Qwen/Qwen3-0.6B"


def absolute(path: str | Path) -> Path:
    """Return a path from the root. Links stay: in Hugging Face's cache they have the names."""
    return Path(os.path.abspath(path))


def name_of(path: str | Path) -> str:
    """Return what a model is called: its folder's or file's name; in the cache its name there."""
    found = absolute(path)
    if found.parent.name == "snapshots" and found.parent.parent.name.startswith("models--"):
        return found.parent.parent.name.rsplit("--", 1)[-1]
    return found.name


def _from_hub(repo: str, file: str | None, revision: str | None, *, config_only: bool) -> Path:
    """Return where the cache has a model, downloaded if need be and if the hub can be reached."""
    try:
        import huggingface_hub as hub
    except ModuleNotFoundError:
        raise ValueError(
            f"no such model directory: '{repo}'; to look for it on Hugging Face's hub, type: "
            "pip install 'llmpq[run]'"
        ) from None
    from huggingface_hub import errors

    try:
        if file is not None:
            return absolute(hub.hf_hub_download(repo, file, revision=revision))
        patterns = CONFIG_FILES if config_only else MODEL_FILES
        folder = absolute(
            hub.snapshot_download(
                repo, revision=revision, allow_patterns=list(patterns), ignore_patterns=["*/*"]
            )
        )
    except errors.GatedRepoError:
        raise ValueError(
            f"'{repo}' asks for its licence to be accepted: do so at "
            f"{hub.constants.ENDPOINT}/{repo}, then log in with: hf auth login"
        ) from None
    except errors.RevisionNotFoundError:
        raise ValueError(f"'{repo}' has no revision '{revision}' on the hub") from None
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        raise ValueError(
            f"no such model directory: '{repo}', and {hub.constants.ENDPOINT} has no such model or "
            "a private one: log in with: hf auth login"
        ) from None
    except errors.LocalEntryNotFoundError as error:
        raise ValueError(_unreachable(hub, repo, file, revision, error)) from None
    except errors.EntryNotFoundError:
        raise ValueError(f"'{repo}' has no file '{file}' on the hub") from None
    except (errors.HfHubHTTPError, OSError) as error:
        raise ValueError(f"'{repo}' could not be downloaded: {_first_line(error)}") from None
    _require_files(hub, repo, revision, folder, config_only=config_only)
    return folder


def _is_answer(hub: Any, error: BaseException | None) -> bool:
    """Whether the hub was reached, and refused."""
    return isinstance(error, hub.errors.HfHubHTTPError) and error.response is not None


def _first_line(error: BaseException) -> str:
    """Return what an error says, in a line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def _unreachable(
    hub: Any, repo: str, file: str | None, revision: str | None, error: BaseException
) -> str:
    """Return what to do where neither the cache nor the hub has a model, and what the hub said."""
    words = ["hf download", repo, *([file] if file else [])]
    command = " ".join([*words, *([f"--revision {revision}"] if revision else [])])
    what = f"'{repo}/{file}'" if file else f"'{repo}'"
    refusal = next((e for e in (error, error.__cause__) if _is_answer(hub, e)), None)
    if hub.constants.is_offline_mode():
        why = "HF_HUB_OFFLINE is set"
    elif refusal is not None:
        why = f"{hub.constants.ENDPOINT} says: {_first_line(refusal)}"
    else:
        why = f"{hub.constants.ENDPOINT} cannot be reached"
    return (
        f"no such model directory: {what}; it is not, or not whole, in Hugging Face's cache "
        f"({hub.constants.HF_HUB_CACHE}), and {why}: with a network, type: {command}"
    )


def _require_files(
    hub: Any, repo: str, revision: str | None, folder: Path, *, config_only: bool
) -> None:
    """Refuse a model whose files are of another kind, or that the cache has a part of only."""
    if (folder / "config.json").is_file() and (config_only or any(folder.glob("*.safetensors"))):
        return
    try:
        names = hub.list_repo_files(repo, revision=revision)
    except Exception as error:  # offline, refused, or the cache alone has it
        names = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*.gguf"))]
        if not names:
            raise ValueError(_unreachable(hub, repo, None, revision, error)) from None
    files = [name for name in names if name.endswith(".gguf")]
    if files:
        shown = ", ".join(files[:6]) + (", ..." if len(files) > 6 else "")
        raise ValueError(f"'{repo}' has GGUF files; name one, as in {repo}/{files[0]} ({shown})")
    if "config.json" not in names:
        raise ValueError(f"'{repo}' has no config.json: it is no model that llmpq reads")
    raise ValueError(
        f"'{repo}' has no safetensors files; download it with: hf download {repo} --local-dir "
        "OLD, and write it anew with: llmpq-dist convert OLD NEW"
    )
