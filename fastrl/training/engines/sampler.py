"""Draws rollouts from an engine: gives it the policy's weights, waits for it when it dies, checks what it returns."""

import secrets
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import count, groupby
from threading import Thread

import torch

from fastrl.base.errors import UserError
from fastrl.models.patching import is_sharded
from fastrl.training.batches.rollout import Rollout, join
from fastrl.training.config.sections import RolloutConfig
from fastrl.training.data.examples import Example
from fastrl.training.engines.completions import assemble, check_completions, check_weights, wrong
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
    numbers: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))  # metrics of engine and tools
    thread: Thread | None = None  # that draws it in the background
    error: BaseException | None = None  # that ended the thread

    @property
    def missing(self) -> list[int]:
        """This rank's requests without completions."""
        return [index for index in self.share if index not in self.done]


class CompletionSampler:
    """Draws completions with the policy's weights.

    Completions are numbered over the whole run, and each is returned once, whatever happens to the engine: those that
    came before it died are kept, and only the others are asked for again (`finish`).

    Each rank of `world` asks for a share of them. Rank 0 alone gives the engine its weights and waits for it (`_give`).
    """

    def __init__(
        self, engine: Engine, policy: Policy, settings: RolloutConfig, seed: int, world: World = ALONE
    ) -> None:
        self.engine, self.policy, self.settings, self.seed, self.world = engine, policy, settings, seed, world
        self.drawn = 0  # completions of the run that were asked for so far
        self.names = count()
        self.step = 0  # after which the policy has its present weights; set by the loop
        self.sent: str | None = None  # the version that the engine has, if it has the policy's and is awake
        self.asleep = False
        self.gone = False  # it was, and nothing has said that it is back
        self.begun: Draw | None = None  # by another thread
        self.signals: Sequence[str] = ()  # that ask the run to end; set by the loop
        # Another run with the same steps must not be mistaken for this one.
        self.run = world.first(lambda: secrets.token_hex(4))

    @property
    def version(self) -> str:
        """The version of the policy's weights."""
        return f"{self.run}-{self.step}"

    @property
    def has_policy(self) -> bool:
        """Whether the engine draws with the policy itself."""
        return self.settings.engine == "transformers"

    def draw(
        self, examples: Sequence[Example], *, greedy: bool = False, record: bool = True, apart: bool = False
    ) -> Rollout:
        """One completion for each example (repeat one to sample it several times), sampled or greedy; see `ask`."""
        return self.finish(self.ask(examples, greedy=greedy, record=record, apart=apart))

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

    @_of_the_engine()
    def start(self, draw: Draw, numbers: dict[str, float]) -> None:
        """Have it drawn in another thread while the policy is updated; `finish` does the rest, and all if it must.

        It must where the engine is gone: the update does not wait for it.
        """
        self._ready(numbers, wait=False)
        if self.sent is None:
            return
        version, step = self.sent, self.step  # of now: the policy may be updated before the thread comes to it

        def work() -> None:
            try:
                with beside_trainer():
                    self._run(draw, version, step)
            except BaseException as error:
                draw.error = error

        draw.thread = Thread(target=work, name="fastrl-draw", daemon=True)
        draw.thread.start()
        self.begun = draw

    @_of_the_engine()
    def finish(self, draw: Draw, numbers: dict[str, float] | None = None) -> Rollout:
        """Draw what is missing, and return all of it. Adds the seconds. Raises EngineLost if the engine cannot."""
        numbers = {} if numbers is None else numbers
        with self.world.working("time/generate", numbers):
            self._settle()
        failures, missing = 0, self._left(draw)
        while missing:
            self._ready(numbers)
            with self.world.working("time/generate", numbers):
                with unsharded(self.policy.model) if self.has_policy else nullcontext():
                    errors = self.world.together(lambda: self._absence(draw))
                before, missing = missing, self._left(draw)
                failures = 1 if missing < before else failures + 1
                self._interrupted(draw, errors, missing, failures)
        with self.world.working("time/generate", numbers):
            parts = self.world.together(lambda: self._assembled(draw))
            return join([part for part in parts if part is not None])

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

    # --- weights ----------------------------------------------------------------------------------------------------

    def _ready(self, numbers: dict[str, float], *, wait: bool = True) -> None:
        """Wake the engine and give it the policy's weights, unless it has them; with `wait` it has them then."""
        with nullcontext() if self.has_policy else self.world.working("time/weights", numbers):
            if self.sent == self.version:
                return
            whole = None
            if is_sharded(self.policy.model) and not self.has_policy:
                whole = whole_on_main(merged_weights(self.policy), self.world)
            if self.asleep and self.policy.device.type == "cuda":
                torch.cuda.empty_cache()  # what torch keeps of the update, the engine cannot have
            weights = PolicyWeights(self.policy, whole=whole)
            self.asleep, self.sent = self.world.first(lambda: self._give(weights, wait))
        if isinstance(self.engine, Turns) and self.sent is not None:
            self.engine.use(self.sent)

    def _give(self, weights: PolicyWeights, wait: bool) -> tuple[bool, str | None]:
        """Give the engine the weights; returns whether it is asleep then, and the version that it has.

        Waits for one that does not answer, or without `wait` tries once. Raises EngineLost if it stays away for
        rollout.timeout, fails again and again, or a signal asks the run to end meanwhile.
        """
        deadline, failures, said, asleep = time.monotonic() + self.settings.timeout, 0, False, self.asleep
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

    def _settle(self) -> None:
        """Wait for the other thread, if there is one. Raises what ended it, unless that was the engine's absence."""
        draw, self.begun = self.begun, None
        if draw is None or draw.thread is None:
            return
        draw.thread.join()

        def absence() -> EngineUnavailable | None:
            if draw.error is None or isinstance(draw.error, EngineUnavailable):
                return draw.error
            raise draw.error

        self._interrupted(draw, self.world.together(absence), self._left(draw))

    def _left(self, draw: Draw) -> int:
        """How many requests have no completions yet, of all ranks."""
        return sum(self.world.gathered(len(draw.missing)))

    def _absence(self, draw: Draw) -> EngineUnavailable | None:
        """Draw this rank's missing completions; returns the engine's absence if that ended it."""
        try:
            self._run(draw, self.sent, self.step)
        except EngineUnavailable as error:
            return error
        return None

    def _interrupted(
        self, draw: Draw, errors: Sequence[EngineUnavailable | None], left: int, failures: int = 1
    ) -> None:
        """Say that the engine is gone, if it is for any rank; what it has of the policy is not known then."""
        error = next(filter(None, errors), None)
        if error is None:
            return
        _check_failures(failures, error)
        self.sent = None
        say(f"{error}; {len(draw.requests) - left} of {len(draw.requests)} prompts have their completions")

    def _run(self, draw: Draw, expected: str | None, step: int) -> None:
        """Draw what is missing, with this version of the weights, until all is there or the engine fails."""
        missing = draw.missing
        if not missing:
            return
        started = time.perf_counter()
        try:
            for index, completions in self.engine.generate([draw.requests[i] for i in missing], draw.sampling):
                check_weights(completions, expected)
                check_completions(completions, draw.requests[missing[index]], self.policy.vocabulary)
                draw.done[missing[index]], draw.steps[missing[index]] = completions, step
        finally:
            if not self.has_policy:
                draw.numbers["time/engine"] += time.perf_counter() - started
            if isinstance(self.engine, Turns):
                for name, value in self.engine.drain().items():
                    draw.numbers[name] += value
        if draw.missing:  # or it would be asked for them forever
            raise wrong(f"the completions of {len(missing) - len(draw.missing)} of {len(missing)} prompts")

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
    for _, same in groupby(examples, key=id):
        first, *others = same
        yield first, 1 + len(others)
