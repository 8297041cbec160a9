"""TRL's and transformers' trainers under accelerate's FSDP2, in two processes."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks

if importlib.util.find_spec("trl") is None:
    pytest.skip("needs trl", allow_module_level=True)


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    """Two processes, because each of them imports TRL, and does so before it has others to wait for."""
    processes = Ranks(2)
    processes.run(imported, timeout=150)
    yield processes
    processes.stop()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where the model is."""
    from trl_cases import save_model

    return save_model(tmp_path_factory.mktemp("tiny"))


def imported() -> None:
    """What the trainers need is imported."""
    import trl_cases  # noqa: F401

    import fastrl.integrations.trl  # noqa: F401


def start_accelerate() -> None:
    """Make accelerate start anew, and take this CPU for a GPU: it knows FSDP2 on GPUs only."""
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from accelerate.utils import DistributedType

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if not hasattr(PartialState, "own_init"):
        PartialState.own_init = PartialState.__init__

        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            self.own_init(*args, **kwargs)
            if self.distributed_type == DistributedType.MULTI_CPU:
                self.distributed_type = DistributedType.MULTI_GPU

        PartialState.__init__ = init


def train(base: str, way: str, path: str, options: dict[str, Any]) -> tuple[list[dict[str, Any]], str | None, int]:
    """What a trainer logged, why FastGRPOTrainer did not compute its loss, and how many fused losses there were."""
    import trl
    from tiny_models import tiny_model
    from torch.distributed.fsdp import FSDPModule
    from trl_cases import PROMPTS, make_trainer

    import fastrl.integrations.trl as fast_trl
    from fastrl.integrations.trl import distillation, grpo, patches, preferences

    start_accelerate()
    torch.manual_seed(5)
    wrapped, mixed = options.pop("wrapped", ["Qwen2DecoderLayer"]), options.get("bf16", False)
    rows = PROMPTS * 2 if base == "GRPO" else [{"text": f"w1 w{i} w5 w{i + 7} w2"} for i in range(16)]
    if base == "Distillation":
        options["teacher_model"] = tiny_model("qwen2", vocab_size=64, hidden_size=24, initializer_range=0.3)
        options["max_completion_length"] = 6
        rows = PROMPTS * 4
    if base == "CPO":
        rows = [prompt | {"chosen": " w7 w3", "rejected": f" w{i} w30 w33"} for i, prompt in enumerate(PROMPTS * 4)]
    settings: dict[str, Any] = {
        "max_steps": 2,
        "fsdp": True,
        "fsdp_config": {"version": 2, "reshard_after_forward": True, "transformer_layer_cls_to_wrap": wrapped},
    }
    calls: list[None] = []

    def counted(original: Any) -> Any:
        return lambda *args, **kwargs: (calls.append(None), original(*args, **kwargs))[1]

    fast_trl.disable()
    kind = None if base == "CPO" else getattr(trl, f"{base}Trainer")
    owner, name = (grpo, "linear_policy_loss") if way == "FastGRPOTrainer" else (patches, "linear_token_logprobs")
    if base == "CPO":
        import trl.experimental.cpo  # enable() replaces what is imported already

        owner = preferences
    if base == "Distillation":
        owner, name = distillation, "linear_divergence"
    original = getattr(owner, name)
    setattr(owner, name, counted(original))
    try:
        if way == "enable":
            fast_trl.enable()
        elif way == "FastGRPOTrainer":
            kind = fast_trl.FastGRPOTrainer
        trainer = make_trainer(base, path, rows, kind, **(settings | options))
        trainer.train()
    finally:
        fast_trl.disable()
        setattr(owner, name, original)
    assert isinstance(trainer.model, FSDPModule) and trainer.accelerator.is_fsdp2
    policy = trainer.accelerator.state.fsdp_plugin.mixed_precision_policy
    assert getattr(policy, "output_dtype", None) == (torch.bfloat16 if mixed else None)
    return trainer.state.log_history, getattr(trainer, "_why_not", None), len(calls)


def run(pair: Ranks, base: str, way: str, path: str, **options: Any) -> list[dict[str, Any]]:
    """The history, after what must be true of every run."""
    results = pair.run(train, base, way, path, options, timeout=150)
    for _, why_not, calls in results:
        assert why_not is None and (calls > 0) == (way != "own")
    history: list[dict[str, Any]] = results[0][0]
    return history


def test_grpo_takes_the_same_steps(pair: Ranks, path: str) -> None:
    from trl_cases import assert_same_history

    expected = run(pair, "GRPO", "own", path, beta=0.1)
    for way in ("enable", "FastGRPOTrainer"):
        assert_same_history(run(pair, "GRPO", way, path, beta=0.1), expected)


@pytest.mark.slow
def test_sft_takes_the_same_steps(pair: Ranks, path: str) -> None:
    from trl_cases import assert_same_history

    assert_same_history(run(pair, "SFT", "enable", path), run(pair, "SFT", "own", path))


@pytest.mark.slow
def test_distillation_takes_the_same_steps(pair: Ranks, path: str) -> None:
    """Both heads are sharded, and gathered for the loss."""
    from trl_cases import assert_same_history

    found = run(pair, "Distillation", "enable", path, beta=0.5)
    assert_same_history(found, run(pair, "Distillation", "own", path, beta=0.5))


@pytest.mark.slow
@pytest.mark.parametrize("wrapped", [["Qwen2DecoderLayer"], ["Qwen2DecoderLayer", "Linear"]], ids=["", "head alone"])
def test_cpo_takes_the_same_steps(pair: Ranks, path: str, wrapped: list[str]) -> None:
    """The head is gathered for the scores, with others or as a unit of its own."""
    from trl_cases import assert_same_history

    expected = run(pair, "CPO", "own", path, wrapped=wrapped)
    assert_same_history(run(pair, "CPO", "enable", path, wrapped=wrapped), expected)


@pytest.mark.slow
def test_a_head_that_is_its_own_unit_gets_the_gradient_of_all_ranks(pair: Ranks, path: str) -> None:
    from trl_cases import assert_same_history

    found = run(pair, "GRPO", "FastGRPOTrainer", path, wrapped=["Qwen2DecoderLayer", "Linear"])
    assert_same_history(found, run(pair, "GRPO", "own", path))


@pytest.mark.slow
def test_rounded_outputs_do_not_round_the_ratios(pair: Ranks, path: str) -> None:
    """Accelerate rounds outputs to bfloat16, in steps of 1/64 here; in the first step all ratios are 1."""
    options = {"bf16": True, "epsilon": 1e-4, "beta": 0.1}
    first, *_ = run(pair, "GRPO", "FastGRPOTrainer", path, **options)
    assert first["clip_ratio/region_mean"] == 0.0
    assert abs(first["kl"]) < 1e-6


def transformers_steps(path: str, fused: bool, tied: bool) -> list[float]:
    """Losses and gradient norms of transformers' own Trainer."""
    import datasets
    import transformers
    from tiny_models import tiny_model

    from fastrl.integrations.transformers import compute_loss_func, fused_lm_head

    start_accelerate()
    torch.manual_seed(0)
    model = tiny_model("qwen2", vocab_size=51, tie_word_embeddings=tied)
    ids = torch.randint(51, (16, 8)).tolist()
    rows = [{"input_ids": row, "labels": [-100] * (i % 6) + row[i % 6 :]} for i, row in enumerate(ids)]
    trainer = transformers.Trainer(
        model,
        transformers.TrainingArguments(
            path,
            use_cpu=True,
            max_steps=3,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            learning_rate=1e-3,
            fsdp=True,
            fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["Qwen2DecoderLayer"]},
        ),
        train_dataset=datasets.Dataset.from_list(rows),
        compute_loss_func=compute_loss_func(fused_lm_head(model)) if fused else None,
    )
    trainer.train()
    assert trainer.accelerator.is_fsdp2
    logs = [log for log in trainer.state.log_history if "grad_norm" in log]
    return [log[name] for log in logs for name in ("loss", "grad_norm")]


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_transformers_trainer_takes_the_same_steps(pair: Ranks, tmp_path: Path, tied: bool) -> None:
    """`compute_loss_func` computes the loss after the model's forward."""
    expected, found = (pair.run(transformers_steps, str(tmp_path), fused, tied)[0] for fused in (False, True))
    assert len(found) == 6 and found == pytest.approx(expected, rel=1e-5)
