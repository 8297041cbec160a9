"""The pages of docs/functions, and the docstrings that the site makes pages of: what they name is what there is."""

import ast
import contextlib
import dataclasses
import inspect
import io
import re
import textwrap
from typing import get_args, get_type_hints

import pytest
from page_tables import first_table
from places import ROOT

import fastrl
from fastrl.backend.cuda import row_forward_gradient as cluster_kernel
from fastrl.losses import supports
from fastrl.objectives import row_local
from fastrl.objectives.objective import KL, RolloutCorrection
from fastrl.objectives.preferences import _READS as READS
from fastrl.objectives.presets import any_numbers
from fastrl.objectives.row_local import Given, scope
from fastrl.planning import budget

FOLDER = ROOT / "docs" / "functions"
HAND_WRITTEN = (
    *("linear_policy_loss", "logits_policy_loss", "policy_loss", "linear_token_logprobs", "token_logprobs"),
    *("linear_cross_entropy", "linear_divergence", "topk_divergence", "gathered_logprobs", "linear_gathered_logprobs"),
    *("linear_preference_loss", "preference_loss", "linear_kto_loss", "kto_loss", "linear_dpo_loss", "dpo_loss"),
    *("reward_model_loss", "SamplingMask", "Objective", "explain", "plan_memory", "use_backend", "backends"),
    *("check_inputs", "group_advantages", "gae", "value_loss"),
)
SECTIONS = ("Example", "What runs when", "Memory", "Precision", "See also")
FUNCTIONS = {name: x for name in fastrl.__all__ if inspect.isfunction(x := getattr(fastrl, name))}
CLASSES = {name: x for name in fastrl.__all__ if inspect.isclass(x := getattr(fastrl, name))}
#: Functions that check nothing, because they have no arguments.
NEVER_RAISE = ("backends", "check_inputs")


# --- docstrings -------------------------------------------------------------------------------------------------------


#: Parameters that do not mean the same everywhere -> in how many senses. All others have one text, wherever they are.
SENSES = {
    "beta": 9,  # of the log-ratios, of scores, 1 / (2 beta), DRO, CPO, SimPO, ORPO, a KL reward, a mixture
    "low": 9,
    "high": 7,
    "mask": 5,  # of responses, of a policy loss, of statistics, of advantages, of entries
    "kind": 5,
    "targets": 4,
    "hidden": 4,
    "denominator": 4,  # of tokens, pairs, responses, or what an aggregation divides by
    "logprobs": 4,
    "ref_logprobs": 4,
    "rewards": 3,
    "objective": 3,
    "cu_seqlens": 3,
    "clip": 3,
    "ratio": 3,
    "coef": 3,
    **dict.fromkeys(("tp_group", "reduce_hidden_grad", "entropy", "token_weights", "group_ids", "values", "gamma"), 2),
    **dict.fromkeys(("label_smoothing", "clip_high", "dual_clip", "fraction", "kl", "max_length"), 2),
    **dict.fromkeys(("scores", "teacher_hidden"), 2),
}


def sections(text):
    """The sections of a docstring in Google's style: name -> its items, {name of the item: description}."""
    found, items = {}, None
    for line in inspect.cleandoc(text).splitlines():
        heading = re.fullmatch(r"(Args|Returns|Raises):", line)
        if heading:
            items = found.setdefault(heading[1], {})
        elif line.strip() and not line.startswith(" "):
            items = None
        elif items is not None and (item := re.fullmatch(r"    ([\w*][\w*, ]*): (.+)", line)):
            items[item[1]] = item[2]
        elif items is not None and line.startswith("    ") and not line.startswith("     "):
            items[line.strip()] = ""  # of Returns, or an item without a description
        elif items and line.strip():
            items[next(reversed(items))] += f" {line.strip()}"
    return found


def parameters(function):
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    found = inspect.signature(function).parameters.values()
    return [stars.get(p.kind, "") + p.name for p in found if p.name not in ("self", "cls")]


def methods():
    for name, kind in CLASSES.items():
        for method, x in inspect.getmembers(kind, lambda x: inspect.isfunction(x) or inspect.ismethod(x)):
            if not method.startswith("_") and x.__module__.startswith("fastrl.") and parameters(x):
                yield f"{name}.{method}", x


def test_the_parser_finds_what_is_wrong():
    text = """One line.

    Args:
        a, b: shared.
        c: a description
            that goes on: here.
        The others: as elsewhere.

    Returns:
        A number.
    """
    assert sections(text) == {
        "Args": {"a, b": "shared.", "c": "a description that goes on: here.", "The others": "as elsewhere."},
        "Returns": {"A number.": ""},
    }


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_functions_docstring_names_its_arguments_results_and_errors(name):
    function = FUNCTIONS[name]
    found = sections(function.__doc__)
    assert list(found.get("Args", {})) == parameters(function)
    assert found.get("Returns"), "no Returns"
    assert bool(found.get("Raises")) == (name not in NEVER_RAISE)


@pytest.mark.parametrize(("name", "method"), [pytest.param(*x, id=x[0]) for x in methods()])
def test_a_methods_docstring_names_its_arguments(name, method):
    found = sections(method.__doc__)
    assert list(found.get("Args", {})) == parameters(method)
    assert found.get("Returns") or found.get("Raises")


def made_by_callers():
    """The dataclasses that a caller makes: gates, objectives and their parts."""
    returned = ("MemoryPlans", "Explanation")
    return {name: x for name, x in CLASSES.items() if dataclasses.is_dataclass(x) and name not in returned}


@pytest.mark.parametrize("name", made_by_callers())
def test_a_classs_docstring_names_its_arguments(name):
    assert list(sections(CLASSES[name].__doc__)["Args"]) == [f.name for f in dataclasses.fields(CLASSES[name])]


def test_a_parameter_has_the_same_text_wherever_it_means_the_same():
    texts = {}
    for name, documented in (FUNCTIONS | made_by_callers()).items():
        for parameter, text in sections(documented.__doc__).get("Args", {}).items():
            texts.setdefault(parameter, {}).setdefault(text, []).append(name)
    del texts["**fields"]
    wrong = {name: found for name, found in texts.items() if len(found) != SENSES.get(name, 1)}
    assert wrong == {}
    # A reader is not sent to another function for what an argument is.
    assert [text for found in texts.values() for text in found if re.search(r"\bas in `", text)] == []


@pytest.mark.parametrize("name", [*fastrl.PRESETS, *fastrl.PREFERENCES])
def test_a_preset_lists_the_fields_that_it_takes(name):
    preset = getattr(fastrl, name)
    listed = re.findall(r"\w+", sections(preset.__doc__)["Args"]["**fields"].partition(": ")[2])
    own = [parameter for parameter in parameters(preset) if parameter != "**fields"]
    (fields,) = get_args(get_type_hints(preset)["fields"])
    assert sorted(listed) == sorted(fields.__annotations__) and not set(own) & set(listed)
    made = fastrl.Objective if name in fastrl.PRESETS else fastrl.Preference
    types = get_type_hints(made)
    assert get_type_hints(fields) == {field: types[field] for field in listed}
    if made is fastrl.Objective:  # none is left out
        assert {*own, *listed} >= {field.name for field in dataclasses.fields(made)}
    else:
        formula = preset().formula
        assert {*own, *listed} == {"beta", "nll_coef", "average", "reference", *READS[formula]}


def fields_of(kind):
    """Names of the fields of a dataclass or NamedTuple -> the docstrings under them."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    found = {}
    for statement, following in zip(body.body, [*body.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and "ClassVar" not in ast.unparse(statement.annotation):
            is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            found[statement.target.id] = following.value.value if is_text else None
    return found


@pytest.mark.parametrize("name", [n for n in CLASSES if n not in made_by_callers() and n != "SamplingMask"])
def test_every_field_of_a_result_has_a_docstring(name):
    kind = CLASSES[name]
    names = [f.name for f in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else list(kind._fields)
    found = fields_of(kind)
    assert list(found) == names
    assert [field for field, text in found.items() if not text] == []


def test_no_description_begins_with_a_sign_that_markdown_takes_for_a_quotation():
    texts = {name: list(fields_of(kind).values()) for name, kind in CLASSES.items() if name != "SamplingMask"}
    for name, x in (*FUNCTIONS.items(), *methods(), *made_by_callers().items()):
        texts[name] = [text for items in sections(x.__doc__ or "").values() for text in items.values()]
    assert {name: t for name, found in texts.items() for t in found if t and t.startswith((">", "#", "- "))} == {}


def test_sources_of_formulas_are_named():
    # Of what is published: a preset, an advantage, a gate.
    without = ["BNPO", "CPI", "REINFORCE", "NoGate", "Objective", "Preference", "LossContext", "SamplingMask"]
    published = [*fastrl.PRESETS, *fastrl.PREFERENCES, *(n for n in FUNCTIONS if n.endswith("_advantages"))]
    published += [n for n, kind in CLASSES.items() if issubclass(kind, fastrl.Clip.__base__)]
    missing = [n for n in published if n not in without and "arXiv:" not in getattr(fastrl, n).__doc__]
    assert missing == []


# --- pages ------------------------------------------------------------------------------------------------------------


def page(name):
    return (FOLDER / f"{name}.md").read_text()


def test_the_index_has_every_public_name_once():
    found = re.findall(r"^\| \[?`fastrl\.(\w+)`(?:\]\((\w+)\.md\))? \|", page("README"), re.MULTILINE)
    assert sorted(name for name, _ in found) == sorted(fastrl.__all__)
    # The site makes a page of any other name, and leads its mention there.
    assert sorted((name, file) for name, file in found if file) == sorted((name, name) for name in HAND_WRITTEN)


def test_the_index_has_every_preset_with_its_algorithm():
    found = re.findall(r"^\| `fastrl\.(\w+)`.*\| \[\1\]\(\.\./algorithms/(\w+)\.md\) \|$", page("README"), re.MULTILINE)
    assert sorted(found) == sorted((name, name.lower()) for name in (*fastrl.PRESETS, *fastrl.PREFERENCES))


def test_the_index_has_the_names_of_the_adapters():
    rows = first_table(page("README"), "Integrations")
    for module, names, link in rows:
        path = ROOT / module.strip("`").replace(".", "/")
        source = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
        named = re.findall(r"`(\w+)`", names)
        public = re.search(r"^__all__ = (\[.*?\])", source, re.MULTILINE | re.DOTALL)
        if public:
            assert sorted(named) == sorted(ast.literal_eval(public[1])), module
        assert all(re.search(rf"^(def|class) {name}\b|\b{name}\b", source, re.MULTILINE) for name in named), module
        assert (FOLDER / re.search(r"\((.*)\)", link)[1]).exists()


def test_the_pages_are_those_of_public_names():
    found = {path.stem for path in FOLDER.glob("*.md")} - {"README", "plans"}
    assert found == set(HAND_WRITTEN) and found <= set(fastrl.__all__)
    assert len({name.lower() for name in fastrl.__all__}) == len(fastrl.__all__)  # files on any system


@pytest.mark.parametrize("name", HAND_WRITTEN)
def test_a_page_has_its_sections_and_its_own_function(name):
    text = page(name)
    assert text.startswith(f"# fastrl.{name}\n")
    assert re.findall(r"^:::.*$", text, re.MULTILINE) == [f"::: fastrl.{name}"]
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert [h for h in headings if h in SECTIONS] == list(SECTIONS)
    source = inspect.getsourcefile(inspect.unwrap(getattr(fastrl, name)))
    target = re.search(r"^Source: \[([\w/.]+)\]\(\.\./\.\./([\w/.]+)\)$", text, re.MULTILINE)
    assert target[1] == target[2] and (ROOT / target[1]).samefile(source)
    example = text.split("## Example\n")[1].split("\n## ")[0]
    assert re.search(r"```python\nimport (torch, )?fastrl\n", example), "an example stands by itself"


def test_what_an_example_prints_is_what_stands_below_it():
    compared = 0
    for name in HAND_WRITTEN:
        namespace = {}
        blocks = list(re.finditer(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```)?", page(name), re.DOTALL))
        if not any(block[2] for block in blocks):
            continue
        for block in blocks:
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(block[1], namespace)
            if block[2]:
                assert printed.getvalue().strip() == block[2].strip(), name
                compared += 1
    assert compared >= 5


# --- the shared tables ------------------------------------------------------------------------------------------------

SHAPE = {"tokens": 8192, "hidden": 4096, "vocab": 151936, "device": "cuda"}
NEEDS = {"hidden and weight": ("hidden", "weight"), "hidden": ("hidden",), "weight": ("weight",), "none": ()}


def planned(gradients, objective, **options):
    longest = 512 if isinstance(objective, fastrl.Objective) and objective.ratio == "sequence" else None
    return fastrl.plan_memory(
        **SHAPE, objective=objective, gradients=gradients, longest=longest, budget="64GiB", **options
    )


def test_the_costs_of_the_plans():
    text = page("plans")
    expected = {}
    for column, needs in enumerate(NEEDS.values(), 1):
        for objective in (fastrl.GRPO(), fastrl.GSPO(), None):
            for plan in planned(needs, objective).fitting:
                expected.setdefault(plan.name, {})[column] = f"{plan.units}U"
    rows = first_table(text, "Cost in matrix products")
    found = {row[0].strip("`"): {i: cell for i, cell in enumerate(row) if i and cell} for row in rows}
    assert found == expected
    entropy = planned(("hidden",), fastrl.GRPO(entropy_coef=0.1))
    assert "frozen-head costs 3U" in text and {p.name: p.units for p in entropy.fitting}["frozen-head"] == 3


def test_the_smallest_budgets_of_the_plans():
    rows = first_table(page("plans"), "Memory of each plan")
    for column, needs in ((2, ("hidden", "weight")), (3, ("hidden",))):
        expected = planned(needs, fastrl.GRPO()).least | planned(needs, fastrl.GSPO()).least
        found = {row[0].strip("`"): row[column] for row in rows if row[column]}
        assert found == {name: budget.text(size) for name, size in expected.items()}


def test_which_plans_a_function_has():
    rows = {row[0]: row[1] for row in first_table(page("plans"), "Which plans a function has")}
    both = ("hidden", "weight")
    independent, dependent = planned(both, fastrl.GRPO()), planned(both, fastrl.GSPO())
    cases = {
        "independent tokens": independent,
        "depend on each other": dependent,
        '"mean" and "sum"': independent,
        "`linear_token_logprobs`": planned(both, None),
        "`linear_preference_loss`": dependent,
        "`linear_kto_loss`": dependent,
        "`linear_divergence`": planned(both, fastrl.GRPO(), teacher_hidden=2048),
    }
    assert len(cases) == len(rows)
    for key, plans in cases.items():
        (text,) = [text for name, text in rows.items() if key in name]
        assert re.sub(r" in chunks of whole \w+", "", text) == ", ".join(plans.least), key


def test_which_objectives_are_row_local():
    rows = first_table(page("plans"), "Row-local objectives")
    words = {row_local.TOKEN: "row-local", row_local.RESPONSE: "whole response", row_local.BATCH: "whole batch"}
    seen = set()
    for what, off, on in rows:
        for name in set(re.findall(r"\w+", what)) & set(fastrl.PRESETS):
            seen.add(name)
            preset = any_numbers(name)
            for text, given in ((off, Given()), (on, Given(old=False))):
                assert text.startswith(words[scope(preset, given)]), (name, text)
            if "if advantages" in on:
                assert scope(preset, Given(old=False, uneven=True)) == row_local.RESPONSE
            elif on == "row-local":
                assert scope(preset, Given(old=False, uneven=True)) == row_local.TOKEN
            if "without `rollout_logprobs`" in on:
                assert scope(preset, Given(old=False, rollout=True)) == row_local.RESPONSE
    token = {name for name in fastrl.PRESETS if scope(any_numbers(name), Given()) == row_local.TOKEN}
    assert set(fastrl.PRESETS) - seen <= token
    corrected = fastrl.PPO(rollout_correction=RolloutCorrection("sequence"))
    assert [scope(corrected, Given(old=old, rollout=True)) for old in (True, False)] == ["token", "response"]
    weighted = fastrl.PPO(kl=KL("k1", 0.1, weighted=True))
    assert [scope(weighted, Given(threshold=t)) for t in (True, False)] == ["response", "token"]


def test_the_bounds_of_the_cluster_kernel_and_the_warnings():
    text = page("backends")
    lowest, highest = cluster_kernel._FASTER[0], cluster_kernel._FASTER[-1]
    assert f"| columns | {lowest:,} to {highest:,} |" in text
    source = "".join(
        path.read_text() for folder in ("backend", "passes") for path in (ROOT / "fastrl" / folder).rglob("*.py")
    )
    beginnings = [re.search(r"`(.*) \.\.\.`", row[0])[1] for row in first_table(text, "Warnings of slower paths")]
    assert len(beginnings) == source.count("warnings.warn(")
    assert [b for b in beginnings if b not in source] == []


def test_the_widths_up_to_which_supports_are_gathered():
    text = " ".join(page("SamplingMask").split())
    cpu, cuda = ([round(1 / supports._WIDEST[device][size]) for size in (4, 2)] for device in ("cpu", "cuda"))
    assert f"V / {cpu[0]} ids in float32 on a CPU, V / {cpu[1]} in 16 bits" in text
    assert f"on a GPU V / {cuda[0]} and V / {cuda[1]}" in text
    assert f"From logits it is V / {round(1 / supports._WIDEST_FROM_LOGITS)}, at least 64" in text


def test_who_takes_a_group():
    # The page of linear_divergence says that it has none.
    without = [n for n in HAND_WRITTEN if n.startswith("linear_") and "tp_group" not in parameters(FUNCTIONS[n])]
    assert without == ["linear_divergence"]
