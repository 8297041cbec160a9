"""What a model and a dataset look like: what the rows are for, which reward reads their answers, how long they are.

Of the model its config and its tokenizer are read, of the dataset the first rows, by the code that the commands use.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import islice
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from fastrl.base.errors import UserError
from fastrl.rewards.answers import last_boxed, quantity, references
from fastrl.rewards.loading import load_reward
from fastrl.rewards.names import BUILT_IN
from fastrl.training.config.data import Source
from fastrl.training.config.sections import ModelConfig
from fastrl.training.data.examples import as_example, prompt_rows
from fastrl.training.data.prompts import PromptFormat
from fastrl.training.data.sources import rows_of, splits_of
from fastrl.training.data.turn_end import special_ids
from fastrl.training.models.decoder import max_positions
from fastrl.training.models.loading import load_skeleton, load_tokenizer
from fastrl.training.models.policy import check_token_ids
from fastrl.training.rewards.scoring import check_function
from fastrl.training.stages import dpo, reward_model, sft
from fastrl.training.stages.rows import Reader

ROWS = 1000  # that are looked at
# Well-known names of columns, in the order in which they are taken.
PROMPTS = ("prompt", "question", "problem", "instruction", "query", "messages", "input")
COMPLETIONS = ("completion", "response", "output")
ANSWERS = ("answer", "solution", "final_answer", "ground_truth", "target", "label")
MATH, EXACT = f"{BUILT_IN}math", f"{BUILT_IN}exact"
# How a chat model is asked to mark the answer that the reward compares.
_ASKED = {
    MATH: r"Reason step by step, and put the final answer within \boxed{}.",
    EXACT: "Reason step by step, and put the final answer between <answer> and </answer>.",
}
_SHORT = 8  # words of an answer that a completion may repeat as it is
# Command -> a row's prompt with each of its answers, as tokens.
_SEQUENCES = {
    "sft": lambda *row: [sft.SFT.parse(*row).all],
    "dpo": lambda *row: [x.all for x in dpo.PreferenceStage.completions([dpo.PreferenceStage.parse(*row)])],
    "reward-model": lambda *row: reward_model.parse(*row).sequences,
}

Rows = Sequence[tuple[str, dict[str, Any]]]  # with their places


class Task(NamedTuple):
    """What the rows are for: `command`, because of `why`."""

    command: str
    why: str
    fields: dict[str, str]  # as data.fields
    reward: str | None = None  # for train: the function, or None if it is to be written


class Lengths(NamedTuple):
    """Numbers of tokens over the rows."""

    shortest: int
    median: int
    most: int  # the 95th percentile
    longest: int

    @classmethod
    def of(cls, numbers: Sequence[int]) -> "Lengths":
        """Those of these numbers."""
        ordered, last = sorted(numbers), len(numbers) - 1
        return cls(ordered[0], ordered[last // 2], ordered[last * 95 // 100], ordered[last])

    def __str__(self) -> str:
        return f"{self.shortest:,} to {self.longest:,} tokens, median {self.median:,}, 95 % up to {self.most:,}"


@dataclass(frozen=True)
class Look:
    """What was seen."""

    task: Task
    model: Any  # without weights
    tokenizer: PreTrainedTokenizerBase
    rows: Rows
    form: str  # what the prompts are
    system_prompt: str | None  # as data.system_prompt
    prompts: Lengths
    others: Lengths | None  # of the answers that train's reward reads, if any; else of prompts with their answers
    held_out: str | None  # a split of the dataset

    @property
    def columns(self) -> str:
        """Their names in the dataset."""
        return ", ".join(self.rows[0][1])

    @property
    def is_chat(self) -> bool:
        """Whether the chat template writes what the model reads."""
        return self.system_prompt is not None or self.form == "chat messages"


def look(name: str, source: Source, reward: str | None) -> Look:
    """Look at a model and a dataset; `reward` is the function that the user wants.

    Raises UserError for what no command can use as it is.
    """
    rows = list(islice(rows_of(source), ROWS))
    task = task_of(rows, reward)
    config = ModelConfig(path=name)
    tokenizer, model = load_tokenizer(config), load_skeleton(config)
    check_token_ids([*tokenizer.get_vocab().values()], len(model.get_input_embeddings().weight), name)
    system_prompt, form = _system_prompt(rows[0][1][task.fields.get("prompt", "prompt")], tokenizer, task.reward)
    prompts = PromptFormat(tokenizer, system_prompt)
    lengths, others = _lengths(task, replace(source, fields=task.fields), prompts, max_positions(model))
    held_out = [split for split in splits_of(source) if split != source.split and split in ("test", "validation")]
    return Look(
        task,
        model,
        tokenizer,
        rows,
        form,
        system_prompt,
        Lengths.of(lengths),
        Lengths.of(others) if others else None,
        min(held_out, default=None),
    )


def task_of(rows: Rows, reward: str | None) -> Task:
    """What rows are for. Raises UserError for rows that no command reads as they are."""
    where, row = rows[0]
    prompt, completion, answer = (
        next((name for name in names if name in row), "") for names in (PROMPTS, COMPLETIONS, ANSWERS)
    )
    if not prompt:
        expected, found = ", ".join(PROMPTS), ", ".join(row) or "no fields"
        raise UserError(f"{where}: no column with the prompt: expected one of {expected}; the row has {found}")
    last = row[prompt][-1] if isinstance(row[prompt], list) and row[prompt] else None
    if isinstance(last, dict) and last.get("role") == "assistant":
        raise UserError(
            f"{where}: {prompt} ends with the answer: expected two columns, prompt = {prompt}[:-1] and completion = "
            f'{prompt}[-1]["content"]'
        )
    for place, other in rows if prompt == "instruction" else ():
        if other.get("input"):
            raise UserError(f"{place}: the prompt is in two columns, instruction and input: expected one, prompt")

    def task(command: str, why: str, function: str | None = None, **read: str) -> Task:
        fields = {name: column for name, column in {"prompt": prompt, **read}.items() if column not in ("", name)}
        return Task(command, why, fields, function)

    if reward is not None:
        return task("train", "--reward names a function", reward, **({"answer": answer} if reward in _ASKED else {}))
    if {"chosen", "rejected"} <= row.keys():
        return task("dpo", "the rows have chosen and rejected")
    if {"responses", "ranks"} <= row.keys():
        return task("reward-model", "the rows have responses and ranks")
    if completion:
        return task("sft", f"the rows have {prompt} and {completion}", completion=completion)
    if not answer or isinstance(row[answer], bool | dict | None):
        return task("train", f"the rows have {prompt}, and no answer that a built-in reward reads")
    compares, why = _comparison(rows, answer)
    if compares is None:
        return task("sft", why, completion=answer)
    return task("train", why, compares, answer=answer)


def _comparison(rows: Rows, column: str) -> tuple[str | None, str]:
    """The built-in reward that compares with such answers, and why; None if they are too long to be compared."""
    answers, formulas = [], 0
    for where, row in rows:
        try:
            answer = references({column: [row.get(column)]}, column, 1)[0][0]
        except ValueError as error:
            raise UserError(f"{where}: {error}") from error
        answers.append(answer)
        formulas += quantity(answer) is not None or last_boxed(str(row[column])) is not None
    if formulas >= 0.9 * len(answers):
        if find_spec("math_verify") is None:
            return EXACT, f"{column} holds numbers or formulas; for {MATH}, pip install 'math-verify>=0.9'"
        return MATH, f"{column} holds numbers or formulas"
    if Lengths.of([len(answer.split()) for answer in answers]).most <= _SHORT:
        return EXACT, f"{column} holds short texts"
    return None, f"{column} holds texts that are too long to be compared"


def _system_prompt(prompt: Any, tokenizer: PreTrainedTokenizerBase, reward: str | None) -> tuple[str | None, str]:
    """What goes before such a prompt, as data.system_prompt, and what the prompts are."""
    if not isinstance(prompt, str):
        return None, "chat messages"
    if tokenizer.chat_template is None:
        return None, "texts, for a tokenizer without a chat template"
    special = {str(tokenizer.convert_ids_to_tokens(token)) for token in special_ids(tokenizer)} - {""}
    if any(token in prompt for token in special):
        return None, "texts with special tokens, as a chat template writes them"
    asked, form = _ASKED.get(reward or "", ""), "texts, which become a user's messages in the chat template"
    chat = PromptFormat(tokenizer, asked)
    try:
        chat.token_ids(chat.prompt(prompt, ""), "")
    except UserError:  # some templates refuse a system message
        return "", form
    return asked, form


def _lengths(task: Task, source: Source, prompts: PromptFormat, context: int | None) -> tuple[list[int], list[int]]:
    """The tokens of each row's prompt, and those of `Look.others`.

    Raises UserError for a row, or a reward function, that the command would refuse.
    """
    if task.command == "train":
        examples = [as_example(prompts, *row) for row in islice(prompt_rows(source, prompts), ROWS)]
        if task.reward is not None:
            check_function(load_reward(task.reward, {}), examples)
        answers = [str(example.columns["answer"]) for example in examples if "answer" in example.columns]
        return [len(x.token_ids) for x in examples], [len(prompts.tokenizer(text)["input_ids"]) for text in answers]
    reader, first, whole = Reader(prompts, context), [], []
    for where, row in islice(rows_of(source), ROWS):
        whole.append(max(map(len, _SEQUENCES[task.command](reader, row, where))))
        first.append(len(prompts.token_ids(prompts.prompt(row["prompt"], where), where, row.get("tools"))))
    return first, whole
