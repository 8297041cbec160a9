"""The rollouts of a run: the next prompts with their completions, drawn when they are needed or a step ahead."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from fastrl.training.batches.rollout import Rollout
from fastrl.training.config.sampling import RolloutConfig
from fastrl.training.data.examples import Example, PromptSampler
from fastrl.training.data.streaming import StreamSampler
from fastrl.training.engines.completions import Draw
from fastrl.training.engines.sampler import CompletionSampler
from fastrl.training.parallel.world import World


class Rollouts:
    """Takes prompts from the data and their completions from the engine, which gets the policy's weights before.

    With rollout.ahead the next step's completions are drawn in another thread while the policy is updated. Nothing of
    that is in a checkpoint: a resumed run draws the same prompts anew.
    """

    def __init__(
        self, prompts: PromptSampler | StreamSampler, completions: CompletionSampler, settings: RolloutConfig, last: int
    ) -> None:
        """`last` is the run's last step."""
        self.prompts, self.completions, self.settings, self.last = prompts, completions, settings, last
        self.begun: Draw | None = None
        self.before: dict[str, Any] = {}  # the state before what is begun

    def next(self, count: int, numbers: dict[str, float]) -> tuple[list[Example], Rollout]:
        """The next `count` prompts, each repeated for its completions, and these. Adds the phases' seconds."""
        draw, self.begun = self.begun or self._ask(count), None
        rollout = self.completions.finish(draw, numbers)
        if self.settings.sleep:
            self.completions.sleep()
        for name, value in _counted(draw.numbers, self.completions.world).items():
            numbers[name] = numbers.get(name, 0.0) + value
        return list(draw.examples), rollout

    def begin(self, step: int, numbers: dict[str, float]) -> None:
        """With rollout.ahead, have the completions of the step after this one drawn, with the weights of now.

        If the engine is gone, `next` asks for them, after the update and with the weights of then.
        """
        if self.settings.ahead and step < self.last:
            self.before = self.state()
            draw = self._ask(self.settings.prompts_per_step)
            self.completions.start(draw, numbers)
            self.begun = draw

    def evaluate(self, examples: Sequence[Example], *, greedy: bool = False) -> Rollout:
        """Completions for an evaluation, of the policy as it is."""
        rollout = self.completions.draw(examples, greedy=greedy, record=False, apart=True)
        if self.settings.sleep:
            self.completions.sleep()
        return rollout

    def _ask(self, count: int) -> Draw:
        examples = self.prompts.next(count)
        return self.completions.ask([example for example in examples for _ in range(self.settings.num_generations)])

    def state(self) -> dict[str, Any]:
        """The position in the data, and the completions drawn so far, as JSON values, before what is begun."""
        if self.begun is not None:
            return self.before
        return {"prompts": self.prompts.state(), "drawn": self.completions.drawn}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of the same run."""
        self.begun = None
        self.prompts.load(state["prompts"])
        self.completions.drawn = state["drawn"]


def _counted(numbers: Mapping[str, float], world: World) -> dict[str, float]:
    """The numbers of a draw: this rank's seconds, and the tools' calls that failed on all ranks."""
    added = Counter[str]()
    for own in world.gathered({name: count for name, count in numbers.items() if not name.startswith("time/")}):
        added.update(own)
    return {**numbers, **added}
