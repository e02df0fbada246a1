"""Cases of decode and verify steps, of the norm, and of moving states between slots.

In one step: rows of every length from 0 (padding) to 1+k, counts of accepted tokens that choose the
source on the device, null sources (the row is skipped and returns zeros), null destinations, rows
that work in place, slots in a shuffled order, and tokens behind the last row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from gpu_case_shapes import Shape, Slots, mixer_inputs, offsets, randn
from gpu_cases import EXACT, FP32, ROUNDED, Case, Expected, Inputs
from support import kernel_reference as reference
from support.kernel_reference import Pool, f64

import mamba_kernels as kernels


def update_case(shape: Shape, lengths: Sequence[int], k: int, seed: int = 0) -> Case:
    """``selective_state_update``; a state is kept after each token."""
    g = torch.Generator().manual_seed(seed)
    rows, width, in_place = len(lengths), 1 + k, bool(seed % 2)
    inputs = mixer_inputs(shape, sum(lengths) + 2, g)
    slots = Slots(2 * rows * width, g)
    src = slots.take(rows, width)
    dst = src.clone() if in_place else slots.take(rows, width)
    accepted = torch.randint(1, width + 1, (rows,), generator=g, dtype=torch.int32)
    if rows > 2:
        src[1], dst[1], dst[2] = 0, 0, 0  # a skipped row; a row that keeps nothing
        dst[0, -1] = -1
    sources = [int(src[row, a - 1]) for row, a in enumerate(accepted.tolist())]
    size = (shape.heads, shape.head_dim, shape.state_size)
    pool = Pool(slots.total, size, math.nan if seed % 3 else 1e4, shape.gap, shape.state)
    pool.own([s for s in sources if s > 0], g)
    paging = {"query_start_loc": offsets(lengths), "src_slots": src, "dst_slots": dst}
    if k:
        paging["num_accepted_tokens"] = accepted

    def call(t: Inputs, states: list[torch.Tensor], backend: str | None) -> torch.Tensor:
        return kernels.selective_state_update(**t, ssm_state=states[0], backend=backend)

    def expect() -> Expected:
        n = {name: f64(tensor) for name, tensor in inputs.items()}
        y, kept, start = np.zeros(n["x"].shape), {}, 0
        for row, length in enumerate(lengths):
            t = slice(start, start := start + length)
            if sources[row] <= 0:
                continue
            y[t], states = reference.ssm(
                f64(pool.before(sources[row])), n["x"][t], n["dt"][t], n["A"], n["B"][t], n["C"][t],
                n["D"], n["dt_bias"], (0.0, math.inf),
            )  # fmt: skip
            kept |= {(0, int(s)): state for s, state in zip(dst[row], states) if s > 0}
        return Expected(y, kept)

    tolerance = (shape.computed, FP32 if shape.state == torch.float32 else ROUNDED)
    name = f"update {shape}, {rows} rows of up to {width}"
    return Case(name, call, inputs | paging, [pool], expect, tolerance)


def conv_update_case(
    shape: Shape, lengths: Sequence[int], k: int, width: int = 4, seed: int = 0
) -> Case:
    """``causal_conv1d_update``; the history begins at the accepted offset."""
    g = torch.Generator().manual_seed(seed)
    rows, C, in_place = len(lengths), shape.channels, bool(seed % 2)
    projection = randn(g, sum(lengths) + 2, C + 2 * shape.gap).to(shape.act)
    inputs = {
        "x": projection[:, shape.gap : shape.gap + C],
        "weight": randn(g, C, width).to(shape.act),
    }
    if seed % 4 < 3:
        inputs["bias"] = randn(g, C).to(shape.act)
    slots = Slots(2 * rows, g)
    src = slots.take(rows)
    dst = src.clone() if in_place else slots.take(rows)
    if rows > 2:
        src[1], dst[1], dst[2] = 0, 0, -1
    accepted = torch.randint(1, k + 2, (rows,), generator=g, dtype=torch.int32)
    pool = Pool(
        slots.total, (width - 1 + k, C), math.nan if seed % 3 else 1e4, shape.gap, shape.act
    )
    pool.own([s for s in src.tolist() if s > 0], g)
    paging = {"query_start_loc": offsets(lengths), "src_slots": src, "dst_slots": dst}
    if k:
        paging["num_accepted_tokens"] = accepted

    def call(t: Inputs, states: list[torch.Tensor], backend: str | None) -> torch.Tensor:
        arguments = {"bias": None} | t
        return kernels.causal_conv1d_update(**arguments, conv_state=states[0], backend=backend)

    def expect() -> Expected:
        n = {name: f64(tensor) for name, tensor in inputs.items()}
        y, kept, start = np.zeros(n["x"].shape), {}, 0
        for row, length in enumerate(lengths):
            t = slice(start, start := start + length)
            if src[row] <= 0 or length == 0:
                continue
            first = int(accepted[row]) - 1
            history = f64(pool.before(int(src[row])))[first : first + width - 1]
            y[t] = reference.conv(history, n["x"][t], n["weight"], n.get("bias"), "silu")
            if dst[row] > 0:
                kept[0, int(dst[row])] = np.concatenate([history[1:], n["x"][t]])
        return Expected(y, kept)

    name = f"conv update {shape}, width {width}, {rows} rows of up to {1 + k}"
    return Case(name, call, inputs | paging, [pool], expect, (shape.computed, EXACT))


def norm_case(shape: Shape, tokens: int, seed: int = 0) -> Case:
    """``rms_norm_gated``; x and the gate are views of wider buffers."""
    g = torch.Generator().manual_seed(seed)
    inner = shape.heads * shape.head_dim
    inputs = {
        "x": randn(g, tokens, inner + shape.gap).to(shape.act)[:, :inner],
        "gate": randn(g, tokens, 2 * inner + shape.gap).to(shape.act)[:, :inner],
        "weight": randn(g, inner).to(shape.act),
    }
    size, gate_last = inner // shape.groups, bool(seed % 2)

    def call(t: Inputs, states: list[torch.Tensor], backend: str | None) -> torch.Tensor:
        return kernels.rms_norm_gated(
            **t, eps=1e-5, group_size=size, norm_before_gate=gate_last, backend=backend
        )

    def expect() -> Expected:
        x, gate, weight = (f64(inputs[name]) for name in ("x", "gate", "weight"))
        return Expected(reference.gated_norm(x, gate, weight, 1e-5, size, gate_last))

    name = f"norm {shape}, {tokens} tokens, {'norm' if gate_last else 'gate'} first"
    return Case(name, call, inputs, [], expect, (shape.computed, EXACT))


#: *(source, destination, window offset)*: a plain move, a shift in place, moves whose source a later
#: one overwrites, padding of all kinds, and a whole window given up.
TRIPLES = [(2, 1, 0), (4, 4, 2), (0, 3, 1), (5, 2, 4), (6, 5, 1), (-1, 3, 1), (3, 0, 1), (7, 9, 3)]


def copy_case(shape: Shape, layers: int = 3, padding: int = 0, seed: int = 0) -> Case:
    """``copy_states`` over windows of the activation type and states of the state type."""
    g = torch.Generator().manual_seed(seed)
    triples = [(0, 0, 0)] * padding + TRIPLES
    src, dst, offset = torch.tensor(triples, dtype=torch.int32).T.contiguous()
    pools = []
    for _ in range(layers):
        size = (shape.heads, shape.head_dim, shape.state_size)
        pools.append(Pool(11, (5, shape.channels), math.nan, shape.gap, shape.act))
        pools.append(Pool(11, size, math.nan, shape.gap, shape.state))
    for pool in pools:
        pool.own(range(1, 10), g)

    def call(t: Inputs, states: list[torch.Tensor], backend: str | None) -> None:
        pairs = list(zip(states[::2], states[1::2]))
        return kernels.copy_states(pairs, t["src"], t["dst"], t["offset"], backend=backend)

    def expect() -> Expected:
        kept = {}
        for number, pool in enumerate(pools):
            for src, dst, offset in triples:
                if src > 0 and dst > 0:
                    first = 0 if number % 2 else offset
                    kept[number, dst] = f64(pool.before(src)[first:])
        return Expected(None, kept)

    inputs = {"src": src, "dst": dst, "offset": offset}
    name = f"copy {shape}, {layers} layers, {len(triples)} triples"
    return Case(name, call, inputs, pools, expect, (EXACT, EXACT))
