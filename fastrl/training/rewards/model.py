"""Reward models: sequence classifiers with one label, whose score of a prompt and its completion is the reward.

The score is the model's linear `score` head on the hidden state of the last token, which is always the EOS after the
completion. Transformers' own forward looks for the last token that is not padding instead, and finds another one if
padding is EOS (as in most language models).
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerBase

from fastrl.base.errors import UserError
from fastrl.training.config.sampling import RewardConfig
from fastrl.training.config.sections import ModelConfig
from fastrl.training.data.examples import Example
from fastrl.training.data.prompts import PromptFormat
from fastrl.training.models.decoder import check_batches, decoder_states, in_call, left_pad, max_positions
from fastrl.training.models.loading import load_config, load_tokenizer
from fastrl.training.models.model import load_model
from fastrl.training.models.policy import check_token_ids
from fastrl.training.models.rotary import constant_length
from fastrl.training.parallel.world import ALONE, World
from fastrl.training.rewards.scoring import RewardFunctions, Rewards

# In a model's config.json: the mean of its scores over the reference set of the run that trained it.
MEAN = "fastrl_score_mean"


class RewardModel:
    """Scores completions; a scorer of `Rewards`."""

    name = "model"
    batch_size = 64  # sequences that are scored at a time

    def __init__(self, model: Any, tokenizer: PreTrainedTokenizerBase, world: World = ALONE) -> None:
        """`model` is a sequence classifier that passes `check_classifier`, in evaluation mode, on `world`."""
        self.model, self.tokenizer, self.world = model, tokenizer, world

    @classmethod
    def load(
        cls, path: str, device: torch.device, trust_remote_code: bool = False, world: World = ALONE
    ) -> "RewardModel":
        """Load the reward model in a directory (as `fastrl reward-model` writes it) or on the hub, in float32.

        Over several ranks of `world` it is sharded, and each scores a share.

        Raises UserError for a model that cannot be loaded, or is not a sequence classifier with one score.
        """
        config = ModelConfig(path=path, trust_remote_code=trust_remote_code)
        tokenizer = load_tokenizer(config)
        kinds = load_config(config).architectures or []
        if not any("SequenceClassification" in kind for kind in kinds):
            raise UserError(f"{path}: expected a sequence classifier, got {', '.join(kinds) or 'an unknown model'}")
        model = load_model(config, device, AutoModelForSequenceClassification, world=world)
        check_classifier(model, tokenizer, path)
        return cls(model.requires_grad_(False), tokenizer, world)

    @property
    def mean(self) -> float:
        """The value that is subtracted from every score."""
        return float(getattr(self.model.config, MEAN, 0.0))

    def __call__(self, examples: list[Example], completions: list[str]) -> list[float | None]:
        """The score of each completion of its prompt, less the mean.

        Raises UserError naming the prompt of a sequence that is too long.
        """
        pairs = list(zip(examples, completions, strict=True))
        return list(self.score(self.world.share(pairs, lambda some, _: self._tokens(some))))

    def _tokens(self, pairs: Sequence[tuple[Example, str]]) -> list[list[int]]:
        """The tokens of each prompt with its completion."""
        sequences, limit, prompts = list[list[int]](), longest_scored(self.model), PromptFormat(self.tokenizer)
        for example, completion in pairs:
            tools = example.columns.get("tools")
            prompt_ids, completion_ids = prompts.pair(example.prompt, completion, example.source, tools)
            sequences.append(prompt_ids + completion_ids)
            if limit is not None and len(sequences[-1]) > limit:
                raise UserError(
                    f"{example.source}: the prompt and its completion have {len(sequences[-1])} tokens, but the reward "
                    f"model's context ends at {limit}"
                )
        return sequences

    @torch.no_grad()
    def score(self, sequences: Sequence[list[int]]) -> list[float]:
        """The score of each sequence of tokens, less the mean."""
        order = sorted(range(len(sequences)), key=lambda i: len(sequences[i]))  # little padding per batch
        result = torch.zeros(len(sequences), dtype=torch.float64)
        batches = [order[first : first + self.batch_size] for first in range(0, len(order), self.batch_size)]
        for rows, weight in self.world.deal(batches):
            scores = score_sequences(self.model, [sequences[i] for i in rows]) - self.mean
            if weight:
                result[rows] = scores.double().cpu()
        return self.world.total(result).tolist()


def score_sequences(model: Any, sequences: Sequence[list[int]], dtype: torch.dtype = torch.float32) -> Tensor:
    """The head's output for each sequence's last token: (B,) float32, differentiable, the mean not subtracted.

    Products are of `dtype`; a sharded model's are of its own.
    """
    input_ids, mask = left_pad(sequences, 0, model.device)  # any padding: it is not attended to

    scores: Tensor = in_call(
        model, dtype, lambda: model.score(decoder_states(model.base_model, input_ids, mask)[:, -1])[:, 0].float()
    )
    return scores


def longest_scored(model: Any) -> int | None:
    """The longest sequence whose score does not depend on the batch, in tokens; None if there is no limit."""
    return min((x for x in (max_positions(model), constant_length(model)) if x is not None), default=None)


def check_classifier(
    model: Any, tokenizer: PreTrainedTokenizerBase, name: str, dtype: torch.dtype = torch.float32
) -> None:
    """Raise UserError unless the model has a linear `score` head of one output, knows the tokenizer's tokens, and
    computes a sequence in a batch as if it were alone."""
    head = getattr(model, "score", None)
    if not isinstance(head, torch.nn.Linear):
        raise UserError(f'{name}: expected a linear head called "score", which {type(model).__name__} does not have')
    if head.out_features != 1:
        raise UserError(f"{name}: expected one score (num_labels = 1), got {head.out_features}")
    check_token_ids([*tokenizer.get_vocab().values()], model.get_input_embeddings().weight.shape[0], name)
    with torch.no_grad():
        in_call(model, dtype, partial(check_batches, model.base_model, name, dtype))


def make_rewards(
    config: RewardConfig,
    functions: RewardFunctions,
    device: torch.device,
    trust_remote_code: bool,
    world: World = ALONE,
) -> Rewards:
    """The weighted sum of the functions and the reward model that a config names.

    Raises UserError for a reward model that cannot be loaded, and if a function has its name.
    """
    weights = config.weights or [1.0] * len(functions.outcome)
    scorers = list[tuple[Any, float]](zip(functions.outcome, weights, strict=True))
    if config.model is not None:
        if any(scorer.name == RewardModel.name for scorer, _ in scorers):
            raise UserError(f'reward.function: the name "{RewardModel.name}" is the reward model\'s')
        model = RewardModel.load(config.model, device, trust_remote_code, world=world)
        scorers.append((model, config.model_weight))
    return Rewards(scorers)
