"""Causal depthwise convolution over a paged window cache.

Each channel is filtered over the last ``W`` inputs (``W = 4``), then SiLU. To go on later, a
request must keep its last ``W - 1`` inputs: the *window*. It is tiny next to the SSM state, and
it can do a trick that the SSM state cannot: kept a little longer (``W - 1 + k`` inputs), it
remembers several moments at once, and "undo two tokens" is just reading it from an earlier
offset.

Two functions, one layout (``conv_state: (slots, W - 1 + k, conv_dim)``):

* :func:`causal_conv1d_fn`, prefill: any number of packed sequences of any length. Reads a history
  of ``W - 1`` inputs (or zeros), writes the window after the last token, and one more window for
  every checkpoint.
* :func:`causal_conv1d_update`, decode: rows of 1 to ``1 + k`` tokens. Reads the history at offset
  ``num_accepted_tokens - 1`` and stores ``history[1:] ++ x``, so the next step can start behind any
  of the tokens of this one.

Windows are formed from *history followed by inputs*, never from the inputs alone: a sequence
shorter than the window keeps part of its history. A slot of 0 (null) or below is never an
address: it is skipped as a source and as a destination.

The Triton kernels are in ``conv1d_prefill_triton.py`` and ``conv1d_update_triton.py``. Sources:
Mamba2 paper (section 7.1); contracts of vLLM's ``causal_conv1d`` as of pull request 41233.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from mamba_kernels.backend import choose_backend
from mamba_kernels.checks import (
    check_checkpoints,
    check_num_accepted,
    check_query_start_loc,
    check_row_lengths,
    check_slots,
    check_tensor,
)
from mamba_kernels.conv1d_prefill_triton import causal_conv1d_fn_triton
from mamba_kernels.conv1d_update_triton import causal_conv1d_update_triton
from mamba_kernels.cpu_rows import (
    conv_by_row,
    conv_update_single_tokens,
    host_may_read,
    row_by_row,
)


def causal_conv1d_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    *,
    query_start_loc: torch.Tensor,
    src_slots: torch.Tensor,
    dst_slots: torch.Tensor,
    has_initial_state: torch.Tensor,
    checkpoints: torch.Tensor | None = None,
    activation: str | None = "silu",
    backend: str | None = None,
) -> torch.Tensor:
    """Convolve packed sequences and keep their windows.

    Args:
        x: ``(T, conv_dim)`` packed inputs; rows behind ``query_start_loc[-1]`` are padding.
        weight: ``(conv_dim, W)``; ``weight[:, W - 1]`` meets the newest input.
        bias: ``(conv_dim,)`` or None.
        conv_state: ``(slots, L, conv_dim)`` with ``L >= W - 1``. **Mutated**: entries
            ``0 .. W-2`` of the destination slots and of the checkpoints' slots.
        query_start_loc: ``(R + 1,)`` int32.
        src_slots: ``(R,)`` int, where the history is; read only if ``has_initial_state``.
        dst_slots: ``(R,)`` int, where the window goes; null (0) keeps nothing.
        has_initial_state: ``(R,)`` bool; False starts from zeros whatever the slot holds.
        checkpoints: ``(C, 3)`` int rows *(sequence, end position in its query, slot)* or None.
        activation: ``"silu"`` or None.
        backend: force an implementation; None chooses by device.

    Returns:
        ``(T, conv_dim)``; padding rows are 0. Sequences without tokens touch nothing.
    """
    num_seqs = _check(x, weight, bias, conv_state, activation, query_start_loc)
    check_slots("src_slots", src_slots, (num_seqs,), conv_state)
    check_slots("dst_slots", dst_slots, (num_seqs,), conv_state)
    check_tensor("has_initial_state", has_initial_state, (num_seqs,), dtypes=(torch.bool,), like=x)
    if checkpoints is not None:
        check_checkpoints(checkpoints, query_start_loc, conv_state)
    if x.shape[0] == 0:
        return torch.zeros_like(x)
    if choose_backend(x, backend) == "triton":
        run = causal_conv1d_fn_triton
    elif backend is None and row_by_row(x, x.numel() // max(num_seqs, 1)):
        run = conv_by_row
    else:
        run = _causal_conv1d_fn_torch
    return run(
        x, weight, bias, conv_state, query_start_loc, src_slots, dst_slots,
        has_initial_state, checkpoints, activation,
    )  # fmt: skip


def causal_conv1d_update(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    *,
    query_start_loc: torch.Tensor,
    src_slots: torch.Tensor,
    dst_slots: torch.Tensor,
    num_accepted_tokens: torch.Tensor | None = None,
    activation: str | None = "silu",
    backend: str | None = None,
) -> torch.Tensor:
    """One decode or verify step of the convolution, 1 to ``1 + k`` tokens per row.

    Args:
        x: ``(T, conv_dim)`` packed inputs.
        weight, bias: as in :func:`causal_conv1d_fn`.
        conv_state: ``(slots, W - 1 + k, conv_dim)``. **Mutated**: the first ``W - 2 + q`` entries
            of a row's destination slot, ``q`` being its number of tokens.
        query_start_loc: ``(R + 1,)`` int32; a row of length 0 is padding.
        src_slots: ``(R,)`` int; a null source skips the row.
        dst_slots: ``(R,)`` int; may equal the source.
        num_accepted_tokens: ``(R,)`` int, ``1 .. 1 + k``: how many tokens of the row's previous
            step were kept. None means 1 everywhere.
        activation: ``"silu"`` or None.
        backend: force an implementation; None chooses by device.

    Returns:
        ``(T, conv_dim)``; skipped rows are 0.
    """
    num_rows = _check(x, weight, bias, conv_state, activation, query_start_loc)
    check_slots("src_slots", src_slots, (num_rows,), conv_state)
    check_slots("dst_slots", dst_slots, (num_rows,), conv_state)
    max_query_len = conv_state.shape[1] - weight.shape[1] + 2  # 1 + k
    check_row_lengths(query_start_loc, max_query_len)
    if num_accepted_tokens is not None:
        check_num_accepted(num_accepted_tokens, num_rows, max_query_len, x)
    if x.shape[0] == 0 or num_rows == 0:
        return torch.zeros_like(x)
    args = (
        x, weight, bias, conv_state, query_start_loc, src_slots, dst_slots, num_accepted_tokens,
        activation,
    )  # fmt: skip
    if choose_backend(x, backend) == "triton":
        return causal_conv1d_update_triton(*args)
    if backend is None and host_may_read(x):
        if (y := conv_update_single_tokens(*args)) is not None:
            return y
    return _causal_conv1d_update_torch(*args)


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    activation: str | None,
    query_start_loc: torch.Tensor,
) -> int:
    """What both functions ask of their arguments; returns the number of rows."""
    check_tensor("x", x, (None, None), unit_stride=True)
    num_channels = x.shape[1]
    check_tensor("weight", weight, (num_channels, None), like=x)
    width = weight.shape[1]
    if not 2 <= width <= 4 or not weight.is_contiguous():
        raise ValueError(
            f"weight has width {width} and strides {weight.stride()}; expected a contiguous "
            f"(conv_dim, W) with W of 2, 3 or 4"
        )
    if bias is not None:
        check_tensor("bias", bias, (num_channels,), like=x, unit_stride=True)
    check_tensor("conv_state", conv_state, (None, None, num_channels), like=x, unit_stride=True)
    if conv_state.shape[1] < width - 1:
        raise ValueError(
            f"conv_state keeps {conv_state.shape[1]} inputs; a filter of width {width} needs at "
            f"least {width - 1}"
        )
    if activation not in ("silu", None):
        raise ValueError(f"activation={activation!r}; expected 'silu' or None")
    return check_query_start_loc(query_start_loc, x)


# ---------------------------------------------------------------------------------------------
# torch twins
# ---------------------------------------------------------------------------------------------


def _causal_conv1d_fn_torch(
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
    num_channels, width = weight.shape
    history_len = width - 1
    starts, lengths = query_start_loc[:-1].long(), query_start_loc.diff().long()
    num_seqs, num_tokens = lengths.numel(), int(query_start_loc[-1])
    if num_tokens == 0:
        return torch.zeros_like(x)

    # One long buffer: history 0, tokens 0, history 1, tokens 1, ... A single convolution over it is
    # right for every token; the outputs that straddle two sequences are simply not picked.
    seq_of_token = torch.repeat_interleave(lengths)  # (num_tokens,)
    token_at = torch.arange(num_tokens, device=x.device) + history_len * (seq_of_token + 1)
    history_at = starts + history_len * torch.arange(num_seqs, device=x.device)  # (R,)
    window = torch.arange(history_len, device=x.device)

    continues = has_initial_state & (src_slots > 0) & (lengths > 0)
    history = conv_state[src_slots.long().clamp(min=0), :history_len].to(x.dtype)  # (R, W-1, C)
    history = torch.where(continues[:, None, None], history, 0)
    extended = x.new_zeros(num_tokens + history_len * num_seqs, num_channels)
    extended = extended.index_copy(0, token_at, x[:num_tokens])
    extended = extended.index_copy(
        0, (history_at[:, None] + window).flatten(), history.flatten(0, 1)
    )

    convolved = F.conv1d(
        extended.T[None], weight[:, None].to(x.dtype), bias, groups=num_channels
    )  # (1, C, len(extended) - W + 1): entry e has seen extended[e : e + W]
    y = convolved[0].T[token_at - history_len]
    if activation:
        y = F.silu(y)

    with torch.no_grad():
        # The window after `end` tokens is extended[history_at + end : ... + W - 1].
        kept = (dst_slots > 0) & (lengths > 0)
        rows, slots = history_at[kept] + lengths[kept], dst_slots[kept].long()
        if checkpoints is not None and checkpoints.numel():
            checkpoints = checkpoints[checkpoints[:, 2] > 0]
            rows = torch.cat([rows, history_at[checkpoints[:, 0].long()] + checkpoints[:, 1]])
            slots = torch.cat([slots, checkpoints[:, 2].long()])
        windows = extended[rows[:, None] + window]  # (kept, W-1, C)
        conv_state[slots, :history_len] = windows.to(conv_state.dtype)

    if num_tokens < x.shape[0]:
        y = F.pad(y, (0, 0, 0, x.shape[0] - num_tokens))
    return y


def _causal_conv1d_update_torch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    query_start_loc: torch.Tensor,
    src_slots: torch.Tensor,
    dst_slots: torch.Tensor,
    num_accepted_tokens: torch.Tensor | None,
    activation: str | None,
) -> torch.Tensor:
    width = weight.shape[1]
    history_len = width - 1
    window_len = conv_state.shape[1]
    max_query_len = window_len - history_len + 1  # 1 + k
    starts, lengths = query_start_loc[:-1].long(), query_start_loc.diff().long()

    live = (src_slots > 0) & (lengths > 0)  # (R,)
    offset = torch.zeros_like(starts) if num_accepted_tokens is None else num_accepted_tokens - 1
    src = torch.where(live, src_slots, 0).long()
    taken = offset.long()[:, None] + torch.arange(history_len, device=x.device)  # (R, W-1)
    history = conv_state[src[:, None], taken].to(x.dtype)  # (R, W-1, C)

    # Rows of up to 1 + k tokens as a rectangle; places past the end of a row are masked.
    step = torch.arange(max_query_len, device=x.device)
    valid = live[:, None] & (step < lengths[:, None])  # (R, 1+k)
    token = (starts[:, None] + step).clamp(max=max(x.shape[0] - 1, 0))
    extended = torch.cat([history, x[token]], dim=1)  # (R, W-1 + 1+k, C)

    # Products and their sum in fp32, whatever the inputs are, as the kernel has them.
    wide, taps = extended.float(), weight.float()
    y = wide.new_zeros(()) if bias is None else bias.float()
    for w in range(width):
        y = y + wide[:, w : w + max_query_len] * taps[:, w]
    if activation:
        y = F.silu(y)
    y = torch.where(valid[..., None], y, 0)
    # Every token belongs to one row; masked places add an exact 0 to somebody else's.
    out = torch.zeros_like(x).index_add_(0, token.flatten(), y.flatten(0, 1).to(x.dtype))

    # Stored: history[1:] ++ x, W - 2 + q entries. What lies behind them stays, and so does the null
    # slot: a row that keeps nothing writes back what it found.
    dst = torch.where(live, dst_slots, 0).long().clamp(min=0)
    entry = torch.arange(window_len, device=x.device)
    written = (entry < (history_len - 1 + lengths)[:, None]) & (dst != 0)[:, None]  # (R, L)
    new_window = extended[:, 1:].to(conv_state.dtype)
    conv_state[dst] = torch.where(written[..., None], new_window, conv_state[dst])
    return out
