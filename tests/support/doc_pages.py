"""The Markdown pages of the repository as a reader's tools see them: code blocks, what is said about them, links.

A block is fenced and names its language. A comment in the line directly before a fence says something about it:

    <!-- not run: needs vLLM -->   a python block whose syntax and names alone are checked
    <!-- config: sft -->           a toml block of another command than `fastrl train`
    <!-- output -->                a text block that is what the block before it prints

A python or toml block that begins with a path in a comment, `# mine/config.toml`, is that file in the page's commands.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from places import ROOT

LANGUAGES = ("python", "toml", "sh", "text", "json", "jsonl")
_FENCE = re.compile(r"( *)(`{3,}|~{3,}) *([^`]*)$")
_NOTE = re.compile(r" *<!-- *(not run|config|output)\b *(?::(.*?))?-->$")
_ITEM = re.compile(r"( *)([-*+]|\d{1,9}[.)])( +|$)")


@dataclass(frozen=True)
class Block:
    """A code block of a page."""

    page: Page = field(repr=False)
    line: int
    "The line number of its fence."
    language: str
    "The first word of what follows the fence, or an empty text."
    text: str
    "Its lines, each with its end, without a list item's indentation."
    notes: dict[str, str]
    "The comments before the fence, by their kind."

    @property
    def where(self) -> str:
        return f"{self.page.name}:{self.line}"

    @property
    def output(self) -> Block | None:
        """The next block, if it is marked as what this one prints."""
        later = [block for block in self.page.blocks if block.line > self.line]
        return later[0] if later and "output" in later[0].notes else None


@dataclass(frozen=True)
class Page:
    """A page of Markdown, as it is in a file."""

    name: str
    "Its path in the repository."
    source: str = field(repr=False)

    @property
    def blocks(self) -> tuple[Block, ...]:
        return _read(self).blocks

    @property
    def faults(self) -> tuple[str, ...]:
        """What the rules on code blocks forbid, with the line of each."""
        return _read(self).faults

    @property
    def prose(self) -> tuple[tuple[int, str], ...]:
        """The lines outside of code blocks, with their numbers."""
        return _read(self).prose

    @property
    def files(self) -> dict[str, str]:
        """The files that the reader makes of blocks: those that begin with a path in a comment, by that path."""
        named = ((re.match(r"# ([\w./-]+\.(?:py|toml))\b", block.text), block.text) for block in self.blocks)
        return {name[1]: text for name, text in named if name is not None}

    @property
    def spans(self) -> list[tuple[int, str]]:
        """The code within the prose, with the lines where it begins."""
        numbers = [number for number, _ in self.prose]
        text = "\n".join(line for _, line in self.prose)
        return [(numbers[text.count("\n", 0, x.start())], " ".join(x[2].split())) for x in _CODE.finditer(text)]

    def of(self, *languages: str) -> list[Block]:
        """The blocks of these languages."""
        return [block for block in self.blocks if block.language in languages]


@cache
def page_of(name: str) -> Page:
    """The page with this path."""
    return Page(name, (ROOT / name).read_text(encoding="utf-8"))


@cache
def pages() -> tuple[Page, ...]:
    """Every page that people read, in the order of their paths."""
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")]
    found += [*ROOT.glob("examples/*/README.md"), *ROOT.glob("benchmarks/**/*.md")]
    return tuple(page_of(path.relative_to(ROOT).as_posix()) for path in sorted(found))


def with_blocks(*languages: str) -> list[Page]:
    """The pages that have a block of one of these languages."""
    return [page for page in pages() if page.of(*languages)]


class _Read(NamedTuple):
    blocks: tuple[Block, ...]
    faults: tuple[str, ...]
    prose: tuple[tuple[int, str], ...]


@cache
def _read(page: Page) -> _Read:
    lines = page.source.splitlines()
    blocks: list[Block] = []
    faults: list[str] = []
    prose: list[tuple[int, str]] = []
    items: list[int] = []  # where the text of each open list item begins
    begins = True  # whether an indented line would begin code here, not continue a paragraph
    number = 0
    while number < len(lines):
        line = lines[number]
        number += 1
        if fence := _FENCE.match(line):
            indent, marks, info = fence.groups()
            first = number
            while number < len(lines) and not re.match(rf" *{marks[0]}{{{len(marks)},}} *$", lines[number]):
                number += 1
            if number == len(lines):
                faults.append(f"{page.name}:{first}: this fence is never closed")
            text = "".join(re.sub(rf"^ {{0,{len(indent)}}}", "", inner) + "\n" for inner in lines[first:number])
            number += 1
            notes = dict(_notes(lines[: first - 1]))
            language = info.split()[0] if info.split() else ""
            blocks.append(Block(page, first, language, text, notes))
            faults += _wrong(blocks)
            begins = True
            continue
        if not line.strip():
            prose.append((number, line))
            begins = True
            continue
        indent_of = len(line) - len(line.lstrip(" "))
        item = _ITEM.match(line)
        while items and indent_of < items[-1] and (begins or item):
            items.pop()
        inside = indent_of - (items[-1] if items else 0)
        if begins and inside >= 4:
            faults.append(f"{page.name}:{number}: code by indentation; put it between fences that name its language")
            continue  # and the next line would be more of it
        prose.append((number, line))
        if item and inside < 4:
            items.append(item.end())
        if _NOTE.match(line) and not (number < len(lines) and _is_of(line, lines[number:])):
            faults.append(f"{page.name}:{number}: {line.strip()} must stand in the line directly before its fence")
        begins = line.lstrip().startswith(("#", "|"))
    return _Read(tuple(blocks), tuple(faults), tuple(prose))


def _is_of(note: str, rest: list[str]) -> bool:
    """Whether a fence follows a comment, with nothing but comments between."""
    following = next((line for line in rest if not _NOTE.match(line)), "")
    return _FENCE.match(following) is not None


def _notes(before: list[str]) -> Iterator[tuple[str, str]]:
    """The comments in the lines directly before a fence."""
    while before and (note := _NOTE.match(before[-1])):
        yield note[1], (note[2] or "").strip()
        before = before[:-1]


def _wrong(blocks: list[Block]) -> Iterator[str]:
    """What the rules forbid in the last of these blocks."""
    block = blocks[-1]
    if block.language not in LANGUAGES:
        yield f"{block.where}: a fence names one of {', '.join(LANGUAGES)}, got {block.language!r}"
    if "not run" in block.notes and (block.language != "python" or not block.notes["not run"]):
        yield f"{block.where}: `not run` is for python blocks, and has a reason: <!-- not run: needs vLLM -->"
    if "config" in block.notes and block.language != "toml":
        yield f"{block.where}: `config` is for toml blocks"
    if "output" in block.notes and (
        block.language != "text"
        or len(blocks) < 2
        or blocks[-2].language not in ("python", "sh")
        or "not run" in blocks[-2].notes
    ):
        yield f"{block.where}: `output` is for a text block after the python or sh block that prints it, which is run"


# --- headings and links -----------------------------------------------------------------------------------------------


def headings(page: Page) -> list[tuple[int, str]]:
    """The headings with their lines: what they read as, without emphasis and links."""
    found = []
    for number, line in page.prose:
        if match := re.match(r" {0,3}#{1,6} +(.*?)(?: +#+)? *$", line):
            text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", match[1])
            found.append((number, _plain(text)))
    return found


def _plain(text: str) -> str:
    """Without the marks of code and of emphasis outside of it."""
    parts = text.split("`")
    return "".join(part if i % 2 else re.sub(r"\*|(?<!\w)_|_(?!\w)", "", part) for i, part in enumerate(parts))


def github_slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def site_slug(heading: str) -> str:
    """The anchor that Python-Markdown, and so the site, gives a heading."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


def anchors(page: Page, slug: Callable[[str], str] = github_slug) -> set[str]:
    """The page's anchors: one for each heading, numbered where they repeat, and those that it sets itself."""
    found: set[str] = set()
    mark = "-" if slug is github_slug else "_"
    for _, text in headings(page):
        name, count = slug(text), 0
        while (name if not count else f"{name}{mark}{count}") in found:
            count += 1
        found.add(name if not count else f"{name}{mark}{count}")
    for _, line in page.prose:
        found |= set(re.findall(r"<[a-z]+ [^>]*\b(?:id|name)=\"([^\"]+)\"", line))
    return found


#: A target, which may hold a pair of parentheses and be followed by a title.
_TARGET = r"\(<?([^()\s>]+(?:\([^()\s]*\)[^()\s>]*)*)>?(?:\s+\"[^\"]*\")?\)"
_LINK = re.compile(r"\[(?:[^\[\]]|!?\[[^\[\]]*\](?:\([^()]*\))?)*\]" + _TARGET)
_IMAGE = re.compile(r"!\[[^\[\]]*\]" + _TARGET)
_REFERENCE = re.compile(r"(?m)^ {0,3}\[[^\]^]+\]:[ \t]*<?(\S+?)>?(?:[ \t]+\"[^\"]*\")?[ \t]*$")
_HTML = re.compile(r"<(?:a|img|source)\b[^>]*?\b(?:href|src|srcset)=\"([^\"]+)\"")
_CODE = re.compile(r"(?<!`)(`+)(?!`)((?:(?!\n\n).)+?)(?<!`)\1(?!`)", re.DOTALL)


def links(page: Page) -> list[tuple[int, str]]:
    """The targets of the page's links and images, with their lines; those of the web too."""
    numbers = [number for number, _ in page.prose]
    text = "\n".join(line for _, line in page.prose)
    # Blanked, not removed: a link's text may hold code, and what follows keeps its line.
    text = _CODE.sub(lambda code: re.sub(r"[^\n]", "x", code[0]), text)
    return sorted(
        {
            (numbers[text.count("\n", 0, found.start())], found[1])
            for pattern in (_LINK, _IMAGE, _REFERENCE, _HTML)
            for found in pattern.finditer(text)
        }
    )
