"""Every code block of the pages is run, or read by what would run it.

tests/support/doc_pages.py says how a block is marked, tests/support/doc_tensors.py which names python blocks find.
"""

from __future__ import annotations

import ast
import io
import json
import re
import shlex
import subprocess
import traceback
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import doc_tensors
import pytest
import torch
from doc_checks import check_config, code_of, commands, logical_lines, wrong_command, wrong_in_prose, wrong_names
from doc_pages import Block, Page, pages, with_blocks
from places import ROOT

import fastrl
from fastrl.base import dependencies
from fastrl.cli import main

#: What `make test` installs, and not every machine with a GPU has.
MAY_BE_MISSING = ("transformers", "trl", "liger_kernel", "peft", "datasets", "math_verify", "pydantic", "matplotlib")


#: Configs and commands are read by what takes them.
needs_the_commands = pytest.mark.skipif(
    bool(dependencies.missing(dependencies.TRAIN)), reason="needs the extra `train`"
)


def failure(message: str) -> pytest.fail.Exception:
    """A failure whose report is this text alone."""
    return pytest.fail.Exception(message, pytrace=False)


def by_page(*languages: str) -> Any:
    """A case for each page that has a block of these languages."""
    return pytest.mark.parametrize("page", with_blocks(*languages), ids=lambda page: page.name)


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_every_block_is_fenced_and_names_its_language(page: Page) -> None:
    assert not page.faults, "\n".join(page.faults)


@by_page("python")
@pytest.mark.usefixtures("one_thread")
def test_python_runs(page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    read = {node.id for block in page.of("python") for node in names_of(block)}
    namespace = {name: doc_tensors.given(name) for name in read & doc_tensors.NAMES}
    namespace |= {"torch": torch, "fastrl": fastrl, "__name__": "page"}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for block in page.of("python"):
            if "not run" in block.notes:
                wrong = wrong_names(block)
                assert not wrong, "\n".join(wrong)
            else:
                run(block, namespace)


@pytest.mark.parametrize(
    "page", [x for x in pages() if not x.name.startswith("benchmarks/results/")], ids=lambda page: page.name
)
def test_names_and_files_in_sentences_exist(page: Page) -> None:
    """Code between backticks: what it reads of fastrl and passes to it, and paths of the repository."""
    wrong = wrong_in_prose(page)
    assert not wrong, "\n".join(wrong)


def names_of(block: Block) -> list[ast.Name]:
    try:
        return [node for node in ast.walk(ast.parse(block.text)) if isinstance(node, ast.Name)]
    except SyntaxError as error:
        raise failure(f"{block.page.name}:{block.line + (error.lineno or 0)}: {error.msg}: {error.text}") from None


def run(block: Block, namespace: dict[str, Any]) -> None:
    """Run the block; what it prints is what the page says it does."""
    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            exec(code_of(block), namespace)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in MAY_BE_MISSING:
            raise failure(f"{block.where}: {error}; mark the block with <!-- not run: needs ... -->") from None
        pytest.skip(f"{block.where}: {error}")
    except Exception as error:
        lines = [
            x.lineno for x in traceback.extract_tb(error.__traceback__) if x.filename == str(ROOT / block.page.name)
        ]
        where = f"{block.page.name}:{lines[-1] if lines else block.line}"
        raise failure(f"{where}: {type(error).__name__}: {error}\n\n{traceback.format_exc()}") from None
    if block.output is not None:
        assert printed.getvalue().rstrip() == block.output.text.rstrip(), f"{block.output.where}: {block.where} prints"


@needs_the_commands
@by_page("toml")
def test_configs_are_valid(page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for block in page.of("toml"):
        try:
            check_config(block, tmp_path)
        except Exception as error:
            raise failure(f"{block.where}: {type(error).__name__}: {error}") from None


@needs_the_commands
@by_page("sh")
def test_commands_can_be_given(page: Page, tmp_path: Path) -> None:
    wrong = []
    for block in page.of("sh"):
        parsed = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True, timeout=60)
        if parsed.returncode:
            wrong.append(f"{block.where}: {parsed.stderr}")
            continue
        for words in commands(block):
            with pytest.MonkeyPatch.context() as patch:
                reason = wrong_command(words, page, tmp_path, patch)
            if reason is not None:
                wrong.append(f"{block.where}: {shlex.join(words)}\n    {reason}")
    assert not wrong, "\n".join(wrong)


@by_page("sh")
def test_plans_are_quoted_as_they_are_printed(page: Page, capsys: pytest.CaptureFixture[str]) -> None:
    """A block of `fastrl plan` whose output is marked."""
    for block in page.of("sh"):
        if block.output is None:
            continue
        (words,) = commands(block)
        assert words[:2] == ["fastrl", "plan"], f"{block.where}: only the output of `fastrl plan` is compared"
        assert main(words[1:]) == 0
        assert capsys.readouterr().out.rstrip() == block.output.text.rstrip(), f"{block.output.where}"


def test_json_can_be_read() -> None:
    for block in [block for page in pages() for block in page.of("json", "jsonl")]:
        for text in [block.text] if block.language == "json" else block.text.splitlines():
            try:
                json.loads(text)
            except ValueError as error:
                raise failure(f"{block.where}: {error}: {text}") from None


# --- these tests themselves -------------------------------------------------------------------------------------------


def given(*lines: str) -> Page:
    return Page("docs/given.md", "\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("lines", "fault"),
    [
        (["text", "", "    code"], "code by indentation"),
        (["- an item", "", "  of two paragraphs"], None),
        (["- an item", "", "      code"], "code by indentation"),
        (["1. an item", "    that goes on"], None),
        (["```", "x", "```"], "a fence names one of"),
        (["```console", "$ x", "```"], "a fence names one of"),
        (["```text", "x"], "never closed"),
        (["<!-- not run: needs vLLM -->", "", "```python", "```"], "directly before"),
        (["<!-- not run: -->", "```python", "```"], "has a reason"),
        (["<!-- not run: needs vLLM -->", "```sh", "```"], "is for python blocks"),
        (["<!-- output -->", "```text", "```"], "that prints it"),
        (["```sh", "```", "<!-- output -->", "```text", "```"], None),
        (["<!-- not run: it -->", "```python", "```", "<!-- output -->", "```text", "```"], "that prints it"),
    ],
)
def test_what_a_page_may_not_write_is_found(lines: list[str], fault: str | None) -> None:
    faults = given(*lines).faults
    assert [fault in x for x in faults] == [True] if fault else not faults


def test_a_failing_block_names_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = given("# Page", "", "```python", "x = fastrl", "x.nothing()", "```")
    with pytest.raises(pytest.fail.Exception, match=r"^docs/given\.md:5: AttributeError"):
        test_python_runs(page, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        ("import fastrl.nowhere", "there is no module fastrl.nowhere"),
        ("from fastrl import Nothing", "fastrl has no Nothing"),
        ("from trl import GRPONothing", "trl has no GRPONothing"),
        ("fastrl.Nothing()", "fastrl has no Nothing"),
        ("x = fastrl.GRPO(clip_middle=1)", "clip_middle"),
        ("from fastrl import SAPO as Soft\nSoft(tau=1)", "'tau'"),
        ("fastrl.linear_policy_loss(..., masked=mask)", "'masked'"),
        ("fastrl.SamplingMask.from_nothing(x)", "SamplingMask has no from_nothing"),
        ("import not_installed.here\nfrom fastrl.integrations import verl\nverl.enable(memory_budget='1GiB')", None),
    ],
)
def test_a_name_that_does_not_exist_is_found(code: str, fault: str | None) -> None:
    (block,) = given("<!-- not run: an example -->", "```python", *code.splitlines(), "```").blocks
    found = wrong_names(block)
    assert [fault in x for x in found] == [True] if fault else found == []


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        ("fastrl.integrations.routing", None),
        ("fastrl.integrations.rooting", "has no rooting"),
        ("fastrl.rewards.NAME", None),
        ("SamplingMask.from_nothing", "SamplingMask has no from_nothing"),
        ("linear_policy_loss(..., tp_grup=group)", "'tp_grup'"),
        ("GRPO(kl_coef=0)", None),
        ("tests/docs/test_blocks.py", None),
        ("tests/docs/test_nothing.py", "there is no"),
        ("owner/name", None),
        ("--rollout.top_p 0.9", None),
    ],
)
def test_a_name_in_a_sentence_that_does_not_exist_is_found(code: str, fault: str | None) -> None:
    found = wrong_in_prose(given("Take", f"`{code}` or", "not."))
    assert [x.startswith("docs/given.md:2: ") and fault in x for x in found] == [True] if fault else found == []


@pytest.mark.parametrize(
    ("command", "fault"),
    [
        ("fastrl train examples/recipes/dapo.toml --objective.clip_high 0.3 --resume", None),
        ("OMP_NUM_THREADS=1 trainer/bin/fastrl train config.toml \\\n    --rollout.top_p 0.9  # the reader's", None),
        ("fastrl train examples/recipes/nowhere.toml", "cannot read the config"),
        ("cd here && fastrl train examples/recipes/dapo.toml --rollout.temperatur 1", "did you mean"),
        ("fastrl train config.toml --rollout.temperature warm", "valid number"),
        ("fastrl tain config.toml", "no such command"),
        ("fastrl sft examples/stages/sft.toml --training.packing false; fastrl report RUN_DIR", None),
        ("fastrl sample sample.toml --best 2 > log.txt 2>&1", None),
        ("fastrl plan --tokens 8 --hidden 8 --vocab 8 --device cpu --objective nothing", "invalid choice"),
        ("fastrl plan --tokens 8 --hidden 8 --vocab 8 --device cpu --gradients nothing", "gradients"),
        ("fastrl bench --suite nothing", "invalid choice"),
        ("fastrl plot-gates --presets grpo,nothing", "nothing"),
        ("make test OPTIONS=-x", None),
        ("make tests", "no target tests"),
        ("pip install -e '.[train,nothing]' && pip install -e .", "no extra nothing"),
        ("python -m pip install 'dist/fastrl_lm-0.1.0-py3-none-any.whl[nothing]'", "no extra nothing"),
        ("torchrun --nproc-per-node 2 examples/distributed/nowhere.py", "no file"),
        ("(umask 077; python benchmarks/nowhere.py)", "no file"),
        ("python -c 'import fastrl; print(fastrl'", "never closed"),
        ("$ make test", "no prompt"),
        ("fastrl train mine/config.toml && python mine/make.py", None),
        ("fastrl sft mine/config.toml", "mine/config.toml: rollout: unknown field"),
        ("fastrl train yours/config.toml", "cannot read the config"),
    ],
)
@needs_the_commands
def test_a_command_that_would_fail_is_found(command: str, fault: str | None, tmp_path: Path) -> None:
    least = ["[model]", "path = 'model'", "[data]", "path = 'train.jsonl'", "[reward]", "function = 'reward.py:f'"]
    config = ["# mine/config.toml", *least, "[objective]", "name = 'dapo'", "[rollout]", "top_p = 0.9"]
    files = ["```toml", *config, "```", "", "```python", "# mine/make.py: not long", "```"]
    (block,) = given(*files, "```sh", *command.splitlines(), "```").of("sh")
    found = []
    for words in commands(block):
        with pytest.MonkeyPatch.context() as patch:
            found.append(wrong_command(words, block.page, tmp_path, patch))
    found = [x for x in found if x is not None]
    assert [fault in x for x in found] == [True] if fault else found == []


def test_lines_of_a_shell() -> None:
    text = "a 'b  # c' # it's\n# d\ne \\\n  f\ncat > x <<'EOF'\nit's\nEOF\n" + 'g "h\ni"\n'
    assert logical_lines(text) == ["a 'b  # c'", "e   f", "cat > x", 'g "h\ni"']


@pytest.mark.parametrize(
    ("note", "text", "fault"),
    [
        ("", "[rollout]\ntop_p = 0.9", None),
        ("", "[rollout]\ntop_q = 0.9", "unknown field"),
        ("", "[objective]\nname = 'dapo'\nclip_low = 'low'", "number"),
        ("<!-- config: dpo -->", "[loss]\nname = 'simpo'\nbeta = 2.0", None),
        ("<!-- config: sft -->", "[loss]\nname = 'simpo'", "unknown field"),
        ("<!-- config: nothing -->", "", "expected one of"),
        ("", "base = '../reverse_digits/config.toml'\n[objective]\nname = 'nothing'", "'nothing'"),
        ("", "[model\n", "Expected"),
    ],
)
@needs_the_commands
def test_a_config_that_would_fail_is_found(note: str, text: str, fault: str | None, tmp_path: Path) -> None:
    (block,) = given(note, "```toml", *text.splitlines(), "```").blocks
    if fault is None:
        check_config(block, tmp_path)
    else:
        with pytest.raises(Exception, match=re.escape(fault)):
            check_config(block, tmp_path)
