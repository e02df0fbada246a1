"""What must hold of the finished pages, without a browser: rules from a folder to complaints."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

CSS_FETCH = re.compile(r"""(?:@import\s+(?:url\()?|url\()\s*["']?\s*((?:https?:)?//[^"')\s]+)""")
FETCHED_BY = {"src", "srcset", "poster", "data"}  # attributes whose target a browser gets by itself


@dataclass
class Page(HTMLParser):
    """What a page refers to, read once.

    Attributes:
        path: of the file.
        ids: of its elements.
        links: targets that a reader may follow.
        fetched: targets that the browser gets by itself.
        images: alt text of each `<img>`; None where the attribute is missing.
        styles: text of its style elements and attributes.
        names: of its `<meta>` elements.
    """

    path: Path
    ids: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    fetched: list[str] = field(default_factory=list)
    images: list[str | None] = field(default_factory=list)
    styles: list[str] = field(default_factory=list)
    names: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._in_style = False
        self.feed(self.path.read_text(encoding="utf-8"))
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self._in_style = tag == "style"
        if "id" in values:
            self.ids.add(values["id"])
        if tag == "img":
            self.images.append(values.get("alt"))
        if tag == "meta":
            self.names.add(values.get("name", ""))
        if "href" in values:
            (self.fetched if tag == "link" else self.links).append(values["href"])
        self.fetched += [values[name] for name in FETCHED_BY & values.keys()]
        self.styles.append(values.get("style", ""))

    def handle_data(self, data: str) -> None:
        if self._in_style:
            self.styles.append(data)

    def handle_endtag(self, tag: str) -> None:
        if tag == "style":
            self._in_style = False


def read_pages(site: Path) -> dict[Path, Page]:
    """Every HTML file below ``site``, by its resolved path."""
    return {path: Page(path) for path in sorted(site.resolve().rglob("*.html"))}


def problems(site: Path) -> list[str]:
    """All complaints about a site; empty if it is whole."""
    site = site.resolve()
    pages = read_pages(site)
    found = [] if pages else [f"{site}: no pages"]
    for page in pages.values():
        name = page.path.relative_to(site).as_posix()
        rules = (*dead_ends(page, site, pages), *fetches(page), *pictures(page), *width(page))
        found += [f"{name}: {complaint}" for complaint in rules]
    for sheet in sorted(site.rglob("*.css")):
        for target in CSS_FETCH.findall(sheet.read_text(encoding="utf-8")):
            found.append(f"{sheet.relative_to(site).as_posix()}: fetches {target}")
    return found


def dead_ends(page: Page, site: Path, pages: dict[Path, Page]) -> Iterator[str]:
    """Links that lead to no file of the site, or to no element of a page."""
    for target in page.links + page.fetched:
        parts = urlsplit(target)
        if parts.scheme or parts.netloc:
            continue
        path = page.path
        if parts.path:
            path = (page.path.parent / unquote(parts.path)).resolve()
        if not path.is_file():
            yield f"link {target!r}: no such file"
        elif not path.is_relative_to(site):
            yield f"link {target!r}: leads out of the site"
        elif parts.fragment and path in pages and unquote(parts.fragment) not in pages[path].ids:
            yield f"link {target!r}: no such place in that page"


def fetches(page: Page) -> Iterator[str]:
    """Scripts, styles and pictures that the reader's browser would get from the network."""
    for target in page.fetched:
        parts = urlsplit(target)
        if parts.netloc or parts.scheme not in ("", "data"):
            yield f"fetches {target}"
    for style in page.styles:
        yield from (f"a style fetches {target}" for target in CSS_FETCH.findall(style))


def pictures(page: Page) -> Iterator[str]:
    """Pictures without a text for those who do not see them."""
    missing = sum(not (alt or "").strip() for alt in page.images)
    if missing:
        yield f"{missing} of {len(page.images)} pictures without alt text"


def width(page: Page) -> Iterator[str]:
    """Without it a telephone shows a page as a desk would, in tiny letters."""
    if "viewport" not in page.names:
        yield "no viewport for small screens"
