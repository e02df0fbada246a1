"""CUDA graphs, behind the same interface as the recorder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mamba_teach.runner.graph_interface import GraphCaptureError, GraphReplayError


class CudaGraph:
    """A CUDA graph.

    Args:
        pool: memory pool to share with other graphs (``torch.cuda.graph_pool_handle()``), or None
            for one of its own.
    """

    def __init__(self, pool: Any = None) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._pool = pool
        self._captured = False

    @contextmanager
    def capture(self) -> Iterator[None]:
        """See :class:`Graph`."""
        if self._captured:
            raise GraphCaptureError("a graph is captured once; make another one")
        try:
            with torch.cuda.graph(self._graph, pool=self._pool):
                yield
        except torch.AcceleratorError as error:
            raise GraphCaptureError(f"CUDA could not capture this: {error}") from error
        self._captured = True

    def replay(self) -> None:
        """See :class:`Graph`."""
        if not self._captured:
            raise GraphReplayError("nothing was captured")
        self._graph.replay()
