"""One decode (or verify) step of the SSM recurrence over a paged state cache.

For every head, with state ``h`` of shape ``(P, N)``::

    dt = clamp(softplus(dt_raw + dt_bias), dt_limit)
    h  = exp(dt * A) * h  +  dt * x (outer) B        read h, write h: this is all the traffic
    y  = h . C  +  D * x

A step of speculative decoding feeds a row its last token and up to ``k`` drafts without knowing
which will be kept. The state cannot be rolled back (``exp(dt * A)`` forgets), so the state after
*every* token is written to a slot of its own: ``dst_slots[r, i]`` after token ``i``. The next step
picks the right one on the device: ``src_slots[r, num_accepted_tokens[r] - 1]``.

Head ``h`` reads group ``h // (H / G)`` of B and C. State arithmetic is fp32 whatever the pool's
dtype. A slot of 0 (null) or below is never an address: as a source it skips the row, as a
destination it keeps nothing.

The Triton kernel is in :mod:`mamba_kernels.state_update_triton`. Sources: Mamba2 paper (equation 1,
scalar A); contracts of vLLM's ``selective_state_update`` as of pull request 41233.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from mamba_kernels.backend import choose_backend
from mamba_kernels.checks import (
    check_num_accepted,
    check_query_start_loc,
    check_recurrence,
    check_row_lengths,
    check_slots,
)
from mamba_kernels.cpu_rows import row_by_row, state_update_by_row
from mamba_kernels.state_update_triton import selective_state_update_triton


def selective_state_update(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    ssm_state: torch.Tensor,
    *,
    query_start_loc: torch.Tensor,
    src_slots: torch.Tensor,
    dst_slots: torch.Tensor,
    num_accepted_tokens: torch.Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    backend: str | None = None,
) -> torch.Tensor:
    """Advance every row by its 1 to ``1 + k`` tokens.

    Args:
        x: ``(T, H, P)`` packed inputs.
        dt: ``(T, H)`` raw step sizes, before bias and softplus.
        A: ``(H,)`` fp32, negative.
        B, C: ``(T, G, N)``.
        D, dt_bias: ``(H,)``.
        ssm_state: ``(slots, H, P, N)``, any strides. **Mutated**: the destination slots.
        query_start_loc: ``(R + 1,)`` int32; a row of length 0 is padding.
        src_slots: ``(R, 1 + k)`` int; a row whose chosen source is null is skipped.
        dst_slots: ``(R, 1 + k)`` int; null destinations keep nothing.
        num_accepted_tokens: ``(R,)`` int in ``1 .. 1 + k``; None means 1 everywhere.
        dt_limit: clamp on dt after softplus (``time_step_limit`` of a model's config).
        backend: force an implementation; None chooses by device. For large states on
            a CPU that is the form of ``cpu_rows.py``; "torch" is the twin below.

    Returns:
        ``(T, H, P)`` in the dtype of ``x``; skipped rows are 0.
    """
    _check(x, dt, A, B, C, D, dt_bias, ssm_state, query_start_loc, src_slots, dst_slots,
           num_accepted_tokens, dt_limit)  # fmt: skip
    if x.shape[0] == 0 or src_slots.shape[0] == 0:
        return torch.zeros_like(x)
    if choose_backend(x, backend) == "triton":
        run = selective_state_update_triton
    elif backend is None and row_by_row(x, ssm_state[0].numel()) and ssm_state[0].is_contiguous():
        run = state_update_by_row
    else:
        run = _selective_state_update_torch
    return run(
        x, dt, A, B, C, D, dt_bias, ssm_state, query_start_loc, src_slots, dst_slots,
        num_accepted_tokens, dt_limit,
    )  # fmt: skip


def _check(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    ssm_state: torch.Tensor,
    query_start_loc: torch.Tensor,
    src_slots: torch.Tensor,
    dst_slots: torch.Tensor,
    num_accepted_tokens: torch.Tensor | None,
    dt_limit: tuple[float, float],
) -> None:
    check_recurrence(x, dt, A, B, C, D, dt_bias, ssm_state, dt_limit)
    num_rows = check_query_start_loc(query_start_loc, x)
    check_slots("src_slots", src_slots, (num_rows, None), ssm_state)
    check_slots("dst_slots", dst_slots, src_slots.shape, ssm_state)
    check_row_lengths(query_start_loc, src_slots.shape[1])
    if num_accepted_tokens is not None:
        check_num_accepted(num_accepted_tokens, num_rows, src_slots.shape[1], x)


# ---------------------------------------------------------------------------------------------
# torch twin
# ---------------------------------------------------------------------------------------------


def _selective_state_update_torch(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    ssm_state: torch.Tensor,
    query_start_loc: torch.Tensor,
    src_slots: torch.Tensor,
    dst_slots: torch.Tensor,
    num_accepted_tokens: torch.Tensor | None,
    dt_limit: tuple[float, float],
) -> torch.Tensor:
    num_heads, head_dim, state_size = ssm_state.shape[1:]
    starts, lengths = query_start_loc[:-1].long(), query_start_loc.diff()
    num_rows, max_query_len = src_slots.shape

    if num_accepted_tokens is None:
        src = src_slots[:, 0].long()
    else:
        src = src_slots.gather(1, num_accepted_tokens.long()[:, None] - 1)[:, 0].long()
    live = (src > 0) & (lengths > 0)  # (R,)
    state = ssm_state[torch.where(live, src, 0)].float()  # (R, H, P, N), a copy
    state = state.view(num_rows * num_heads, head_dim, state_size)
    out = torch.zeros_like(x)

    for i in range(max_query_len):  # 1 + k turns, the same for every batch
        token = (starts + i).clamp(max=max(x.shape[0] - 1, 0))  # (R,)
        valid = live & (i < lengths)
        y_i, _, _ = advance(state, token, x, dt, A, B, C, D, dt_bias, dt_limit)
        y_i = torch.where(valid[:, None, None], y_i, 0).to(x.dtype)
        out.index_add_(0, token, y_i)  # masked rows add an exact 0
        # A row that keeps nothing writes the null slot's content back to the null slot.
        dst = torch.where(valid, dst_slots[:, i], 0).long().clamp(min=0)
        kept = (dst > 0)[:, None, None, None]
        new_state = state.view(num_rows, num_heads, head_dim, state_size).to(ssm_state.dtype)
        ssm_state[dst] = torch.where(kept, new_state, ssm_state[0])
    return out


def advance(
    state: torch.Tensor,
    token: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    dt_limit: tuple[float, float],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One token of every row: the recurrence itself.

    Args:
        state: ``(R * H, P, N)`` fp32. **Mutated**.
        token: ``(R,)`` packed position of each row's token; the rest as in the public function.

    Returns:
        ``y (R, H, P)``, step sizes and their log decays ``(R, H)``, all fp32.
    """
    num_heads, head_dim = x.shape[1:]
    groups, state_size = B.shape[1:]
    x_i = x[token].float()  # (R, H, P)
    dt_i = F.softplus(dt[token].float() + dt_bias.float()).clamp(*dt_limit)  # (R, H)
    B_i, C_i = (
        bc[token].float().repeat_interleave(num_heads // groups, 1, output_size=num_heads)
        for bc in (B, C)
    )  # (R, H, N): head h gets group h // (H / G)
    log_decay = dt_i * A.float()
    state.mul_(log_decay.exp().reshape(-1, 1, 1))
    dt_x = (dt_i[..., None] * x_i).reshape(-1, head_dim, 1)
    state.baddbmm_(dt_x, B_i.reshape(-1, 1, state_size))
    y_i = torch.bmm(state, C_i.reshape(-1, state_size, 1)).view_as(x_i)
    return y_i + D.float()[:, None] * x_i, dt_i, log_decay
