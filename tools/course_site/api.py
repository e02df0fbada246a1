"""The API reference: pdoc reads the docstrings, and we give it our colours and a way back."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages

import pdoc.doc
import pdoc.render
from jinja2 import pass_context
from jinja2.runtime import Context
from pdoc.render_helpers import to_markdown_with_context

import mamba_teach
from course_site.page import DARK, TEMPLATES, code_colours

PACKAGES = ("mamba_teach", "mamba_kernels")
RULE = r"^[ \t]*=+(?: +=+)+[ \t]*$"  # above and below a table of plain text
TABLE = re.compile(rf"(?:{RULE})\n(?:.+\n)*?(?:{RULE})\n(?:(?:.+\n)*?(?:{RULE})(?:\n|\Z))?", re.M)


def build_api(folder: Path) -> None:
    """Write a page per module below ``folder``, an index of them, and a search that needs no server."""
    pdoc.render.configure(docformat="google", template_directory=TEMPLATES / "api")
    pdoc.render.env.filters["to_markdown"] = _to_markdown
    pdoc.render.env.filters["summary"] = summary
    pdoc.render.env.tests["in_package"] = str.startswith
    pdoc.render.env.globals["dark_code"] = code_colours(DARK, ".pdoc-code")
    resolve_front_page()
    modules = {name: pdoc.doc.Module.from_name(name) for name in module_names()}
    pages = {
        f"{name.replace('.', '/')}.html": pdoc.render.html_module(module, modules)
        for name, module in modules.items()
    }
    pages["index.html"] = pdoc.render.html_index(modules)
    pages["search.js"] = pdoc.render.search_index(modules)
    for page, text in pages.items():
        (folder / page).parent.mkdir(parents=True, exist_ok=True)
        (folder / page).write_text(text, encoding="utf-8")


def module_names() -> list[str]:
    """All modules of our packages. (pdoc itself would take an ``__all__`` for the whole list.)"""
    names: list[str] = []
    for package in PACKAGES:
        found = walk_packages(import_module(package).__path__, f"{package}.")
        modules = [module.name for module in found if not module.name.endswith(".__main__")]
        names += [package, *sorted(modules)]
    return names


def resolve_front_page() -> None:
    """The package's names are imported on first use; pdoc sees only what has been."""
    for name in mamba_teach.__all__:
        setattr(mamba_teach, name, getattr(mamba_teach, name))


@pass_context
def _to_markdown(context: Context, docstring: str) -> str:
    # "~" before a name says "show its last part only"; pdoc would print it.
    plain = re.sub(r"(:\w+:`)~", r"\1", docstring)
    return str(to_markdown_with_context(context, keep_tables(plain)))


def keep_tables(docstring: str) -> str:
    """Tables drawn with characters stay as they are drawn: Markdown knows them as code blocks."""
    return TABLE.sub(lambda found: f"\n```text\n{found[0].rstrip()}\n```\n", docstring)


def summary(docstring: str) -> str:
    """The first sentence of a docstring as plain text; "" of none."""
    paragraph = " ".join(docstring.strip().split("\n\n")[0].split())
    sentence = re.split(r"(?<=\.)\s", paragraph, maxsplit=1)[0]
    return re.sub(r":\w+:(?=`)|`", "", sentence)


def page_of(name: str, api: Path) -> str | None:
    """Where a dotted name is explained, relative to ``api``: "mamba_teach/cache/specs.html#MambaSpec".

    Args:
        name: "mamba_teach.cache.specs.MambaSpec", or just a module.
        api: the folder that ``build_api`` wrote.

    Returns:
        None if the name does not begin with a package of ours, or no page or anchor is about it.
    """
    parts = name.split(".")
    if parts[0] not in PACKAGES:
        return None
    for cut in range(len(parts), 0, -1):
        page = Path(*parts[:cut]).with_suffix(".html")
        if (api / page).is_file():
            anchor = ".".join(parts[cut:])
            if not anchor:
                return page.as_posix()
            found = f'id="{anchor}"' in (api / page).read_text(encoding="utf-8")
            return f"{page.as_posix()}#{anchor}" if found else None
    return None
