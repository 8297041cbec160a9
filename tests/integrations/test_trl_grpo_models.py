"""FastGRPOTrainer against TRL's on models whose forward is more than text in, logits out: mixtures, and images."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from datasets import Dataset
from tiny_models import tiny_model
from tiny_vision_model import END, IMAGE, START, VIDEO, image_tokens, pixels, tiny_vision_model
from trl import GRPOTrainer
from trl.trainer import grpo_trainer, utils
from trl_cases import PROMPTS, assert_same_history, make_trainer

from fastrl.integrations.trl import grpo as trl_grpo
from fastrl.integrations.trl.grpo import FastGRPOTrainer
from fastrl.models import lm_head

pytestmark = pytest.mark.filterwarnings("ignore")


def compare(
    model: Any, tmp_path: Any, calls: list[Any], wrap: Callable[[type], type] = lambda x: x, **options: Any
) -> Any:
    """Both trainers log the same from this model; the fast one computes each micro-batch's loss in one call."""
    histories = []
    model.save_pretrained(tmp_path)  # a reference is loaded from there too
    for kind in (GRPOTrainer, FastGRPOTrainer):
        torch.manual_seed(5)
        settings = {"max_steps": 10, "beta": 0.0} | options
        trainer = make_trainer(
            "GRPO", str(tmp_path), PROMPTS, wrap(kind), model=type(model).from_pretrained(tmp_path), **settings
        )
        trainer.train()
        histories.append(trainer.state.log_history)
        if kind is GRPOTrainer:
            assert not calls
    assert trainer._why_not is None and len(calls) >= 2 * settings["max_steps"]
    assert_same_history(histories[1], histories[0])
    assert histories[0][0]["grad_norm"] > 1e-3
    return histories[1]


@pytest.fixture
def calls(watch: Callable[..., list[Any]]) -> list[Any]:
    """One entry per fused loss."""
    return watch(trl_grpo, "linear_policy_loss")


MIXTURES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen3_moe": (
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 8},
        {"loss_type": "grpo", "beta": 0.1, "router_aux_loss_coef": 0.1},
    ),
    "mixtral": (
        {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.05},
        {"loss_type": "dapo", "entropy_coef": 0.01, "eval_strategy": "steps", "eval_steps": 5, "max_steps": 5},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", MIXTURES)
def test_a_mixtures_balancing_is_kept(tmp_path: Any, calls: list[Any], kind: str) -> None:
    values, options = MIXTURES[kind]
    if "eval_steps" in options:
        options = options | {"eval_dataset": Dataset.from_list(PROMPTS), "per_device_eval_batch_size": 4}
    torch.manual_seed(0)
    model = tiny_model(kind, vocab_size=64, initializer_range=0.3, **values | {"eos_token_id": 1, "pad_token_id": 0})
    history = compare(model, tmp_path, calls, **options)
    assert all(line["aux_loss"] > 0.1 for line in history if "loss" in line)
    assert ("eval_steps" in options) == any("eval_aux_loss" in line for line in history)


def with_images(base: type) -> type:
    """The trainer on batches whose prompts begin with an image each, as TRL's own rollout would have made them."""
    grid = (1, 4, 4)

    class Seeing(base):  # type: ignore[valid-type, misc]
        def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
            ids = inputs["prompt_ids"]
            image = torch.tensor(image_tokens(grid)).expand(ids.shape[0], -1)
            inputs = inputs | pixels([grid] * ids.shape[0], seed=self.state.global_step)
            inputs["num_images"] = [1] * ids.shape[0]
            # Padding is on the left: the image goes behind the prompt.
            inputs["prompt_ids"] = torch.cat([ids, image], 1)
            inputs["prompt_mask"] = torch.cat([inputs["prompt_mask"], torch.ones_like(image)], 1)
            tokens = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
            inputs["mm_token_type_ids"] = (tokens == IMAGE).long()
            return super()._compute_loss(model, inputs)

    return Seeing


def test_images_reach_the_decoder(tmp_path: Any, calls: list[Any]) -> None:
    """The models' own places of an image's tokens, and the gradients of its patches, are in the gradients' norm."""
    text_only = {"suppress_tokens": [START, END, IMAGE, VIDEO]}
    compare(
        tiny_vision_model(), tmp_path, calls, with_images, loss_type="grpo", generation_kwargs=text_only, max_steps=2
    )


class FromLogits(GRPOTrainer):
    """TRL's trainer with the log-probabilities of the logits of the model's own forward, adapters included."""

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: int, *args: Any, **unused: Any
    ) -> Any:
        logits = model(input_ids=input_ids, attention_mask=attention_mask).logits[:, -logits_to_keep - 1 : -1]
        logp = (logits / self.temperature).log_softmax(-1)
        entropy = -(logp.exp() * logp).sum(-1)
        return logp.gather(-1, input_ids[:, -logits_to_keep:, None])[..., 0], entropy, None


@pytest.mark.parametrize(("steps", "packed"), [(2, False), (2, True), pytest.param(10, False, marks=pytest.mark.slow)])
def test_lora_on_the_head_is_trained(
    path: str,
    calls: list[Any],
    watch: Callable[..., list[Any]],
    monkeypatch: pytest.MonkeyPatch,
    steps: int,
    packed: bool,
) -> None:
    """Which TRL refuses: its trainer is let through for the comparison. The reference is the model without adapters."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "lm_head"], lora_alpha=8, init_lora_weights=False
    )
    scored, histories, heads = watch(lm_head, "low_rank_token_logprobs"), [], []
    for kind in (FromLogits, FastGRPOTrainer):
        with monkeypatch.context() as patched:
            if kind is FromLogits:
                patched.setattr(grpo_trainer, "BaseTunerLayer", ())
            else:
                monkeypatch.setattr(utils, "_use_triton", lambda device: packed)  # as on a GPU: rows without padding
            torch.manual_seed(5)
            options = {"peft_config": config, "loss_type": "grpo", "beta": 0.1, "epsilon": 0.01, "max_steps": steps}
            trainer = make_trainer("GRPO", path, PROMPTS, kind, **options, top_entropy_quantile=0.8)
        before = trainer.model.get_output_embeddings().lora_B["default"].weight.detach().clone()
        trainer.train()
        histories.append(trainer.state.log_history)
        heads.append(trainer.model.get_output_embeddings().lora_B["default"].weight.detach() - before)
    assert trainer._why_not is None and not calls
    # In the loss once a micro-batch, though its tokens depend on their entropies: dropout is drawn once.
    assert sum("mask" in x for x in scored) == steps * trainer.args.gradient_accumulation_steps
    assert_same_history(histories[1], histories[0])
    assert histories[0][0]["kl"] > 1e-3  # to the reference, which has no adapters
    # Adam divides a gradient by its own size: entries that are nearly 0 may differ.
    close = (heads[1] - heads[0]).abs() < 1e-2 * heads[0].abs().max()
    assert float(close.float().mean()) > 0.95 and float(heads[0].abs().max()) > 1e-4


def test_lora_on_the_head_is_never_left_out(path: str) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["lm_head"])
    unfused = {"loss_type": "vespo", "importance_sampling_level": "sequence", "use_bias_correction_kl": True}
    for options, words in (
        (unfused | {"beta": 0.1}, "use_bias_correction_kl"),
        ({"cast_lm_head_to_fp32": True}, "cast_"),
    ):
        with pytest.raises(ValueError, match=f"needs fastrl's own loss, but .*{words}"):
            make_trainer("GRPO", path, PROMPTS, FastGRPOTrainer, peft_config=config, **options)


def test_a_copy_of_the_trainers_model_computes_with_its_own_weights():
    torch.manual_seed(0)
    model = tiny_model("qwen3", vocab_size=50, head_dim=8, initializer_range=0.3)
    utils.add_fused_lm_head(model)
    trl_grpo._add_step_forward(model)
    ids = torch.arange(8)[None]
    expected = model(input_ids=ids, labels=ids, fused_lm_head=True).log_probs
    other = copy.deepcopy(model)
    with torch.no_grad():
        model.lm_head.weight.mul_(2.0)
    torch.testing.assert_close(other(input_ids=ids, labels=ids, fused_lm_head=True).log_probs, expected)
