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

The layout is worked out once per step, on the host, from numbers the scheduler has there anyway,
and serves every layer. Whatever decides the size of a launch (how many chunks, how long the
longest) is a plain Python number in it: asking a GPU tensor would make the host wait for the GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch


@dataclass(frozen=True)
class ChunkLayout:
    """Where the chunks of one step lie. All tensors int64 on one device.

    Several checkpoints may lie at one place (two caches that want the same boundary), so chunks and
    rows of the checkpoint list are related the way a sparse matrix is stored: the rows that belong
    to chunk ``c`` are ``checkpoint_order[cu_checkpoints[c] : cu_checkpoints[c + 1]]``. Slots are not
    in here: groups of layers with different caches share one layout.

    Attributes:
        chunk_size: ``Q``; no chunk is longer.
        num_tokens: tokens in all chunks; what lies behind them in a packed tensor is padding.
        longest_chunk: tokens in the longest chunk.
        max_chunks_per_seq: how many chunks the longest sequence has.
        cu_chunk_seqlens: ``(nchunks + 1,)`` packed start of every chunk, then the end of the last.
        seq_idx: ``(nchunks,)`` the sequence of every chunk.
        chunk_rank: ``(nchunks,)`` 0 for the first chunk of a sequence in this step, then 1, 2, ...
        cu_seq_chunks: ``(R + 1,)`` sequence ``r`` has the chunks ``cu_seq_chunks[r : r + 1]``.
        last_chunk_indices: ``(R,)`` last chunk of every sequence, -1 where it has no token.
        checkpoint_chunks: ``(C,)`` the chunk whose end is the checkpoint.
        checkpoint_order: ``(C,)`` rows of the checkpoint list, by chunk.
        cu_checkpoints: ``(nchunks + 1,)`` where each chunk's rows start in ``checkpoint_order``.
    """

    chunk_size: int
    num_tokens: int
    longest_chunk: int
    max_chunks_per_seq: int
    cu_chunk_seqlens: torch.Tensor
    seq_idx: torch.Tensor
    chunk_rank: torch.Tensor
    cu_seq_chunks: torch.Tensor
    last_chunk_indices: torch.Tensor
    checkpoint_chunks: torch.Tensor
    checkpoint_order: torch.Tensor
    cu_checkpoints: torch.Tensor

    @property
    def num_chunks(self) -> int:
        return self.seq_idx.numel()

    @property
    def num_seqs(self) -> int:
        return self.last_chunk_indices.numel()

    def to(self, device: torch.device | str, non_blocking: bool = False) -> ChunkLayout:
        """The same layout on ``device``, in one transfer: eight small ones cost eight latencies."""
        device = torch.device(device)
        if self.seq_idx.device == device:
            return self
        tensors = {
            f.name: value
            for f in fields(self)
            if isinstance(value := getattr(self, f.name), torch.Tensor)
        }
        # Each starts on a multiple of 16 bytes, wherever the others end: Triton compiles a kernel
        # anew for a pointer that does not.
        padded = [torch.nn.functional.pad(t, (0, t.numel() % 2)) for t in tensors.values()]
        packed = torch.cat(padded)
        if non_blocking and device.type == "cuda":
            packed = packed.pin_memory()  # else the copy waits for the GPU after all
        moved = packed.to(device, non_blocking=non_blocking)
        pieces = moved.split([t.numel() for t in padded])
        return replace(
            self, **{name: piece[: tensors[name].numel()] for name, piece in zip(tensors, pieces)}
        )


def build_chunk_layout(
    query_start_loc: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    chunk_size: int,
    checkpoints: torch.Tensor | None = None,
) -> ChunkLayout:
    """Cut ``R`` packed sequences into chunks; no loop over sequences.

    Args:
        query_start_loc: ``(R + 1,)`` int, packed start of every sequence, then the total. On the
            host, like the other tensors: GPU tensors work too, but make the host wait.
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
    num_chunks = chunk_ends.numel()
    everything = torch.arange(num_chunks + 1, device=seq.device)
    every_seq = torch.arange(starts.numel() + 1, device=seq.device)
    chunk_rank = everything[:-1] - first_chunk[seq_idx]
    cu_chunk_seqlens = torch.cat([query_start_loc[:1].long(), chunk_ends])

    checkpoint_chunks = torch.searchsorted(chunk_ends, forced_ends)
    by_chunk, order = checkpoint_chunks.sort(stable=True)
    return ChunkLayout(
        chunk_size=chunk_size,
        num_tokens=int(query_start_loc[-1]),
        longest_chunk=int(cu_chunk_seqlens.diff().max()) if num_chunks else 0,
        max_chunks_per_seq=int(chunk_rank.max()) + 1 if num_chunks else 0,
        cu_chunk_seqlens=cu_chunk_seqlens,
        seq_idx=seq_idx,
        chunk_rank=chunk_rank,
        cu_seq_chunks=torch.searchsorted(seq_idx, every_seq),
        last_chunk_indices=last,
        checkpoint_chunks=checkpoint_chunks,
        checkpoint_order=order,
        cu_checkpoints=torch.searchsorted(by_chunk, everything),
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
