"""The guide's first run: its files train a model, and its mistakes have the messages that it quotes."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from places import EXAMPLES, ROOT
from transformers import AutoConfig, AutoModelForCausalLM

from fastrl.cli import main

PAGE = (ROOT / "docs" / "guides" / "first_run.md").read_text(encoding="utf-8")
BAD = '''"""Reward functions with the mistakes of the page's table."""


def raises(prompts, completions, digits, **columns):
    """Reads a place that no completion has."""
    return [float(c[7] == d[0]) for c, d in zip(completions, digits)]


def short(prompts, completions, digits, **columns):
    return [0.0]


def constant(prompts, completions, digits, **columns):
    return [0.0] * len(completions)


def wrong_name(prompts, completions, answer, **columns):
    return [0.0] * len(completions)


def missing(completions, digits):
    return [0.0] * len(completions)
'''
QUICK = ["--logging.tensorboard", "false"]
#: How each mistake of the table is made: arguments behind `fastrl train`.
MISTAKES = {
    "a wrong field name in the file": "typo.toml",
    "a wrong field name on the command line": "my_config.toml --rollout.num_generation 4",
    "the output folder already holds a run": "my_config.toml",
    "the model directory does not exist": "my_config.toml --model.path ./modle",
    "a file without the column": "my_config.toml --data.path questions.jsonl",
    "a chat prompt for a tokenizer without a chat template": "my_config.toml --data.system_prompt Sort.",
    "the file has no such function": "my_config.toml --reward.function my_reward.py:sort",
    "a parameter of the reward function is not a column": "my_config.toml --reward.function bad.py:wrong_name",
    "the reward function does not take `prompts` and `completions`": "my_config.toml --reward.function bad.py:missing",
    "one number for all completions": "my_config.toml --reward.function bad.py:short",
    "the reward function raises": "my_config.toml --reward.function bad.py:raises",
    "a prompt that is too long": "my_config.toml --data.max_prompt_tokens 3",
    "a budget that no plan fits": "my_config.toml --training.memory_budget 1KiB",
    "`--resume` with a changed config": "my_config.toml --resume --optimizer.lr 1e-4",
}


def block(first_line: str) -> str:
    """The block of the page that begins with this line."""
    (found,) = [code for code in re.findall(r"(?ms)^```\w+\n(.*?)^```$", PAGE) if code.startswith(first_line)]
    return str(found)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What the page has when its run has ended: its files, a model, and two steps of the run."""
    folder = tmp_path_factory.mktemp("first_run")
    (folder / "my_reward.py").write_text(block("# my_reward.py"), encoding="utf-8")
    config = block("# my_config.toml")
    (folder / "my_config.toml").write_text(config, encoding="utf-8")
    (folder / "typo.toml").write_text(config.replace("num_generations", "num_generation"), encoding="utf-8")
    (folder / "bad.py").write_text(BAD, encoding="utf-8")
    model = folder / "runs" / "reverse_digits" / "checkpoints" / "step-000120"
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(EXAMPLES / "reverse_digits" / "model.json"))
    made.save_pretrained(model)
    for file in (EXAMPLES / "reverse_digits" / "tokenizer").iterdir():
        shutil.copy(file, model)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        exec(compile(block("# make_data.py"), "make_data.py", "exec"), {})
        assert main(["train", "my_config.toml", "--training.steps", "2", *QUICK]) == 0
        questions = (folder / "train.jsonl").read_text(encoding="utf-8").replace('"prompt"', '"question"')
        (folder / "questions.jsonl").write_text(questions, encoding="utf-8")
        yield folder


def test_the_pages_files_train(folder: Path) -> None:
    rows = (folder / "train.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(rows) == 800 and "\n".join(rows[:2]) + "\n" == block('{"prompt": "439="')
    run = folder / "runs" / "sort"
    assert len((run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()) == 3  # the first is of step 0


def test_init_prints_what_the_page_says(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = block("fastrl init --model runs").split()
    assert main(words[1:]) == 0
    assert capsys.readouterr().out == block("model: runs")
    assert main(["train", "train.toml", "--training.steps", "1", *QUICK]) == 0


def test_the_parameters_are_counted(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "runs" / "reverse_digits" / "checkpoints" / "step-000120")
    assert f"{sum(p.numel() for p in model.parameters()) / 1000:.0f},000 parameters" in PAGE


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_mistakes_have_the_messages_of_the_page(
    folder: Path, mistake: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = dict(re.findall(r"(?m)^\| (.+?) \| `(.+)` \|$", PAGE.partition("## Typical first mistakes")[2]))
    assert set(table) == set(MISTAKES)
    words = MISTAKES[mistake].split()
    in_the_folder = mistake in ("the output folder already holds a run", "`--resume` with a changed config")
    status: object
    try:
        status = main(
            ["train", *words, *QUICK, *([] if in_the_folder else ["--logging.output_dir", str(tmp_path / "run")])]
        )
    except SystemExit as ended:  # argparse's
        status = ended.code
    assert status == 2
    printed = capsys.readouterr().err.replace(f"{folder}/", ".../").strip().splitlines()[-1]
    printed = printed.replace("step-000002", "step-000060")  # the run has two steps here, and the page's sixty
    printed = re.sub(r"(?<=, completion ').*(?='$)", "696", printed)  # the model is not the trained one
    assert printed in (table[mistake], f"fastrl: {table[mistake]}")


def test_a_constant_reward_has_the_warning_of_the_page(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["my_config.toml", "--logging.output_dir", str(tmp_path / "run"), "--evaluation.every", "9", *QUICK]
    small = ["--training.steps", "5", "--rollout.prompts_per_step", "4"]
    assert main(["train", *run, *small, "--reward.function", "bad.py:constant"]) == 0
    assert block("fastrl: warning: step 5") in capsys.readouterr().err
