"""What the tests of models with a fused head share: a batch, gradients by name, the steps of transformers' Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

VOCAB = 50


def make_batch() -> dict[str, Tensor]:
    """Two sequences, one left-padded, and some tokens that do not count."""
    torch.manual_seed(1)
    input_ids = torch.randint(VOCAB, (2, 9))
    mask = torch.ones_like(input_ids)
    mask[1, :3] = 0
    labels = input_ids.masked_fill(mask == 0, -100)
    labels[0, :4] = -100
    return {"input_ids": input_ids, "attention_mask": mask, "labels": labels}


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """Of every parameter that has one, by its name."""
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_gradients_close(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], rtol: float = 1e-4, of_largest: float = 1e-5
) -> None:
    """But for rtol of an entry and so much of its tensor's largest: sums of 10 to 30 float32 terms, in other orders."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        atol = of_largest * float(value.abs().max()) + 1e-8
        torch.testing.assert_close(found[name], value, rtol=rtol, atol=atol, msg=name)


def trainer_log(
    model: nn.Module, folder: Path, steps: int, learning_rate: float, accumulation: int, **options: Any
) -> Tensor:
    """Each step's loss and gradients' norm, then the evaluation's loss, as transformers' Trainer logs them."""
    torch.manual_seed(2)
    rows = [{"input_ids": row, "labels": [-100, -100, *row[2:]]} for row in torch.randint(VOCAB, (12, 8)).tolist()]
    arguments = TrainingArguments(
        str(folder),
        max_steps=steps,
        per_device_train_batch_size=3,
        gradient_accumulation_steps=accumulation,
        learning_rate=learning_rate,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        eval_strategy="steps",
        eval_steps=steps,
        disable_tqdm=True,
        max_grad_norm=1e9,
    )
    data = {"train_dataset": Dataset.from_list(rows), "eval_dataset": Dataset.from_list(rows[:5])}
    trainer = Trainer(model, arguments, **data, **options)
    trainer.train()
    names = ("loss", "grad_norm", "eval_loss")
    found = [log[name] for log in trainer.state.log_history for name in names if name in log]
    assert len(found) == 2 * steps + 1
    return torch.tensor(found)
