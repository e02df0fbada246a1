"""The Triton kernels of :mod:`mamba_kernels.replay`, which has the contracts.

A program owns ``BLOCK_P`` rows of one head's state. It reads them once, adds all pending inputs in one
small matrix product (inputs padded to 16, the least that a product takes), and goes on from there token
by token, like the kernel that writes states. What it saves are the writes: of ``1 + k`` states a step
only every so many steps one remains.

Precision: a product of fp32 numbers on tensor cores is by default one of tf32, with 10 bits of mantissa;
a state would be wrong in its fourth digit after every flush. ``tf32x3`` (three of them) or ``ieee`` is
asked for.

Writes to the ring never meet reads of another program: ``x`` belongs to the program's own tile, and of
B and the step sizes the entries written lie behind all pending ones (see the ring's length).
"""
# mypy: disable-error-code="no-untyped-def"
# fmt: off  (long argument lists are grouped by meaning)

from __future__ import annotations

from typing import Any

import torch

from mamba_kernels.backend import jit, tl
from mamba_kernels.device_math import step_size
from mamba_kernels.launch import AotCase, address_table, aot_case, cdiv, launch, next_power_of_2
from mamba_kernels.tuning import config_for, current_arch, dot_precision

MIN_INPUTS = 16  # of a matrix product


@jit
def add_inputs(
    state, ring_x_ptr, ring_B_ptr, ring_dt_ptr, ring_decay_ptr, ring_row, start, first, stop,
    head, group, p, n, p_mask, n_mask,
    LENGTH: tl.constexpr, HEADS: tl.constexpr, GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr,
    STATE_SIZE: tl.constexpr, BLOCK_J: tl.constexpr, PRECISION: tl.constexpr,
):
    """``state (P, N)`` after inputs ``first .. stop - 1`` of a ring row, counted from its oldest."""
    j = tl.arange(0, BLOCK_J)
    used = (j >= first) & (j < stop)
    entry = ring_row * LENGTH + (start + j) % LENGTH
    dt = tl.load(ring_dt_ptr + entry * HEADS + head, mask=used, other=0.0)
    log_decay = tl.load(ring_decay_ptr + entry * HEADS + head, mask=used, other=0.0)
    total = tl.sum(log_decay, axis=0)
    weight = tl.exp(total - tl.cumsum(log_decay, axis=0)) * dt  # 0 where unused
    x = tl.load(ring_x_ptr + (entry[None, :] * HEADS + head) * HEAD_DIM + p[:, None],
                mask=used[None, :] & p_mask[:, None], other=0.0).to(tl.float32)
    B = tl.load(ring_B_ptr + (entry[:, None] * GROUPS + group) * STATE_SIZE + n[None, :],
                mask=used[:, None] & n_mask[None, :], other=0.0).to(tl.float32)
    return tl.dot(x * weight[None, :], B, acc=state * tl.exp(total), input_precision=PRECISION)


@jit(do_not_specialize=["num_rows", "num_tokens", "query_start_loc_ptr", "src_slots_ptr",
                        "dst_slots_ptr", "ring_rows_ptr", "ring_starts_ptr", "num_pending_ptr"])
def replay_state_update_kernel(
    x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, dt_bias_ptr, state_ptr, y_ptr,
    ring_x_ptr, ring_B_ptr, ring_dt_ptr, ring_decay_ptr,
    query_start_loc_ptr, src_slots_ptr, dst_slots_ptr, ring_rows_ptr, ring_starts_ptr, num_pending_ptr,
    num_rows, num_tokens, dt_min, dt_max,
    stride_x_token, stride_x_head, stride_x_dim, stride_dt_token, stride_dt_head,
    stride_B_token, stride_B_group, stride_B_state, stride_C_token, stride_C_group, stride_C_state,
    stride_state_slot, stride_state_head, stride_state_dim, stride_state_state,
    CAPACITY: tl.constexpr, LENGTH: tl.constexpr, HEADS: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, STATE_SIZE: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_J: tl.constexpr,
):
    tile, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    GROUPS: tl.constexpr = HEADS // HEADS_PER_GROUP
    p = tile * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    p_mask, n_mask = p < HEAD_DIM, n < STATE_SIZE
    tile_mask = p_mask[:, None] & n_mask[None, :]
    group = head // HEADS_PER_GROUP

    # 64 bits before any multiplication, as everywhere.
    start = tl.load(query_start_loc_ptr + row).to(tl.int64)
    end = tl.load(query_start_loc_ptr + row + 1).to(tl.int64)
    src = tl.load(src_slots_ptr + row).to(tl.int64)
    ring_row = tl.load(ring_rows_ptr + row).to(tl.int64)
    y_offset = head * HEAD_DIM + p
    y_stride_token = HEADS * HEAD_DIM
    tile_offset = (head * stride_state_head + p[:, None] * stride_state_dim
                   + n[None, :] * stride_state_state)

    if (src > 0) & (ring_row > 0) & (end > start):
        oldest = tl.load(ring_starts_ptr + row)
        pending = tl.load(num_pending_ptr + row)
        state = tl.load(state_ptr + src * stride_state_slot + tile_offset,
                        mask=tile_mask, other=0.0).to(tl.float32)
        state = add_inputs(
            state, ring_x_ptr, ring_B_ptr, ring_dt_ptr, ring_decay_ptr, ring_row, oldest, 0, pending,
            head, group, p, n, p_mask, n_mask,
            LENGTH, HEADS, GROUPS, HEAD_DIM, STATE_SIZE, BLOCK_J, PRECISION,
        )
        # The destination may be the source. All warps have read it before any writes it.
        tl.debug_barrier()
        dst = tl.load(dst_slots_ptr + row).to(tl.int64)
        if (pending + (LENGTH - CAPACITY) > CAPACITY) & (dst > 0):
            tl.store(state_ptr + dst * stride_state_slot + tile_offset,
                     state.to(state_ptr.dtype.element_ty), mask=tile_mask)

        A = tl.load(A_ptr + head).to(tl.float32)
        D = tl.load(D_ptr + head).to(tl.float32)
        dt_bias = tl.load(dt_bias_ptr + head).to(tl.float32)
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

            # A step longer than the ring allows would run into the pending inputs.
            fits = i < LENGTH - CAPACITY
            entry = ring_row * LENGTH + (oldest + pending + i) % LENGTH
            tl.store(ring_x_ptr + (entry * HEADS + head) * HEAD_DIM + p,
                     x.to(ring_x_ptr.dtype.element_ty), mask=p_mask & fits)
            if tile == 0:
                tl.store(ring_dt_ptr + entry * HEADS + head, dt, mask=fits)
                tl.store(ring_decay_ptr + entry * HEADS + head, dt * A, mask=fits)
                if head % HEADS_PER_GROUP == 0:
                    tl.store(ring_B_ptr + (entry * GROUPS + group) * STATE_SIZE + n,
                             B.to(ring_B_ptr.dtype.element_ty), mask=n_mask & fits)
    else:
        for i in range(0, end - start):
            tl.store(y_ptr + (start + i) * y_stride_token + y_offset,
                     tl.zeros([BLOCK_P], y_ptr.dtype.element_ty), mask=p_mask)

    # Tokens behind the last row belong to nobody; whoever has the last row clears them.
    if row == num_rows - 1:
        for i in range(0, num_tokens - end):
            tl.store(y_ptr + (end + i) * y_stride_token + y_offset,
                     tl.zeros([BLOCK_P], y_ptr.dtype.element_ty), mask=p_mask)


def replay_state_update_triton(
    x, dt, A, B, C, D, dt_bias, ssm_state, ring, query_start_loc, src_slots, dst_slots, ring_rows,
    ring_starts, num_pending, dt_limit,
) -> torch.Tensor:
    """Launch; arguments as in :func:`mamba_kernels.replay.replay_state_update`."""
    num_tokens, num_heads, head_dim = x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    shape = _shape_constexprs(ring, ssm_state)
    config = _config("replay_state_update_kernel", head_dim, ssm_state)
    launch(
        replay_state_update_kernel,
        (cdiv(head_dim, config["BLOCK_P"]), num_heads, len(src_slots)),
        x, dt, A, B, C, D, dt_bias, ssm_state, y,
        ring.x, ring.B, ring.dt, ring.log_decay,
        query_start_loc, src_slots, dst_slots, ring_rows, ring_starts, num_pending,
        len(src_slots), num_tokens, float(dt_limit[0]), float(dt_limit[1]),
        *x.stride(), *dt.stride(), *B.stride(), *C.stride(), *ssm_state.stride(),
        CAPACITY=ring.capacity, **shape, **config,
    )
    return y


# Tables of addresses as in `copy_states.py`: all layers in one launch. Whatever a row's states are read
# from or written to, one program owns the same tile of all of them, so the source may be among the
# destinations.


@jit(do_not_specialize=["src_slots_ptr", "ring_rows_ptr", "ring_starts_ptr", "num_inputs_ptr",
                        "dst_slots_ptr", "num_states"])
def materialize_states_kernel(
    state_table_ptr, x_table_ptr, B_table_ptr, dt_table_ptr, decay_table_ptr,
    src_slots_ptr, ring_rows_ptr, ring_starts_ptr, num_inputs_ptr, dst_slots_ptr, num_states,
    stride_state_slot, stride_state_head, stride_state_dim, stride_state_state,
    STATE_TYPE: tl.constexpr, INPUT_TYPE: tl.constexpr,
    LENGTH: tl.constexpr, HEADS: tl.constexpr, HEADS_PER_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, STATE_SIZE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_J: tl.constexpr,
):
    tile, layer, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    TILES: tl.constexpr = (HEAD_DIM + BLOCK_P - 1) // BLOCK_P
    GROUPS: tl.constexpr = HEADS // HEADS_PER_GROUP
    head = tile // TILES
    p = tile % TILES * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    p_mask, n_mask = p < HEAD_DIM, n < STATE_SIZE
    tile_mask = p_mask[:, None] & n_mask[None, :]
    src = tl.load(src_slots_ptr + row).to(tl.int64)
    ring_row = tl.load(ring_rows_ptr + row).to(tl.int64)
    if (src > 0) & (ring_row > 0):
        state_ptr = tl.load(state_table_ptr + layer).to(tl.pointer_type(STATE_TYPE))
        x_ptr = tl.load(x_table_ptr + layer).to(tl.pointer_type(INPUT_TYPE))
        B_ptr = tl.load(B_table_ptr + layer).to(tl.pointer_type(INPUT_TYPE))
        dt_ptr = tl.load(dt_table_ptr + layer).to(tl.pointer_type(tl.float32))
        decay_ptr = tl.load(decay_table_ptr + layer).to(tl.pointer_type(tl.float32))
        oldest = tl.load(ring_starts_ptr + row)
        offset = (head * stride_state_head + p[:, None] * stride_state_dim
                  + n[None, :] * stride_state_state)
        state = tl.load(state_ptr + src * stride_state_slot + offset,
                        mask=tile_mask, other=0.0).to(tl.float32)
        tl.debug_barrier()
        done = tl.zeros([], tl.int64)
        for s in range(0, num_states):
            stop = tl.load(num_inputs_ptr + row * num_states + s).to(tl.int64)
            dst = tl.load(dst_slots_ptr + row * num_states + s).to(tl.int64)
            state = add_inputs(
                state, x_ptr, B_ptr, dt_ptr, decay_ptr, ring_row, oldest, done, stop,
                head, head // HEADS_PER_GROUP, p, n, p_mask, n_mask,
                LENGTH, HEADS, GROUPS, HEAD_DIM, STATE_SIZE, BLOCK_J, PRECISION,
            )
            done = tl.maximum(done, stop)
            if dst > 0:
                tl.store(state_ptr + dst * stride_state_slot + offset,
                         state.to(STATE_TYPE), mask=tile_mask)


def materialize_states_triton(
    layers, src_slots, ring_rows, ring_starts, num_inputs, dst_slots
) -> None:
    """Launch; arguments as in :func:`mamba_kernels.replay.materialize_states`."""
    ssm_state, ring = layers[0]
    device = ssm_state.device
    tables = [
        address_table(tuple(tensor.data_ptr() for tensor in tensors), device)
        for tensors in zip(*((state, r.x, r.B, r.dt, r.log_decay) for state, r in layers))
    ]
    num_heads, head_dim = ring.x.shape[2:]
    config = _config("materialize_states_kernel", head_dim, ssm_state)
    tiles = cdiv(head_dim, config["BLOCK_P"])
    launch(
        materialize_states_kernel, (tiles * num_heads, len(layers), len(src_slots)),
        *tables, src_slots, ring_rows, ring_starts, num_inputs.contiguous(), dst_slots.contiguous(),
        dst_slots.shape[1], *ssm_state.stride(),
        STATE_TYPE=_type_of(ssm_state), INPUT_TYPE=_type_of(ring.x),
        **_shape_constexprs(ring, ssm_state), **config,
    )


def _type_of(tensor: torch.Tensor) -> Any:
    return getattr(tl, str(tensor.dtype).removeprefix("torch."))


def _shape_constexprs(ring, ssm_state) -> dict:
    num_heads, head_dim = ring.x.shape[2:]
    groups, state_size = ring.B.shape[2:]
    precision = dot_precision(current_arch())
    return dict(
        LENGTH=ring.length, HEADS=num_heads, HEADS_PER_GROUP=num_heads // groups, HEAD_DIM=head_dim,
        STATE_SIZE=state_size, PRECISION=precision,
        BLOCK_N=max(MIN_INPUTS, next_power_of_2(state_size)),
        BLOCK_J=max(MIN_INPUTS, next_power_of_2(ring.capacity)),
    )


def _config(kernel_name: str, head_dim: int, ssm_state: torch.Tensor) -> dict:
    config = config_for(kernel_name, head_dim=head_dim, state_bytes=ssm_state.element_size())
    config["BLOCK_P"] = max(MIN_INPUTS, min(config["BLOCK_P"], next_power_of_2(head_dim)))
    return config


def aot_cases(arch: str = "sm_90") -> list[AotCase]:
    """Nemotron-H's verify steps with a ring of 16: 128 heads, state 128, 8 groups."""
    cases = []
    for head_dim, state, act in ((64, "fp32", "bf16"), (64, "bf16", "bf16"), (80, "fp32", "bf16"),
                                 (64, "fp32", "fp32")):
        shape = dict(LENGTH=20, HEADS=128, HEADS_PER_GROUP=16, HEAD_DIM=head_dim, STATE_SIZE=128,
                     PRECISION=dot_precision(arch), BLOCK_N=128, BLOCK_J=16)
        small = {"query_start_loc_ptr": "*i32", "src_slots_ptr": "*i32", "dst_slots_ptr": "*i32",
                 "ring_rows_ptr": "*i32", "ring_starts_ptr": "*i32", "num_pending_ptr": "*i32"}
        config = config_for("replay_state_update_kernel", arch, head_dim=head_dim,
                            state_bytes=4 if state == "fp32" else 2)
        warps, stages = config.pop("num_warps"), config.pop("num_stages")
        pointers = {f"{name}_ptr": f"*{act}" for name in ("x", "dt", "B", "C", "D", "dt_bias", "y",
                                                          "ring_x", "ring_B")}
        pointers |= small | {"A_ptr": "*fp32", "state_ptr": f"*{state}", "ring_dt_ptr": "*fp32",
                             "ring_decay_ptr": "*fp32"}
        cases.append(aot_case(
            replay_state_update_kernel, f"replay P{head_dim} {state} state, {act}, 4 tokens", pointers,
            dict(CAPACITY=16, **shape, **config), num_warps=warps, num_stages=stages,
            floats=("dt_min", "dt_max"),
            unit_strides=("stride_x_dim", "stride_dt_head", "stride_B_state", "stride_C_state",
                          "stride_state_state"),
        ))
        if act == "fp32":
            continue
        config = config_for("materialize_states_kernel", arch, head_dim=head_dim,
                            state_bytes=4 if state == "fp32" else 2)
        warps, stages = config.pop("num_warps"), config.pop("num_stages")
        pointers = {f"{name}_table_ptr": "*i64" for name in ("state", "x", "B", "dt", "decay")}
        pointers |= {"src_slots_ptr": "*i32", "ring_rows_ptr": "*i32", "ring_starts_ptr": "*i32",
                     "num_inputs_ptr": "*i32", "dst_slots_ptr": "*i32"}
        types = {"fp32": tl.float32, "bf16": tl.bfloat16}
        cases.append(aot_case(
            materialize_states_kernel, f"materialize P{head_dim} {state} state", pointers,
            dict(STATE_TYPE=types[state], INPUT_TYPE=types[act], **shape, **config),
            num_warps=warps, num_stages=stages, unit_strides=("stride_state_state",),
        ))
    return cases
