"""The state index: where the last step of every request left its states, and how many of them count.

A step that checks drafts writes one state per token, to neighbouring columns. Which of them the next
step has to read is known only after verification, and cannot be told from the number of computed
tokens: after a rejection across a block boundary the two differ. So the column at which a step began
to write (its *anchor*) and the number of tokens kept from it are remembered per request, whatever the
step was, and forgotten when the request loses its blocks.

Example, blocks of 16 tokens, 3 drafts: a prompt of 13 leaves its state in column 0. The next step has
tokens 13 .. 16, so it writes to columns 1, 2, 3, 4 the states after 14, 15, 16, 17 tokens. Two tokens
are kept. The state after 15 tokens is then in column 1 + (2 - 1) = 2, although token 14 belongs to
column 0.

One mechanism serves all cache modes and all Mamba groups, since they have one block size. Names as in
vLLM (``mamba_state_idx``, ``preprocess_mamba``); sources: vLLM pull request 41233, and two faults that
survived it: the conv window is read through the same anchor as the state, and a block filled by
drafts gets its boundary state before it is published.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from mamba_kernels import copy_states
from mamba_teach import events
from mamba_teach.cache.block_pool import NULL_BLOCK_ID
from mamba_teach.cache.columns import boundaries, last_scheduled_column
from mamba_teach.cache.groups import CacheGroup
from mamba_teach.cache.specs import MambaSpec
from mamba_teach.model.metadata import LayerCache, MambaCache
from mamba_teach.runner.block_table import BlockTables
from mamba_teach.runner.persistent_buffer import PersistentBuffer
from mamba_teach.runner.replay_index import ReplayIndex
from mamba_teach.scheduler import ScheduledRow

UNKNOWN = -1  # in mamba_prev_last_scheduled_idx: the request has no previous step


class StateIndex:
    """Anchors and counts of all running requests, and the copies that follow from them.

    Attributes:
        mamba_state_idx: request id -> column at which its last step began to write.
        num_accepted_tokens: request id -> tokens kept of that step, from its first one on.
        mamba_prev_last_scheduled_idx: the anchors of a step's rows, ``(max_num_seqs,)`` int32 on the
            host. Exists whenever speculation is configured, whether or not a step has drafts; None
            without, since then the last computed token tells the column.
        replay: with replay, where states are instead; anchors and counts then tell of windows only.
    """

    def __init__(
        self,
        groups: tuple[CacheGroup, ...],
        caches: Sequence[LayerCache],
        max_num_seqs: int,
        num_speculative_tokens: int,
        emit: Callable[[events.Event], None],
        replay: ReplayIndex | None = None,
    ) -> None:
        self.replay = replay
        self._groups = [(i, g) for i, g in enumerate(groups) if isinstance(g.spec, MambaSpec)]
        self._emit = emit
        self.mamba_state_idx: dict[str, int] = {}
        self.num_accepted_tokens: dict[str, int] = {}
        self.mamba_prev_last_scheduled_idx: PersistentBuffer | None = None
        if num_speculative_tokens > 0:
            self.mamba_prev_last_scheduled_idx = PersistentBuffer(
                "mamba_prev_last_scheduled_idx",
                max_num_seqs,
                padding=UNKNOWN,
                device=torch.device("cpu"),
            )
        # Layers at one position share a buffer, and no block belongs to two groups: the views of
        # the largest group move the states of all groups at once.
        largest = max((group.layers for _, group in self._groups), key=len, default=())
        self._states = [
            (cache.conv, cache.ssm)
            for cache in (caches[layer] for layer in largest)
            if isinstance(cache, MambaCache)
        ]

    def warm_up(self) -> None:
        """Launch what a step's end may launch, on the null slot: nothing is to be compiled then."""
        if self.replay is not None:
            self.replay.warm_up()
        if self.mamba_prev_last_scheduled_idx is not None and self._states:
            null = torch.zeros(1, dtype=torch.int32, device=self._states[0][0].device)
            copy_states(self._states, null, null, null, conv_src_slots=null.clone())

    def cleanup_mamba_state_idx(self, request_ids: Iterable[str]) -> None:
        """Forget requests that lost their blocks: finished, preempted, or preempted and resumed."""
        request_ids = list(request_ids)
        if self.replay is not None:
            self.replay.cleanup(request_ids)
        for request_id in request_ids:
            self.mamba_state_idx.pop(request_id, None)
            self.num_accepted_tokens.pop(request_id, None)

    def preprocess_mamba(
        self, rows: Sequence[ScheduledRow]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """What the step's rows have to know of their previous steps.

        Returns:
            Anchors, -1 where there is none, and counts, 1 where there is none: ``(R,)`` int32 each,
            or None each without speculation.
        """
        if self.mamba_prev_last_scheduled_idx is None:
            return None, None
        ids = [row.request.request_id for row in rows]
        anchors = [self.mamba_state_idx.get(request_id, UNKNOWN) for request_id in ids]
        counts = [self.num_accepted_tokens.get(request_id, 1) for request_id in ids]
        filled = self.mamba_prev_last_scheduled_idx.refill(torch.tensor(anchors, dtype=torch.int32))
        return filled, torch.tensor(counts, dtype=torch.int32)

    def postprocess_mamba(
        self, rows: Sequence[ScheduledRow], num_kept: Sequence[int], tables: BlockTables
    ) -> None:
        """Record where a step wrote, and bring the state of every block it completed home.

        After verification ``n + a`` tokens are computed. Every block boundary that these pass needs
        its state in its own column before it can be published: boundary ``b`` lies in the scratch
        column of the step's token ``b - 1``, its window at that token's offset. Prefill writes
        boundary states itself.

        Args:
            rows: of the step.
            num_kept: ``a``, tokens that count, for rows with drafts; ignored for others.
            tables: the block tables.
        """
        if self.replay is not None:
            self.replay.postprocess(rows, num_kept, tables)
        if self.mamba_prev_last_scheduled_idx is None or not self._groups:
            return
        copies: list[tuple[int, int, int, int]] = []  # source, window's source, destination, offset
        spec = self._groups[0][1].spec
        assert isinstance(spec, MambaSpec)
        for row, kept in zip(rows, num_kept, strict=True):
            request_id, n = row.request.request_id, row.num_computed
            last = last_scheduled_column(row.seq_len, spec.block_size)
            accepted = kept if row.num_drafts else 1
            ends = boundaries(n, n + accepted, spec.block_size) if row.num_drafts else ()
            for end in ends if spec.mamba_cache_mode != "none" else ():
                home, place = end // spec.block_size - 1, end - n - 1
                copies += self._copies(request_id, tables, last, home, place, end)
                if home == last:  # the live column itself now holds the last token's state
                    accepted = 1
            self.mamba_state_idx[request_id] = last
            self.num_accepted_tokens[request_id] = accepted
        if copies:
            device = self._states[0][0].device
            src, conv_src, dst, offset = torch.tensor(copies, dtype=torch.int32).T.contiguous()
            copy_states(
                self._states,
                src.to(device),
                dst.to(device),
                offset.to(device),
                conv_src_slots=conv_src.to(device),
            )

    def _copies(
        self, request_id: str, tables: BlockTables, last: int, home: int, place: int, num_tokens: int
    ) -> list[tuple[int, int, int, int]]:
        """The move of one boundary state to its own column, in every Mamba group."""
        (row,) = tables.rows([request_id]).tolist()
        copies = []
        for group, _ in self._groups:
            table = tables.tables[group][row]
            window, dst = int(table[last]), int(table[home])
            if self.replay is not None:  # the state is there already, only the window moves
                copies.append((NULL_BLOCK_ID, window, dst, place))
                continue
            src = int(table[last + place])
            copies.append((src, window, dst, place))
            self._emit(events.StateCopied(request_id, group, src, dst, num_tokens))
        return copies
