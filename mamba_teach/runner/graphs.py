"""Making graphs: which kind, and with whose memory."""

from __future__ import annotations

from typing import Any

import torch

from mamba_teach.runner.cuda_graph import CudaGraph
from mamba_teach.runner.graph_interface import Graph
from mamba_teach.runner.graph_pool import GraphPool
from mamba_teach.runner.graph_recorder import RecordedGraph


def resolve_graphs(setting: str, device: torch.device) -> str:
    """The kind of graph for a setting: "off", "record" or "cuda".

    Raises:
        ValueError: "cuda" without a CUDA device.
    """
    if setting == "auto":
        return "cuda" if device.type == "cuda" else "record"
    if setting == "cuda" and device.type != "cuda":
        raise ValueError(
            f"graphs='cuda': the engine runs on {device.type!r}; 'record' works anywhere, 'auto' chooses"
        )
    return setting


def make_pool(kind: str, device: torch.device) -> Any:
    """Memory that several graphs of a kind can share."""
    return torch.cuda.graph_pool_handle() if kind == "cuda" else GraphPool(device)


def make_graph(kind: str, device: torch.device | str, pool: Any = None) -> Graph:
    """An empty graph.

    Args:
        kind: "cuda", "record", or "auto" for what suits the device.
        device: where the work is done.
        pool: from :func:`make_pool`, or None for memory of its own.
    """
    device = torch.device(device)
    kind = resolve_graphs(kind, device)
    if kind not in ("cuda", "record"):
        raise ValueError(f"kind={kind!r}: must be 'cuda', 'record' or 'auto'")
    return CudaGraph(pool) if kind == "cuda" else RecordedGraph(device, pool)
