"""Writes docs/config/: every table and field of each command's config, from the models that check it.

python docs/site/config_pages.py
"""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from meanings import meaning
from pydantic.fields import FieldInfo

from fastrl.base.json_text import to_json
from fastrl.training.commands import COMMANDS
from fastrl.training.config.settings import Section, fields, json_values, table_of

#: command -> the model of its config
CONFIGS: dict[str, type[Section]] = {name: command.kind for name, command in COMMANDS.items()}
FOLDER = Path(__file__).resolve().parents[1] / "config"
_BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


def config_pages() -> dict[Path, str]:
    """File -> its Markdown."""
    return {FOLDER / f"{command.replace('-', '_')}.md": _page(command) for command in CONFIGS}


def _page(command: str) -> str:
    lines = [
        f"# Config of fastrl {command}",
        "",
        f"Every table and field of a config of `fastrl {command}`. A field is also an option of the command line,"
        " `--table.field value`, which wins over the file. [Training](../training.md) explains how they work together.",
    ]
    tables = tables_of(CONFIGS[command])
    seen = None
    for (*above, name), field in fields(CONFIGS[command]):
        if (table := ".".join(above)) != seen:
            seen = table
            lines += _heading(table, *tables[table])
        text = meaning(tables[table][0], name).strip()
        lines += ["", f"### {table}.{name}", "", facts(field), "", text]
    return "\n".join(lines) + "\n"


def tables_of(model: type[Section], above: str = "") -> dict[str, tuple[type[Section], bool]]:
    """Table -> its model, and whether it is absent unless the file has it."""
    found = {}
    for name, field in model.model_fields.items():
        if inner := table_of(field):
            path = f"{above}.{name}" if above else name
            found[path] = (inner, field.default is None)
            found |= tables_of(inner, path)
    return found


def _heading(table: str, model: type[Section], absent: bool) -> list[str]:
    text = (model.__doc__ or "").strip()
    return ["", f"## [{table}]", "", text, *(["Absent by default."] if absent else [])]


def facts(field: FieldInfo) -> str:
    """The types of a field, its bounds and its default."""
    if field.is_required():
        default = "required"
    else:
        value = field.get_default(call_default_factory=True)
        default = "optional" if value is None else f"default `{_toml(value)}`"
    bounds = [
        f"`{sign} {getattr(limit, name)}`"
        for limit in field.metadata
        for name, sign in _BOUNDS.items()
        if hasattr(limit, name)
    ]
    return ", ".join([" or ".join(_type(field.annotation)), *bounds, default])


def _type(annotation: Any) -> list[str]:
    """The types that a value may have, as a TOML file spells them."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return [f"`{_toml(value)}`" for value in arguments]
    if origin in (Union, types.UnionType):
        return [text for inner in arguments if inner is not type(None) for text in _type(inner)]
    if origin in (list, tuple):
        items = [text for inner in arguments if inner is not Ellipsis for text in _type(inner)]
        return ["list of " + " or ".join(dict.fromkeys(items))]
    if origin is dict:
        return ["table"]
    if hasattr(annotation, "__metadata__"):
        return _type(arguments[0])
    names = {str: "string", int: "integer", float: "number", bool: "`true` or `false`"}
    return [names.get(annotation, "path")]


def _toml(value: Any) -> str:
    """A default as a TOML file spells it."""
    value = json_values(value)
    return "{}" if value == {} else to_json(value)


if __name__ == "__main__":
    for path, text in config_pages().items():
        path.write_text(text, encoding="utf-8")
