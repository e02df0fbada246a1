"""The pool of a graph: small, shared, and never the same memory twice at one time."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mamba_teach.runner.graph_pool import ALIGNMENT, SEGMENT_BYTES, GraphPool
from mamba_teach.runner.graph_recorder import RecordedGraph

KIB = 1024
PLACE = 16 * KIB  # bytes of a tensor in these tests


def numbers(value: float = 0.0, num_bytes: int = PLACE) -> torch.Tensor:
    return torch.full((num_bytes // 4,), value)


def chain(x: torch.Tensor, length: int = 20) -> torch.Tensor:
    for i in range(length):
        x = x * 1.0 + i
    return x


def held_bytes(pool: GraphPool) -> int:
    return sum(block.num_bytes for block in pool.blocks if not block.holder.expired())


def test_a_chain_of_operations_needs_two_places() -> None:
    """Each result dies when the next but one is made; 40 of them would be 640 KiB."""
    x, pool = numbers(), GraphPool("cpu")
    graph = RecordedGraph("cpu", pool)
    with graph.capture():
        y = chain(x)
    assert len(graph.nodes) == 40
    assert pool.peak_bytes <= 3 * PLACE
    assert pool.num_reused >= 40 - 3
    assert held_bytes(pool) == PLACE  # the last result
    x.fill_(1.0)
    graph.replay()
    assert y.tolist() == chain(numbers(1.0)).tolist()
    assert pool.peak_bytes <= 3 * PLACE


def test_what_is_returned_stays_and_comes_back_when_it_is_dropped() -> None:
    pool, x = GraphPool("cpu"), numbers(1.0)
    graph = RecordedGraph("cpu", pool)
    with graph.capture():
        kept = [x + i for i in range(5)]
        chain(x)
    assert held_bytes(pool) == 5 * PLACE
    graph.replay()
    assert [k[0].item() for k in kept] == [1.0, 2.0, 3.0, 4.0, 5.0]
    view = kept[1][3:5]  # holds all of its memory
    del kept
    assert held_bytes(pool) == PLACE
    x.fill_(7.0)
    graph.replay()
    assert view.tolist() == [8.0, 8.0]
    del view
    assert held_bytes(pool) == 0
    peak, again = pool.peak_bytes, RecordedGraph("cpu", pool)
    with again.capture():
        _kept = [x + i for i in range(5)]
    assert pool.peak_bytes == peak, "memory that came back was not used"


def test_graphs_share_a_pool() -> None:
    """The larger one first; the smaller one finds its memory there, but for what both return."""
    pool, x = GraphPool("cpu"), numbers(1.0)
    first, second = RecordedGraph("cpu", pool), RecordedGraph("cpu", pool)
    with first.capture():
        y = chain(x)
    alone = pool.peak_bytes
    with second.capture():
        z = chain(x[: len(x) // 2], length=5)
    assert pool.peak_bytes <= alone + PLACE // 2
    places = [(t.data_ptr(), t.data_ptr() + t.untyped_storage().nbytes()) for t in (y, z)]
    assert places[0][1] <= places[1][0] or places[1][1] <= places[0][0]
    for value in (2.0, 3.0):  # what one returned survives the other's replay
        x.fill_(value)
        first.replay()
        expected = chain(numbers(value))
        assert torch.equal(y, expected)
        x.fill_(value + 1)
        second.replay()
        assert torch.equal(y, expected)
        assert torch.equal(z, chain(numbers(value + 1)[: len(x) // 2], length=5))
    assert not second.inputs.keys() & {y.data_ptr(), z.data_ptr()}


def test_nothing_moves_when_the_pool_grows() -> None:
    pool = GraphPool("cpu")
    early = pool.place_like(numbers(1.0))
    addresses = [segment.data_ptr() for segment in pool.segments]
    assert pool.reserved_bytes == SEGMENT_BYTES
    rest = [pool.place_like(numbers(float(i), SEGMENT_BYTES)) for i in range(2, 5)]
    huge = pool.place_like(numbers(5.0, 3 * SEGMENT_BYTES))
    assert pool.reserved_bytes == SEGMENT_BYTES * (1 + 3 + 3)
    assert [segment.data_ptr() for segment in pool.segments][:1] == addresses
    for value, tensor in enumerate([early, *rest, huge], start=1):
        assert (tensor == value).all()
        assert pool.owns(tensor.data_ptr())
    assert not pool.owns(numbers().data_ptr())


def test_sizes_strides_and_offsets_are_kept() -> None:
    pool, x = GraphPool("cpu"), torch.arange(24.0).view(4, 6)
    for tensor in (x, x.t(), x[1:, ::2], x[2, 3], x[:0], torch.empty(0), x.double(), x > 3):
        placed = pool.place_like(tensor)
        assert torch.equal(placed, tensor) and placed.dtype == tensor.dtype
        assert (placed.shape, placed.stride()) == (tensor.shape, tensor.stride())
        assert placed.storage_offset() == tensor.storage_offset()
        assert pool.owns(placed.untyped_storage().data_ptr())


@settings(max_examples=80)
@given(
    history=st.lists(
        st.tuples(st.sampled_from([1, 3, 63, 64, 65, 700, 4096, 300_000]), st.integers(0, 8)),
        min_size=1,
        max_size=40,
    )
)
def test_live_blocks_never_overlap(history: list[tuple[int, int]]) -> None:
    """Tensors come, and those at arbitrary places of the list of live ones go."""
    pool, live, total = GraphPool("cpu"), [], 0
    for number, (num_bytes, gone) in enumerate(history):
        value = number % 251
        live.append((pool.place_like(torch.full((num_bytes,), value, dtype=torch.uint8)), value))
        total += num_bytes + ALIGNMENT
        places = sorted((t.data_ptr(), t.data_ptr() + t.numel()) for t, _ in live)
        assert all(one[1] <= other[0] for one, other in pairwise(places))
        assert all(
            start % ALIGNMENT == pool.segments[0].data_ptr() % ALIGNMENT for start, _ in places
        )
        assert all(pool.owns(start) and pool.owns(end - 1) for start, end in places)
        assert all((t == v).all() for t, v in live), "somebody wrote into another one's memory"
        assert pool.peak_bytes <= min(total, pool.reserved_bytes)
        if gone < len(live):
            del live[gone]


@pytest.mark.parametrize("num_bytes", [1, 64, 100_000])
def test_a_gap_is_used_again_if_it_is_large_enough(num_bytes: int) -> None:
    pool = GraphPool("cpu")
    first, middle, last = (
        pool.place_like(torch.zeros(num_bytes, dtype=torch.uint8)) for _ in "123"
    )
    address = middle.data_ptr()
    del middle
    larger = pool.place_like(torch.zeros(num_bytes + ALIGNMENT, dtype=torch.uint8))
    assert larger.data_ptr() > last.data_ptr() > first.data_ptr()
    fitting = pool.place_like(torch.zeros(num_bytes, dtype=torch.uint8))
    assert fitting.data_ptr() == address
    assert pool.num_reused == 1
