"""Arithmetic that is right for one sequence and wrong for the second."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from mamba_kernels import ChunkLayout, mamba_chunk_scan
from mamba_teach.faults.exhibit import Exhibit, Finding

TOLERANCE = 1e-4  # relative, of an fp32 scan against a float64 recurrence


def _from_the_packed_grid(original: Any) -> Any:
    def pass_states(
        chunk_states: torch.Tensor,
        chunk_decay: torch.Tensor,
        layout: ChunkLayout,
        initial: torch.Tensor,
    ) -> torch.Tensor:
        # Chunks of the packed tokens, whoever they belong to: what decayed in one before a sequence
        # begins is counted as the sequence's own.
        grid = layout.cu_chunk_seqlens[:-1] // layout.chunk_size
        summed = chunk_decay.clone()
        for chunk in range(1, layout.num_chunks):
            if layout.chunk_rank[chunk] == 0 and grid[chunk - 1] == grid[chunk]:
                summed[chunk] = summed[chunk - 1] * chunk_decay[chunk]
        return original(chunk_states, summed, layout, initial)

    return pass_states


def _two_packed_sequences() -> Finding:
    """The second sequence goes on from a state, and begins in the middle of a packed chunk."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    starts, computed = torch.tensor([0, 5, 11], dtype=torch.int32), [0, 8]
    heads, head_dim, state_size, tokens = 2, 4, 8, 11
    x, dt = random(tokens, heads, head_dim), random(tokens, heads)
    B, C = random(tokens, 1, state_size), random(tokens, 1, state_size)
    A, D, dt_bias = -random(heads).exp() / 4, random(heads), random(heads)
    pool = random(3, heads, head_dim, state_size)
    expected = _recurrence(x[5:], dt[5:], A, B[5:], dt_bias, pool[2])
    slots = torch.tensor([1, 2], dtype=torch.int32)
    mamba_chunk_scan(
        x, dt, A, B, C, D, dt_bias, pool,
        query_start_loc=starts,
        num_computed_tokens=torch.tensor(computed, dtype=torch.int32),
        chunk_size=8,
        src_slots=slots,
        dst_slots=slots,
        has_initial_state=torch.tensor([n > 0 for n in computed]),
        backend="torch",
    )  # fmt: skip
    error = float((pool[2].double() - expected).norm() / expected.norm())
    if error > TOLERANCE:
        return Finding(True, f"the second sequence's state is off by {error:.2f} of its size")
    return Finding(False, "the second sequence's state is that of the recurrence")


def _recurrence(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """The state after all tokens, one by one in float64.

    Args:
        x: ``(T, H, P)``; dt: ``(T, H)``; A, dt_bias: ``(H,)``; B: ``(T, 1, N)``.
        state: ``(H, P, N)`` before the first token.
    """
    state = state.double()
    for x_t, dt_t, B_t in zip(x.double(), dt.double(), B.double(), strict=True):
        step = F.softplus(dt_t + dt_bias.double())  # (H,)
        added = (step[:, None] * x_t)[..., None] * B_t  # (H, P, N)
        state = torch.exp(step * A.double())[:, None, None] * state + added
    return state


DECAY_FROM_CHUNK_START = Exhibit(
    name="decay-from-chunk-start",
    title="Decay counted from the chunk's start",
    mechanism=(
        "The scan cuts the packed tokens into chunks and sums the decay inside each. A sequence that "
        "begins in the middle of a chunk must count from its own first token. Here its old state was "
        "multiplied by the decay since the chunk's first token, which includes the tokens of another "
        "request: it forgets faster, by as much as its neighbour did."
    ),
    reported_in="vLLM PR 23279 (and PR 21783)",
    symptom="A request's answer depends on the lengths of those that are packed before it.",
    before="summed[chunk] = summed[chunk - 1] * chunk_decay[chunk]",
    after="state = surviving[:, r, :, None, None] * state + added[:, r]",
    seam="mamba_kernels.chunk_scan:_pass_states",
    swap=_from_the_packed_grid,
    observe=_two_packed_sequences,
)
