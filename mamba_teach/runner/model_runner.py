"""The model runner: owns the caches and the block tables, and runs one step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from mamba_kernels import materialize_states
from mamba_kernels.backend import choose_backend
from mamba_kernels.launch import collect_variants
from mamba_teach import events
from mamba_teach.cache.groups import CacheGroup
from mamba_teach.config import EngineConfig
from mamba_teach.runner.block_table import BlockTables
from mamba_teach.runner.decode_graphs import DecodeGraphs, Dispatch, check_pool, default_sizes
from mamba_teach.runner.graphs import resolve_graphs
from mamba_teach.runner.pages import allocate_pages, poison_blocks
from mamba_teach.runner.replay_index import ReplayIndex
from mamba_teach.runner.sampler import sample
from mamba_teach.runner.served_model import ServedModel
from mamba_teach.runner.state_index import StateIndex
from mamba_teach.runner.step_metadata import StepMetadataBuilder
from mamba_teach.runner.warmup import warm_up
from mamba_teach.scheduler import Schedule
from mamba_teach.spec_decode.proposer import DraftContext, DraftRow, Proposer
from mamba_teach.spec_decode.rejection import verify

CPU_CHUNK_SIZE = 64  # measured fastest there; on a GPU the model's own chunk size is used


@dataclass(frozen=True)
class RowResult:
    """What a step made of a row.

    Attributes:
        sampled: new tokens, drafts that were right and one more; empty if the row has more known
            tokens to compute.
        drafts: guesses of what follows, for its next step.
    """

    sampled: list[int]
    drafts: list[int]


class ModelRunner:
    """Executes schedules on a model.

    Attributes:
        caches: one per layer, the MTP head's behind the trunk's; page 0 of each is the null page.
        tables: the block tables.
        state_index: where the last step of each request left its states.
        proposer: who drafts, or None.
        graphs: captured decode steps, or None.
    """

    def __init__(
        self,
        model: ServedModel,
        config: EngineConfig,
        groups: tuple[CacheGroup, ...],
        num_blocks: int,
        emit: Callable[[events.Event], None],
        proposer: Proposer | None = None,
    ) -> None:
        self.model = model
        self.poison = config.poison
        self.proposer = proposer
        self.max_drafts = config.num_speculative_tokens
        self.watch_step = getattr(model, "watch_step", None)  # the ghost's; others need none
        self._emit = emit
        device = model.device
        chunk_size = CPU_CHUNK_SIZE if device.type == "cpu" else model.config.chunk_size
        num_layers = len(model.config.pattern + model.config.mtp_pattern)
        self.caches = allocate_pages(groups, num_layers, num_blocks, device, config.max_num_seqs)
        self.tables = BlockTables(groups, config.max_num_seqs, config.max_model_len)
        replay = None
        if config.spec_state == "replay" and any(g.spec.kind == "mamba" for g in groups):
            write = getattr(model, "materialize_states", materialize_states)  # the ghost has its own
            replay = ReplayIndex(groups, self.caches, write, emit)
        self.state_index = StateIndex(
            groups, self.caches, config.max_num_seqs, config.num_speculative_tokens, emit, replay
        )
        self.metadata = StepMetadataBuilder(groups, num_layers, config, chunk_size, device)
        warmed = None
        if choose_backend(torch.empty(0, device=device)) == "triton":
            k = config.num_speculative_tokens
            with collect_variants() as warmed:
                warm_up(model, groups, self.caches, chunk_size, num_speculative_tokens=k)
                self.state_index.warm_up()
        self.graphs: DecodeGraphs | None = None
        if (kind := resolve_graphs(config.graphs, device)) != "off":
            sizes = config.graph_capture_sizes or default_sizes(config.max_num_seqs)
            check_pool(sizes, groups, num_blocks)
            with torch.inference_mode():
                self.graphs = DecodeGraphs(
                    kind, sizes, model, self.caches, self.metadata, device, warmed
                )

    @property
    def graph_kind(self) -> str:
        """How decode steps are launched: "off", "record" or "cuda"."""
        return "off" if self.graphs is None else self.graphs.kind

    @torch.inference_mode()
    def execute(self, schedule: Schedule) -> list[RowResult]:
        """Run a step; mutates the caches.

        Returns:
            One result per row.
        """
        self.tables.apply(schedule.updates)
        self.state_index.cleanup_mamba_state_idx(schedule.updates.cleared)
        if self.poison:
            poison_blocks(self.caches, schedule.updates.unowned)
        rows = schedule.rows
        if not rows:
            return []
        dispatch = self._dispatch(schedule)
        size = dispatch.graph_size
        inputs = self.metadata.build(schedule, self.tables, self.state_index, size)
        for access in inputs.accesses:
            self._emit(access)
        if self.watch_step is not None:
            self.watch_step(rows)
        if self.graphs is not None and size is not None:
            hidden, logits = self.graphs.run(size, inputs)
            logits = logits[inputs.sample_positions]
        else:
            hidden = self.model(inputs.token_ids, inputs.metadata, self.caches)
            logits = self.model.compute_logits(hidden[inputs.sample_positions])
        sampling = [row for row in rows if row.samples]
        lengths = [1 + row.num_drafts for row in sampling]
        chosen = iter(sample(logits, [row.request for row in sampling], lengths))
        new_tokens = [
            verify(row.draft_token_ids, next(chosen)) if row.samples else [] for row in rows
        ]
        self.state_index.postprocess_mamba(rows, [len(t) for t in new_tokens], self.tables)
        drafts = self._propose(schedule, new_tokens, hidden)
        return [RowResult(t, d) for t, d in zip(new_tokens, drafts, strict=True)]

    def _dispatch(self, schedule: Schedule) -> Dispatch:
        if self.graphs is None:
            return Dispatch(None, "there are no graphs")
        dispatch = self.graphs.dispatch(schedule.rows)
        path = "eager" if dispatch.graph_size is None else "graph"
        self._emit(events.StepDispatched(path, dispatch.graph_size or 0, dispatch.reason))
        return dispatch

    def _propose(
        self, schedule: Schedule, new_tokens: Sequence[list[int]], hidden: torch.Tensor
    ) -> list[list[int]]:
        """Drafts for every row's next step."""
        if self.proposer is None:
            return [[] for _ in new_tokens]
        rows, position = [], 0
        for row, tokens in zip(schedule.rows, new_tokens, strict=True):
            n_after = row.computed_after(len(tokens))
            # The next step computes the last new token and the drafts; none of them may be the last
            # token of all, which is never computed.
            room = row.request.max_computed_tokens - (n_after + 1)
            rows.append(
                DraftRow(
                    request=row.request,
                    new_tokens=tuple(tokens),
                    num_computed=row.num_computed,
                    num_computed_after=n_after,
                    first_position=position,
                    max_drafts=max(0, min(self.max_drafts, room)) if tokens else 0,
                )
            )
            position += row.num_tokens
        plan = partial(self.metadata.attention_for, tables=self.tables)
        return self.proposer.propose(rows, DraftContext(hidden, self.caches, plan))
