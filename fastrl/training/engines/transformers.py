"""Hugging Face's `generate` in the trainer's process, with the policy itself: nothing to install, and slow."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from fastrl.models.recording import record_sampling
from fastrl.models.routing import record_routing
from fastrl.training.common.policy import Policy, left_pad
from fastrl.training.common.rotary import keeping_cache
from fastrl.training.engines.protocol import Completion, Request, Sampling, Weights


class TransformersEngine:
    """Draws with the policy's own weights. Seeds are not used: it draws from torch's generator."""

    def __init__(self, policy: Policy, batch_size: int | None) -> None:
        """`batch_size` completions are drawn at a time; None means all of them."""
        self.policy, self.batch_size = policy, batch_size

    @torch.no_grad()
    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[tuple[int, list[Completion]]]:
        """All completions, a batch at a time."""
        rows = [request for request in requests for _ in range(request.n)]
        size = self.batch_size or len(rows)
        completions: list[Completion] = []
        # Every batch is padded to the longest prompt of all: that keeps results apart from batch_size in one way.
        prompts, mask = left_pad([list(row.token_ids) for row in rows], self.policy.pad_token_id, self.policy.device)
        for first in range(0, len(rows), size):
            part = slice(first, first + size)
            limits = torch.tensor([request.max_tokens for request in rows[part]], device=prompts.device)
            completions += self._draw(prompts[part], mask[part], limits, sampling)
        taken = 0
        for index, request in enumerate(requests):
            yield index, completions[taken : taken + request.n]
            taken += request.n

    def update_weights(self, version: str, weights: Weights) -> None:
        """Nothing to do: they are the policy's."""

    def sleep(self) -> None:
        """Nothing to free."""

    def wake_up(self) -> None:
        """Nothing to take."""

    def _draw(self, prompts: Tensor, mask: Tensor, limits: Tensor, sampling: Sampling) -> list[Completion]:
        """A completion for each prompt, left-padded with its mask, (b, P), up to its limit, (b,)."""
        model = self.policy.model
        with ExitStack() as stack:
            recorder = experts = None
            if sampling.logprobs:
                recorder = stack.enter_context(record_sampling(model, logprobs=True, sets=sampling.supports))
            if sampling.routing:
                experts = stack.enter_context(record_routing(model))
            ends = _Ends(self.policy.tokenizer, sampling.stop, prompts.shape[1], limits)
            tokens = self._generate(prompts, mask, ends, sampling)
        inside = torch.arange(tokens.shape[1], device=tokens.device) < ends.lengths[:, None]
        drawn = completion_mask(tokens, sampling.eos_token_ids) & inside  # (b, t)
        is_eos = torch.isin(tokens, torch.tensor(sampling.eos_token_ids, device=tokens.device))
        ended = ((is_eos & drawn).any(1) | ends.stopped).tolist()
        lengths = drawn.sum(1).tolist()
        logprobs = None if recorder is None else recorder.logprobs(tokens, drawn).cpu()
        supports = recorder.sampling_mask(drawn) if recorder is not None and sampling.supports else None
        routing = None if experts is None else experts.routing(prompts.shape[1] + tokens.shape[1]).cpu()
        rows = tokens.cpu()
        completions = []
        for row, length in enumerate(lengths):
            first = row * tokens.shape[1]
            used = torch.cat([mask[row].cpu(), drawn[row].cpu()])
            completions.append(
                Completion(
                    rows[row, :length].tolist(),
                    ended[row],
                    None if logprobs is None else logprobs[row, :length].tolist(),
                    None if supports is None else supports.index(torch.arange(first, first + length)),
                    None if routing is None else routing[row][used],
                )
            )
        return completions

    def _generate(self, prompts: Tensor, mask: Tensor, ends: "_Ends", sampling: Sampling) -> Tensor:
        """New tokens (b, up to the longest limit); everything after an EOS, or after `ends` says so, is padding."""
        # All are set, because transformers' default top_k is 50, and training uses only the recorded truncation.
        options = {
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p or None,
        }
        greedy = sampling.temperature == 0
        settings = GenerationConfig(
            max_new_tokens=int(ends.lengths.max()),
            eos_token_id=list(sampling.eos_token_ids),
            pad_token_id=self.policy.pad_token_id,
            do_sample=not greedy,
            **({} if greedy else options),
        )
        model = self.policy.model
        with _neutral_generation_config(model), keeping_cache(model), self.policy.computing():
            sample: Any = model.generate  # a mixin's method, unknown to Module's type
            tokens: Tensor = sample(
                input_ids=prompts,
                attention_mask=mask.long(),
                generation_config=settings,
                stopping_criteria=StoppingCriteriaList([ends]),
            )
        return tokens[:, prompts.shape[1] :]


class _Ends(StoppingCriteria):
    """Ends each completion at its own limit, or with the token that completes a stop string.

    transformers' own criterion would find a text that begins in the prompt.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str], prompt_length: int, limits: Tensor) -> None:
        self.tokenizer, self.stop, self.prompt_length = tokenizer, stop, prompt_length
        self.lengths = limits.clone()  # (b,) int64, of the completions, if no EOS comes before
        self.stopped = torch.zeros_like(limits, dtype=torch.bool)
        # A token has at least a byte. The one more keeps decoders that strip a text's first space from a match's.
        self.window = max((len(text.encode()) for text in stop), default=0) + 1

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        """Which rows of input_ids (b, S), prompts and what is drawn so far, are at their end: (b,) bool."""
        count = input_ids.shape[1] - self.prompt_length
        if self.stop:
            rows = (~self.stopped & (self.lengths >= count)).nonzero()[:, 0]
            tails = input_ids[rows, max(input_ids.shape[1] - self.window, self.prompt_length) :]
            texts = [self.tokenizer.decode(tail, skip_special_tokens=False) for tail in tails.cpu()]
            found = [any(stop in text for stop in self.stop) for text in texts]
            rows = rows[torch.tensor(found, dtype=torch.bool, device=rows.device)]
            self.stopped[rows], self.lengths[rows] = True, count
        return self.stopped | (self.lengths <= count)


@contextmanager
def _neutral_generation_config(model: Any) -> Iterator[None]:
    """Keep a model's shipped top-k, top-p and penalties from filling what our settings leave unset.

    Otherwise the tokens would come from another distribution than the one whose log-probabilities are trained.
    """
    shipped = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = shipped


def completion_mask(completions: Tensor, eos_token_ids: Sequence[int]) -> Tensor:
    """True up to and including the first EOS of each row: (B, T) int64 -> (B, T) bool."""
    is_eos = torch.isin(completions, torch.tensor(eos_token_ids, device=completions.device))
    return is_eos.cumsum(1) - is_eos.long() == 0
