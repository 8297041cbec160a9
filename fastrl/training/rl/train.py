"""`fastrl train`: what a step does. The loop around steps is `fastrl.training.run.loop`."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any

import torch
from torch import Tensor

from fastrl.base.errors import UserError
from fastrl.training.config.train import Config
from fastrl.training.data.digest import digest
from fastrl.training.data.examples import PromptSampler
from fastrl.training.models.names import name_of
from fastrl.training.parallel.phases import over_ranks
from fastrl.training.parallel.timing import peak_memory, timed
from fastrl.training.parallel.world import World
from fastrl.training.rl.evaluation import evaluate
from fastrl.training.rl.experience import collect
from fastrl.training.rl.run import Run, make_run
from fastrl.training.rl.update import update
from fastrl.training.run.banner import show_end
from fastrl.training.run.checkpoint import Trained
from fastrl.training.run.folder import checkpoint_of
from fastrl.training.run.loop import Loop, due, run_loop
from fastrl.training.run.optimizer import Diverged, calmer

# The metrics in a step's line on the terminal, if present.
SHOWN = ("reward", "eval/reward", "divergence", "entropy", "kl", "clip_frac", "length", "grad_norm", "time/step")


def main(config: Config, resume: bool) -> int:
    """`fastrl train`: train, print what came out, and return the exit status.

    That is 0 for a complete run, or the status that a shell gives for the signal that ended it early.
    """
    summary = train(config, resume=resume)
    model, scores = checkpoint_of(config.logging, summary["steps"]), [x for x in summary if x.startswith("eval/")]
    following = f"fastrl sample SAMPLE_CONFIG.toml --model.path {model}"
    following += "" if config.model.lora_rank else f", or vllm serve {model}"
    return show_end(config, config.name, "steps", "training.steps", summary, scores, following)


def train(config: Config, *, resume: bool = False) -> dict[str, Any]:
    """Run the training run, or with `resume` the rest of the one in logging.output_dir.

    Returns its summary, as `run_loop` does. Raises UserError before the first step for anything in the config, dataset,
    model or reward that cannot be used, later for a reward or a loss that fails, and if another process writes to
    logging.output_dir.
    """
    prompts, completions = config.rollout.prompts_per_step, config.rollout.num_generations
    what = f"{config.name}: {config.training.steps} steps of {prompts} prompts x {completions} completions"

    def make(config: Config, world: World) -> Loop:
        return TrainLoop(make_run(config, world))

    return run_loop(config, "train", "training.steps", what, resume, make)


class TrainLoop(Loop):
    """Steps of a run: sample, update and adapt; evaluations at intervals."""

    def __init__(self, run: Run) -> None:
        self.run, self.config, self.name, self.steps = run, run.config, run.config.name, run.config.training.steps
        self.shown = [name for name in SHOWN if name != "kl" or run.loss.objective.kl is not None]
        self.memory, self.micro_batches, self.closing = run.memory, run.update_batches, closing(run.functions)
        prompts, policy, models = run.data.rollouts.prompts, run.models.policy, dict[str, torch.nn.Module]()
        longest = run.data.longest
        count = f"{len(prompts.examples)} prompts" if isinstance(prompts, PromptSampler) else "streamed prompts"
        length = "" if longest is None else f", at most {longest} tokens with the completion"
        self.described = f"{count}, {len(run.data.held_out)} held out{length}"
        if run.models.critic is not None:
            models["critic.safetensors"] = run.models.critic
        if run.models.reference is not None and run.config.kl is not None and run.config.kl.sync_every is not None:
            models["reference.safetensors"] = run.models.reference.model
        state = (run.optimizer, run.scheduler, prompts.data, models, run.world)
        self.trained = Trained(policy.model, policy.tokenizer, policy.has_adapters, *state)

    @property
    def digests(self) -> dict[str, str]:
        """Those of the prompts, of held-out ones, and of pretraining text."""
        held_out, text = self.run.data.held_out, self.run.data.text
        rows = digest([example.token_ids, example.columns] for example in held_out)
        found = {**super().digests, "data.eval_path": f"{len(held_out)} rows, digest {rows[:12]}"}
        if text is not None:
            tokens = digest(part.tolist() for part in text.tokens.split(2**16))
            found["pretraining.path"] = f"{len(text.tokens)} tokens, digest {tokens[:12]}"
        return found

    @property
    def step(self) -> int:
        return self.run.step

    @step.setter
    def step(self, step: int) -> None:
        self.run.step = step

    @property
    def signals(self) -> Sequence[str]:
        return self.run.data.rollouts.completions.signals

    @signals.setter
    def signals(self, signals: Sequence[str]) -> None:
        self.run.data.rollouts.completions.signals = signals

    def state(self) -> dict[str, Any]:
        """The positions in what is drawn and read, and the coefficients that change."""
        run = self.run
        return {
            "skipped": run.skipped,
            "rollouts": run.data.rollouts.state(),
            "text": run.data.text and run.data.text.position,
            "kl": run.loss.kl and run.loss.kl.state(),
            "entropy": run.loss.entropy and run.loss.entropy.state(),
        }

    def begin(self, numbers: Mapping[str, Any] | None, tensors: Mapping[str, Tensor]) -> None:
        """Go on from a state. Raises UserError for that of an earlier version."""
        if numbers is None:
            return
        if "rollouts" not in numbers:
            earlier = "an earlier version of fastrl wrote it; go on with that one, or start a new run"
            raise UserError(f"{checkpoint_of(self.config.logging, self.step)}: {earlier}")
        data, loss = self.run.data, self.run.loss
        self.run.skipped = numbers["skipped"]
        data.rollouts.load(numbers["rollouts"])
        data.rollouts.completions.step = self.step
        if data.text is not None:
            data.text.position = numbers["text"]
        if loss.kl is not None:
            loss.kl.load(numbers["kl"])
        if loss.entropy is not None:
            loss.entropy.load(numbers["entropy"])

    def take_step(self) -> tuple[dict[str, float], list[dict[str, object]]]:
        """The function of this name."""
        with self._diverging():
            return take_step(self.run)

    def evaluates(self, step: int) -> bool:
        """If there is anything held out: before the first step, at intervals, and after the last one."""
        is_due = step == 0 or due(step, self.config.evaluation.every, step == self.steps)
        return is_due and bool(self.run.data.held_out)

    def evaluate(self) -> dict[str, float]:
        """The metrics of an evaluation, and its seconds."""
        numbers: dict[str, float] = {}
        with self._diverging(), self.world.working("time/evaluation", numbers):
            numbers |= evaluate(self.run) | self.run.functions.failures("evaluation")
        return over_ranks(self.world, numbers)

    def complete(self) -> None:
        """Nothing: the last checkpoint is the model."""

    @contextmanager
    def _diverging(self) -> Iterator[None]:
        """Say at which step the policy diverged, and what to change."""
        try:
            yield
        except Diverged as error:
            if self.step == 0:
                raise Diverged(f"{name_of(self.config.model)}: {error}, before any training") from error
            saved = any(checkpoint_of(self.config.logging, 0).parent.glob("step-*"))
            hint = "; an earlier checkpoint can start a new run, as model.path" if saved else ""
            raise Diverged(
                f"the policy diverged at step {self.step}: {error}; {calmer(self.config.optimizer)}{hint}"
            ) from error


def take_step(run: Run) -> tuple[dict[str, float], list[dict[str, object]]]:
    """Sample, update and adapt. Returns the step's metrics and some of its samples."""
    numbers: dict[str, float] = {}
    with timed("time/step", numbers):
        rollout, samples = collect(run, numbers)
        with run.world.working("time/update", numbers):
            numbers |= update(run, rollout)
        run.data.rollouts.completions.step = run.step
        kl_last = numbers.pop("kl_last", math.nan)
        if run.loss.kl is not None:
            kl = numbers.get("kl_reference", math.nan) if run.config.kl_in_reward else kl_last
            run.loss.kl.update(kl, int(rollout.mask.sum()), int(rollout.mask.any(1).sum()))
            numbers["kl_coef"] = run.loss.kl.coef.item()
        if run.loss.entropy is not None:
            run.loss.entropy.update(numbers.get("entropy", math.nan))
            numbers["entropy_coef"] = run.loss.entropy.coef.item()
        every = None if run.config.kl is None else run.config.kl.sync_every
        if run.models.reference is not None and every is not None and run.step % every == 0:
            run.models.reference.model.load_state_dict(run.models.policy.model.state_dict())
    if run.data.rollouts.prompts.dropped:
        numbers["dropped_prompts"] = run.data.rollouts.prompts.dropped
    numbers["memory/peak_gib"] = peak_memory(run.models.policy.device)
    numbers = over_ranks(run.world, numbers)
    numbers["time/loss_share"] = numbers["time/loss"] / numbers["time/step"]
    return numbers, samples
