"""The SSD scan on a GPU: three launches, whatever the batch.

=====================  ==============================================  ===========================
kernel                 one program                                     leaves in memory
=====================  ==============================================  ===========================
``chunk_state``        a chunk, a head, a tile of ``P``                dt, exponents, added states
``pass_states``        a sequence, a head, a few rows of the state     states *before* each chunk;
                       through all its chunks                          final and checkpoint states
``chunk_scan``         a tile of a chunk's tokens, a head              y
=====================  ==============================================  ===========================

(The formulas are in :mod:`mamba_kernels.chunk_scan`.) What decides the speed is what goes through
memory between the kernels. Per token: 12 bytes for every head (dt and the exponent's two floats),
little beside the 2 P of x. Per *chunk*: a whole fp32 state, written by the first kernel, read and
overwritten in place by the second, read by the third: four times 4 H P N bytes. At 128 heads of
64 x 128 and chunks of 128 tokens that is 1 GiB for 8192 tokens, more than all else together; so
long chunks are good on a GPU, until the products of Q x Q tiles, which grow with Q, take over.

Two things that other implementations launch kernels for are not stored at all. The scores ``C B^T``
are formed again by each head of a group: it costs tensor-core time (17 GFLOP for those 8192 tokens,
22 us of an H200's peak) and saves a launch, and writing and 16 times reading a matrix of ``T x Q``
per group. And the states that a cache wants to keep are stored by ``pass_states`` where they belong,
while it has them in registers; nobody gathers or scatters states afterwards.

:mod:`mamba_kernels.fused_scan_triton` has none of this traffic, and needs many sequences and heads to
keep a GPU busy. This form has a program per chunk, so it serves where there are few.

How many programs to launch is known on the host from the :class:`ChunkLayout`; which of them have
work, they find out themselves.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from mamba_kernels.backend import jit, tl
from mamba_kernels.device_math import step_size

# fmt: off


@jit
def decay(exponent):
    """exp of what is at most 0 but for rounding: never above 1."""
    return tl.exp(tl.minimum(exponent, 0.0))


@jit
def state_after_tile(state, cum, total, dt, x, B, DOT_DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """``(P, N)`` fp32 state after a tile of tokens, given the one before it.

    cum: ``(t,)`` fp64 exponents since the tile began; total: at its end; dt: ``(t,)``, 0 where there
    is no token; x: ``(P, t)``; B: ``(t, N)``.
    """
    weight = dt * decay((total - cum).to(tl.float32))
    weighted_x = (x * weight[None, :]).to(DOT_DTYPE)
    return tl.dot(weighted_x, B.to(DOT_DTYPE), acc=state * decay(total.to(tl.float32)),
                  input_precision=PRECISION)


@jit(do_not_specialize=["num_tokens"])
def chunk_state_kernel(
    x_ptr, raw_dt_ptr, A_ptr, B_ptr, dt_bias_ptr, dt_ptr, hi_ptr, lo_ptr, states_ptr,
    cu_chunk_seqlens_ptr, num_tokens, dt_min, dt_max, least_step,
    stride_x_token, stride_x_head, stride_x_dim, stride_dt_token, stride_dt_head,
    stride_B_token, stride_B_group, stride_B_state,
    HEADS: tl.constexpr, HEADS_PER_GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    STATE_SIZE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
    DOT_DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):
    tile, head, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(cu_chunk_seqlens_ptr + chunk).to(tl.int64)
    length = (tl.load(cu_chunk_seqlens_ptr + chunk + 1) - start).to(tl.int32)
    p = tile * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    p_mask, n_mask = p < HEAD_DIM, n < STATE_SIZE
    A = tl.load(A_ptr + head).to(tl.float32)
    dt_bias = tl.load(dt_bias_ptr + head).to(tl.float32)

    # 64 bits once, for the chunk's place; inside a chunk 32 are enough (chunk_scan_launch checks).
    # 64 throughout would cost the scan 12 registers a thread, and with them one program in four.
    x_ptr += start * stride_x_token + head * stride_x_head
    B_ptr += start * stride_B_token + (head // HEADS_PER_GROUP) * stride_B_group
    raw_dt_ptr += start * stride_dt_token + head * stride_dt_head
    per_token = head.to(tl.int64) * num_tokens + start

    # A chunk is walked in tiles, with the recurrence that also joins chunks: what came before
    # decays by the tile's total. So a program keeps one state and one tile whatever the length.
    state = tl.zeros([BLOCK_P, BLOCK_N], tl.float32)
    before = tl.zeros([], tl.float64)  # exponent of the tiles before this one
    for first in range(0, length, BLOCK_T):
        t = first + tl.arange(0, BLOCK_T)
        valid = t < length
        raw = tl.load(raw_dt_ptr + t * stride_dt_token, mask=valid, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + t[None, :] * stride_x_token + p[:, None] * stride_x_dim,
                    mask=valid[None, :] & p_mask[:, None], other=0.0).to(tl.float32)
        B = tl.load(B_ptr + t[:, None] * stride_B_token + n[None, :] * stride_B_state,
                    mask=valid[:, None] & n_mask[None, :], other=0.0).to(tl.float32)

        dt = tl.where(valid, step_size(raw, dt_bias, dt_min, dt_max), 0.0)
        step = tl.maximum(dt * A, least_step).to(tl.float64)
        cum = tl.cumsum(step, 0)
        total = tl.sum(step, 0)
        state = state_after_tile(state, cum, total, dt, x, B, DOT_DTYPE, PRECISION)

        if tile == 0:
            exponent = before + cum
            hi = exponent.to(tl.float32)
            lo = (exponent - hi.to(tl.float64)).to(tl.float32)
            tl.store(dt_ptr + per_token + t, dt, mask=valid)
            tl.store(hi_ptr + per_token + t, hi, mask=valid)
            tl.store(lo_ptr + per_token + t, lo, mask=valid)
        before += total

    states_ptr += (chunk.to(tl.int64) * HEADS + head) * (HEAD_DIM * STATE_SIZE)
    tl.store(states_ptr + p[:, None] * STATE_SIZE + n[None, :], state,
             mask=p_mask[:, None] & n_mask[None, :])


@jit
def chunk_decay(hi_ptr, lo_ptr, cu_chunk_seqlens_ptr, chunk):
    """How much of the state before a chunk is left at its end."""
    last = tl.load(cu_chunk_seqlens_ptr + chunk + 1).to(tl.int64) - 1
    return decay(tl.load(hi_ptr + last) + tl.load(lo_ptr + last))


# Nothing is computed here but one multiply-add per element, so a program wants few registers and
# many neighbours: 8 rows of 128 fp32 numbers are 4 KiB, two 16-byte loads a thread. The chain from
# chunk to chunk is long; what keeps the memory busy is that each turn's load is issued a turn ahead.
#
# Slots and flags are slices of the engine's buffers that start anywhere; single numbers are read from
# them. Their alignment must not make variants, which would be compiled in the middle of serving.
@jit(do_not_specialize=["num_tokens", "src_slots_ptr", "dst_slots_ptr", "has_initial_state_ptr",
                        "checkpoints_ptr"])
def pass_states_kernel(
    states_ptr, hi_ptr, lo_ptr, pool_ptr, src_slots_ptr, dst_slots_ptr, has_initial_state_ptr,
    checkpoints_ptr, cu_seq_chunks_ptr, cu_chunk_seqlens_ptr, checkpoint_order_ptr,
    cu_checkpoints_ptr, num_tokens,
    stride_pool_slot, stride_pool_head, stride_pool_dim, stride_pool_state,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, STATE_SIZE: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):
    tile, head, seq = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.load(cu_seq_chunks_ptr + seq).to(tl.int64)
    end = tl.load(cu_seq_chunks_ptr + seq + 1).to(tl.int64)
    if first >= end:
        return  # a sequence without tokens touches nothing
    p = tile * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    mask = (p < HEAD_DIM)[:, None] & (n < STATE_SIZE)[None, :]
    hi_ptr += head.to(tl.int64) * num_tokens
    lo_ptr += head.to(tl.int64) * num_tokens
    CHUNK_STRIDE: tl.constexpr = HEADS * HEAD_DIM * STATE_SIZE
    states_ptr += head * (HEAD_DIM * STATE_SIZE) + p[:, None] * STATE_SIZE + n[None, :]
    pool_ptr += (head * stride_pool_head + p[:, None] * stride_pool_dim
                 + n[None, :] * stride_pool_state)

    src = tl.load(src_slots_ptr + seq).to(tl.int64)
    state = tl.zeros([BLOCK_P, BLOCK_N], tl.float32)
    if (tl.load(has_initial_state_ptr + seq).to(tl.int32) != 0) & (src > 0):
        state = tl.load(pool_ptr + src * stride_pool_slot, mask=mask, other=0.0).to(tl.float32)
    tl.debug_barrier()  # the destination may be the source: all have read before any writes

    added = tl.load(states_ptr + first * CHUNK_STRIDE, mask=mask, other=0.0)
    left = chunk_decay(hi_ptr, lo_ptr, cu_chunk_seqlens_ptr, first)
    for chunk in range(first, end):
        following = tl.minimum(chunk + 1, end - 1)
        next_added = tl.load(states_ptr + following * CHUNK_STRIDE, mask=mask, other=0.0)
        next_left = chunk_decay(hi_ptr, lo_ptr, cu_chunk_seqlens_ptr, following)

        tl.store(states_ptr + chunk * CHUNK_STRIDE, state, mask=mask)  # in place: state before
        state = state * left + added
        kept_from = tl.load(cu_checkpoints_ptr + chunk)
        for k in range(kept_from, tl.load(cu_checkpoints_ptr + chunk + 1)):
            row = tl.load(checkpoint_order_ptr + k)
            slot = tl.load(checkpoints_ptr + row * 3 + 2).to(tl.int64)
            if slot > 0:
                tl.store(pool_ptr + slot * stride_pool_slot, state.to(pool_ptr.dtype.element_ty),
                         mask=mask)
        added, left = next_added, next_left

    dst = tl.load(dst_slots_ptr + seq).to(tl.int64)
    if dst > 0:
        tl.store(pool_ptr + dst * stride_pool_slot, state.to(pool_ptr.dtype.element_ty), mask=mask)


# A tile of 64 x 32 scores is 16 fp32 registers a thread at four warps, the outputs (64 x 64) are 32.
# (With 64 x 64 scores it is 235 registers instead of 128: two programs on an SM instead of four.)
@jit(do_not_specialize=["num_tokens"])
def chunk_scan_kernel(
    x_ptr, B_ptr, C_ptr, D_ptr, dt_ptr, hi_ptr, lo_ptr, states_ptr, y_ptr,
    cu_chunk_seqlens_ptr, num_tokens,
    stride_x_token, stride_x_head, stride_x_dim, stride_B_token, stride_B_group, stride_B_state,
    stride_C_token, stride_C_group, stride_C_state,
    HEADS: tl.constexpr, HEADS_PER_GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    STATE_SIZE: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr, DOT_DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):
    P_TILES: tl.constexpr = (HEAD_DIM + BLOCK_P - 1) // BLOCK_P
    tile, head, chunk = tl.program_id(0) // P_TILES, tl.program_id(1), tl.program_id(2)
    start = tl.load(cu_chunk_seqlens_ptr + chunk).to(tl.int64)
    length = (tl.load(cu_chunk_seqlens_ptr + chunk + 1) - start).to(tl.int32)
    if tile * BLOCK_I >= length:
        return  # the grid is as long as the longest chunk
    i = tile * BLOCK_I + tl.arange(0, BLOCK_I)
    p = tl.program_id(0) % P_TILES * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    i_mask, p_mask, n_mask = i < length, p < HEAD_DIM, n < STATE_SIZE
    group = head // HEADS_PER_GROUP
    x_ptr += start * stride_x_token + head * stride_x_head + p[None, :] * stride_x_dim
    B_ptr += start * stride_B_token + group * stride_B_group + n[:, None] * stride_B_state
    C_ptr += start * stride_C_token + group * stride_C_group + n[None, :] * stride_C_state
    y_ptr += (start * HEADS + head) * HEAD_DIM + p[None, :]
    per_token = head.to(tl.int64) * num_tokens + start
    dt_ptr, hi_ptr, lo_ptr = dt_ptr + per_token, hi_ptr + per_token, lo_ptr + per_token

    C = tl.load(C_ptr + i[:, None] * stride_C_token, mask=i_mask[:, None] & n_mask[None, :],
                other=0.0).to(tl.float32).to(DOT_DTYPE)
    hi_i = tl.load(hi_ptr + i, mask=i_mask, other=0.0)
    lo_i = tl.load(lo_ptr + i, mask=i_mask, other=0.0)

    # What the state before the chunk gives to each token.
    states_ptr += (chunk.to(tl.int64) * HEADS + head) * (HEAD_DIM * STATE_SIZE)
    state = tl.load(states_ptr + p[:, None] * STATE_SIZE + n[None, :],
                    mask=p_mask[:, None] & n_mask[None, :], other=0.0).to(DOT_DTYPE)
    y = tl.dot(C, tl.trans(state), input_precision=PRECISION) * decay(hi_i + lo_i)[:, None]

    # What the chunk's tokens give to each other, up to the diagonal.
    for first in range(0, tl.minimum((tile + 1) * BLOCK_I, length), BLOCK_J):
        j = first + tl.arange(0, BLOCK_J)
        j_mask = j < length
        B = tl.load(B_ptr + j[None, :] * stride_B_token, mask=n_mask[:, None] & j_mask[None, :],
                    other=0.0).to(tl.float32)  # (N, J)
        scores = tl.dot(C, B.to(DOT_DTYPE), input_precision=PRECISION)
        hi_j = tl.load(hi_ptr + j, mask=j_mask, other=0.0)
        lo_j = tl.load(lo_ptr + j, mask=j_mask, other=0.0)
        dt_j = tl.load(dt_ptr + j, mask=j_mask, other=0.0)
        exponent = (hi_i[:, None] - hi_j[None, :]) + (lo_i[:, None] - lo_j[None, :])
        scores = tl.where(i[:, None] >= j[None, :], scores * decay(exponent) * dt_j[None, :], 0.0)
        x = tl.load(x_ptr + j[:, None] * stride_x_token, mask=j_mask[:, None] & p_mask[None, :],
                    other=0.0).to(tl.float32)
        y = tl.dot(scores.to(DOT_DTYPE), x.to(DOT_DTYPE), acc=y, input_precision=PRECISION)

    y_mask = i_mask[:, None] & p_mask[None, :]
    x = tl.load(x_ptr + i[:, None] * stride_x_token, mask=y_mask, other=0.0).to(tl.float32)
    y += tl.load(D_ptr + head).to(tl.float32) * x
    tl.store(y_ptr + i[:, None] * (HEADS * HEAD_DIM), y.to(y_ptr.dtype.element_ty), mask=y_mask)
