"""Directories of peft's adapters, as TRL and Unsloth write them: through every command, and back into transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from digit_models import EXAMPLE, TOKENIZER, narrowed
from places import EXAMPLES
from run_files import write_toml
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from fastrl.base.errors import UserError
from fastrl.cli import main
from fastrl.training.config.sections import ModelConfig
from fastrl.training.models.policy import load_policy

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.usefixtures("at_a_terminal")
#: What peft trains beside or in place of plain LoRA.
KINDS: dict[str, dict[str, Any]] = {
    "lora": {"target_modules": "all-linear"},
    "rslora": {"target_modules": "all-linear", "use_rslora": True},
    "bias": {"target_modules": "all-linear", "bias": "all"},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "saved head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "saved embedding": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    "dora": {"target_modules": "all-linear", "use_dora": True},
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "tokens of the head": {"target_modules": ["q_proj"], "trainable_token_indices": {"lm_head": [1, 3]}},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [1, 3]},
}
#: Command -> an example's rows, and its settings beside the common ones.
COMMANDS: dict[str, tuple[Path, dict[str, Any]]] = {
    "sft": (EXAMPLES / "stages" / "sft.jsonl", {"training.epochs": 1}),
    "dpo": (EXAMPLES / "stages" / "dpo.jsonl", {"training.epochs": 1}),
    "reward-model": (EXAMPLES / "stages" / "reward_model.jsonl", {"training.epochs": 1}),
    "train": (
        EXAMPLE / "train.jsonl",
        {
            "objective.name": "grpo",
            "reward.function": f"{EXAMPLE}/reward.py:reward",
            "rollout.prompts_per_step": 2,
            "rollout.num_generations": 2,
            "rollout.max_new_tokens": 4,
            "training.steps": 1,
        },
    ),
}
TOKENS = torch.arange(12)[None]  # (1, S) int64


@pytest.fixture
def adapters(tmp_path):
    """Save adapters of one of KINDS with random weights beside their base; returns their directory and peft's model."""

    def make(kind: str, tied: bool, **changes: Any) -> tuple[Path, Any]:
        torch.manual_seed(0)
        values = json.loads(narrowed(tmp_path).read_text())
        base = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values | {"tie_word_embeddings": tied}))
        base.save_pretrained(tmp_path / "base")
        settings = peft.LoraConfig(r=2, task_type="CAUSAL_LM", **KINDS[kind] | changes)
        model = peft.get_peft_model(base, settings).eval()
        model.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
        model.save_pretrained(tmp_path / "adapters")
        for file in Path(TOKENIZER).glob("tokenizer*"):
            shutil.copy(file, tmp_path / "adapters")
        return tmp_path / "adapters", model

    return make


@pytest.fixture
def run(tmp_path):
    """Run a command of one update from the model in a directory; returns the directory of what it trained."""

    def run(command: str, model: Path, lr: float = 1e-12, **more: Any) -> Path:
        rows, own = COMMANDS[command]
        (tmp_path / "rows.jsonl").write_text("".join(rows.read_text().splitlines(keepends=True)[:4]))
        output = tmp_path / f"from-{model.parent.name}-{model.name}-{command}"
        given = own | {
            "model.path": str(model),
            "data.path": str(tmp_path / "rows.jsonl"),
            "training.device": "cpu",
            "training.threads": 1,
            "optimizer.lr": lr,
            "logging.tensorboard": False,
            "logging.output_dir": str(output),
        }
        assert main([command, write_toml(tmp_path / f"{command}.toml", given | more)]) == 0
        return output / ("checkpoints/step-000001" if command == "train" else "model")

    return run


def logits_of(model: Any) -> torch.Tensor:
    """The logits of TOKENS, (1, S, V)."""
    with torch.no_grad():
        return model.eval()(TOKENS).logits


@pytest.mark.filterwarnings("ignore:Model")  # peft's, of a head that is the embedding
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_merged_adapters_are_a_model_like_any_other(kind, tied, adapters, run, tmp_path):
    path, model = adapters(kind, tied)
    expected = logits_of(model)
    # Products of merged weights round otherwise; each sum of 16 to 32 terms by some units of float32's last place.
    close: dict[str, Any] = {"rtol": 0, "atol": 2e-6 * float(expected.abs().max())}
    torch.testing.assert_close(
        logits_of(load_policy(ModelConfig(path=str(path)), torch.device("cpu")).model), expected, **close
    )

    trained = run("sft", path)
    saved = AutoModelForCausalLM.from_pretrained(trained)
    torch.testing.assert_close(logits_of(saved), expected, **close)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base").state_dict()
    untied = tied and kind not in ("lora", "rslora", "bias", "dora", "tokens")
    assert saved.state_dict().keys() == base.keys()
    assert saved.config.tie_word_embeddings == (tied and not untied)
    run("reward-model", trained)
    for command in ("dpo", "train"):  # the next stages
        trained = run(command, trained)
        torch.testing.assert_close(logits_of(AutoModelForCausalLM.from_pretrained(trained)), expected, **close)


@pytest.mark.parametrize("command", [*COMMANDS, "lora"])
def test_every_command_starts_from_adapters(command, adapters, run):
    path, model = adapters("lora", False)
    if command == "reward-model":
        classifier = AutoModelForSequenceClassification.from_pretrained(run(command, path))
        states = model.get_base_model().model(TOKENS).last_hidden_state  # (1, S, H)
        torch.testing.assert_close(classifier.model(TOKENS).last_hidden_state, states, rtol=1e-5, atol=1e-5)
        return
    trained = run("sft", path, **{"model.lora_rank": 2}) if command == "lora" else run(command, path)
    torch.testing.assert_close(
        logits_of(AutoModelForCausalLM.from_pretrained(trained)), logits_of(model), rtol=1e-5, atol=1e-5
    )


def test_what_cannot_be_merged_is_named(adapters, tmp_path):
    path, model = adapters("lora", False)
    settings = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    prefix = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), settings)
    prefix.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    prefix.save_pretrained(path)
    with pytest.raises(UserError, match="adapters of kind PREFIX_TUNING cannot be merged into weights"):
        load_policy(ModelConfig(path=str(path)), torch.device("cpu"))

    twice, _ = adapters("head", True, trainable_token_indices=[1])  # on a tied head, which has LoRA too
    with pytest.raises(UserError, match=r"peft cannot merge the adapters of several kinds on lm_head"):
        load_policy(ModelConfig(path=str(twice)), torch.device("cpu"))

    path, model = adapters("lora", False)
    nested = tmp_path / "nested"
    model.peft_config["default"].base_model_name_or_path = str(path)
    model.save_pretrained(nested)
    with pytest.raises(UserError, match=r"base_model_name_or_path: .* holds adapters itself; merge them"):
        load_policy(ModelConfig(path=str(nested), tokenizer=TOKENIZER), torch.device("cpu"))
