"""The tables of the guide to moving: their names and defaults are those of the packages, and of fastrl."""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
import typing
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
from page_tables import table, trl_folder
from peer_cases import folder_of
from places import ROOT

import fastrl
from fastrl.training.config.train import Config

PAGE = (ROOT / "docs" / "guides" / "moving.md").read_text(encoding="utf-8")


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def section_of(hint: Any) -> Any:
    """The table's class in a field's hint, such as `KLConfig | None`."""
    parts = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    (found,) = [part for part in parts if part is not types.NoneType]
    return found


def default_here(name: str) -> str:
    """A field's default, as the page writes it."""
    table, _, field = name.partition(".")
    model = section_of(Config.model_fields[table].annotation)
    return str(model.model_fields[field].get_default(call_default_factory=True))


def check_here(cells: list[str]) -> None:
    fields = names(cells[2])
    assert fields, cells
    defaults = [value for cell in names(cells[3]) for value in cell.split(", ")]
    assert len(defaults) in (0, len(fields)), cells
    here = [default_here(name) for name in fields]
    assert here == (defaults or here), cells


TRL = table(PAGE, "`trl.GRPOConfig`")
VERL = table(PAGE, "verl's config")


def trl_of_the_page() -> ModuleType:
    """TRL, if it is the version that the page speaks of."""
    trl_folder()
    return import_module("trl")


@pytest.mark.parametrize("cells", TRL, ids=lambda cells: cells[0])
def test_trl(cells: list[str]) -> None:
    known = {field.name: field for field in dataclasses.fields(trl_of_the_page().GRPOConfig)}
    (name,), (default,) = names(cells[0]), names(cells[1])
    assert str(known[name].default) == default
    check_here(cells)


def test_trl_s_loss_types() -> None:
    from fastrl.integrations.grpo_options import LOSS_TYPES

    listed = table(PAGE, "TRL's `loss_type`")
    assert {names(cells[0])[0] for cells in listed} == set(LOSS_TYPES)
    for name in re.findall(r"`trl\.(\w+)`", PAGE):
        assert hasattr(trl_of_the_page(), name)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo"])
def test_the_presets_are_the_objectives_of_trl_s_options(loss_type: str) -> None:
    """With what the table sets as well, and TRL's defaults."""
    from fastrl.integrations.grpo_options import grpo_objective

    fields = dataclasses.fields(trl_of_the_page().GRPOConfig)
    defaults: dict[str, Any] = {field.name: field.default for field in fields}
    high = 5.0 if loss_type == "cispo" else defaults["epsilon"]
    level = "sequence" if loss_type == "luspo" else "token"
    expected = grpo_objective(
        loss_type,
        epsilon_low=defaults["epsilon"],
        epsilon_high=high,
        importance_sampling_level=level,
        max_completion_length=defaults["max_completion_length"] if loss_type == "dr_grpo" else None,
        beta=defaults["beta"],
    ).objective
    also: dict[str, dict[str, Any]] = {
        "grpo": {"kl_coef": 0},
        "dapo": {"clip_high": 0.2},
        "dr_grpo": {"max_length": 512},
        "cispo": {"cap": 5.0},
        "luspo": {"clip_low": 0.2, "clip_high": 0.2},
    }
    (cells,) = [cells for cells in table(PAGE, "TRL's `loss_type`") if names(cells[0]) == [loss_type]]
    chosen = also.get(loss_type, {})
    assert all(name in cells[2] for name in chosen)
    preset = {name.lower(): preset for name, preset in fastrl.PRESETS.items()}[names(cells[1])[0]]
    assert preset(**chosen) == expected


@cache
def verl_s_config() -> Any:
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load((folder_of("verl") / "trainer" / "config" / "_generated_ppo_trainer.yaml").read_text())


@pytest.mark.parametrize("cells", VERL, ids=lambda cells: cells[0])
def test_verl(cells: list[str]) -> None:
    (name,) = names(cells[0])
    value: Any = verl_s_config()
    for part in name.split("."):
        value = value[part]
    for default in names(cells[1]):
        assert str(value) == default or float(value) == float(default)
    check_here(cells)


def test_verl_s_names() -> None:
    source = (folder_of("verl") / "trainer" / "ppo" / "core_algos.py").read_text()
    modes = set(re.findall(r'@register_policy_loss\("(\w+)"\)', source)) - {"bypass_mode"}
    listed = [(mode, names(cells[1])[0]) for cells in table(PAGE, "verl's `loss_mode`") for mode in names(cells[0])]
    assert {mode for mode, _ in listed} == modes
    assert all(preset in fastrl.PRESETS for _, preset in listed)
    estimators = set(re.findall(r'(?m)^    [A-Z_]+ = "(\w+)"$', source))
    known = typing.get_args(
        section_of(Config.model_fields["advantages"].annotation).model_fields["estimator"].annotation
    )
    for theirs, ours in ((names(cells[0])[0], names(cells[1])[0]) for cells in table(PAGE, "`adv_estimator`")):
        assert theirs in estimators and ours in known


def test_liger() -> None:
    theirs = pytest.importorskip("liger_kernel.chunked_loss")
    import fastrl.integrations.liger as ours

    for cells in table(PAGE, "`liger_kernel.chunked_loss`"):
        assert hasattr(theirs, names(cells[0])[0]) and hasattr(ours, names(cells[0])[0])
        assert names(cells[1])[0] in fastrl.__all__
    options = inspect.signature(theirs.LigerFusedLinearGRPOLoss).parameters
    loss = {*inspect.signature(fastrl.linear_policy_loss).parameters, "ratio"}
    for cells in table(PAGE, "argument of `LigerFusedLinearGRPOLoss`"):
        assert str(options[names(cells[0])[0]].default) == names(cells[1])[0], cells
        assert set(re.findall(r"(?<!\()\b(\w+)=(?!\.)", cells[2])) - {"kl"} <= loss, cells


def test_deviations_and_their_eps() -> None:
    """What the last table says of group advantages."""
    here = inspect.signature(fastrl.group_advantages).parameters
    assert (here["ddof"].default, here["eps"].default) == (0, 1e-6)
    trl = (trl_folder() / "trainer" / "grpo_trainer.py").read_text()
    assert "advantages / (std_rewards + 1e-4)" in trl and "std_rewards = nanstd(" in trl
    core = (folder_of("verl") / "trainer" / "ppo" / "core_algos.py").read_text()
    assert "id2std[idx] = torch.std(scores_tensor)" in core and "epsilon: float = 1e-6" in core
