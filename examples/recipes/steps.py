"""Rewards for the steps of an answer: each digit of the reversed number is one step."""


def steps(prompts: list[str], completions: list[str], answer: list[str], **_: object) -> list[list[tuple[int, float]]]:
    """For each completion, a pair (end, reward) per character: 1 for the right digit in its place, else 0."""
    return [
        [(end, float(right[end - 1 : end] == character)) for end, character in enumerate(completion, start=1)]
        for completion, right in zip(completions, answer, strict=True)
    ]
