"""A recorded graph as a figure: what it does, in which frozen memory, and where its results lie.

Nodes are columns, in the order in which a replay runs them. Every row is a piece of memory. Above are
the frozen buffers, memory that is not the graph's own, under the names that the caller gives them: *r*
where a node reads, *w* where one writes, *u* where a kernel uses it (a kernel does not say how). Below
is the graph's pool: a row per place at which results begin, and a bar from the node that makes a result
to the last one that reads it. Two bars in one row are memory that was handed out again.

A name whose tensor the graph does not use keeps its row, and the row says so: this is what a variable
looks like that was bound to another tensor after the capture.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from mamba_teach.runner.graph_pool import GraphPool
from mamba_teach.runner.graph_recorder import GraphNode, RecordedGraph
from mamba_teach.viz.canvas import FAINT, INK, LINE, MARGIN, WIDTH, Canvas
from mamba_teach.viz.palette import GREEN, GREY, ORANGE, SKY, YELLOW

LETTERS = "abcdefghijklmnopqrstuvwxyz"
MAX_NODES = len(LETTERS)
LABEL, TAIL = (
    1.75,
    0.5,
)  # inches, like all lengths here: names of rows, and room behind the last node
BOX, ROW = 0.24, 0.28  # heights of a node and of a row
SLANT = 0.04  # how high a letter of a slanted name above a node climbs
MAX_COLUMN, MAX_NAME = 0.62, 17
KINDS = {
    "operation": ("white", None),
    "in place": (ORANGE, "///"),
    "kernel": (GREEN, "...."),
}
USES = {"r": "white", "w": ORANGE, "u": GREEN}


@dataclass(frozen=True)
class Buffer:
    """Memory that is not the graph's own.

    Attributes:
        name: the caller's, or None if the caller named none.
        num_bytes: of its memory.
        uses: node number -> "r", "w" or "u"; empty if the graph does not use it.
    """

    name: str | None
    num_bytes: int
    uses: dict[int, str]


@dataclass
class Result:
    """A tensor that a node made, from that node to the last one that used it.

    Attributes:
        place: *(segment, offset in bytes)* in the pool.
        is_held: somebody outside still has it.
    """

    place: tuple[int, int]
    first: int
    last: int
    is_held: bool = False


@dataclass(frozen=True)
class GraphView:
    """A graph as rows and columns.

    Attributes:
        nodes: in order.
        buffers: those with a name first.
        results: in the order in which they are made.
    """

    nodes: list[GraphNode]
    buffers: list[Buffer]
    results: list[Result]

    @property
    def places(self) -> list[tuple[int, int]]:
        return sorted({result.place for result in self.results})

    def tenants(self, place: tuple[int, int]) -> list[Result]:
        return [result for result in self.results if result.place == place]


def view_graph(graph: RecordedGraph, buffers: Mapping[str, torch.Tensor]) -> GraphView:
    """Read a graph off its recorder.

    Args:
        buffers: name -> tensor, for the memory that the graph does not own.

    Raises:
        ValueError: it has no nodes, or more than there are letters.
    """
    if not 1 <= len(graph.nodes) <= MAX_NODES:
        raise ValueError(
            f"a graph of {len(graph.nodes)} nodes; from 1 to {MAX_NODES} can be drawn: "
            f"capture a smaller function"
        )
    storages = {name: tensor.untyped_storage() for name, tensor in buffers.items()}
    memory: list[tuple[str | None, int, int]] = [
        (name, storage.data_ptr(), storage.nbytes()) for name, storage in storages.items()
    ]
    named = {address for _, address, _ in memory}
    memory += [(None, a, num_bytes) for a, num_bytes in graph.inputs.items() if a not in named]
    seen = [Buffer(name, num_bytes, _uses(graph, a)) for name, a, num_bytes in memory]
    return GraphView(graph.nodes, seen, _results(graph))


def _uses(graph: RecordedGraph, address: int) -> dict[int, str]:
    uses = {}
    for i, node in enumerate(graph.nodes):
        if address in (*node.reads, *node.writes):
            uses[i] = "u" if node.kind == "kernel" else "w" if address in node.writes else "r"
    return uses


def _results(graph: RecordedGraph) -> list[Result]:
    pool = graph.pool
    results: list[Result] = []
    latest: dict[int, Result] = {}  # by address
    for i, node in enumerate(graph.nodes):
        for address in node.reads:
            if address in latest:
                latest[address].last = i
        for address in node.writes if node.shape is not None else ():
            latest[address] = Result(_place(pool, address), i, i)
            results.append(latest[address])
    held = {(b.segment, b.start) for b in pool.blocks if not b.holder.expired()}
    for result in latest.values():
        result.is_held = result.place in held
    return results


def _place(pool: GraphPool, address: int) -> tuple[int, int]:
    for i, segment in enumerate(pool.segments):
        if 0 <= (offset := address - segment.data_ptr()) < segment.numel():
            return i, offset
    raise ValueError(f"address {address:#x} does not lie in the graph's pool")


def draw_graph(
    graph: RecordedGraph, buffers: Mapping[str, torch.Tensor], *, title: str | None = None
) -> Figure:
    """Draw a graph at notebook width.

    Args:
        graph: captured, with at most 26 nodes.
        buffers: name -> tensor, for the memory that the graph does not own.
        title: instead of the line that counts nodes, results and places.
    """
    seen = view_graph(graph, buffers)
    canvas = Canvas()
    canvas.line(title or _count(seen), size=10, weight="bold")
    column = min(MAX_COLUMN, (WIDTH - 2 * MARGIN - LABEL - TAIL) / len(seen.nodes))
    _draw_nodes(canvas, seen, column)
    canvas.line("frozen buffers: memory of others, at the addresses of the capture", size=8)
    for buffer in seen.buffers:
        _draw_buffer(canvas, buffer, column, len(seen.nodes))
    canvas.line("the graph's pool: a row per place at which results begin", size=8)
    for place in seen.places:
        _draw_place(canvas, seen, place, column)
    _draw_legend(canvas, seen)
    return canvas.finish()


def graph_alt_text(graph: RecordedGraph, buffers: Mapping[str, torch.Tensor]) -> str:
    """A few sentences for somebody who cannot see the figure."""
    seen = view_graph(graph, buffers)
    nodes = ", ".join(f"{LETTERS[i]} {short_name(node)}" for i, node in enumerate(seen.nodes))
    said = [f"{_count(seen)}: {nodes}"]
    for buffer in seen.buffers:
        uses = ", ".join(f"{LETTERS[i]} {use}" for i, use in buffer.uses.items())
        said.append(f"{_label(buffer)}: {uses or 'not used by this graph'}")
    for place in seen.places:
        tenants = ", then ".join(
            f"{LETTERS[r.first]}{' (held)' if r.is_held else ''}" for r in seen.tenants(place)
        )
        said.append(f"{_place_name(place)} holds {tenants}")
    return ". ".join(said) + "."


def short_name(node: GraphNode) -> str:
    """``aten.mul.Tensor`` as ``mul``, a kernel's name without its ending."""
    name = node.name.removeprefix("aten.").split(".")[0].removesuffix("_kernel")
    return name if len(name) <= MAX_NAME else name[: MAX_NAME - 1] + "…"


def kind_of(node: GraphNode) -> str:
    """A key of :data:`KINDS`."""
    if node.kind == "kernel":
        return "kernel"
    return "in place" if node.shape is None else "operation"


def _count(seen: GraphView) -> str:
    nodes, results, places = len(seen.nodes), len(seen.results), len(seen.places)
    return f"A graph of {nodes} nodes; {results} results in {places} places of its pool"


def _label(buffer: Buffer) -> str:
    return f"{buffer.name or 'without a name'}, {buffer.num_bytes} bytes"


def _place_name(place: tuple[int, int]) -> str:
    segment, offset = place
    return f"byte {offset}" + (f" of segment {segment}" if segment else "")


# Drawing --------------------------------------------------------------------------------------


def _left(column: float, node: int) -> float:
    return MARGIN + LABEL + column * node


def _draw_nodes(canvas: Canvas, seen: GraphView, column: float) -> None:
    canvas.y += 0.12 + SLANT * max(len(short_name(node)) for node in seen.nodes)
    for i, node in enumerate(seen.nodes):
        colour, hatch = KINDS[kind_of(node)]
        x, middle = _left(column, i), canvas.y + BOX / 2
        canvas.axes.add_patch(_box(x, canvas.y, column, BOX, colour, hatch))
        canvas.text(x + column / 2, middle, LETTERS[i], fontsize=9, fontweight="bold", ha="center",
                    bbox={"fc": "white", "lw": 0, "pad": 1.2})  # fmt: skip
        canvas.text(x + column / 2 - 0.06, canvas.y - 0.04, short_name(node), fontsize=8,
                    rotation=35, rotation_mode="anchor", va="bottom")  # fmt: skip
    canvas.y += BOX + 0.08


def _draw_buffer(canvas: Canvas, buffer: Buffer, column: float, num_nodes: int) -> None:
    middle = canvas.y + ROW / 2
    canvas.text(MARGIN, middle, buffer.name or "without a name", fontsize=8.5,
                fontweight="bold" if buffer.name else "normal")  # fmt: skip
    canvas.text(MARGIN + LABEL - 0.1, middle, f"{buffer.num_bytes} bytes", color=FAINT, ha="right")
    length = column * num_nodes
    face = "#EEEEEE" if buffer.uses else "white"
    strip = _box(_left(column, 0), canvas.y, length, ROW - 0.06, face, None)
    strip.set_linestyle("-" if buffer.uses else "--")
    canvas.axes.add_patch(strip)
    for node, use in buffer.uses.items():
        x = _left(column, node)
        canvas.axes.add_patch(_box(x, canvas.y, column, ROW - 0.06, USES[use], None))
        canvas.text(x + column / 2, middle - 0.03, use, fontsize=9, fontweight="bold", ha="center")
    if not buffer.uses:
        canvas.text(
            _left(column, 0) + length / 2, middle - 0.03, "not used by this graph", ha="center"
        )
    canvas.y += ROW


def _draw_place(canvas: Canvas, seen: GraphView, place: tuple[int, int], column: float) -> None:
    middle = canvas.y + ROW / 2 - 0.03
    canvas.text(MARGIN + LABEL - 0.1, middle, _place_name(place), color=FAINT, ha="right")
    end = _left(column, len(seen.nodes))
    canvas.axes.plot([_left(column, 0), end], [middle, middle], color=GREY, lw=0.6, zorder=0)
    for count, result in enumerate(seen.tenants(place)):
        x = _left(column, result.first)
        width = column * (result.last - result.first + 1)
        colour, hatch = (YELLOW, "///") if count else (SKY, None)
        if result.is_held:
            width = end + TAIL - 0.05 - x
            canvas.text(
                end + 0.03, middle, "held", fontsize=8, bbox={"fc": "white", "lw": 0, "pad": 1.2}
            )
        canvas.axes.add_patch(_box(x, canvas.y, width, ROW - 0.06, colour, hatch))
        canvas.text(x + column / 2, middle, LETTERS[result.first], fontsize=8.5, ha="center",
                    bbox={"fc": "white", "lw": 0, "pad": 1.2})  # fmt: skip
    canvas.y += ROW


def _draw_legend(canvas: Canvas, seen: GraphView) -> None:
    canvas.y += 0.06
    step = (WIDTH - 2 * MARGIN) / 5
    for i, (meaning, colour, hatch) in enumerate(_legend(seen)):
        x = MARGIN + step * i
        canvas.axes.add_patch(_box(x, canvas.y + 0.03, 0.24, 0.14, colour, hatch))
        canvas.text(x + 0.3, canvas.y + 0.1, meaning)
    canvas.y += LINE
    canvas.line("r: the node reads it.   w: it writes it.   u: a kernel uses it.   "
                "bar: from the node that makes a result to the last that uses it.", size=7)  # fmt: skip


def _legend(seen: GraphView) -> Iterator[tuple[str, str, str | None]]:
    """Meaning, colour and hatch of what is in the figure."""
    present = {kind_of(node) for node in seen.nodes}
    yield from ((f"node: {kind}", *KINDS[kind]) for kind in KINDS if kind in present)
    if seen.results:
        yield "pool: first result here", SKY, None
    if len(seen.results) > len(seen.places):
        yield "pool: handed out again", YELLOW, "///"


def _box(
    x: float, y: float, width: float, height: float, colour: str, hatch: str | None
) -> Rectangle:
    return Rectangle((x, y), width - 0.03, height, facecolor=colour, edgecolor=INK, linewidth=0.6,
                     hatch=hatch)  # fmt: skip
