"""Completions of a policy by transformers' generate, as the trainer draws them."""

from collections.abc import Sequence

from fastrl.training.batches.rollout import Rollout
from fastrl.training.config.sampling import RolloutConfig
from fastrl.training.data.examples import Example
from fastrl.training.engines.sampler import CompletionSampler
from fastrl.training.engines.transformers import TransformersEngine
from fastrl.training.models.policy import Policy


def generate(
    policy: Policy, examples: Sequence[Example], settings: RolloutConfig, *, greedy: bool = False, record: bool = True
) -> Rollout:
    sampler = CompletionSampler(TransformersEngine(policy, settings.batch_size), policy, settings, seed=0)
    return sampler.draw(examples, greedy=greedy, record=record)
