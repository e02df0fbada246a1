"""The recorder's manners: what a replay sees, what it repeats, and what it must be left with."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from mamba_kernels.backend import jit, tl
from mamba_kernels.launch import collect_variants, count_launches, launch
from mamba_teach.runner.graph_interface import GraphCaptureError, GraphReplayError
from mamba_teach.runner.graph_recorder import RecordedGraph

interpreter = pytest.mark.interpreter
Function = Callable[..., Any]


def recorded(function: Function, *inputs: Any) -> tuple[RecordedGraph, Any]:
    """A graph of ``function(*inputs)``, and what it returned at capture."""
    graph = RecordedGraph("cpu")
    with graph.capture():
        result = function(*inputs)
    return graph, result


# What a replay sees ---------------------------------------------------------------------------


def test_a_copied_input_is_seen_and_a_rebound_one_is_not() -> None:
    x = torch.tensor([1.0, 2.0])
    first = x
    graph, y = recorded(lambda: x * 10)
    assert y.tolist() == [10.0, 20.0]
    x.copy_(torch.tensor([3.0, 4.0]))
    graph.replay()
    assert y.tolist() == [30.0, 40.0]
    x = torch.tensor([5.0, 6.0])  # another tensor of that name: the graph reads the first one
    graph.replay()
    assert y.tolist() == [30.0, 40.0]
    first.add_(1.0)
    graph.replay()
    assert y.tolist() == [40.0, 50.0]


def test_python_numbers_and_branches_are_those_of_the_capture() -> None:
    x, scale, double = torch.ones(3), 2.0, True

    def step() -> torch.Tensor:
        y = x * scale
        return y + y if double else y

    graph, y = recorded(step)
    scale, double = 100.0, False
    x.fill_(3.0)
    graph.replay()
    assert y.tolist() == [12.0] * 3
    assert step().tolist() == [300.0] * 3


def test_what_a_graph_updates_goes_on_from_there() -> None:
    count = torch.zeros(2)
    graph, _ = recorded(lambda: count.add_(1.0))
    for _ in range(3):
        graph.replay()
    assert count.tolist() == [4.0, 4.0]  # once at capture
    assert [node.name for node in graph.nodes] == ["aten.add_.Tensor"]


def test_nodes_say_what_was_read_and_written() -> None:
    x, weight = torch.ones(6, 8), torch.ones(8, 2)
    graph, y = recorded(lambda: F.relu(x[2:] @ weight))
    product, relu = graph.nodes
    assert (product.name, product.kind, product.shape) == ("aten.mm.default", "op", (4, 2))
    assert product.reads == (x.data_ptr(), weight.data_ptr())  # of the memory, not of the view
    assert relu.reads == product.writes and relu.writes == (y.data_ptr(),)
    assert graph.inputs == {x.data_ptr(): 6 * 8 * 4, weight.data_ptr(): 8 * 2 * 4}
    assert graph.pool.owns(y.data_ptr()) and not graph.pool.owns(x.data_ptr())


def test_work_outside_the_capture_is_not_recorded() -> None:
    x = torch.ones(2)
    graph, y = recorded(lambda: x + 1)
    z = y * 5
    x.fill_(2.0)
    graph.replay()
    assert (y.tolist(), z.tolist()) == ([3.0] * 2, [10.0] * 2)
    assert len(graph.nodes) == 1


# Uninitialised memory --------------------------------------------------------------------------


def test_what_nobody_writes_shows_when_empty_memory_is_poisoned() -> None:
    def half() -> tuple[torch.Tensor, torch.Tensor]:
        y, numbers = torch.empty(4), torch.empty(4, dtype=torch.int32)
        y[:2] = x
        return y, numbers

    x = torch.ones(2)
    graph, (y, numbers) = recorded(half)
    y.fill_(5.0)
    numbers.fill_(5)
    graph.replay()
    assert y.tolist() == [1.0, 1.0, 5.0, 5.0]  # a graph leaves it as it was
    graph.poison_empty = True
    graph.replay()
    assert y[:2].tolist() == [1.0, 1.0] and y[2:].isnan().all()
    assert numbers.tolist() == [5] * 4  # integers have no NaN


# One capture, for good ----------------------------------------------------------------------------


def test_a_graph_is_captured_once_and_not_replayed_before() -> None:
    graph = RecordedGraph("cpu")
    with pytest.raises(GraphReplayError, match="empty"):
        graph.replay()
    x = torch.ones(2)
    with graph.capture():
        y = x + 1
    with pytest.raises(GraphCaptureError, match="captured once"):
        with graph.capture():
            x + 2
    x.fill_(4.0)
    graph.replay()  # the refused attempt has changed nothing
    assert y.tolist() == [5.0, 5.0] and len(graph.nodes) == 1


def test_a_capture_that_fails_half_way_leaves_nothing_to_replay() -> None:
    graph = RecordedGraph("cpu")
    with pytest.raises(KeyError), graph.capture():
        torch.ones(2) + 1
        raise KeyError("a mistake of somebody else")
    with pytest.raises(GraphReplayError, match="broken"):
        graph.replay()


# Memory that must stay ---------------------------------------------------------------------------


def test_a_freed_input_is_an_error_and_a_kept_one_is_not() -> None:
    inputs = {"freed": torch.ones(3), "kept": torch.ones(3, 5)}
    broken, _ = recorded(lambda: inputs["freed"] + 1)
    graph, y = recorded(lambda: inputs["kept"].sum(1) * 2)
    del inputs["freed"]
    with pytest.raises(GraphReplayError, match=r"aten\.add\.Tensor .*freed \(12 bytes\)"):
        broken.replay()
    inputs["kept"][0] = 2.0
    graph.replay()
    assert y.tolist() == [20.0, 10.0, 10.0]
    inputs["kept"] = inputs["kept"][0]  # a view holds all of the memory
    graph.replay()
    del inputs["kept"]
    with pytest.raises(GraphReplayError, match=r"aten\.sum.*freed \(60 bytes\)"):
        graph.replay()


def test_what_a_graph_makes_needs_no_keeping() -> None:
    x = torch.ones(3)
    graph, y = recorded(lambda: ((x + 1) * 2).exp().log())
    x.fill_(2.0)
    graph.replay()
    torch.testing.assert_close(y, torch.full((3,), 6.0))


# Kernels -----------------------------------------------------------------------------------------


@jit(do_not_specialize=["count"])
def scale_kernel(x_ptr, y_ptr, count, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + place, mask=place < count, other=0.0).to(tl.float32)
    tl.store(y_ptr + place, x * 3.0, mask=place < count)


def scale(x: torch.Tensor, block: int = 4) -> torch.Tensor:
    y = torch.empty_like(x)
    launch(scale_kernel, (-(-len(x) // block),), x, y, len(x), BLOCK=block)
    return y


@interpreter
def test_launches_are_recorded_and_replayed_in_their_places() -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    with count_launches() as count:
        graph, y = recorded(lambda: scale(scale(x + 1) - 1) * 10)
    assert count.by_kernel == {"scale_kernel": 2}
    kinds = [(node.kind, node.name) for node in graph.nodes if "empty" not in node.name]
    assert kinds == [
        ("op", "aten.add.Tensor"),
        ("kernel", "scale_kernel"),
        ("op", "aten.sub.Tensor"),
        ("kernel", "scale_kernel"),
        ("op", "aten.mul.Tensor"),
    ]
    graph.poison_empty = True
    x.copy_(torch.tensor([0.0, 10.0, 20.0, 30.0, 40.0]))
    graph.replay()
    assert y.tolist() == [10 * 3 * (3 * (v + 1) - 1) for v in (0, 10, 20, 30, 40)]


@interpreter
def test_a_variant_that_was_not_warmed_up_is_refused() -> None:
    x = torch.ones(5)
    with collect_variants() as warmed:
        scale(x)
    for function, known in (
        (lambda: scale(x), True),
        (lambda: scale(x[:3].clone()), True),  # as many elements as it likes
        (lambda: scale(x, block=8), False),
        (lambda: scale(x.double()), False),
        (lambda: scale(torch.ones(5)[1:]), False),  # not aligned to 16 bytes
    ):
        graph = RecordedGraph("cpu", warmed_variants=warmed)
        if known:
            with graph.capture():
                function()
            continue
        with pytest.raises(GraphCaptureError, match=r"scale_kernel during capture: .*warm-up"):
            with graph.capture():
                function()
        with pytest.raises(GraphReplayError, match="broken"):
            graph.replay()
    graph = RecordedGraph("cpu", warmed_variants=set())
    with pytest.raises(GraphCaptureError, match="scale_kernel"), graph.capture():
        scale(x)
    scale(x, block=16)  # outside a capture nobody minds


def test_a_result_outlives_its_graph() -> None:
    x = torch.arange(4.0)
    graph = RecordedGraph("cpu")
    with graph.capture():
        y = x + 1
    del graph
    gc.collect()
    torch.full((1 << 20,), 7.0)  # somebody else's memory, perhaps where the pool was
    assert y.tolist() == [1.0, 2.0, 3.0, 4.0]


def test_a_number_on_the_host_is_frozen_by_value() -> None:
    x = torch.zeros(3)
    graph = RecordedGraph("cpu")
    with graph.capture():
        x[0] = 5.0
    x.zero_()
    gc.collect()
    graph.replay()
    assert x.tolist() == [5.0, 0.0, 0.0]


def test_a_freed_tensor_without_elements_is_no_loss() -> None:
    x, empty = torch.ones(2), torch.zeros(0)
    graph = RecordedGraph("cpu")
    with graph.capture():
        y = torch.cat([x, empty])
    del empty
    gc.collect()
    graph.replay()
    assert y.tolist() == [1.0, 1.0]
