"""fastrl init: what it makes of rows and models, that its config trains as it is, and what it refuses in a line."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from byte_tokenizer import byte_tokenizer
from safetensors.torch import load_file
from tiny_models import tiny_model

from fastrl.cli import main
from fastrl.init import look as first_look
from fastrl.init.command import Line, text_of
from fastrl.training.commands import COMMANDS
from fastrl.training.config.settings import load_settings

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
REFUSES_SYSTEM = "{{ raise_exception('no system') if messages[0]['role'] == 'system' }}" + TEMPLATE
ASK = [{"role": "user", "content": "Add 1 and 2"}]
LONG = "Because there are many reasons, of which nobody knows more than half"
MATH, EXACT = "fastrl.rewards.math", "fastrl.rewards.exact"

#: Rows -> the model, the command, and some of the config's values. Each has two rows, which differ in a number.
KINDS: dict[str, tuple[dict[str, Any], str, str, dict[str, Any]]] = {
    "solutions and a chat model": (
        {"question": "Add 1", "answer": "It is\n#### 1"},
        "chat",
        "train",
        {"data.fields": {"prompt": "question"}, "data.system_prompt": first_look._ASKED[MATH], "reward.function": MATH},
    ),
    "short answers and a chat model": (
        {"prompt": "Who is 1", "solution": "Ann 1"},
        "chat",
        "train",
        {"data.fields": {"answer": "solution"}, "reward.function": EXACT, "rollout.max_new_tokens": 256},
    ),
    "short answers and a text model": (
        {"prompt": "Who is 1", "answer": "Ann 1"},
        "text",
        "train",
        {"data.system_prompt": None, "reward.function": EXACT, "rollout.max_new_tokens": 16},
    ),
    "messages with answers": (
        {"messages": ASK, "answer": ["Ann 1", "Ann"]},
        "chat",
        "train",
        {"data.fields": {"prompt": "messages"}, "data.system_prompt": None, "reward.function": EXACT},
    ),
    "texts that a template wrote": (
        {"prompt": "<|im_start|>user\n1<|im_end|>\n<|im_start|>assistant\n", "answer": "Ann 1"},
        "chat",
        "train",
        {"data.system_prompt": None, "reward.function": EXACT},
    ),
    "long answers": (
        {"question": "Why 1", "answer": LONG},
        "text",
        "sft",
        {"data.fields": {"prompt": "question", "completion": "answer"}},
    ),
    "instructions": (
        {"instruction": "Say 1", "input": "", "output": "One"},
        "chat",
        "sft",
        {"data.fields": {"prompt": "instruction", "completion": "output"}, "data.system_prompt": ""},
    ),
    "pairs of a chat": ({"prompt": ASK, "chosen": "3", "rejected": "4"}, "chat", "dpo", {"data.system_prompt": None}),
    "pairs of texts": ({"prompt": "1", "chosen": "3", "rejected": "4"}, "text", "dpo", {"loss.name": "dpo"}),
    "ranks": ({"prompt": "1", "responses": ["3", "4"], "ranks": [1, 2]}, "text", "reward-model", {}),
    "prompts alone": (
        {"prompt": "Write 1", "topic": 1},
        "chat",
        "train",
        {"data.system_prompt": "", "reward.function": "reward.py:reward"},
    ),
}
#: Arguments, by words, and what is said. ROWS are those of `rows.jsonl`; the model is `text` where none is named.
MISTAKES: dict[str, tuple[str, list[dict[str, Any]], str]] = {
    "no model": ("--model ./none", [{"prompt": "1"}], "./none: no such directory"),
    "a run": (
        "--model runs/old",
        [{"prompt": "1"}],
        "runs/old: expected a model's directory, got a run's; use runs/old/model",
    ),
    "no tokenizer": (
        "--model bare",
        [{"prompt": "1"}],
        "bare: holds no tokenizer, only config.json, generation_config.json, model.safetensors",
    ),
    "an encoder": (
        "--model encoder",
        [{"prompt": "1"}],
        "encoder: expected a causal language model, which writes text, got BertForMaskedLM",
    ),
    "no rows": ("", [], "rows.jsonl: the dataset is empty; expected one JSON object per line"),
    "a broken line": ("--data broken.jsonl", [], "broken.jsonl:2: not valid JSON: .*"),
    "no prompt": ("", [{"q": "1", "a": "2"}], "rows.jsonl:1: no column with the prompt: .*; the row has q, a"),
    "an answer in the prompt": (
        "",
        [{"messages": [*ASK, {"role": "assistant", "content": "3"}]}],
        r"rows.jsonl:1: messages ends with the answer: expected two columns, prompt = messages\[:-1\] .*",
    ),
    "a prompt in two columns": (
        "",
        [{"instruction": "Add", "input": text, "output": "3"} for text in ("", "1 and 2")],
        "rows.jsonl:2: the prompt is in two columns, instruction and input: expected one, prompt",
    ),
    "a chat for a text model": ("", [{"prompt": ASK, "completion": "3"}], ".*the tokenizer has no chat template"),
    "an answer that is missing": (
        "",
        [{"prompt": "1", "answer": "2"}, {"prompt": "2", "answer": ""}],
        "rows.jsonl:2: column \"answer\": expected an answer, got ''",
    ),
    "no such reward": ("--reward none.py:f", [{"prompt": "1"}], r"none.py: no such file \(reward function\)"),
    "a reward of another column": (
        "--reward mine.py:mine",
        [{"prompt": "1"}],
        "mine.py:mine: cannot be called with the columns of rows.jsonl:1, none: missing .*'digits'",
    ),
    "a config that is there": (
        "--output mine.py",
        [{"prompt": "1", "answer": "2"}],
        "mine.py: is there already; remove it, or name another by --output",
    ),
    "no such folder": (
        "--output none/my.toml",
        [{"prompt": "1", "answer": "2"}],
        "none/my.toml: cannot write the config: .*",
    ),
    "prompts that are too long": (
        "",
        [{"prompt": "x" * 600, "answer": "2"}],
        "the model's context of 512 tokens leaves .* all prompts are longer, with 600 to 600 tokens, .*",
    ),
    "no name": ("--data=", [{"prompt": "1"}], "--data: expected a file or the name of a dataset, got ''"),
    "a split of a file": ("--split test", [{"prompt": "1"}], "--subset, --split: a file has none, .*rows.jsonl"),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of models: chat and text, gemma (whose template takes no system message), bare, encoder; and a run."""
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    for name, template in {"chat": TEMPLATE, "text": None, "gemma": REFUSES_SYSTEM, "bare": None}.items():
        tokenizer = byte_tokenizer("<|endoftext|>", "<|im_start|>", "<|im_end|>", chat_template=template)
        tiny_model("llama", vocab_size=len(tokenizer), max_position_embeddings=512).save_pretrained(folder / name)
        if name != "bare":
            tokenizer.save_pretrained(folder / name)
    tokenizer.save_pretrained(folder / "encoder")
    (folder / "encoder" / "config.json").write_text('{"model_type": "bert", "architectures": ["BertForMaskedLM"]}')
    (folder / "runs" / "old" / "model").mkdir(parents=True)
    (folder / "runs" / "old" / ".fastrl-run").touch()
    (folder / "mine.py").write_text("def mine(prompts, completions, digits):\n    return [0.0] * len(completions)\n")
    (folder / "broken.jsonl").write_text('{"prompt": "1"}\n{"prompt": "1"\n')
    return folder


@pytest.fixture
def folder(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the test's own, with links to the models; the working directory, on a machine without a GPU."""
    monkeypatch.setattr("fastrl.init.command.find_device", lambda name: torch.device("cpu"))
    for path in models.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("kind", KINDS)
def test_the_config_trains_as_it_is(
    kind: str, folder: Path, write_rows: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    row, model, command, expected = KINDS[kind]
    write_rows([row, {name: re.sub("1", "2", x) if isinstance(x, str) else x for name, x in row.items()}])
    assert main(["init", "--model", model, "--data", "rows.jsonl"]) == 0
    said = capsys.readouterr().out.splitlines()
    parameters = sum(weight.numel() for weight in load_file(folder / model / "model.safetensors").values())
    assert said[0] == f"model: {model}: llama, {parameters:,} parameters, a context of 512"
    assert said[-1].endswith(f"fastrl {command} {command}.toml")
    config: Any = load_settings(COMMANDS[command].kind, folder / f"{command}.toml")
    found = {}
    for name in expected:
        table, field = name.split(".")
        found[name] = getattr(getattr(config, table), field)
    if "reward.function" in found:
        found["reward.function"] = found["reward.function"].removeprefix(f"{folder}/")
    assert found == expected
    if command == "train":
        short = ["--training.steps", "1", "--rollout.max_new_tokens", "2", "--reward.workers", "1"]
        short += ["--rollout.prompts_per_step", "1", "--rollout.num_generations", "2"]
    else:
        short = ["--training.batch_size", "2"]
    trains = main([command, f"{command}.toml", *short, "--logging.tensorboard", "false", "--training.threads", "1"])
    if kind == "prompts alone":
        assert trains == 2 and "NotImplementedError: write the reward here" in capsys.readouterr().err
    else:
        assert trains == 0 and (folder / "runs" / command / "metrics.jsonl").read_text().count("\n") == 1


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_writes_nothing(
    mistake: str, folder: Path, write_rows: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    words, rows, message = MISTAKES[mistake]
    write_rows(rows)
    before = sorted(folder.iterdir())
    assert main(["init", "--model", "text", "--data", "rows.jsonl", *words.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(f"fastrl: {message}", line), line
    assert sorted(folder.iterdir()) == before


def test_a_reward_function_that_is_there_is_not_replaced(
    folder: Path, write_rows: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows([{"prompt": "1", "digits": 1}])
    (folder / "reward.py").write_text("# mine\n")
    assert main(["init", "--model", "text", "--data", "rows.jsonl"]) == 2
    assert "reward.py: is there already; remove it, or name another by --reward" in capsys.readouterr().err
    assert not (folder / "train.toml").exists() and (folder / "reward.py").read_text() == "# mine\n"


def test_paths_are_relative_to_the_config_and_the_run_is_a_new_one(
    folder: Path, write_rows: Callable[..., Path]
) -> None:
    write_rows([{"question": "1", "digits": 1}])
    (folder / "configs" / "runs" / "my").mkdir(parents=True)
    given = ["--model", str(folder / "gemma"), "--data", "rows.jsonl", "--reward", "mine.py:mine"]
    assert main(["init", *given, "--output", "configs/my.toml"]) == 0
    written = tomllib.loads((folder / "configs" / "my.toml").read_text())
    assert written["model"]["path"] == str(folder / "gemma") and written["data"]["path"] == "../rows.jsonl"
    assert written["reward"]["function"] == "../mine.py:mine" and written["logging"]["output_dir"] == "runs/my-2"


def test_a_template_without_a_system_message_gets_none(folder: Path, write_rows: Callable[..., Path]) -> None:
    write_rows([{"prompt": "Add 1", "answer": "1"}])
    assert main(["init", "--model", "gemma", "--data", "rows.jsonl"]) == 0
    assert tomllib.loads((folder / "train.toml").read_text())["data"]["system_prompt"] == ""


def test_without_math_verify_numbers_are_compared_as_they_are(
    folder: Path, write_rows: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(first_look, "find_spec", lambda name: None if name == "math_verify" else found(name))
    write_rows([{"prompt": "Add 1", "answer": 1}])
    assert main(["init", "--model", "text", "--data", "rows.jsonl"]) == 0
    assert tomllib.loads((folder / "train.toml").read_text())["reward"]["function"] == EXACT


def test_the_longest_prompt_and_completion_fit_the_context(folder: Path, write_rows: Callable[..., Path]) -> None:
    write_rows([{"prompt": "x" * 450, "answer": "It is \\boxed{x^2}"}, {"prompt": "x", "answer": "\\boxed{1}"}])
    assert main(["init", "--model", "text", "--data", "rows.jsonl"]) == 0
    written = tomllib.loads((folder / "train.toml").read_text())
    assert written["data"]["max_prompt_tokens"] + written["rollout"]["max_new_tokens"] == 512


def test_the_frame_of_a_reward_is_the_one_beside_the_config(folder: Path, write_rows: Callable[..., Path]) -> None:
    write_rows([{"prompt": "Tell a story."}])
    (folder / "reward.py").write_text("another\n")
    (folder / "sub").mkdir()
    assert main(["init", "--model", "text", "--data", "rows.jsonl", "--output", "sub/train.toml"]) == 0
    assert tomllib.loads((folder / "sub" / "train.toml").read_text())["reward"]["function"] == "reward.py:reward"
    assert "def reward(" in (folder / "sub" / "reward.py").read_text()


def test_a_split_of_a_dataset_is_held_out(folder: Path, write_rows: Callable[..., Path]) -> None:
    (folder / "set").mkdir()
    for split in ("train", "test"):
        write_rows([{"problem": "Add 1", "answer": "1"}], f"set/{split}.jsonl")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.config.HF_DATASETS_CACHE", folder / "cache")
        assert main(["init", "--model", "text", "--data", "set"]) == 0
    written = tomllib.loads((folder / "train.toml").read_text())
    assert written["data"]["eval_split"] == "test" and written["evaluation"]["every"] == 25


def test_a_gpu_draws_more_and_trains_adapters_of_what_does_not_fit(
    folder: Path, write_rows: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastrl.init.command.find_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: SimpleNamespace(total_memory=100_000))
    write_rows([{"prompt": "Add 1", "answer": "1"}] * 40)
    assert main(["init", "--model", "text", "--data", "rows.jsonl"]) == 0
    written = tomllib.loads((folder / "train.toml").read_text())
    assert written["model"] == {"path": "text", "lora_rank": 16, "dtype": "bfloat16"}
    rollout = written["rollout"]
    assert rollout["prompts_per_step"] * rollout["num_generations"] == 256
    assert rollout["batch_size"] == 65_536 // (written["data"]["max_prompt_tokens"] + rollout["max_new_tokens"])


def test_any_text_is_toml() -> None:
    value = 'a "b" \\boxed{} \n\t\x7f é 🦊'
    lines = [Line("a", {"b": value}, "because\nof it"), Line("c", 1, "off", off=True)]
    assert tomllib.loads(text_of({"t": lines})) == {"t": {"a": {"b": value}}}
