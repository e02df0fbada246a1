"""The built pages: whole, and nothing of the notebooks is lost on the way.

What a page must show is read from the notebook files here, not by the builder's code.
"""
# ruff: noqa: E402 (before the imports stands the question whether they can succeed)

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

for _needed in ("nbconvert", "latex2mathml", "pdoc"):
    pytest.importorskip(_needed, reason="the site's extra is not installed: make site")

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tools"))

import build_site
from course_site.api import keep_tables, summary
from course_site.check import problems
from course_site.markup import FormulaError, mathml, to_html

pytestmark = pytest.mark.slow
NOTEBOOKS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "notebooks").rglob("*.ipynb")
    if ".ipynb_checkpoints" not in path.relative_to(ROOT).parts
)


class Reader(HTMLParser):
    """Text, pictures and links of a page's article (or of all of it), as a browser would have them."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.text = ""
        self.alts: list[str] = []
        self.links: list[tuple[str, str]] = []  # rel, href
        self.tags: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.tags.append(tag)
        if tag == "img":
            self.alts.append(values["alt"])
        if tag == "a":
            self.links.append((values.get("rel", ""), values.get("href", "")))

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build_site.build(folder)
    return folder


def page_of(name: str) -> str:
    return name.replace(".ipynb", ".html")


def cells(name: str) -> list[dict[str, Any]]:
    return json.loads((ROOT / name).read_text(encoding="utf-8"))["cells"]


def joined(value: str | list[str]) -> str:
    return value if isinstance(value, str) else "".join(value)


def outputs(name: str) -> Iterator[dict[str, Any]]:
    for cell in cells(name):
        yield from cell.get("outputs", [])


def words(text: str) -> str:
    """Without terminal colours; any white space is one space."""
    return " ".join(re.sub(r"\x1b\[[0-9;]*m", "", text).split())


def test_the_site_is_whole(site: Path) -> None:
    assert problems(site) == []


def test_the_course_is_there_in_order(site: Path) -> None:
    index = (site / "index.html").read_text(encoding="utf-8")
    listed = re.findall(r'<tr>\s*<td><a href="([^"]+)">', index)  # first cells of the table
    assert listed == [page_of(name) for name in NOTEBOOKS]
    for i, name in enumerate(NOTEBOOKS):
        page = site / page_of(name)
        links = Reader(page.read_text(encoding="utf-8")).links
        around = {"prev": NOTEBOOKS[i - 1 : i], "next": NOTEBOOKS[i + 1 : i + 2]}
        for rel, others in around.items():
            leads = {(page.parent / href).resolve() for found, href in links if found == rel}
            assert leads == {(site / page_of(other)).resolve() for other in others}


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_code_and_outputs_are_in_the_page(site: Path, name: str) -> None:
    html = (site / page_of(name)).read_text(encoding="utf-8")
    page = Reader(html)
    shown = words(page.text)
    for cell in cells(name):
        if cell["cell_type"] == "code":
            assert words(joined(cell["source"])) in shown
    pictures = []
    for output in outputs(name):
        if output["output_type"] == "stream":
            assert words(joined(output["text"])) in shown
        elif output["output_type"] == "error":
            assert words("\n".join(output["traceback"])) in shown
        else:
            data, about = output["data"], output["metadata"]
            if "text/html" in data:
                assert joined(data["text/html"]) in html  # a film strip, where there is a player
            elif "image/png" in data:
                pictures.append(about["image/png"]["alt"])
                assert joined(data["image/png"]).replace("\n", "") in html
            elif "text/markdown" in data:
                source = joined(data["text/markdown"])
                assert all(word in shown for word in re.findall(r"[A-Za-z_]{4,}", source))
            else:
                assert words(joined(data["text/plain"])) in shown
    film_strips = "".join(joined(o.get("data", {}).get("text/html", "")) for o in outputs(name))
    assert len(page.alts) == len(pictures) + len(Reader(film_strips).alts)
    assert set(pictures) <= set(page.alts)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_every_formula_is_mathml(site: Path, name: str) -> None:
    formulas = 0
    for cell in cells(name):
        if cell["cell_type"] == "markdown":
            prose = re.sub(r"```.*?```|`[^`\n]+`", "", joined(cell["source"]), flags=re.DOTALL)
            formulas += len(re.findall(r"\$\$.+?\$\$|\$[^$]+\$", prose, flags=re.DOTALL))
    page = Reader((site / page_of(name)).read_text(encoding="utf-8"))
    assert page.tags.count("math") == formulas


def test_a_formula_that_is_not_known_is_an_error() -> None:
    with pytest.raises(FormulaError, match="nosuch"):
        mathml(r"x \nosuch y", "inline")
    assert "<mn>10</mn><mtext>,</mtext><mn>240</mn>" in mathml("10{,}240", "inline")


def test_the_rosetta_page_leads_into_the_reference(site: Path) -> None:
    source = (ROOT / "docs" / "rosetta.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(mamba_(?:teach|kernels)\.[\w.]+)`", source))
    html = (site / "rosetta.html").read_text(encoding="utf-8").replace("<wbr>", "")
    linked = dict(re.findall(r'<a href="(api/[^"]+)"><code>([^<]+)</code>', html))
    assert set(linked.values()) == named


def test_every_module_has_a_page(site: Path) -> None:
    for package in (ROOT / "mamba_teach", ROOT / "kernels" / "mamba_kernels"):
        for path in package.rglob("*.py"):
            parts = path.relative_to(package.parent).with_suffix("").parts
            if parts[-1] != "__main__":
                parts = parts[:-1] if parts[-1] == "__init__" else parts
                assert (site / "api" / Path(*parts).with_suffix(".html")).is_file()
    front = (site / "api" / "mamba_teach.html").read_text(encoding="utf-8")
    assert 'id="Engine.generate"' in front and 'id="load_model"' in front


def test_the_board_shows_a_run(site: Path) -> None:
    html = (site / "board.html").read_text(encoding="utf-8")
    log = re.search(r'<script type="application/json" id="log">(.*?)</script>', html, re.DOTALL)
    assert log is not None
    frames = json.loads(log[1].replace("<\\/", "</"))["frames"]
    rows = {row[0] for frame in frames for row in frame["rows"]}
    assert rows == {f"r{i}" for i in range(6)}
    assert max(len(frame["rows"]) for frame in frames) == 4
    assert ("", "index.html") in Reader(html).links


def test_links_to_files_without_a_page_become_text() -> None:
    follow = build_site.follower("kernels/README.md", "kernels.html", {"README.md": "readme.html"})
    html = to_html("[a](../README.md#x) [b](aot.py) [c](https://e.org/) [d](#e)", follow)
    assert re.findall(r'href="([^"]*)"', html) == ["readme.html#x", "https://e.org/", "#e"]
    assert "b" in Reader(html).text


def test_docstrings_for_people() -> None:
    assert summary("Of :func:`~a.b` and ``c``: `d`.\nMore.\n\nEnd.") == "Of ~a.b and c: d."
    table = "Two:\n\n==== ===\nab   cd\n==== ===\n\nEnd."
    assert keep_tables(table) == "Two:\n\n\n```text\n==== ===\nab   cd\n==== ===\n```\n\nEnd."


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(FileExistsError, match="not built here"):
        build_site.start_over(tmp_path)
    assert (tmp_path / "thesis.txt").exists()


def test_the_extra_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pins = dict(
        re.findall(r"^([\w-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    )
    for line in project["optional-dependencies"]["site"]:
        requirement = Requirement(line)
        assert pins[requirement.name] in requirement.specifier
