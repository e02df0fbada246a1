"""A graph's private memory: addresses that are handed out during capture, and handed out again.

A captured graph writes its intermediate results to the addresses it used at capture, at every replay.
So these addresses must belong to the graphs alone. Inside a capture a block is given back as soon as
nobody holds its tensor any more, and the next one that fits takes its place: the memory of a layer's
intermediates serves the next layer too. Graphs that are never replayed at the same time can share a
pool; what a graph *returns* stays taken as long as somebody holds it.

This is what torch's allocator does for CUDA graphs, small enough to be looked at. On a CPU a tensor of
the pool keeps the memory it lies in; on a GPU, where the recorder is only there to be compared with a
real graph, the pool must outlive its tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

ALIGNMENT = 64  # bytes; enough for vector loads and for Triton's 16
SEGMENT_BYTES = 1 << 20


@dataclass
class PoolBlock:
    """A piece of a segment, and the storage that somebody may still hold."""

    segment: int
    start: int
    num_bytes: int
    holder: StorageWeakRef


class GraphPool:
    """Memory for the tensors that graphs make.

    Attributes:
        segments: raw memory; grows by a segment when nothing fits, and never moves.
        blocks: pieces that are held, in no order.
        num_reused: how many blocks were handed out at an address that somebody had had before.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.segments: list[torch.Tensor] = []
        self.blocks: list[PoolBlock] = []
        self.num_reused = 0
        self._highest: list[int] = []  # per segment, the first byte that nobody has had yet

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all segments."""
        return sum(segment.numel() for segment in self.segments)

    @property
    def peak_bytes(self) -> int:
        """Bytes that were ever handed out, each counted once."""
        return sum(self._highest)

    def owns(self, address: int) -> bool:
        """Whether an address lies in the pool."""
        return any(s.data_ptr() <= address < s.data_ptr() + s.numel() for s in self.segments)

    def place_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor in the pool with the sizes, strides and values of ``tensor``."""
        storage = self._allocate(tensor.untyped_storage().nbytes())
        placed = torch.empty(0, dtype=tensor.dtype, device=self.device)
        placed.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
        return placed.copy_(tensor)

    def _allocate(self, num_bytes: int) -> torch.UntypedStorage:
        self.blocks = [block for block in self.blocks if not block.holder.expired()]
        size = max(1, -(-num_bytes // ALIGNMENT)) * ALIGNMENT
        segment, start = self._first_gap(size)
        self.num_reused += start < self._highest[segment]
        self._highest[segment] = max(self._highest[segment], start + size)
        raw = self.segments[segment]
        if self.device.type == "cpu":  # a buffer of Python's is kept alive by the storage over it
            piece = torch.frombuffer(raw.numpy()[start : start + size], dtype=torch.uint8)
            storage = piece.untyped_storage()
        else:
            storage = storage_at(raw.data_ptr() + start, self.device, num_bytes)
        self.blocks.append(PoolBlock(segment, start, size, StorageWeakRef(storage)))
        return storage

    def _first_gap(self, size: int) -> tuple[int, int]:
        """Segment and offset of the first free piece of ``size`` bytes; makes room if there is none."""
        for i, segment in enumerate(self.segments):
            start = 0
            for block in sorted(
                (b for b in self.blocks if b.segment == i), key=lambda block: block.start
            ):
                if block.start - start >= size:
                    return i, start
                start = block.start + block.num_bytes
            if segment.numel() - start >= size:
                return i, start
        self.segments.append(
            torch.zeros(max(size, SEGMENT_BYTES), dtype=torch.uint8, device=self.device)
        )
        self._highest.append(0)
        return len(self.segments) - 1, 0


def storage_at(address: int, device: torch.device, num_bytes: int) -> torch.UntypedStorage:
    """Memory at an address, without owning it: it may be freed while the storage exists."""
    make: Any = torch._C._construct_storage_from_data_pointer  # its stub promises another class
    storage: torch.UntypedStorage = make(address, device, num_bytes)
    return storage
