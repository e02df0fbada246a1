"""What the ghost finds in slots, rings and windows, compared with what the request must have had."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mamba_kernels import ReplayRing, must_flush
from mamba_teach.ghost.hashes import NO_TOKEN, GhostError, extend_hash
from mamba_teach.model.metadata import MambaDecode
from mamba_teach.request import Request
from mamba_teach.scheduler import ScheduledRow


class GhostMemory:
    """Reads and writes of symbolic states, checked.

    Attributes:
        rows: of the step that runs.
        known: *(tokens, hash)* of every state that anybody ever had -> whose it is, for messages.
    """

    def __init__(self) -> None:
        self.rows: Sequence[ScheduledRow] = ()
        self.known: dict[tuple[int, int], str] = {(0, 0): "nothing"}
        self._prefix_hashes: dict[str, tuple[Request, list[int]]] = {}

    def hashes_of(self, request: Request) -> list[int]:
        """Hashes of all prefixes of the request's known tokens, the empty one first."""
        known, hashes = self._prefix_hashes.get(request.request_id, (None, []))
        if known is not request:  # another engine's request of that name, perhaps
            hashes = [0]
            self._prefix_hashes[request.request_id] = request, hashes
        for token in request.tokens(len(hashes) - 1, request.num_tokens):
            hashes.append(extend_hash(hashes[-1], token))
            self.known.setdefault((len(hashes) - 1, hashes[-1]), request.request_id)
        return hashes

    def read_state(
        self, layer: int, row: int, slot: int, states: torch.Tensor, num_pending: int = 0
    ) -> tuple[int, int]:
        count, value = states[slot].tolist()
        n = self.rows[row].num_computed - num_pending
        if slot == 0:
            raise GhostError(f"{self.who(row)} reads the null slot (layer {layer})")
        hashes = self.hashes_of(self.rows[row].request)
        if (count, value) != (n, hashes[n]):
            owner = self.known.get((count, value))
            holds = f"the state after {count} tokens of {owner}" if owner else "no state"
            raise GhostError(
                f"slot {slot} (layer {layer}) holds {holds}; {self.who(row)} needs its own after {n}"
            )
        return count, value

    def read_window(
        self, layer: int, row: int, slot: int, windows: torch.Tensor, offset: int
    ) -> list[int]:
        found = windows[slot, offset : offset + 3].tolist()
        n = self.rows[row].num_computed
        needed = [NO_TOKEN] * (3 - n) + self.rows[row].request.tokens(max(0, n - 3), n)
        if found != needed:
            raise GhostError(
                f"slot {slot} (layer {layer}) holds the window {found}; {self.who(row)} needs "
                f"{needed} after {n} tokens"
            )
        return found

    def write(self, pool: torch.Tensor, slot: int, content: Sequence[int]) -> None:
        if slot == 0:
            raise GhostError("somebody writes the null slot")
        pool[slot, : len(content)] = torch.tensor(content, dtype=torch.int32)

    def who(self, row: int) -> str:
        return self.rows[row].request.request_id

    def read_replayed(
        self,
        layer: int,
        row: int,
        rows: MambaDecode,
        states: torch.Tensor,
        ring: ReplayRing,
        own: list[int],
    ) -> tuple[int, int]:
        """The state before a row's tokens, from its checkpoint and pending inputs; appends its own."""
        assert rows.ring_rows is not None
        assert rows.ring_starts is not None and rows.num_pending is not None
        pending, start = int(rows.num_pending[row]), int(rows.ring_starts[row])
        entries = ring.x[int(rows.ring_rows[row]), :, 0, 0].view(torch.int32)
        n, request = self.rows[row].num_computed, self.rows[row].request
        state = self.read_state(
            layer, row, int(rows.ssm_src_slots[row, 0]), states, num_pending=pending
        )
        found = [int(entries[(start + i) % ring.length]) for i in range(pending)]
        needed = request.tokens(n - pending, n)
        if found != needed:
            raise GhostError(
                f"the ring of {self.who(row)} (layer {layer}) holds {found} behind token "
                f"{n - pending}; {needed} is needed"
            )
        for token in found:
            state = (state[0] + 1, extend_hash(state[1], token))
        if must_flush(pending, ring.max_query_len, ring.capacity):
            self.write(states, int(rows.ssm_dst_slots[row, 0]), state)
        for i, token in enumerate(own):
            entries[(start + pending + i) % ring.length] = token
        return state
