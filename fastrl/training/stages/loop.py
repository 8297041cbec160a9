"""The loop that the training stages share: shuffled batches, accumulated gradients, AdamW, a model at the end."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic

import torch
from safetensors import SafetensorError
from torch import Tensor

from fastrl.base.errors import UserError
from fastrl.base.terminal import say
from fastrl.planning.plans import Plan
from fastrl.training.batches.loss_calls import LossCall, loss_plans
from fastrl.training.batches.memory import with_micro_batches
from fastrl.training.batches.micro_batches import MicroBatches, Shape
from fastrl.training.config.sections import OptimizerConfig
from fastrl.training.config.stages import StageConfig, TokenStageConfig, TokenTrainingConfig
from fastrl.training.data.digest import digest
from fastrl.training.models.decoder import checkpointing, max_positions
from fastrl.training.models.policy import load_policy
from fastrl.training.models.rotary import fix_frequencies
from fastrl.training.models.saving import save_pretrained
from fastrl.training.parallel.seeds import shuffled
from fastrl.training.parallel.shard import gathered
from fastrl.training.parallel.world import ALONE, World
from fastrl.training.run.banner import show_end
from fastrl.training.run.checkpoint import Trained
from fastrl.training.run.files import whole_directory
from fastrl.training.run.folder import checkpoint_of
from fastrl.training.run.loop import Loop, run_loop
from fastrl.training.run.optimizer import Diverged, calmer, make_optimizer
from fastrl.training.stages.rows import Reader, Row
from fastrl.training.stages.stage import PolicyStage, Stage


def run_stage(config: StageConfig, resume: bool, make: Callable[[Any, World], Loop]) -> dict[str, Any]:
    """As `run_loop`, for a stage."""
    epochs, rows = config.training.epochs, config.training.batch_size
    what = f"{config.command}: {epochs} epoch{'s' * (epochs > 1)} in updates of {rows} rows"
    return run_loop(config, config.command, "training.epochs", what, resume, make)


def policy_loop(kind: type[PolicyStage[Any]], config: TokenStageConfig, world: World) -> Loop:
    """The loop of a stage that trains a policy. Raises UserError for input that cannot be used."""
    training, data, device = config.training, config.data, world.device
    if training.memory_budget is not None:  # before the model is loaded
        calls = kind.calls(config, LossCall("the loss", 1, 1, 1, training.packing))
        loss_plans(training, config.model, device, calls)
    policy = load_policy(config.model, device, packing=training.packing, world=world)
    stage = kind.of(config, policy, world)
    reader = Reader.of(data, policy.tokenizer, training.max_length, max_positions(*stage.models))
    rows, held_out = reader.load(data.source, kind.parse), reader.load(data.eval_source, kind.parse)
    sequences = kind.completions(rows + held_out)
    for model in stage.models:
        fix_frequencies(model, max(len(tokens.all) for tokens in sequences))
    lengths = [len(tokens.completion) for tokens in sequences]
    if empty := lengths.count(1):  # the end of the turn alone
        say(f"warning: {empty} of {len(lengths)} completions are empty")

    def plans(tokens: int) -> list[Plan]:
        call = largest_call(training, lengths, len(lengths) // len(rows + held_out), tokens)
        return loss_plans(training, config.model, device, kind.calls(config, call), policy)

    return StageLoop(stage, rows, held_out, config, world, plans)


def largest_call(training: TokenTrainingConfig, lengths: list[int], per_row: int, tokens: int) -> LossCall:
    """The largest call of the loss in an update of completions of these lengths, with micro-batches of so many tokens.

    `lengths` are in tokens, `per_row` of them a row's.
    """
    sequences, longest = min(training.batch_size * per_row, len(lengths)), max(lengths)
    tokens = max(tokens, per_row * longest)
    valid = min(sum(sorted(lengths)[-sequences:]), tokens)
    rows = valid if training.packing else min(sequences * longest, tokens)
    return LossCall("the loss", valid, rows, longest, training.packing)


class StageLoop(Loop, Generic[Row]):
    """Updates over the epochs; held-out rows are measured before the first one and at the end of each epoch."""

    def __init__(
        self,
        stage: Stage[Row],
        rows: list[Row],
        held_out: list[Row],
        config: StageConfig,
        world: World,
        plans: Callable[[int], list[Plan]] = lambda tokens: [],
    ) -> None:
        """`plans` returns those of the losses over the vocabulary, for micro-batches of so many tokens."""
        shapes = [stage.shape(row) for row in rows + held_out]
        sizes = _sizes(shapes, config.training.batch_size, getattr(config.training, "packing", False))
        self.config, self.micro_batches, self.memory = with_micro_batches(
            config, stage.models, sizes, plans, world=world
        )
        self.stage, self.name, self.shown = stage, config.command, stage.shown
        self.updates = -(-len(rows) // config.training.batch_size)  # of an epoch; its last one may be smaller
        self.steps = config.training.epochs * self.updates
        self.sets = {"data.path": rows, "data.eval_path": held_out}
        longest = max(shape.longest for shape in shapes)
        self.described = f"{len(rows)} rows, {len(held_out)} held out, at most {longest} tokens in a sequence"
        groups = [(stage.model.parameters(), config.optimizer.peak)]
        state = make_optimizer(groups, config.optimizer, self.steps)
        data = {field: (len(dataset), digest(dataset)) for field, dataset in self.sets.items()}
        self.trained = Trained(stage.model, stage.tokenizer, stage.has_adapters, *state, data, world=world)
        self.before: dict[str, Tensor] = {}  # what `Stage.before` has computed of each set

    @property
    def saved(self) -> list[torch.nn.Module]:
        """The model; with adapters also what they are merged into."""
        return [self.stage.model, *([self.stage.model.get_base_model()] if self.stage.has_adapters else [])]

    def begin(self, numbers: Mapping[str, Any] | None, tensors: Mapping[str, Tensor]) -> None:
        """Compute what only the model before the first update can, or read it."""
        for field, rows in self.sets.items():
            before = self.stage.before(rows, self.micro_batches) if numbers is None else tensors.get(field)
            if before is not None:
                self.before[field] = before
                self.sets[field] = self.stage.attach(rows, before)

    def tensors(self) -> Mapping[str, Tensor]:
        """What was computed before the first update."""
        return self.before

    def take_step(self) -> tuple[dict[str, float], list[dict[str, object]]]:
        """An update on the epoch's next rows. Raises UserError for a loss or a gradient that is not finite."""
        optimizer, training, rows = self.trained.optimizer, self.config.training, self.sets["data.path"]
        epoch, number = divmod(self.step - 1, self.updates)
        batch = shuffled(len(rows), training.seed, "rows", epoch).split(training.batch_size)[number]
        numbers = measure(self.stage, [rows[i] for i in batch.tolist()], self.micro_batches, backward=True)
        numbers |= {"lr": optimizer.param_groups[0]["lr"], "epoch": self.step / self.updates}
        numbers["grad_norm"] = _clip(optimizer, self.config.optimizer)
        _check_finite(self.step, numbers, self.config.optimizer)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        self.trained.scheduler.step()
        return numbers, []

    def evaluates(self, step: int) -> bool:
        """At the end of each epoch."""
        return bool(self.sets["data.eval_path"]) and step % self.updates == 0

    def evaluate(self) -> dict[str, float]:
        """The loss and the metrics of the held-out rows, as `eval/<metric>`."""
        numbers = measure(self.stage, self.sets["data.eval_path"], self.micro_batches, backward=False)
        return {f"eval/{name}": value for name, value in numbers.items() if name != "tokens"}

    def complete(self) -> None:
        """Write the model."""
        logging = self.config.logging
        model = logging.output_dir / "model"
        try:
            save_model(self.stage, model, self.world)
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"{model}: cannot save the model: {error}; it is in {checkpoint_of(logging, self.step)}, and --resume "
                "writes it again"
            ) from error


def _sizes(shapes: Sequence[Shape], rows: int, packed: bool) -> tuple[int, int, int]:
    """The tokens of an update of so many of the rows, of the largest row and of the longest sequence, at most."""
    counts, longest, totals = zip(*shapes, strict=True)
    sequences, tokens = (sum(sorted(values)[-rows:]) for values in (counts, totals))
    whole = Shape(sequences, max(longest), tokens).size(packed)
    return whole, max(shape.size(packed) for shape in shapes), max(longest)


def finish(config: StageConfig, summary: dict[str, Any], following: str) -> int:
    """Print the result of a command's run, its output paths and a command that can follow; return its exit status.

    `following` is that command up to the model's path.
    """
    scores = ("loss", "eval/loss", "accuracy", "eval/accuracy")
    command = f"{following} {config.logging.output_dir / 'model'}"
    return show_end(config, config.command, "updates", "training.epochs", summary, scores, command)


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
    parts = stage.saved(world)

    def write() -> None:
        with whole_directory(directory, directory.with_name(f".{directory.name}.unfinished")) as unfinished:
            for folder, (model, weights) in parts.items():
                save_pretrained(model, unfinished / folder, state_dict=weights)
            stage.tokenizer.save_pretrained(unfinished)

    world.first(write)
