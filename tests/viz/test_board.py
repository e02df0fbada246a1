"""The figure: everything is in it, nothing lies on top of anything else, and it is always the same."""

from __future__ import annotations

import io
from collections.abc import Iterator
from itertools import combinations

import matplotlib.pyplot as plt
import pytest
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox
from viz.ghost_logs import MODES, by_hand, ghost_log

from mamba_teach.events import Board, EngineStarted, reduce
from mamba_teach.viz.board import board_alt_text, draw_board
from mamba_teach.viz.cells import view
from mamba_teach.viz.history import evicted_in_step, step_ends


@pytest.fixture(autouse=True)
def closed_figures() -> Iterator[None]:
    yield
    plt.close("all")


def boards(mode: str, **settings: int) -> Iterator[tuple[Board, tuple[int, ...]]]:
    log = ghost_log(mode, **settings)
    for end in step_ends(log):
        yield reduce(log[:end]), evicted_in_step(log[:end])


def said(figure: Figure) -> list[str]:
    return [text.get_text() for axes in figure.axes for text in axes.texts if text.get_text()]


def boxes(figure: Figure) -> list[tuple[str, Bbox]]:
    """Every text with its box, less a hair."""
    figure.canvas.draw()
    texts = [text for axes in figure.axes for text in axes.texts if text.get_text()]
    found = []
    for text in texts:
        box = text.get_window_extent()
        if box.width > 2 and box.height > 4:
            # The box of a line is taller than its letters: half the line is what they need.
            trimmed = Bbox.from_extents(
                box.x0 + 0.5, box.y0 + box.height / 4, box.x1 - 0.5, box.y1 - box.height / 4
            )
            found.append((text.get_text(), trimmed))
    return found


def overlaps(figure: Figure) -> list[tuple[str, str]]:
    found = boxes(figure)
    return [(a, b) for (a, box), (b, other) in combinations(found, 2) if box.overlaps(other)]


@pytest.mark.parametrize("mode", MODES)
def test_no_text_lies_on_another(mode: str) -> None:
    for board, evicted in list(boards(mode))[::2]:
        figure = draw_board(board, evicted=evicted)
        assert overlaps(figure) == [], f"step {board.step}"
        plt.close(figure)


def test_no_text_lies_on_another_in_a_crowd() -> None:
    settings = dict(followers=12, prompt=70, num_blocks=400, max_num_seqs=12)
    board, _ = list(boards("all", **settings, max_num_batched_tokens=300))[-2]
    figure = draw_board(board)
    assert overlaps(figure) == []
    words = " ".join(said(figure))
    assert "+4 more requests" in words and "older" in words and "more free blocks" in words


def test_an_overlap_would_be_seen() -> None:
    figure = draw_board(reduce(by_hand()))
    figure.axes[0].text(0.1, 0.2, "on top of the title", va="center")
    assert overlaps(figure) != []


@pytest.mark.parametrize("mode", MODES)
def test_every_text_lies_inside_and_the_width_is_the_notebooks(mode: str) -> None:
    for board, evicted in list(boards(mode))[::3]:
        figure = draw_board(board, evicted=evicted)
        assert figure.get_size_inches()[0] == 9.5
        width, height = figure.canvas.get_width_height()
        for text, box in boxes(figure):
            assert min(box.x0, box.y0) >= 0 and box.x1 <= width and box.y1 <= height, text
        plt.close(figure)


def test_every_slot_letter_and_count_is_written_out() -> None:
    for board, evicted in boards("all"):
        figure = draw_board(board, evicted=evicted)
        words = said(figure)
        seen = view(board, evicted)
        cells = [cell for row in seen.rows for table in row.cells for cell in table if cell.block]
        for cell in (*cells, *seen.free, *seen.evicted):
            for part in (str(cell.block), cell.letter, cell.tokens):
                assert not part or part in words
        assert words.count("r") == sum(cell.reads for cell in (*cells, *seen.free))
        assert words.count("w") == sum(cell.writes for cell in (*cells, *seen.free))
        plt.close(figure)


def test_the_pool_begins_with_the_null_block_and_keeps_its_order() -> None:
    log = ghost_log("all")
    board = reduce(log)
    figure = draw_board(board)
    slots = {
        t.get_text(): t.get_position() for t in figure.axes[0].texts if t.get_weight() == "bold"
    }
    places = [slots["0"]] + [slots[str(block)] for block in board.free]
    assert places == sorted(places, key=lambda place: (place[1], place[0]))


def test_a_board_is_drawn_the_same_twice() -> None:
    pictures = []
    for _ in range(2):
        file = io.BytesIO()
        draw_board(reduce(by_hand()), title="twice").savefig(file, format="png")
        pictures.append(file.getvalue())
    assert pictures[0] == pictures[1]


def test_an_empty_board_says_so() -> None:
    figure = draw_board(reduce([EngineStarted(4, ("mamba 0",), 8)]))
    assert "no request holds a block" in said(figure)


def test_the_alt_text_is_a_sentence_about_this_board() -> None:
    assert board_alt_text(reduce(by_hand())) == (
        "Block tables at step 1: 1 running; 16 blocks of 4 tokens, 9 free, 0 of them still "
        "published; the next blocks to be handed out are 7, 8, 9. r0 (prefill 6+3) holds "
        "mamba 0: 1 2 3; attention 0: 4 5 6."
    )
