"""Graphs: a step's launches recorded once, and run again as one.

A decode step of a small batch is hundreds of tiny kernels, and a GPU waits for Python between them. A
CUDA graph records them once (*capture*) and launches all of them together afterwards (*replay*). The
price are its manners: a replay does exactly what was recorded, on exactly the same addresses, with the
same shapes, the same Python numbers, down the same branches. New inputs reach it in one way only: by
being copied into the memory it reads.

Two implementations of one interface::

    graph = make_graph("auto", device)
    with graph.capture():
        y = model(x)
    x.copy_(new_input)
    graph.replay()        # y holds the new result

``"cuda"`` is a real CUDA graph. ``"record"`` is a recorder that runs anywhere and behaves alike, down to
the mistakes; what a CUDA graph answers with a crash or with stale numbers, it explains.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol


class GraphCaptureError(RuntimeError):
    """Something was done during capture that a graph cannot record."""


class GraphReplayError(RuntimeError):
    """A replay would read or write something else than what was captured."""


class Graph(Protocol):
    """What was launched inside ``capture()``, to be launched again by ``replay()``."""

    def capture(self) -> AbstractContextManager[None]:
        """Record what is done inside; once per graph. The work is done while it is recorded by the
        recorder, and only recorded by CUDA.

        Raises:
            GraphCaptureError: it cannot be recorded; the graph is of no use then.
        """

    def replay(self) -> None:
        """Do it again, on the same addresses.

        Raises:
            GraphReplayError: nothing was captured, or memory that it reads has been freed.
        """
