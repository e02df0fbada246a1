"""What one Mamba group is told about a step's decode rows, in memory that stays.

One set per group: two groups that fill one buffer after the other leave both with the second one's
slots (vLLM issue 34865).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mamba_teach.cache.block_pool import NULL_BLOCK_ID
from mamba_teach.model.metadata import MambaDecode
from mamba_teach.runner.persistent_buffer import PersistentBuffer


@dataclass(frozen=True)
class ReplaySlots:
    """What replay needs to know of ``D`` decode rows, ``(D,)`` each.

    Attributes:
        src_slots: checkpoints.
        dst_slots: where a new one goes.
        ring_row, ring_start, num_pending: the inputs behind the checkpoint.
    """

    src_slots: torch.Tensor
    dst_slots: torch.Tensor
    ring_row: torch.Tensor
    ring_start: torch.Tensor
    num_pending: torch.Tensor


class DecodeBuffers:
    """Persistent buffers of one group, as long as there can be requests in a step.

    Attributes:
        query_start_loc: ``(max_num_seqs + 1,)``; rows of padding have no tokens.
        conv_src_slots, conv_dst_slots: ``(max_num_seqs,)``, padded with the null slot.
        ssm_src_slots, ssm_dst_slots: ``(max_num_seqs, num_slots)``, likewise; ``num_slots`` is
            ``1 + k``, or 1 with replay.
        num_accepted_tokens: ``(max_num_seqs,)``, padded with 1; None without speculation.
        ring_rows, ring_starts, num_pending: ``(max_num_seqs,)``, padded with 0; used with replay only.
    """

    def __init__(
        self, group: str, max_num_seqs: int, k: int, num_slots: int, device: torch.device
    ) -> None:
        def buffer(name: str, *shape: int, padding: int = NULL_BLOCK_ID) -> PersistentBuffer:
            return PersistentBuffer(f"{name} ({group})", *shape, padding=padding, device=device)

        self.query_start_loc = buffer("query_start_loc", max_num_seqs + 1)
        self.conv_src_slots = buffer("conv_src_slots", max_num_seqs)
        self.conv_dst_slots = buffer("conv_dst_slots", max_num_seqs)
        self.ssm_src_slots = buffer("ssm_src_slots", max_num_seqs, num_slots)
        self.ssm_dst_slots = buffer("ssm_dst_slots", max_num_seqs, num_slots)
        self.ring_rows = buffer("ring_rows", max_num_seqs)
        self.ring_starts = buffer("ring_starts", max_num_seqs)
        self.num_pending = buffer("num_pending", max_num_seqs)
        self.num_accepted_tokens = (
            buffer("num_accepted_tokens", max_num_seqs, padding=1) if k else None
        )

    def refill(
        self,
        query_start_loc: torch.Tensor,
        src_slots: torch.Tensor,
        dst_slots: torch.Tensor,
        num_accepted_tokens: torch.Tensor | None,
        num_padded: int | None = None,
        replay: ReplaySlots | None = None,
    ) -> MambaDecode:
        """Bring the buffers up to date for ``D`` decode rows.

        Args:
            query_start_loc: ``(D + 1,)``.
            src_slots, dst_slots: ``(D, 1 + k)``; the first column is where the windows are.
            num_accepted_tokens: ``(D,)``, or None without speculation.
            num_padded: rows to return, the ones behind ``D`` being padding; None: ``D``.
            replay: where states and inputs are instead, with replay.

        Returns:
            Views of the buffers.
        """
        rows = len(src_slots) if num_padded is None else num_padded
        # A row of padding begins where the last row ends, and ends there.
        starts = torch.cat([query_start_loc, query_start_loc[-1:].expand(rows - len(src_slots))])
        counts = None
        if self.num_accepted_tokens is not None and num_accepted_tokens is not None:
            counts = self.num_accepted_tokens.refill(num_accepted_tokens, rows)
        read, written = src_slots, dst_slots
        ring: dict[str, torch.Tensor] = {}
        if replay is not None:
            read, written = replay.src_slots[:, None], replay.dst_slots[:, None]
            ring = {
                "ring_rows": self.ring_rows.refill(replay.ring_row, rows),
                "ring_starts": self.ring_starts.refill(replay.ring_start, rows),
                "num_pending": self.num_pending.refill(replay.num_pending, rows),
            }
        return MambaDecode(
            query_start_loc=self.query_start_loc.refill(starts),
            conv_src_slots=self.conv_src_slots.refill(src_slots[:, 0], rows),
            conv_dst_slots=self.conv_dst_slots.refill(dst_slots[:, 0], rows),
            ssm_src_slots=self.ssm_src_slots.refill(read, rows),
            ssm_dst_slots=self.ssm_dst_slots.refill(written, rows),
            num_accepted_tokens=counts,
            **ring,
        )
