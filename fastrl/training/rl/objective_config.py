"""The `[objective]` table. Its options are read from the presets' signatures, so a new preset is configurable at once.

    [objective]
    name = "grpo"                  # any key of fastrl.PRESETS, in any case
    entropy_coef = 0.01            # an option of that preset

    [objective.presets.gspo]       # options for name = "gspo", which win over those above
    clip_low = 0.1

A config that extends this one, and the command line (`--objective.clip_low 0.2`), win over both.
"""

import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Callable
from typing import Any, Literal, Union

from pydantic import Field, TypeAdapter, ValidationError, create_model, model_validator

from fastrl import PRESETS, Objective
from fastrl.training.common.settings import Section

_BY_NAME: dict[str, Callable[..., Objective]] = {name.lower(): preset for name, preset in PRESETS.items()}


def _scalar(hint: Any) -> Any:
    """The part of a type hint that TOML and a command line can write: numbers, strings, None; or only NoneType."""
    if typing.get_origin(hint) in (Union, types.UnionType):
        return functools.reduce(lambda a, b: a | b, (_scalar(part) for part in typing.get_args(hint)))
    if typing.get_origin(hint) is Literal or hint in (float, int, str, bool):
        return hint
    return types.NoneType


def _options(preset: Callable[..., Objective]) -> dict[str, Any]:
    """Option name -> scalar type, for the preset's own arguments and, if it accepts them, Objective's fields."""
    parameters = inspect.signature(preset).parameters.values()
    hints = typing.get_type_hints(preset)
    options = {p.name: _scalar(hints.get(p.name, float)) for p in parameters if p.kind is not p.VAR_KEYWORD}
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        fields = typing.get_type_hints(Objective)
        options = {f.name: _scalar(fields[f.name]) for f in dataclasses.fields(Objective)} | options
    return {name: hint for name, hint in options.items() if hint is not types.NoneType}


_OPTIONS = {name: _options(preset) for name, preset in _BY_NAME.items()}


class _ObjectiveBase(Section):
    """The objective."""

    name: str
    """The preset."""
    presets: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Options for one preset; they win over the options above."""

    @model_validator(mode="after")
    def _buildable(self) -> "_ObjectiveBase":
        if self.name.lower() not in _BY_NAME:
            raise ValueError(f"name: expected one of {', '.join(_BY_NAME)}, got {self.name!r}")
        for preset, options in self.presets.items():
            _check_options(f"presets.{preset}", preset, options)
        _check_options("", self.name, self._chosen_options())
        try:
            self.build()
        except (TypeError, ValueError) as error:  # from the preset's own checks, or for a missing argument
            raise ValueError(str(error)) from error
        return self

    def _chosen_options(self) -> dict[str, Any]:
        return {name: value for name, value in self if name not in ("name", "presets") and value is not None}

    def build(self) -> Objective:
        """The objective: the preset called with its options."""
        name = self.name.lower()
        options = next((table for key, table in self.presets.items() if key.lower() == name), {})
        return _BY_NAME[name](**(self._chosen_options() | options))


def _check_options(where: str, preset: str, options: dict[str, Any]) -> None:
    """Raise ValueError for an unknown preset, and for an option that it does not have or that has another type."""
    known = _OPTIONS.get(preset.lower())
    if known is None:
        raise ValueError(f"{where}: expected one of {', '.join(_BY_NAME)}, got {preset!r}")
    for option, value in options.items():
        dotted = f"{where}.{option}".lstrip(".")
        if option not in known:
            raise ValueError(f"{dotted}: {preset} has no such option; it has {', '.join(known) or 'none'}")
        try:
            TypeAdapter(known[option]).validate_python(value)
        except ValidationError as error:
            raise ValueError(f"{dotted}: {error.errors()[0]['msg']}, got {value!r}") from error


def _option_fields() -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for preset, options in _OPTIONS.items():
        for name, hint in options.items():
            known, presets = fields.get(name, (types.NoneType, []))
            fields[name] = (known | hint, [*presets, preset])

    def used_by(presets: list[str]) -> str:
        return "any preset" if len(presets) == len(_OPTIONS) else ", ".join(presets)

    return {n: (hint | None, Field(None, description=f"Option of {used_by(p)}.")) for n, (hint, p) in fields.items()}


ObjectiveConfig = create_model("ObjectiveConfig", __base__=_ObjectiveBase, **_option_fields())
