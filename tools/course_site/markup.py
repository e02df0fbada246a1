"""Markdown to HTML, with formulas as MathML: browsers draw it themselves, without a script."""

from __future__ import annotations

import re
from collections.abc import Callable
from html import escape

from latex2mathml.converter import convert
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath

Follow = Callable[
    [str], str | None
]  # a link in a source file -> one in the site; None: there is none


class FormulaError(ValueError):
    """A formula that did not become MathML."""


def mathml(tex: str, display: str) -> str:
    """A formula as a `<math>` element.

    Args:
        tex: without its dollar signs.
        display: "inline" or "block".

    Raises:
        FormulaError: the converter does not know a command of the formula. (It would print its name.)
    """
    # \mathrel only adjusts spacing, and the converter nests two operators for it, which nothing draws.
    plain = re.sub(r"\\mathrel\{(.)\}", r"\1", tex.strip())
    # Braces around a comma say "no space behind it", and so does text.
    plain = plain.replace("{,}", r"\text{,}")
    try:
        made = convert(plain, display=display)
    except Exception as error:
        raise FormulaError(f"formula {tex!r}: {error}") from error
    unknown = re.search(r">\s*(\\\w+)", made)
    if unknown is not None:
        raise FormulaError(f"formula {tex!r}: {unknown[1]} is not known")
    return made


class Renderer(IPythonRenderer):
    """nbconvert's own, with our formulas, links that stay inside the site, and wide tables that scroll.

    Attributes:
        follow: maps the target of a link or image; what maps to None becomes plain text.
        name_page: maps a name in code, `package.module.Class`, to a page about it, or None.
    """

    def __init__(self, follow: Follow, name_page: Follow) -> None:
        super().__init__(escape=False, exclude_anchor_links=True)
        self.follow = follow
        self.name_page = name_page

    def inline_math(self, body: str) -> str:
        return mathml(body, "inline")

    def block_math(self, body: str) -> str:
        return f'<span class="formula">{mathml(body, "block")}</span>'  # stands in a paragraph

    def heading(self, text: str, level: int, **attrs: object) -> str:
        return f'<h{level} id="{slug(text)}">{text}</h{level}>\n'

    def link(self, text: str, url: str, title: str | None = None) -> str:
        target = self.follow(url)
        return text if target is None else str(super().link(text, target, title))

    def image(self, text: str, url: str, title: str | None = None) -> str:
        target = self.follow(url)
        if target is None:
            raise ValueError(f"image {url}: there is no such file")
        return str(super().image(text, target, title))

    def codespan(self, text: str) -> str:
        breakable = re.sub(r"(?<=\w)([./])(?=\w)", r"\1<wbr>", escape(text, quote=False))
        code = f"<code>{breakable}</code>"
        page = self.name_page(text)
        return code if page is None else f'<a href="{escape(page)}">{code}</a>'

    def table(self, text: str) -> str:
        return f'<div class="wide"><table>{text}</table></div>\n'


def slug(heading: str) -> str:
    """The id of a heading, as GitHub makes it: small letters, hyphens for spaces."""
    text = re.sub(r"<[^>]*>", "", heading).lower()
    return re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", text).strip())


def nothing(name: str) -> None:
    """For pages whose code names link nowhere."""


def to_html(source: str, follow: Follow, name_page: Follow = nothing) -> str:
    """Markdown as HTML; formulas between dollar signs become MathML."""
    return MarkdownWithMath(renderer=Renderer(follow, name_page)).render(source)
