"""Checks the built documentation: every link and image leads somewhere, and no page shows Markdown that was not rendered.

    check_site.py [FOLDER]      # site/ unless given

MkDocs checks links it made from Markdown. This reads the pages as a browser gets them, so it also sees links in generated
reference pages, in the navigation and in raw HTML. Addresses outside the site are not opened. Exits with 1 if something is
wrong.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

#: Elements without an end.
VOID = frozenset(["area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"])
#: Text in these is shown as it was written.
LITERAL = frozenset(["code", "pre", "script", "style", "svg", "title"])
#: What Markdown looks like when it was not rendered: a fence, a heading, a link, a bold word, a row of a table.
RAW = re.compile(r"```|^#{1,6} |\]\([^)\s]+\)|\*\*\w[^*]*\*\*|^\|.*\|$|^!!! ", re.MULTILINE)


@dataclass
class Page(HTMLParser):
    """What is checked of a page."""

    path: Path
    links: list[tuple[str, str]] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)
    raw: list[str] = field(default_factory=list)
    title: str = ""
    #: The elements around what is read now, from the outside.
    inside: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Takes note of links, images and anchors."""
        named = {name: value or "" for name, value in attrs}
        self.anchors |= {named[name] for name in ("id", "name") if named.get(name)}
        self.links += [(name, named[name]) for name in ("href", "src") if named.get(name)]
        if tag not in VOID:
            self.inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """Leaves an element."""
        while self.inside and self.inside.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        """Looks for Markdown in text."""
        if "title" in self.inside and "svg" not in self.inside:
            self.title += data
        if "article" not in self.inside:
            return
        if LITERAL.isdisjoint(self.inside):
            self.raw += [found[0] for found in RAW.finditer(data)]
        elif "code" in self.inside and "pre" not in self.inside and data.strip().count("\n") > 1:
            # A fence that was not understood becomes a code span of many lines.
            self.raw.append(data.strip().partition("\n")[0])


def problems(site: Path) -> list[str]:
    """What is wrong with the site, a line for each."""
    pages = {path.resolve(): Page(path) for path in sorted(site.rglob("*.html"))}
    found = [] if pages else [f"{site}: no pages; build them with `make docs`"]
    for path, page in pages.items():
        name = path.relative_to(site.resolve())
        if not page.title.strip():
            found.append(f"{name}: no title")
        found += [f"{name}: Markdown that was not rendered: {text!r}" for text in page.raw]
        # It is shown at every address that does not exist, so its links begin at the root of a site that is not known here.
        if path.name == "404.html":
            continue
        for kind, link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            if not target.is_file():
                found.append(f"{name}: {kind}={link!r} leads nowhere")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                found.append(f"{name}: {kind}={link!r}: no such place on that page")
    return found


def main() -> int:
    """Checks a folder, and says what is wrong."""
    site = Path(sys.argv[1] if len(sys.argv) > 1 else "site")
    found = problems(site)
    print("\n".join(found) or f"{site}: {len(list(site.rglob('*.html')))} pages, every link and anchor leads somewhere")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
