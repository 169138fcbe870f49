"""The base of every type that is a file: frozen, strict, with errors that name the nearest key."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, ClassVar, Self, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from llmpq.errors import nearest, short_repr

_LFS = b"version https://git-lfs.github.com/spec/"
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
"""What the system says where a disk or a quota is full."""


class FileForm(BaseModel):
    """A frozen file type. Unknown keys are errors; units stand in the key names."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)
    MEANT: ClassVar[Mapping[str, str]] = {}
    """Keys that people write for one of the type's, where the letters do not tell."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_switches(cls, data: object) -> object:
        """Refuse `yes` and `no` of YAML in the place of a number, which they are in Python."""
        if isinstance(data, dict):
            for key in _number_keys(cls):
                if isinstance(data.get(key), bool):
                    raise ValueError(f"'{key}': expected a number, got {data[key]}")
        return data

    @classmethod
    def parse_data(cls, data: object, *, where: str) -> Self:
        """Validate plain data; `ValueError` names the file, the key and what was expected."""
        if not isinstance(data, dict):
            got = "an empty file" if data is None else type(data).__name__
            raise ValueError(f"{where}: expected a mapping at the top, got {got}")
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            said = _another_kind(data, cls) or explain(error, cls)
            raise ValueError(f"{where}: {said}") from None

    @classmethod
    def load_json(cls, path: str | Path) -> Self:
        """Read the type from a JSON file."""
        return cls.parse_data(read_json(path), where=str(path))

    def dump_json(self) -> str:
        """Write the type as indented JSON; the same value gives the same text."""
        return json.dumps(self.model_dump(mode="json", by_alias=True), indent=1) + "\n"

    def save_json(self, path: str | Path) -> None:
        """Write the JSON form to `path`, creating its folder."""
        save_text(path, self.dump_json())


@cache
def _number_keys(model: type[BaseModel]) -> tuple[str, ...]:
    """Return the keys of the fields that are a number, or none."""
    return tuple(
        field.alias or name
        for name, field in model.model_fields.items()
        if set(get_args(field.annotation) or (field.annotation,)) - {NoneType} in _NUMBERS
    )


_NUMBERS = ({int}, {float}, {int, float})


def broken_link(path: Path) -> str | None:
    """Say where a link leads that leads nowhere; None for any other path."""
    if os.path.exists(path) or not os.path.islink(path):
        return None
    return (
        f"'{path}' is a broken link: '{os.readlink(path)}' is not there; download the model again"
    )


def lfs_pointer(path: Path) -> str | None:
    """Say that a file is only Git LFS's pointer to one; None for any other path."""
    try:
        with path.open("rb") as file:
            if file.read(len(_LFS)) != _LFS:
                return None
    except OSError:
        return None
    return (
        f"'{path}' is a pointer of Git LFS, not the file itself: type git lfs pull where it was "
        "cloned, or download the model with hf download"
    )


def replace_text(path: Path, text: str) -> None:
    """Write a whole file or leave what was there; a device or a pipe is written to.

    An `OSError` names the file, which a full disk's own does not.
    """
    try:
        if path.exists() and not path.is_file():
            path.write_text(text)
        else:
            _replace(path.resolve(), text)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from None


def save_text(path: str | Path, text: str) -> None:
    """Write a file, creating its folder; `ValueError` says why it cannot be, and what to do."""
    check_writable(path)
    existed = Path(path).exists()
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        replace_text(Path(path), text)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        kept = "what it held is kept; " if existed else ""
        do = "free some space or " if error.errno in NO_SPACE else ""
        raise ValueError(f"cannot write '{path}': {reason}; {kept}{do}give another place") from None


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_text(text)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def check_writable(path: str | Path) -> None:
    """Raise `ValueError` where a file can never be: in the place of a folder, or below a file."""
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"cannot write '{path}': it is a directory; give a file's name in it")
    for parent in path.parents:
        if parent.exists():
            if not parent.is_dir():
                raise ValueError(f"cannot write '{path}': '{parent}' is not a directory")
            return


def read_json(path: str | Path) -> object:
    """Read a JSON file; `ValueError` if it is missing or not JSON (a pickle, say)."""
    if not str(path).strip():
        raise ValueError("the name of a JSON file is empty")
    try:
        return json.loads(Path(path).read_text())
    except FileNotFoundError:
        raise ValueError(f"no such file: '{path}'") from None
    except IsADirectoryError:
        raise ValueError(f"'{path}' is a directory, expected a JSON file") from None
    except UnicodeDecodeError:
        raise ValueError(f"'{path}' is not JSON but binary; llmpq reads no pickle files") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"'{path}' is not JSON ({error})") from None


KINDS: Mapping[str, frozenset[str]] = {
    "a run's report (llmpq-dist run --report)": frozenset({"completed", "measured"}),
    "a plan (llmpq-algo -o)": frozenset({"model", "workload", "stages"}),
    "a plan of several engines (llmpq-algo -o)": frozenset({"workload", "engines"}),
    "a plan's certificate": frozenset({"plan_sha256", "proofs"}),
    "costs (llmpq-profile -o)": frozenset({"model", "model_fingerprint", "entries"}),
    "quality losses (llmpq-profile indicator -o)": frozenset({"indicator", "weights"}),
    "a cluster file (llmpq-algo devices --yaml)": frozenset({"name", "nodes"}),
    "a model's config.json": frozenset({"model_type"}),
}
"""What a file is that has all these keys: one is easily given in another's place."""


def _another_kind(data: Mapping[Any, Any], model: type[BaseModel]) -> str | None:
    """Say which other kind of file the data is of; None where its keys do not show one."""
    keys = {field.alias or name for name, field in model.model_fields.items()}
    expected = next((kind for kind, marks in KINDS.items() if marks <= keys), None)
    found = next((kind for kind, marks in KINDS.items() if marks <= data.keys()), None)
    if found is None or expected is None or found == expected:
        return None
    return f"it is {found}, expected {expected}"


_WHOLE, _NUMBER, _TEXT, _SWITCH = "a whole number", "a number", "a text in quotes", "true or false"
FORMS = {
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a table",
    "int_type": _WHOLE,
    "int_parsing": _WHOLE,
    "int_from_float": _WHOLE,
    "float_type": _NUMBER,
    "float_parsing": _NUMBER,
    "finite_number": "a finite number",
    "string_type": _TEXT,
    "bool_type": _SWITCH,
    "bool_parsing": _SWITCH,
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "literal_error": "{expected}",
    "enum": "{expected}",
}
"""What a file's entry must be, by the error of an entry of another form or size."""
SIZES = {
    "too_short": "expected a list of at least {min_length}, got {actual_length}",
    "too_long": "expected a list of at most {max_length}, got {actual_length}",
}
"""What is said of a list of too few or too many."""


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """Return the first validation error as one sentence; unknown keys before those they miss."""
    errors = error.errors()
    unknown = [e for e in errors if e["type"] == "extra_forbidden"]
    first = unknown[0] if unknown and errors[0]["type"] == "missing" else errors[0]
    place = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        key = str(first["loc"][-1])
        near = _type_at(model, first["loc"])
        known = _keys(near)
        meant = getattr(near, "MEANT", {}).get(key.lower())
        hint = f"did you mean '{meant}'? " if meant else nearest(key, known)
        return f"unknown key '{place}': {hint}valid keys: {', '.join(known)}"
    message = first["msg"].removeprefix("Value error, ")
    if place and message.startswith("'") and first["type"] == "value_error":  # of a key in it
        return f"'{place}.{message[1:]}"
    if first["type"] == "missing":
        known = _keys(_type_at(model, first["loc"]))
        return f"'{place}': {message}; valid keys: {', '.join(known)}"
    got = first.get("input")
    if place == "schema" and isinstance(got, int):
        schema = short_repr(got)
        return (
            f"this llmpq reads schema 1, got schema {schema}; make the file anew, or update llmpq"
        )
    if not first["loc"]:
        return message
    if first["type"] == "model_type":
        keys = ", ".join(_keys(_type_at(model, (*first["loc"], ""))))
        return f"'{place}': expected a table with keys of {keys}, got {short_repr(got)}"
    context = first.get("ctx", {})
    if (size := SIZES.get(first["type"])) is not None:
        return f"'{place}': {size.format(**context)}"
    if (form := FORMS.get(first["type"])) is not None:
        return f"'{place}': expected {form.format(**context)}, got {short_repr(got)}"
    shown = "" if isinstance(got, (dict, list)) or "got" in message else f" (got {short_repr(got)})"
    return f"'{place}': {message}{shown}"


def _type_at(model: type[BaseModel], loc: tuple[int | str, ...]) -> type[BaseModel]:
    """Return the type that the offending key is in, walking the model along `loc`."""
    current = model
    for part in loc[:-1]:
        if isinstance(part, str) and part in current.model_fields:
            inner = _inner_model(current.model_fields[part].annotation)
            if inner is None:
                break
            current = inner
    return current


def _keys(model: type[BaseModel]) -> list[str]:
    return sorted(field.alias or name for name, field in model.model_fields.items())


def _inner_model(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        found = _inner_model(argument)
        if found is not None:
            return found
    return None
