"""Tiny trainings with TRL's real trainers, and the comparison of what two of them logged."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any

import datasets
import pytest
import tokenizers
import torch
import transformers
import trl
from tiny_models import tiny_model

PROMPTS = [{"prompt": words} for words in ("w1 w2 w3", "w4 w5", "w9 w8 w7 w6", "w6")]
#: Small steps: a rounding of 1e-7 in one step's gradient, divided by Adam by the gradient's own size, moves a weight by
#: 1e-10, and ten steps at this rate do not make 1e-4 of it. At 1e-1 sampled tokens would change, and then everything.
RATE = 1e-3
#: A loss of GRPO is a sum of advantages of size 1 that cancel at ratios near 1: its own size says little.
CLOSE = {"rel": 1e-4, "abs": 2e-6}


def tokenizer() -> Any:
    """61 words, and a pad that is not the end of a sentence."""
    words = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(61))])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def save_model(path: Path) -> str:
    """A Qwen of one layer, whose entropies and log-probabilities differ from token to token."""
    torch.manual_seed(0)
    values = {"intermediate_size": 32, "initializer_range": 0.3, "eos_token_id": 1, "pad_token_id": 0}
    tiny_model("qwen2", vocab_size=64, **values).save_pretrained(path)
    return str(path)


def make_trainer(base: str, path: str, rows: list[dict[str, Any]], kind: type | None = None, **options: Any) -> Any:
    """TRL's trainer of this name, or a `kind` of it, with the model at `path` and these rows for its data.

    What is no option of the trainer's configuration goes to the trainer. `model` replaces the one at `path`.
    """
    names = ("peft_config", "memory_budget", "eval_dataset", "teacher_model")
    model = options.pop("model", None)
    more = {name: options.pop(name) for name in names if name in options}
    settings: dict[str, Any] = {
        "output_dir": f"{path}/out",
        "use_cpu": True,
        "bf16": False,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "disable_tqdm": True,
        "seed": 3,
    }
    if base in ("GRPO", "RLOO"):
        settings |= {"num_generations": 4, "steps_per_generation": 4, "max_completion_length": 6}
        more["reward_funcs"] = reward
    home = importlib.import_module(f"trl.experimental.{base.lower()}") if base in ("CPO", "ORPO") else trl
    return (kind or getattr(home, f"{base}Trainer"))(
        model=transformers.AutoModelForCausalLM.from_pretrained(path) if model is None else model,
        args=getattr(home, f"{base}Config")(**(settings | options)),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer(),
        **more,
    )


def reward(completions: list[str], **unused: Any) -> list[float]:
    """Depends on the words alone, in thirds."""
    return [float(sum(map(ord, text)) % 7) / 3 for text in completions]


def _is_time(name: str) -> bool:
    return any(part in name for part in ("time", "per_second", "profiling", "mfu"))


def assert_same_history(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """The same names in the same lines, and numbers within CLOSE, times excepted."""
    assert len(found) == len(expected)
    for step, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert a.keys() == b.keys(), f"line {step}: {a.keys() ^ b.keys()}"
        for name in a:
            if _is_time(name):
                continue
            if b[name] is None or (isinstance(b[name], float) and math.isnan(b[name])):
                assert a[name] is None or math.isnan(a[name]), f"line {step}: {name}"
            else:
                assert a[name] == pytest.approx(b[name], **CLOSE), f"line {step}: {name}"
