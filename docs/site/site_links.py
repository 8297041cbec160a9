"""Where the site has a file of the repository, and links as they lead there.

The Markdown files link to one another, and to files of the repository, by relative paths. In the site the files of
docs/ keep their places, README.md is the first page, and any other file that is linked lies under repository/: Markdown
and source as pages, folders as lists of their files, and what is not read on a page (pictures, tables) as it is.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: suffix of a file that is shown on a page -> its language
_LANGUAGES = {".cff": "yaml", ".cpp": "cpp", ".cuh": "cpp", ".h": "cpp", ".py": "python", ".sh": "sh", ".toml": "toml"}
_LANGUAGES |= {".txt": "text", ".yml": "yaml", "": "text"}
_UNLISTED = re.compile(r"\..*|README\.md|__pycache__|runs")
_FENCE = re.compile(r"(?ms)^(?P<fence>```+).*?^(?P=fence) *$")
_LINK = re.compile(r"(?<=\]\()[^)\s]+(?=\))")


def outside_fences(change: Callable[[str], str], markdown: str) -> str:
    """The page with its text changed, and its fenced code as it is."""
    parts, end = [], 0
    for fence in _FENCE.finditer(markdown):
        parts += [change(markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, change(markdown[end:])])


def is_page(path: str) -> bool:
    """Whether the site shows a file or folder, a path relative to the repository's root, as a page."""
    return (ROOT / path).is_dir() or Path(path).suffix in (".md", *_LANGUAGES)


def place(path: str) -> str:
    """The path within the site's sources of a file or folder of the repository."""
    if path == "README.md":
        return "index.md"
    below = path.removeprefix("docs/") if path.startswith("docs/") else f"repository/{path}"
    if (ROOT / path).is_dir():
        return f"{below}/README.md"
    return f"{below}.md" if is_page(path) and not path.endswith(".md") else below


def linked(path: str) -> set[str]:
    """The files and folders of the repository that a page's links and pictures lead to."""
    found = (_target(path, link) for link in _LINK.findall(_FENCE.sub("", content(path))))
    return {target for target in found if target is not None}


def rewritten(markdown: str, path: str) -> str:
    """The page of a file or folder, its links leading to their places within the site."""
    here = posixpath.dirname(place(path))

    def moved(link: re.Match[str]) -> str:
        target = _target(path, link[0])
        anchor = "".join(link[0].partition("#")[1:])
        return link[0] if target is None else posixpath.relpath(place(target), here or ".") + anchor

    return outside_fences(lambda text: _LINK.sub(moved, text), markdown)


def content(path: str) -> str:
    """The Markdown of the page of a file or folder."""
    here = ROOT / path
    if here.is_dir():
        names = sorted(entry.name for entry in here.iterdir() if not _UNLISTED.fullmatch(entry.name))
        readme = here / "README.md"
        above = readme.read_text(encoding="utf-8") if readme.exists() else f"# {path}\n"
        return "\n".join([above, "## Files", "", *(f"- [{name}]({name})" for name in names)]) + "\n"
    text = here.read_text(encoding="utf-8")
    return text if path.endswith(".md") else f"# {path}\n\n````{_LANGUAGES[here.suffix]}\n{text}\n````\n"


def _target(path: str, link: str) -> str | None:
    """The file or folder that a link on a page leads to; None for one elsewhere, or on a page that the build makes."""
    to = link.partition("#")[0]
    if not to or ":" in to:
        return None
    folder = path if (ROOT / path).is_dir() else posixpath.dirname(path)
    found = posixpath.normpath(posixpath.join(folder, to))
    return found if (ROOT / found).exists() else None
