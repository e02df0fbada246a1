"""The frame around every page: head, navigation, footer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from pygments.formatters import HtmlFormatter

TEMPLATES = Path(__file__).parent / "templates"
LIGHT, DARK = "friendly", "github-dark"  # Pygments styles

_environment = Environment(
    loader=FileSystemLoader(TEMPLATES),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def write_page(site: Path, name: str, template: str, **values: Any) -> None:
    """Fill a template and write it to ``site / name``.

    Args:
        name: of the page, relative to the site, with "/".
        template: a file in ``templates/`` that extends ``page.html.j2``.
        values: for the template; ``root``, the way back to the site's top, is added.
    """
    path = site / name
    path.parent.mkdir(parents=True, exist_ok=True)
    text = _environment.get_template(template).render(root=root(name), **values)
    path.write_text(text, encoding="utf-8")


def root(name: str) -> str:
    """From a page to the top of the site: "" or "../" once per folder."""
    return "../" * name.count("/")


def style_sheet() -> str:
    """Our rules and Pygments' colours, light and dark."""
    ours = (TEMPLATES / "style.css").read_text(encoding="utf-8")
    light, dark = code_colours(LIGHT, ".highlight"), code_colours(DARK, ".highlight")
    return f"{ours}\n{light}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}\n"


def code_colours(style: str, selector: str) -> str:
    """CSS of a Pygments style for code inside ``selector``."""
    return str(HtmlFormatter(style=style).get_style_defs(selector))
