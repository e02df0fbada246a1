"""Cases of the two prefill functions: packed sequences, kept states at random places.

In one call: sequences of all the lengths at which chunks and tiles begin and end, with a state, from
zero, and empty; a null source, a null destination, padding behind the last token; checkpoints at
random places, two at one place, a null one, and one whose slot is the source of its own sequence:
that block is overwritten while others still read from it, unless the kernel takes care.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from gpu_case_shapes import Shape, Slots, mixer_inputs, offsets, randn
from gpu_cases import EXACT, FP32, PRODUCTS, ROUNDED, Case, Expected, Inputs
from support import kernel_reference as reference
from support.kernel_reference import Pool, f64

import mamba_kernels as kernels
from mamba_kernels.chunk_scan_launch import FORMS, override_form


@dataclass
class Packed:
    """Prefill: sequences, their slots, and checkpoints, one of them on its row's own source."""

    query_start_loc: torch.Tensor
    src_slots: torch.Tensor
    dst_slots: torch.Tensor
    has_initial_state: torch.Tensor
    checkpoints: torch.Tensor
    slots: int

    def owned(self) -> list[int]:
        pairs = zip(self.src_slots.tolist(), self.has_initial_state.tolist())
        return [slot for slot, continues in pairs if continues and slot > 0]

    def rows(self) -> list[tuple[slice, int, list[tuple[int, int]]]]:
        """Tokens, source (0: from zero) and ``(end, slot)`` of what is kept, of every sequence."""
        starts = self.query_start_loc.tolist()
        result = []
        for row, (start, end) in enumerate(pairwise(starts)):
            src = int(self.src_slots[row]) if self.has_initial_state[row] else 0
            kept = [(e, slot) for seq, e, slot in self.checkpoints.tolist() if seq == row]
            kept.append((end - start, int(self.dst_slots[row])))
            result.append((slice(start, end), src, [(e, s) for e, s in kept if s > 0 and e > 0]))
        return result


def pack(lengths: Sequence[int], in_place: bool, g: torch.Generator) -> Packed:
    rows, wanted = len(lengths), 5
    slots = Slots(2 * rows + wanted, g)
    src = slots.take(rows)
    dst = src.clone() if in_place else slots.take(rows)
    continues = torch.rand(rows, generator=g) < 0.7
    if rows > 2:
        src[1], dst[rows // 2] = 0, 0  # starts from zero; keeps nothing
    places = [(row, end) for row, q in enumerate(lengths) for end in range(1, q + 1)]
    picked = [places[i] for i in torch.randperm(len(places), generator=g)[:wanted].tolist()]
    kept = [[row, end, int(slots.take(1))] for row, end in picked]
    if len(kept) > 2:
        kept[0][:2] = kept[1][:2]  # one place for two caches
        kept[2][2] = 0  # and one for nobody
    # A boundary block may be the block that the sequence started from ("all", in a block's middle).
    longest = max(range(rows), key=lambda row: lengths[row])
    if lengths[longest] > 4 and not in_place:
        continues[longest] = True
        kept.append([longest, lengths[longest] // 2, int(src[longest])])
    triples = torch.tensor(kept, dtype=torch.int32).reshape(-1, 3)
    return Packed(offsets(lengths), src, dst, continues, triples, slots.total)


def scan_case(
    shape: Shape, lengths: Sequence[int], chunk_size: int, seed: int = 0, violent: bool = False
) -> Case:
    """``mamba_chunk_scan`` in both of its forms, each with a pool of its own.

    Args:
        violent: most tokens forget everything, some nearly nothing.
    """
    g = torch.Generator().manual_seed(seed)
    p, padding = pack(lengths, bool(seed % 2), g), 3
    inputs = mixer_inputs(shape, sum(lengths) + padding, g)
    if violent:
        u = torch.rand(inputs["dt"].shape, generator=g, dtype=torch.float64)
        inputs["dt"], inputs["A"] = torch.log(torch.expm1(u**8)).to(shape.act), inputs["A"] * 1e9
        inputs["dt_bias"] = torch.zeros_like(inputs["dt_bias"])
    computed = torch.randint(0, 3 * chunk_size, (len(lengths),), generator=g)
    computed = torch.where(p.has_initial_state, computed, 0).int()
    size = (shape.heads, shape.head_dim, shape.state_size)
    pools, numbers = [], g.get_state()
    for _ in FORMS:
        pools.append(Pool(p.slots, size, math.nan if seed % 3 else 1e4, shape.gap, shape.state))
        pools[-1].own(p.owned(), g.set_state(numbers))
    layout = kernels.build_chunk_layout(p.query_start_loc, computed, chunk_size, p.checkpoints)
    paging = {
        "query_start_loc": p.query_start_loc, "num_computed_tokens": computed,
        "src_slots": p.src_slots, "dst_slots": p.dst_slots, "checkpoints": p.checkpoints,
        "has_initial_state": p.has_initial_state,
    }  # fmt: skip

    def call(t: Inputs, states: list[torch.Tensor], backend: str | None) -> torch.Tensor:
        outputs, on_device = [], layout.to(t["x"].device)
        for form, state in zip(FORMS, states):
            with override_form(form):
                outputs.append(kernels.mamba_chunk_scan(
                    **t, ssm_state=state, chunk_size=chunk_size, layout=on_device, backend=backend
                ))  # fmt: skip
        return torch.stack(outputs)

    def expect() -> Expected:
        n = {name: f64(tensor) for name, tensor in inputs.items()}
        y, kept = np.zeros(n["x"].shape), {}
        for t, src, marks in p.rows():
            initial = f64(pools[0].before(src)) if src > 0 else np.zeros(size)
            y[t], states = reference.ssm(
                initial, n["x"][t], n["dt"][t], n["A"], n["B"][t], n["C"][t], n["D"], n["dt_bias"],
                (0.0, math.inf),
            )  # fmt: skip
            kept |= {(f, slot): states[end - 1] for end, slot in marks for f in range(len(FORMS))}
        return Expected(np.stack([y] * len(FORMS)), kept)

    tolerance = (FP32, FP32) if shape.act == torch.float32 else (PRODUCTS, PRODUCTS)
    if shape.state == torch.bfloat16:
        tolerance = (tolerance[0], max(tolerance[1], ROUNDED))
    name = f"scan {shape}, chunks of {chunk_size}, {len(lengths)} sequences"
    return Case(name + ", violent" * violent, call, inputs | paging, pools, expect, tolerance)


def conv_prefill_case(
    shape: Shape, lengths: Sequence[int], width: int = 4, seed: int = 0, k: int = 0
) -> Case:
    """``causal_conv1d_fn`` on windows with room for ``k`` drafts."""
    g = torch.Generator().manual_seed(seed)
    p, C = pack(lengths, bool(seed % 2), g), shape.channels
    projection = randn(g, sum(lengths) + 3, C + 2 * shape.gap).to(shape.act)
    inputs = {
        "x": projection[:, shape.gap : shape.gap + C],
        "weight": randn(g, C, width).to(shape.act),
    }
    if seed % 4 < 3:
        inputs["bias"] = randn(g, C).to(shape.act)
    pool = Pool(p.slots, (width - 1 + k, C), math.nan if seed % 3 else 1e4, shape.gap, shape.act)
    pool.own(p.owned(), g)
    paging = {
        "query_start_loc": p.query_start_loc, "src_slots": p.src_slots, "dst_slots": p.dst_slots,
        "has_initial_state": p.has_initial_state, "checkpoints": p.checkpoints,
    }  # fmt: skip

    def call(t: Inputs, states: list[torch.Tensor], backend: str | None) -> torch.Tensor:
        return kernels.causal_conv1d_fn(
            **({"bias": None} | t), conv_state=states[0], backend=backend
        )

    def expect() -> Expected:
        n = {name: f64(tensor) for name, tensor in inputs.items()}
        y, kept = np.zeros(n["x"].shape), {}
        for t, src, marks in p.rows():
            history = f64(pool.before(src))[: width - 1] if src > 0 else np.zeros((width - 1, C))
            y[t] = reference.conv(history, n["x"][t], n["weight"], n.get("bias"), "silu")
            seen = np.concatenate([history, n["x"][t]])
            kept |= {(0, slot): seen[end : end + width - 1] for end, slot in marks}
        return Expected(y, kept)

    name = f"conv prefill {shape}, width {width}, {len(lengths)} sequences"
    return Case(name, call, inputs | paging, [pool], expect, (shape.computed, EXACT))
