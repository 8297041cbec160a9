"""What `mkdocs build` does beside rendering docs/: a hook, named in mkdocs.yml.

README.md becomes the first page. Every public name gets a page, each gate its figure, and each file that a page links
to a place in the site. A page that is not in the navigation, by
itself or by its folder's index, is an error.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url
from site_links import ROOT, content, is_page, linked, place, rewritten

import fastrl
from fastrl.bench.plot_gates import draw_one

_GATE = re.compile(r"<!-- gate: (\w+) -->")
# A public name in code, and a paper, outside of links, headings and blocks of code.
_MENTION = re.compile(
    r"<(pre|a|h\d)\b.*?</\1>|<code>(?P<of>fastrl\.)?(?P<name>\w+)(?:\([^<]*\))?</code>|\barXiv:(?P<paper>\d{4}\.\d{4,5})",
    re.DOTALL,
)
# What leads to another page of the folder: a link, or the name of a public function.
_NAMED = re.compile(r"\]\(([\w.]+)\.md[#)]|`fastrl\.(\w+)")
_ALGORITHMS = {*fastrl.PRESETS, *fastrl.PREFERENCES}
# How much a page of a folder weighs in the search: what explains comes before what lists.
_BOOSTS = {"config": 0.001, "guides": 2, "algorithms": 1.5}
_FETCHED = re.compile(
    r"""<(?:script|img|iframe)\b[^>]*\ssrc=["']?(?:https?:)?//[^>]*>|<link\b[^>]*stylesheet[^>]*//[^>]*>"""
)
#: place in the site's sources -> the file or folder of the repository that it shows
_shown: dict[str, str] = {}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages that an index names in place of `index.md/*` in the navigation."""
    config.nav = _expanded(config.nav, _written_out(config.nav))
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the first page, the pages that only the site has, and the files that pages link to."""
    _shown.clear()
    _shown.update({file.src_uri: f"docs/{file.src_uri}" for file in files})
    waiting = {"README.md", *(f"docs/{file.src_uri}" for file in files.documentation_pages())}
    seen: set[str] = set()
    while waiting:
        path = waiting.pop()
        seen.add(path)
        if place(path) not in _shown:
            files.append(_file(path, config))
            _shown[place(path)] = path
        if is_page(path):
            waiting |= linked(path) - seen
    for name in _unwritten_functions():
        text = f"---\nsearch: {{boost: 0.1}}\n---\n# fastrl.{name}\n\n::: fastrl.{name}\n"
        files.append(File.generated(config, f"functions/{name}.md", content=text))
    for preset in {name for file in files.documentation_pages() for name in _GATE.findall(file.content_string)}:
        files.append(File.generated(config, f"algorithms/{preset.lower()}.svg", content=_figure(preset)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to their places within the site, show the gates' figures, weigh the page in the search."""
    here = page.file.src_uri
    if here not in _shown:
        return markdown
    folder = here.partition("/")[0]
    if here == "index.md":
        page.meta["hide"] = ["navigation"]
    page.meta["search"] = {"exclude": True} if folder == "repository" else {"boost": _BOOSTS.get(folder, 1)}
    return _GATE.sub(_picture, rewritten(markdown, _shown[here]))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Link public names and papers where they are mentioned."""

    def link(found: re.Match[str]) -> str:
        if paper := found["paper"]:
            return f'<a href="https://arxiv.org/abs/{paper}">{found[0]}</a>'
        # A docstring names its neighbours without the package; elsewhere a bare name may be a metric's.
        if not found["of"] and not page.file.src_uri.startswith("functions/"):
            return found[0]
        to = _page_of(found["name"], files)
        return found[0] if to in (None, page.file) else f'<a href="{get_relative_url(to.url, page.url)}">{found[0]}</a>'

    return _MENTION.sub(link, html)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Refuse a page that would ask another machine for something when it is read."""
    if fetched := _FETCHED.search(output):
        raise PluginError(f"{page.file.src_uri}: is to be read without a network, but has {fetched[0]}")
    return output


def _file(path: str, config: MkDocsConfig) -> File:
    if not is_page(path):
        return File.generated(config, place(path), abs_src_path=str(ROOT / path))
    return File.generated(config, place(path), content=content(path))


def _page_of(name: str | None, files: Files) -> File | None:
    """The page of a public name: an algorithm's, else a function's."""
    if name not in fastrl.__all__:
        return None
    algorithm = files.get_file_from_path(f"algorithms/{name.lower()}.md")
    return algorithm if algorithm and name in _ALGORITHMS else files.get_file_from_path(f"functions/{name}.md")


def _unwritten_functions() -> list[str]:
    return [name for name in fastrl.__all__ if not (ROOT / "docs" / "functions" / f"{name}.md").exists()]


def _expanded(nav: Any, placed: set[str]) -> Any:
    """The navigation with an index and the pages of its folder that it names in place of `index.md/*`.

    `placed` are the pages that have a place already.
    """
    if isinstance(nav, dict):
        return {title: _expanded(entries, placed) for title, entries in nav.items()}
    if isinstance(nav, list):
        return [
            page
            for entry in nav
            for page in (_below(entry[:-2], placed) if _is_index(entry) else [_expanded(entry, placed)])
        ]
    return nav


def _is_index(entry: Any) -> bool:
    return isinstance(entry, str) and entry.endswith("/*")


def _written_out(nav: Any) -> set[str]:
    """The pages that the navigation names by themselves."""
    if isinstance(nav, str):
        return {nav}
    return {page for entry in (nav.values() if isinstance(nav, dict) else nav) for page in _written_out(entry)}


def _below(index: str, placed: set[str]) -> list[str]:
    folder = index.rpartition("/")[0]
    text = (ROOT / "docs" / index).read_text(encoding="utf-8")
    named = dict.fromkeys(f"{folder}/{link[1] or link[2]}.md" for link in _NAMED.finditer(text))
    made = {f"functions/{name}.md" for name in _unwritten_functions()}
    new = [page for page in (index, *named) if page not in placed and (page in made or (ROOT / "docs" / page).exists())]
    placed.update(new)
    return new


def _figure(preset: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gate.svg"
        draw_one(preset, path)
        return path.read_bytes()


def _picture(found: re.Match[str]) -> str:
    return f"![The weight on grad log pi that {found[1]} gives at each ratio]({found[1].lower()}.svg)"
