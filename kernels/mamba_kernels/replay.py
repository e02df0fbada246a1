"""Replay: a decode step that keeps inputs instead of states.

A state update is rank one. Token ``j`` adds ``dt_j * x_j (outer) B_j`` to a state of ``P x N`` numbers
per head, and is itself only ``P + N + 2`` of them: in Nemotron-H's layers less than 1 % of the state. So
instead of writing a state after every token, of which speculation will throw most away, a request keeps
one *checkpoint* state and a small *ring* of the inputs since then. A step

1. reads the checkpoint and adds the ``p`` pending inputs of the ring to it, in registers;
2. computes its own tokens from there;
3. appends their inputs to the ring.

Accepting ``a`` tokens means that ``a`` more inputs are pending; what lies behind them is overwritten by
the next step. Nothing is copied and nothing rolled back. When the pending inputs and one more step of
the longest kind would not fit into ``capacity``, the step also writes the state that it has in registers
(after the pending inputs, before its own tokens) as the new checkpoint: a *flush*, decided per row on
the device. The caller knows the same three numbers and so knows when it happened
(:func:`must_flush`).

Physically the ring is longer than its capacity by one step: the inputs of the step that flushes do not
land on entries that other programs still read.

:func:`materialize_states` does the same addition outside a step, for a state that must exist: the one at
the end of a block that is about to be published.

The Triton kernels are in :mod:`mamba_kernels.replay_triton`. Sources: activation replay in "Snakes and
Ladders" (PMLR v262); TensorRT-LLM pull requests 13453 and 14203; vLLM pull request 48018 (ReplaySSM).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mamba_kernels.backend import choose_backend
from mamba_kernels.checks import (
    INT_DTYPES,
    check_query_start_loc,
    check_recurrence,
    check_row_lengths,
    check_slots,
    check_tensor,
    debug_enabled,
)
from mamba_kernels.replay_triton import materialize_states_triton, replay_state_update_triton
from mamba_kernels.state_update import advance


@dataclass(frozen=True)
class ReplayRing:
    """Inputs of one layer, by ring row; row 0 is the null row, which is never read or written.

    Attributes:
        x: ``(rows, length, H, P)``.
        B: ``(rows, length, G, N)``.
        dt: ``(rows, length, H)`` fp32 step sizes, after softplus and clamp.
        log_decay: ``(rows, length, H)`` fp32, ``dt * A``: so that nobody who adds an input to a state
            needs the model's weights.
        capacity: inputs that can be pending; ``length`` is larger by the longest step.
    """

    x: torch.Tensor
    B: torch.Tensor
    dt: torch.Tensor
    log_decay: torch.Tensor
    capacity: int

    @property
    def length(self) -> int:
        return self.x.shape[1]

    @property
    def max_query_len(self) -> int:
        """Tokens of the longest step, ``1 + k``."""
        return self.length - self.capacity


def must_flush(num_pending: int, max_query_len: int, capacity: int) -> bool:
    """Whether a step with so many pending inputs writes a new checkpoint.

    >>> [must_flush(pending, max_query_len=4, capacity=16) for pending in (0, 12, 13)]
    [False, False, True]
    """
    return num_pending + max_query_len > capacity


def replay_state_update(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    ssm_state: torch.Tensor,
    ring: ReplayRing,
    *,
    query_start_loc: torch.Tensor,
    src_slots: torch.Tensor,
    dst_slots: torch.Tensor,
    ring_rows: torch.Tensor,
    ring_starts: torch.Tensor,
    num_pending: torch.Tensor,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    backend: str | None = None,
) -> torch.Tensor:
    """Advance every row by its 1 to ``1 + k`` tokens, from its checkpoint and pending inputs.

    Args:
        x: ``(T, H, P)`` packed inputs.
        dt: ``(T, H)`` raw step sizes, before bias and softplus.
        A: ``(H,)`` fp32, negative.
        B, C: ``(T, G, N)``.
        D, dt_bias: ``(H,)``.
        ssm_state: ``(slots, H, P, N)``, any strides. **Mutated**: destination slots of rows that flush.
        ring: **mutated**: the entries behind the pending ones of every row.
        query_start_loc: ``(R + 1,)`` int32; a row of length 0 is padding.
        src_slots: ``(R,)`` int, the checkpoint; a null one skips the row.
        dst_slots: ``(R,)`` int, where a flush goes; may be the source. A null one keeps nothing.
        ring_rows: ``(R,)`` int, distinct; a null one skips the row.
        ring_starts: ``(R,)`` int, the entry of the oldest pending input, ``0 .. length - 1``.
        num_pending: ``(R,)`` int, ``0 .. capacity``.
        dt_limit: clamp on dt after softplus.
        backend: force an implementation; None chooses by device.

    Returns:
        ``(T, H, P)`` in the dtype of ``x``; skipped rows are 0.
    """
    num_rows = _check(x, dt, A, B, C, D, dt_bias, ssm_state, ring, query_start_loc, dt_limit)
    for name, slots in (("src_slots", src_slots), ("dst_slots", dst_slots)):
        check_slots(name, slots, (num_rows,), ssm_state)
    check_slots("ring_rows", ring_rows, (num_rows,), ring.x)
    _check_cursors(ring, {"ring_starts": (ring_starts, (num_rows,), ring.length - 1),
                          "num_pending": (num_pending, (num_rows,), ring.capacity)})  # fmt: skip
    if x.shape[0] == 0 or num_rows == 0:
        return torch.zeros_like(x)
    run = _replay_state_update_torch
    if choose_backend(x, backend) == "triton":
        run = replay_state_update_triton
    return run(
        x, dt, A, B, C, D, dt_bias, ssm_state, ring, query_start_loc, src_slots, dst_slots, ring_rows,
        ring_starts, num_pending, dt_limit,
    )  # fmt: skip


def materialize_states(
    layers: Sequence[tuple[torch.Tensor, ReplayRing]],
    *,
    src_slots: torch.Tensor,
    ring_rows: torch.Tensor,
    ring_starts: torch.Tensor,
    num_inputs: torch.Tensor,
    dst_slots: torch.Tensor,
    backend: str | None = None,
) -> None:
    """Write the states after some of the pending inputs of a checkpoint, in every layer at once.

    Args:
        layers: ``(ssm_state, ring)`` of all layers, alike in shape, dtype and strides. **Mutated**:
            the destination slots.
        src_slots: ``(M,)`` int, checkpoints; null is padding.
        ring_rows, ring_starts: ``(M,)`` int, as in :func:`replay_state_update`.
        num_inputs: ``(M, S)`` int, rising along a row: states are wanted after so many inputs.
        dst_slots: ``(M, S)`` int, one per state; may be the source of its own row, in any column. A
            null one keeps nothing.
        backend: force an implementation; None chooses by device.
    """
    if not layers or src_slots.numel() == 0:
        return
    ssm_state, ring = layers[0]
    rows = len(src_slots)
    for layer, (state, other) in enumerate(layers):
        parts = (state, other.x, other.B, other.dt, other.log_decay)
        firsts = (ssm_state, ring.x, ring.B, ring.dt, ring.log_decay)
        same = [t.shape == f.shape and t.stride() == f.stride() and t.dtype == f.dtype for t, f in
                zip(parts, firsts)]  # fmt: skip
        if not all(same):
            raise ValueError(f"layers[{layer}]: shapes, strides or dtypes differ from layer 0's")
    check_slots("src_slots", src_slots, (None,), ssm_state)
    check_slots("ring_rows", ring_rows, (rows,), ring.x)
    check_slots("dst_slots", dst_slots, (rows, None), ssm_state)
    _check_cursors(ring, {"ring_starts": (ring_starts, (rows,), ring.length - 1),
                          "num_inputs": (num_inputs, dst_slots.shape, ring.capacity)})  # fmt: skip
    run = _materialize_states_torch
    if choose_backend(ssm_state, backend) == "triton":
        run = materialize_states_triton
    run(layers, src_slots, ring_rows, ring_starts, num_inputs, dst_slots)


def _check(
    x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor,
    D: torch.Tensor, dt_bias: torch.Tensor, ssm_state: torch.Tensor, ring: ReplayRing,
    query_start_loc: torch.Tensor, dt_limit: tuple[float, float],
) -> int:  # fmt: skip
    check_recurrence(x, dt, A, B, C, D, dt_bias, ssm_state, dt_limit)
    num_heads, head_dim = x.shape[1:]
    rows, length = ring.x.shape[:2]
    check_tensor("ring.x", ring.x, (rows, length, num_heads, head_dim), like=x)
    check_tensor("ring.B", ring.B, (rows, length, *B.shape[1:]), like=x)
    for name, steps in (("ring.dt", ring.dt), ("ring.log_decay", ring.log_decay)):
        check_tensor(name, steps, (rows, length, num_heads), dtypes=(torch.float32,), like=x)
    if not 1 <= ring.max_query_len <= ring.capacity:
        raise ValueError(
            f"ring.capacity={ring.capacity} of length {length}: the difference is the longest step; "
            f"it must be at least 1 and fit into the capacity"
        )
    for name, part in (("x", ring.x), ("B", ring.B), ("dt", ring.dt), ("log_decay", ring.log_decay)):
        if not part.is_contiguous():
            raise ValueError(f"ring.{name} has strides {part.stride()}; expected contiguous")
    num_rows = check_query_start_loc(query_start_loc, x)
    check_row_lengths(query_start_loc, ring.max_query_len)
    return num_rows


def _check_cursors(
    ring: ReplayRing, cursors: dict[str, tuple[torch.Tensor, Sequence[int], int]]
) -> None:
    """Shapes of *name -> (values, shape, most)*; in debug also that each is in ``0 .. most``."""
    for name, (values, shape, most) in cursors.items():
        check_tensor(name, values, shape, dtypes=INT_DTYPES, like=ring.x, unit_stride=True)
        if debug_enabled() and values.numel():
            low, high = int(values.min()), int(values.max())
            if low < 0 or high > most:
                raise ValueError(f"{name} holds {low if low < 0 else high}; allowed: 0 .. {most}")


# ---------------------------------------------------------------------------------------------
# torch twin
# ---------------------------------------------------------------------------------------------


def _replay_state_update_torch(
    x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor,
    D: torch.Tensor, dt_bias: torch.Tensor, ssm_state: torch.Tensor, ring: ReplayRing,
    query_start_loc: torch.Tensor, src_slots: torch.Tensor, dst_slots: torch.Tensor,
    ring_rows: torch.Tensor, ring_starts: torch.Tensor, num_pending: torch.Tensor,
    dt_limit: tuple[float, float],
) -> torch.Tensor:  # fmt: skip
    num_rows = len(src_slots)
    num_heads, head_dim, state_size = ssm_state.shape[1:]
    starts, lengths = query_start_loc[:-1].long(), query_start_loc.diff()
    live = (src_slots > 0) & (ring_rows > 0) & (lengths > 0)  # (R,)
    src, ring_row = (torch.where(live, slots, 0).long() for slots in (src_slots, ring_rows))
    pending = torch.where(live, num_pending, 0).long()

    checkpoint = ssm_state[src].float()  # (R, H, P, N), a copy
    state = _add_inputs(checkpoint, ring, ring_row, ring_starts.long(), 0 * pending, pending)
    flush = live & (pending + ring.max_query_len > ring.capacity) & (dst_slots > 0)
    # A row that keeps nothing writes the null slot's content back to the null slot.
    dst = torch.where(flush, dst_slots, 0).long()
    ssm_state[dst] = torch.where(
        flush[:, None, None, None], state.to(ssm_state.dtype), ssm_state[0]
    )

    state = state.view(num_rows * num_heads, head_dim, state_size)
    out = torch.zeros_like(x)
    for i in range(ring.max_query_len):  # 1 + k turns, the same for every batch
        token = (starts + i).clamp(max=max(x.shape[0] - 1, 0))  # (R,)
        valid = live & (i < lengths)
        y_i, dt_i, log_decay = advance(state, token, x, dt, A, B, C, D, dt_bias, dt_limit)
        y_i = torch.where(valid[:, None, None], y_i, 0).to(x.dtype)
        out.index_add_(0, token, y_i)  # masked rows add an exact 0

        # The null row gets its own content back; so does an entry that the row does not reach.
        row = torch.where(valid, ring_row, 0)
        entry = (ring_starts.long() + pending + i) % ring.length
        kept = valid[:, None]
        for stored, new in (
            (ring.x, x[token]), (ring.B, B[token]), (ring.dt, dt_i), (ring.log_decay, log_decay),
        ):  # fmt: skip
            mask = kept if new.dim() == 2 else kept[..., None]
            stored[row, entry] = torch.where(mask, new.to(stored.dtype), stored[row, entry])
    return out


def _add_inputs(
    state: torch.Tensor, ring: ReplayRing, ring_row: torch.Tensor, start: torch.Tensor,
    first: torch.Tensor, stop: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """``state (R, H, P, N)`` fp32 after inputs ``first .. stop - 1`` of each row's ring, counted from
    its oldest pending one."""
    num_heads = state.shape[1]
    place = torch.arange(ring.length, device=state.device)
    used = (place >= first[:, None]) & (place < stop[:, None])  # (R, L)
    at = (ring_row[:, None], (start[:, None] + place) % ring.length)
    # Entries that are not used may hold anything, NaN included: they are zeroed, not weighted.
    x = torch.where(used[..., None, None], ring.x[at].float(), 0)  # (R, L, H, P)
    B = torch.where(used[..., None, None], ring.B[at].float(), 0)  # (R, L, G, N)
    dt = torch.where(used[..., None], ring.dt[at], 0)  # (R, L, H)
    log_decay = torch.where(used[..., None], ring.log_decay[at], 0)
    after = log_decay.sum(1, keepdim=True) - log_decay.cumsum(1)  # decay that each input still meets
    weighted = (x * (after.exp() * dt)[..., None]).permute(0, 2, 3, 1)  # (R, H, P, L)
    B = B.repeat_interleave(num_heads // B.shape[2], 2, output_size=num_heads)
    added = weighted @ B.transpose(1, 2)  # (R, H, P, L) x (R, H, L, N)
    return log_decay.sum(1).exp()[..., None, None] * state + added


def _materialize_states_torch(
    layers: Sequence[tuple[torch.Tensor, ReplayRing]], src_slots: torch.Tensor,
    ring_rows: torch.Tensor, ring_starts: torch.Tensor, num_inputs: torch.Tensor,
    dst_slots: torch.Tensor,
) -> None:  # fmt: skip
    live = (src_slots > 0) & (ring_rows > 0)
    src, row = (torch.where(live, slots, 0).long() for slots in (src_slots, ring_rows))
    for ssm_state, ring in layers:
        state, done = ssm_state[src].float(), torch.zeros_like(src)
        for s in range(dst_slots.shape[1]):
            stop = torch.maximum(done, torch.where(live, num_inputs[:, s], 0).long())
            state = _add_inputs(state, ring, row, ring_starts.long(), done, stop)
            done = stop
            dst = torch.where(live & (dst_slots[:, s] > 0), dst_slots[:, s], 0).long()
            kept = (dst > 0)[:, None, None, None]
            ssm_state[dst] = torch.where(kept, state.to(ssm_state.dtype), ssm_state[0])
