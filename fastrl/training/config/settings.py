"""Settings of a command: pydantic models, read from a TOML file and overridden on the command line.

The command line (`--section.field value`) is generated from the same models that check the file, so there is one list
of fields, one set of checks and one form of error for both. A file may extend another one:

    base = "../reverse_digits/config.toml"   # its tables, paths relative to it; what follows wins

`presets` in a table are options for one value of its `name`. They win over the table's other options, but not over
the values of a file that extends this one, or of the command line.
"""

import argparse
import json
import os
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Self, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python
from pydantic_settings import BaseSettings, CliSettingsSource, SettingsConfigDict, SettingsError

from fastrl.base.dependencies import how_to_install
from fastrl.base.errors import UserError
from fastrl.base.json_text import to_json
from fastrl.base.spelling import nearest
from fastrl.base.terminal import say


class Section(BaseModel):
    """A table of the config file. Unknown fields are errors; the docstring under a field is its help text."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        ser_json_inf_nan="constants",  # where a field takes any value: the default, null, would be lost
    )

    displaces: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """field -> fields that a file's base loses when the file, or the command line, gives this one"""

    def conflicts(self) -> dict[str, Any]:
        """Rules on fields that must go together: an error -> whether it is the case. The first such one is raised."""
        return {}

    @model_validator(mode="after")
    def _has_no_conflicts(self) -> Self:
        for error, is_the_case in self.conflicts().items():
            if is_the_case:
                raise ValueError(error)
        return self


Settings = TypeVar("Settings", bound=Section)


def json_values(settings: Any) -> Any:
    """Settings as JSON values. Infinite numbers and NaN are "Infinity", "-Infinity" and "NaN", as JSON has none."""
    return json.loads(to_json(to_jsonable_python(settings), constant=str))


@dataclass(frozen=True)
class Location:
    """Marks a field (`Annotated[str, Location()]`) that holds a path, a path with ":function", or a list of them.

    In a file they are relative to the file, on the command line to the working directory. With `hub` it may also be a
    hub's "owner/name", so it is only resolved if the path exists, or if it can only be a path. What ends in one of
    `suffixes` can only be a path. With `dotted` it may also be the dotted name of an object of Python's, which is kept.
    """

    hub: bool = False
    suffixes: tuple[str, ...] = ()
    dotted: bool = False

    def resolve(self, text: Any, base: Path) -> Any:
        """The path, absolute; a value that is no text is for the model to refuse."""
        if isinstance(text, list):
            return [self.resolve(item, base) for item in text]
        if not isinstance(text, str):
            return text
        if self.dotted and all(part.isidentifier() for part in text.split(".")) and not text.endswith(".py"):
            return text
        resolved = base / Path(text).expanduser()
        is_path = resolved.exists() or text.endswith(self.suffixes) or looks_like_path(text, base)
        return text if self.hub and not (is_path and text.strip()) else os.path.normpath(resolved.absolute())


def parse_command_line(
    kind: type[Settings],
    command: str,
    argv: list[str],
    switches: Iterable[str] = (),
    short: Mapping[str, str] = MappingProxyType({}),
) -> tuple[Settings, dict[str, bool]]:
    """The settings that `CONFIG.toml --section.field value ...` describes, and which `--switches` were given.

    `short` maps names to the options that they stand for. Raises UserError for a file or a value that cannot be used,
    and SystemExit(2) (argparse) for an unknown option, and for a missing file or value.
    """
    parser = argparse.ArgumentParser(
        prog=f"fastrl {command}", usage=usage_of(command, switches, short), allow_abbrev=False, add_help=False
    )
    parser.add_argument("file", metavar="CONFIG", type=Path)
    for name in switches:
        parser.add_argument(f"--{name}", action="store_true")
    for name, option in short.items():
        parser.add_argument(f"--{name}", dest=option, default=argparse.SUPPRESS)
    # Only the command-line source reads this class: its values stay text until `kind` checks them with the file's.
    options = SettingsConfigDict(extra="forbid", cli_avoid_json=True, cli_implicit_flags=False)
    reader = type("_CommandLine", (kind, BaseSettings), {"model_config": options, "__module__": __name__})
    source: CliSettingsSource[argparse.ArgumentParser] = CliSettingsSource(reader, root_parser=parser)
    arguments = vars(parser.parse_args(argv))
    path = arguments.pop("file")
    switched_on = {name: arguments.pop(name) for name in switches}
    _check_tables(kind, arguments)
    try:
        overrides = source(parsed_args=arguments)()
    except SettingsError as error:  # a list that begins as JSON and is none
        raise UserError(f"the command line cannot be read: {error}") from error
    return load_settings(kind, path, overrides), switched_on


def usage_of(command: str, switches: Iterable[str], short: Iterable[str]) -> str:
    """The line that shows what a command takes."""
    options = "".join(f" [--{name}]" for name in switches) + "".join(f" [--{name} VALUE]" for name in short)
    return f"fastrl {command} CONFIG{options} [--section.field value ...]"


def fields(kind: type[Section], *above: str) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    """Each field that holds a value, as the names of its tables and its own, in the order of the model."""
    for name, field in kind.model_fields.items():
        if inner := table_of(field):
            yield from fields(inner, *above, name)
        else:
            yield (*above, name), field


def table_of(field: FieldInfo) -> type[Section] | None:
    """The model of a field that is a table of its own."""
    kinds = get_args(field.annotation) or (field.annotation,)
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), None)


def _table(kind: type[Section], name: str) -> type[Section]:
    """The model of a table in a tree; for what is no table of the model, one without fields."""
    field = kind.model_fields.get(name)
    return (field and table_of(field)) or Section


def _check_tables(kind: type[Section], arguments: dict[str, Any]) -> None:
    """Raise UserError for a table on the command line that is not JSON.

    pydantic-settings would take name=value, and make a text of every value: enable_thinking=false would be true.
    """
    for option in [".".join(names) for names, field in fields(kind) if get_origin(field.annotation) is dict]:
        for text in arguments.get(option) or ():
            try:
                is_table = isinstance(json.loads(text), dict)
            except ValueError:
                is_table = False
            if not is_table:
                raise UserError(f"--{option}: expected a table as JSON, such as '{{\"name\": false}}', got {text!r}")


def load_settings(kind: type[Settings], path: Path, overrides: dict[str, Any] | None = None) -> Settings:
    """Read and check a TOML file; `overrides` is a tree of the same shape whose values win.

    Raises UserError naming the file and line of a syntax error, or every field that is wrong.
    """
    overrides = overrides or {}
    _resolve_paths(kind, overrides, Path.cwd())
    tree = _read(kind, path, [])
    _say_what_is_displaced(kind, path, tree, overrides)
    try:
        return kind.model_validate(_merge(kind, tree, overrides))
    except ValidationError as error:
        raise UserError("\n".join(_describe(kind, error, path, overrides))) from error


def _say_what_is_displaced(kind: type[Section], path: Path, tree: dict[str, Any], overrides: dict[str, Any]) -> None:
    """Warn of a model on the command line that takes the place of a file's, but learns from that one's data."""
    for name, given in overrides.items():
        for option in given if isinstance(given, dict) and isinstance(tree.get(name), dict) else ():
            others = _table(kind, name).displaces.get(option, ())
            lost = [f"{name}.{other}" for other in others if other in tree[name] and other not in given]
            if lost and "path" not in (overrides.get("data") or {}):
                say(
                    f"warning: --{name}.{option} takes the place of {' and '.join(lost)} in {path}, whose data,"
                    " rewards and lengths stay; fastrl init writes a config for data of your own"
                )


def _read(kind: type[Section], path: Path, above: list[Path]) -> dict[str, Any]:
    """The file's tables on top of those of its `base`."""
    if path.resolve() in above:
        raise UserError(f"{path}: is its own base through base = ...")
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:  # its message ends in "(at line 3, column 8)"
        raise UserError(f"{path}: not valid TOML: {error}") from error
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        origin = f" (the base of {above[-1]})" if above else ""
        raise UserError(f"{path}: cannot read the config: {reason}{origin}") from error
    base = tree.pop("base", None)
    _resolve_paths(kind, tree, path.parent)
    if base is None:
        return tree
    if not isinstance(base, str):
        raise UserError(f"{path}: base: expected the path of another config, got {base!r}")
    return _merge(kind, _read(kind, path.parent / base, [*above, path.resolve()]), tree)


def _resolve_paths(kind: type[Section], tree: dict[str, Any], base: Path) -> None:
    """Make the paths in a tree absolute, in place."""
    for name, value in tree.items():
        if isinstance(value, dict):
            _resolve_paths(_table(kind, name), value, base)
        for mark in kind.model_fields[name].metadata if name in kind.model_fields else ():
            if isinstance(mark, Location):
                tree[name] = mark.resolve(value, base)


def import_for(field: str, package: str) -> Any:
    """Import an optional package, which only runs that set this field need. Raises UserError if it is missing."""
    try:
        return import_module(package)
    except ImportError as error:
        raise UserError(f"{field} needs {package} ({error}): {how_to_install([package])}") from error


def looks_like_path(text: str, base: Path = Path()) -> bool:
    """Whether a text is a path and not a hub's "name" or "owner/name", even if the path does not exist.

    A path begins or ends like one, has more parts, or its first part is a directory under `base`.
    """
    first, *rest = text.split("/")
    begins_or_ends = text.startswith((".", "/", "~")) or text.endswith("/")
    return begins_or_ends or len(rest) > 1 or (rest != [] and (base / first).is_dir())


def _merge(kind: type[Section], base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    """The tables of `base` with the values of `top`, which win, and displace others; `kind` is the tables' model."""
    displaced = {other for name in top for other in kind.displaces.get(name, ())}
    merged = _without(displaced, base)
    if isinstance(presets := base.get("presets"), dict):
        merged["presets"] = {preset: _without(top, options) for preset, options in presets.items()}
    for name, value in top.items():
        both_tables = isinstance(value, dict) and isinstance(merged.get(name), dict)
        merged[name] = _merge(_table(kind, name), merged[name], value) if both_tables else value
    return merged


def _without(names: Collection[str], table: Any) -> Any:
    return {name: value for name, value in table.items() if name not in names} if isinstance(table, dict) else table


#: Messages in a file's own words, in place of pydantic's in Python's.
_EXPECTED = {"model_type": "expected a table", "tuple_type": "expected a list", "list_type": "expected a list"}


def _describe(kind: type[Section], error: ValidationError, path: Path, overrides: dict[str, Any]) -> Iterator[str]:
    """A line for each field that is wrong."""
    for item in error.errors():
        names = [str(name) for name in takewhile(lambda part: isinstance(part, str), item["loc"])]
        field, received = ".".join(names), item["input"]
        if names != list(item["loc"]):  # of a list
            field += f": value {int(item['loc'][len(names)]) + 1}"
        given: Any = overrides  # the command line's value of this field
        for name in names:
            given = given.get(name) if isinstance(given, dict) else None
        if given is None or given == {}:
            where = f"{path}: {field}"
        elif isinstance(given, dict):  # several fields that do not go together
            where = f"{path} with {' '.join('--' + '.'.join([*names, name]) for name in given)}: {field}"
        else:
            where = f"--{field}"
        where = where.removesuffix(": ")
        if item["type"] == "extra_forbidden":
            *table, name = names
            beside = {other[len(table)] for other, _ in fields(kind) if list(other[: len(table)]) == table}
            yield f"{where}: unknown field (value {received!r}){nearest(name, beside)}"
        elif item["type"] == "missing":
            yield f"{where}: required, but not given"
        else:
            message = _EXPECTED.get(item["type"], item["msg"].removeprefix("Value error, "))
            shows_value = isinstance(received, BaseModel | dict) or message.endswith(f", got {received!r}")
            yield f"{where}: {message}{'' if shows_value else f', got {received!r}'}"
