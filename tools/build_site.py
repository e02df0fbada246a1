"""Build the course as static web pages: open ``site/index.html``, no server needed.

    make site
    python tools/build_site.py --out somewhere

Needs the extra ``site`` (nbconvert, latex2mathml, pdoc). The folder is replaced. The finished pages are
checked: a link that leads nowhere, a picture without alt text or anything fetched from the network is an
error.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
from pathlib import Path
from urllib.parse import urlsplit

from course_site.api import build_api, page_of
from course_site.board import board_of_a_run
from course_site.check import problems
from course_site.markup import Follow, to_html
from course_site.notebook_page import Notebook, body, read_notebooks
from course_site.page import style_sheet, write_page

ROOT = Path(__file__).resolve().parents[1]

# Markdown files that become pages: file in the repository, page, title on the index.
ROSETTA = "docs/rosetta.md"
MARKDOWN = {
    ROSETTA: ("rosetta.html", "From here to vLLM and SGLang"),
    "README.md": ("readme.html", "The repository's own front page, with its map"),
    "kernels/README.md": ("kernels.html", "Table of the kernels"),
    "mamba_teach/wordmath/assets/README.md": ("wordmath.html", "Card of the shipped model"),
    "benchmarks/README.md": ("benchmarks.html", "Benchmarks: what is measured, and how"),
    "CONTRIBUTING.md": ("contributing.html", "House rules for contributors"),
}
MARK = ".mamba_teach_site"  # a folder without it is not ours to replace


def main() -> int:
    """Parse the command line, build, check; 1 if the pages have faults."""
    parser = argparse.ArgumentParser(description="Build the course as static web pages.")
    parser.add_argument("--out", type=Path, default=ROOT / "site", help="folder (default: site/)")
    site = parser.parse_args().out
    build(site)
    faults = problems(site)
    print("\n".join(faults) or f"open {site / 'index.html'} in a browser")
    return 1 if faults else 0


def build(site: Path) -> None:
    """Replace ``site`` by freshly made pages."""
    start_over(site)
    (site / "style.css").write_text(style_sheet(), encoding="utf-8")
    notebooks = read_notebooks(ROOT)
    targets = {notebook.source: notebook.page for notebook in notebooks}
    targets |= {source: page for source, (page, _) in MARKDOWN.items()}
    for picture in sorted((ROOT / "docs").glob("*.png")):
        name = picture.relative_to(ROOT).as_posix()
        (site / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(picture, site / name)
        targets[name] = name

    print("API reference")
    build_api(site / "api")
    print(f"{len(notebooks)} notebooks")
    write_notebooks(site, notebooks, targets)
    print("pages, block board")
    for source, (page, title) in MARKDOWN.items():
        follow = follower(source, page, targets)
        made = to_html(read(source), follow, lambda name: api_link(name, site))
        write_page(site, page, "page.html.j2", title=title, body=made)
    (site / "board.html").write_text(board_of_a_run(), encoding="utf-8")
    write_index(site, notebooks, targets)


def start_over(site: Path) -> None:
    """An empty folder that carries our mark.

    Raises:
        FileExistsError: it holds something that was not built here.
    """
    if site.exists() and any(site.iterdir()):
        if not (site / MARK).exists():
            raise FileExistsError(
                f"{site} has files that were not built here: choose another --out"
            )
        shutil.rmtree(site)
    site.mkdir(parents=True, exist_ok=True)
    (site / MARK).touch()


def read(source: str) -> str:
    return (ROOT / source).read_text(encoding="utf-8")


def follower(source: str, page: str, targets: dict[str, str]) -> Follow:
    """Links of a repository file, rewritten for its page.

    Args:
        source: the file; its links are relative to its folder.
        page: where it is shown.
        targets: repository file -> page or picture. Files that are not shown lose their links.
    """

    def follow(url: str) -> str | None:
        parts = urlsplit(url)
        if parts.scheme or not parts.path:
            return url
        file = os.path.normpath(Path(source).parent / parts.path).replace(os.sep, "/")
        if file not in targets:
            return None
        way = os.path.relpath(targets[file], Path(page).parent).replace(os.sep, "/")
        return f"{way}#{parts.fragment}" if parts.fragment else way

    return follow


def api_link(name: str, site: Path) -> str | None:
    """From a page at the site's top to the reference of a dotted name."""
    page = page_of(name, site / "api")
    return None if page is None else f"api/{page}"


def write_notebooks(site: Path, notebooks: list[Notebook], targets: dict[str, str]) -> None:
    """A page per notebook, each with the way to the one before and the one after."""
    for i, notebook in enumerate(notebooks):
        write_page(
            site,
            notebook.page,
            "notebook_page.html.j2",
            title=notebook.title,
            source=notebook.source,
            body=body(notebook, follower(notebook.source, notebook.page, targets)),
            before=notebooks[i - 1] if i > 0 else None,
            after=notebooks[i + 1] if i + 1 < len(notebooks) else None,
        )


def write_index(site: Path, notebooks: list[Notebook], targets: dict[str, str]) -> None:
    """The front page: README's opening, the course, what is beside it."""
    follow = follower("README.md", "index.html", targets)
    readme = read("README.md")
    course = [(notebook, to_html(question(notebook, readme), follow)) for notebook in notebooks]
    write_page(
        site,
        "index.html",
        "index.html.j2",
        title="How recurrent state is served",
        opening=to_html(readme.split("\n## ")[0], follow),
        course=course,
        pages=[pair for source, pair in MARKDOWN.items() if source != ROSETTA],
    )


def question(notebook: Notebook, readme: str) -> str:
    """The notebook's question as README's table has it, or the first sentence of its own text."""
    row = re.search(rf"\]\({re.escape(notebook.source)}\)\s*\|(.*)\|\s*$", readme, re.MULTILINE)
    return row[1].strip() if row else re.split(r"(?<=\.)\s", notebook.lead)[0]


if __name__ == "__main__":
    sys.exit(main())
