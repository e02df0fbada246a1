"""What a capture refuses, in the words of whoever wrote it, and what it must not refuse."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from graphs.test_recorder import Function, recorded

from mamba_teach.runner.graph_interface import GraphCaptureError, GraphReplayError
from mamba_teach.runner.graph_recorder import RecordedGraph

MASK = torch.tensor([True, False, True, True])
READ = "(item|_local_scalar_dense|is_nonzero)"  # which of them depends on the torch version
SYNC, SHAPE, FROM_HOST = "host reads a value", "shape depends on values", "made of Python numbers"
REFUSED: list[tuple[str, Function, str, str]] = [
    ("item", lambda x: x[0].item(), READ, SYNC),
    ("float", lambda x: float(x[0]), READ, SYNC),
    ("int", lambda x: int(x[0]), READ, SYNC),
    ("bool", lambda x: bool(x[0]), READ, SYNC),
    ("if", lambda x: 1 if (x > 2).any() else 0, READ, SYNC),
    ("a slice's end", lambda x: x[: x.argmax()], READ, SYNC),
    ("tolist", lambda x: x.tolist(), "tolist", SYNC),
    ("numpy", lambda x: x.numpy(), "numpy", SYNC),
    ("np.asarray", lambda x: np.asarray(x), "__array__", SYNC),
    ("cpu", lambda x: x.cpu(), "cpu", SYNC),
    ("print", lambda x: print(x), "__repr__", SYNC),
    ("str", lambda x: str(x), "__repr__", SYNC),
    ("f-string", lambda x: f"{x[0]:.2f}", "__format__", SYNC),
    ("equal", lambda x: torch.equal(x, x), "equal", SYNC),
    ("allclose", lambda x: torch.allclose(x, x), "allclose", SYNC),
    ("mask indexing", lambda x: x[MASK], r"index\.Tensor", SHAPE),
    ("mask of bytes", lambda x: x[MASK.byte()], r"index\.Tensor", SHAPE),
    ("masked assignment", lambda x: x.__setitem__(MASK, x[:3] * 2), "index_put_", SHAPE),
    ("masked fill", lambda x: x.__setitem__(MASK, 0.0), "index_put_", SHAPE),
    ("nonzero", lambda x: x.nonzero(), "nonzero", SHAPE),
    ("where", lambda x: torch.where(x > 2), "(nonzero|where)", SHAPE),
    ("masked_select", lambda x: x.masked_select(MASK), "masked_select", SHAPE),
    ("unique", lambda x: x.unique(), "_unique2?", SHAPE),
    ("unique_consecutive", lambda x: x.unique_consecutive(), "unique_consecutive", SHAPE),
    ("bincount", lambda x: torch.bincount(x.int()), "bincount", SHAPE),
    ("repeat_interleave", lambda x: torch.repeat_interleave(x.int()), "repeat_interleave", SHAPE),
    ("repeats", lambda x: x.repeat_interleave(x.int()), "repeat_interleave", SHAPE),
    ("torch.tensor", lambda x: x + torch.tensor([1.0] * 4), "tensor", FROM_HOST),
    ("as_tensor", lambda x: x + torch.as_tensor([1.0] * 4), "as_tensor", FROM_HOST),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", [case[0] for case in REFUSED])
def test_a_capture_refuses(name: str, inference: bool) -> None:
    _, function, operation, why = next(case for case in REFUSED if case[0] == name)
    with torch.inference_mode(inference):
        x, graph = torch.tensor([1.0, 2.0, 3.0, 1.0]), RecordedGraph("cpu")
        function(x.clone())  # there is nothing wrong with it outside
        with pytest.raises(GraphCaptureError, match=rf"{operation}\b.* during capture: .*{why}"):
            with graph.capture():
                function(x * 1)
        with pytest.raises(GraphReplayError, match="broken"):
            graph.replay()
        with pytest.raises(GraphCaptureError, match="captured once"):
            with graph.capture():
                pass
        assert x.tolist() and function(x.clone()) is not x  # and the recorder listens no longer


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x + x.new_tensor([1.0, 2.0]),
        lambda x: x + torch.Tensor([1.0, 2.0]),
        lambda x: x + torch.from_numpy(np.ones(2)),
        lambda x: x[[1, 0]],
    ],
)
def test_host_numbers_by_other_ways_are_noticed_at_replay_at_the_latest(function: Function) -> None:
    x, graph = torch.ones(2), RecordedGraph("cpu")
    with pytest.raises((GraphCaptureError, GraphReplayError), match=r"Python numbers|freed"):
        with graph.capture():
            function(x)
        graph.replay()


def test_shapes_that_are_known_are_not_refused() -> None:
    repeats = torch.tensor([2, 0, 1])

    def known(x: torch.Tensor) -> torch.Tensor:
        a = x.repeat_interleave(repeats, output_size=3)
        return torch.cat(
            [a, x.repeat_interleave(2), torch.where(x > 2, x, 0.0), x.masked_fill(x > 2, 0)]
        )

    x = torch.tensor([1.0, 2.0, 3.0])
    graph, y = recorded(known, x)
    x.copy_(torch.tensor([4.0, 5.0, 0.5]))
    repeats.copy_(torch.tensor([0, 1, 2]))
    graph.replay()
    assert y.tolist() == [5.0, 0.5, 0.5] + [4.0, 4.0, 5.0, 5.0, 0.5, 0.5] + [4.0, 5.0, 0.0] + [
        0.0, 0.0, 0.5,
    ]  # fmt: skip
