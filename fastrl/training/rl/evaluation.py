"""Scores on held-out prompts: greedy, pass@k and maj@k; and how far the policy is from its teacher there."""

import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from fastrl.rewards.foreign import random_numbers
from fastrl.training.batches.distillation import check_sampled
from fastrl.training.batches.rollout import Rollout, completion_texts, hidden_states, rollout_logprobs
from fastrl.training.rl.metrics import average
from fastrl.training.rl.run import Run


def evaluate(run: Run) -> dict[str, float]:
    """The mean of each function over greedy completions of every held-out prompt, as `eval/<name>` (without Nones).

    With a teacher also `eval/divergence` (unless the form is sampled: greedy tokens do not estimate it) and
    `eval/teacher_logprob`, per token of these completions. With evaluation.samples also `eval/<name>/pass@k` and
    `eval/<name>/maj@k` of each metric. Samples and functions draw random numbers that are separate from the run's and
    the same each time.
    """
    with random_numbers(run.config.training.seed):  # how often a run is evaluated must not change what it learns
        examples = run.data.held_out
        rollout = run.data.rollouts.evaluate(examples, greedy=True)
        completions = completion_texts(run.models.policy, rollout, run.world)
        numbers = {} if run.config.distillation is None else _from_teacher(run, rollout)
        if run.rewards.scorers:
            numbers["eval/reward"] = average(run.rewards(examples, completions))
        for function in run.functions.metrics:
            numbers[f"eval/{function.name}"] = average(function(examples, completions))
        count = run.config.evaluation.samples
        if not count:
            return numbers
        repeated = [example for example in examples for _ in range(count)]
        texts = completion_texts(run.models.policy, run.data.rollouts.evaluate(repeated), run.world)
        for function in run.functions.metrics:
            solved = [value is not None and value >= 1 for value in function(repeated, texts)]
            prompts = range(0, len(texts), count)
            for k in run.config.evaluation.k:
                passes = [pass_at_k(solved[i : i + count], k) for i in prompts]
                majorities = [majority_at_k(texts[i : i + count], solved[i : i + count], k) for i in prompts]
                numbers[f"eval/{function.name}/pass@{k}"] = average(passes)
                numbers[f"eval/{function.name}/maj@{k}"] = average(majorities)
        return numbers


@torch.no_grad()
def _from_teacher(run: Run, rollout: Rollout) -> dict[str, float]:
    """The divergence from the teacher and the teacher's log-probability, means over a rollout's tokens."""
    training, sampling, distillation = run.config.training, run.config.rollout, run.loss.distillation
    check_sampled(rollout, distillation.teacher if distillation else run.teacher, run.models.policy)
    count = int(rollout.mask.sum())
    if distillation is None:
        assert run.teacher is not None  # a run with a teacher has one of them
        options = sampling.temperature, run.micro_batches, training.memory_budget
        return {"eval/teacher_logprob": rollout_logprobs(run.teacher, rollout, *options).sum().item() / count}

    def summed() -> Tensor:
        sums = torch.zeros(2, device=run.models.policy.device, dtype=torch.float64)
        for rows, weight in run.world.deal(run.micro_batches.cut(rollout.shapes())):
            batch = rollout.select(torch.tensor(rows)).to(run.models.policy.device)
            states, taught = hidden_states(run.models.policy, batch, training.packing), distillation.states(batch)
            _, divergence = distillation.loss(run.models.policy, states, taught, batch, int(batch.mask.sum()), 1)
            sums += weight * torch.stack([divergence, distillation.logprobs(taught, batch)])
        return run.world.total(sums.cpu())

    sums = run.micro_batches.fitted(summed)
    return dict(zip(("eval/divergence", "eval/teacher_logprob"), (sums / count).tolist(), strict=True))


def pass_at_k(solved: Sequence[bool], k: int) -> float:
    """The probability that k of the n samples, drawn without replacement, include one that solves the prompt.

    `1 - C(n - c, k) / C(n, k)` with c solutions: unbiased (Chen et al., 2021, arXiv:2107.03374, equation 1).
    """
    n, wrong = len(solved), len(solved) - sum(solved)
    return 1 - math.comb(wrong, k) / math.comb(n, k)


def majority_at_k(texts: Sequence[str], solved: Sequence[bool], k: int) -> float:
    """Whether the most frequent of the first k completions solves the prompt (Wang et al., 2023, arXiv:2203.11171).

    Completions are compared as texts without surrounding space; of equally frequent ones the first counts.
    """
    answers = [text.strip() for text in texts[:k]]
    answer, _ = Counter(answers).most_common(1)[0]
    return float(solved[answers.index(answer)])
