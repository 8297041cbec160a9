"""The pages of the policy presets agree with the presets, with TRL's and verl's defaults, and with the recipes."""

from __future__ import annotations

import ast
import functools
import inspect
import math
import re
import tomllib
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from page_tables import first_table, trl_folder
from peer_cases import folder_of
from places import EXAMPLES, ROOT

import fastrl
from fastrl.integrations.grpo_options import LOSS_TYPES
from fastrl.objectives.gates import DETACHED_GATES, NoGate
from fastrl.objectives.objective import Objective
from fastrl.objectives.presets import any_numbers

PAGES = ROOT / "docs" / "algorithms"
SECTIONS = ["When to use it", "Formula", "Use", "Defaults", "With `fastrl train`"]  # and then Notes, or nothing
by_preset = pytest.mark.parametrize("preset", fastrl.PRESETS)


class Row(NamedTuple):
    """A line of a page's table of defaults."""

    parameter: str
    fastrl: str
    trl: str
    verl: str


def text_of(preset: str) -> str:
    return (PAGES / f"{preset.lower()}.md").read_text(encoding="utf-8")


def defaults(preset: str) -> list[Row]:
    return [Row(*cells) for cells in first_table(text_of(preset), "Defaults")]


def literal(text: str) -> Any:
    """A value as a page writes it; a word is a string."""
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


def own_parameters(preset: str) -> dict[str, Any]:
    """The arguments that a preset has besides the fields of an objective -> their defaults."""
    found = inspect.signature(fastrl.PRESETS[preset]).parameters.values()
    return {p.name: "required" if p.default is p.empty else p.default for p in found if p.kind != p.VAR_KEYWORD}


# --- the overview -----------------------------------------------------------------------------------------------------


@functools.cache
def overview() -> str:
    return (PAGES / "README.md").read_text(encoding="utf-8")


def test_the_overview_has_each_preset_once():
    names = [
        re.fullmatch(r"\[`(\w+)`\]\((\w+)\.md\)", cells[0]).groups() for cells in first_table(overview(), "Presets")
    ]
    assert sorted(names) == sorted((name, name.lower()) for name in fastrl.PRESETS)


@by_preset
def test_the_overview_says_what_the_preset_is(preset):
    objective = any_numbers(preset)
    (cells,) = (cells for cells in first_table(overview(), "Presets") if f"[`{preset}`]" in cells[0])
    _, ratio, gate, kl, aggregate = cells
    reads_ratio = objective.gate != NoGate(ratio=False)
    detached = reads_ratio and objective.gate.formula in DETACHED_GATES
    assert ratio == ((objective.ratio if reads_ratio else "none") + ", detached" * detached)
    more = [name for name in ("off_policy_delta", "future_kl", "covariance") if getattr(objective, name) is not None]
    assert re.findall(r"`(\w+)`", gate) == [type(objective.gate).__name__, *more]
    assert kl == ("" if objective.kl is None else objective.kl.kind)
    assert aggregate == objective.aggregate


def test_the_overview_names_a_use_for_each_preset():
    used = {
        name
        for cells in first_table(overview(), "Choosing an algorithm")
        for name in re.findall(r"\[(\w+)\]\(\w+\.md\)", cells[1])
    }
    assert used == set(fastrl.PRESETS)


def test_the_overview_has_each_field_of_an_objective_with_its_default():
    shown = {cells[0].strip("`"): cells[1] for cells in first_table(overview(), "Options of every preset")}
    assert list(shown) == [field.name for field in fields(Objective)]
    for field in fields(Objective):
        default = field.default if field.default is not MISSING else field.default_factory()
        if field.name == "gate":
            assert eval(shown["gate"].strip("`"), vars(fastrl)) == default
        else:
            assert literal(shown[field.name]) == default, field.name


# --- the pages --------------------------------------------------------------------------------------------------------


@by_preset
def test_a_page_has_its_parts(preset):
    text = text_of(preset)
    assert text.startswith(f"# {preset}\n\n")
    headings = re.findall(r"(?m)^## (.*)", text)
    assert headings in (SECTIONS, [*SECTIONS, "Notes"])
    (example,) = re.findall(r"(?s)```python\n(.*?)```", text)
    assert f"objective=fastrl.{preset}(" in example and "fastrl.linear_policy_loss(" in example


@by_preset
def test_a_gate_with_a_curve_has_its_place_on_the_page(preset):
    # Without a gate the weight is 1, or the ratio itself.
    drawn = [] if isinstance(any_numbers(preset).gate, NoGate) else [preset]
    assert re.findall(r"(?m)^<!-- gate: (.*?) -->$", text_of(preset)) == drawn


@by_preset
def test_the_defaults_are_the_presets(preset):
    own, objective = own_parameters(preset), any_numbers(preset)
    shown = {row.parameter.strip("`"): row.fastrl for row in defaults(preset)}
    assert next(iter(shown)) == "chosen by" and shown.pop("chosen by").startswith(f"`{preset}(")
    assert set(own) | {"aggregate"} <= set(shown)
    for name, cell in shown.items():
        found = own[name] if name in own else functools.reduce(getattr, name.split("."), objective)
        assert literal(cell.split(",")[0]) == found, name


@by_preset
def test_what_must_be_given_is_named_where_the_preset_is_called(preset):
    required = [name for name, default in own_parameters(preset).items() if default == "required"]
    assert defaults(preset)[0].fastrl == f"`{preset}({', '.join(f'{name}=...' for name in required)})`"


@by_preset
def test_the_config_is_a_part_of_the_recipe(preset):
    (block,) = re.findall(r"(?s)```toml\n(.*?)```(.*?\.toml\))", text_of(preset))
    part, recipe = tomllib.loads(block[0]), re.search(r"\(((?:\.\./)+[\w/]+\.toml)\)", block[1]).group(1)
    whole = resolved(PAGES / recipe)
    for table, options in part.items():
        for option, value in options.items():
            if (table, option, preset) == ("objective", "name", "BNPO"):  # it has none of its own
                assert value == "bnpo" and all(resolved(p).get("objective", {}).get("name") != value for p in recipes())
                continue
            assert whole[table][option] == value, (table, option)
    # PPOKL's coefficient adapts in its recipe, which is therefore CPI with a [kl].
    assert part["objective"]["name"] == ("cpi" if preset == "PPOKL" else preset.lower())


def recipes() -> list[Path]:
    return sorted((EXAMPLES / "recipes").glob("*.toml"))


@functools.cache
def resolved(path: Path) -> dict[str, Any]:
    """A config with what it inherits."""
    config = tomllib.loads(path.read_text(encoding="utf-8"))
    base = config.pop("base", None)
    if base is None:
        return config
    whole = resolved((path.parent / base).resolve())
    return {table: {**whole.get(table, {}), **config.get(table, {})} for table in {*whole, *config}}


def test_each_recipe_of_a_preset_is_on_its_page():
    missing = []
    for path in recipes():
        own = tomllib.loads(path.read_text(encoding="utf-8"))
        name = own.get("objective", {}).get("name")
        if name is not None and "distillation" not in resolved(path):
            page = (PAGES / f"{name}.md").read_text(encoding="utf-8")
            missing += [path.name] * (f"/recipes/{path.name})" not in page)
    assert not missing


# --- other packages ---------------------------------------------------------------------------------------------------

SPAN = re.compile(r"`([^`]+)`(?: = ([^,;)|]+))?")


def claims(cell: str) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """What a cell says: options that are set, defaults, and names alone."""
    set_to, default, alone = {}, {}, []
    for span, value in SPAN.findall(cell):
        name, equals, chosen = span.partition("=")
        if equals:
            set_to[name] = literal(chosen)
        elif value:
            default[name] = literal(value.strip())
        else:
            alone.append(name)
    return set_to, default, alone


@functools.cache
def classes(path: Path) -> dict[str, dict[str, Any]]:
    """Class -> its annotated fields with their defaults, read without an import."""
    found: dict[str, dict[str, Any]] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            found[node.name] = {
                line.target.id: default_of(line.value)
                for line in node.body
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
            }
    return found


def default_of(value: ast.expr | None) -> Any:
    if isinstance(value, ast.Call):
        (value,) = (keyword.value for keyword in value.keywords if keyword.arg in ("default", "default_factory"))
    try:
        return None if value is None else ast.literal_eval(value)
    except ValueError:
        return ast.unparse(value)


@functools.cache
def trl_options(config: str) -> dict[str, Any]:
    """The options of TRL's GRPOConfig, or of one that inherits from it."""
    options = dict(classes(trl_folder() / "trainer" / "grpo_config.py")["GRPOConfig"])
    if config == "GMPOConfig":
        options |= classes(trl_folder() / "experimental" / "gmpo" / "gmpo_config.py")["GMPOConfig"]
    return options


@by_preset
def test_trls_column_is_trls(preset):
    rows = defaults(preset)
    set_to, _, named = claims(rows[0].trl)
    options = trl_options("GMPOConfig" if "GMPOConfig" in named else "GRPOConfig")
    if not set_to and not named:
        assert {row.trl for row in rows} == {"-"}
        return
    trainer = (trl_folder() / "trainer" / "grpo_trainer.py").read_text(encoding="utf-8")
    assert set(set_to) <= set(options) and all(f'"{value}"' in trainer for value in set_to.values())
    for row in rows[1:]:
        chosen, default, alone = claims(row.trl)
        assert {name: options[name] for name in default} == default and not chosen
        assert set(alone) <= set(options)
        if row.parameter == "`aggregate`":
            assert row.trl == (LOSS_TYPES[set_to["loss_type"]][0] if set_to else "-")


@functools.cache
def verl_options() -> dict[str, Any]:
    """The options of verl's actor and, with a dot, of its policy loss, where its defaults and its code agree."""
    yaml, folder = pytest.importorskip("yaml"), folder_of("verl")
    config = yaml.safe_load((folder / "trainer" / "config" / "actor" / "actor.yaml").read_text(encoding="utf-8"))
    options = config | {f"policy_loss.{name}": value for name, value in config["policy_loss"].items()}
    code = classes(folder / "workers" / "config" / "actor.py")
    both = code["ActorConfig"] | {f"policy_loss.{name}": value for name, value in code["PolicyLossConfig"].items()}
    return {name: value for name, value in options.items() if name in both and both[name] == value}


@functools.cache
def verl_losses() -> dict[str, str]:
    """Name of a policy loss -> its source."""
    source = (folder_of("verl") / "trainer" / "ppo" / "core_algos.py").read_text(encoding="utf-8")
    return {
        ast.literal_eval(decorator.args[0]): ast.get_source_segment(source, node)
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef)
        for decorator in node.decorator_list
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "register_policy_loss"
    }


@by_preset
def test_verls_column_is_verls(preset):
    rows, options = defaults(preset), verl_options()
    chosen, _, _ = claims(rows[0].verl)
    if not chosen:
        assert {row.verl for row in rows} == {"-"}
        return
    loss = verl_losses()[chosen.get("loss_mode", "vanilla")]
    assert chosen.get("loss_agg_mode") in (None, any_numbers(preset).aggregate)
    assert set(chosen) <= {"loss_mode", "loss_agg_mode"}
    for row in rows[1:]:
        also, default, alone = claims(row.verl)
        assert {name: options[name] for name in default} == default
        assert not alone and all(name == "loss_mode" and value in verl_losses() for name, value in also.items())
        for name in default:  # the loss reads what the page says that it takes; KL and scale are added around it
            around = ("loss_agg_mode", "use_kl_loss", "kl_loss_coef", "kl_loss_type", "loss_scale_factor")
            assert name in around or name.rpartition(".")[2] in loss, name
        if row.parameter == "`aggregate`":
            free = "loss_agg_mode=loss_agg_mode" in loss
            assert row.verl == "-" if "loss_agg_mode" in chosen else row.verl.startswith("always ") != free


def test_the_notes_on_other_packages_hold():
    """What pages say outside of their tables of defaults."""
    loss = verl_losses()
    assert "config.get(  # Lower bound" in loss["vanilla"] and verl_options()["clip_ratio_c"] == 3.0
    assert "clip_ratio_c" not in loss["gspo"] and "max=10.0" in loss["gspo"]
    assert "torch.mean(pg_losses)" in loss["geo_mean"]
    algorithm = classes(folder_of("verl") / "trainer" / "config" / "algorithm.py")["AlgoConfig"]
    assert algorithm["norm_adv_by_std_in_grpo"] is True
    assert trl_options("GRPOConfig")["scale_rewards"] == "group" and trl_options("GRPOConfig")["loss_type"] == "dapo"
    assert trl_options("GRPOConfig")["vllm_importance_sampling_mode"] == "sequence_mask"
    rloo = classes(trl_folder() / "trainer" / "rloo_config.py")["RLOOConfig"]
    assert rloo["epsilon"] == 0.2
    assert not list(trl_folder().rglob("ppo_trainer.py"))


def test_dppos_thresholds_are_as_its_page_says():
    tv, kl = (fastrl.DPPO(kind).gate for kind in ("tv", "kl"))
    assert (tv.low, kl.low) == (tv.high, kl.high)
    said = f"None, which is {tv.low} for tv and {kl.low} for kl"
    assert [row.fastrl for row in defaults("DPPO") if row.parameter in ("`low`", "`high`")] == [said, said]


def test_vespos_largest_weights_are_as_its_page_says():
    gate = fastrl.VESPO().gate
    text = text_of("VESPO")
    for k, lam, place in ((gate.k_pos, gate.lam_pos, "2/3"), (gate.k_neg, gate.lam_neg, "3/2")):
        largest = math.exp(lam + k * math.log(k / lam) - k)
        assert f"{largest:.2f} at {place}" in text
