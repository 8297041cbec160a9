"""A newcomer's way: the first page is short, and leads to the answers of ten questions."""

from __future__ import annotations

import re

from doc_pages import links, page_of
from places import ROOT


def test_the_first_page_is_one_screen_with_four_doors() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text) <= 7000
    doors = text.split("## Where to start\n")[1].split("\n## ")[0]
    assert re.findall(r"(?m)^- \*\*(.+?)\.\*\*", doors) == [
        "Drop it into a trainer",
        "Bound the memory",
        "Train with it",
        "Check our numbers",
    ]


def test_ten_questions_are_answered_within_two_clicks() -> None:
    assert "docs/questions.md" in [link for _, link in links(page_of("README.md"))]
    text = (ROOT / "docs" / "questions.md").read_text(encoding="utf-8")
    answers = {part.partition("\n")[0]: part for part in text.split("\n## ")[1:]}
    asked = ("LoRA", "loss", "mask", "memory", "resume", "pack", "tensor parallelism", "precision", "metrics", "NaN")
    for word in asked:
        (question,) = (title for title in answers if re.search(rf"\b{word}", title))
        assert re.search(r"\]\([\w/.]+\.md(#[\w-]+)?\)", answers[question]), question
    assert len(answers) == len(asked)
