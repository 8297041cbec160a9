"""Draws rollouts from an engine: gives it the policy's weights, waits for it when it dies, checks what it returns."""

import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import count, groupby
from threading import Thread

import torch

from fastrl.base.errors import UserError
from fastrl.base.terminal import say
from fastrl.models.patching import is_sharded
from fastrl.rewards.foreign import beside_trainer
from fastrl.training.batches.rollout import Rollout, join
from fastrl.training.config.sampling import RolloutConfig
from fastrl.training.data.examples import Example
from fastrl.training.engines.completions import Draw, check_completions, check_weights, wrong
from fastrl.training.engines.protocol import Engine, EngineFailed, EngineLost, EngineUnavailable, Request, Sampling
from fastrl.training.engines.turns import Turns
from fastrl.training.engines.weights import PolicyWeights, merged_weights
from fastrl.training.models.policy import Policy
from fastrl.training.parallel.seeds import seed_of
from fastrl.training.parallel.shard import unsharded, whole_on_main
from fastrl.training.parallel.world import ALONE, World
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
        self.has_policy = settings.engine == "transformers"  # the engine draws with the policy itself
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

    def draw(self, examples: Sequence[Example], **how: bool) -> Rollout:
        """One completion for each example (repeat one to sample it several times); see `ask`."""
        return self.finish(self.ask(examples, **how))

    def ask(
        self, examples: Sequence[Example], *, greedy: bool = False, record: bool = True, apart: bool = False
    ) -> Draw:
        """What is to be drawn, sampled or greedy; nothing is yet.

        With `apart` it is no part of the run: its seeds are the same each time, and none of the run's are used up.
        """
        sampling = Sampling.of(self.settings, self.policy.eos_token_ids, greedy, record)
        requests, series = [], ["apart"] if apart else []
        number = first = 0 if apart else self.drawn
        for example, n in ((first, 1 + len(list(same))) for _, (first, *same) in groupby(examples, key=id)):
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
            with beside_trainer():
                self._try(draw, version, step)

        draw.thread = Thread(target=work, name="fastrl-draw", daemon=True)
        draw.thread.start()
        self.begun = draw

    @_of_the_engine()
    def finish(self, draw: Draw, numbers: dict[str, float] | None = None) -> Rollout:
        """Draw what is missing, and return all of it. Adds the seconds. Raises EngineLost if the engine cannot."""
        numbers = {} if numbers is None else numbers
        with self.world.working("time/generate", numbers):
            begun, self.begun = self.begun, None
            if begun is not None and begun.thread is not None:
                begun.thread.join()  # an engine's calls do not overlap, nor may its policy change
                self._settle(begun)
        failures = 0
        while missing := sum(self.world.gathered(len(draw.missing))):
            self._ready(numbers)
            with self.world.working("time/generate", numbers):
                with unsharded(self.policy.model) if self.has_policy else nullcontext():
                    self._try(draw, self.sent, self.step)
                failures = self._settle(draw, missing, failures)
        with self.world.working("time/generate", numbers):
            parts = self.world.together(lambda: draw.rollout(self.policy))
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
            self.sent = self.world.first(lambda: self._give(weights, wait))
            self.asleep = False  # one that sleeps is always waited for: it cannot draw ahead
        if isinstance(self.engine, Turns) and self.sent is not None:
            self.engine.use(self.sent)

    def _give(self, weights: PolicyWeights, wait: bool) -> str | None:
        """Give the engine the weights; returns the version that it has then.

        Waits for one that does not answer, or without `wait` tries once. Raises EngineLost if it stays away for
        rollout.timeout, fails again and again, or a signal asks the run to end meanwhile.
        """
        deadline, failures = time.monotonic() + self.settings.timeout, 0
        for tries in count():
            try:
                if self.asleep:
                    self.engine.wake_up()
                    self.asleep = False
                self.engine.update_weights(self.version, weights)
                break
            except EngineUnavailable as error:
                self.gone = True
                if not wait:
                    say(f"{error}; it is asked again after the update")
                    return None
                failures = failures + 1 if isinstance(error, EngineFailed) else 0
                _check_failures(failures, error)
                left = deadline - time.monotonic()
                if self.signals:
                    raise EngineLost(f"{self.signals[0]} while waiting for the engine: {error}") from error
                if left <= 0:
                    raise EngineLost(
                        f"rollout.timeout: {error}; waited {self.settings.timeout:g} s for it, then gave up; start it"
                    ) from error
                if not tries:
                    say(f"{error}; trying again for up to {left:.0f} s")
                time.sleep(min(PAUSE, left))
        if self.gone:
            say("the engine is there; going on")
            self.gone = False
        return self.version

    # --- completions ------------------------------------------------------------------------------------------------

    def _try(self, draw: Draw, expected: str | None, step: int) -> None:
        """Draw this rank's missing completions with this version of the weights; `_settle` says what came of it."""
        try:
            self._run(draw, expected, step)
        except BaseException as error:
            draw.error = error

    def _settle(self, draw: Draw, before: int = 0, failures: int = 0) -> int:
        """Keep what a try has drawn of `before` requests. Returns the number of tries in a row that drew nothing.

        Raises what ended it on any rank, or says it if that was the engine's absence: then what it has of the policy is
        not known. Raises EngineLost if that was so too often in a row.
        """

        def absence() -> EngineUnavailable | None:
            error, draw.error = draw.error, None
            if error is None or isinstance(error, EngineUnavailable):
                return error
            raise error

        error = next(filter(None, self.world.together(absence)), None)
        left = sum(self.world.gathered(len(draw.missing)))
        failures = failures + 1 if left == before else 1
        if error is not None:
            _check_failures(failures, error)
            self.sent = None
            say(f"{error}; {len(draw.requests) - left} of {len(draw.requests)} prompts have their completions")
        return failures

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
                draw.done[missing[index]] = completions, step
        finally:
            if not self.has_policy:
                draw.numbers["time/engine"] += time.perf_counter() - started
            if isinstance(self.engine, Turns):
                for name, value in self.engine.drain().items():
                    draw.numbers[name] += value
        if draw.missing:  # or it would be asked for them forever
            raise wrong(f"the completions of {len(missing) - len(draw.missing)} of {len(missing)} prompts")


def _check_failures(count: int, error: EngineUnavailable) -> None:
    if count == FAILURES:
        raise EngineLost(
            f"rollout.engine: {error}; that was {FAILURES} times in a row, though the engine answers in between; its "
            "own log says more"
        ) from error
