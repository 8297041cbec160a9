"""The loop that the training stages share: shuffled batches, accumulated gradients, AdamW, a model at the end."""

import math
import sys
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from fastrl.base.errors import UserError
from fastrl.models.patching import is_sharded
from fastrl.planning.plans import Plan
from fastrl.training.batches.loss_calls import LossCall, loss_plans
from fastrl.training.batches.memory import with_micro_batches
from fastrl.training.batches.micro_batches import MicroBatches, Shape
from fastrl.training.config.sections import OptimizerConfig
from fastrl.training.config.stages import StageConfig, TokenStageConfig, TokenTrainingConfig
from fastrl.training.data.digest import digest
from fastrl.training.engines.weights import base_of, merged_weights
from fastrl.training.models.loading import name_of
from fastrl.training.models.policy import Policy, checkpointing, load_policy, max_positions
from fastrl.training.models.rotary import fix_frequencies
from fastrl.training.models.saving import check_savable, save_pretrained
from fastrl.training.parallel.seeds import seed_step, shuffled
from fastrl.training.parallel.shard import gathered, gathered_state, whole_on_main
from fastrl.training.parallel.world import ALONE, World
from fastrl.training.run.banner import show_end, show_start
from fastrl.training.run.checkpoint import (
    SaveClock,
    Trained,
    as_started,
    checkpoint_of,
    read_checkpoint,
    saved_on_error,
    write_checkpoint,
    written,
)
from fastrl.training.run.facts import run_facts
from fastrl.training.run.files import whole_directory
from fastrl.training.run.log import RunLog
from fastrl.training.run.optimizer import Diverged, calmer, make_optimizer
from fastrl.training.run.prepared import prepared, stopping
from fastrl.training.stages.rows import Reader, Tokens

Row = TypeVar("Row")


class Stage(ABC, Generic[Row]):
    """What is trained, and with which loss; `model` is on its device and in evaluation mode."""

    model: Any
    tokenizer: PreTrainedTokenizerBase
    has_adapters = False  # the model is peft's wrapper, and only its adapters are trained
    shown: Sequence[str]  # the metrics in a line on the terminal

    @abstractmethod
    def shape(self, row: Row) -> Shape:
        """What the row takes in a micro-batch."""

    def weight(self, row: Row) -> int:
        """The row's weight in the loss's mean: how many of the averaged items it holds."""
        return 1

    @property
    def models(self) -> list[Any]:
        """Every model that reads the rows."""
        return [self.model]

    def total(self, rows: Sequence[Row]) -> Any:
        """What an update's rows are averaged over: the sum of their weights, or more for a loss of several means."""
        return sum(self.weight(row) for row in rows)

    @abstractmethod
    def part(self, rows: Sequence[Row], total: Any) -> tuple[Tensor, Mapping[str, float | Tensor]]:
        """The rows' part of the loss over all rows of an update, of which `total` is given, and of its metrics.

        Parts add up to the loss and the metrics of the whole update, however its rows are split. A metric is a number,
        or a detached scalar, for which the host does not wait.
        """

    def before(self, rows: Sequence[Row], micro_batches: MicroBatches) -> Tensor | None:
        """What only the model before the first update can compute for each row, (rows, k). Checkpoints hold it."""
        return None

    def attach(self, rows: list[Row], before: Tensor) -> list[Row]:
        """The rows with their results from `before`."""
        raise NotImplementedError

    def complete(self, world: World) -> None:
        """Compute what the model lacks, once it is trained."""

    def weights(self, world: World) -> Any:
        """What `save` is given: what all ranks hold, on rank 0."""
        return gathered_state(self.model, world) if is_sharded(self.model) else None

    def save(self, directory: Path, weights: Any) -> None:
        """Write model and tokenizer into an empty directory."""
        save_pretrained(self.model, directory, state_dict=weights)
        self.tokenizer.save_pretrained(directory)


class PolicyStage(Stage[Row]):
    """A stage that trains a policy, with a loss over the vocabulary."""

    def __init__(self, policy: Policy, training: TokenTrainingConfig) -> None:
        self.policy, self.model, self.tokenizer = policy, policy.model, policy.tokenizer
        self.has_adapters = policy.has_adapters
        self.packing, self.memory_budget = training.packing, training.memory_budget

    def weights(self, world: World) -> Any:
        """With adapters, these and the model's weights with them merged."""
        if not self.has_adapters:
            return super().weights(world)
        merged = whole_on_main(merged_weights(self.policy), world)
        return gathered_state(self.model, world, trained=True), merged

    def save(self, directory: Path, weights: Any) -> None:
        """As every stage; adapters go to `adapters` in the directory, and merged into the model's weights beside it.

        Adapters alone need the model that they were made for, which may move, or be a random one that is gone.
        """
        if self.has_adapters:
            adapters, weights = weights
            save_pretrained(self.model, directory / "adapters", state_dict=adapters)
            self.model = base_of(self.policy)
        super().save(directory, weights)


def prepared_stage(config: StageConfig, name: str, resume: bool) -> AbstractContextManager[tuple[World, Path | None]]:
    """As `prepared`, for a stage."""
    epochs, rows = config.training.epochs, config.training.batch_size
    what = f"{name}: {epochs} epoch{'s' * (epochs > 1)} in updates of {rows} rows"
    return prepared(config, name, "training.epochs", what, resume)


def train_policy(
    make: Callable[[Policy, World], PolicyStage[Row]],
    parse: Callable[[Reader, dict[str, Any], str], Row],
    completions: Callable[[Sequence[Row]], list[Tokens]],
    config: TokenStageConfig,
    name: str,
    resume: bool,
    *,
    per_row: int = 1,
    calls: Callable[[LossCall], list[LossCall]] = lambda call: [call],
) -> dict[str, Any]:
    """Run a stage that trains a policy, or the rest of it; returns the run's summary.

    `completions` returns the `per_row` completions of each row, `calls` the calls of the losses over the rows of one.
    Raises UserError before the first update for input that cannot be used.
    """
    training, data = config.training, config.data
    with prepared_stage(config, name, resume) as (world, checkpoint):
        device = world.device
        if training.memory_budget is not None:  # before the model is loaded
            loss_plans(training, config.model, device, calls(LossCall("the loss", 1, 1, 1, training.packing)))
        policy = load_policy(config.model, device, packing=training.packing, world=world)
        stage = make(policy, world)
        reader = Reader.of(data, policy.tokenizer, training.max_length, max_positions(*stage.models))
        rows, held_out = reader.load(data.source, parse), reader.load(data.eval_source, parse)
        sequences = completions(rows + held_out)
        for model in stage.models:
            fix_frequencies(model, max(len(tokens.all) for tokens in sequences))
        lengths = [len(tokens.completion) for tokens in sequences]
        if empty := lengths.count(1):  # the end of the turn alone
            print(f"fastrl: warning: {empty} of {len(lengths)} completions are empty", file=sys.stderr)

        def plans(tokens: int) -> list[Plan]:
            call = largest_call(training, lengths, per_row, tokens)
            return loss_plans(training, config.model, device, calls(call), policy)

        return fit(stage, rows, held_out, config, name, checkpoint, world, plans)


def largest_call(training: TokenTrainingConfig, lengths: list[int], per_row: int, tokens: int) -> LossCall:
    """The largest call of the loss in an update of completions of these lengths, with micro-batches of so many tokens.

    `lengths` are in tokens, `per_row` of them a row's.
    """
    sequences, longest = min(training.batch_size * per_row, len(lengths)), max(lengths)
    tokens = max(tokens, per_row * longest)
    valid = min(sum(sorted(lengths)[-sequences:]), tokens)
    rows = valid if training.packing else min(sequences * longest, tokens)
    return LossCall("the loss", valid, rows, longest, training.packing)


def fit(
    stage: Stage[Row],
    rows: list[Row],
    held_out: list[Row],
    config: StageConfig,
    name: str,
    checkpoint: Path | None,
    world: World,
    plans: Callable[[int], list[Plan]] = lambda tokens: [],
) -> dict[str, Any]:
    """Train over the epochs, or those left after a checkpoint, log every update and save the model.

    `plans` returns those of the losses over the vocabulary, for micro-batches of so many tokens. Returns the run's
    summary: the last value of every metric, "steps", "seconds" (of this call), "resumed", the updates that were done
    before it, and "interrupted", the name of the signal that ended it early, or None. Held-out rows are measured before
    the first update and at the end of each epoch, as `eval/<metric>`. Raises UserError for a model that cannot be
    saved, before any work, and for a loss or a gradient that is not finite.
    """
    shapes = [stage.shape(row) for row in rows + held_out]
    sizes = _sizes(shapes, config.training.batch_size, getattr(config.training, "packing", False))
    config = as_started(config, checkpoint, world)
    config, micro_batches, memory = with_micro_batches(config, stage.models, sizes, plans, world=world)
    training, logging, started = config.training, config.logging, time.perf_counter()
    saved = [stage.model, *([stage.model.get_base_model()] if stage.has_adapters else [])]
    world.first(lambda: check_savable(name_of(config.model), stage.tokenizer, saved, logging.output_dir))
    updates = -(-len(rows) // training.batch_size)
    steps = training.epochs * updates
    optimizer, scheduler = make_optimizer([(stage.model.parameters(), config.optimizer.peak)], config.optimizer, steps)
    sets = {"data.path": rows, "data.eval_path": held_out}
    data = {field: (len(dataset), digest(dataset)) for field, dataset in sets.items()}
    world.check_alike({field: f"{count} rows, digest {text[:12]}" for field, (count, text) in data.items()})
    trained = Trained(stage.model, stage.tokenizer, stage.has_adapters, optimizer, scheduler, data, world=world)
    if checkpoint is None:
        step, computed = 0, {field: stage.before(dataset, micro_batches) for field, dataset in sets.items()}
        kept = {field: tensor for field, tensor in computed.items() if tensor is not None}
    else:
        state, tensors = read_checkpoint(checkpoint, trained)
        step, kept = state["step"], {field: tensors[field] for field in sets if field in tensors}
    rows, held_out = (stage.attach(sets[f], kept[f]) if f in kept else sets[f] for f in sets)
    interrupted = None
    first, facts = step, run_facts(config, name, stage.model, world.device, str(world) if world.size > 1 else "")
    longest = max(shape.longest for shape in shapes)
    described = f"{len(rows)} rows, {len(held_out)} held out, at most {longest} tokens in a sequence"
    show_start(config, facts, described, memory, world.device, world.size)
    with ExitStack() as stack:
        log: Any = None  # rank 0's
        if world.main:
            log = stack.enter_context(RunLog(config, logging, name, steps, stage.shown, step, facts))
        signals, clock = stack.enter_context(stopping(world)), SaveClock(logging)

        def save(step: int) -> Path | None:
            """Save the run after a step, if it is not yet."""
            directory = checkpoint_of(logging, step)
            if step and world.first(lambda: not directory.exists()):
                world.first(lambda: log.sync())
                write_checkpoint(micro_batches.noted(config), logging, trained, step, {}, kept)
            return directory if step else None

        def evaluated() -> dict[str, float]:
            numbers = measure(stage, held_out, micro_batches, backward=False)
            return {f"eval/{name}": value for name, value in numbers.items() if name != "tokens"}

        if checkpoint is None and held_out:
            numbers = evaluated()
            world.first(lambda: log.write(0, numbers))
        while step < steps:
            seed_step(training.seed, step + 1)
            epoch, number = divmod(step, updates)  # the last one of an epoch may be smaller
            batch = shuffled(len(rows), training.seed, "rows", epoch).split(training.batch_size)[number]
            with saved_on_error(partial(save, step), world):
                numbers = measure(stage, [rows[i] for i in batch.tolist()], micro_batches, backward=True)
                numbers |= {"lr": optimizer.param_groups[0]["lr"], "epoch": (step + 1) / updates}
                numbers["grad_norm"] = _clip(optimizer, config.optimizer)
            with saved_on_error(partial(save, step), world):
                _check_finite(step + 1, numbers, config.optimizer)
            with saved_on_error(partial(save, step), world):
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            scheduler.step()
            step += 1
            record = partial(RunLog.write, log, step, numbers)
            with saved_on_error(partial(save, step), world), written(record, world):
                if held_out and step % updates == 0:
                    numbers |= evaluated()
            interrupted, is_due = clock.decide(step, step == steps, signals, world)
            if is_due:
                save(step)
            if interrupted:
                break
        if not interrupted:
            model = logging.output_dir / "model"
            try:
                save_model(stage, model, world)
            except (OSError, SafetensorError) as error:
                raise UserError(
                    f"{model}: cannot save the model: {error}; it is in {checkpoint_of(logging, step)}, and --resume "
                    "writes it again"
                ) from error
        summary = {"steps": step, "resumed": first, "interrupted": interrupted}
        return world.first(lambda: log.summarize({**summary, "seconds": time.perf_counter() - started}))


def _sizes(shapes: Sequence[Shape], rows: int, packed: bool) -> tuple[int, int, int]:
    """The tokens of an update of so many of the rows, of the largest row and of the longest sequence, at most."""
    counts, longest, totals = zip(*shapes, strict=True)
    sequences, tokens = (sum(sorted(values)[-rows:]) for values in (counts, totals))
    whole = Shape(sequences, max(longest), tokens).size(packed)
    return whole, max(shape.size(packed) for shape in shapes), max(longest)


def finish(config: StageConfig, name: str, summary: dict[str, Any], following: str) -> int:
    """Print the result of a command's run, its output paths and a command that can follow; return its exit status.

    `following` is that command up to the model's path.
    """
    scores = ("loss", "eval/loss", "accuracy", "eval/accuracy")
    command = f"{following} {config.logging.output_dir / 'model'}"
    return show_end(config, name, "updates", "training.epochs", summary, scores, command)


def measure(stage: Stage[Row], rows: Sequence[Row], micro_batches: MicroBatches, *, backward: bool) -> dict[str, float]:
    """The loss over the rows and its metrics, by micro-batches; with `backward` its gradient is in the parameters."""
    total, shapes, world = stage.total(rows), list(map(stage.shape, rows)), micro_batches.world

    def added() -> dict[str, float | Tensor]:
        stage.model.zero_grad(set_to_none=True)  # of a try that ran out of memory
        sums: dict[str, float | Tensor] = defaultdict(float)
        for part, weight in world.deal(micro_batches.cut(shapes)):
            with torch.set_grad_enabled(backward), checkpointing(stage.model):
                loss, numbers = stage.part([rows[row] for row in part], total)
                if backward:
                    (loss * weight * world.size).backward()  # FSDP2 averages over the ranks
            for name, value in {"loss": loss.detach(), **numbers}.items():
                sums[name] += (value.double() if isinstance(value, Tensor) else value) * weight
        return sums

    sums = micro_batches.fitted(added)
    values = world.total(torch.tensor([float(value) for value in sums.values()], dtype=torch.float64))
    return dict(zip(sums, values.tolist(), strict=True))


def _clip(optimizer: torch.optim.Optimizer, settings: OptimizerConfig) -> float:
    """Scale the gradients down to the largest norm that they may have; returns their norm before."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return float(gathered(torch.nn.utils.clip_grad_norm_(parameters, settings.max_grad_norm)))


def _check_finite(step: int, numbers: Mapping[str, float], settings: OptimizerConfig) -> None:
    """Raise UserError unless a step's loss and gradient are numbers."""
    loss, norm = numbers["loss"], numbers["grad_norm"]
    if not math.isfinite(loss + norm):
        raise (UserError if math.isfinite(loss) else Diverged)(  # weights that give no loss are not saved
            f"step {step}: expected a finite loss and gradient, got loss {loss:.4g} and gradient norm {norm:.4g}; if "
            f"training diverged, {calmer(settings)}"
        )


def save_model(stage: Stage[Any], directory: Path, world: World = ALONE) -> None:
    """Write the stage's model to `directory`, which exists only once it is complete."""
    stage.complete(world)
    weights = stage.weights(world)

    def write() -> None:
        with whole_directory(directory, directory.with_name(f".{directory.name}.unfinished")) as unfinished:
            stage.save(unfinished, weights)

    world.first(write)
