"""A decode step of the state kernel alone, and whose states it moved."""

from __future__ import annotations

from collections.abc import Collection

import torch

from mamba_kernels import selective_state_update
from mamba_teach.faults.exhibit import Finding

NUM_SLOTS = 5
HEADS, HEAD_DIM, STATE_SIZE = 2, 4, 8


def step_with_one_token_each(slots: torch.Tensor, owned: Collection[int]) -> Finding:
    """Run rows of one token each, padding included, on a pool of 5 slots full of states.

    Kernels that know a row of padding by its slot alone get a token for it, too.

    Args:
        slots: ``(R, 1)`` int32, where each row reads and writes.
        owned: slots that this step may change.
    """
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    rows = len(slots)
    pool = random(NUM_SLOTS, HEADS, HEAD_DIM, STATE_SIZE)
    before = pool.clone()
    selective_state_update(
        random(rows, HEADS, HEAD_DIM), random(rows, HEADS), -random(HEADS).exp(),
        random(rows, 1, STATE_SIZE), random(rows, 1, STATE_SIZE), random(HEADS), random(HEADS),
        pool,
        query_start_loc=torch.arange(rows + 1, dtype=torch.int32),
        src_slots=slots,
        dst_slots=slots,
        backend="torch",
    )  # fmt: skip
    moved = [i for i in range(NUM_SLOTS) if not torch.equal(pool[i], before[i])]
    if wrong := [i for i in moved if i not in owned]:
        return Finding(True, f"slots {wrong} were written; the step owns {sorted(owned)}")
    if missing := [i for i in sorted(owned) if i not in moved]:
        return Finding(True, f"slots {missing} were not written")
    return Finding(False, f"slots {moved} were written, and no others")
