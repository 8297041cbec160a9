"""Completions of a policy by transformers' generate, as the trainer draws them."""

from collections.abc import Sequence

from fastrl.training.common.data import Example
from fastrl.training.common.policy import Policy
from fastrl.training.common.rollout import Rollout
from fastrl.training.common.sections import RolloutConfig
from fastrl.training.engines.sampler import CompletionSampler
from fastrl.training.engines.transformers import TransformersEngine


def generate(
    policy: Policy, examples: Sequence[Example], settings: RolloutConfig, *, greedy: bool = False, record: bool = True
) -> Rollout:
    sampler = CompletionSampler(TransformersEngine(policy, settings.batch_size), policy, settings, seed=0)
    return sampler.draw(examples, greedy=greedy, record=record)
