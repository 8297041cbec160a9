"""Writes docs/config/: every table and field of each command's config, from the models that check it.

python docs/site/config_pages.py
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from fastrl.base.json_text import to_json
from fastrl.training.common.settings import Section, json_values
from fastrl.training.rl import config as train
from fastrl.training.stages import dpo, reward_model, sample, sft

#: command -> the model of its config
CONFIGS: dict[str, type[Section]] = {
    "train": train.Config,
    "sft": sft.Config,
    "dpo": dpo.Config,
    "reward-model": reward_model.Config,
    "sample": sample.Config,
}
FOLDER = Path(__file__).resolve().parents[1] / "config"
_BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


def config_pages() -> dict[Path, str]:
    """File -> its Markdown."""
    return {FOLDER / f"{command.replace('-', '_')}.md": _page(command) for command in CONFIGS}


def fields(model: type[BaseModel], table: str = "") -> Iterator[tuple[str, str, FieldInfo]]:
    """Each field that holds a value, with its table and name, in the order of the model."""
    for name, field in model.model_fields.items():
        if inner := _table(field.annotation):
            yield from fields(inner, f"{table}.{name}" if table else name)
        else:
            yield table, name, field


def _page(command: str) -> str:
    lines = [
        f"# Config of fastrl {command}",
        "",
        f"Every table and field of a config of `fastrl {command}`. A field is also an option of the command line,"
        " `--table.field value`, which wins over the file. [Training](../training.md) explains how they work together.",
    ]
    tables = _tables(CONFIGS[command])
    seen = None
    for table, name, field in fields(CONFIGS[command]):
        if table != seen:
            seen = table
            lines += _heading(table, *tables[table])
        lines += _entry(table, name, field)
    return "\n".join(lines) + "\n"


def _tables(model: type[BaseModel], above: str = "") -> dict[str, tuple[type[BaseModel], bool]]:
    """Table -> its model, and whether it is absent unless the file has it."""
    found = {}
    for name, field in model.model_fields.items():
        if inner := _table(field.annotation):
            path = f"{above}.{name}" if above else name
            found[path] = (inner, field.default is None)
            found |= _tables(inner, path)
    return found


def _heading(table: str, model: type[BaseModel], absent: bool) -> list[str]:
    text = (model.__doc__ or "").strip()
    return ["", f"## [{table}]", "", text, *(["Absent by default."] if absent else [])]


def _entry(table: str, name: str, field: FieldInfo) -> list[str]:
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
    kind = " or ".join(_type(field.annotation))
    facts = ", ".join([kind, *bounds, default])
    return ["", f"### {table}.{name}", "", facts, "", (field.description or "").strip()]


def _table(annotation: Any) -> type[BaseModel] | None:
    """The model of a field that is a table of its own."""
    for inner in get_args(annotation) or (annotation,):
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            return inner
    return None


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
