"""The replay index: which state a request last wrote, and which inputs have come since.

With ``spec_state="replay"`` a step does not write a state per token. A request has one *checkpoint*
state, in some column of its block table, and a ring of the inputs behind it
(:mod:`mamba_kernels.replay`). Its *cursor* says where both are. Every step appends inputs; when they no
longer fit, the step also writes a new checkpoint, by a rule that the kernel and this file share
(``must_flush``).

The columns: a flush writes the state after ``n`` tokens, before those of the step, to the column of the
step's first token. That is never a published block: at a block's boundary the state is *materialized*
into the block's own column at the end of the step, and becomes the checkpoint, read-only from then on.
So with replay there are no scratch columns, and a request holds three blocks at most in mode "align".

Prefill writes states as ever, and leaves the cursor behind a fresh checkpoint with nothing pending. A
request that lost its blocks has no cursor, and starts with the state of its hit and an empty ring.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from mamba_kernels import ReplayRing, must_flush
from mamba_teach import events
from mamba_teach.cache.columns import (
    boundaries,
    first_scheduled_column,
    last_computed_column,
    last_scheduled_column,
)
from mamba_teach.cache.groups import CacheGroup
from mamba_teach.cache.specs import MambaSpec
from mamba_teach.model.metadata import LayerCache, MambaCache
from mamba_teach.runner.block_table import BlockTables
from mamba_teach.scheduler import ScheduledRow

Materialize = Callable[..., None]


@dataclass(frozen=True)
class ReplayCursor:
    """Where a request's state is.

    Attributes:
        column: of the checkpoint, in every Mamba group.
        start: ring entry of the oldest pending input.
        pending: inputs behind the checkpoint.
    """

    column: int
    start: int = 0
    pending: int = 0


@dataclass(frozen=True)
class ReplayRows:
    """The cursors of a step's rows, ``(R,)`` int32 each, on the host.

    Attributes:
        column: of the checkpoint; 0 where there is no state yet.
        ring_row: of the request; its row in the block tables, behind the null row.
        ring_start, num_pending: as in :class:`ReplayCursor`.
        flushes: whether the step writes a new checkpoint.
    """

    column: torch.Tensor
    ring_row: torch.Tensor
    ring_start: torch.Tensor
    num_pending: torch.Tensor
    flushes: list[bool]


class ReplayIndex:
    """Cursors of all running requests.

    Args:
        groups, caches: of the engine; the Mamba layers' caches have rings.
        materialize: writes boundary states, as :func:`mamba_kernels.materialize_states` does.
        emit: the event log.
    """

    def __init__(
        self,
        groups: tuple[CacheGroup, ...],
        caches: Sequence[LayerCache],
        materialize: Materialize,
        emit: Callable[[events.Event], None],
    ) -> None:
        self.cursors: dict[str, ReplayCursor] = {}
        self._materialize = materialize
        self._emit = emit
        # Rings belong to a layer, not to a position, so groups cannot share a launch as copies do.
        self._groups: list[tuple[int, list[tuple[torch.Tensor, ReplayRing]]]] = []
        for index, group in enumerate(groups):
            if isinstance(group.spec, MambaSpec):
                layers = []
                for layer in group.layers:
                    cache = caches[layer]
                    assert isinstance(cache, MambaCache) and cache.ring is not None
                    layers.append((cache.ssm, cache.ring))
                self._groups.append((index, layers))
        spec = groups[self._groups[0][0]].spec
        assert isinstance(spec, MambaSpec)
        self.block_size = spec.block_size
        self.keeps_boundaries = spec.mamba_cache_mode != "none"
        ring = self._groups[0][1][0][1]
        self.capacity, self.max_query_len, self.length = ring.capacity, ring.max_query_len, ring.length

    def warm_up(self) -> None:
        """Launch what a step's end may launch, on the null slot."""
        for _, layers in self._groups:
            null = torch.zeros(1, dtype=torch.int32, device=layers[0][0].device)
            self._materialize(
                layers,
                src_slots=null,
                ring_rows=null,
                ring_starts=null,
                num_inputs=null[:, None],
                dst_slots=null[:, None],
            )

    def cleanup(self, request_ids: Iterable[str]) -> None:
        """Forget requests that lost their blocks."""
        for request_id in request_ids:
            self.cursors.pop(request_id, None)

    def cursor(self, row: ScheduledRow) -> ReplayCursor:
        """The row's cursor before its step."""
        known = self.cursors.get(row.request.request_id)
        if known is not None:
            return known
        return ReplayCursor(max(0, last_computed_column(row.num_computed, self.block_size)))

    def flushes(self, row: ScheduledRow) -> bool:
        """Whether the row's step writes a new checkpoint."""
        pending = self.cursor(row).pending
        return row.is_decode and must_flush(pending, self.max_query_len, self.capacity)

    def preprocess(self, rows: Sequence[ScheduledRow], table_rows: torch.Tensor) -> ReplayRows:
        """What the step's rows have to know."""
        cursors = [self.cursor(row) for row in rows]

        def column(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32)

        return ReplayRows(
            column=column([cursor.column for cursor in cursors]),
            ring_row=table_rows.int() + 1,
            ring_start=column([cursor.start for cursor in cursors]),
            num_pending=column([cursor.pending for cursor in cursors]),
            flushes=[self.flushes(row) for row in rows],
        )

    def postprocess(
        self, rows: Sequence[ScheduledRow], num_kept: Sequence[int], tables: BlockTables
    ) -> None:
        """Move the cursors behind a step, and write the state of every block that it completed.

        Args:
            rows: of the step.
            num_kept: tokens that count, of decode rows; ignored for others.
            tables: the block tables.
        """
        wanted: list[tuple[str, ReplayCursor, list[tuple[int, int]]]] = []
        for row, kept in zip(rows, num_kept, strict=True):
            request_id, n = row.request.request_id, row.num_computed
            if not row.is_decode:
                last = last_scheduled_column(row.seq_len, self.block_size)
                self.cursors[request_id] = ReplayCursor(last)
                continue
            cursor = self.cursor(row)
            if self.flushes(row):
                start = (cursor.start + cursor.pending) % self.length
                cursor = ReplayCursor(first_scheduled_column(n, self.block_size), start)
            ends = boundaries(n, n + kept, self.block_size) if self.keeps_boundaries else range(0)
            states = [(cursor.pending + end - n, end) for end in ends]
            pending = cursor.pending + kept
            if states:
                wanted.append((request_id, cursor, states))
                added, end = states[-1]
                start = (cursor.start + added) % self.length
                cursor, pending = ReplayCursor(end // self.block_size - 1, start), pending - added
            self.cursors[request_id] = ReplayCursor(cursor.column, cursor.start, pending)
        if wanted:
            self._write_boundaries(wanted, tables)

    def _write_boundaries(
        self, wanted: list[tuple[str, ReplayCursor, list[tuple[int, int]]]], tables: BlockTables
    ) -> None:
        """Per request its cursor and *(inputs to add, tokens in the state)* of every boundary."""
        table_rows = tables.rows([request_id for request_id, _, _ in wanted])
        most = max(len(states) for _, _, states in wanted)
        num_inputs = torch.zeros(len(wanted), most, dtype=torch.int32)
        columns = torch.full((len(wanted), most), -1, dtype=torch.int64)  # -1: no state wanted
        for i, (_, _, states) in enumerate(wanted):
            num_inputs[i, : len(states)] = torch.tensor([added for added, _ in states])
            columns[i, : len(states)] = torch.tensor(
                [end // self.block_size - 1 for _, end in states]
            )
        of_cursor = torch.tensor([[c.column, c.start] for _, c, _ in wanted])
        for group, layers in self._groups:
            table = tables.tables[group]
            src = table[table_rows, of_cursor[:, 0]]
            dst = torch.where(columns >= 0, table[table_rows[:, None], columns.clamp(min=0)], 0)
            device = layers[0][0].device
            self._materialize(
                layers,
                src_slots=src.to(device),
                ring_rows=(table_rows + 1).int().to(device),
                ring_starts=of_cursor[:, 1].int().to(device),
                num_inputs=num_inputs.to(device),
                dst_slots=dst.int().to(device),
            )
            for i, (request_id, _, states) in enumerate(wanted):
                for s, (_, end) in enumerate(states):
                    copied = events.StateCopied(request_id, group, int(src[i]), int(dst[i, s]), end)
                    self._emit(copied)
