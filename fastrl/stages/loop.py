"""The loop that the training stages share: shuffled batches, accumulated gradients, AdamW, a model at the end."""

import math
import shutil
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, set_seed
from transformers.utils import logging as transformers_logging

from ..runs.errors import UserError
from ..runs.log import RunLog, check_output, flush
from ..runs.optimizer import find_device, make_optimizer
from ..runs.policy import Policy, checkpointing
from ..runs.sections import MachineConfig
from .config import StageConfig

Row = TypeVar("Row")


class Stage(ABC, Generic[Row]):
    """What is trained, and by which loss; ``model`` is on its device and in evaluation mode."""

    model: Any
    tokenizer: PreTrainedTokenizerBase
    shown: Sequence[str]  # the metrics of a line on the terminal

    def weight(self, row: Row) -> int:
        """How much of what the loss is a mean over a row holds."""
        return 1

    @abstractmethod
    def part(self, rows: Sequence[Row], total: int) -> tuple[Tensor, dict[str, float]]:
        """The rows' part of the loss over all rows of an update, whose weights sum to ``total``, and of its metrics.

        Parts add up to the loss and the metrics of the whole, however the rows are cut up.
        """

    def save(self, directory: Path) -> None:
        """Write model and tokenizer into an empty directory."""
        self.model.save_pretrained(directory)
        self.tokenizer.save_pretrained(directory)


class PolicyStage(Stage[Row]):
    """A stage that trains a policy."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.model, self.tokenizer = policy, policy.model, policy.tokenizer

    def save(self, directory: Path) -> None:
        """As every stage; adapters go to ``adapters`` in the directory, and into the weights of the model beside them.

        Adapters alone need the model they were made for, which may move, or be a random one that is gone.
        """
        if self.policy.has_adapters:
            self.model.save_pretrained(directory / "adapters")
            self.model = self.model.merge_and_unload()
        super().save(directory)


def start(machine: MachineConfig) -> torch.device:
    """Seed everything, quiet transformers' bars (ours are the ones to look at), and return the device."""
    set_seed(machine.seed)
    transformers_logging.disable_progress_bar()
    return find_device(machine.device)


def prepare(config: StageConfig) -> torch.device:
    """``start``, but UserError for an output directory that holds another run, before there is any work to lose."""
    check_output(config.logging.output_dir, config.logging.overwrite)
    return start(config.training)


def fit(stage: Stage[Row], rows: list[Row], held_out: list[Row], config: StageConfig, name: str) -> dict[str, Any]:
    """Train over the epochs, log every update and save the model; returns the run's summary.

    Held-out rows are measured at the end of each epoch, as ``eval/<metric>``. Raises UserError for a loss or a gradient
    that is not finite.
    """
    training, output, started = config.training, config.logging.output_dir, time.perf_counter()
    size = training.micro_batch_size or training.batch_size
    updates = -(-len(rows) // training.batch_size)
    steps = training.epochs * updates
    optimizer, scheduler = make_optimizer([(stage.model.parameters(), config.optimizer.lr)], config.optimizer, steps)
    with RunLog(config, config.logging, name, steps, stage.shown) as log:
        for step, batch in enumerate(_batches(rows, training.batch_size, training.epochs, training.seed), 1):
            numbers = measure(stage, batch, size, backward=True)
            numbers |= {"lr": optimizer.param_groups[0]["lr"], "epoch": step / updates}
            numbers["grad_norm"] = _update(optimizer, config.optimizer.max_grad_norm, step, numbers["loss"])
            scheduler.step()
            if held_out and step % updates == 0:
                found = measure(stage, held_out, size, backward=False)
                numbers |= {f"eval/{metric}": value for metric, value in found.items() if metric != "tokens"}
            log.write(step, numbers)
        save_model(stage, output / "model")
        return log.summarize({"steps": steps, "seconds": time.perf_counter() - started})


def closing_line(config: StageConfig, name: str, summary: dict[str, Any]) -> str:
    """What a command says at its end: how it went, and where things are."""
    output = config.logging.output_dir
    numbers = {metric: summary.get(metric) for metric in ("loss", "eval/loss", "accuracy", "eval/accuracy")}
    values = ", ".join(f"{metric} {value:.4f}" for metric, value in numbers.items() if value is not None)
    return (
        f"{name}: {summary['steps']} updates in {summary['seconds']:.0f} s. {values}\n"
        f"metrics, curves and report: {output}\nmodel: {output / 'model'}"
    )


def measure(stage: Stage[Row], rows: Sequence[Row], size: int, *, backward: bool) -> dict[str, float]:
    """The loss over the rows and its metrics, ``size`` rows at a time; with ``backward`` its gradient is added up."""
    total = sum(stage.weight(row) for row in rows)
    sums: dict[str, float] = defaultdict(float)
    for first in range(0, len(rows), size):
        with torch.set_grad_enabled(backward), checkpointing(stage.model):
            loss, numbers = stage.part(rows[first : first + size], total)
            if backward:
                loss.backward()
        for name, value in {"loss": float(loss.detach()), **numbers}.items():
            sums[name] += value
    return dict(sums)


def _batches(rows: list[Row], size: int, epochs: int, seed: int) -> Iterator[list[Row]]:
    """Every epoch in a new order; its last batch may be smaller."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        order = torch.randperm(len(rows), generator=generator).tolist()
        for first in range(0, len(rows), size):
            yield [rows[i] for i in order[first : first + size]]


def _update(
    optimizer: torch.optim.Optimizer,
    max_grad_norm: float,
    step: int,
    loss: float,
) -> float:
    """One step of AdamW on the clipped gradient, which is then gone; returns its norm before clipping."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = float(torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm))
    if not math.isfinite(loss + norm):
        raise UserError(
            f"step {step}: expected a finite loss and gradient, got loss {loss:.4g} and gradient norm {norm:.4g}; "
            "optimizer.lr may be too high"
        )
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


def save_model(stage: Stage[Any], directory: Path) -> None:
    """Write the stage's model to ``directory``, which exists only once it is complete."""
    unfinished = directory.with_name(f".{directory.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        stage.save(unfinished)
        flush(unfinished)
        unfinished.rename(directory)
    except BaseException:  # Ctrl-C too
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
