"""Rewards for reversing digits: ``completions[i]`` should be ``answer[i]`` and nothing else."""


def reward(prompts: list[str], completions: list[str], answer: list[str], **_: object) -> list[float]:
    """The fraction of positions that hold the right digit, plus 1 for an exact answer: from 0 to 2.

    The fraction is what makes learning from scratch possible: a random answer is exact once in a few thousand tries.
    """
    fractions = [
        sum(a == b for a, b in zip(completion, right, strict=False)) / max(len(completion), len(right))
        for completion, right in zip(completions, answer, strict=True)
    ]
    return [fraction + (fraction == 1) for fraction in fractions]


def exact_match(prompts: list[str], completions: list[str], answer: list[str], **_: object) -> list[float]:
    """1 for the right answer, else 0."""
    return [float(completion == right) for completion, right in zip(completions, answer, strict=True)]
