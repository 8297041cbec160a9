"""The price of length: a reward to add to the task's own, with a small weight."""


def length_cost(prompts: list[str], completions: list[str], **_: object) -> list[float]:
    """Minus the number of characters."""
    return [-float(len(completion)) for completion in completions]
