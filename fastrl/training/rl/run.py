"""All objects of a run, made from its config: models, loss, rewards, data, optimizer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from fastrl import KL, CovarianceClip, Objective
from fastrl.base.errors import UserError
from fastrl.base.terminal import say
from fastrl.models.routing import has_routers
from fastrl.training.batches.distillation import Distillation
from fastrl.training.batches.loss_calls import loss_plans
from fastrl.training.batches.memory import Expected, with_micro_batches
from fastrl.training.batches.micro_batches import MicroBatches
from fastrl.training.config.objective import ranks_tokens
from fastrl.training.config.train import Config
from fastrl.training.data.examples import Example, PromptSampler, Room, TextStream, load_examples
from fastrl.training.data.prompts import PromptFormat
from fastrl.training.data.streaming import StreamSampler
from fastrl.training.engines.choice import make_sampler
from fastrl.training.models.decoder import max_positions
from fastrl.training.models.policy import Policy, load_policy, reference_of
from fastrl.training.models.rotary import fix_frequencies
from fastrl.training.models.teacher import check_teacher, load_teacher
from fastrl.training.parallel.world import ALONE, World
from fastrl.training.rewards.model import make_rewards
from fastrl.training.rewards.scoring import RewardFunctions, Rewards
from fastrl.training.rl.controllers import AdaptiveKL, LearnedEntropy
from fastrl.training.rl.critic import Critic
from fastrl.training.rl.forecast import loss_calls
from fastrl.training.rl.rollouts import Rollouts
from fastrl.training.run.optimizer import make_optimizer


@dataclass
class Models:
    """The models of a run."""

    policy: Policy
    reference: Policy | None = None  # of a KL term
    critic: Critic | None = None
    teacher: Policy | None = None

    @property
    def others(self) -> list[torch.nn.Module]:
        """All but the policy's."""
        policies: list[torch.nn.Module] = [model.model for model in (self.reference, self.teacher) if model]
        return policies + ([self.critic] if self.critic else [])


@dataclass
class Loss:
    """What the policy learns from."""

    objective: Objective
    kl: AdaptiveKL | None = None  # the coefficient of the objective's KL, or of that in the reward
    entropy: LearnedEntropy | None = None  # the coefficient of its entropy
    distillation: Distillation | None = None  # the divergence from the teacher, beside or in place of the objective
    coef: float = 1.0  # the weight of the objective


@dataclass
class Data:
    """What is drawn and read."""

    rollouts: Rollouts
    held_out: list[Example]
    text: TextStream | None = None  # for PPO-ptx
    longest: int | None = None  # tokens of a prompt with its completion, if it is known before all are read


@dataclass
class Run:
    """A training run's objects; `step` and `skipped` hold its progress."""

    config: Config
    models: Models
    loss: Loss
    data: Data
    rewards: Rewards
    functions: RewardFunctions
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    micro_batches: MicroBatches
    memory: Expected  # at most
    step: int = 0  # the current rollout, or the last one
    skipped: int = 0  # updates skipped in a row so far

    @property
    def world(self) -> World:
        """The processes of the run."""
        return self.micro_batches.world

    @property
    def teacher(self) -> Policy | None:
        """The teacher whose log-probabilities of the sampled tokens are advantages."""
        return self.models.teacher if self.loss.distillation is None else None

    @property
    def update_batches(self) -> MicroBatches:
        """The micro-batches of an update: those of any forward, or all of it if tokens are ranked."""
        return replace(self.micro_batches, limit=None) if ranks_tokens(self.loss.objective) else self.micro_batches


def make_run(config: Config, world: World = ALONE) -> Run:
    """Load and check everything. Raises UserError for what is wrong in the config, dataset, model or reward."""
    training, settings, device = config.training, config.optimizer, world.device
    loss = _loss(config, device)
    if config.distillation is not None:
        check_teacher(config.distillation, config.model)
    if training.memory_budget is not None:  # before the model is loaded
        calls = loss_calls(config, loss.objective, training.micro_batch_tokens or 1)
        loss_plans(training, config.model, device, calls)
    functions = RewardFunctions(config.reward, config.evaluation.metrics, world)
    rewards = make_rewards(config.reward, functions, device, config.model.trust_remote_code, world)
    policy = load_policy(config.model, device, packing=training.packing, world=world)
    if training.batch_invariant:
        policy = replace(policy, batch_invariant=True)
        say(
            "batch-invariant head; together the decoder gives two sequences "
            f"{'the same bits as' if policy.is_batch_invariant(training.packing) else 'other bits than'} alone"
        )
    models = Models(policy)
    if config.distillation is not None:
        models.teacher = load_teacher(config.distillation, config.model, policy, training.packing, world)
        _distil(config, loss, models.teacher)
    if config.rollout.keep_routing and not has_routers(policy.model):
        raise UserError("rollout.keep_routing: the model is no mixture of experts whose routers are known")
    limit = max_positions(*(model.model for model in (policy, models.teacher) if model))
    prompts, held_out = _prompts(config, policy, limit, functions, world)
    text = None
    if config.pretraining is not None:
        text = TextStream(config.pretraining.path, policy.tokenizer, config.pretraining.length)
    if config.critic is not None:
        models.critic = Critic(policy, config.critic.shared, world)
    if config.needs_reference(loss.objective):
        models.reference = reference_of(policy, world)
    longest = _longest(config, prompts, held_out)
    for model in [policy.model, *models.others]:
        fix_frequencies(model, max(longest or limit or 0, text.length if text else 0))
    template = config.data.chat_template_kwargs
    completions = make_sampler(policy, config.rollout, training.seed, longest, template, world)
    data = Data(Rollouts(prompts, completions, config.rollout, training.steps), held_out, text, longest)
    groups = [(list(policy.model.parameters()), settings.peak)]
    if models.critic is not None and config.critic is not None:
        groups.append((list(models.critic.parameters()), config.critic.lr or settings.peak))
    updates = training.steps * training.epochs * training.minibatches
    optimizer, scheduler = make_optimizer(groups, settings, updates)
    if world.size > 1 and ranks_tokens(loss.objective):
        say(
            "warning: the objective ranks the tokens of a whole minibatch, so each process computes all of it: several "
            "are no faster there"
        )
    length = longest or 2 * config.rollout.max_new_tokens
    config, micro_batches, memory = with_micro_batches(
        config,
        [policy.model, *models.others],
        (config.minibatch * length, length, length),
        lambda tokens: loss_plans(training, config.model, device, loss_calls(config, loss.objective, tokens), policy),
        text=(config.pretraining.batch_size * text.length, text.length) if config.pretraining and text else (0, 0),
        cut=not ranks_tokens(loss.objective),
        world=world,
    )
    return Run(config, models, loss, data, rewards, functions, optimizer, scheduler, micro_batches, memory)


def _loss(config: Config, device: torch.device) -> Loss:
    """The preset with the changes from the config's other tables, and the controllers of its coefficients."""
    objective, settings = config.objective.build(), config.kl
    if isinstance(objective.covariance, CovarianceClip):
        # Each update seeds it. On the CPU: a run may be resumed on another device.
        objective = objective.replace(covariance=replace(objective.covariance, generator=torch.Generator()))
    if config.rollout_correction is not None:
        objective = objective.replace(rollout_correction=config.rollout_correction.build())
    kl, entropy = None, None
    if settings is not None:
        kl, term = AdaptiveKL(settings, device), None
        if settings.place == "loss" and (settings.coef or settings.adaptive):
            term = KL(settings.kind, kl.coef if settings.adaptive else settings.coef, settings.ratio)
        objective = objective.replace(kl=term)
    if config.entropy is not None:
        entropy = LearnedEntropy(config.entropy, float(objective.entropy_coef), device)
        objective = objective.replace(entropy_coef=entropy.coef)
    return Loss(objective, kl, entropy)


def _distil(config: Config, loss: Loss, teacher: Policy) -> None:
    """Add the divergence from the teacher to the loss, unless its log-probabilities are advantages."""
    settings = config.distillation
    if settings is None or settings.form == "sampled":
        return
    top_k = settings.top_k if settings.form == "top-k" else None
    if top_k is not None and top_k >= teacher.vocabulary:
        raise UserError(
            f"distillation.top_k: expected less than the vocabulary's {teacher.vocabulary}, got {top_k}; the form "
            "full takes them all"
        )
    training, temperature = config.training, config.rollout.temperature
    loss.distillation = Distillation(teacher, settings, temperature, top_k, training.packing, training.memory_budget)
    loss.coef = settings.policy_coef


def _prompts(
    config: Config, policy: Policy, limit: int | None, functions: RewardFunctions, world: World
) -> tuple[PromptSampler | StreamSampler, list[Example]]:
    """The prompts of the run, and those held out, which have what the reward functions take.

    `limit` is the models' context.
    """
    data, seed = config.data, config.training.seed
    form, room = PromptFormat.of(data, policy.tokenizer), Room.of(data, limit, config.rollout.max_new_tokens)
    sampler: PromptSampler | StreamSampler
    drawn: list[Example] = []
    if data.streaming:
        source = replace(data.source, streaming=True)
        sampler = StreamSampler(source, form, room, seed, data.shuffle_buffer, world)
    else:
        drawn, dropped = load_examples(data.source, form, room)
        sampler = PromptSampler(drawn, seed, dropped)
        if len(drawn) < (wanted := config.rollout.prompts_per_step):
            say(
                f"warning: data.path: a step draws {wanted} prompts of {len(drawn)}, some of them several times, each "
                "time as a group of its own"
            )
    held_out = load_examples(data.eval_source, form, room)[0] if data.eval_source else []
    functions.check(drawn)
    functions.check(held_out, evaluated=True)
    lacking = sorted(drawn[0].columns.keys() - held_out[0].columns.keys()) if drawn and held_out else []
    if lacking:  # a function that takes **columns does not say which it reads
        say(f"warning: data.eval_path: no column {', '.join(lacking)}, which data.path has")
    return sampler, held_out


def _longest(config: Config, prompts: PromptSampler | StreamSampler, held_out: Sequence[Example]) -> int | None:
    """The most tokens of a prompt and its completion, if that is known before all prompts are read."""
    longest = config.data.max_prompt_tokens
    if isinstance(prompts, PromptSampler):
        longest = max(len(example.token_ids) for example in [*prompts.examples, *held_out])
    return None if longest is None else longest + config.rollout.max_new_tokens
