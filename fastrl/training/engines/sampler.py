"""Draws rollouts from an engine: gives it the policy's weights, waits for it when it dies, checks what it returns."""

import itertools
import math
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from threading import Thread

import torch

from fastrl import SamplingMask
from fastrl.base.errors import UserError
from fastrl.models.patching import is_sharded
from fastrl.training.batches.rollout import Rollout, join
from fastrl.training.config.sections import RolloutConfig
from fastrl.training.data.examples import Example
from fastrl.training.engines.assembly import assemble
from fastrl.training.engines.completions import check_weights
from fastrl.training.engines.protocol import (
    Completion,
    Engine,
    EngineFailed,
    EngineLost,
    EngineUnavailable,
    Request,
    Sampling,
)
from fastrl.training.engines.turns import Turns
from fastrl.training.engines.weights import PolicyWeights, merged_weights
from fastrl.training.models.policy import Policy
from fastrl.training.parallel.seeds import seed_of
from fastrl.training.parallel.shard import unsharded, whole_on_main
from fastrl.training.parallel.world import ALONE, World
from fastrl.training.rewards.foreign import beside_trainer
from fastrl.training.run.optimizer import Diverged

FAILURES = 3  # in a row, of an engine that answers in between: then it is not its absence
PAUSE = 1.0  # seconds between two tries to reach it


@contextmanager
def _of_the_engine() -> Iterator[None]:
    """What a user must mend about the engine ends the run as its absence does: with all that was done kept."""
    try:
        yield
    except (EngineLost, Diverged):
        raise
    except UserError as error:
        raise EngineLost(str(error)) from error


@dataclass
class Draw:
    """Completions that were asked for, and those of them that are there."""

    examples: Sequence[Example]  # one for each completion
    requests: Sequence[Request]  # one for each run of the same example
    sampling: Sampling
    first: int  # the serial number of the first completion
    share: range  # the indices of the requests that this rank asks for
    done: dict[int, Sequence[Completion]] = field(default_factory=dict)  # by the request's index
    steps: dict[int, int] = field(default_factory=dict)  # after which the policy had the weights that drew them
    seconds: float = 0.0  # that the engine worked on it
    thread: Thread | None = None  # that draws it in the background
    error: BaseException | None = None  # that ended the thread

    @property
    def missing(self) -> list[int]:
        """This rank's requests without completions."""
        return [index for index in self.share if index not in self.done]


class CompletionSampler:
    """Draws completions with the policy's weights.

    Completions are numbered over the whole run, and each is returned once, whatever happens to the engine: those that
    came before it died are kept, and only the others are asked for again.

    Each rank of `world` asks for a share of them. Rank 0 alone gives the engine its weights, and waits for it.
    """

    def __init__(
        self, engine: Engine, policy: Policy, settings: RolloutConfig, seed: int, world: World = ALONE
    ) -> None:
        self.engine, self.policy, self.settings, self.seed, self.world = engine, policy, settings, seed, world
        self.drawn = 0  # completions of the run that were asked for so far
        self.names = itertools.count()
        self.step = 0  # after which the policy has its present weights; set by the loop
        self.sent: str | None = None  # the version that the engine has, if it has the policy's
        self.asleep = False
        self.gone = False  # it was, and nothing has said that it is back
        self.signals: Sequence[str] = ()  # that ask the run to end; set by the loop
        # Another run with the same steps must not be mistaken for this one.
        self.run = world.first(lambda: secrets.token_hex(4))

    # --- weights ----------------------------------------------------------------------------------------------------

    @property
    def version(self) -> str:
        """The version of the policy's weights."""
        return f"{self.run}-{self.step}"

    @_of_the_engine()
    def ready(self, *, wait: bool = True) -> bool:
        """Wake the engine and give it the policy's weights, unless it has them. Returns whether it has them then.

        Waits for one that does not answer, or with wait=False tries once. Raises EngineLost if it stays away, fails
        again and again, or is not the one that the run needs.
        """
        if self.asleep or self.sent != self.version:
            self._send(wait)
        return self.sent is not None

    @_of_the_engine()
    def sleep(self) -> None:
        """Have the engine free its memory until it is needed."""

        def sleep() -> None:
            try:
                self.engine.sleep()
            except EngineUnavailable as error:
                say(f"{error}; it was to sleep")

        self.world.first(sleep)
        self.asleep, self.sent = True, None

    def _send(self, wait: bool) -> None:
        """Send the weights, with `wait` if need be again and again until rollout.timeout has passed."""
        whole = None
        if is_sharded(self.policy.model) and not self.has_policy:
            whole = whole_on_main(merged_weights(self.policy), self.world)
        if self.asleep and self.policy.device.type == "cuda":
            torch.cuda.empty_cache()  # what torch keeps of the update, the engine cannot have
        weights = PolicyWeights(self.policy, whole=whole)
        self.asleep, self.sent = self.world.first(lambda: self._sent(weights, wait))
        if isinstance(self.engine, Turns) and self.sent is not None:
            self.engine.use(self.sent)

    def _sent(self, weights: PolicyWeights, wait: bool) -> tuple[bool, str | None]:
        """Try to send them; returns whether the engine is asleep then, and the version that it has."""
        deadline, said, failures = time.monotonic() + self.settings.timeout, False, 0
        asleep = self.asleep
        while True:
            try:
                if asleep:
                    self.engine.wake_up()
                    asleep = False
                self.engine.update_weights(self.version, weights)
                break
            except EngineUnavailable as error:
                if not wait:
                    say(f"{error}; it is asked again after the update")
                    self.gone = True
                    return asleep, None
                failures = failures + 1 if isinstance(error, EngineFailed) else 0
                _check_failures(failures, error)
                left = deadline - time.monotonic()
                if self.signals:
                    raise EngineLost(f"{self.signals[0]} while waiting for the engine: {error}") from error
                if left <= 0:
                    raise EngineLost(
                        f"rollout.timeout: {error}; waited {self.settings.timeout:g} s for it, then gave up; start it"
                    ) from error
                if not said:
                    say(f"{error}; trying again for up to {left:.0f} s")
                    said = self.gone = True
                time.sleep(min(PAUSE, left))
        if self.gone:
            say("the engine is there; going on")
            self.gone = False
        return asleep, self.version

    # --- completions ------------------------------------------------------------------------------------------------

    def draw(
        self, examples: Sequence[Example], *, greedy: bool = False, record: bool = True, apart: bool = False
    ) -> Rollout:
        """One completion for each example (repeat one to sample it several times), sampled or greedy; see `ask`."""
        draw = self.ask(examples, greedy=greedy, record=record, apart=apart)
        self.ready()
        return self.finish(draw)

    def ask(
        self, examples: Sequence[Example], *, greedy: bool = False, record: bool = True, apart: bool = False
    ) -> Draw:
        """What is to be drawn; nothing is yet.

        With `apart` it is no part of the run: its seeds are the same each time, and none of the run's are used up.
        """
        sampling = Sampling.of(self.settings, self.policy.eos_token_ids, greedy, record)
        requests, series = [], ["apart"] if apart else []
        number = first = 0 if apart else self.drawn
        for example, n in _runs(examples):
            name = f"fastrl-{self.run}-{next(self.names)}"
            # Distant seeds: an engine may add to one for each completion of a request.
            seed = seed_of(self.seed, *series, number)
            requests.append(Request(name, example.token_ids, n, self.settings.max_new_tokens, seed, example))
            number += n
        if not apart:
            self.drawn = number
        return Draw(examples, requests, sampling, first, self.world.range_of(len(requests)))

    def start(self, draw: Draw) -> None:
        """Draw in another thread, while the policy may change; `finish` does the rest."""

        version, step = self.sent, self.step  # of now: the policy may be updated before the thread comes to it

        def work() -> None:
            try:
                with beside_trainer():
                    self._run(draw, version, step)
            except BaseException as error:
                draw.error = error

        draw.thread = Thread(target=work, name="fastrl-draw", daemon=True)
        draw.thread.start()

    @_of_the_engine()
    def settle(self, draw: Draw) -> None:
        """Wait for the other thread, and keep what came. Raises what was not the engine's absence."""
        if draw.thread is not None:
            draw.thread.join()
            draw.thread = None
        error, draw.error = draw.error, None

        def drawn() -> EngineUnavailable | None:
            if error is not None and not isinstance(error, EngineUnavailable):
                raise error
            return error

        self._interrupted(draw, self.world.together(drawn))

    @_of_the_engine()
    def finish(self, draw: Draw) -> Rollout:
        """Draw what is missing, and return all of it. Raises EngineLost if the engine cannot."""
        self.settle(draw)
        failures = 0

        def drawn() -> EngineUnavailable | None:
            try:
                self._run(draw, self.sent, self.step)
            except EngineUnavailable as error:
                return error
            return None

        while missing := self.left(draw):
            self.ready()
            with unsharded(self.policy.model) if self.has_policy else nullcontext():
                errors = self.world.together(drawn)
            failures = failures + 1 if self.left(draw) == missing else 1
            self._interrupted(draw, errors, failures)
        parts = self.world.together(lambda: self._assembled(draw))
        return join([part for part in parts if part is not None])

    def left(self, draw: Draw) -> int:
        """How many requests have no completions yet, of all ranks."""
        return sum(self.world.gathered(len(draw.missing)))

    @property
    def has_policy(self) -> bool:
        """Whether the engine draws with the policy itself."""
        return self.settings.engine == "transformers"

    def _assembled(self, draw: Draw) -> Rollout | None:
        """The rollout of this rank's completions, if it has any."""
        if not draw.share:
            return None
        completions = [completion for index in draw.share for completion in draw.done[index]]
        first = sum(request.n for request in draw.requests[: draw.share.start])
        examples = draw.examples[first : first + len(completions)]
        steps = [draw.steps[index] for index in draw.share for _ in draw.done[index]]
        return replace(
            assemble(self.policy, examples, completions, draw.sampling),
            serial=torch.arange(len(completions)) + draw.first + first,
            weights_step=torch.tensor(steps),
        )

    def _interrupted(self, draw: Draw, errors: Sequence[EngineUnavailable | None], failures: int = 1) -> None:
        """Say that the engine is gone, if it is for any rank; what it has of the policy is not known then."""
        error = next(filter(None, errors), None)
        if error is None:
            return
        _check_failures(failures, error)
        self.sent = None
        done = len(draw.requests) - self.left(draw)
        say(f"{error}; {done} of {len(draw.requests)} prompts have their completions")

    def _run(self, draw: Draw, expected: str | None, step: int) -> None:
        """Draw what is missing, with this version of the weights, until all is there or the engine fails."""
        missing = draw.missing
        if not missing:
            return
        started = time.perf_counter()
        try:
            for index, completions in self.engine.generate([draw.requests[i] for i in missing], draw.sampling):
                request = draw.requests[missing[index]]
                if len(completions) != request.n:
                    raise _wrong(f"{len(completions)} completions of a prompt, expected {request.n}")
                check_weights(completions, expected)
                for completion in completions:
                    self._check(completion, request)
                draw.done[missing[index]], draw.steps[missing[index]] = completions, step
        finally:
            draw.seconds += time.perf_counter() - started
        if draw.missing:  # or it would be asked for them forever
            raise _wrong(f"the completions of {len(missing) - len(draw.missing)} of {len(missing)} prompts")

    def _check(self, completion: Completion, request: Request) -> None:
        """Raise UserError for what is no completion of the policy."""
        ids, vocabulary = completion.token_ids, self.policy.vocabulary
        if not 1 <= len(ids) <= request.max_tokens:
            raise _wrong(f"a completion of {len(ids)} tokens, expected 1 to {request.max_tokens}")
        unknown = [token for token in ids if not (isinstance(token, int) and 0 <= token < vocabulary)]
        if unknown:
            raise _wrong(
                f"token id {unknown[0]!r}, but the policy's ids end at {vocabulary - 1}; start it with the policy's "
                "model and tokenizer"
            )
        for record, what in ((completion.logprobs, "log-probabilities"), (completion.sampling_mask, "mask rows")):
            if record is not None and len(record) != len(ids):
                raise _wrong(f"{len(record)} {what} for {len(ids)} tokens")
        if completion.sampling_mask is not None:
            _check_support(completion.sampling_mask, ids, vocabulary)
        if completion.logprobs is not None and not all(map(math.isfinite, completion.logprobs)):
            raise _wrong("a log-probability that is not finite; the policy's weights may be what is not")


def _check_support(mask: SamplingMask, ids: Sequence[int], vocabulary: int) -> None:
    """Raise UserError unless each token is in the support that was recorded of it."""
    rows = torch.repeat_interleave(torch.arange(len(mask), device=mask.device), mask.lengths)
    tokens = torch.tensor(ids, device=mask.device)
    found = torch.zeros(len(mask), dtype=torch.bool, device=mask.device)
    found[rows[mask.token_ids == tokens[rows]]] = True
    missing = (~found & (mask.lengths > 0)).nonzero()[:, 0].tolist()
    if missing or bool((mask.token_ids >= vocabulary).any()):
        what = f"without token {ids[missing[0]]}, which was drawn from it" if missing else "with unknown token ids"
        raise _wrong(f"a sampling mask {what}; start it with the policy's model, and without other logits processors")


def _wrong(what: str) -> UserError:
    return UserError(f"rollout.engine: the engine returned {what}")


def _check_failures(count: int, error: EngineUnavailable) -> None:
    if count == FAILURES:
        raise EngineLost(
            f"rollout.engine: {error}; that was {FAILURES} times in a row, though the engine answers in between; its "
            "own log says more"
        ) from error


def say(text: str) -> None:
    """A line for whoever watches the run."""
    print(f"fastrl: {text}", file=sys.stderr, flush=True)


def _runs(examples: Sequence[Example]) -> Iterator[tuple[Example, int]]:
    """Each example with the number of times that it is repeated in a row."""
    first = 0
    for index in range(1, len(examples) + 1):
        if index == len(examples) or examples[index] is not examples[first]:
            yield examples[first], index - first
            first = index
