"""The rules for finished pages, and for each a small site that breaks it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

from course_site.check import problems

HEAD = '<meta name="viewport" content="width=device-width"><link rel="stylesheet" href="{}a.css">'
GOOD = {
    "index.html": HEAD.format("")
    + '<h1 id="top">x</h1><a href="b/c.html#d">1</a><a href="#top">2</a>'
    + '<a href="https://example.org/x">3</a><img alt="a dot" src="data:image/png;base64,AA">',
    "b/c.html": HEAD.format("../") + '<p id="d">x</p><a href="../index.html">up</a>',
    "a.css": "body { background: url(data:image/png;base64,AA) }",
}


def write(site: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text, encoding="utf-8")
    return site


def test_a_whole_site_passes(tmp_path: Path) -> None:
    assert problems(write(tmp_path, GOOD)) == []


def test_an_empty_folder_is_no_site(tmp_path: Path) -> None:
    assert problems(tmp_path) == [f"{tmp_path}: no pages"]


@pytest.mark.parametrize(
    ("added", "complaint"),
    [
        ('<a href="b/x.html">', "link 'b/x.html': no such file"),
        ('<a href="b/">', "link 'b/': no such file"),
        ('<a href="b/c.html#e">', "link 'b/c.html#e': no such place in that page"),
        ('<a href="#e">', "link '#e': no such place in that page"),
        ('<a href="../outside.html">', "link '../outside.html': leads out of the site"),
        ('<img alt="x" src="x.png">', "link 'x.png': no such file"),
        ('<img src="data:image/png;base64,AA">', "1 of 2 pictures without alt text"),
        ('<img alt=" " src="data:image/png;base64,AA">', "1 of 2 pictures without alt text"),
        ('<script src="https://cdn.example/x.js"></script>', "fetches https://cdn.example/x.js"),
        ('<script src="//cdn.example/x.js"></script>', "fetches //cdn.example/x.js"),
        ('<link rel="icon" href="http://example.org/i.png">', "fetches http://example.org/i.png"),
        ('<img alt="x" src="https://example.org/x.png">', "fetches https://example.org/x.png"),
        ("<style>@import 'https://example.org/x.css';</style>", "a style fetches https://example.org/x.css"),
        ('<p style="background: url(//example.org/x.png)">', "a style fetches //example.org/x.png"),
    ],
)  # fmt: skip
def test_a_rule_bites(tmp_path: Path, added: str, complaint: str) -> None:
    (tmp_path / "outside.html").touch()
    site = write(tmp_path / "site", GOOD | {"index.html": GOOD["index.html"] + added})
    assert problems(site) == [f"index.html: {complaint}"]


def test_other_files_are_read_too(tmp_path: Path) -> None:
    sheet = GOOD["a.css"] + "@font-face { src: url('https://example.org/f.woff2') }"
    assert problems(write(tmp_path, GOOD | {"a.css": sheet})) == [
        "a.css: fetches https://example.org/f.woff2"
    ]


def test_a_page_without_a_viewport_is_seen(tmp_path: Path) -> None:
    site = write(tmp_path, GOOD | {"b/c.html": '<p id="d">x</p>'})
    assert problems(site) == ["b/c.html: no viewport for small screens"]
