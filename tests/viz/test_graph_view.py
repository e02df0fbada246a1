"""The picture of a graph: what the recorder noted is what one sees, under the right names."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from itertools import pairwise

import matplotlib.pyplot as plt
import pytest
import torch
from viz.test_board import boxes, overlaps, said

from mamba_kernels.launch import launch
from mamba_teach.ghost import GhostKernel
from mamba_teach.runner.graph_pool import SEGMENT_BYTES, GraphPool
from mamba_teach.runner.graph_recorder import RecordedGraph
from mamba_teach.viz.graph_view import MAX_NODES, Result, draw_graph, graph_alt_text, view_graph


@pytest.fixture(autouse=True)
def closed_figures() -> Iterator[None]:
    yield
    plt.close("all")


def record(
    work: Callable[[], object], pool: GraphPool | None = None
) -> tuple[RecordedGraph, object]:
    """A graph of ``work``, and what it returned."""
    graph = RecordedGraph("cpu", pool)
    with graph.capture():
        result = work()
    return graph, result


def decode_step() -> tuple[RecordedGraph, dict[str, torch.Tensor], object]:
    """Reads x, slots and states, writes states; 6 nodes: index mul add index_put_ sigmoid mul."""
    x, slots, states = torch.ones(2), torch.tensor([1, 3]), torch.arange(5.0)

    def step() -> torch.Tensor:
        new = 0.5 * states[slots] + x
        states[slots] = new
        return new * torch.sigmoid(new)

    graph, result = record(step)
    return graph, {"x": x, "slots": slots, "states": states}, result


def uses(graph: RecordedGraph, buffers: dict[str, torch.Tensor]) -> dict[str | None, str]:
    """Name -> its row in the picture, a dot where nothing is used."""
    return {
        buffer.name: "".join(buffer.uses.get(i, ".") for i in range(len(graph.nodes)))
        for buffer in view_graph(graph, buffers).buffers
    }


# What is seen ---------------------------------------------------------------------------------


def test_each_buffer_shows_who_reads_and_who_writes_it() -> None:
    graph, buffers, _ = decode_step()
    assert uses(graph, buffers) == {"x": "..r...", "slots": "r..r..", "states": "r..w.."}


def test_a_view_of_a_buffer_counts_as_the_buffer() -> None:
    whole = torch.zeros(8)
    graph, _ = record(lambda: whole[2:4] * 2)
    assert uses(graph, {"tail": whole[6:]}) == {"tail": "r"}


def test_a_name_bound_to_another_tensor_is_not_used_and_the_memory_has_no_name() -> None:
    graph, buffers, _ = decode_step()
    moved = buffers | {"slots": torch.tensor([2, 4])}
    assert uses(graph, moved) == {
        "x": "..r...", "slots": "......", "states": "r..w..", None: "r..r..",
    }  # fmt: skip
    assert "slots, 16 bytes: not used by this graph" in graph_alt_text(graph, moved)
    assert {"not used by this graph", "without a name"} <= set(said(draw_graph(graph, moved)))


def test_a_kernel_is_only_known_to_use_its_tensors() -> None:
    src, dst = torch.ones(3), torch.zeros(3)

    def copy(a: torch.Tensor, b: torch.Tensor) -> None:
        b.copy_(a)

    kernel = GhostKernel(copy)

    def work() -> torch.Tensor:
        launch(kernel, (1,), src, dst)
        return dst + 1

    graph, _ = record(work)
    assert uses(graph, {"src": src, "dst": dst}) == {"src": "u.", "dst": "ur"}
    assert {"node: kernel", "ghost"} <= set(said(draw_graph(graph, {"src": src, "dst": dst})))


def test_places_and_lifetimes_of_a_chain() -> None:
    x = torch.ones(4)
    graph, y = record(lambda: ((x * 2) + 1).relu())
    # A result lives until the next one is made from it, so two places take turns.
    assert view_graph(graph, {"x": x}).results == [
        Result((0, 0), 0, 1, False),
        Result((0, 64), 1, 2, False),
        Result((0, 0), 2, 2, True),
    ]
    del y
    assert not any(result.is_held for result in view_graph(graph, {"x": x}).results)


@pytest.mark.parametrize("seed", range(6))
def test_what_lives_at_the_same_time_never_shares_a_place(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    draws = torch.randint(3, (20, 3), generator=generator).tolist()  # a capture reads no values

    def tangle() -> list[torch.Tensor]:
        kept = [torch.ones(4) for _ in range(3)]
        for i, j, k in draws:
            kept[k] = kept[i] * kept[j]
        return kept

    seen = view_graph(record(tangle)[0], {})
    assert len(seen.results) == len(seen.nodes) > len(seen.places)  # something was handed out again
    for place in seen.places:
        tenants = seen.tenants(place)
        for earlier, later in pairwise(tenants):
            assert earlier.last < later.first


def test_a_second_segment_is_named() -> None:
    pool = GraphPool("cpu")
    large = torch.ones(SEGMENT_BYTES // 4)
    graph, kept = record(lambda: (large * 2, large * 3), pool)
    places = [result.place for result in view_graph(graph, {"large": large}).results]
    assert places == [(0, 0), (1, 0)]
    assert "byte 0 of segment 1 holds b (held)" in graph_alt_text(graph, {"large": large})


def test_the_alt_text_says_all_of_it() -> None:
    x = torch.ones(4)
    graph, y = record(lambda: ((x * 2) + 1).relu())
    assert graph_alt_text(graph, {"x": x}) == (
        "A graph of 3 nodes; 3 results in 2 places of its pool: a mul, b add, c relu. "
        "x, 16 bytes: a r. byte 0 holds a, then c (held). byte 64 holds b."
    )


# How it is drawn ------------------------------------------------------------------------------


def longest() -> tuple[RecordedGraph, dict[str, torch.Tensor], object]:
    x = torch.ones(3)

    def work() -> torch.Tensor:
        y = x
        for _ in range(MAX_NODES):
            y = y * 2
        return y

    graph, result = record(work)
    return graph, {"x": x}, result


@pytest.mark.parametrize("make", [decode_step, longest])
def test_all_is_inside_and_nothing_lies_on_anything(
    make: Callable[[], tuple[RecordedGraph, dict[str, torch.Tensor], object]],
) -> None:
    graph, buffers, _ = make()
    figure = draw_graph(graph, buffers)
    slanted = {text.get_text() for text in figure.axes[0].texts if text.get_rotation()}
    # The boxes of two slanted names overlap, their letters do not.
    assert [pair for pair in overlaps(figure) if not set(pair) <= slanted] == []
    width, height = figure.canvas.get_width_height()
    for text, box in boxes(figure):
        assert min(box.x0, box.y0) >= 0 and box.x1 <= width and box.y1 <= height, text
    assert figure.get_size_inches()[0] == 9.5


def test_nodes_stand_in_order_and_each_result_carries_its_letter() -> None:
    graph, buffers, _ = decode_step()
    figure = draw_graph(graph, buffers)
    letters = [
        t for t in figure.axes[0].texts if t.get_weight() == "bold" and t.get_text() in "abcdef"
    ]
    assert "".join(t.get_text() for t in letters) == "abcdef"
    assert len({t.get_position()[1] for t in letters}) == 1
    lefts = [t.get_position()[0] for t in letters]
    assert lefts == sorted(lefts)
    words = said(figure)
    assert [words.count(letter) for letter in "abcdef"] == [2, 2, 2, 1, 2, 2]  # d makes no result
    assert (words.count("r"), words.count("w"), words.count("held")) == (4, 1, 1)


def test_the_same_graph_gives_the_same_picture() -> None:
    graph, buffers, _ = decode_step()
    pictures = []
    for _ in range(2):
        file = io.BytesIO()
        draw_graph(graph, buffers, title="twice").savefig(file, format="png")
        pictures.append(file.getvalue())
    assert pictures[0] == pictures[1]


def test_what_does_not_fit_is_refused() -> None:
    x = torch.ones(2)
    graph, _ = record(lambda: [x * 2 for _ in range(MAX_NODES + 1)])
    with pytest.raises(
        ValueError, match=f"a graph of {MAX_NODES + 1} nodes; from 1 to {MAX_NODES}"
    ):
        draw_graph(graph, {"x": x})
    with pytest.raises(ValueError, match="a graph of 0 nodes"):
        draw_graph(RecordedGraph("cpu"), {})
