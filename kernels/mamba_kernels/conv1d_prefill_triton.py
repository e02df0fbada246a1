"""The Triton kernel of :func:`mamba_kernels.conv1d.causal_conv1d_fn`.

One program per tile of tokens of one sequence and run of channels. Which tile of which sequence
is program number ``n``? The host knows only how many tokens and sequences there are, and asking
the device for their lengths would stall it. Give sequence ``r`` the programs from
``query_start_loc[r] // BLOCK_T + r`` on: each sequence then has at least as many as it has tiles
(one too many at most, which leaves at once), and a program finds its sequence by counting how
many begin at or before it. The tokens behind the last sequence count as one more, which is
cleared.

A tile is loaded four times, shifted by one token: once from memory, three times from the L1
cache, all in flight together. (Carrying the last three tokens in registers would save the L1
reads and make every load wait for the one before.) Tiles of 16 tokens read 3/16 of the input
twice, from L2. Eight bf16 channels a thread are one 16-byte access.
"""
# mypy: disable-error-code="no-untyped-def"
# fmt: off  (long argument lists are grouped by meaning)

from __future__ import annotations

import torch

from mamba_kernels.backend import jit, tl
from mamba_kernels.conv1d_update_triton import load_taps
from mamba_kernels.device_math import silu
from mamba_kernels.launch import AotCase, aot_case, cdiv, launch
from mamba_kernels.tuning import config_for


@jit
def _shifted_tile(x_ptr, start, position, length, stride_x_token, channel, CHANNELS: tl.constexpr):
    """``(tokens, channels)`` inputs at the given positions of a sequence, 0 outside it."""
    inside = (position >= 0) & (position < length)
    pointer = x_ptr + (start + position)[:, None] * stride_x_token + channel[None, :]
    return tl.load(pointer, mask=inside[:, None] & (channel < CHANNELS)[None, :],
                   other=0.0).to(tl.float32)


@jit
def _history_tile(state_ptr, src, position, stride_state_slot, stride_state_entry, channel,
                  CHANNELS: tl.constexpr, HISTORY: tl.constexpr):
    """``(tokens, channels)`` inputs at the negative ones of the given positions, 0 elsewhere."""
    entry = position + HISTORY
    inside = (position < 0) & (entry >= 0)
    pointer = (state_ptr + src * stride_state_slot + entry[:, None] * stride_state_entry
               + channel[None, :])
    return tl.load(pointer, mask=inside[:, None] & (channel < CHANNELS)[None, :],
                   other=0.0).to(tl.float32)


@jit
def _input_at(x_ptr, state_ptr, start, src, position, stride_x_token, stride_state_slot,
              stride_state_entry, channel, CHANNELS: tl.constexpr, HISTORY: tl.constexpr):
    """``(channels,)`` input at one position: of the query, or of the history, or 0 before that."""
    entry = position + HISTORY
    from_x = channel < tl.where(position >= 0, CHANNELS, 0)
    from_state = channel < tl.where((position < 0) & (entry >= 0) & (src > 0), CHANNELS, 0)
    new = tl.load(x_ptr + (start + position) * stride_x_token + channel,
                  mask=from_x, other=0.0).to(tl.float32)
    old = tl.load(state_ptr + src * stride_state_slot + entry * stride_state_entry + channel,
                  mask=from_state, other=0.0).to(tl.float32)
    return tl.where(from_x, new, old)


@jit
def _keep_window(x_ptr, state_ptr, start, src, end, slot, stride_x_token, stride_state_slot,
                 stride_state_entry, channel, CHANNELS: tl.constexpr, WIDTH: tl.constexpr):
    """Write the window after ``end`` tokens of a sequence to ``slot``."""
    HISTORY: tl.constexpr = WIDTH - 1
    mask = channel < CHANNELS
    window = state_ptr + slot * stride_state_slot + channel
    v0 = _input_at(x_ptr, state_ptr, start, src, end - 3, stride_x_token, stride_state_slot,
                   stride_state_entry, channel, CHANNELS, HISTORY)
    v1 = _input_at(x_ptr, state_ptr, start, src, end - 2, stride_x_token, stride_state_slot,
                   stride_state_entry, channel, CHANNELS, HISTORY)
    v2 = _input_at(x_ptr, state_ptr, start, src, end - 1, stride_x_token, stride_state_slot,
                   stride_state_entry, channel, CHANNELS, HISTORY)
    # The slot may be the one that the history came from: all warps read before any writes.
    tl.debug_barrier()
    if WIDTH >= 4:
        tl.store(window + (HISTORY - 3) * stride_state_entry, v0.to(state_ptr.dtype.element_ty),
                 mask=mask)
    if WIDTH >= 3:
        tl.store(window + (HISTORY - 2) * stride_state_entry, v1.to(state_ptr.dtype.element_ty),
                 mask=mask)
    tl.store(window + (HISTORY - 1) * stride_state_entry, v2.to(state_ptr.dtype.element_ty),
             mask=mask)


@jit
def _keep_checkpoints(x_ptr, state_ptr, checkpoints_ptr, num_checkpoints, seq, start, src,
                      source_slot, stride_x_token, stride_state_slot, stride_state_entry, channel,
                      CHANNELS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SEARCH: tl.constexpr,
                      ON_SOURCE: tl.constexpr):
    """The checkpoints of a sequence that its first tile writes: early ones, or those on its source."""
    for c0 in range(0, num_checkpoints, BLOCK_SEARCH):
        c = c0 + tl.arange(0, BLOCK_SEARCH)
        some = c < num_checkpoints
        seqs = tl.load(checkpoints_ptr + c * 3, mask=some, other=-1)
        ends = tl.load(checkpoints_ptr + c * 3 + 1, mask=some, other=WIDTH)
        slots = tl.load(checkpoints_ptr + c * 3 + 2, mask=some, other=0)
        if ON_SOURCE:
            mine = (seqs == seq) & (slots > 0) & (slots == source_slot)
        else:
            mine = (seqs == seq) & (slots > 0) & (slots != source_slot) & (ends < WIDTH - 1)
        if tl.sum(mine.to(tl.int32), axis=0) > 0:  # rare: look at them one by one
            for i in range(c0, tl.minimum(c0 + BLOCK_SEARCH, num_checkpoints)):
                end = tl.load(checkpoints_ptr + i * 3 + 1).to(tl.int64)
                slot = tl.load(checkpoints_ptr + i * 3 + 2).to(tl.int64)
                if ON_SOURCE:
                    wanted = slot == source_slot
                else:
                    wanted = (slot != source_slot) & (end < WIDTH - 1)
                if (tl.load(checkpoints_ptr + i * 3) == seq) & wanted & (slot > 0):
                    _keep_window(x_ptr, state_ptr, start, src, end, slot, stride_x_token,
                                 stride_state_slot, stride_state_entry, channel, CHANNELS, WIDTH)


# Small tables are read a number at a time: their alignment must not make another variant.
@jit(do_not_specialize=["num_seqs", "num_tokens", "num_checkpoints", "query_start_loc_ptr",
                        "src_slots_ptr", "dst_slots_ptr", "has_initial_state_ptr",
                        "checkpoints_ptr"])
def causal_conv1d_fn_kernel(
    x_ptr, weight_ptr, bias_ptr, state_ptr, y_ptr, query_start_loc_ptr, src_slots_ptr,
    dst_slots_ptr, has_initial_state_ptr, checkpoints_ptr, num_seqs, num_tokens, num_checkpoints,
    stride_x_token, stride_state_slot, stride_state_entry,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_SEARCH: tl.constexpr,
):
    HISTORY: tl.constexpr = WIDTH - 1
    program = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = channel < CHANNELS

    # The last programs write one checkpoint each: a window that lies inside the query.
    tile_programs = num_tokens // BLOCK_T + num_seqs + 1
    if program >= tile_programs:
        checkpoint = checkpoints_ptr + (program - tile_programs) * 3
        checkpoint_end = tl.load(checkpoint + 1).to(tl.int64)
        checkpoint_slot = tl.load(checkpoint + 2).to(tl.int64)
        owner = tl.load(checkpoint)
        owner_src = tl.load(src_slots_ptr + owner).to(tl.int64)
        # One in its own sequence's source slot is left to the program that reads the history there.
        if (checkpoint_end >= HISTORY) & (checkpoint_slot > 0) & (checkpoint_slot != owner_src):
            first = tl.load(query_start_loc_ptr + owner).to(tl.int64)
            nothing = checkpoint_slot * 0
            _keep_window(x_ptr, state_ptr, first, nothing, checkpoint_end, checkpoint_slot,
                         stride_x_token, stride_state_slot, stride_state_entry, channel,
                         CHANNELS, WIDTH)
        return

    seq = 0
    for r0 in range(0, num_seqs, BLOCK_SEARCH):
        r = r0 + 1 + tl.arange(0, BLOCK_SEARCH)
        begins = tl.load(query_start_loc_ptr + r, mask=r <= num_seqs, other=0) // BLOCK_T + r
        seq += tl.sum(((begins <= program) & (r <= num_seqs)).to(tl.int32), axis=0)
    start = tl.load(query_start_loc_ptr + seq).to(tl.int64)
    tile = program - (start // BLOCK_T + seq)
    position = tile * BLOCK_T + tl.arange(0, BLOCK_T)
    y_pointer = y_ptr + (start + position)[:, None] * CHANNELS + channel[None, :]

    if seq == num_seqs:  # behind the last sequence: nobody's tokens
        y_mask = (position < num_tokens - start)[:, None] & mask[None, :]
        tl.store(y_pointer, tl.zeros([BLOCK_T, BLOCK_C], y_ptr.dtype.element_ty), mask=y_mask)
        return
    length = tl.load(query_start_loc_ptr + seq + 1) - start
    if tile * BLOCK_T >= length:
        return
    src = tl.load(src_slots_ptr + seq).to(tl.int64)
    src = tl.where(tl.load(has_initial_state_ptr + seq), src, 0)

    w0, w1, w2, w3 = load_taps(weight_ptr, channel, CHANNELS, WIDTH, BLOCK_C)
    y = w0[None, :] * _shifted_tile(x_ptr, start, position - 3, length,
                                     stride_x_token, channel, CHANNELS)
    y += w1[None, :] * _shifted_tile(x_ptr, start, position - 2, length,
                                     stride_x_token, channel, CHANNELS)
    y += w2[None, :] * _shifted_tile(x_ptr, start, position - 1, length,
                                     stride_x_token, channel, CHANNELS)
    y += w3[None, :] * _shifted_tile(x_ptr, start, position, length,
                                     stride_x_token, channel, CHANNELS)
    if (tile == 0) & (src > 0):
        y += w0[None, :] * _history_tile(state_ptr, src, position - 3, stride_state_slot,
                                         stride_state_entry, channel, CHANNELS, HISTORY)
        y += w1[None, :] * _history_tile(state_ptr, src, position - 2, stride_state_slot,
                                         stride_state_entry, channel, CHANNELS, HISTORY)
        y += w2[None, :] * _history_tile(state_ptr, src, position - 1, stride_state_slot,
                                         stride_state_entry, channel, CHANNELS, HISTORY)
    if HAS_BIAS:
        y += tl.load(bias_ptr + channel, mask=mask, other=0.0).to(tl.float32)[None, :]
    if SILU:
        y = silu(y)
    tl.store(y_pointer, y, mask=(position < length)[:, None] & mask[None, :])

    # Whoever reads the history also writes what needs it, and what may lie on top of it: another
    # program could write too early. First what goes elsewhere (the few checkpoints that still need
    # the history, the final window), last what goes into the source slot: the final window of a
    # prefill in place, or the checkpoint of a running state that completes its block.
    if tile == 0:
        dst = tl.load(dst_slots_ptr + seq).to(tl.int64)
        source_slot = tl.load(src_slots_ptr + seq).to(tl.int64)
        _keep_checkpoints(x_ptr, state_ptr, checkpoints_ptr, num_checkpoints, seq, start, src,
                          source_slot, stride_x_token, stride_state_slot, stride_state_entry,
                          channel, CHANNELS, WIDTH, BLOCK_SEARCH, ON_SOURCE=False)
        if (dst > 0) & (dst != source_slot):
            _keep_window(x_ptr, state_ptr, start, src, length, dst, stride_x_token,
                         stride_state_slot, stride_state_entry, channel, CHANNELS, WIDTH)
        _keep_checkpoints(x_ptr, state_ptr, checkpoints_ptr, num_checkpoints, seq, start, src,
                          source_slot, stride_x_token, stride_state_slot, stride_state_entry,
                          channel, CHANNELS, WIDTH, BLOCK_SEARCH, ON_SOURCE=True)
        if (dst > 0) & (dst == source_slot):
            _keep_window(x_ptr, state_ptr, start, src, length, dst, stride_x_token,
                         stride_state_slot, stride_state_entry, channel, CHANNELS, WIDTH)


def causal_conv1d_fn_triton(
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
    """Launch; arguments as in :func:`mamba_kernels.conv1d.causal_conv1d_fn`."""
    (num_tokens, num_channels), num_seqs = x.shape, src_slots.shape[0]
    num_checkpoints = 0 if checkpoints is None else checkpoints.shape[0]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    config = config_for("causal_conv1d_fn_kernel", conv_dim=num_channels)
    programs = num_tokens // config["BLOCK_T"] + num_seqs + 1 + num_checkpoints
    launch(
        causal_conv1d_fn_kernel,
        (programs, cdiv(num_channels, config["BLOCK_C"])),
        x, weight, weight if bias is None else bias, conv_state, y, query_start_loc, src_slots,
        dst_slots, has_initial_state, query_start_loc if checkpoints is None else checkpoints,
        num_seqs, num_tokens, num_checkpoints,
        x.stride(0), conv_state.stride(0), conv_state.stride(1),
        CHANNELS=num_channels, WIDTH=weight.shape[1], HAS_BIAS=bias is not None,
        SILU=activation is not None, BLOCK_SEARCH=128, **config,
    )
    return y


def aot_cases() -> list[AotCase]:
    """Nemotron-H: conv_dim of 10240 or 12288, width 4, with bias and SiLU."""
    cases = []
    for conv_dim, act in ((10240, "bf16"), (12288, "bf16"), (10240, "fp32")):
        config = config_for("causal_conv1d_fn_kernel", "sm_90", conv_dim=conv_dim)
        warps, stages = config.pop("num_warps"), config.pop("num_stages")
        pointers = {f"{name}_ptr": f"*{act}" for name in ("x", "weight", "bias", "state", "y")}
        pointers |= {f"{name}_ptr": "*i32" for name in ("query_start_loc", "src_slots", "dst_slots",
                                                        "checkpoints")}
        pointers |= {"has_initial_state_ptr": "*i1"}
        constexprs = dict(CHANNELS=conv_dim, WIDTH=4, HAS_BIAS=True, SILU=True,
                          BLOCK_SEARCH=128) | config
        cases.append(aot_case(
            causal_conv1d_fn_kernel, f"conv prefill C{conv_dim} {act}", pointers, constexprs,
            num_warps=warps, num_stages=stages,
        ))
    return cases
