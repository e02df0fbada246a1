"""An executed notebook as a page: text, code, outputs as they are committed; nothing is run."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
from nbconvert.exporters import TemplateExporter
from nbformat import NotebookNode
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer
from traitlets.config import Config

from course_site.markup import Follow, to_html
from course_site.page import TEMPLATES

RICHEST_FIRST = ["text/html", "image/svg+xml", "image/png", "text/markdown", "text/plain"]


@dataclass(frozen=True)
class Notebook:
    """One notebook of the course.

    Attributes:
        source: the file, relative to the repository, with "/".
        title: its first heading.
        lead: the first paragraph below it, Markdown.
        nb: what it holds.
    """

    source: str
    title: str
    lead: str
    nb: NotebookNode

    @property
    def page(self) -> str:
        """Its page, relative to the site."""
        return self.source.removesuffix(".ipynb") + ".html"


def read_notebooks(repository: Path) -> list[Notebook]:
    """All notebooks below ``notebooks/``, in the order of their file names."""
    paths = [
        path
        for path in (repository / "notebooks").rglob("*.ipynb")
        if ".ipynb_checkpoints" not in path.relative_to(repository).parts
    ]
    names = sorted(path.relative_to(repository).as_posix() for path in paths)
    return [read_notebook(repository, name) for name in names]


def read_notebook(repository: Path, name: str) -> Notebook:
    """One notebook; the first cell must begin with a heading.

    Raises:
        ValueError: it does not.
    """
    nb = nbformat.read(repository / name, as_version=4)
    first = nb.cells[0].source if nb.cells else ""
    found = re.match(r"# +(?P<title>.+)\n+(?P<lead>(?:.+\n?)*)", first + "\n")
    if found is None:
        raise ValueError(f"{name}: the first cell does not begin with a heading (# ...)")
    return Notebook(name, found["title"].strip(), " ".join(found["lead"].split()), nb)


def body(notebook: Notebook, follow: Follow) -> str:
    """The notebook's cells as HTML.

    Args:
        follow: maps the links in its Markdown.
    """
    filters: dict[str, Callable[..., Any]] = {
        "markdown": lambda source: to_html(source, follow),
        "python": colour,
    }
    exporter = TemplateExporter(
        config=Config(NbConvertBase={"display_data_priority": RICHEST_FIRST}),
        extra_template_basedirs=[str(TEMPLATES)],
        template_name="notebook",
        file_extension=".html",
        filters=filters,
    )
    text, _ = exporter.from_notebook_node(notebook.nb)
    return str(text)


def colour(code: str) -> str:
    """Python source as HTML with Pygments' classes."""
    return str(highlight(code, PythonLexer(), HtmlFormatter()))
