"""Rows that cannot be used: one line that names the file, the line, the field, what came and what was expected."""

import mistakes
import pytest
from run_files import config_of

from fastrl.cli import main
from fastrl.training.stages import dpo, reward_model, sft

GOOD = {
    sft: {"prompt": "12=", "completion": "21"},
    dpo: {"prompt": "12=", "chosen": "21", "rejected": "22"},
    reward_model: {"prompt": "12=", "responses": ["21", "22", "2"], "ranks": [1, 2, 2]},
}
LONG = "1" * 30
RANKS = "ranks: expected 3 integers, one per response and 1 the best"
CASES = [
    (sft, {"completion": 5}, "completion: expected a string, got 5"),
    (sft, {"completion": None}, "completion: expected a string, got None"),
    (sft, {"prompt": 7}, 'prompt: expected a string or a list of {"role": ..., "content": ...}, got 7'),
    (sft, {"prompt": ""}, "the prompt has no tokens, got ''"),
    (sft, {"prompt": [{"role": "user", "content": "1"}]}, "the tokenizer has no chat template"),
    (sft, {"completion": LONG}, "the prompt with completion and EOS has 34 tokens, expected at most 32"),
    (dpo, {"chosen": ["21"]}, "chosen: expected a string, got ['21']"),
    (dpo, {"rejected": {}}, "rejected: expected a string, got {}"),
    (dpo, {"rejected": LONG}, "the prompt with rejected and EOS has 34 tokens, expected at most 32"),
    (dpo, {"rejected": "21"}, "chosen and rejected: expected completions that differ, got '21' twice"),
    (reward_model, {"responses": ["2"]}, "responses: expected a list of at least two strings, got ['2']"),
    (reward_model, {"responses": ["2", 3, "4"]}, "responses[1]: expected a string, got 3"),
    (reward_model, {"responses": ["2", LONG, "4"]}, "the prompt with responses[1] and EOS has 34 tokens"),
    (reward_model, {"ranks": [1, 2]}, f"{RANKS}, got [1, 2]"),
    (reward_model, {"ranks": [0, 1, 2]}, f"{RANKS}, got [0, 1, 2]"),
    (reward_model, {"ranks": [1, 2, 0.5]}, f"{RANKS}, got [1, 2, 0.5]"),
    (reward_model, {"ranks": [1, 2, True]}, f"{RANKS}, got [1, 2, True]"),
    (reward_model, {"ranks": "123"}, f"{RANKS}, got '123'"),
]
MISSING = [(stage, name) for stage, row in GOOD.items() for name in row]


def error_of(stage, settings, path, **tables):
    return mistakes.error_of(stage.train, config_of(stage).model_validate(settings(path, **tables)))


@pytest.mark.parametrize(("stage", "change", "message"), CASES)
def test_a_wrong_field(settings, write_rows, tmp_path, stage, change, message):
    path = write_rows([GOOD[stage], GOOD[stage] | change])
    error = error_of(stage, settings, path)
    assert error.startswith(f"{path}:2: ") and message in error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("stage", "name"), MISSING)
def test_a_missing_field(settings, write_rows, stage, name):
    row = {key: value for key, value in GOOD[stage].items() if key != name}
    path = write_rows([GOOD[stage], row])
    assert error_of(stage, settings, path) == f'{path}:2: no field "{name}"; the row has {", ".join(row)}'


@pytest.mark.parametrize("stage", GOOD)
def test_held_out_rows_are_checked_and_files_are_not_empty(settings, write_rows, stage):
    path, empty = write_rows([GOOD[stage]]), write_rows([], "empty.jsonl")
    held_out = write_rows([{"prompt": "1="}], "eval.jsonl")
    assert error_of(stage, settings, empty).startswith(f"{empty}: the dataset is empty")
    assert error_of(stage, settings, path, data={"eval_path": str(empty)}).startswith(f"{empty}: the dataset is empty")
    assert "eval.jsonl:1: no field" in error_of(stage, settings, path, data={"eval_path": str(held_out)})


def test_ties_alone_are_refused(settings, write_rows):
    path = write_rows([GOOD[reward_model] | {"ranks": [2, 2, 2]}] * 2)
    assert error_of(reward_model, settings, path) == (
        f"{path}: expected two responses to a prompt that differ in rank, got ties alone"
    )


def test_max_length_is_a_limit_of_its_own(settings, write_rows):
    path = write_rows([GOOD[sft]])
    assert "has 6 tokens, expected at most 5" in error_of(sft, settings, path, training={"max_length": 5})
    sft.train(sft.SFTConfig.model_validate(settings(path, training={"max_length": 6})))


@pytest.mark.parametrize("command", ["sft", "dpo", "reward-model", "sample"])
def test_the_command_says_it_in_one_line(command, tmp_path, capsys):
    path = tmp_path / "config.toml"
    path.write_text("[model]\npath = 'nowhere'\nsize = 3\n")
    assert main([command, str(path)]) == 2
    assert "model.size: unknown field (value 3)" in capsys.readouterr().err
