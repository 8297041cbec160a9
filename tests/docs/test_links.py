"""Links between the pages, as files: their targets, anchors and images exist, and a link leads to every page."""

from __future__ import annotations

import posixpath
from pathlib import Path
from urllib.parse import unquote

import pytest
from doc_pages import Page, anchors, github_slug, headings, links, page_of, pages, site_slug
from places import ROOT


def local(page: Page) -> list[tuple[int, str, str, str]]:
    """The page's links to files of the repository: line, the link, the target's path and anchor."""
    found = []
    for line, link in links(page):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        target, _, anchor = unquote(link).partition("#")
        path = posixpath.normpath((Path(page.name).parent / target).as_posix()) if target else page.name
        found.append((line, link, path, anchor))
    return found


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page: Page) -> None:
    wrong = []
    for line, link, path, anchor in local(page):
        where = f"{page.name}:{line}: {link}"
        if path.startswith(("..", "/")):
            wrong.append(f"{where}: leads out of the repository")
        elif not (ROOT / path).exists():
            wrong.append(f"{where}: there is no {path}")
        elif anchor and path.endswith(".md"):
            target = page_of(path)
            for host, slug in (("GitHub", github_slug), ("the site", site_slug)):
                if anchor not in (there := anchors(target, slug)):
                    wrong.append(f"{where}: on {host}, {path} has the anchors {', '.join(sorted(there))}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "page", [x for x in pages() if not x.name.startswith("benchmarks/results/")], ids=lambda page: page.name
)
def test_a_heading_is_unique_on_its_page(page: Page) -> None:
    texts = [text for _, text in headings(page)]
    again = [f"{page.name}:{line}: {text}" for line, text in headings(page) if texts.count(text) > 1]
    assert not again, "\n".join(again)


def test_another_page_links_to_each_page_of_the_documentation() -> None:
    linked = set()
    for page in pages():
        for _, _, path, _ in local(page):
            path = f"{path}/README.md" if (ROOT / path).is_dir() else path
            if path != page.name:
                linked.add(path)
    orphans = [page.name for page in pages() if page.name.startswith("docs/") and page.name not in linked]
    assert not orphans, f"no page links to {orphans}"


def test_what_a_link_is() -> None:
    """The reader of links, on what the pages write and might write."""
    source = (
        "# A `tp_group` - and *more* (1.5)\n"
        "[a](one.md), [`b`](two.md#x) and `[no](three.md)`, [[4]](four.md)\n"
        "[over a line\n  end](five.md) [![image](six.png)](seven.md) [paper](https://example.org/a_(b))\n"
        '<img src="eight.png" width="4"> [title](nine.md "its title")\n\n'
        "[ref]: ten.md\n"
        "```text\n[no](eleven.md)\n```\n"
    )
    page = Page("docs/given.md", source)
    assert links(page) == [
        (2, "four.md"),
        (2, "one.md"),
        (2, "two.md#x"),
        (3, "five.md"),
        (4, "https://example.org/a_(b)"),
        (4, "seven.md"),
        (4, "six.png"),
        (5, "eight.png"),
        (5, "nine.md"),
        (7, "ten.md"),
    ]
    assert anchors(page) == {"a-tp_group---and-more-15"}
    assert anchors(page, site_slug) == {"a-tp_group-and-more-15"}
