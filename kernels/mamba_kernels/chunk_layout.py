"""How packed prefill tokens are cut into chunks for the SSD scan.

The scan is a matrix multiplication inside a chunk and a recurrence between chunks, so somebody has
to say where chunks begin and end. Three rules:

* a chunk never crosses from one sequence into the next;
* chunks end on *absolute* multiples of ``Q`` tokens of their sequence, wherever the query starts,
  so that a prompt prefilled in pieces is cut like the same prompt in one go;
* a chunk also ends where a checkpoint is wanted, because a state exists only at the end of a chunk.

Example, ``Q = 4``: a sequence with 6 tokens done and 13 to do, then a fresh one of 5::

    tokens      0 1 | 2 3 4 5 | 6 7 8 9 | 10 11 12 || 13 14 15 16 | 17
    position    6 7 | 8 .. 11 | 12 . 15 | 16 17 18 ||  0  1  2  3 |  4
    cu_chunk_seqlens = [0, 2, 6, 10, 13, 17, 18]     seq_idx = [0, 0, 0, 0, 1, 1]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ChunkLayout:
    """Where the chunks of one step lie. All tensors int64 on one device.

    Attributes:
        chunk_size: ``Q``; no chunk is longer.
        cu_chunk_seqlens: ``(nchunks + 1,)`` packed start of every chunk, then the end of the last.
        seq_idx: ``(nchunks,)`` the sequence of every chunk.
        chunk_rank: ``(nchunks,)`` 0 for the first chunk of a sequence in this step, then 1, 2, ...
        last_chunk_indices: ``(R,)`` last chunk of every sequence, -1 where it has no token.
        checkpoint_chunks: ``(C,)`` the chunk whose end is the checkpoint.
        max_chunks_per_seq: how many chunks the longest sequence has.
    """

    chunk_size: int
    cu_chunk_seqlens: torch.Tensor
    seq_idx: torch.Tensor
    chunk_rank: torch.Tensor
    last_chunk_indices: torch.Tensor
    checkpoint_chunks: torch.Tensor
    max_chunks_per_seq: int

    @property
    def num_chunks(self) -> int:
        return self.seq_idx.numel()


def build_chunk_layout(
    query_start_loc: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    chunk_size: int,
    checkpoints: torch.Tensor | None = None,
) -> ChunkLayout:
    """Cut ``R`` packed sequences into chunks; no loop over sequences.

    Args:
        query_start_loc: ``(R + 1,)`` int, packed start of every sequence, then the total.
        num_computed_tokens: ``(R,)`` int, tokens of the sequence already in its state.
        chunk_size: ``Q`` in tokens, any positive number.
        checkpoints: ``(C, 3)`` int rows *(sequence, end position in its query, slot)*, or None.

    Raises:
        ValueError: a chunk size below 1, or a checkpoint outside its sequence's query.
    """
    if chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size}: a chunk holds at least 1 token")
    starts, ends = query_start_loc[:-1].long(), query_start_loc[1:].long()
    lengths, computed = ends - starts, num_computed_tokens.long()

    # Ends on the grid: the multiples of Q inside (computed, computed + length], and the last token.
    first_grid = computed // chunk_size
    last_grid = (computed + lengths + chunk_size - 1) // chunk_size
    counts = torch.where(lengths > 0, last_grid - first_grid, 0)
    seq = torch.repeat_interleave(counts)  # (grid ends,): 0 0 0 0 1 1
    rank = torch.arange(seq.numel(), device=seq.device) - (counts.cumsum(0) - counts)[seq]
    position = (first_grid[seq] + rank + 1) * chunk_size
    grid_ends = torch.minimum(position - computed[seq] + starts[seq], ends[seq])

    # A packed end position names its sequence (ends are exclusive, sequences do not overlap), so
    # forced ends join by plain sorting.
    forced_ends = _packed_checkpoint_ends(starts, lengths, checkpoints)
    chunk_ends = torch.unique(torch.cat([grid_ends, forced_ends]))  # sorted
    seq_idx = torch.searchsorted(ends, chunk_ends)
    last = torch.where(lengths > 0, torch.searchsorted(chunk_ends, ends), -1)
    first_chunk = torch.searchsorted(chunk_ends, starts, right=True)
    chunk_rank = torch.arange(chunk_ends.numel(), device=seq.device) - first_chunk[seq_idx]
    return ChunkLayout(
        chunk_size=chunk_size,
        cu_chunk_seqlens=torch.cat([starts[:1], chunk_ends]),
        seq_idx=seq_idx,
        chunk_rank=chunk_rank,
        last_chunk_indices=last,
        checkpoint_chunks=torch.searchsorted(chunk_ends, forced_ends),
        max_chunks_per_seq=int(chunk_rank.max()) + 1 if chunk_ends.numel() else 0,
    )


def _packed_checkpoint_ends(
    starts: torch.Tensor, lengths: torch.Tensor, checkpoints: torch.Tensor | None
) -> torch.Tensor:
    """Checkpoint ends in packed coordinates, ``(C,)``; refuses those outside their query."""
    if checkpoints is None or checkpoints.numel() == 0:
        return starts.new_empty(0)
    seq, end = checkpoints[:, 0].long(), checkpoints[:, 1].long()
    num_seqs = starts.numel()
    bad = (seq < 0) | (seq >= num_seqs)
    bad |= (end < 1) | (end > lengths[seq.clamp(0, max(num_seqs - 1, 0))])
    if bad.any():
        row = checkpoints[bad][0].tolist()
        raise ValueError(
            f"checkpoint (sequence, end, slot) = {tuple(row)}: the sequence must be one of the "
            f"{num_seqs} in the batch and the end between 1 and its query length"
        )
    return starts[seq] + end
