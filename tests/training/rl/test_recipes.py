"""Every file of examples/recipes runs, and its loss, gradient and advantages are the formula of its paper.

The right-hand sides are written by hand: dense float64 log-probabilities, loops over completions, the papers' numbers.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from digit_models import add_noise, narrowed
from places import EXAMPLES
from random_calls import exact_advantages as naive
from rollouts import dense, dense_log_p, dense_values, naive_gae
from teachers import exact_divergence, save_teacher, with_tail
from transformers import set_seed

import fastrl.training.rl.train as module
from fastrl import CovarianceClip
from fastrl.training.batches.rollout import Rollout
from fastrl.training.config.settings import load_settings
from fastrl.training.config.train import Config
from fastrl.training.parallel.timing import Stopwatch
from fastrl.training.rl.run import Run, make_run
from fastrl.training.rl.update import accumulate_gradients, pretrain

RECIPES = EXAMPLES / "recipes"
CHARACTERS = ["", "=", *"0123456789"]  # the example's vocabulary; 0 is EOS

# --- what the papers write --------------------------------------------------------------------------------------------
# Of a batch x: logp, old, ref, sampler (the rollout engine's), A, H, m (1 where a token counts), all (B, T); T = tokens
# of each response. A recipe's loss is aggregate(policy term + beta KL - alpha H), plus a critic's and a text's.


def token_mean(x, values):
    return (x.m * values).sum() / x.m.sum()


def mean_of_means(x, values):
    return ((x.m * values).sum(1) / x.T.clamp(min=1)).mean()


def mean_of_sums(x, values):
    return (x.m * values).sum(1).mean()


def ratio(x):
    return (x.logp - x.old).exp()


def sequence_sum(x, values):
    return (x.m * values).sum(1, keepdim=True).expand_as(values)


def sequence_mean(x, values):
    return sequence_sum(x, values) / x.T.clamp(min=1)[:, None]


def clipped(r, x, low, high):
    return -torch.minimum(r * x.A, r.clamp(1 - low, 1 + high) * x.A)


def reinforce(x):
    return -x.A * x.logp


def clip(low, high):
    return lambda x: clipped(ratio(x), x, low, high)


def sequence_clip(x):
    return clipped(sequence_mean(x, x.logp - x.old).exp(), x, 3e-4, 4e-4)


def token_of_sequence_clip(x):
    s = sequence_mean(x, x.logp - x.old).exp().detach()
    return clipped(s * (x.logp - x.logp.detach()).exp(), x, 3e-4, 4e-4)


def soft(x):
    tau = torch.where(x.A > 0, 1.0, 1.05)
    return -4 / tau * torch.sigmoid(tau * (ratio(x) - 1)) * x.A


def geometric_mean(x):
    d = x.logp - x.old
    d = torch.where(x.A > 0, d.clamp(max=0.4), torch.where(x.A < 0, d.clamp(min=-0.4), d))
    return -x.A * sequence_mean(x, d).exp()


def gamma_weight(x):
    w = sequence_sum(x, x.logp - x.sampler).detach().exp()  # prod pi / pi_old * pi_old / pi_sampler
    phi = torch.where(x.A >= 0, math.exp(3) * w**2 * (-3 * w).exp(), math.exp(2) * w**3 * (-2 * w).exp())
    return -phi * x.A * x.logp


def future_weighted(x):
    log = (x.logp - x.old).detach()
    future, last = torch.zeros_like(log), torch.zeros_like(log[:, 0])
    for t in reversed(range(log.shape[1])):  # completions are masked at their ends alone
        last = future[:, t] = x.m[:, t] * log[:, t] * (log[:, t].exp() <= 10) + 0.5 ** (1 / 32) * last
    weight = future.exp().clamp(1.0, 1.2)
    weight = torch.where((x.A < 0) & (log.exp() > 10), 1.0, weight)
    loss = clipped(ratio(x), x, 0.2, 0.28)
    return weight * torch.where(x.A < 0, torch.minimum(loss, -10 * x.A), loss)


def products(x):
    """Of advantage and log-probability, around their means."""
    a, b = (v - token_mean(x, v) for v in (x.A, x.logp.detach()))
    return torch.where(x.m > 0, a * b, -math.inf)


def one_in_a_hundred(x):
    return max(int(0.01 * x.m.sum()), 1)


def without_the_drawn(x):
    loss, product = clip(0.2, 0.2)(x), products(x)
    stopped = torch.where(x.A > 0, ratio(x) > 1.2, (x.A < 0) & (ratio(x) < 0.8))
    free = (product > 0.1) & (product < 5) & ~stopped
    number = min(one_in_a_hundred(x), int(free.sum()))
    drawn = torch.where(free, x.draws, math.inf).flatten().argsort()[:number]
    assert number, "no token is between the bounds"
    return loss.flatten().index_fill(0, drawn, 0.0).view_as(loss)


def held_back(x):
    most = torch.zeros_like(x.m).flatten().index_fill(0, products(x).flatten().topk(one_in_a_hundred(x)).indices, 1.0)
    return -ratio(x) * x.A + most.view_as(x.m) * (x.logp - x.old).abs()


def without(dropped, x, cap=20.0):
    weight = (x.logp - x.sampler).exp().detach().clamp(max=cap)
    return -torch.where(dropped, 0.0, weight) * x.A * x.logp


def divergence_tv(x):
    change = (x.logp.exp() - x.sampler.exp()).detach()
    return without(torch.where(x.A > 0, change > 0.15, change < -0.15), x)


def divergence_kl(x):
    p, q = x.logp.exp().detach(), x.sampler.exp()
    kl = q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log()
    return without((kl > 0.05) & torch.where(x.A > 0, p > q, p < q), x)


def masked_ratio(x):
    r = (x.logp - x.sampler).exp()
    return without((r < 0.5) | (r > 5), x)


def tapered(x):
    r = sequence_sum(x, x.logp - x.sampler).exp().detach()
    return -torch.where(x.A > 0, 1.0, r.clamp(0, 1)) * x.A * x.logp


def masked_clip(x):
    drift = sequence_mean(x, x.sampler - x.logp.detach())
    return torch.where((x.A < 0) & (drift > 0.5), 0.0, clipped(ratio(x), x, 0.2, 0.2))


def k3(x):
    return (x.ref - x.logp).exp() - (x.ref - x.logp) - 1


def forward_on_four(x):
    ids = x.log_q.topk(4).indices
    return exact_divergence(with_tail(x.log_p, ids), with_tail(x.log_q, ids), "forward_kl")


# --- rewards and advantages, a completion at a time -------------------------------------------------------------------


def fraction(text, answer):
    right = sum(a == b for a, b in zip(text, answer, strict=False)) / max(len(text), len(answer))
    return right + (right == 1)


def on_all_tokens(values, x):
    return torch.tensor(values, dtype=torch.float64)[:, None].expand_as(x.m)


def group(x, scale="group"):
    return on_all_tokens(naive.normalised(x.rewards.tolist(), x.groups, scale, 0, 1e-6)[0], x)


def centred(x):
    return group(x, "none")


def leave_one_out(x):
    """Of the sequence's reward less beta k1, which is the KL in the reward."""
    scores = x.rewards - x.reward_beta * ((x.old - x.ref) * x.m).sum(1)
    return on_all_tokens(naive.leave_one_out(scores.tolist(), x.groups), x)


def maximum_likelihood(x):
    return on_all_tokens(naive.maximum_likelihood(x.rewards.tolist(), x.groups)[0], x)


def length_weighted(x):
    return on_all_tokens(naive.length_weighted(x.rewards.tolist(), x.groups, x.T.tolist()), x)


def best_of_all(x):
    return on_all_tokens(naive.best_of(x.rewards.tolist(), x.groups, None), x)


def decoupled(x):
    """The task's reward and, for a half, the number of characters."""
    parts = [[fraction(*pair) for pair in zip(x.texts, x.answers, strict=True)], [-len(text) for text in x.texts]]
    return on_all_tokens(naive.decoupled(parts, x.groups, [1.0, 0.5], "group", 0, 1e-6)[0], x)


def token_baseline(x):
    """The reward is on the last token; the squares of all probabilities are summed by hand."""
    last = x.rewards[:, None] * x.m * (x.m.cumsum(1) == x.T[:, None])
    squares = x.old_log_p.exp().square().sum(-1).log()
    columns = (column.tolist() for column in (last, x.old, squares, x.m > 0))
    return torch.tensor(naive.token_baseline(*columns, x.groups, False), dtype=torch.float64)


def gae(x, values, lam):
    """Advantages and returns without a discount, with -beta k1 on each token where the KL is in the reward."""
    return naive_gae(x.rewards, x.old, x.ref, values, x.m, x.reward_beta, "k1", 1.0, lam)


def whitened(advantages, x):
    counted = advantages[x.m.bool()]
    return (advantages - counted.mean()) / counted.std(correction=0)


def rewards_to_go(x):
    return whitened(gae(x, torch.zeros_like(x.m), 1.0)[0], x)


def generalised(x):
    return whitened(gae(x, x.old_values, 0.95)[0], x)


def adaptive(x):
    """VAPO's lambda of each response: 1 - 1 / (2 T), with two tokens of horizon a token here."""
    lams = [max(0.0, 1 - 1 / (2 * T)) if T else 0.0 for T in x.T.tolist()]
    rows = [gae(x, x.old_values, lam)[0][i] for i, lam in enumerate(lams)]
    return whitened(torch.stack(rows), x)


def process(x):
    """One step per digit, which is one token here; normalised over all steps of the prompt."""
    pairs = zip(x.texts, x.answers, strict=True)
    steps = [[float(t < len(a) and a[t] == c) for t, c in enumerate(text)] for text, a in pairs]
    ends, lengths = [range(len(row)) for row in steps], [len(row) for row in x.m]
    return torch.tensor(naive.process(steps, ends, x.groups, lengths, "group", 0, 1e-6)[0], dtype=torch.float64)


# --- the table --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Formula:
    policy: Any
    aggregate: Any
    advantages: Any
    kl: Any = None
    beta: float | None = None  # in the loss, or without a kl in the reward; None: the run's adaptive one
    reward: Any = fraction
    critic_lam: float = 0.95  # of the critic's targets
    teacher: Any = None  # a token's divergence; the loss is its mean over the tokens, in place of the policy's


PPO = Formula(
    clip(0.2, 0.2), token_mean, generalised, reward=lambda text, answer: fraction(text, answer) - 0.01 * len(text)
)
GSPO = Formula(sequence_clip, mean_of_means, group)
V32 = Formula(masked_clip, mean_of_means, centred, lambda x: ratio(x) * k3(x), 0.001)
FORMULAS = {
    "ppo": PPO,
    "ppo_shared_critic": PPO,
    "ppo_ptx": PPO,
    "ppo_kl": replace(PPO, policy=lambda x: -ratio(x) * x.A, kl=lambda x: ratio(x) - 1 - (x.logp - x.old)),
    "grpo": Formula(clip(0.2, 0.2), mean_of_means, group, k3, 0.04),
    "grpo_process": Formula(clip(0.2, 0.2), mean_of_means, process, k3, 0.04),
    "grpo_sequence_ratio": Formula(
        lambda x: clipped(sequence_sum(x, x.logp - x.old).exp(), x, 0.2, 0.2), mean_of_means, group, k3, 0.001
    ),
    "sparse": Formula(clip(0.2, 0.2), mean_of_means, group, reward=lambda text, answer: float(text == answer)),
    "dr_grpo": Formula(clip(0.2, 0.2), lambda x, values: mean_of_sums(x, values) / 4, centred),
    "gpg": Formula(reinforce, token_mean, centred),
    "rloo": Formula(reinforce, mean_of_sums, leave_one_out, beta=0.03),
    "reinforce_pp": Formula(clip(0.2, 0.2), token_mean, rewards_to_go, beta=0.01),
    "dapo": Formula(clip(0.2, 0.28), token_mean, group),
    "fipo": Formula(future_weighted, token_mean, group),
    "clip_cov": Formula(without_the_drawn, token_mean, group),
    "kl_cov": Formula(held_back, token_mean, group),
    "gspo": GSPO,
    "gspo_token": replace(GSPO, policy=token_of_sequence_clip),
    "luspo": replace(GSPO, aggregate=mean_of_sums),
    "sapo": Formula(soft, mean_of_means, group),
    "cispo": Formula(lambda x: -ratio(x).detach().clamp(max=5.0) * x.A * x.logp, token_mean, group),
    "gmpo": Formula(geometric_mean, mean_of_means, group),
    "vespo": Formula(gamma_weight, token_mean, group),
    "deepseek_v32": V32,
    "deepseek_v32_moe": V32,
    "dppo_tv": Formula(divergence_tv, lambda x, values: mean_of_sums(x, values) / 4, centred),
    "dppo_kl": Formula(divergence_kl, lambda x, values: mean_of_sums(x, values) / 4, centred),
    "icepop": Formula(masked_ratio, token_mean, centred),
    "topr": Formula(tapered, mean_of_sums, centred),
    "dro": Formula(reinforce, token_mean, centred, lambda x: (x.logp - x.old) ** 2 / 2, 0.1),
    "on_policy_distillation": Formula(
        None, None, None, teacher=lambda x: exact_divergence(x.log_p, x.log_q, "reverse_kl")
    ),
    "on_policy_distillation_top_k": Formula(None, None, None, teacher=forward_on_four),
    "on_policy_distillation_sampled": Formula(clip(0.2, 0.2), token_mean, lambda x: x.taught - x.old),
    "max_entropy": Formula(reinforce, token_mean, centred),
    "tis": Formula(
        lambda x: (x.old - x.sampler).exp().clamp(max=2.0) * clipped(ratio(x), x, 0.2, 0.28), token_mean, group
    ),
}
FORMULAS |= {
    "maxrl": Formula(reinforce, token_mean, maximum_likelihood),
    "opo": Formula(reinforce, token_mean, length_weighted),
    "pass_at_k": Formula(reinforce, token_mean, best_of_all),
    "gdpo": Formula(
        clip(0.2, 0.2), mean_of_means, decoupled, reward=lambda text, answer: fraction(text, answer) - 0.5 * len(text)
    ),
    "vapo": Formula(clip(0.2, 0.28), token_mean, adaptive, beta=0.0, critic_lam=1.0),
    "optimal_token_baseline": Formula(clip(0.2, 0.2), token_mean, token_baseline),
}
NAMES = sorted(path.stem for path in RECIPES.glob("*.toml"))


def test_every_recipe_has_its_formula():
    assert sorted(FORMULAS) == NAMES


# --- the run, and what its numbers should be --------------------------------------------------------------------------


@pytest.fixture
def recipe(tmp_path):
    """A recipe's config, shrunk: two steps of two updates, whose micro-batches do not divide the batch."""

    def recipe(name: str) -> Config:
        plain = load_settings(Config, RECIPES / f"{name}.toml")
        overrides: dict[str, dict[str, Any]] = {
            "model": {"config": str(narrowed(tmp_path, plain.model.config))},
            "data": {"eval_path": None},
            "evaluation": {"every": None, "metrics": []},
            "rollout": {"prompts_per_step": 6, "num_generations": 4},
            "training": {"steps": 2, "minibatches": 2, "epochs": 1, "micro_batch_tokens": 70, "device": "cpu"},
            "logging": {"output_dir": str(tmp_path / "run"), "tensorboard": False, "overwrite": False},
        }
        if plain.distillation is not None:
            overrides["distillation"] = {"teacher": save_teacher(tmp_path / "teacher")}
        if name in ("clip_cov", "kl_cov"):  # a choice among all tokens of an update
            del overrides["training"]["micro_batch_tokens"]
        if name == "sparse":  # a random policy is never exactly right, unless it is right to say nothing
            (tmp_path / "silence.jsonl").write_text('{"prompt": "12=", "answer": ""}\n{"prompt": "3=", "answer": ""}\n')
            overrides["data"]["path"] = str(tmp_path / "silence.jsonl")
        return load_settings(Config, RECIPES / f"{name}.toml", overrides)

    return recipe


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_runs_and_is_its_papers_formula(recipe, name, monkeypatch):
    config, update, seen = recipe(name), module.update, []

    def spy(run: Run, rollout: Rollout) -> dict[str, float]:
        seen.append(run.step)
        if run.step == 2:
            check(run, rollout, FORMULAS[name])
        return update(run, rollout)

    monkeypatch.setattr(module, "update", spy)
    set_seed(config.training.seed)
    run = make_run(config)
    for run.step in (1, 2):
        numbers, _ = module.take_step(run)
        assert numbers["skipped_updates"] == 0 and math.isfinite(numbers["loss"])
    assert seen == [1, 2]


def check(run: Run, rollout: Rollout, formula: Formula) -> None:
    x = recorded(run, rollout, formula)
    assert_close(rollout.rewards, [rewarded(x, formula, i, run) for i in range(len(x.texts))])
    if formula.advantages is None:
        assert rollout.token_advantages is None and rollout.response_advantages is None
    else:
        own = rollout.response_advantages
        found = rollout.token_advantages if own is None else own[:, None]
        assert_close(found * x.m, formula.advantages(x) * x.m)
        assert (found * x.m).abs().max() > 0.1

    # From here on the policy is another one than the one that sampled, and the sampler was not quite the old one.
    if rollout.rollout_logprobs is not None:
        noisy = rollout.rollout_logprobs + torch.randn_like(rollout.rollout_logprobs)
        rollout = replace(rollout, rollout_logprobs=noisy.clamp(max=-0.01))  # still of probabilities
        x.sampler = rollout.rollout_logprobs.double()
    perturbed = [run.models.policy.model] if run.models.critic is None else [run.models.policy.model, run.models.critic]
    before = [copy.deepcopy(part.state_dict()) for part in perturbed]
    add_noise(0.05, *perturbed)
    position = 0 if run.data.text is None else run.data.text.position

    if isinstance(run.loss.objective.covariance, CovarianceClip):
        generator = run.loss.objective.covariance.generator.clone_state()
        x.draws = torch.rand(x.m.numel(), generator=generator, dtype=torch.float64).view_as(x.m)
    parts = accumulate_gradients(run, rollout, torch.arange(len(x.m)), Stopwatch(run.models.policy.device))
    loss = sum(part["loss"].double() for part in parts)
    if run.data.text is not None:
        loss = pretrain(run, run.data.text, loss)["loss"]
    expected, gradients = expected_loss(run, rollout, formula, x, position)
    assert_close(loss, expected)
    parameters = [p for part in perturbed for p in part.parameters()]
    scale = max(float(g.abs().max()) for g in gradients if g is not None)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        assert_close(parameter.grad, gradient, atol=1e-5 * scale)
    run.optimizer.zero_grad(set_to_none=True)
    for part, state in zip(perturbed, before, strict=True):
        part.load_state_dict(state)


def assert_close(found, expected, atol=2e-5):
    if found is None or expected is None:  # a parameter that takes no part
        assert (found is None or not found.any()) and (expected is None or not expected.any())
        return
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=atol, equal_nan=True)


def recorded(run: Run, rollout: Rollout, formula: Formula) -> SimpleNamespace:
    """What a rollout should hold before the first update of its step, and does."""
    x = SimpleNamespace(m=rollout.mask.double(), T=rollout.mask.sum(1).double(), old_values=None)
    x.texts = [
        "".join(CHARACTERS[t] for t in row[m].tolist())
        for row, m in zip(rollout.targets, rollout.completion_mask, strict=True)
    ]
    prompts = rollout.input_ids[:, : rollout.prompt_length]
    answers = {tuple(example.token_ids): example.columns["answer"] for example in run.data.rollouts.prompts.examples}
    x.answers = [
        answers[tuple(row[m].tolist())]
        for row, m in zip(prompts, rollout.attention_mask[:, : rollout.prompt_length], strict=True)
    ]
    x.groups, x.rewards = rollout.groups.tolist(), rollout.rewards.double()
    x.beta = float(run.loss.kl.coef) if formula.beta is None and run.loss.kl is not None else formula.beta
    x.reward_beta = x.beta if formula.kl is None else 0.0
    with torch.no_grad():
        x.old, _, model = dense(run.models.policy, rollout)
        x.old_log_p = dense_log_p(run.models.policy, rollout)[0]
        if formula.policy is not None:
            assert_close(rollout.old_logprobs, x.old)
        if run.models.reference is not None:
            x.ref, _, _ = dense(run.models.reference, rollout)
            assert_close(rollout.ref_logprobs, x.ref)
        else:
            assert rollout.ref_logprobs is None
            x.ref = torch.zeros_like(x.old)
        if run.models.critic is not None:
            x.old_values = dense_values(copy.deepcopy(run.models.critic).double(), model, rollout)
            assert_close(rollout.old_values * x.m, x.old_values * x.m)
        teacher = run.teacher or (run.loss.distillation and run.loss.distillation.teacher)
        if teacher is not None:
            (x.taught, *_), x.log_q = dense(teacher, rollout), dense_log_p(teacher, rollout)[0]
    x.sampler = None if rollout.rollout_logprobs is None else rollout.rollout_logprobs.double()
    if x.sampler is not None:
        assert_close(x.sampler * x.m, x.old)  # the sampler is the policy, up to rounding
    return x


def rewarded(x: SimpleNamespace, formula: Formula, i: int, run: Run) -> float:
    """A completion's reward: the task's, and DAPO's price of length."""
    price, ended = 0.0, len(x.texts[i]) < run.config.rollout.max_new_tokens
    if run.config.reward.overlong_cache is not None:  # L_max = 6, L_cache = 2, the end counts
        price = {5: -0.5, 6: -1.0}.get(len(x.texts[i]) + ended, 0.0)
        assert bool(x.m[i].any()) == ended  # what was cut off is not trained on
    return formula.reward(x.texts[i], x.answers[i]) + price


def expected_loss(run: Run, rollout: Rollout, formula: Formula, x: SimpleNamespace, position: int):
    """The whole loss in float64, and its gradient for each parameter of the policy (and the critic)."""
    x.logp, x.H, model = dense(run.models.policy, rollout)
    if formula.teacher is not None:
        x.log_p, model = dense_log_p(run.models.policy, rollout)
        loss = token_mean(x, formula.teacher(x))
        return loss.detach(), torch.autograd.grad(loss, list(model.parameters()))
    x.A = formula.advantages(x)
    assert 0.1 < ((x.logp - x.old).abs() * x.m).sum() / x.m.sum() < 2  # off-policy enough for every clip to act
    terms = formula.policy(x) - float(run.loss.objective.entropy_coef) * x.H
    if formula.kl is not None:
        terms = terms + x.beta * formula.kl(x)
    loss = formula.aggregate(x, terms)
    parameters = list(model.parameters())
    if run.models.critic is not None:
        critic = copy.deepcopy(run.models.critic).double()
        parameters += critic.parameters()
        values, old = dense_values(critic, model, rollout), x.old_values
        _, returns = gae(x, old, formula.critic_lam)
        near = old + (values - old).clamp(-0.2, 0.2)
        assert ((values - old).abs() * x.m).max() > 0.2
        squares = torch.maximum((values - returns) ** 2, (near - returns) ** 2)
        loss = loss + 0.5 * token_mean(x, 0.5 * squares)
    if run.data.text is not None and run.config.pretraining is not None:
        size, length = run.config.pretraining.batch_size, run.config.pretraining.length
        ids = (run.data.text.tokens.repeat(9))[position : position + size * length].view(size, length)
        log_p = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
        loss = loss - run.config.pretraining.coef * log_p.gather(-1, ids[:, 1:, None]).mean()
    return loss.detach(), torch.autograd.grad(loss, parameters, allow_unused=True)
