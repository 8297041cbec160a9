"""A table that names a preset; its options are read from the presets' signatures: a new preset is configurable at once.

class _LossBase(PresetConfig):
    known = Presets(PREFERENCES, Preference, without=("formula", "gamma", "tau"))
    name: str = "dpo"

LossConfig = create_model("LossConfig", __base__=_LossBase, **_LossBase.known.fields())
"""

import dataclasses
import functools
import inspect
import operator
import types
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar, Literal, Union

from pydantic import Field, TypeAdapter, ValidationError, model_validator

from fastrl.base.spelling import nearest
from fastrl.training.config.settings import Section


class Presets:
    """The presets that a table may name, in lower case, and their options."""

    def __init__(self, table: Mapping[str, Callable[..., Any]], made: type, without: Collection[str] = ()) -> None:
        """From a table of presets that make a dataclass; of its fields, `without` are options only where named."""
        self.functions = {name.lower(): preset for name, preset in table.items()}
        # preset -> option -> what TOML and a command line can write
        self.options = {name: _options(preset, made, without) for name, preset in self.functions.items()}

    def check(self, where: str, preset: str, options: Mapping[str, Any]) -> None:
        """Raise ValueError for an unknown preset, and for an option that it does not have or that has another type."""
        known = self.options.get(preset.lower())
        if known is None:
            raise ValueError(
                f"{where}: expected one of {', '.join(self.functions)}, got {preset!r}{nearest(preset, self.functions)}"
            )
        for option, value in options.items():
            dotted = f"{where}.{option}".lstrip(".")
            if option not in known:
                others = [name for name, options in self.options.items() if option in options]
                hint = f"; it is one of {', '.join(others)}" if others else nearest(option, known)
                raise ValueError(f"{dotted}: {preset} has no such option; it has {', '.join(known) or 'none'}{hint}")
            try:
                TypeAdapter(known[option]).validate_python(value)
            except ValidationError as error:
                raise ValueError(f"{dotted}: {error.errors()[0]['msg']}, got {value!r}") from error

    def fields(self) -> dict[str, Any]:
        """The options of all presets as fields of a table, None where they are not given."""
        hints: dict[str, Any] = {}
        for options in self.options.values():
            for name, hint in options.items():
                hints[name] = hints.get(name, types.NoneType) | hint
        return {name: (hint, None) for name, hint in hints.items()}


def _scalar(hint: Any) -> Any:
    """The part of a type hint that TOML and a command line can write: numbers, strings, None; or only NoneType."""
    if typing.get_origin(hint) in (Union, types.UnionType):
        return functools.reduce(operator.or_, map(_scalar, typing.get_args(hint)))
    return hint if typing.get_origin(hint) is Literal or hint in (float, int, str, bool) else types.NoneType


def _options(preset: Callable[..., Any], made: type, without: Collection[str]) -> dict[str, Any]:
    """Option name -> scalar type, for the preset's own arguments and, if it accepts them, the dataclass' fields."""
    parameters = inspect.signature(preset).parameters.values()
    hints = typing.get_type_hints(preset)
    options = {p.name: _scalar(hints.get(p.name, float)) for p in parameters if p.kind is not p.VAR_KEYWORD}
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        fields = typing.get_type_hints(made)
        shared = {f.name: _scalar(fields[f.name]) for f in dataclasses.fields(made) if f.name not in without}
        options = shared | options
    return {name: hint for name, hint in options.items() if hint is not types.NoneType}


class PresetConfig(Section):
    """A table that names a preset."""

    known: ClassVar[Presets]

    name: str
    """The preset, in any case."""
    presets: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Options for one preset: those of presets.NAME hold if name is NAME, and win over the other options."""

    @model_validator(mode="after")
    def _buildable(self) -> "PresetConfig":
        self.known.check("name", self.name, {})
        for preset, options in self.presets.items():
            self.known.check(f"presets.{preset}", preset, options)
        self.known.check("", self.name, self._chosen_options())
        try:
            self.build()
        except (TypeError, ValueError) as error:  # from the preset's own checks, or for a missing argument
            raise ValueError(str(error)) from error
        return self

    def _chosen_options(self) -> dict[str, Any]:
        return {name: value for name, value in self if name not in ("name", "presets") and value is not None}

    def build(self) -> Any:
        """What the preset makes of its options."""
        name = self.name.lower()
        options = next((table for key, table in self.presets.items() if key.lower() == name), {})
        return self.known.functions[name](**(self._chosen_options() | options))
