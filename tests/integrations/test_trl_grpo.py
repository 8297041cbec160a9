"""FastGRPOTrainer against TRL's GRPOTrainer: real generation, six steps, every loss type and every metric."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from datasets import Dataset
from trl import GRPOTrainer
from trl.trainer import utils
from trl_cases import PROMPTS, assert_same_history, make_trainer

from fastrl.integrations.trl import grpo as trl_grpo
from fastrl.integrations.trl import objective as trl_objective
from fastrl.integrations.trl.grpo import FastGRPOTrainer

pytestmark = pytest.mark.filterwarnings("ignore")
Inject = Callable[[dict[str, Any]], dict[str, Any]]

#: Four micro-batches per generation, two per step: every second step is off-policy. Clips are narrow enough to clip.
CASES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo", "beta": 0.1, "epsilon": 0.01},
    "grpo, two iterations, delta": {"loss_type": "grpo", "epsilon": 0.01, "delta": 1.02, "num_iterations": 2},
    "grpo, sequence level, corrected KL": {
        "loss_type": "grpo",
        "beta": 0.1,
        "importance_sampling_level": "sequence",
        "use_bias_correction_kl": True,
        "epsilon": 0.005,
    },
    "bnpo, top entropies": {"loss_type": "bnpo", "beta": 0.1, "top_entropy_quantile": 0.5, "epsilon": 0.01},
    "dr_grpo, off-policy mask": {
        "loss_type": "dr_grpo",
        "off_policy_mask_threshold": 0.002,
        "epsilon": 0.01,
        "learning_rate": 3e-3,
    },
    "dapo, entropy bonus on top entropies": {
        "loss_type": "dapo",
        "entropy_coef": 0.02,
        "top_entropy_quantile": 0.7,
        "beta": 0.05,
    },
    "dapo, corrected KL, on-policy": {
        "loss_type": "dapo",
        "beta": 0.1,
        "use_bias_correction_kl": True,
        "steps_per_generation": 2,
    },
    "cispo, adaptive entropy": {
        "loss_type": "cispo",
        "epsilon_high": 1.01,
        "use_adaptive_entropy": True,
        "entropy_coef": 0.1,
        "entropy_coef_delta": 0.03,
        "entropy_coef_max": 0.2,
        "entropy_target": 3.525,
    },
    "cispo, sequence level": {
        "loss_type": "cispo",
        "epsilon_high": 1.0025,
        "importance_sampling_level": "sequence",
        "beta": 0.1,
        "use_bias_correction_kl": True,
    },
    "sapo": {"loss_type": "sapo", "beta": 0.1, "temperature": 0.8},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon": 0.005, "beta": 0.1},
    "vespo": {"loss_type": "vespo", "beta": 0.1, "top_entropy_quantile": 0.8},
}


@pytest.fixture
def calls(watch: Callable[..., list[Any]]) -> list[Any]:
    """One entry per fused loss."""
    return watch(trl_grpo, "linear_policy_loss")


def injecting(base: type, inject: Inject, vllm: bool) -> type:
    """The trainer with more in its batches, and with vLLM's corrections in its loss, though not in its rollout."""

    class Injecting(base):  # type: ignore[valid-type, misc]
        def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
            self.use_vllm = vllm
            try:
                return super()._compute_loss(model, inputs | inject(inputs))
            finally:
                self.use_vllm = False

    return Injecting


def train(kind: type, path: str, inject: Inject | None = None, vllm: bool = False, **options: Any) -> Any:
    """A trainer after its steps, with what it logged."""
    torch.manual_seed(5)  # an adapter's own first weights
    if inject is not None:
        kind = injecting(kind, inject, vllm)
    trainer = make_trainer("GRPO", path, PROMPTS, kind, **({"max_steps": 6, "beta": 0.0} | options))
    trainer.train()
    return trainer


def compare(path: str, calls: list[Any], between: Callable[[], dict[str, Any]] = dict, **options: Any) -> Any:
    """Both trainers' histories are the same, and every micro-batch was one fused loss. Returns the fast one.

    between: is called between the two runs, and returns further options of the fast one.
    """
    expected = train(GRPOTrainer, path, **options)
    assert not calls
    fast = train(FastGRPOTrainer, path, **options, **between())
    steps = 2 * options.get("max_steps", 6)
    assert (len(calls) > steps if "eval_dataset" in options else len(calls) == steps) and fast._why_not is None
    assert_same_history(fast.state.log_history, expected.state.log_history)
    return fast


@pytest.mark.parametrize("name", CASES)
def test_losses_gradients_and_metrics_are_the_same(path: str, calls: list[Any], name: str) -> None:
    history = compare(path, calls, **CASES[name]).state.log_history
    assert history[0]["grad_norm"] > 1e-3
    clipped = [line.get("clip_ratio/region_mean", line.get("cispo_clip_ratio")) for line in history[:-1]]
    if "epsilon" in CASES[name] or CASES[name]["loss_type"] == "cispo":
        assert any(c > 0 for c in clipped), "a comparison without clipped tokens says little"


def tool_mask(inputs: dict[str, Any]) -> dict[str, Any]:
    """The third token of every completion is a tool's."""
    mask = torch.ones_like(inputs["completion_mask"])
    mask[:, 2:3] = 0
    return {"tool_mask": mask}


def ratios(inputs: dict[str, Any]) -> dict[str, Any]:
    """An engine whose log-probabilities are a little off, one of them unknown."""
    old = inputs["old_per_token_logps"]
    sampling = old - 0.3 * torch.sin(torch.arange(old.numel(), dtype=torch.float32)).view_as(old)
    rho = torch.exp((old - sampling) * inputs["completion_mask"]).clamp(max=1.2)
    sampling[:, 1] = torch.nan
    return {"importance_sampling_ratio": rho, "sampling_per_token_logps": sampling}


def sequence_ratios(inputs: dict[str, Any]) -> dict[str, Any]:
    found = ratios(inputs)
    return {"importance_sampling_ratio": found["importance_sampling_ratio"].prod(-1, keepdim=True)}


def token_advantages(inputs: dict[str, Any]) -> dict[str, Any]:
    shape = inputs["completion_ids"].shape
    return {"advantages": inputs["advantages"][:, None] * (1 + torch.arange(shape[1])).expand(shape).cos()}


@pytest.mark.parametrize(
    ("inject", "vllm", "options"),
    [
        (tool_mask, False, {"loss_type": "grpo", "beta": 0.1, "importance_sampling_level": "sequence"}),
        (ratios, True, {"loss_type": "dapo", "off_policy_mask_threshold": 0.0, "beta": 0.1}),
        (sequence_ratios, True, {"loss_type": "grpo"}),
        (ratios, True, {"loss_type": "vespo", "off_policy_mask_threshold": 0.0}),
        (sequence_ratios, True, {"loss_type": "vespo"}),
        (token_advantages, False, {"loss_type": "bnpo", "epsilon": 0.01}),
    ],
    ids=["tool mask", "token ratios", "sequence ratios", "vespo token", "vespo sequence", "token advantages"],
)
def test_what_comes_in_the_batch(
    path: str, calls: list[Any], inject: Inject, vllm: bool, options: dict[str, Any]
) -> None:
    compare(path, calls, inject=inject, vllm=vllm, max_steps=4, **options)


def test_evaluation_and_completions_of_one_token(path: str, calls: list[Any]) -> None:
    """Metrics of one number per response are told from those of one per token by their width, as TRL does."""
    fast = compare(
        path,
        calls,
        eval_dataset=Dataset.from_list(PROMPTS),
        eval_strategy="steps",
        eval_steps=1,
        per_device_eval_batch_size=4,
        max_steps=2,
        max_completion_length=1,
        loss_type="dapo",
        beta=0.1,
        entropy_coef=0.01,
    )
    assert any("eval_loss" in line for line in fast.state.log_history)


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "autocast"])
def test_a_head_in_float32(path: str, calls: list[Any], bf16: bool) -> None:
    """Under autocast too, which TRL turns off around its head: the logits are float32 products."""
    compare(path, calls, cast_lm_head_to_fp32=True, bf16=bf16, loss_type="grpo", beta=0.1, epsilon=0.01, max_steps=4)
    assert all(call["logits_dtype"] == torch.float32 for call in calls)


def test_an_adapter_is_trained(path: str, calls: list[Any]) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    compare(path, calls, peft_config=config, loss_type="grpo", beta=0.1, max_steps=4)


def test_packed_rows_as_on_a_gpu(path: str, calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """There TRL hands over the completions' tokens alone, without padding: here it is told that this is a GPU."""
    packed: list[bool] = []
    original = trl_grpo._Rows.inputs

    def inputs(self: Any, *args: Any) -> Any:
        packed.append(self.cu_seqlens is not None)
        return original(self, *args)

    def on_a_gpu() -> dict[str, Any]:
        monkeypatch.setattr(utils, "_use_triton", lambda device: True)
        monkeypatch.setattr(trl_grpo._Rows, "inputs", inputs)
        return {"memory_budget": "64MiB"}

    compare(
        path,
        calls,
        between=on_a_gpu,
        loss_type="grpo",
        beta=0.1,
        top_entropy_quantile=0.6,
        inject=tool_mask,
        max_steps=4,
        importance_sampling_level="sequence",
    )
    assert all(packed)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {
                "loss_type": "vespo",
                "importance_sampling_level": "sequence",
                "use_bias_correction_kl": True,
                "beta": 0.1,
            },
            "use_bias_correction_kl with loss_type='vespo' needs",
        )
    ],
)
def test_what_cannot_be_fused_is_trls_and_says_so_once(
    path: str, calls: list[Any], said: Callable[[], list[str]], options: dict[str, Any], words: str
) -> None:
    expected = train(GRPOTrainer, path, max_steps=2, **options)
    fast = train(FastGRPOTrainer, path, max_steps=2, **options)
    assert len(said()) == 1 and words in said()[0] and not calls
    for a, b in zip(fast.state.log_history, expected.state.log_history, strict=True):
        assert a.get("loss") == b.get("loss") and a.get("grad_norm") == b.get("grad_norm")  # the very same


def test_a_loss_that_reads_something_new_is_not_ours(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A newer TRL's option may change its loss in a way that nobody here has heard of."""
    monkeypatch.setattr(trl_grpo, "KNOWN_READS", trl_objective.KNOWN_READS - {"args.delta"})
    fast = train(FastGRPOTrainer, path, max_steps=1)
    assert "reads args.delta" in fast._why_not
    assert trl_objective.reads(GRPOTrainer._compute_loss) <= trl_objective.KNOWN_READS


def test_a_subclass_that_scores_in_its_own_way_takes_trls_loss(path: str, calls: list[Any]) -> None:
    """Its old log-probabilities would come from its method and the new ones not."""

    class Mine(FastGRPOTrainer):
        def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
            logprobs, *rest = super()._get_per_token_logps_and_entropies(*args, **kwargs)
            return logprobs * 0.5, *rest

    fast = train(Mine, path, max_steps=1)
    assert "_get_per_token_logps_and_entropies is not GRPOTrainer's own" in fast._why_not and not calls


def test_another_version_is_said_to_be_untested(
    path: str, said: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trl_grpo.trl, "__version__", "1.99.0")
    train(FastGRPOTrainer, path, max_steps=1)
    assert any("TRL 1.99.0 has not been tested" in line for line in said())
