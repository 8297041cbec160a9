"""All objects of a run, made from its config: models, objective, rewards, data, what changes by step; checkpoints."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fastrl import KL, CovarianceClip, Objective
from fastrl.base.errors import UserError
from fastrl.models.routing import has_routers
from fastrl.training.batches.distillation import Distillation
from fastrl.training.batches.loss_calls import loss_plans
from fastrl.training.batches.memory import Expected, with_micro_batches
from fastrl.training.batches.micro_batches import MicroBatches
from fastrl.training.config.objective import ranks_tokens, reads_sampler
from fastrl.training.config.train import Config
from fastrl.training.data.digest import digest
from fastrl.training.data.examples import Example, PromptSampler, Room, TextStream, load_examples
from fastrl.training.data.prompts import PromptFormat
from fastrl.training.data.streaming import StreamSampler
from fastrl.training.engines.choice import make_sampler
from fastrl.training.models.policy import Policy, load_policy, max_positions, reference_of
from fastrl.training.models.rotary import fix_frequencies
from fastrl.training.models.teacher import check_teacher, load_teacher
from fastrl.training.parallel.world import ALONE, World
from fastrl.training.rewards.model import make_rewards
from fastrl.training.rewards.scoring import RewardFunctions, Rewards
from fastrl.training.rl.controllers import AdaptiveKL, LearnedEntropy
from fastrl.training.rl.critic import Critic
from fastrl.training.rl.memory import loss_calls
from fastrl.training.rl.rollouts import Rollouts
from fastrl.training.run.checkpoint import Trained, read_checkpoint
from fastrl.training.run.optimizer import make_optimizer


@dataclass
class Run:
    """A training run's objects; `step` and `skipped` hold its progress."""

    config: Config
    policy: Policy
    objective: Objective
    rewards: Rewards
    functions: RewardFunctions
    rollouts: Rollouts
    held_out: list[Example]
    reference: Policy | None
    critic: Critic | None
    kl: AdaptiveKL | None
    entropy: LearnedEntropy | None
    text: TextStream | None  # for PPO-ptx
    teacher: Policy | None  # whose log-probabilities of the sampled tokens are advantages
    distillation: Distillation | None  # the divergence in the loss
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    micro_batches: MicroBatches
    memory: Expected  # at most
    policy_coef: float = 1.0  # the weight of the objective's loss
    step: int = 0  # the current rollout, or the last one
    skipped: int = 0  # updates skipped in a row so far

    @property
    def world(self) -> World:
        """The processes of the run."""
        return self.micro_batches.world

    @property
    def kl_in_reward(self) -> bool:
        """Whether a KL to the reference is subtracted from each token's reward."""
        return self.config.kl is not None and self.config.kl.place == "reward"

    @property
    def update_batches(self) -> MicroBatches:
        """The micro-batches of an update: those of any forward, or all of it if tokens are ranked."""
        return replace(self.micro_batches, limit=None) if ranks_tokens(self.objective) else self.micro_batches

    @property
    def reads_sampler(self) -> bool:
        """Whether the loss itself reads the sampler's log-probabilities."""
        return reads_sampler(self.objective)


def make_run(config: Config, world: World = ALONE) -> Run:
    """Load and check everything. Raises UserError for what is wrong in the config, dataset, model or reward."""
    device = world.device
    objective, kl, entropy = _objective(config, device)
    if config.distillation is not None:
        check_teacher(config.distillation, config.model)
    training = config.training
    if training.memory_budget is not None:  # before the model is loaded
        loss_plans(training, config.model, device, loss_calls(config, objective, training.micro_batch_tokens or 1))
    functions = RewardFunctions(config.reward, config.evaluation.metrics, world)
    rewards = make_rewards(config.reward, functions, device, config.model.trust_remote_code, world)
    policy = load_policy(config.model, device, packing=training.packing, world=world)
    teacher, distillation = _teacher(config, policy, world)
    limit = max_positions(policy.model, *([teacher.model] if teacher else []))
    room = Room.of(config.data, limit, config.rollout.max_new_tokens)
    if config.rollout.keep_routing and not has_routers(policy.model):
        raise UserError("rollout.keep_routing: the model is no mixture of experts whose routers are known")
    settings = config.optimizer
    prompts = PromptFormat.of(config.data, policy.tokenizer)
    sampler = _sampler(config, prompts, room, world)
    held_out_source = config.data.eval_source
    held_out = load_examples(held_out_source, prompts, room)[0] if held_out_source else []
    drawn = sampler.examples if isinstance(sampler, PromptSampler) else []
    functions.check(drawn)
    functions.check(held_out, evaluated=True)
    lacking = sorted(drawn[0].columns.keys() - held_out[0].columns.keys()) if drawn and held_out else []
    if lacking:  # a function that takes **columns does not say which it reads
        print(f"fastrl: warning: data.eval_path: no column {', '.join(lacking)}, which data.path has", file=sys.stderr)
    longest = _longest(config, sampler, held_out)
    pretraining = config.pretraining
    critic = None if config.critic is None else Critic(policy, config.critic.shared, world)
    reference = reference_of(policy, world) if config.needs_reference(objective) else None
    others = [model.model for model in (reference, teacher) if model] + ([critic] if critic else [])
    for model in [policy.model, *others]:
        fix_frequencies(model, max(longest or limit or 0, pretraining.length if pretraining else 0))
    template = config.data.chat_template_kwargs
    completions = make_sampler(policy, config.rollout, training.seed, longest, template, world)
    stream = None if pretraining is None else TextStream(pretraining.path, policy.tokenizer, pretraining.length)
    groups = [(list(policy.model.parameters()), settings.peak)]
    if critic is not None and config.critic is not None:
        groups.append((list(critic.parameters()), config.critic.lr or settings.peak))
    updates = training.steps * training.epochs * training.minibatches
    optimizer, scheduler = make_optimizer(groups, settings, updates)
    if world.size > 1 and ranks_tokens(objective):
        print(
            "fastrl: warning: the objective ranks the tokens of a whole minibatch, so each process computes all of it: "
            "several are no faster there",
            file=sys.stderr,
        )
    length = longest or 2 * config.rollout.max_new_tokens
    config, micro_batches, memory = with_micro_batches(
        config,
        [policy.model, *others],
        (config.minibatch * length, length, length),
        lambda tokens: loss_plans(training, config.model, device, loss_calls(config, objective, tokens), policy),
        text=(pretraining.batch_size * pretraining.length, pretraining.length) if pretraining else (0, 0),
        cut=not ranks_tokens(objective),
        world=world,
    )
    return Run(
        config,
        policy,
        objective,
        rewards,
        functions,
        Rollouts(sampler, completions, config.rollout, training.steps),
        held_out,
        reference,
        critic,
        kl,
        entropy,
        stream,
        teacher if distillation is None else None,
        distillation,
        optimizer,
        scheduler,
        micro_batches,
        memory,
        1.0 if config.distillation is None or distillation is None else config.distillation.policy_coef,
    )


def _teacher(config: Config, policy: Policy, world: World) -> tuple[Policy | None, Distillation | None]:
    """The teacher, and the divergence from it unless the form is sampled."""
    settings, training = config.distillation, config.training
    if settings is None:
        return None, None
    teacher = load_teacher(settings, config.model, policy, training.packing, world)
    if settings.form == "sampled":
        return teacher, None
    top_k = settings.top_k if settings.form == "top-k" else None
    if top_k is not None and top_k >= teacher.vocabulary:
        raise UserError(
            f"distillation.top_k: expected less than the vocabulary's {teacher.vocabulary}, got {top_k}; the form "
            "full takes them all"
        )
    temperature, budget = config.rollout.temperature, training.memory_budget
    return teacher, Distillation(teacher, settings, temperature, top_k, training.packing, budget)


def _sampler(config: Config, prompts: PromptFormat, room: Room, world: World) -> PromptSampler | StreamSampler:
    data, seed = config.data, config.training.seed
    if data.streaming:
        return StreamSampler(replace(data.source, streaming=True), prompts, room, seed, data.shuffle_buffer, world)
    examples, dropped = load_examples(data.source, prompts, room)
    if len(examples) < (wanted := config.rollout.prompts_per_step):
        print(
            f"fastrl: warning: data.path: a step draws {wanted} prompts of {len(examples)}, some of them several times,"
            " each time as a group of its own",
            file=sys.stderr,
        )
    return PromptSampler(examples, seed, dropped)


def digests(run: Run) -> dict[str, str]:
    """By config field: what all rows of a dataset are, which must be the same on all ranks."""
    held_out = ([example.token_ids, example.columns] for example in run.held_out)
    data = {**run.rollouts.prompts.data, "data.eval_path": (len(run.held_out), digest(held_out))}
    found = {field: f"{count} rows, digest {text[:12]}" for field, (count, text) in data.items()}
    if run.text is not None:
        text = digest(part.tolist() for part in run.text.tokens.split(2**16))
        found["pretraining.path"] = f"{len(run.text.tokens)} tokens, digest {text[:12]}"
    return found


def data_of(run: Run) -> str:
    """The run's data in words."""
    prompts, longest = run.rollouts.prompts, _longest(run.config, run.rollouts.prompts, run.held_out)
    count = f"{len(prompts.examples)} prompts" if isinstance(prompts, PromptSampler) else "streamed prompts"
    length = "" if longest is None else f", at most {longest} tokens with the completion"
    return f"{count}, {len(run.held_out)} held out{length}"


def _longest(config: Config, sampler: PromptSampler | StreamSampler, held_out: list[Example]) -> int | None:
    """The most tokens of a prompt and its completion, if that is known before all prompts are read."""
    if isinstance(sampler, PromptSampler):
        lengths = [len(example.token_ids) for example in [*sampler.examples, *held_out]]
        return max(lengths) + config.rollout.max_new_tokens
    limit = config.data.max_prompt_tokens
    return None if limit is None else limit + config.rollout.max_new_tokens


def _objective(config: Config, device: torch.device) -> tuple[Objective, AdaptiveKL | None, LearnedEntropy | None]:
    """The preset with the changes from the config's other tables, and the controllers of its coefficients."""
    objective = config.objective.build()
    if isinstance(objective.covariance, CovarianceClip):
        # Each update seeds it. On the CPU: a run may be resumed on another device.
        objective = objective.replace(covariance=replace(objective.covariance, generator=torch.Generator()))
    settings = config.kl
    if config.rollout_correction is not None:
        objective = objective.replace(rollout_correction=config.rollout_correction.build())
    kl, entropy = None, None
    if settings is not None:
        kl = AdaptiveKL(settings, device)
        term = None
        if settings.place == "loss" and (settings.coef or settings.adaptive):
            term = KL(settings.kind, kl.coef if settings.adaptive else settings.coef, settings.ratio)
        objective = objective.replace(kl=term)
    if config.entropy is not None:
        entropy = LearnedEntropy(config.entropy, float(objective.entropy_coef), device)
        objective = objective.replace(entropy_coef=entropy.coef)
    return objective, kl, entropy


# --- checkpoints; `fastrl.training.run.checkpoint` writes and checks the files -------------------------------------


def resumable(run: Run) -> dict[str, Any]:
    """What the next step depends on besides models and optimizer, as JSON values."""
    return {
        "skipped": run.skipped,
        "rollouts": run.rollouts.state(),
        "text": run.text and run.text.position,
        "kl": run.kl and run.kl.state(),
        "entropy": run.entropy and run.entropy.state(),
    }


def load_checkpoint(directory: Path, run: Run) -> None:
    """Restore a new run's objects from a checkpoint. Raises UserError if the dataset is a different one."""
    numbers, _ = read_checkpoint(directory, trained(run))
    if "rollouts" not in numbers:
        raise UserError(f"{directory}: an earlier version of fastrl wrote it; go on with that one, or start a new run")
    run.step, run.skipped = numbers["step"], numbers["skipped"]
    run.rollouts.load(numbers["rollouts"])
    run.rollouts.completions.step = run.step
    if run.text is not None:
        run.text.position = numbers["text"]
    for name, controller in (("kl", run.kl), ("entropy", run.entropy)):
        if controller is not None:
            controller.load(numbers[name])


def trained(run: Run) -> Trained:
    """What a checkpoint of the run holds."""
    policy = run.policy
    models: dict[str, torch.nn.Module] = {} if run.critic is None else {"critic.safetensors": run.critic}
    if run.reference is not None and run.config.kl is not None and run.config.kl.sync_every is not None:
        models["reference.safetensors"] = run.reference.model
    state = (run.optimizer, run.scheduler, run.rollouts.prompts.data, models)
    return Trained(policy.model, policy.tokenizer, policy.has_adapters, *state, run.world)
