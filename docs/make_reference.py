"""Write docs/reference/ from the code: the fields of plan and cluster files, every command's flags.

python docs/make_reference.py            write the pages
python docs/make_reference.py --check    exit 1 if a page is not current
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from llmpq.commands.command_line import CommandParser
from llmpq.devices.cluster import Cluster
from llmpq.planner.cli import arguments
from llmpq.plans.plan import Plan
from llmpq.plans.topology import Topology
from llmpq.profiler.cli import flags as profiler_flags
from llmpq.runtime.cli import tool_flags
from llmpq.runtime.cli.chat_flags import chat_parser
from llmpq.runtime.cli.run_flags import run_parser
from llmpq.runtime.cli.serve_flags import serve_parser

FOLDER = Path(__file__).resolve().parent / "reference"
MADE = "<!-- made by docs/make_reference.py from the code; do not edit -->\n"
SIGNS = {Gt: ">", Ge: ">=", Lt: "<", Le: "<=", MinLen: "entries >="}

PLAN = """\
# The plan file

JSON. `llmpq-algo -o plan.json` writes it, `llmpq-dist --plan plan.json` and `LLM(plan=...)` run it,
`llmpq-algo check plan.json` checks it. A plan may be written by hand: a field with a default may
be left out, an unknown field is refused with the nearest known one. Times are in seconds, sizes in
bytes. An example: [plan.json](../plan.json).

A plan of several engines, which `llmpq-dist run` and `serve` take, has [`engines`](#topology) in
place of stages, each with a plan as below.
"""
CLUSTER = """\
# The cluster file

YAML: the machines, their devices and what connects them. `llmpq-algo devices --yaml` prints one for
this machine; [clusters/](../../clusters) has examples. A field with a default may be left out, an
unknown field is refused with the nearest known one. Sizes are numbers of bytes or text such as
`24GiB`.
"""
COMMANDS = """\
# Every flag of every command

`--help` shows the flags of every day, `--help-all` what stands here. `--a-b` is also accepted as
`--a_b`, and so are the spellings of the LLM-PQ paper (`--global_bz`, `--s`, `--n`,
`--strat_file_name`).
"""


def fields_page(intro: str, top: type[BaseModel], *others: type[BaseModel]) -> str:
    """Return a page with a table for `top`, for other files, and for every type of their fields."""
    parts = [MADE, intro]
    for model in dict.fromkeys(one for file in (top, *others) for one in models_of(file)):
        title = "The file" if model is top else f"`{model.__name__}`"
        summary = " ".join((inspect.getdoc(model) or "").split("\n\n")[0].split())
        parts.append(f"\n## {title}\n\n{summary}\n\n| field | type | default | meaning |\n")
        parts.append("|---|---|---|---|\n")
        notes = docstrings(model)
        for name, field in model.model_fields.items():
            cells = (
                f"`{field.alias or name}`",
                type_of(field),
                default_of(field),
                notes.get(name, ""),
            )
            parts.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n")
    return "".join(parts)


def models_of(top: type[BaseModel]) -> list[type[BaseModel]]:
    """Return `top` and the types of its fields, in the order a reader meets them."""
    found = [top]
    for model in found:
        for field in model.model_fields.values():
            found += [m for m in inner_models(field.annotation) if m not in found]
    return found


def inner_models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from inner_models(argument)


def type_of(field: FieldInfo) -> str:
    """Return a field's type in words, with its limits."""
    limits = [
        f"{sign} {next(iter(vars(m).values())) if hasattr(m, '__dict__') else limit_of(m)}"
        for m in field.metadata
        for kind, sign in SIGNS.items()
        if isinstance(m, kind)
    ]
    return ", ".join([words(field.annotation), *limits])


def limit_of(limit: Any) -> Any:
    return getattr(limit, {Gt: "gt", Ge: "ge", Lt: "lt", Le: "le"}.get(type(limit), "min_length"))


def words(annotation: Any) -> str:
    """Return a type as a reader of a JSON or YAML file knows it."""
    simple = {int: "whole number", float: "number", str: "text", bool: "true or false"}
    origin, inner = get_origin(annotation), get_args(annotation)
    if annotation in simple:
        return simple[annotation]
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in inner)
    if origin in (Union, UnionType):
        return " or ".join(words(part) for part in inner if part is not type(None))
    if origin is tuple:
        parts = [part for part in inner if part is not Ellipsis]
        if Ellipsis in inner:
            return f"list of {words(parts[0])}"
        return f"[{', '.join(words(part) for part in parts)}]"
    if origin is Annotated:
        return "size: bytes or `24GiB`" if inner[0] is int else words(inner[0])
    if inner:
        return f"table of {' to '.join(words(part) for part in inner)}"
    if hasattr(annotation, "__members__"):
        return " or ".join(f"`{member.value}`" for member in annotation)
    return f"`{getattr(annotation, '__name__', annotation)}`"


def default_of(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None or value == () or value == "" or value == {}:
        return "none"
    if isinstance(value, BaseModel):
        shown = ", ".join(f"{k}: {v}" for k, v in value.model_dump(mode="json").items())
        return f"`{shown}`"
    return f"`{getattr(value, 'value', value)}`"


def docstrings(model: type[BaseModel]) -> dict[str, str]:
    """Return the text under each field of a class and of those it inherits from."""
    found: dict[str, str] = {}
    for kind in reversed(model.__mro__):
        if not (issubclass(kind, BaseModel) and kind.__module__.startswith("llmpq.")):
            continue
        (node,) = ast.parse(inspect.cleandoc("\n" + inspect.getsource(kind))).body
        assert isinstance(node, ast.ClassDef)
        for line, after in zip(node.body, node.body[1:], strict=False):
            if isinstance(line, ast.AnnAssign) and isinstance(after, ast.Expr):
                text = ast.literal_eval(after.value)
                found[ast.unparse(line.target)] = " ".join(text.split())
    return found


def parsers() -> Iterator[CommandParser]:
    yield from (arguments.plan_parser(), arguments.fits_parser(), arguments.simulate_parser())
    yield from (arguments.costs_parser(), arguments.check_parser())
    yield arguments.export_parser()
    yield arguments.devices_parser()
    yield arguments.models_parser()
    yield from (run_parser(), serve_parser(), chat_parser(), tool_flags.check_parser())
    yield tool_flags.bench_parser()
    yield from (tool_flags.eval_parser(), tool_flags.convert_parser(), tool_flags.doctor_parser())
    yield tool_flags.report_parser()
    yield tool_flags.devices_parser()
    yield from (profiler_flags.run_parser(), profiler_flags.indicator_parser())
    yield from (profiler_flags.merge_parser(), profiler_flags.quantize_parser())


def commands_page() -> str:
    parts = [MADE, COMMANDS]
    for parser in parsers():
        text = parser.help_text(everything=True)
        parts.append(f"\n## `{parser.program}`\n\n```text\n{text}```\n")
    return "".join(parts)


def pages() -> dict[Path, str]:
    """Return every page of the reference, as the code says it now."""
    return {
        FOLDER / "plan.md": fields_page(PLAN, Plan, Topology),
        FOLDER / "cluster.md": fields_page(CLUSTER, Cluster),
        FOLDER / "commands.md": commands_page(),
    }


def main() -> int:
    """Write the pages, or check them."""
    stale = [p for p, text in pages().items() if not p.exists() or p.read_text() != text]
    for path in stale:
        if "--check" not in sys.argv:
            path.parent.mkdir(exist_ok=True)
            path.write_text(pages()[path])
        sys.stdout.write(f"{'stale' if '--check' in sys.argv else 'wrote'}: {path}\n")
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
