"""The Triton kernel of :mod:`mamba_kernels.state_update`, which has the contract.

A program owns ``BLOCK_P`` rows of one head's state of one batch row and carries them through all
tokens of the step in registers: the state is read once and written once per token, which is the
floor. Everything else is small: ``x`` and ``y`` are ``1 / N`` of a state, and B and C (``2 N``
numbers, read again by each tile of each head of the group) come from the L2 cache after the first
program.

The tile: one row of ``N = 128`` fp32 numbers is 512 bytes, one 16-byte load for each lane of a
warp. A program's 16 rows are 8 KiB in flight before the first use, and eight programs fit on an
SM: 64 KiB, well above the 26 KB that an H200 needs outstanding per SM to keep its memory busy. 16
also divides head dims of 64 and of 80 (a block of 32 would leave a sixth of the lanes idle at
80).
"""
# mypy: disable-error-code="no-untyped-def"
# fmt: off  (long argument lists are grouped by meaning)

from __future__ import annotations

import torch

from mamba_kernels.backend import jit, tl
from mamba_kernels.device_math import step_size
from mamba_kernels.launch import AotCase, aot_case, cdiv, launch, next_power_of_2
from mamba_kernels.tuning import config_for


# Small tables are read a number at a time: their alignment must not make another variant.
@jit(do_not_specialize=["num_rows", "num_tokens", "query_start_loc_ptr", "src_slots_ptr",
                        "dst_slots_ptr", "num_accepted_ptr", "stride_src_row",
                        "stride_dst_row"])
def selective_state_update_kernel(
    x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, dt_bias_ptr, state_ptr, y_ptr,
    query_start_loc_ptr, src_slots_ptr, dst_slots_ptr, num_accepted_ptr,
    num_rows, num_tokens, dt_min, dt_max,
    stride_x_token, stride_x_head, stride_x_dim, stride_dt_token, stride_dt_head,
    stride_B_token, stride_B_group, stride_B_state, stride_C_token, stride_C_group, stride_C_state,
    stride_state_slot, stride_state_head, stride_state_dim, stride_state_state,
    stride_src_row, stride_dst_row,
    HAS_NUM_ACCEPTED: tl.constexpr, MAX_QUERY_LEN: tl.constexpr, HEADS: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, STATE_SIZE: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):
    # Tiles of a head are neighbours in launch order, then heads: they share B and C in the cache.
    tile, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    p = tile * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    p_mask, n_mask = p < HEAD_DIM, n < STATE_SIZE
    tile_mask = p_mask[:, None] & n_mask[None, :]

    # 64 bits before any multiplication: 2048 slots of 128 x 64 x 128 numbers are 2**31 of them.
    start = tl.load(query_start_loc_ptr + row).to(tl.int64)
    end = tl.load(query_start_loc_ptr + row + 1).to(tl.int64)
    # Which slot holds the state after the last token that was kept? A count outside 1..1+k cannot
    # be answered and skips the row (debug_checks refuses it).
    kept = 0
    if HAS_NUM_ACCEPTED:
        kept = tl.load(num_accepted_ptr + row) - 1
    known = (kept >= 0) & (kept < MAX_QUERY_LEN) & (end > start)
    src = tl.load(src_slots_ptr + row * stride_src_row + kept, mask=known, other=0).to(tl.int64)

    y_offset = head * HEAD_DIM + p
    y_stride_token = HEADS * HEAD_DIM
    tile_offset = (head * stride_state_head + p[:, None] * stride_state_dim
                   + n[None, :] * stride_state_state)
    group = head // HEADS_PER_GROUP

    if src > 0:
        state = tl.load(state_ptr + src * stride_state_slot + tile_offset,
                        mask=tile_mask, other=0.0).to(tl.float32)
        A = tl.load(A_ptr + head).to(tl.float32)
        D = tl.load(D_ptr + head).to(tl.float32)
        dt_bias = tl.load(dt_bias_ptr + head).to(tl.float32)
        # A destination may be the source. All warps have read it before any writes it.
        tl.debug_barrier()
        for i in range(0, end - start):
            token = start + i
            raw = tl.load(dt_ptr + token * stride_dt_token + head * stride_dt_head).to(tl.float32)
            x = tl.load(x_ptr + token * stride_x_token + head * stride_x_head + p * stride_x_dim,
                        mask=p_mask, other=0.0).to(tl.float32)
            B = tl.load(B_ptr + token * stride_B_token + group * stride_B_group
                        + n * stride_B_state, mask=n_mask, other=0.0).to(tl.float32)
            C = tl.load(C_ptr + token * stride_C_token + group * stride_C_group
                        + n * stride_C_state, mask=n_mask, other=0.0).to(tl.float32)
            dt = step_size(raw, dt_bias, dt_min, dt_max)
            state = state * tl.exp(dt * A) + (dt * x)[:, None] * B[None, :]
            y = tl.sum(state * C[None, :], axis=1) + D * x
            tl.store(y_ptr + token * y_stride_token + y_offset, y, mask=p_mask)

            dst = tl.load(dst_slots_ptr + row * stride_dst_row + i, mask=i < MAX_QUERY_LEN, other=0)
            if dst > 0:
                tl.store(state_ptr + dst.to(tl.int64) * stride_state_slot + tile_offset,
                         state.to(state_ptr.dtype.element_ty), mask=tile_mask)
    else:
        for i in range(0, end - start):
            tl.store(y_ptr + (start + i) * y_stride_token + y_offset,
                     tl.zeros([BLOCK_P], y_ptr.dtype.element_ty), mask=p_mask)

    # Tokens behind the last row belong to nobody; whoever has the last row clears them.
    if row == num_rows - 1:
        for i in range(0, num_tokens - end):
            tl.store(y_ptr + (end + i) * y_stride_token + y_offset,
                     tl.zeros([BLOCK_P], y_ptr.dtype.element_ty), mask=p_mask)


def selective_state_update_triton(
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
    """Launch; arguments as in :func:`mamba_kernels.state_update.selective_state_update`."""
    num_tokens, num_heads, head_dim = x.shape
    num_rows, max_query_len = src_slots.shape
    groups, state_size = B.shape[1:]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    config = config_for("selective_state_update_kernel", head_dim=head_dim, state_size=state_size,
                        state_bytes=ssm_state.element_size())
    config["BLOCK_P"] = min(config["BLOCK_P"], next_power_of_2(head_dim))
    launch(
        selective_state_update_kernel,
        (cdiv(head_dim, config["BLOCK_P"]), num_heads, num_rows),
        x, dt, A, B, C, D, dt_bias, ssm_state, y,
        query_start_loc, src_slots, dst_slots,
        query_start_loc if num_accepted_tokens is None else num_accepted_tokens,
        num_rows, num_tokens, float(dt_limit[0]), float(dt_limit[1]),
        *x.stride(), *dt.stride(), *B.stride(), *C.stride(), *ssm_state.stride(),
        src_slots.stride(0), dst_slots.stride(0),
        HAS_NUM_ACCEPTED=num_accepted_tokens is not None, MAX_QUERY_LEN=max_query_len,
        HEADS=num_heads, HEADS_PER_GROUP=num_heads // groups, HEAD_DIM=head_dim,
        STATE_SIZE=state_size, BLOCK_N=next_power_of_2(state_size), **config,
    )
    return y


def aot_cases() -> list[AotCase]:
    """Nemotron-H's decode and verify steps: 128 heads, state 128, 8 groups."""
    cases = []
    for head_dim, state, act, tokens in (
        (64, "fp32", "bf16", 1), (64, "fp32", "bf16", 4), (64, "bf16", "bf16", 1),
        (80, "fp32", "bf16", 1), (80, "fp32", "bf16", 4), (80, "fp32", "fp32", 4),
    ):
        config = config_for("selective_state_update_kernel", "sm_90", head_dim=head_dim,
                            state_size=128, state_bytes=4 if state == "fp32" else 2)
        warps, stages = config.pop("num_warps"), config.pop("num_stages")
        pointers = {f"{name}_ptr": f"*{act}" for name in ("x", "dt", "B", "C", "D", "dt_bias", "y")}
        pointers |= {f"{name}_ptr": "*i32" for name in ("query_start_loc", "src_slots", "dst_slots",
                                                        "num_accepted")}
        pointers |= {"A_ptr": "*fp32", "state_ptr": f"*{state}"}
        constexprs = dict(HAS_NUM_ACCEPTED=tokens > 1, MAX_QUERY_LEN=tokens, HEADS=128,
                          HEADS_PER_GROUP=16, HEAD_DIM=head_dim, STATE_SIZE=128, BLOCK_N=128,
                          **config)
        name = f"update P{head_dim} {state} state, {act}, {tokens} tokens"
        cases.append(aot_case(
            selective_state_update_kernel, name, pointers, constexprs,
            num_warps=warps, num_stages=stages, floats=("dt_min", "dt_max"),
            unit_strides=("stride_x_dim", "stride_dt_head", "stride_B_state", "stride_C_state",
                          "stride_state_state"),
        ))
    return cases
