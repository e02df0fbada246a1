"""The SSD scan: Mamba2's recurrence over whole prompts, as matrix multiplications.

Token by token the recurrence is ``h = exp(dt A) h + dt x (outer) B``, ``y = h . C + D x``: a chain
of tiny steps. The state space duality of Mamba2 (paper, section 6 and listing 1) cuts the tokens
into chunks and does almost everything with matrix products. Write ``s_i`` for the cumulative sum of
``dt A`` inside a chunk; then

1. *inside a chunk*, token ``j`` reaches token ``i >= j`` with weight
   ``exp(s_i - s_j) dt_j (C_i . B_j)``: a masked attention without softmax;
2. a chunk adds ``sum_j exp(s_last - s_j) dt_j x_j (outer) B_j`` to the state and multiplies what
   came before by ``exp(s_last)``: its *chunk state* and *chunk decay*;
3. *between chunks* the recurrence runs once per chunk instead of once per token;
4. the state before a chunk reaches its token ``i`` with weight ``exp(s_i)``.

What a serving engine adds, and this function does in one call: many sequences of any length in one
packed batch, each starting from a state in the paged cache (or from zero), each leaving its final
state in the cache, and the state at any number of *checkpoints* on the way.

**Exponents.** A decay is the exponential of a difference of two cumulative sums. Three guards, each
against a fault that people have met:

* rounding can push a difference above 0, and the exponential of a large one is Inf: every exponent
  is clamped to 0 first;
* after one strongly forgetting token (``dt A = -1e9``) a float32 sum no longer notices ``-0.01``,
  and the decays behind it are noise. Below :data:`FORGETS` a decay is 0 in float32 anyway, so steps
  are clamped there, and
* even so a sum over 256 tokens may reach -27000, where neighbouring float32 numbers are 0.002
  apart. So sums are taken in float64 and kept as *two* float32 numbers, ``hi + lo``: the difference
  ``(hi_i - hi_j) + (lo_i - lo_j)`` costs two more additions and is right to 1e-7.

The twin is here. The kernels come in two forms: :mod:`mamba_kernels.fused_scan_triton` walks along
each sequence, :mod:`mamba_kernels.chunk_scan_triton` works on all chunks at once.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from mamba_kernels import chunk_scan_launch as kernels
from mamba_kernels.backend import choose_backend
from mamba_kernels.checks import (
    INT_DTYPES,
    check_checkpoints,
    check_query_start_loc,
    check_recurrence,
    check_slots,
    check_tensor,
)
from mamba_kernels.chunk_layout import ChunkLayout, build_chunk_layout
from mamba_kernels.cpu_rows import chunk_scan_by_row, row_by_row

# exp(-104) is below half of the smallest positive float32: a token that decays more forgets all.
FORGETS = -104.0
# The third side of a CUDA grid is 16 bits.
MAX_CHUNKS = 65535


def mamba_chunk_scan(
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
    num_computed_tokens: torch.Tensor,
    chunk_size: int,
    src_slots: torch.Tensor,
    dst_slots: torch.Tensor,
    has_initial_state: torch.Tensor,
    checkpoints: torch.Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    layout: ChunkLayout | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Scan packed sequences from their cached states and keep the new ones.

    Args:
        x: ``(T, H, P)``; rows behind ``query_start_loc[-1]`` are padding.
        dt: ``(T, H)`` raw step sizes, before bias and softplus.
        A: ``(H,)`` fp32, negative.
        B, C: ``(T, G, N)``; head ``h`` reads group ``h // (H / G)``.
        D, dt_bias: ``(H,)``.
        ssm_state: ``(slots, H, P, N)``, any strides. **Mutated**: destination and checkpoint slots.
        query_start_loc: ``(R + 1,)`` int32.
        num_computed_tokens: ``(R,)`` int, tokens already in the state; places the chunk grid.
        chunk_size: tokens per chunk, any positive number; changes cost and rounding, nothing else.
        src_slots: ``(R,)`` int, the initial state's slot; read only if ``has_initial_state``. Null
            (0 or below) starts from zero.
        dst_slots: ``(R,)`` int, where the final state goes; null (0) keeps nothing.
        has_initial_state: ``(R,)`` bool; False starts from zero whatever the slot holds.
        checkpoints: ``(C, 3)`` int rows *(sequence, end position in its query, slot)* or None; a
            place may be named again with another slot, and a null slot keeps nothing.
        dt_limit: clamp on dt after softplus.
        layout: the result of :func:`build_chunk_layout` for these arguments on the device of ``x``
            (it is the same for every layer of a step). None builds it here, which on a GPU waits.
        backend: force an implementation; None chooses by device.

    Returns:
        ``(T, H, P)`` in the dtype of ``x``; padding rows are 0. Sequences without tokens touch
        nothing.
    """
    _check(x, dt, A, B, C, D, dt_bias, ssm_state, query_start_loc, num_computed_tokens, src_slots,
           dst_slots, has_initial_state, checkpoints, dt_limit)  # fmt: skip
    forced, backend = backend is not None, choose_backend(x, backend)
    if layout is None:
        on_host = None if checkpoints is None else checkpoints.cpu()
        layout = build_chunk_layout(
            query_start_loc.cpu(), num_computed_tokens.cpu(), chunk_size, on_host
        ).to(x.device)
    _check_layout(layout, chunk_size, x, dst_slots, checkpoints)
    if layout.num_chunks == 0:
        return torch.zeros_like(x, memory_format=torch.contiguous_format)
    if backend == "triton":
        return kernels.launch_scan(
            x, dt, A, B, C, D, dt_bias, ssm_state, layout, src_slots, dst_slots, has_initial_state,
            checkpoints, dt_limit, FORGETS,
        )  # fmt: skip
    if not forced and row_by_row(x, ssm_state[0].numel()):
        return chunk_scan_by_row(
            x, dt, A, B, C, D, dt_bias, ssm_state, layout, src_slots, dst_slots,
            has_initial_state, checkpoints, dt_limit, decay_matrix, FORGETS,
        )  # fmt: skip
    return _mamba_chunk_scan_torch(
        x, dt, A, B, C, D, dt_bias, ssm_state, layout, src_slots.long(), dst_slots.long(),
        has_initial_state, checkpoints, dt_limit,
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
    num_computed_tokens: torch.Tensor,
    src_slots: torch.Tensor,
    dst_slots: torch.Tensor,
    has_initial_state: torch.Tensor,
    checkpoints: torch.Tensor | None,
    dt_limit: tuple[float, float],
) -> None:
    check_recurrence(x, dt, A, B, C, D, dt_bias, ssm_state, dt_limit)
    num_seqs = check_query_start_loc(query_start_loc, x)
    check_tensor("num_computed_tokens", num_computed_tokens, (num_seqs,), dtypes=INT_DTYPES)
    check_slots("src_slots", src_slots, (num_seqs,), ssm_state)
    check_slots("dst_slots", dst_slots, (num_seqs,), ssm_state)
    check_tensor("has_initial_state", has_initial_state, (num_seqs,), dtypes=(torch.bool,), like=x,
                 unit_stride=True)  # fmt: skip
    if checkpoints is not None:
        check_checkpoints(checkpoints, query_start_loc, ssm_state)


def _check_layout(
    layout: ChunkLayout,
    chunk_size: int,
    x: torch.Tensor,
    dst_slots: torch.Tensor,
    checkpoints: torch.Tensor | None,
) -> None:
    """A layout of another step would have kernels read beyond their tensors."""
    num_checkpoints = 0 if checkpoints is None else checkpoints.shape[0]
    for what, has, wants in (
        ("chunk_size", layout.chunk_size, chunk_size),
        ("sequences", layout.num_seqs, dst_slots.numel()),
        ("checkpoints", layout.checkpoint_order.numel(), num_checkpoints),
        ("device", layout.seq_idx.device, x.device),
    ):
        if has != wants:
            raise ValueError(f"layout was built for {what} = {has}; this call has {wants}")
    if layout.num_tokens > x.shape[0]:
        raise ValueError(f"layout has {layout.num_tokens} tokens; x has only {x.shape[0]} rows")
    if layout.num_chunks > MAX_CHUNKS:
        raise ValueError(
            f"layout has {layout.num_chunks} chunks; at most {MAX_CHUNKS} can be launched at once "
            f"(chunk_size={chunk_size} is small for {layout.num_tokens} tokens)"
        )


# ---------------------------------------------------------------------------------------------
# torch twin
# ---------------------------------------------------------------------------------------------


def decay(exponent: torch.Tensor) -> torch.Tensor:
    """``exp`` of what is at most 0 but for rounding; never above 1."""
    return torch.exp(exponent.clamp(max=0.0))


def decay_matrix(cum: torch.Tensor) -> torch.Tensor:
    """``(..., Q, Q)`` fp32: at ``i, j <= i``, what token ``j`` still weighs at ``i``; above, 0.

    Args:
        cum: ``(..., Q)`` float64 cumulative log-decays.
    """
    hi = cum.float()
    lo = (cum - hi).detach().float()  # a rounding error is a constant: no gradient
    exponent = (hi[..., :, None] - hi[..., None, :]) + (lo[..., :, None] - lo[..., None, :])
    return decay(exponent).tril()


def added_states(
    cum: torch.Tensor, dt: torch.Tensor, x: torch.Tensor, B: torch.Tensor
) -> torch.Tensor:
    """What each chunk adds to the state by its end, ``(c, H, P, N)``.

    Args:
        cum: ``(c, H, Q)`` float64; the last entry is the chunk's.
        dt: ``(c, H, Q)``; x: ``(c, H, Q, P)``; B: ``(c, G, Q, N)``.
    """
    groups = B.shape[1]
    weight = dt * decay((cum[..., -1:] - cum).float())  # (c, H, Q)
    weighted_x = (weight[..., None] * x).unflatten(1, (groups, -1))  # (c, G, H/G, Q, P)
    return (weighted_x.transpose(-1, -2) @ B[:, :, None]).flatten(1, 2)


def chunk_outputs(
    cum: torch.Tensor,
    dt: torch.Tensor,
    x: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    before: torch.Tensor,
) -> torch.Tensor:
    """What the tokens of each chunk and the state before it give to its tokens, ``(c, H, Q, P)``.

    Args:
        cum, dt, x, B: as for :func:`added_states`; C like B.
        before: ``(c, H, P, N)`` the state before each chunk.
    """
    groups, per_group = B.shape[1], x.shape[1] // B.shape[1]
    scores = (C @ B.transpose(-1, -2)).repeat_interleave(per_group, 1)  # (c, H, Q, Q)
    inside = (scores * decay_matrix(cum) * dt[..., None, :]) @ x
    before = before.unflatten(1, (groups, per_group))  # (c, G, H/G, P, N)
    from_state = (C[:, :, None] @ before.transpose(-1, -2)).flatten(1, 2)  # (c, H, Q, P)
    return inside + from_state * decay(cum.float())[..., None]


def _mamba_chunk_scan_torch(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    ssm_state: torch.Tensor,
    layout: ChunkLayout,
    src_slots: torch.Tensor,
    dst_slots: torch.Tensor,
    has_initial_state: torch.Tensor,
    checkpoints: torch.Tensor | None,
    dt_limit: tuple[float, float],
) -> torch.Tensor:
    # Tokens as a rectangle of chunks. Places past the end of a short chunk repeat its last token
    # with dt = 0: decay 1, contribution 0, and never another sequence's (or nobody's) numbers.
    starts, ends = layout.cu_chunk_seqlens[:-1], layout.cu_chunk_seqlens[1:]
    place = starts[:, None] + torch.arange(layout.longest_chunk, device=x.device)  # (c, Q)
    valid = place < ends[:, None]
    index = torch.minimum(place, ends[:, None] - 1)

    dt = F.softplus(dt.float() + dt_bias.float()).clamp(*dt_limit)  # (T, H)
    dt_c = torch.where(valid[..., None], dt[index], 0).transpose(1, 2)  # (c, H, Q)
    steps = (dt_c * A.float()[:, None]).clamp(min=FORGETS)
    cum = steps.double().cumsum(-1)  # (c, H, Q): s_i
    x_c, B_c, C_c = (  # (c, H, Q, P), (c, G, Q, N), (c, G, Q, N)
        tokens.index_select(0, index.flatten()).unflatten(0, index.shape).float().transpose(1, 2)
        for tokens in (x, B, C)
    )

    # From chunk to chunk; every sequence at once, one turn per chunk of the longest.
    states = _pass_states(
        added_states(cum, dt_c, x_c, B_c), decay(cum[..., -1].float()), layout,
        _initial_states(ssm_state, src_slots, has_initial_state),
    )  # fmt: skip
    seq, rank = layout.seq_idx, layout.chunk_rank
    y = chunk_outputs(cum, dt_c, x_c, B_c, C_c, states[seq, rank]) + D.float()[:, None, None] * x_c

    with torch.no_grad():
        last = layout.last_chunk_indices
        kept = (dst_slots > 0) & (last >= 0)
        seqs = kept.nonzero()[:, 0]
        ssm_state[dst_slots[kept]] = states[seqs, rank[last[kept]] + 1].to(ssm_state.dtype)
        if checkpoints is not None and checkpoints.numel():
            slots = checkpoints[:, 2].long()
            chunk = layout.checkpoint_chunks[slots > 0]
            after = states[seq[chunk], rank[chunk] + 1]
            ssm_state[slots[slots > 0]] = after.to(ssm_state.dtype)

    out = y.transpose(1, 2)[valid].to(x.dtype)  # chunks are in token order: (tokens, H, P)
    return F.pad(out, (0, 0, 0, 0, 0, x.shape[0] - out.shape[0]))


def _initial_states(
    ssm_state: torch.Tensor, src_slots: torch.Tensor, has_initial_state: torch.Tensor
) -> torch.Tensor:
    """``(R, H, P, N)`` fp32: the cached state, or zeros for a sequence that starts here."""
    continues = (has_initial_state & (src_slots > 0))[:, None, None, None]
    return torch.where(continues, ssm_state[src_slots.clamp(min=0)].float(), 0)


def _pass_states(
    chunk_states: torch.Tensor,
    chunk_decay: torch.Tensor,
    layout: ChunkLayout,
    initial: torch.Tensor,
) -> torch.Tensor:
    """States of every sequence before its first chunk, between chunks, and after the last.

    Args:
        chunk_states: ``(c, H, P, N)`` what each chunk adds.
        chunk_decay: ``(c, H)`` how much of the state before it survives.
        initial: ``(R, H, P, N)``.

    Returns:
        ``(R, max_chunks_per_seq + 1, H, P, N)``; entry ``r`` of a sequence is the state before its
        chunk of rank ``r``. Entries past a sequence's last chunk repeat its final state.
    """
    seq, rank = layout.seq_idx, layout.chunk_rank
    num_seqs, longest = initial.shape[0], layout.max_chunks_per_seq
    shape = (num_seqs, longest, *chunk_states.shape[1:])
    added = chunk_states.new_zeros(shape).index_put((seq, rank), chunk_states)
    surviving = chunk_decay.new_ones(shape[:3]).index_put((seq, rank), chunk_decay)
    state, states = initial, [initial]
    for r in range(longest):
        state = surviving[:, r, :, None, None] * state + added[:, r]
        states.append(state)
    return torch.stack(states, dim=1)
