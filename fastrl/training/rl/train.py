"""The loop of `fastrl train`: sample, reward and update, and evaluate and save at intervals."""

import math
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from fastrl.base.errors import UserError
from fastrl.report.contents import NESTED, STEP
from fastrl.training.config.train import Config
from fastrl.training.models.loading import name_of
from fastrl.training.models.saving import check_savable
from fastrl.training.parallel.seeds import seed_step
from fastrl.training.parallel.timing import peak_memory, timed
from fastrl.training.parallel.world import World
from fastrl.training.rl.evaluation import evaluate
from fastrl.training.rl.experience import collect
from fastrl.training.rl.run import Run, data_of, digests, load_checkpoint, make_run, resumable, trained
from fastrl.training.rl.update import update
from fastrl.training.run.banner import show_end, show_start
from fastrl.training.run.checkpoint import (
    SaveClock,
    as_started,
    checkpoint_of,
    due,
    saved_on_error,
    write_checkpoint,
    written,
)
from fastrl.training.run.facts import run_facts
from fastrl.training.run.log import RunLog
from fastrl.training.run.optimizer import Diverged, calmer
from fastrl.training.run.prepared import prepared, stopping

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

    Returns its summary: the last value of every metric, "steps", "seconds" (of this call), "resumed", the steps that
    were done before it, and "interrupted", the name of the signal that ended it early, or None. Raises UserError before
    the first step for anything in the config, dataset, model or reward that cannot be used, later for a reward or a
    loss that fails, and if another process writes to logging.output_dir.
    """
    logging, steps, started = config.logging, config.training.steps, time.perf_counter()
    prompts, completions = config.rollout.prompts_per_step, config.rollout.num_generations
    what = f"{config.name}: {steps} steps of {prompts} prompts x {completions} completions"
    with prepared(config, "train", "training.steps", what, resume) as (world, checkpoint), ExitStack() as stack:
        run = make_run(as_started(config, checkpoint, world), world)
        stack.enter_context(closing(run.functions))
        config = run.config
        if world.size > 1:
            world.check_alike(digests(run))
        model, tokenizer = name_of(config.model), run.policy.tokenizer
        world.first(lambda: check_savable(model, tokenizer, [run.policy.model], logging.output_dir))
        if checkpoint is not None:
            load_checkpoint(checkpoint, run)
        shown = [name for name in SHOWN if name != "kl" or run.objective.kl is not None]
        processes = str(world) if world.size > 1 else ""
        facts = run_facts(config, config.name, run.policy.model, run.policy.device, processes)
        show_start(config, facts, data_of(run), run.memory, run.policy.device, world.size)
        first, interrupted = run.step, None
        log: Any = None  # rank 0's
        if world.main:
            log = stack.enter_context(RunLog(config, logging, config.name, steps, shown, run.step, facts))
        signals = stack.enter_context(stopping(world))
        stack.enter_context(_diverging(run))
        run.rollouts.completions.signals = signals
        clock = SaveClock(logging)
        if checkpoint is None and run.held_out:
            numbers = _evaluated(run)
            world.first(lambda: log.write(0, numbers))
        while run.step < steps and not interrupted:
            before, run.step = resumable(run), run.step + 1
            step, last = run.step, run.step == steps
            with saved_on_error(partial(_save_earlier, run, log, before), world):
                numbers, samples = take_step(run)
            record = partial(RunLog.write, log, step, numbers, samples)
            with saved_on_error(partial(_save, run, log), world), written(record, world):
                if run.held_out and due(step, config.evaluation.every, last):
                    numbers |= _evaluated(run)
            interrupted, is_due = clock.decide(step, last, signals, world)
            if is_due:
                _save(run, log)
        seconds = time.perf_counter() - started
        ended = {"steps": run.step, "seconds": seconds, "resumed": first, "interrupted": interrupted}
        return world.first(lambda: log.summarize(ended))


@contextmanager
def _diverging(run: Run) -> Iterator[None]:
    """Say at which step the policy diverged, and what to change."""
    try:
        yield
    except Diverged as error:
        if run.step == 0:
            raise UserError(f"{name_of(run.config.model)}: {error}, before any training") from error
        saved = any(checkpoint_of(run.config.logging, 0).parent.glob("step-*"))
        hint = "; an earlier checkpoint can start a new run, as model.path" if saved else ""
        raise UserError(
            f"the policy diverged at step {run.step}: {error}; {calmer(run.config.optimizer)}{hint}"
        ) from error


def _evaluated(run: Run) -> dict[str, float]:
    """The metrics of an evaluation, and its seconds."""
    numbers: dict[str, float] = {}
    with run.world.working("time/evaluation", numbers):
        numbers |= evaluate(run) | run.functions.failures("evaluation")
    return over_ranks(run.world, numbers)


def _save(run: Run, log: Any, state: dict[str, Any] | None = None) -> Path:
    """Save the run after its current step, if it is not yet. Returns the checkpoint.

    `state` may be the one before a step that failed. Updates that this step had made are in the weights: resumed, the
    step is drawn anew from these.
    """
    checkpoint, world = checkpoint_of(run.config.logging, run.step), run.world
    if world.first(lambda: not checkpoint.exists()):
        world.first(lambda: log.sync())
        config = run.update_batches.noted(run.config)
        write_checkpoint(config, config.logging, trained(run), run.step, state or resumable(run))
    return checkpoint


def _save_earlier(run: Run, log: Any, before: dict[str, Any]) -> Path | None:
    """Save the steps before one that failed. Returns the checkpoint, or None if there is none."""
    run.step -= 1
    return _save(run, log, before) if run.step else None


def take_step(run: Run) -> tuple[dict[str, float], list[dict[str, object]]]:
    """Sample, update and adapt. Returns the step's metrics and some of its samples."""
    seed_step(run.config.training.seed, run.step)
    numbers: dict[str, float] = {}
    with timed("time/step", numbers):
        rollout, samples = collect(run, numbers)
        with run.world.working("time/update", numbers):
            numbers |= update(run, rollout)
        run.rollouts.completions.step = run.step
        kl_last = numbers.pop("kl_last", math.nan)
        if run.kl is not None:
            kl = numbers.get("kl_reference", math.nan) if run.kl_in_reward else kl_last
            run.kl.update(kl, int(rollout.mask.sum()), int(rollout.mask.any(1).sum()))
            numbers["kl_coef"] = run.kl.coef.item()
        if run.entropy is not None:
            run.entropy.update(numbers.get("entropy", math.nan))
            numbers["entropy_coef"] = run.entropy.coef.item()
        every = None if run.config.kl is None else run.config.kl.sync_every
        if run.reference is not None and every is not None and run.step % every == 0:
            run.reference.model.load_state_dict(run.policy.model.state_dict())
    if run.rollouts.prompts.dropped:
        numbers["dropped_prompts"] = run.rollouts.prompts.dropped
    numbers["memory/peak_gib"] = peak_memory(run.policy.device)
    numbers = over_ranks(run.world, numbers)
    numbers["time/loss_share"] = numbers["time/loss"] / numbers["time/step"]
    return numbers, samples


def over_ranks(world: World, numbers: dict[str, float]) -> dict[str, float]:
    """A step's metrics with the seconds and the memory of the rank that has most, and of several ranks their means.

    `time/imbalance` is the part of the step in which a rank waits for the slowest one, on average.
    """
    if world.size == 1:
        return numbers
    own = {name: value for name, value in numbers.items() if name.startswith(("time/", "memory/"))}
    ranks = world.gathered(own)
    names = dict.fromkeys(chain(*ranks))
    most = {name: max(rank.get(name, 0.0) for rank in ranks) for name in names}
    means = {f"mean_{name}": sum(rank.get(name, 0.0) for rank in ranks) / world.size for name in names}
    step, _ = most.get(STEP), means.pop(f"mean_{STEP}", None)
    numbers = numbers | most | means
    if step is not None:
        phases = [name for name in most if name.startswith("time/") and name not in (STEP, *NESTED)]
        waited = sum(most[name] - means[f"mean_{name}"] for name in phases)
        numbers["time/imbalance"] = waited / step
    return numbers
