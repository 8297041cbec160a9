"""The tables of datasets: where rows come from, and how a row's prompt becomes the model's input."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from fastrl.training.config.settings import Location, Section, looks_like_path

# What ends so is a file's path, whether it exists or not.
FILES = (".jsonl", ".json", ".parquet")
_LOCATION = Location(hub=True, suffixes=FILES)
# A config that is made in Python may have a Path, as other locations do.
_AS_TEXT = BeforeValidator(lambda path: str(path) if isinstance(path, Path) else path)
# Arguments of apply_chat_template that decide what it returns.
_OWN_ARGUMENTS = ("conversation", "tokenize", "add_generation_prompt", "continue_final_message")


def is_file(path: str) -> bool:
    """Whether a dataset's path is that of a file, which may be missing, and not a directory or a hub's name."""
    return Path(path).is_file() or (not Path(path).exists() and (path.endswith(FILES) or looks_like_path(path)))


@dataclass(frozen=True)
class Source:
    """Where a dataset's rows come from. `fields` maps the names that columns get to those that they have."""

    path: str
    subset: str | None = None
    split: str = "train"
    fields: Mapping[str, str] = field(default_factory=dict)
    streaming: bool = False  # a hub's dataset is read over the network as it is asked for, and not stored

    @property
    def name(self) -> str:
        """The dataset in messages."""
        if is_file(self.path):
            return self.path
        return f"{self.path} ({self.split if self.subset is None else f'{self.subset}, {self.split}'})"


class DatasetConfig(Section):
    """The rows."""

    path: Annotated[str, _AS_TEXT, _LOCATION]
    """The rows: a JSONL file, a .parquet file, or the name or directory of a dataset on the Hugging Face hub (the last
    two need the extra datasets). Each row has a field "prompt", a string or chat messages, and the fields that the
    command reads beside it."""
    subset: str | None = None
    """The subset (config) of a hub's dataset."""
    split: str | None = None
    """The split of a hub's dataset. The default is train."""
    fields: dict[str, str] = Field({})
    """New names of columns, such as { prompt = "question" }. Columns that are not named here keep their names."""
    system_prompt: str | None = None
    """A system message before the prompt. A prompt that is a string becomes a user's message behind it. An empty text
    adds no system message, and a string becomes a user's message alone."""
    chat_template_kwargs: dict[str, Any] = Field({})
    """Arguments of the tokenizer's chat template, such as { enable_thinking = false }."""

    @property
    def paths(self) -> list[str]:
        """Every dataset that is given."""
        return [self.path]

    @property
    def source(self) -> Source:
        """Where the rows come from."""
        return self.source_of(self.path, self.split or "train")

    def source_of(self, path: str, split: str) -> Source:
        """Where rows of the same form come from."""
        return Source(path, self.subset, split, self.fields)

    def conflicts(self) -> dict[str, Any]:
        path = self.path
        return {
            f"path: expected a file or the name of a dataset, got {path!r}": not path.strip(),
            f"split: a file has no splits, so leave it out; path is {path}": self.split is not None and is_file(path),
            f"subset: a file has no subsets, so leave it out; path is {path}": (
                self.subset is not None and all(map(is_file, self.paths))
            ),
        } | {
            f'chat_template_kwargs: "{name}" is not for a dataset to choose; leave it out': True
            for name in _OWN_ARGUMENTS
            if name in self.chat_template_kwargs
        }


class PromptsConfig(DatasetConfig):
    """Prompts that completions are sampled for."""

    max_prompt_tokens: int | None = Field(None, ge=1)
    """The most tokens of a prompt. The default, and the limit in any case, is what rollout.max_new_tokens leaves of the
    context of the model and of its teacher."""
    overlong_prompts: Literal["error", "drop"] = "error"
    """What happens to longer prompts. error: the run stops and names the first one; drop: they are left out and
    counted."""


class HeldOutConfig(DatasetConfig):
    """The rows, and held-out ones."""

    eval_path: Annotated[str | None, _AS_TEXT, _LOCATION] = None
    """Held-out rows of the same form, for evaluation. The default is path if eval_split is given, else there are
    none."""
    eval_split: str | None = None
    """The split of a hub's dataset with the held-out rows. With an eval_path the default is test."""

    @property
    def paths(self) -> list[str]:
        """Every dataset that is given."""
        return [self.path, *([self.eval_path] if self.eval_path is not None else [])]

    @property
    def eval_source(self) -> Source | None:
        """Where the held-out rows come from."""
        if self.eval_path is None and self.eval_split is None:
            return None
        return self.source_of(self.eval_path or self.path, self.eval_split or "test")

    def conflicts(self) -> dict[str, Any]:
        return super().conflicts() | {
            "eval_split: a file has no splits; leave it out, and name held-out rows by eval_path": (
                self.eval_split is not None and is_file(self.paths[-1])
            )
        }
