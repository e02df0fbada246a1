"""Decode steps as graphs: which are captured, and which steps they serve.

One graph per number of requests in a list. A step of three requests runs in the graph of four, whose
fourth row is padding: no tokens, null slots, a count of 1. Only *uniform decode* steps fit: every row
brings its last token and all ``k`` drafts. Any other step (a prompt, a row with fewer drafts, more
requests than the largest graph has) runs eagerly. Padding is counted in requests, never in tokens: a
buffer with a row per request has no place for a token's index.

Graphs are captured on rows of padding alone, so capture touches no live state; from the largest to the
smallest, so that all find their memory in what the first one took.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, is_dataclass

import torch

from mamba_kernels.launch import Variant
from mamba_teach.cache.groups import CacheGroup
from mamba_teach.model.metadata import LayerCache
from mamba_teach.runner.graph_interface import Graph, GraphReplayError
from mamba_teach.runner.graph_recorder import RecordedGraph, tensors_in
from mamba_teach.runner.graphs import make_graph, make_pool
from mamba_teach.runner.served_model import ServedModel
from mamba_teach.runner.step_metadata import StepInputs, StepMetadataBuilder
from mamba_teach.scheduler import ScheduledRow


@dataclass(frozen=True)
class Dispatch:
    """How a step is run.

    Attributes:
        graph_size: requests of the graph, or None for an eager step.
        reason: for people.
    """

    graph_size: int | None
    reason: str


@dataclass(frozen=True)
class CapturedStep:
    """A graph, the addresses it reads its inputs from, and what it returns.

    Attributes:
        hidden: ``(T, hidden)``.
        logits: ``(T, vocab)`` of every token.
    """

    graph: Graph
    addresses: tuple[int, ...]
    hidden: torch.Tensor
    logits: torch.Tensor


class DecodeGraphs:
    """Graphs of uniform decode steps.

    Attributes:
        kind: "cuda" or "record".
        steps: number of requests -> what was captured for it.
    """

    def __init__(
        self,
        kind: str,
        sizes: Sequence[int],
        model: ServedModel,
        caches: Sequence[LayerCache],
        metadata: StepMetadataBuilder,
        device: torch.device,
        warmed_variants: set[Variant] | None,
    ) -> None:
        self.kind = kind
        self.tokens_per_row = metadata.tokens_per_row
        self.steps: dict[int, CapturedStep] = {}
        pool = make_pool(kind, device)
        for size in sorted(sizes, reverse=True):
            inputs = metadata.padding(size)
            run_step(model, inputs, caches)  # libraries choose their algorithms, and allocate, here
            graph = make_graph(kind, device, pool)
            if isinstance(graph, RecordedGraph):
                graph.warmed_variants = warmed_variants
            with graph.capture():
                hidden, logits = run_step(model, inputs, caches)
            self.steps[size] = CapturedStep(graph, addresses_of(inputs), hidden, logits)

    @property
    def num_launches(self) -> int:
        """Operations and kernels in the largest graph, by the recorder's count; 0 if nobody counted."""
        graph = self.steps[max(self.steps)].graph
        return len(graph.nodes) if isinstance(graph, RecordedGraph) else 0

    def dispatch(self, rows: Sequence[ScheduledRow]) -> Dispatch:
        """Which graph serves a step, if any, and why."""
        wanted = self.tokens_per_row
        if prefills := sum(not row.is_decode for row in rows):
            return Dispatch(None, f"{prefills} of {len(rows)} rows are prefills")
        for row in rows:
            if row.num_tokens != wanted:
                return Dispatch(
                    None,
                    f"{row.request.request_id} has {row.num_tokens} tokens; graphs want {wanted}",
                )
        fitting = [size for size in self.steps if size >= len(rows)]
        if not fitting:
            return Dispatch(None, f"{len(rows)} rows; the largest graph has {max(self.steps)}")
        size = min(fitting)
        padding = f", {size - len(rows)} of them padding" if size > len(rows) else ""
        return Dispatch(size, f"{len(rows)} decode rows of {wanted} tokens in {size} rows{padding}")

    def run(self, size: int, inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Replay the graph of ``size`` requests on inputs that are in its buffers already.

        Returns:
            Hidden states and logits of every token, rows of padding included. The next replay, of
            any size, overwrites them.

        Raises:
            GraphReplayError: an input is not where it was at capture.
        """
        step = self.steps[size]
        now = addresses_of(inputs)
        if now != step.addresses:
            names = names_of(inputs)
            moved = [name for name, a, b in zip(names, now, step.addresses) if a != b]
            raise GraphReplayError(
                f"not where they were when the graph of {size} requests was captured: "
                f"{', '.join(moved)}; it would read what lies there now"
            )
        step.graph.replay()
        return step.hidden, step.logits


def run_step(
    model: ServedModel, inputs: StepInputs, caches: Sequence[LayerCache]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states and logits of all tokens: what a graph does."""
    hidden = model(inputs.token_ids, inputs.metadata, caches)
    return hidden, model.compute_logits(hidden)


def addresses_of(inputs: StepInputs) -> tuple[int, ...]:
    """Where the tensors of a step's inputs begin in memory, in a fixed order."""
    return tuple(t.data_ptr() for t in tensors_in((inputs.token_ids, inputs.metadata)))


def names_of(inputs: StepInputs) -> list[str]:
    """What the addresses of :func:`addresses_of` belong to, such as "conv_src_slots of layer 0"."""
    names = ["token_ids"]
    for layer, of_layer in enumerate(inputs.metadata):
        parts = [of_layer, *vars(of_layer).values()] if of_layer is not None else []
        for part in parts:
            fields = vars(part) if is_dataclass(part) else {}
            tensors = [name for name, value in fields.items() if isinstance(value, torch.Tensor)]
            names += [f"{name} of layer {layer}" for name in tensors]
    return names


def check_pool(sizes: Sequence[int], groups: Sequence[CacheGroup], num_blocks: int) -> None:
    """Refuse graphs for more requests than the pool can ever let decode at once.

    Raises:
        ValueError: names the number of requests and of blocks.
    """
    per_request = sum(group.spec.min_blocks_for_decode() for group in groups)
    largest, usable = max(sizes), num_blocks - 1
    if largest * per_request > usable:
        raise ValueError(
            f"a graph for {largest} requests can never be used: each holds at least {per_request} "
            f"blocks, and the pool has {usable}, enough for {usable // per_request} requests; lower "
            f"max_num_seqs or raise num_blocks"
        )


def default_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Numbers of requests to capture for: 1, 2, 4, every multiple of 8, and the most there can be."""
    sizes = {1, 2, 4, *range(8, max_num_seqs + 1, 8), max_num_seqs}
    return tuple(sorted(size for size in sizes if size <= max_num_seqs))
