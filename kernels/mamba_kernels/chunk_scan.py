"""The SSD scan: Mamba2's recurrence over whole prompts, as matrix multiplications.

Token by token the recurrence is ``h = exp(dt A) h + dt x (outer) B``, ``y = h . C + D x``: a chain of
tiny steps. The state space duality of Mamba2 (paper, section 6 and listing 1) cuts the tokens into
chunks and does almost everything with matrix products. Write ``s_i`` for the cumulative sum of
``dt A`` inside a chunk; then

1. *inside a chunk*, token ``j`` reaches token ``i >= j`` with weight ``exp(s_i - s_j) dt_j (C_i . B_j)``:
   a masked attention without softmax;
2. a chunk adds ``sum_j exp(s_last - s_j) dt_j x_j (outer) B_j`` to the state and multiplies what came
   before by ``exp(s_last)``: its *chunk state* and *chunk decay*;
3. *between chunks* the recurrence runs once per chunk instead of once per token;
4. the state before a chunk reaches its token ``i`` with weight ``exp(s_i)``.

What a serving engine adds, and this function does in one call: many sequences of any length in one
packed batch, each starting from a state in the paged cache (or from zero), each leaving its final
state in the cache, and the state at any number of *checkpoints* on the way.

Decays are exponentials of differences that are at most 0 in exact arithmetic; rounding can push one
above (a parallel sum over large ``|A|``), so every difference is clamped to 0 first.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from mamba_kernels.backend import choose_backend
from mamba_kernels.chunk_layout import ChunkLayout, build_chunk_layout


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
        src_slots: ``(R,)`` int, the initial state's slot; read only if ``has_initial_state``.
        dst_slots: ``(R,)`` int, where the final state goes; null (0) keeps nothing.
        has_initial_state: ``(R,)`` bool; False starts from zero whatever the slot holds.
        checkpoints: ``(C, 3)`` int rows *(sequence, end position in its query, slot)* or None.
        dt_limit: clamp on dt after softplus.
        layout: the result of :func:`build_chunk_layout` for these arguments, if already at hand
            (it is the same for every layer of a step).
        backend: force an implementation; None chooses by device.

    Returns:
        ``(T, H, P)`` in the dtype of ``x``; padding rows are 0. Sequences without tokens touch nothing.
    """
    choose_backend(x, backend)
    if layout is None:
        layout = build_chunk_layout(query_start_loc, num_computed_tokens, chunk_size, checkpoints)
    if layout.num_chunks == 0:
        return torch.zeros_like(x)
    checkpoint_slots = None if checkpoints is None else checkpoints[:, 2].long()
    return _mamba_chunk_scan_torch(
        x, dt, A, B, C, D, dt_bias, ssm_state, layout, src_slots.long(), dst_slots.long(),
        has_initial_state, checkpoint_slots, dt_limit,
    )  # fmt: skip


def decay_between(later: torch.Tensor, earlier: torch.Tensor) -> torch.Tensor:
    """``exp(later - earlier)`` of cumulative log-decays, never above 1."""
    return torch.exp((later - earlier).clamp(max=0.0))


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
    checkpoint_slots: torch.Tensor | None,
    dt_limit: tuple[float, float],
) -> torch.Tensor:
    num_heads, head_dim = x.shape[1:]
    groups, state_size = B.shape[1:]
    per_group = num_heads // groups

    # Tokens as a rectangle of chunks. Places past the end of a short chunk repeat its last token
    # with dt = 0: decay 1, contribution 0, and never another sequence's (or nobody's) numbers.
    starts, ends = layout.cu_chunk_seqlens[:-1], layout.cu_chunk_seqlens[1:]
    longest = int((ends - starts).max())
    place = starts[:, None] + torch.arange(longest, device=x.device)  # (c, Q)
    valid = place < ends[:, None]
    index = torch.minimum(place, ends[:, None] - 1)

    dt = F.softplus(dt.float() + dt_bias.float()).clamp(*dt_limit)  # (T, H)
    dt_c = torch.where(valid[..., None], dt[index], 0).transpose(1, 2)  # (c, H, Q)
    cum = (dt_c * A.float()[:, None]).cumsum(-1)  # (c, H, Q): s_i
    x_c, B_c, C_c = (  # (c, H, Q, P), (c, G, Q, N), (c, G, Q, N)
        tokens.index_select(0, index.flatten()).unflatten(0, index.shape).float().transpose(1, 2)
        for tokens in (x, B, C)
    )

    # 1. Inside each chunk.
    scores = (C_c @ B_c.transpose(-1, -2)).repeat_interleave(per_group, 1)  # (c, H, Q, Q)
    decay = decay_between(cum[..., :, None], cum[..., None, :]).tril()
    y = (scores * decay * dt_c[..., None, :]) @ x_c  # (c, H, Q, P)

    # 2. What each chunk adds to the state.
    weight = dt_c * decay_between(cum[..., -1:], cum)  # (c, H, Q)
    weighted_x = (weight[..., None] * x_c).unflatten(1, (groups, per_group))  # (c, G, H/G, Q, P)
    chunk_states = (weighted_x.transpose(-1, -2) @ B_c[:, :, None]).flatten(1, 2)  # (c, H, P, N)

    # 3. From chunk to chunk; every sequence at once, one turn per chunk of the longest.
    states = _pass_states(
        chunk_states, torch.exp(cum[..., -1].clamp(max=0.0)), layout,
        _initial_states(ssm_state, src_slots, has_initial_state),
    )  # fmt: skip
    seq, rank = layout.seq_idx, layout.chunk_rank

    # 4. What the state before each chunk gives to its tokens.
    before = states[seq, rank].unflatten(1, (groups, per_group))  # (c, G, H/G, P, N)
    from_state = (C_c[:, :, None] @ before.transpose(-1, -2)).flatten(1, 2)  # (c, H, Q, P)
    y = y + from_state * torch.exp(cum)[..., None] + D.float()[:, None, None] * x_c

    with torch.no_grad():
        last = layout.last_chunk_indices
        kept = (dst_slots != 0) & (last >= 0)
        seqs = kept.nonzero()[:, 0]
        ssm_state[dst_slots[kept]] = states[seqs, rank[last[kept]] + 1].to(ssm_state.dtype)
        if checkpoint_slots is not None and checkpoint_slots.numel():
            chunk = layout.checkpoint_chunks
            ssm_state[checkpoint_slots] = states[seq[chunk], rank[chunk] + 1].to(ssm_state.dtype)

    out = y.transpose(1, 2)[valid].to(x.dtype)  # chunks are in token order: (tokens, H, P)
    return F.pad(out, (0, 0, 0, 0, 0, x.shape[0] - out.shape[0]))


def _initial_states(
    ssm_state: torch.Tensor, src_slots: torch.Tensor, has_initial_state: torch.Tensor
) -> torch.Tensor:
    """``(R, H, P, N)`` fp32: the cached state, or zeros for a sequence that starts here."""
    continues = (has_initial_state & (src_slots != 0))[:, None, None, None]
    return torch.where(continues, ssm_state[src_slots].float(), 0)


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
