"""`fastrl reward-model`: a reward model from ranked completions, by the K-wise Bradley-Terry loss.

Rows are {"prompt", "responses": [string, ...], "ranks": [int, ...]}, where rank 1 is the best and equal ranks form no
pair, or {"prompt", "chosen", "rejected"}. A prompt's responses stay together in a batch. After training the scores are
shifted so that their mean over the training responses, or over the completions of data.reference_path, is 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerBase

from fastrl import reward_model_loss
from fastrl.base.errors import UserError
from fastrl.training.config.data import Source
from fastrl.training.config.stages import RewardModelConfig
from fastrl.training.data.sources import field_of
from fastrl.training.models.loading import load_tokenizer
from fastrl.training.models.model import load_model
from fastrl.training.models.names import name_of
from fastrl.training.parallel.world import World
from fastrl.training.rewards.model import MEAN, RewardModel, check_classifier, longest_scored, score_sequences
from fastrl.training.run.loop import Loop
from fastrl.training.stages.loop import StageLoop, finish, run_stage
from fastrl.training.stages.rows import Reader
from fastrl.training.stages.stage import Stage


@dataclass(frozen=True)
class Ranked:
    """The responses to a prompt, each as one sequence of tokens with its prompt, and their ranks."""

    sequences: list[list[int]]
    ranks: list[int]


class RewardModelStage(Stage[Ranked]):
    """Bradley-Terry on all pairs of a prompt's responses."""

    shown = ("loss", "accuracy", "margin", "eval/loss", "eval/accuracy", "lr", "grad_norm")

    def __init__(
        self, model: Any, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype, reference: Sequence[list[int]]
    ) -> None:
        """`reference` holds the sequences whose mean score will be 0."""
        self.model, self.tokenizer, self.dtype, self.reference = model, tokenizer, dtype, reference

    def sequences(self, row: Ranked) -> list[list[int]]:
        """The prompt with each response."""
        return row.sequences

    def part(self, rows: Sequence[Ranked], total: int) -> tuple[Tensor, dict[str, float]]:
        """Loss, accuracy, margin: means over a prompt's pairs, summed over prompts, divided by the update's prompts."""
        sequences = [tokens for row in rows for tokens in row.sequences]
        ranks = torch.tensor([rank for row in rows for rank in row.ranks])
        prompts = torch.tensor([i for i, row in enumerate(rows) for _ in row.ranks])
        scores = score_sequences(self.model, sequences, self.dtype)
        device = scores.device
        loss = reward_model_loss(scores, ranks.to(device), prompts.to(device)) * (len(rows) / total)
        numbers = {"accuracy": 0.0, "margin": 0.0, "tokens": float(sum(map(len, sequences)))}
        values = scores.detach().cpu()
        for i in range(len(rows)):
            prompt_scores, prompt_ranks = values[prompts == i], ranks[prompts == i]
            margins = (prompt_scores[:, None] - prompt_scores)[prompt_ranks[:, None] < prompt_ranks]
            numbers["accuracy"] += float((margins > 0).float().mean()) / total
            numbers["margin"] += float(margins.mean()) / total
        return loss, numbers

    def complete(self, world: World) -> None:
        """Shift the scores by their mean over the reference."""
        setattr(self.model.config, MEAN, 0.0)
        scores = RewardModel(self.model, self.tokenizer, world=world).score(self.reference)
        setattr(self.model.config, MEAN, sum(scores) / len(scores))


def parse(reader: Reader, row: dict[str, Any], where: str) -> Ranked:
    """Parse a row of the dataset in either form; its other fields are ignored."""
    if "responses" not in row and "chosen" in row:
        return Ranked([reader.tokens(row, name, where).all for name in ("chosen", "rejected")], [1, 2])
    responses, ranks = (field_of(row, name, where) for name in ("responses", "ranks"))
    if not isinstance(responses, list) or len(responses) < 2:
        raise UserError(f"{where}: responses: expected a list of at least two strings, got {responses!r}")
    well_formed = isinstance(ranks, list) and all(type(rank) is int and rank >= 1 for rank in ranks)
    if not well_formed or len(ranks) != len(responses):
        raise UserError(
            f"{where}: ranks: expected {len(responses)} integers, one per response and 1 the best, got {ranks!r}"
        )
    answers = (reader.answer(row, text, where, f"responses[{i}]") for i, text in enumerate(responses))
    return Ranked([tokens.all for tokens in answers], ranks)


def train(config: RewardModelConfig, resume: bool = False) -> dict[str, Any]:
    """Run the stage, or the rest of it; returns the run's summary.

    Raises UserError before the first update for input that cannot be used.
    """
    return run_stage(config, resume, _loop)


def _loop(config: RewardModelConfig, world: World) -> Loop:
    tokenizer, data, dtype = load_tokenizer(config.model), config.data, getattr(torch, config.model.dtype)
    # Of a language model only the decoder is used: its own head is left over, and the score head is new.
    options: dict[str, Any] = {"new_head": True, "num_labels": 1, "world": world}
    model = load_model(config.model, world.device, AutoModelForSequenceClassification, **options)
    check_classifier(model, tokenizer, name_of(config.model), dtype)
    setattr(model.config, MEAN, 0.0)
    reader = Reader.of(data, tokenizer, config.training.max_length, longest_scored(model))
    all_rows = reader.load(data.source, parse)
    rows = _with_pairs(all_rows, data.source)
    held_out = _with_pairs(reader.load(data.eval_source, parse), data.eval_source) if data.eval_source else []
    if data.reference_path is None:
        reference = [tokens for row in all_rows for tokens in row.sequences]
    else:
        source = data.source_of(str(data.reference_path), "train")
        reference = reader.load(source, lambda reader, row, where: reader.tokens(row, "completion", where).all)
    stage = RewardModelStage(model, tokenizer, dtype, reference)
    return StageLoop(stage, rows, held_out, config, world)


def _with_pairs(rows: list[Ranked], source: Source) -> list[Ranked]:
    kept = [row for row in rows if len(set(row.ranks)) > 1]
    if not kept:
        raise UserError(f"{source.name}: expected two responses to a prompt that differ in rank, got ties alone")
    return kept


def main(config: RewardModelConfig, resume: bool) -> int:
    """`fastrl reward-model`: train, print what came out, and return the exit status."""
    return finish(config, train(config, resume), "fastrl train TRAIN_CONFIG.toml --reward.model")
