"""Scores on held-out prompts: greedy, pass@k and maj@k."""

import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from transformers import set_seed

from fastrl.training.common.generation import completion_texts, generate
from fastrl.training.common.health import average
from fastrl.training.rl.run import Run


def evaluate(run: Run) -> dict[str, float]:
    """The mean of each function over greedy completions of every held-out prompt, as `eval/<name>` (without Nones).

    With evaluation.samples also `eval/<name>/pass@k` and `eval/<name>/maj@k` of each metric. Samples and
    functions draw random numbers that are separate from the run's and the same each time.
    """
    with _random_numbers_of_its_own(run):
        examples, settings = run.held_out, run.config.rollout
        completions = completion_texts(run.policy, generate(run.policy, examples, settings, greedy=True))
        numbers = {"eval/reward": average(run.rewards(examples, completions))}
        for name, function in run.metrics.items():
            numbers[f"eval/{name}"] = average(function(examples, completions))
        count = run.config.evaluation.samples
        if not count:
            return numbers
        repeated = [example for example in examples for _ in range(count)]
        texts = completion_texts(run.policy, generate(run.policy, repeated, settings, record=False))
        for name, function in run.metrics.items():
            solved = [value is not None and value >= 1 for value in function(repeated, texts)]
            prompts = range(0, len(texts), count)
            for k in run.config.evaluation.k:
                passes = [pass_at_k(solved[i : i + count], k) for i in prompts]
                majorities = [majority_at_k(texts[i : i + count], solved[i : i + count], k) for i in prompts]
                numbers[f"eval/{name}/pass@{k}"] = average(passes)
                numbers[f"eval/{name}/maj@{k}"] = average(majorities)
        return numbers


@contextmanager
def _random_numbers_of_its_own(run: Run) -> Iterator[None]:
    """Use separate random numbers: how often a run is evaluated must not change what it learns."""
    device, python_state, numpy_state = run.policy.device, random.getstate(), np.random.get_state()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        set_seed(run.config.training.seed)
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


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
