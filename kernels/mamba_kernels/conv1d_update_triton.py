"""The Triton kernel of :func:`mamba_kernels.conv1d.causal_conv1d_update`.

A depthwise convolution of width 4 is eight flops per number moved: all that matters is memory. A
program owns a run of channels (the fast axis of ``x``, of the windows and of ``y``) of one row and
takes the row's tokens one after another, the last three inputs in registers: each byte of history,
input and output is touched once. Sums and products are fp32.

A filter narrower than 4 is treated as one of 4 with zeros in front. Then there are always four
taps, and a channel's weights are one vector load (8 bytes in bf16) where the obvious code has
four loads of 2 bytes.
"""
# mypy: disable-error-code="no-untyped-def"
# fmt: off  (long argument lists are grouped by meaning)

from __future__ import annotations

import torch

from mamba_kernels.backend import jit, tl
from mamba_kernels.device_math import silu
from mamba_kernels.launch import AotCase, aot_case, cdiv, launch
from mamba_kernels.tuning import config_for


@jit
def load_taps(weight_ptr, channel, CHANNELS: tl.constexpr, WIDTH: tl.constexpr,
               BLOCK_C: tl.constexpr):
    """The weights of each channel as four vectors, oldest tap first."""
    tap = tl.arange(0, 4) - (4 - WIDTH)
    w = tl.load(weight_ptr + channel[:, None] * WIDTH + tap[None, :],
                mask=(channel < CHANNELS)[:, None] & (tap >= 0)[None, :],
                other=0.0).to(tl.float32)
    # (C, 4) -> (C, 2, 2); each split takes the last axis apart.
    even, odd = tl.split(tl.reshape(w, [BLOCK_C, 2, 2]))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    return w0, w1, w2, w3


# Small tables are read a number at a time: their alignment must not make another variant.
@jit(do_not_specialize=["num_rows", "num_tokens", "query_start_loc_ptr", "src_slots_ptr",
                        "dst_slots_ptr", "num_accepted_ptr"])
def causal_conv1d_update_kernel(
    x_ptr, weight_ptr, bias_ptr, state_ptr, y_ptr,
    query_start_loc_ptr, src_slots_ptr, dst_slots_ptr, num_accepted_ptr,
    num_rows, num_tokens, stride_x_token, stride_state_slot, stride_state_entry,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, WINDOW_LEN: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_NUM_ACCEPTED: tl.constexpr, SILU: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    HISTORY: tl.constexpr = WIDTH - 1
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = channel < CHANNELS
    row = tl.program_id(1)
    start = tl.load(query_start_loc_ptr + row).to(tl.int64)
    end = tl.load(query_start_loc_ptr + row + 1).to(tl.int64)

    # The window has the inputs of the whole last step; those behind the last kept token are not
    # ours to see, so the history begins at offset num_accepted - 1. A count that the window has no
    # room for skips the row (debug_checks refuses it).
    offset = 0
    if HAS_NUM_ACCEPTED:
        offset = tl.load(num_accepted_ptr + row) - 1
    known = (offset >= 0) & (offset <= WINDOW_LEN - HISTORY) & (end > start)
    src = tl.load(src_slots_ptr + row, mask=known, other=0).to(tl.int64)

    if src > 0:
        dst = tl.load(dst_slots_ptr + row).to(tl.int64)
        history = state_ptr + src * stride_state_slot + offset * stride_state_entry + channel
        window = state_ptr + dst * stride_state_slot + channel
        w0, w1, w2, w3 = load_taps(weight_ptr, channel, CHANNELS, WIDTH, BLOCK_C)
        bias = tl.zeros([BLOCK_C], tl.float32)
        if HAS_BIAS:
            bias = tl.load(bias_ptr + channel, mask=mask, other=0.0).to(tl.float32)
        h0 = tl.zeros([BLOCK_C], tl.float32)
        h1 = tl.zeros([BLOCK_C], tl.float32)
        if WIDTH >= 4:
            h0 = tl.load(history + (HISTORY - 3) * stride_state_entry,
                         mask=mask, other=0.0).to(tl.float32)
        if WIDTH >= 3:
            h1 = tl.load(history + (HISTORY - 2) * stride_state_entry,
                         mask=mask, other=0.0).to(tl.float32)
        h2 = tl.load(history + (HISTORY - 1) * stride_state_entry,
                     mask=mask, other=0.0).to(tl.float32)

        # The destination may be the source. All warps have read it before any writes it.
        tl.debug_barrier()
        # Stored: history[1:] ++ x.
        if dst > 0:
            if WIDTH >= 4:
                tl.store(window + (WIDTH - 4) * stride_state_entry,
                         h1.to(state_ptr.dtype.element_ty), mask=mask)
            if WIDTH >= 3:
                tl.store(window + (WIDTH - 3) * stride_state_entry,
                         h2.to(state_ptr.dtype.element_ty), mask=mask)
        for i in range(0, end - start):
            x = tl.load(x_ptr + (start + i) * stride_x_token + channel,
                        mask=mask, other=0.0).to(tl.float32)
            y = w0 * h0 + w1 * h1 + w2 * h2 + w3 * x + bias
            if SILU:
                y = silu(y)
            tl.store(y_ptr + (start + i) * CHANNELS + channel, y, mask=mask)
            if (dst > 0) & (WIDTH - 2 + i < WINDOW_LEN):
                tl.store(window + (WIDTH - 2 + i) * stride_state_entry,
                         x.to(state_ptr.dtype.element_ty), mask=mask)
            h0 = h1
            h1 = h2
            h2 = x
    else:
        for i in range(0, end - start):
            tl.store(y_ptr + (start + i) * CHANNELS + channel,
                     tl.zeros([BLOCK_C], y_ptr.dtype.element_ty), mask=mask)

    # Tokens behind the last row belong to nobody; whoever has the last row clears them.
    if row == num_rows - 1:
        for i in range(0, num_tokens - end):
            tl.store(y_ptr + (end + i) * CHANNELS + channel,
                     tl.zeros([BLOCK_C], y_ptr.dtype.element_ty), mask=mask)


def causal_conv1d_update_triton(
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
    """Launch; arguments as in :func:`mamba_kernels.conv1d.causal_conv1d_update`."""
    (num_tokens, num_channels), num_rows = x.shape, src_slots.shape[0]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    config = config_for("causal_conv1d_update_kernel", conv_dim=num_channels)
    launch(
        causal_conv1d_update_kernel,
        (cdiv(num_channels, config["BLOCK_C"]), num_rows),
        x, weight, weight if bias is None else bias, conv_state, y,
        query_start_loc, src_slots, dst_slots,
        query_start_loc if num_accepted_tokens is None else num_accepted_tokens,
        num_rows, num_tokens, x.stride(0), conv_state.stride(0), conv_state.stride(1),
        CHANNELS=num_channels, WIDTH=weight.shape[1], WINDOW_LEN=conv_state.shape[1],
        HAS_BIAS=bias is not None, HAS_NUM_ACCEPTED=num_accepted_tokens is not None,
        SILU=activation is not None, **config,
    )
    return y


def aot_cases() -> list[AotCase]:
    """Nemotron-H: conv_dim of 10240 or 12288, width 4, with bias and SiLU; 1 and 4 tokens a row."""
    cases = []
    for conv_dim, act, tokens in (
        (10240, "bf16", 1), (10240, "bf16", 4), (12288, "bf16", 1), (12288, "bf16", 4),
        (10240, "fp32", 4),
    ):
        config = config_for("causal_conv1d_update_kernel", "sm_90", conv_dim=conv_dim)
        warps, stages = config.pop("num_warps"), config.pop("num_stages")
        pointers = {f"{name}_ptr": f"*{act}" for name in ("x", "weight", "bias", "state", "y")}
        pointers |= {f"{name}_ptr": "*i32" for name in ("query_start_loc", "src_slots", "dst_slots",
                                                        "num_accepted")}
        constexprs = dict(CHANNELS=conv_dim, WIDTH=4, WINDOW_LEN=2 + tokens, HAS_BIAS=True,
                          HAS_NUM_ACCEPTED=tokens > 1, SILU=True) | config
        cases.append(aot_case(
            causal_conv1d_update_kernel, f"conv update C{conv_dim} {act}, {tokens} tokens",
            pointers, constexprs, num_warps=warps, num_stages=stages,
        ))
    return cases
