"""`fastrl sample`: completions of a file of prompts with their rewards, or the best of them (RAFT, best-of-n).

One line per completion: the prompt row's fields, "completion", "reward" (null without a [reward] table), "rewards" by
function if there are several, and "truncated" for a completion that did not end with EOS. `fastrl sft` trains on it as
it is.
"""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import islice

from tqdm import tqdm

from fastrl.base.errors import UserError
from fastrl.base.json_text import to_json
from fastrl.training.batches.rollout import completion_texts
from fastrl.training.config.stages import SampleConfig
from fastrl.training.data.digest import json_value
from fastrl.training.data.examples import Example, Room, load_examples
from fastrl.training.data.prompts import PromptFormat
from fastrl.training.engines.choice import make_sampler
from fastrl.training.engines.sampler import CompletionSampler
from fastrl.training.models.decoder import max_positions
from fastrl.training.models.policy import Policy, load_policy
from fastrl.training.models.rotary import fix_frequencies
from fastrl.training.parallel.machine import cpu_threads, start
from fastrl.training.rewards.model import make_rewards
from fastrl.training.rewards.scoring import RewardFunctions, Rewards
from fastrl.training.run.lock import sole_writer

# The fields of a line besides the prompt row's own.
WRITTEN = ("completion", "reward", "rewards", "truncated")


@dataclass(frozen=True)
class Completion:
    """One sampled completion."""

    text: str
    reward: float | None
    rewards: dict[str, float | None]
    truncated: bool

    def line(self, example: Example) -> str:
        """The line of the output, including the fields of its prompt's row."""
        row = {"prompt": example.prompt, **example.columns, "completion": self.text, "reward": self.reward}
        several = {"rewards": self.rewards} if len(self.rewards) > 1 else {}
        row = {**row, **several, "truncated": self.truncated}
        return to_json(row, default=json_value) + "\n"


@dataclass
class Tally:
    """The totals that are printed at the end."""

    rewards: list[float] = field(default_factory=list)
    prompts: int = 0
    solved: int = 0
    lines: int = 0
    failures: dict[str, int] = field(default_factory=dict)

    def add(self, group: list[Completion], written: int) -> None:
        """Count the completions of a prompt, of which `written` were written."""
        rewards = [completion.reward for completion in group if completion.reward is not None]
        self.rewards += rewards
        self.prompts += 1
        self.solved += any(reward >= 1 for reward in rewards)
        self.lines += written

    def __str__(self) -> str:
        failed = "".join(f", {name} {count}" for name, count in self.failures.items())
        if not self.rewards:
            return f"{self.prompts} prompts, no completion has a reward{failed}"
        mean = sum(self.rewards) / len(self.rewards)
        passed = f"{self.solved / self.prompts:.4f} (prompts with a completion of reward 1 or more)"
        return f"{self.prompts} prompts, mean reward {mean:.4f}, pass rate {passed}{failed}"


def best_of(group: list[Completion], count: int) -> list[Completion]:
    """The `count` distinct texts with the highest rewards, the first of equal ones; none that was cut off."""
    whole = [completion for completion in group if completion.reward is not None and not completion.truncated]
    distinct: dict[str, Completion] = {}
    for completion in sorted(whole, key=lambda completion: -(completion.reward or 0.0)):
        distinct.setdefault(completion.text, completion)
    return list(distinct.values())[:count]


def sample(config: SampleConfig) -> Tally:
    """Run the stage. Raises UserError before anything is sampled for input that cannot be used."""
    output = config.output.path
    lock = output.with_name(f".{output.name}.lock")
    with sole_writer(output, lock, "sample", "output.path"), cpu_threads(config.training.threads), ExitStack() as stack:
        if output.exists() and not config.output.overwrite:
            raise UserError(f"{output}: is there already; choose another --output.path, or add --output.overwrite true")
        device = start(config.training)
        functions = stack.enter_context(closing(RewardFunctions(config.reward)))
        rewards = make_rewards(config.reward, functions, device, config.model.trust_remote_code)
        policy = load_policy(config.model, device)
        room = Room.of(config.data, max_positions(policy.model), config.rollout.max_new_tokens)
        prompts = PromptFormat.of(config.data, policy.tokenizer)
        examples, _ = load_examples(config.data.source, prompts, room)
        functions.check(examples)
        for name in WRITTEN:
            if name in examples[0].columns:
                raise UserError(f'{examples[0].source}: the field name "{name}" is taken by what is written')
        longest = max(len(example.token_ids) for example in examples) + config.rollout.max_new_tokens
        fix_frequencies(policy.model, longest)
        template = config.data.chat_template_kwargs
        sampler = make_sampler(policy, config.rollout, config.training.seed, longest, template)
        unfinished = output.with_name(f"{output.name}.unfinished")
        try:
            file = unfinished.open("w", encoding="utf-8")
        except OSError as error:
            raise UserError(f"{output}: cannot write the output: {error}") from error
        tally, best, count = Tally(), config.output.best, config.rollout.num_generations
        with file, tqdm(desc="sample", unit="prompt", total=len(examples), disable=None) as bar:
            for first in range(0, len(examples), config.rollout.prompts_per_step):
                chunk = examples[first : first + config.rollout.prompts_per_step]
                generated = _sampled(policy, sampler, rewards, [example for example in chunk for _ in range(count)])
                for example in chunk:
                    group = list(islice(generated, count))
                    chosen = group if best is None else best_of(group, best)
                    file.writelines(completion.line(example) for completion in chosen)
                    tally.add(group, len(chosen))
                file.flush()
                bar.update(len(chunk))
        tally.failures = {name: int(count) for name, count in functions.failures("reward").items() if count}
        unfinished.replace(output)
    return tally


def _sampled(
    policy: Policy, sampler: CompletionSampler, rewards: Rewards, examples: list[Example]
) -> Iterator[Completion]:
    """A completion of each example, with its rewards."""
    rollout = sampler.draw(examples, record=False)
    texts = completion_texts(policy, rollout)
    totals, parts = rewards.parts(examples, texts)
    assert rollout.ended is not None  # an engine says it
    ended = rollout.ended.tolist()
    for i, text in enumerate(texts):
        yield Completion(text, totals[i], {name: values[i] for name, values in parts.items()}, not ended[i])


def main(config: SampleConfig) -> int:
    """`fastrl sample`: sample, print what was written where, and return the exit status."""
    tally = sample(config)
    print(f"sample: {tally}\n{tally.lines} completions: {config.output.path}")
    return 0
