"""The page: its frames are the boards, it fetches nothing, and the demo writes one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from viz.ghost_logs import MODES, by_hand, ghost_log

from mamba_teach.__main__ import main
from mamba_teach.events import reduce
from mamba_teach.viz.board_html import board_page
from mamba_teach.viz.cells import Cell, view
from mamba_teach.viz.history import answers, evicted_in_step, step_ends


def data_of(page: str) -> dict[str, Any]:
    found = re.findall(r'<script type="application/json" id="log">(.*?)</script>', page, re.S)
    assert len(found) == 1
    return json.loads(found[0])


def unpacked(text: str) -> list[str]:
    """What the page's script reads out of a packed table, as the words of a cell."""
    words = []
    for word in text.split(" ") if text else []:
        if word.startswith("."):
            words += ["."] * int(word[1:])
        else:
            block, letter, tokens, flags = word.split("/")
            words.append(" ".join(part for part in (block, letter, tokens, flags) if part))
    return words


def words(cells: tuple[Cell, ...]) -> list[str]:
    return [cell.text for cell in cells]


@pytest.mark.parametrize("mode", MODES)
def test_frames_are_the_boards(mode: str) -> None:
    log = ghost_log(mode)
    data = data_of(board_page(log, "a run"))
    prefixes = [log[:end] for end in step_ends(log)]
    views = [view(reduce(part), evicted_in_step(part)) for part in prefixes] + [view(reduce(log))]
    assert len(data["frames"]) == len(views)
    for frame, seen in zip(data["frames"], views, strict=True):
        assert frame["title"].removesuffix(" (end of the log)") == seen.title
        assert [row[0] for row in frame["rows"]] == [row.request_id for row in seen.rows]
        for packed, row in zip(frame["rows"], seen.rows, strict=True):
            assert [unpacked(table) for table in packed[2:]] == [words(t) for t in row.cells]
        assert unpacked(frame["free"]) == words(seen.free)
        assert unpacked(frame["evicted"]) == words(seen.evicted)
    assert data["groups"] == list(views[0].groups)


def test_every_slot_has_its_answer() -> None:
    log = ghost_log("all")
    owners = data_of(board_page(log, "a run"))["owners"]
    assert owners == {str(slot): said for slot, said in answers(log, range(40)).items()}


def test_the_page_needs_no_network() -> None:
    page = board_page(ghost_log("all"), "a run")
    assert re.findall(r"https?:|//\w+\.|\bsrc=|\bhref=|@import|url\(|fetch\(|import\(", page) == []


def test_the_page_is_labelled_and_says_something_without_scripts() -> None:
    page = board_page(by_hand(), "a run")
    assert '<html lang="en">' in page and "<title>a run</title>" in page
    for name in ("player", "step back", "step forward", "frame"):
        assert f'aria-label="{name}"' in page
    assert page.count('aria-live="polite"') == 2
    noscript = re.search("<noscript>(.*)</noscript>", page, re.S)
    assert noscript is not None and "step 0:" in noscript[1]
    assert re.findall("@[A-Z]+@", page) == []


def test_texts_cannot_end_the_script() -> None:
    log = [
        type(e)(**{**vars(e), "request_id": "</script>"}) if hasattr(e, "request_id") else e
        for e in by_hand()
    ]
    page = board_page(log, "<i>@DATA@</i>")
    assert data_of(page)["frames"][0]["rows"][0][0] == "</script>"
    assert "&lt;i&gt;@DATA@&lt;/i&gt;" in page


@pytest.mark.slow
def test_the_demo_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "board.html"
    main(["demo", "--problems", "3", "--json", "--board", str(target)])
    printed = capsys.readouterr()
    report = json.loads(printed.out)  # one JSON object and nothing else
    assert str(target) in printed.err
    page = target.read_text(encoding="utf-8")
    assert len(data_of(page)["frames"]) == report["steps"] + 1
    assert len(page.encode()) < 1_000_000
