"""The loop of ``fastrl train``: sample, reward, update, and now and then evaluate and save."""

import math
import os
import signal
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from transformers import set_seed
from transformers.utils import logging as transformers_logging

from .. import group_advantages
from .checkpoint import load_checkpoint, newest_checkpoint, save_checkpoint
from .command_line import parse_command_line
from .config import Config
from .data import Example, PromptSampler, load_examples
from .errors import UserError
from .metrics import RunLog, check_output
from .policy import Policy, frozen_copy, load_policy
from .report import plot_run
from .reward import RewardFunction, load_reward
from .rollout import Rollout, completion_texts, generate, rollout_logprobs
from .update import check_accumulation, make_optimization, update


def main(argv: list[str]) -> int:
    """``fastrl train CONFIG.toml [--resume] [--section.field value ...]``; UserError for what the user can mend.

    Returns the exit status: 0 for a run that is complete, and what a shell makes of the signal that ended it early.
    """
    config, resume = parse_command_line(argv)
    summary = train(config, resume=resume)
    scores = ", ".join(f"{name} {value:.4f}" for name, value in summary.items() if name.startswith("eval/"))
    print(f"{config.objective.name}: {summary['steps']} steps in {summary['seconds']:.0f} s. {scores}")
    print(f"metrics, curves and checkpoints: {config.logging.output_dir}")
    if summary["interrupted"] is None:
        return 0
    print(f"interrupted by {summary['interrupted']}; the same command with --resume goes on from here")
    return 128 + signal.Signals[summary["interrupted"]]


def train(config: Config, *, resume: bool = False) -> dict[str, Any]:
    """Run a whole training run, or with ``resume`` what is left of the one in logging.output_dir.

    Returns its summary: the last value of every metric, "steps", "seconds" (of this call), and "interrupted", the name
    of the signal that ended it early, or None. Raises UserError, before the first step, for anything in the config,
    dataset, model or reward that cannot be used, and later for a reward or a loss that goes wrong.
    """
    started = time.perf_counter()
    set_seed(config.training.seed)
    transformers_logging.disable_progress_bar()  # ours is the one to look at
    checkpoint = newest_checkpoint(config) if resume else None
    if checkpoint is None:
        check_output(config.logging.output_dir, config.logging.overwrite)
    objective = config.objective.build()
    check_accumulation(objective, config)
    reward = load_reward(config.reward.function)
    scores = {"reward": reward}
    scores |= {function.name: function for function in map(load_reward, config.evaluation.metrics)}
    policy = load_policy(config.model, _device(config.training.device))
    needs_reference = objective.kl is not None and objective.kl.needs_reference
    reference = frozen_copy(policy) if needs_reference else None
    room = None if policy.max_positions is None else policy.max_positions - config.rollout.max_new_tokens
    sampler = PromptSampler(load_examples(config.data.path, policy.tokenizer, room), config.training.seed)
    held_out = load_examples(config.data.eval_path, policy.tokenizer, room) if config.data.eval_path else []
    state = make_optimization(policy, config)
    if checkpoint is not None:
        load_checkpoint(checkpoint, policy, state, sampler)

    interrupted = None
    with _threads(config.training.threads), RunLog(config, state.step) as log, _stop_signals() as signals:
        for step in range(state.step + 1, config.training.steps + 1):
            state.step, last = step, step == config.training.steps
            numbers: dict[str, float] = {}
            with _timed("time/step", numbers):
                rollout = sample(policy, reference, reward, sampler, config, numbers)
                with _timed("time/update", numbers):
                    numbers |= update(policy, objective, state, rollout, config)
            if held_out and _due(step, config.evaluation.every, last):
                with _timed("time/evaluation", numbers):
                    numbers |= evaluate(policy, held_out, scores, config)
            log.write(step, numbers)
            interrupted = None if last or not signals else signals[0]
            if interrupted or _due(step, config.logging.checkpoint_every, last):
                save_checkpoint(policy, state, sampler, config)
                plot_run(log.path, log.directory / "curves.png")
            if interrupted:
                break
        seconds = time.perf_counter() - started
        return log.summarize({"steps": state.step, "seconds": seconds, "interrupted": interrupted})


def sample(
    policy: Policy,
    reference: Policy | None,
    reward: RewardFunction,
    sampler: PromptSampler,
    config: Config,
    numbers: dict[str, float],
) -> Rollout:
    """One step's rollout with advantages, and with the old and reference log-probabilities the update needs.

    Completions whose reward is None are left out. Adds what there is to report to ``numbers``.
    """
    settings, training = config.rollout, config.training
    groups = sampler.next(settings.prompts_per_step)
    examples = [example for example in groups for _ in range(settings.num_generations)]
    with _timed("time/generate", numbers):
        rollout = generate(policy, examples, settings)
    with _timed("time/reward", numbers):
        values = reward(examples, completion_texts(policy, rollout))
    numbers |= describe(rollout, values, policy)

    kept = [row for row, value in enumerate(values) if value is not None]
    rewards = torch.tensor([values[row] for row in kept], dtype=torch.float32, device=policy.device)
    rows = torch.tensor(kept, dtype=torch.long, device=policy.device)
    rollout = rollout.select(rows)
    advantages = group_advantages(rewards, rows // settings.num_generations, scale=config.advantages.scale)
    with _timed("time/logprobs", numbers):
        # With a single update a rollout the policy is still the one that sampled, and the losses know what that means.
        on_policy = training.epochs * training.minibatches == 1
        old, ref = (
            rollout_logprobs(model, rollout, settings.temperature, training.micro_batch_size) if model else None
            for model in (None if on_policy else policy, reference)
        )
    return replace(rollout, advantages=advantages, old_logprobs=old, ref_logprobs=ref)


def describe(rollout: Rollout, rewards: list[float | None], policy: Policy) -> dict[str, float]:
    """A rollout's own numbers: rewards (without the Nones), lengths in tokens, the share that ended without EOS."""
    given = [value for value in rewards if value is not None]
    lengths = rollout.mask.sum(1)
    last = rollout.targets.gather(1, lengths[:, None] - 1)[:, 0]
    ended = torch.isin(last, torch.tensor(policy.eos_token_ids, device=last.device))
    return {
        "reward": statistics.fmean(given) if given else math.nan,
        "reward_std": statistics.pstdev(given) if given else math.nan,
        "without_reward": 1 - len(given) / len(rewards),
        "length": lengths.double().mean().item(),
        "truncated": 1 - ended.double().mean().item(),
    }


def evaluate(
    policy: Policy, examples: list[Example], functions: dict[str, RewardFunction], config: Config
) -> dict[str, float]:
    """Greedy decoding of every example: the mean of each function as ``eval/<name>`` (over what is not None)."""
    completions = completion_texts(policy, generate(policy, examples, config.rollout, greedy=True))
    numbers = {}
    for name, function in functions.items():
        values = [value for value in function(examples, completions) if value is not None]
        numbers[f"eval/{name}"] = statistics.fmean(values) if values else math.nan
    return numbers


def _due(step: int, every: int | None, last: bool) -> bool:
    return last or (every is not None and step % every == 0)


@contextmanager
def _timed(name: str, numbers: dict[str, float]) -> Iterator[None]:
    """Record the seconds that the block takes."""
    started = time.perf_counter()
    yield
    numbers[name] = time.perf_counter() - started


@contextmanager
def _stop_signals() -> Iterator[list[str]]:
    """A list in which SIGTERM and Ctrl-C are noted by name, for the loop to stop in time; a second one ends at once."""
    noted: list[str] = []

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(number: int, _: object) -> None:
        restore()
        noted.append(signal.Signals(number).name)
        # Not print: a handler may run in the middle of another one.
        os.write(2, f"\nfastrl: {noted[0]}: finishing the step, then saving; once more to end at once\n".encode())

    # Python allows handlers in the main thread alone; and a shell's background job is told to ignore Ctrl-C.
    numbers = (signal.SIGTERM, signal.SIGINT) if threading.current_thread() is threading.main_thread() else ()
    before = {n: signal.signal(n, note) for n in numbers if signal.getsignal(n) is not signal.SIG_IGN}
    try:
        yield noted
    finally:
        restore()


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Torch's CPU threads for the block, its own choice for None."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:  # AssertionError: a torch built without CUDA
        raise UserError(f"training.device: cannot use {name!r}: {str(error).splitlines()[0]}") from error
