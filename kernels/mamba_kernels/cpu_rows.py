"""Large states on a CPU, one row after the other: fewer passes over memory than the torch twins make.

The twins are written for a device: no value is read on the host, so every row is treated alike, and
each operation passes over *all* rows. On a CPU that is the wrong way round. Reading a slot number costs
nothing there, while eight states of 512 KiB do not stay in a core's cache between one operation and the
next: the twin gathers them, scales them, adds to them, reads them out and scatters them, from memory
each time. Here a row, or a chunk of a prompt, goes through all of its operations while its state is in
the cache, and the result lies in its destination without a copy.

These functions are exact replacements (up to rounding) where :func:`row_by_row` says so. Wherever
somebody records, differentiates, runs on a device, or has states so small that Python's loop would
cost more than it saves, the twins of ``state_update.py``, ``conv1d.py`` and ``chunk_scan.py`` do the
work, and they are what these are tested against. Contracts: there.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode

from mamba_kernels.chunk_layout import ChunkLayout

WORTH_A_LOOP = 1 << 14  # numbers per row, 64 KiB: what an operation costs beyond its launch
CONV_TOKENS = 64  # tokens a prompt's convolution handles at a time


def host_may_read(tensor: torch.Tensor) -> bool:
    """Whether values may be read on the host here: on a CPU, if nobody differentiates or records.

    A recorder (and whoever else watches operations with a ``TorchDispatchMode``) sees operations, not
    the Python branches between them, so it must be given code without such branches.
    """
    return (
        tensor.device.type == "cpu"
        and not torch.is_grad_enabled()
        and _get_current_dispatch_mode() is None
    )


def row_by_row(tensor: torch.Tensor, numbers_per_row: int) -> bool:
    """Whether to go row by row: the host may, and rows are large enough."""
    return numbers_per_row >= WORTH_A_LOOP and host_may_read(tensor)


def state_update_by_row(
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
    """See :func:`mamba_kernels.selective_state_update`; arguments are those, all given."""
    groups, wide = B.shape[1], x.float()
    dt = F.softplus(dt.float() + dt_bias.float()).clamp(*dt_limit)  # (T, H)
    decay = torch.exp(dt * A.float())[..., None, None].unbind()  # T times (H, 1, 1)
    # Heads of a group lie side by side: seen as one head of H/G * P channels they share its B and C.
    grouped = (groups, -1, ssm_state.shape[-1])  # (G, H/G * P, N)
    added = (dt[..., None] * wide).view(len(x), groups, -1, 1).unbind()  # T times (G, H/G * P, 1)
    B_t, C_t = B.float()[:, :, None].unbind(), C.float()[:, :, None].unbind()  # T times (G, 1, N)
    read_out = torch.zeros(len(x), groups, 1, wide[0].numel() // groups, device=x.device)
    y_t = read_out.unbind()
    scratch = torch.empty(
        ssm_state.shape[1:], device=x.device
    )  # for what is kept nowhere, or rounded
    in_place = ssm_state.dtype == torch.float32

    starts, sources, targets = query_start_loc.tolist(), src_slots.tolist(), dst_slots.tolist()
    counts = [1] * len(sources) if num_accepted_tokens is None else num_accepted_tokens.tolist()
    for r, (start, end) in enumerate(pairwise(starts)):
        if end == start or (src := sources[r][counts[r] - 1]) <= 0:
            continue
        state = ssm_state[src]  # (H, P, N)
        for t, slot in zip(range(start, end), targets[r]):
            # Read the state where it is, write it where it belongs.
            new = ssm_state[slot] if in_place and slot > 0 else scratch
            state = torch.mul(state, decay[t], out=new)
            per_group = state.view(grouped)
            per_group.addcmul_(added[t], B_t[t])
            torch.bmm(C_t[t], per_group.transpose(1, 2), out=y_t[t])
            if not in_place and slot > 0:
                ssm_state[slot] = state
    live = _tokens_of_live_rows(starts, sources, counts)
    y = read_out.view(x.shape).addcmul_(D.float()[:, None], wide)
    if len(live) < len(x):
        y = torch.zeros_like(y).index_copy_(0, torch.tensor(live, dtype=torch.int64), y[live])
    return y.to(x.dtype)


def _tokens_of_live_rows(
    starts: list[int], sources: list[list[int]], counts: list[int]
) -> list[int]:
    """Packed positions of the tokens whose rows have a source; the others' results are 0."""
    return [
        t
        for r, (start, end) in enumerate(pairwise(starts))
        if end > start and sources[r][counts[r] - 1] > 0
        for t in range(start, end)
    ]


def conv_update_single_tokens(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    query_start_loc: torch.Tensor,
    src_slots: torch.Tensor,
    dst_slots: torch.Tensor,
    num_accepted_tokens: torch.Tensor | None,
    activation: str | None,
) -> torch.Tensor | None:
    """See :func:`mamba_kernels.causal_conv1d_update`, for the common step: a token in every row.

    Returns:
        None, and nothing is done, if a row has more tokens or none, or lacks a source or destination.
    """
    rows = len(src_slots)
    plain = query_start_loc.tolist() == list(range(rows + 1)) and rows == len(x)
    if not plain or min(src_slots.tolist() + dst_slots.tolist()) <= 0:
        return None
    src, dst = src_slots.long(), dst_slots.long()
    history_len = weight.shape[1] - 1
    if num_accepted_tokens is None:
        history = conv_state[src, :history_len]  # (R, W-1, C)
    else:
        taken = num_accepted_tokens.long()[:, None] - 1 + torch.arange(history_len)
        history = conv_state[src[:, None], taken]
    inputs = torch.cat([history.to(x.dtype), x[:, None]], dim=1)  # (R, W, C)
    conv_state[dst, :history_len] = inputs[:, 1:].to(conv_state.dtype)
    wide, taps = inputs.float(), weight.float()
    y = wide.new_zeros(x.shape) if bias is None else bias.float()
    for w in range(history_len + 1):  # in the twin's order: the same to the last bit
        y = y + wide[:, w] * taps[:, w]
    return (F.silu(y, inplace=True) if activation else y).to(x.dtype)


def conv_by_row(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    query_start_loc: torch.Tensor,
    src_slots: torch.Tensor,
    dst_slots: torch.Tensor,
    has_initial_state: torch.Tensor,
    checkpoints: torch.Tensor | None,
    activation: str | None,
) -> torch.Tensor:
    """See :func:`mamba_kernels.causal_conv1d_fn`; a few tokens at a time, in the order of memory."""
    width, history_len = weight.shape[1], weight.shape[1] - 1
    taps = weight.float().T.contiguous()  # (W, C)
    kept: dict[int, list[tuple[int, int]]] = {}  # row -> (end, slot)
    for row, end, slot in [] if checkpoints is None else checkpoints.tolist():
        kept.setdefault(row, []).append((end, slot))
    y = torch.zeros_like(x)
    starts, sources = query_start_loc.tolist(), src_slots.tolist()
    targets, continues = dst_slots.tolist(), has_initial_state.tolist()
    for r, (start, end) in enumerate(pairwise(starts)):
        if start == end:
            continue
        if continues[r] and sources[r] > 0:
            history = conv_state[sources[r], :history_len].to(x.dtype)
        else:
            history = x.new_zeros(history_len, x.shape[1])
        inputs = torch.cat([history, x[start:end]])  # (W-1 + length, C)
        for first in range(0, end - start, CONV_TOKENS):
            last = min(first + CONV_TOKENS, end - start)
            piece = inputs[first : last + history_len].float()
            part = piece[: last - first] * taps[0]
            for w in range(1, width):
                part.addcmul_(piece[w : w + last - first], taps[w])
            if bias is not None:
                part += bias.float()
            y[start + first : start + last] = F.silu(part, inplace=True) if activation else part
        for position, slot in [*kept.get(r, []), (end - start, targets[r])]:
            if slot > 0:  # the window after `position` tokens
                conv_state[slot, :history_len] = inputs[position : position + history_len]
    return y


def chunk_scan_by_row(
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
    decay_matrix: Callable[[torch.Tensor], torch.Tensor],
    forgets: float,
) -> torch.Tensor:
    """See :func:`mamba_kernels.mamba_chunk_scan`: chunk after chunk, from state to state.

    Args:
        decay_matrix, forgets: of ``chunk_scan.py``: exponents are guarded in one place.
    """
    groups, state_size = B.shape[1:]
    dt = F.softplus(dt.float() + dt_bias.float()).clamp(*dt_limit)  # (T, H)
    steps = (dt * A.float()).clamp(min=forgets).double().T  # (H, T)
    ends, seqs = layout.cu_chunk_seqlens.tolist(), layout.seq_idx.tolist()
    last_chunk, sources = layout.last_chunk_indices.tolist(), src_slots.tolist()
    targets, continues = dst_slots.tolist(), has_initial_state.tolist()
    slots = [] if checkpoints is None else checkpoints[layout.checkpoint_order, 2].tolist()
    first_slot = layout.cu_checkpoints.tolist()
    state = torch.empty(ssm_state.shape[1:], device=x.device)  # (H, P, N)
    grouped = state.view(groups, -1, state_size)  # (G, H/G * P, N): heads that share B and C
    y = torch.zeros_like(x, memory_format=torch.contiguous_format)
    for c, r in enumerate(seqs):
        start, end = ends[c], ends[c + 1]
        if c == 0 or seqs[c - 1] != r:
            if continues[r] and sources[r] > 0:
                state.copy_(ssm_state[sources[r]])
            else:
                state.zero_()
        cum = steps[:, start:end].cumsum(-1)  # (H, Q)
        x_c = x[start:end].float()  # (Q, H, P)
        B_c = B[start:end].float().transpose(0, 1)  # (G, Q, N)
        C_c = C[start:end].float().transpose(0, 1)
        dt_x = dt[start:end, :, None] * x_c
        # What the chunk's tokens give to each other, and what the state before them gives.
        weight = decay_matrix(cum)  # (H, Q, Q)
        scores = torch.bmm(C_c, B_c.transpose(1, 2))  # (G, Q, Q)
        weight.unflatten(0, (groups, -1)).mul_(scores[:, None])
        out = torch.bmm(weight, dt_x.transpose(0, 1)).transpose(0, 1)  # (Q, H, P)
        survives = cum.float().exp_().T[..., None]  # (Q, H, 1), of the state before
        read_out = torch.bmm(C_c, grouped.transpose(1, 2)).transpose(0, 1)  # (Q, G, H/G * P)
        out.addcmul_(read_out.reshape(x_c.shape), survives)
        y[start:end] = out.addcmul_(D.float()[:, None], x_c)
        # What they add to the state.
        to_the_end = (cum[:, -1:] - cum).float().clamp_(max=0.0).exp_().T[..., None]  # (Q, H, 1)
        weighted = dt_x.mul_(to_the_end).view(end - start, groups, -1)  # (Q, G, H/G * P)
        state.mul_(survives[-1, :, :, None])
        grouped.baddbmm_(weighted.permute(1, 2, 0), B_c)
        kept = slots[first_slot[c] : first_slot[c + 1]]
        for slot in [*kept, targets[r]] if c == last_chunk[r] else kept:
            if slot > 0:
                ssm_state[slot] = state
    return y
