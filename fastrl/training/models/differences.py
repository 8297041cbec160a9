"""Which weights of a directory are not those of the model that its config describes."""

import re
from collections.abc import Iterable
from typing import Any

from fastrl.base.errors import UserError


def check_weights(name: str, model: Any, info: dict[str, Any], needed: str) -> None:
    """Raise UserError unless exactly the model's weights were loaded, among names that begin with `needed`."""
    missing, unexpected = (
        {key for key in info[kind] if key.startswith(needed)} for kind in ("missing_keys", "unexpected_keys")
    )
    lines = []
    if missing:
        lines.append(f"missing, and would start at random: {listed(missing)}")
    if unexpected:
        lines.append(f"left over, without a place in the model: {listed(unexpected)}")
    shapes: dict[str, list[str]] = {}
    for key, actual, expected in info["mismatched_keys"]:
        shapes.setdefault(f"{tuple(actual)}, expected {tuple(expected)}", []).append(key)
    for text, keys in shapes.items():
        lines.append(f"another shape: {listed(keys)} {text}")
    if not lines:
        return
    vocabulary = model.get_input_embeddings()
    names = {key for key, parameter in model.named_parameters() if parameter is getattr(vocabulary, "weight", None)}
    if names & {key for key, *_ in info["mismatched_keys"]}:
        lines[-1] += f"; its config has vocab_size {model.config.get_text_config().vocab_size}"
    kind = type(model).__name__
    raise UserError(
        f"{name}: the weights are not those of the {kind} that its config describes\n  " + "\n  ".join(lines)
    )


def listed(names: Iterable[str]) -> str:
    """Names of weights, with those that differ only in numbers as one: `model.layers.{0-2,5}.mlp.weight`."""
    groups: dict[tuple[str, ...], list[list[int]]] = {}
    for name in names:
        parts = re.split(r"(?<=\.)(\d+)(?=\.|$)", name)
        groups.setdefault(tuple(parts[::2]), []).append([int(number) for number in parts[1::2]])
    merged = []
    for texts, numbers in groups.items():
        slots = [_ranges(set(slot)) for slot in zip(*numbers, strict=True)]
        merged.append("".join(text + slot for text, slot in zip(texts, [*slots, ""], strict=True)))
    return ", ".join(sorted(merged))


def _ranges(numbers: set[int]) -> str:
    """Numbers as ranges in braces; a single number without braces."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return texts[0] if len(numbers) == 1 else "{" + ",".join(texts) + "}"
