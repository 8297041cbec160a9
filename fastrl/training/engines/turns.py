"""Completions of several turns: a function answers what the policy wrote, and the policy goes on from there.

    def tools(prompts, completions, **columns) -> list[str | list[dict] | None]

`completions` are those whose turn ended, with EOS or a stop string: their text so far, or for a chat prompt their
messages so far. Each is answered by None, which ends it; by a text, which is appended as it is; or for a chat prompt by
messages, which are appended as the chat template writes them. A function declared with `async def` is awaited. In
worker processes it is called with one completion at a time.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from fastrl import SamplingMask
from fastrl.base.errors import UserError
from fastrl.rewards.calls import show_sample
from fastrl.rewards.foreign import foreign_code
from fastrl.rewards.loading import load_reward
from fastrl.rewards.pool import WorkerPool
from fastrl.rewards.pooled import PooledFunction
from fastrl.rewards.transcript import Transcript
from fastrl.training.data.examples import Example
from fastrl.training.data.prompts import chat_text, described_tools
from fastrl.training.engines.completions import check_weights, wrong
from fastrl.training.engines.protocol import Completion, Engine, Request, Sampling
from fastrl.training.models.policy import Policy
from fastrl.training.parallel.seeds import seed_of
from fastrl.training.parallel.timing import timed

# Stands for what the policy wrote where the chat template renders an answer. Templates rewrite history (they drop the
# reasoning of earlier turns, say), so only what they write after it is used.
PLACE = "PLACE-OF-THE-POLICYS-MESSAGE"
WHAT = "rollout.tools"  # names the function in messages

Messages = Sequence[dict[str, Any]]
Answer = tuple[list[int], Messages]  # the tokens that are appended, and the messages that they are, if they are any


@dataclass
class Dialogue:
    """One completion, as far as it is there."""

    request: Request  # for the whole of it
    number: int  # among the request's completions
    token_ids: list[int] = field(default_factory=list)
    drawn: list[bool] = field(default_factory=list)  # of each token, whether the policy drew it
    logprobs: list[float] = field(default_factory=list)
    masks: list[SamplingMask] = field(default_factory=list)  # a turn's, an answer's, ...
    routed_experts: Any = None  # the last turn's record, which covers the whole sequence
    weights: str | None = None  # their version
    messages: list[dict[str, Any]] = field(default_factory=list)  # of a chat; the last one is the policy's
    begin: int = 0  # the first token of the last message
    turns: int = 0  # of the policy
    ended: bool = False  # the last turn, and not by the limit on the length
    waits: bool = True  # for the policy
    done: bool = False

    @property
    def room(self) -> int:
        """How many tokens may follow."""
        return self.request.max_tokens - len(self.token_ids)

    @property
    def example(self) -> Example:
        """The row of the data."""
        assert self.request.example is not None  # the trainer always says it
        return self.request.example

    @property
    def is_chat(self) -> bool:
        """Whether its prompt is a list of messages."""
        return not isinstance(self.example.prompt, str)

    def next_request(self) -> Request:
        """The request for the next turn."""
        name = f"{self.request.id}-{self.number}-{self.turns}"
        tokens = [*self.request.token_ids, *self.token_ids]
        return Request(name, tokens, 1, self.room, self.seed(), self.request.example)

    def seed(self, *what: str) -> int:
        """The seed of the next turn, or of `what` else is random in it."""
        return seed_of(self.request.seed, self.number, self.turns, *what)

    def add_turn(self, turn: Completion, policy: Policy) -> None:
        """Add what the policy wrote."""
        self.token_ids += turn.token_ids
        self.drawn += [True] * len(turn.token_ids)
        self.logprobs += [] if turn.logprobs is None else turn.logprobs
        self.masks += [] if turn.sampling_mask is None else [turn.sampling_mask]
        self.weights, self.routed_experts = turn.weights, turn.routed_experts
        self.ended, self.turns, self.waits = turn.ended, self.turns + 1, False
        if self.is_chat:
            self.messages[-1:] = [{"role": "assistant", "content": policy.text(self.token_ids[self.begin :])}]

    def add_answer(self, token_ids: Sequence[int], messages: Messages) -> None:
        """Add what a tool wrote."""
        self.token_ids += token_ids
        self.drawn += [False] * len(token_ids)
        self.logprobs += [0.0] * len(token_ids)
        if self.masks:
            offsets = torch.zeros(len(token_ids) + 1, dtype=torch.int64, device=self.masks[0].device)
            self.masks.append(SamplingMask(offsets[:0].int(), offsets))  # rows that are not recorded
        if messages:
            self.messages += [*map(dict, messages), {}]
            self.begin = len(self.token_ids)
        self.waits = True

    def text(self, policy: Policy) -> str:
        """All of it as `Policy.text` has it; a chat's with its messages."""
        text = policy.text(self.token_ids)
        return Transcript(text, [dict(message) for message in self.messages]) if self.is_chat else text

    def shown(self, policy: Policy) -> str:
        """It in an error message."""
        return show_sample(self.example, self.text(policy))

    def completion(self) -> Completion:
        """All of it, with what was recorded of every turn."""
        count = len(self.token_ids)
        return Completion(
            self.token_ids,
            self.ended,
            self.logprobs if len(self.logprobs) == count else None,
            SamplingMask.concat(self.masks) if sum(map(len, self.masks)) == count else None,
            self.routed_experts,
            self.weights,
            self.drawn,
            self.messages if self.is_chat else None,
        )


class Tools:
    """A user's function that answers turns."""

    def __init__(
        self, source: str, policy: Policy, template: Mapping[str, Any] | None = None, pool: WorkerPool | None = None
    ) -> None:
        """`source` is "path/to/file.py:function"; `template` holds arguments of the chat template.

        The function is the only one of the pool's; without a pool it is called here. Raises UserError if it cannot be
        imported.
        """
        self.source, self.policy, self.template, self.pool = source, policy, template or {}, pool
        self.function = load_reward(source, what=WHAT) if pool is None else PooledFunction(pool, 0, source)

    def __call__(self, dialogues: Sequence[Dialogue]) -> list[Answer | None]:
        """What follows each dialogue, or None where it ends.

        Raises UserError naming the function and the sample for an exception in it, and for what is no answer.
        """
        examples = [dialogue.example for dialogue in dialogues]
        texts = [dialogue.text(self.policy) for dialogue in dialogues]
        seeds = [dialogue.seed("tools") % 2**31 for dialogue in dialogues]  # NumPy's are below 2^32
        if isinstance(self.function, PooledFunction):
            answers = self.function.answers(examples, texts, seeds)
        else:
            with foreign_code(seeds[0]):
                answers = self.function.answers(examples, texts)
        return [self._checked(dialogue, answer) for dialogue, answer in zip(dialogues, answers, strict=True)]

    def _checked(self, dialogue: Dialogue, answer: Any) -> Answer | None:
        if answer is None:
            return None
        if isinstance(answer, str):
            return self._encoded(answer, dialogue), []
        if not dialogue.is_chat or not (isinstance(answer, list | tuple) and answer and all(map(_is_message, answer))):
            form = "a text, a list of messages (each with role and content)" if dialogue.is_chat else "a text"
            raise UserError(f"{self.source}: expected {form} or None, got {answer!r} for {dialogue.shown(self.policy)}")
        tokens, ends = self._encoded(self._rendered(dialogue, answer), dialogue), self.policy.eos_token_ids
        if dialogue.token_ids[-1] in ends and tokens[:1] and tokens[0] in ends:
            tokens = tokens[1:]  # the policy has ended its message itself
        return tokens, answer

    def _encoded(self, text: str, dialogue: Dialogue) -> list[int]:
        with self._blamed(dialogue, f"the tokenizer cannot read the answer {text!r}"):
            return list(self.policy.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _rendered(self, dialogue: Dialogue, answer: Messages) -> str:
        """What the chat template writes from the end of the policy's message to the beginning of its next one."""
        _, place, rest = self._template(dialogue, answer).partition(PLACE)
        kept = bool(place)
        contents = [message["content"] for message in answer]
        if kept and any(text is None or str(text).strip() not in rest for text in contents):  # left out, or quoted
            places = [{**message, "content": PLACE} for message in answer]
            kept = self._template(dialogue, places).count(PLACE) == 1 + len(answer)
        if not kept:
            raise UserError(
                f"{self.source}: the tokenizer's chat template leaves out "
                f"{'a message of' if place else 'what precedes'} the answer {answer!r}; try another role, such as "
                "user, or answer with a text"
            )
        return rest

    def _template(self, dialogue: Dialogue, answer: Messages) -> str:
        """The conversation up to the policy's next message, with PLACE for its last one."""
        prompt = dialogue.example.prompt
        assert not isinstance(prompt, str)  # the caller's check
        marked = [*prompt, *dialogue.messages[:-1], {"role": "assistant", "content": PLACE}, *answer]
        tools = described_tools(dialogue.example.columns.get("tools"), dialogue.example.source)
        options: dict[str, Any] = {"add_generation_prompt": True, **self.template, **tools}
        with self._blamed(dialogue, f"the tokenizer's chat template fails on the answer {answer!r}"):
            return chat_text(self.policy.tokenizer, marked, **options)

    @contextmanager
    def _blamed(self, dialogue: Dialogue, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # templates raise what they like, tokenizers nothing narrower for a foreign text
            raise UserError(f"{self.source}: {what} to {dialogue.shown(self.policy)}: {error}") from error


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message


class Turns:
    """An engine that draws completions of several turns from another engine.

    What is there of a completion outlives the other engine's absence, unless the weights have changed since.
    """

    def __init__(self, engine: Engine, tools: Tools, max_turns: int) -> None:
        self.engine, self.tools, self.max_turns = engine, tools, max_turns
        self.update_weights, self.sleep, self.wake_up = engine.update_weights, engine.sleep, engine.wake_up
        self.version: str | None = None
        self.begun: dict[str, list[Dialogue]] = {}  # by the request's id
        self.numbers: dict[str, float] = {}

    def use(self, version: str) -> None:
        """Go on with weights of this version; with other ones than before, what is not finished begins anew."""
        if version != self.version:
            self.begun.clear()
        self.version = version

    def drain(self) -> dict[str, float]:
        """The metrics since the last time: the seconds that tools took, and their calls that failed."""
        numbers, self.numbers = self.numbers, {}
        return numbers

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[tuple[int, list[Completion]]]:
        """Each request's completions once the last of them is complete."""
        left = dict(enumerate(requests))
        while left:
            self._draw(list(left.values()), sampling)
            self._answer([dialogue for request in left.values() for dialogue in self.begun[request.id]])
            for index, request in list(left.items()):
                if all(dialogue.done for dialogue in self.begun[request.id]):
                    del left[index]
                    yield index, [dialogue.completion() for dialogue in self.begun.pop(request.id)]

    def _draw(self, requests: Sequence[Request], sampling: Sampling) -> None:
        """The policy's next turn in all completions that wait for it."""
        asked: list[tuple[Request, list[Dialogue]]] = []  # whose next turn it is for
        for request in requests:
            dialogues = self.begun.setdefault(request.id, [Dialogue(request, i) for i in range(request.n)])
            if dialogues[0].turns:
                asked += [(dialogue.next_request(), [dialogue]) for dialogue in dialogues if dialogue.waits]
            else:  # the first turn of all
                asked.append((request, dialogues))
        answered = 0
        for index, turns in self.engine.generate([request for request, _ in asked], sampling) if asked else ():
            check_weights(turns, self.version)  # before one of old weights is kept for later turns
            for dialogue, turn in zip(asked[index][1], turns, strict=True):
                dialogue.add_turn(turn, self.tools.policy)
            answered += 1
        if answered < len(asked):
            raise wrong(f"the completions of {answered} of {len(asked)} prompts")

    def _answer(self, dialogues: Sequence[Dialogue]) -> None:
        """The tools' answer to each turn that ended, or the completion's end."""
        spoken = [dialogue for dialogue in dialogues if not dialogue.done and not dialogue.waits]
        for dialogue in spoken:
            dialogue.done = not dialogue.ended or dialogue.turns >= self.max_turns
        answered = [dialogue for dialogue in spoken if not dialogue.done]
        with timed("time/tools", self.numbers):
            answers = self.tools(answered) if answered else ()
        failures = {} if self.tools.pool is None else self.tools.pool.drain("tools")
        for name, count in failures.items():
            self.numbers[name] = self.numbers.get(name, 0.0) + count
        for dialogue, answer in zip(answered, answers, strict=True):
            if answer is None:
                dialogue.done = True
            elif len(answer[0]) >= dialogue.room:  # none would be left for the policy
                dialogue.done, dialogue.ended = True, False
            else:
                dialogue.add_answer(*answer)
