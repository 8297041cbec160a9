"""A table that names a preset; its options are read from the presets' signatures: a new preset is configurable at once.

class _LossBase(PresetConfig):
    known = Presets.of(PREFERENCES, Preference, without=("formula", "gamma", "tau"))
    name: str = "dpo"

LossConfig = create_model("LossConfig", __base__=_LossBase, **_LossBase.known.fields(texts))
"""

import dataclasses
import functools
import inspect
import re
import types
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar, Literal, NamedTuple, Union

from pydantic import Field, TypeAdapter, ValidationError, model_validator

from fastrl.base.spelling import nearest
from fastrl.training.config.settings import Section


class Presets(NamedTuple):
    """The presets that a table may name, in lower case, and their options."""

    functions: Mapping[str, Callable[..., Any]]
    options: Mapping[str, Mapping[str, Any]]
    """preset -> option -> what TOML and a command line can write."""

    @classmethod
    def of(cls, table: Mapping[str, Callable[..., Any]], made: type, without: Collection[str] = ()) -> "Presets":
        """From a table of presets that make a dataclass; of its fields, `without` are options only where named."""
        functions = {name.lower(): preset for name, preset in table.items()}
        return cls(functions, {name: _options(preset, made, without) for name, preset in functions.items()})

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

    def fields(self, texts: Mapping[str, str]) -> dict[str, Any]:
        """The options of all presets as fields of a table, None where they are not given.

        `texts` says what the options of every preset mean; the presets' docstrings say it of their own.
        """
        hints: dict[str, Any] = {}
        for options in self.options.values():
            for name, hint in options.items():
                hints[name] = hints.get(name, types.NoneType) | hint
        return {
            name: (hint | None, Field(None, description=self._described(name, texts.get(name))))
            for name, hint in hints.items()
        }

    def _described(self, option: str, shared: str | None) -> str:
        """What an option means, `shared` or what the docstrings of the presets say of it, with its defaults."""
        presets: dict[tuple[str, str], list[str]] = {}
        for preset, function in self.functions.items():
            if (parameter := inspect.signature(function).parameters.get(option)) is None:
                continue
            listed = (inspect.getdoc(function) or "").partition("Args:\n")[2]
            found = re.search(rf"^ +{option}: (.+)$", listed, re.MULTILINE)
            text = found[1].replace(", a float or a 0-dim tensor", "") if found else ""
            default = f"default {parameter.default}"
            if parameter.default is parameter.empty:
                default = "required"
            elif parameter.default is None:
                text, default = text.replace("None:", "left out:"), ""
            else:  # TOML has no None, so nothing can put it in the default's place
                text = re.sub(r"; None: .*", ".", text)
            presets.setdefault((shared or text, default), []).append(preset)
        if shared is not None:
            defaults = (f"{default.capitalize()} for {', '.join(of)}." for (_, default), of in presets.items())
            return " ".join([shared, *defaults])
        return "\n".join(
            f"For {', '.join(of)}{f' ({default})' if default else ''}: {text}"
            for (text, default), of in presets.items()
        )


def _scalar(hint: Any) -> Any:
    """The part of a type hint that TOML and a command line can write: numbers, strings, None; or only NoneType."""
    if typing.get_origin(hint) in (Union, types.UnionType):
        return functools.reduce(lambda a, b: a | b, (_scalar(part) for part in typing.get_args(hint)))
    if typing.get_origin(hint) is Literal or hint in (float, int, str, bool):
        return hint
    return types.NoneType


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
