"""The SSD scan on a GPU in one launch: each program walks through a sequence with its state.

The three kernels of :mod:`mamba_kernels.chunk_scan_triton` work on all chunks at once and pay for it
in memory: a state per chunk is written, read, overwritten and read again. But a state need not leave
the chip between chunks. Here a program has one head of one sequence, or rather a tile of ``P`` of it
(rows of a state do not depend on each other), keeps that tile of the state in registers, and takes
the tokens in steps of up to ``BLOCK_T``. In each step:

1. step sizes, and their log decays summed since the step began;
2. what the state gives to each token, ``exp(s_i) (C_i . S)``;
3. what the tokens give to each other, ``exp(s_i - s_j) dt_j (C_i . B_j) x_j`` up to the diagonal;
4. ``D x``, and ``y`` is stored;
5. the state is moved to the step's end.

The state is read from its cache slot before the first step and written to its slots when it has them:
behind a chunk at whose end a checkpoint lies, and at the end. Every token's x, dt, B, C and y go
through memory once. B and C belong to a whole group: each of its heads' programs reads them, but they
run side by side through the same tokens, so memory is asked once and the L2 cache the other times.

Steps begin anew at each chunk of the layout, so they lie on the sequence's absolute grid (a prompt in
pieces is computed like the same prompt in one go) and end at every checkpoint. The length of a chunk
costs next to nothing here: one of 128 tokens is two steps of 64, and one of 256 is four.

The price is parallelism. A long sequence is one chain of steps, and there are only as many chains as
sequences x heads x tiles: :func:`mamba_kernels.chunk_scan_launch.choose_form` asks for enough of them.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from mamba_kernels.backend import jit, tl
from mamba_kernels.chunk_scan_triton import decay
from mamba_kernels.device_math import step_size

# fmt: off


# The state is held transposed, (N, P): Hopper's tensor cores want 64 output rows, and a tile of P is
# narrower. So the state is only ever a right operand or an accumulator.
#
# Slots and flags must not make variants: see pass_states_kernel.
@jit(do_not_specialize=["src_slots_ptr", "dst_slots_ptr", "has_initial_state_ptr",
                        "checkpoints_ptr"])
def fused_scan_kernel(
    x_ptr, raw_dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, dt_bias_ptr, pool_ptr, y_ptr,
    src_slots_ptr, dst_slots_ptr, has_initial_state_ptr, checkpoints_ptr,
    cu_seq_chunks_ptr, cu_chunk_seqlens_ptr, checkpoint_order_ptr, cu_checkpoints_ptr,
    dt_min, dt_max, least_step,
    stride_x_token, stride_x_head, stride_x_dim, stride_dt_token, stride_dt_head,
    stride_B_token, stride_B_group, stride_B_state, stride_C_token, stride_C_group, stride_C_state,
    stride_pool_slot, stride_pool_head, stride_pool_dim, stride_pool_state,
    HEADS: tl.constexpr, HEADS_PER_GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    STATE_SIZE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
    DOT_DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):
    tile, head, seq = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_chunk = tl.load(cu_seq_chunks_ptr + seq).to(tl.int64)
    end_chunk = tl.load(cu_seq_chunks_ptr + seq + 1).to(tl.int64)
    if first_chunk >= end_chunk:
        return  # a sequence without tokens touches nothing
    p = tile * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    p_mask, n_mask = p < HEAD_DIM, n < STATE_SIZE
    state_mask = n_mask[:, None] & p_mask[None, :]
    group = head // HEADS_PER_GROUP
    x_ptr += head * stride_x_head + p[None, :] * stride_x_dim
    raw_dt_ptr += head * stride_dt_head
    B_ptr += group * stride_B_group + n[None, :] * stride_B_state
    C_ptr += group * stride_C_group + n[None, :] * stride_C_state
    y_ptr += head * HEAD_DIM + p[None, :]
    pool_ptr += (head * stride_pool_head + n[:, None] * stride_pool_state
                 + p[None, :] * stride_pool_dim)
    A = tl.load(A_ptr + head).to(tl.float32)
    D = tl.load(D_ptr + head).to(tl.float32)
    dt_bias = tl.load(dt_bias_ptr + head).to(tl.float32)

    src = tl.load(src_slots_ptr + seq).to(tl.int64)
    state = tl.zeros([BLOCK_N, BLOCK_P], tl.float32)
    if (tl.load(has_initial_state_ptr + seq).to(tl.int32) != 0) & (src > 0):
        state = tl.load(pool_ptr + src * stride_pool_slot, mask=state_mask, other=0.0).to(tl.float32)
    tl.debug_barrier()  # a destination may be the source: all have read before any writes

    row = tl.arange(0, BLOCK_T)
    for chunk in range(first_chunk, end_chunk):
        # 64 bits for the chunk's place; inside a chunk 32 are enough (chunk_scan_launch checks).
        start = tl.load(cu_chunk_seqlens_ptr + chunk).to(tl.int64)
        length = (tl.load(cu_chunk_seqlens_ptr + chunk + 1) - start).to(tl.int32)
        x_at, y_at = x_ptr + start * stride_x_token, y_ptr + start * (HEADS * HEAD_DIM)
        B_at, C_at = B_ptr + start * stride_B_token, C_ptr + start * stride_C_token
        raw_dt_at = raw_dt_ptr + start * stride_dt_token
        for first in range(0, length, BLOCK_T):
            t = first + row
            valid = t < length
            x_mask, BC_mask = valid[:, None] & p_mask[None, :], valid[:, None] & n_mask[None, :]
            raw = tl.load(raw_dt_at + t * stride_dt_token, mask=valid, other=0.0).to(tl.float32)
            C = tl.load(C_at + t[:, None] * stride_C_token, mask=BC_mask,
                        other=0.0).to(tl.float32).to(DOT_DTYPE)  # (T, N)
            B = tl.load(B_at + t[:, None] * stride_B_token, mask=BC_mask,
                        other=0.0).to(tl.float32).to(DOT_DTYPE)  # (T, N)
            x = tl.load(x_at + t[:, None] * stride_x_token, mask=x_mask,
                        other=0.0).to(tl.float32)  # (T, P)

            # Exponents since the step began, in two fp32 numbers; chunk_scan.py says why.
            dt = tl.where(valid, step_size(raw, dt_bias, dt_min, dt_max), 0.0)
            step = tl.maximum(dt * A, least_step).to(tl.float64)
            cum = tl.cumsum(step, 0)
            total = tl.sum(step, 0)
            hi = cum.to(tl.float32)
            lo = (cum - hi.to(tl.float64)).to(tl.float32)

            # "scores * 0": what begins with a product's result is laid out over the threads like it.
            # Else the decays are computed in another layout and moved through shared memory, and the
            # registers for that are not there.
            scores = tl.dot(C, tl.trans(B), input_precision=PRECISION)  # (T, T)
            exponent = ((scores * 0.0 + hi[:, None]) - hi[None, :]) + (lo[:, None] - lo[None, :])
            scores = tl.where(row[:, None] >= row[None, :], scores * decay(exponent), 0.0)
            scores = scores.to(DOT_DTYPE)

            y = tl.dot(C, state.to(DOT_DTYPE), input_precision=PRECISION) * decay(hi + lo)[:, None]
            dt_x = x * dt[:, None]
            y = tl.dot(scores, dt_x.to(DOT_DTYPE), acc=y, input_precision=PRECISION)
            tl.store(y_at + t[:, None] * (HEADS * HEAD_DIM),
                     (y + D * x).to(y_ptr.dtype.element_ty), mask=x_mask)

            weight = decay((total - cum).to(tl.float32))
            weighted_x = (dt_x * weight[:, None]).to(DOT_DTYPE)
            state = tl.dot(tl.trans(B), weighted_x, acc=state * decay(total.to(tl.float32)),
                           input_precision=PRECISION)

        kept_from = tl.load(cu_checkpoints_ptr + chunk)
        for k in range(kept_from, tl.load(cu_checkpoints_ptr + chunk + 1)):
            checkpoint = tl.load(checkpoint_order_ptr + k)
            slot = tl.load(checkpoints_ptr + checkpoint * 3 + 2).to(tl.int64)
            if slot > 0:
                tl.store(pool_ptr + slot * stride_pool_slot, state.to(pool_ptr.dtype.element_ty),
                         mask=state_mask)

    dst = tl.load(dst_slots_ptr + seq).to(tl.int64)
    if dst > 0:
        tl.store(pool_ptr + dst * stride_pool_slot, state.to(pool_ptr.dtype.element_ty),
                 mask=state_mask)
