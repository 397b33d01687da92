"""Makes pages and files outside docs/ part of the site: README.md is its home page, others keep their path.

A hook of MkDocs. Links in the pages are written for the repository; here they lead to the same files on the site. What is
linked and is no page (results, schemas, sources) is copied.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
#: Pages of the site that are not in docs/.
PAGES = (
    "README.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "bench/results/README.md",
    "bench/results/HISTORY.md",
    "bench/results/ablation.md",
    "bench/gpu/README.md",
    "examples/plugin/README.md",
)
LINK = re.compile(r"(?<=\]\()(?!https?:|#)([^)\s]+)(?=\))")


def place(path: str) -> str:
    """Where a file of the repository is on the site."""
    if path == "README.md":
        return "index.md"
    if path.endswith("/README.md"):
        # MkDocs takes a README for an index already.
        return path
    return path.removeprefix("docs/")


def origin(uri: str) -> str:
    """The file of the repository that is at a place of the site."""
    if uri == "index.md":
        return "README.md"
    return uri if uri in PAGES else f"docs/{uri}"


def linked(path: str) -> set[str]:
    """The files of the repository that a page links to."""
    text = (ROOT / path).read_text(encoding="utf-8")
    found = {
        posixpath.normpath(posixpath.join(posixpath.dirname(path), link.partition("#")[0]))
        for link in LINK.findall(text)
    }
    return {one for one in found if (ROOT / one).is_file()}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages outside docs/, and every file that a page links to."""
    pages = [*PAGES, *(f"docs/{file.src_uri}" for file in files.documentation_pages())]
    wanted = {*PAGES, *(one for page in pages for one in linked(page))}
    for path in sorted(wanted):
        if files.get_file_from_path(place(path)) is None:
            files.append(File.generated(config, place(path), abs_src_path=os.fspath(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns links between files of the repository into links between places of the site."""
    here = origin(page.file.src_uri)

    def turned(found: re.Match[str]) -> str:
        link, hash_, anchor = found[1].partition("#")
        target = posixpath.normpath(posixpath.join(posixpath.dirname(here), link))
        if (ROOT / target).is_dir():
            readme = f"{target}/README.md"
            target = readme if readme in PAGES else target
        if files.get_file_from_path(place(target)) is None:
            return found[0]
        return posixpath.relpath(place(target), posixpath.dirname(page.file.src_uri) or ".") + hash_ + anchor

    return LINK.sub(turned, markdown)
