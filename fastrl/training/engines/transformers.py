"""Hugging Face's `generate` in the trainer's process, with the policy itself: nothing to install, and slow."""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice, product
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from fastrl.base.errors import UserError, one_line
from fastrl.base.terminal import say
from fastrl.models.lm_head import TOLERANCE
from fastrl.models.patching import replaced
from fastrl.models.recording import last_processor, record_sampling
from fastrl.models.routing import record_routing
from fastrl.training.batches.memory import fitting_completions
from fastrl.training.batches.micro_batches import MicroBatches, Shape
from fastrl.training.batches.rollout import rollout_logprobs
from fastrl.training.config.sampling import RolloutConfig
from fastrl.training.data.examples import Example
from fastrl.training.engines.completions import assemble
from fastrl.training.engines.protocol import Completion, Request, Sampling, Weights
from fastrl.training.engines.weights import base_of
from fastrl.training.models.decoder import exact_dtype, left_pad
from fastrl.training.models.policy import Policy
from fastrl.training.models.rotary import keeping_cache
from fastrl.training.parallel.seeds import seed_of
from fastrl.training.parallel.shard import unsharded
from fastrl.training.run.optimizer import Diverged


class TransformersEngine:
    """Draws with the policy's own weights, each completion from a seed of its own, in whatever batch it is."""

    def __init__(self, policy: Policy, batch_size: int | None, pads: bool = True) -> None:
        """`batch_size` completions are drawn at a time; None means as many as fit what the device has free.

        Prompts of several lengths are padded to one, or without `pads` drawn one length after the other.
        """
        self.policy, self.batch_size, self.pads, self.halved = policy, batch_size, pads, False

    @torch.no_grad()
    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[tuple[int, list[Completion]]]:
        """All completions, a batch at a time."""
        groups: dict[int, list[int]] = {}  # the requests that are padded to one length
        for index, request in enumerate(requests):
            groups.setdefault(0 if self.pads else len(request.token_ids), []).append(index)
        for group in groups.values():
            rows = [(requests[i], number) for i in group for number in range(requests[i].n)]
            completions = iter(self._draw_padded(rows, sampling))
            for index in group:
                yield index, list(islice(completions, requests[index].n))

    def _draw_padded(self, rows: Sequence[tuple[Request, int]], sampling: Sampling) -> list[Completion]:
        """A completion for each row, a request and a number among its completions, a batch at a time."""
        # Every batch is padded to the longest prompt of all: that keeps results apart from batch_size in one way.
        ids = [list(request.token_ids) for request, _ in rows]
        prompts, mask = left_pad(ids, self.policy.pad_token_id, self.policy.device)
        limits = torch.tensor([request.max_tokens for request, _ in rows], device=prompts.device)
        seeds = [seed_of(request.seed, number) for request, number in rows]
        lengths = prompts.shape[1], int(limits.max())
        size = self.batch_size or fitting_completions(self.policy.model, self.policy.dtype, len(rows), *lengths)
        batches = MicroBatches(size * sum(lengths), name="batches of completions", halved=self.halved)
        drawn: list[Completion] = []

        def draw() -> None:
            for some in batches.cut([Shape(1, sum(lengths), sum(lengths))] * (len(rows) - len(drawn))):
                part = slice(len(drawn), len(drawn) + len(some))
                drawn.extend(self._draw(prompts[part], mask[part], limits[part], seeds[part], sampling))

        batches.fitted(draw)
        if batches.halved and not self.halved:
            self.batch_size, self.halved = -(-size // 2), True
        return drawn

    # Its weights are the policy's, and so is its memory.
    def update_weights(self, version: str, weights: Weights) -> None: ...
    def sleep(self) -> None: ...
    def wake_up(self) -> None: ...

    def _draw(
        self, prompts: Tensor, mask: Tensor, limits: Tensor, seeds: Sequence[int], sampling: Sampling
    ) -> list[Completion]:
        """A completion for each prompt, left-padded with its mask, (b, P), up to its limit, (b,), from its seed."""
        model = self.policy.model
        with ExitStack() as stack:
            recorder = experts = None
            if sampling.logprobs:
                recorder = stack.enter_context(record_sampling(model, logprobs=True, sets=sampling.supports))
            if sampling.routing:
                experts = stack.enter_context(record_routing(model))
            if sampling.temperature:  # after the recorder, which reads the distribution
                stack.enter_context(last_processor(model, lambda _: _Race(seeds, prompts.device)))
            ends = _Ends(self.policy.tokenizer, sampling.stop, prompts.shape[1], limits)
            tokens = self._generate(prompts, mask, ends, sampling)
        inside = torch.arange(tokens.shape[1], device=tokens.device) < ends.lengths[:, None]
        drawn = completion_mask(tokens, sampling.eos_token_ids) & inside  # (b, t)
        is_eos = torch.isin(tokens, torch.tensor(sampling.eos_token_ids, device=tokens.device))
        ended = ((is_eos & drawn).any(1) | ends.stopped).tolist()
        lengths = drawn.sum(1).tolist()
        logprobs = None if recorder is None else recorder.logprobs(tokens, drawn).cpu()
        supports = recorder.sampling_mask(drawn).to("cpu") if recorder is not None and sampling.supports else None
        routing = None if experts is None else experts.routing(prompts.shape[1] + tokens.shape[1]).cpu()
        rows, used = tokens.cpu(), torch.cat([mask, drawn], 1).cpu()
        return [
            Completion(
                rows[row, :length].tolist(),
                ended[row],
                None if logprobs is None else logprobs[row, :length].tolist(),
                None if supports is None else supports.index(row * rows.shape[1] + torch.arange(length)),
                None if routing is None else routing[row][used[row]],
            )
            for row, length in enumerate(lengths)
        ]

    def _generate(self, prompts: Tensor, mask: Tensor, ends: "_Ends", sampling: Sampling) -> Tensor:
        """New tokens (b, up to the longest limit); everything after an EOS, or after `ends` says so, is padding."""
        # All are set, because transformers' default top_k is 50, and training uses only the recorded truncation.
        options = {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p")}
        greedy = sampling.temperature == 0
        settings = GenerationConfig(
            max_new_tokens=int(ends.lengths.max()),
            eos_token_id=list(sampling.eos_token_ids),
            pad_token_id=self.policy.pad_token_id,
            do_sample=not greedy,
            **({} if greedy else options | {"min_p": sampling.min_p or None}),
        )
        model, finite = self.policy.model, _Finite(prompts.device)
        # The shipped top-k, top-p and penalties would fill what our settings leave unset: the tokens would come from
        # another distribution than the one whose log-probabilities are trained.
        neutral = replaced(base_of(self.policy), "generation_config", GenerationConfig())
        with neutral, keeping_cache(model), self.policy.precision():
            sample: Any = model.generate  # a mixin's method, unknown to Module's type
            tokens: Tensor = sample(
                input_ids=prompts,
                attention_mask=mask.long(),
                generation_config=settings,
                logits_processor=LogitsProcessorList([finite]),
                stopping_criteria=StoppingCriteriaList([ends]),
                synced_gpus=False,  # of several ranks each draws what it is given, and holds all weights
            )
        if not finite.always:
            raise Diverged("its logits are not finite")
        return tokens[:, prompts.shape[1] :]


@torch.no_grad()
def checked_engine(policy: Policy, batch_size: int | None) -> TransformersEngine:
    """An engine whose completions are the policy's: their log-probabilities are those of a forward of each alone.

    A model whose `generate` reads padding draws prompts of one length at a time, and a line says so. Raises UserError
    for one whose `generate` fails, or draws from another distribution.
    """
    name = type(policy.model).__name__
    exact = replace(policy, dtype=exact_dtype(policy.model, policy.dtype))
    # Two tries each: rounding may have chosen another expert of a mixture, but not for any tokens.
    for pads, seed in product((True, False), (0, 1)):
        difference = _difference(TransformersEngine(exact, None, pads), seed)
        if difference <= TOLERANCE[exact.dtype]:
            if not pads:
                say(f"warning: {name}.generate reads padding; prompts of one length are drawn at a time")
            return TransformersEngine(policy, batch_size, pads)
    raise UserError(
        f"rollout.engine: {name}.generate draws from another distribution than the model's own forward computes "
        f"(relative difference {difference:.2g}); draw with another engine"
    )


def _difference(engine: TransformersEngine, seed: int) -> float:
    """The largest difference of log-probabilities, of two completions of two prompts, between `generate` and a forward.

    Relative to how far they are from those of a uniform distribution, as what is wrong in a new model's is small too.
    What rounding may make of log-probabilities of that size is taken off first.
    """
    policy = engine.policy
    tokens = [min(token, policy.vocabulary - 1) for token in range(6)]
    examples = [Example("", {}, tokens[:4]), Example("", {}, tokens[4:])]
    requests = [Request(str(i), example.token_ids, 2, 4, seed, example) for i, example in enumerate(examples)]
    sampling = Sampling.of(RolloutConfig(), (), greedy=False, record=True)  # an EOS would end the comparison
    try:
        with unsharded(policy.model):
            drawn = dict(engine.generate(requests, sampling))
    except Diverged as error:
        raise UserError(f"model: {type(policy.model).__name__} computes logits that are not finite") from error
    except Exception as error:  # a model's own code raises what it likes
        raise UserError(f"rollout.engine: {type(policy.model).__name__}.generate fails: {one_line(error)}") from error
    rollout = assemble(policy, [examples[0]] * 2 + [examples[1]] * 2, [*drawn[0], *drawn[1]], sampling)
    assert rollout.rollout_logprobs is not None  # asked for
    ours = rollout_logprobs(policy, rollout, 1.0, MicroBatches(1))
    uniform = math.log(policy.vocabulary)
    spread = (ours + uniform).abs().max().clamp_min(1e-3)  # a head of zeros has none
    rounding = 4 * torch.finfo(torch.float32).eps * uniform  # two units in the last place of each
    return float(((ours - rollout.rollout_logprobs).abs().max() - rounding).clamp_min(0) / spread)


class _Finite(LogitsProcessor):
    """Notes whether logits were finite, without waiting for the device, and replaces rows that are not.

    From those, multinomial would draw nothing: on a GPU that ends the process' use of it, checkpoints included.
    """

    def __init__(self, device: torch.device) -> None:
        self.always = torch.ones((), dtype=torch.bool, device=device)

    def __call__(self, input_ids: Any, scores: Tensor) -> Any:
        """The scores (b, V), a row of zeros where they hold NaN, +inf or nothing but -inf; changed in place."""
        wrong = ~scores.amax(1).isfinite()
        self.always &= ~wrong.any()
        return scores.masked_fill_(wrong[:, None], 0.0)


class _Race(LogitsProcessor):
    """Draws each row's token with numbers of the row's own seed, and leaves nothing else for `generate` to draw.

    The token is the one with the least exponential number divided by its probability, as in torch.multinomial. Unlike
    with a number below the sum of probabilities, rounding changes it only where two are equal up to that rounding.
    """

    def __init__(self, seeds: Sequence[int], device: torch.device) -> None:
        self.generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids: Any, scores: Tensor) -> Any:
        """The scores (b, V), 0 at the row's token and -inf elsewhere; changed in place."""
        noise = torch.empty(scores.shape, dtype=torch.float32, device=scores.device)
        for row, generator in zip(noise, self.generators, strict=True):
            row.exponential_(generator=generator)
        # A number may be rounded to 0, which would win whatever its score.
        noise.clamp_min_(torch.finfo(noise.dtype).tiny)
        tokens = (scores - noise.log_()).argmax(1, keepdim=True)
        return scores.fill_(-math.inf).scatter_(1, tokens, 0.0)


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


def completion_mask(completions: Tensor, eos_token_ids: Sequence[int]) -> Tensor:
    """True up to and including the first EOS of each row: (B, T) int64 -> (B, T) bool."""
    is_eos = torch.isin(completions, torch.tensor(eos_token_ids, device=completions.device))
    return is_eos.cumsum(1) - is_eos.long() == 0
