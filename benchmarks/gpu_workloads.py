"""Calls to be timed, one maker per kernel: give it sizes and a device, and it fills the tensors.

Activations are bf16, as served. Sources and destinations are different slots, so that a call can be
repeated and gives the same again. Each call knows the same call of the public libraries
(:mod:`gpu_peers`). Which sizes are timed is in :mod:`gpu_workload_list`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import gpu_peers as peers
import torch
from gpu_bytes import Sizes

import mamba_kernels as kernels
from mamba_kernels import chunk_scan_launch as stages
from mamba_kernels.chunk_scan import FORGETS

ACT = torch.bfloat16
REPLAY_CAPACITY = 16


@dataclass
class Prepared:
    """A workload whose tensors exist.

    Attributes:
        call: launches it.
        written: the tensors that it writes, beside what ``call`` returns.
        reset: makes the next call start from the same numbers as the first, if that is needed.
        peers: name of a public function -> a call of it on the same sizes.
    """

    call: Callable[[], torch.Tensor | None]
    written: list[torch.Tensor] = field(default_factory=list)
    reset: Callable[[], object] = lambda: None
    peers: dict[str, Callable[[], object]] = field(default_factory=dict)

    def results(self) -> list[torch.Tensor]:
        """Reset, call, and copies of all that was written."""
        self.reset()
        y = self.call()
        return [t.clone() for t in [*self.written, *([] if y is None else [y])]]


def rand(device: torch.device, *size: int, dtype: torch.dtype = ACT) -> torch.Tensor:
    return torch.randn(size, device=device, dtype=dtype)


def slots(device: torch.device, first: int, *size: int) -> torch.Tensor:
    count = math.prod(size)
    return torch.arange(first, first + count, dtype=torch.int32, device=device).view(size)


def starts(device: torch.device, lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0).int()


def mixer(z: Sizes, tokens: int, device: torch.device) -> dict[str, torch.Tensor]:
    """x, B, C as views of the conv's output, dt of the projection's; fp32 parameters."""
    widths = [z.H * z.P, z.G * z.N, z.G * z.N]
    x, B, C = rand(device, tokens, sum(widths)).split(widths, dim=1)
    return {
        "x": x.unflatten(1, (z.H, z.P)), "dt": rand(device, tokens, z.H) - 2,
        "A": -torch.rand(z.H, device=device) * 8, "B": B.unflatten(1, (z.G, z.N)),
        "C": C.unflatten(1, (z.G, z.N)), "D": rand(device, z.H, dtype=torch.float32),
        "dt_bias": rand(device, z.H, dtype=torch.float32),
    }  # fmt: skip


def state_update(z: Sizes, R: int, T: int, state: torch.dtype) -> Callable[..., Prepared]:
    def make(device: torch.device) -> Prepared:
        t = mixer(z, R * T, device)
        pool = rand(device, 1 + R * (1 + T), z.H, z.P, z.N, dtype=state)
        src = slots(device, 1, R, 1).expand(R, T).contiguous()
        paging = {
            "query_start_loc": starts(device, [T] * R), "src_slots": src,
            "dst_slots": slots(device, 1 + R, R, T),
        }  # fmt: skip
        if T > 1:
            paging["num_accepted_tokens"] = torch.ones(R, dtype=torch.int32, device=device)
        return Prepared(
            lambda: kernels.selective_state_update(**t, ssm_state=pool, **paging), [pool],
            peers=peers.state_update(t, pool, src[:, 0]) if T == 1 else {},
        )  # fmt: skip

    return make


def ring_of(z: Sizes, rows: int, T: int, device: torch.device) -> kernels.ReplayRing:
    """A ring of 16 inputs per row, full of them."""
    length = REPLAY_CAPACITY + T
    fp32 = torch.float32
    return kernels.ReplayRing(
        rand(device, 1 + rows, length, z.H, z.P), rand(device, 1 + rows, length, z.G, z.N),
        torch.rand(1 + rows, length, z.H, device=device, dtype=fp32),
        -torch.rand(1 + rows, length, z.H, device=device, dtype=fp32), REPLAY_CAPACITY,
    )  # fmt: skip


def replay_update(
    z: Sizes, R: int, T: int, pending: int, state: torch.dtype
) -> Callable[..., Prepared]:
    def make(device: torch.device) -> Prepared:
        t, ring = mixer(z, R * T, device), ring_of(z, R, T, device)
        pool = rand(device, 1 + 2 * R, z.H, z.P, z.N, dtype=state)
        paging = {
            "query_start_loc": starts(device, [T] * R), "src_slots": slots(device, 1, R),
            "dst_slots": slots(device, 1 + R, R), "ring_rows": slots(device, 1, R),
            "ring_starts": torch.zeros(R, dtype=torch.int32, device=device),
            "num_pending": torch.full((R,), pending, dtype=torch.int32, device=device),
        }  # fmt: skip
        written = [pool, ring.x, ring.B, ring.dt, ring.log_decay]
        return Prepared(
            lambda: kernels.replay_state_update(**t, ssm_state=pool, ring=ring, **paging), written
        )

    return make


def materialize(
    z: Sizes, rows: int, layers: int, inputs: int, state: torch.dtype
) -> Callable[..., Prepared]:
    def make(device: torch.device) -> Prepared:
        pools = [rand(device, 1 + 2 * rows, z.H, z.P, z.N, dtype=state) for _ in range(layers)]
        pairs = [(pool, ring_of(z, rows, 4, device)) for pool in pools]
        paging = {
            "src_slots": slots(device, 1, rows), "dst_slots": slots(device, 1 + rows, rows, 1),
            "ring_rows": slots(device, 1, rows),
            "ring_starts": torch.zeros(rows, dtype=torch.int32, device=device),
            "num_inputs": torch.full((rows, 1), inputs, dtype=torch.int32, device=device),
        }  # fmt: skip
        return Prepared(lambda: kernels.materialize_states(pairs, **paging), pools)

    return make


def conv_update(z: Sizes, R: int, T: int) -> Callable[..., Prepared]:
    def make(device: torch.device) -> Prepared:
        x, weight, bias = rand(device, R * T, z.C), rand(device, z.C, z.W), rand(device, z.C)
        pool = rand(device, 1 + 2 * R, z.W - 2 + T, z.C)
        src = slots(device, 1, R)
        paging = {"query_start_loc": starts(device, [T] * R), "src_slots": src,
                  "dst_slots": slots(device, 1 + R, R)}  # fmt: skip
        if T > 1:
            paging["num_accepted_tokens"] = torch.ones(R, dtype=torch.int32, device=device)
        return Prepared(
            lambda: kernels.causal_conv1d_update(x, weight, bias, pool, **paging), [pool],
            peers=peers.conv_update(x, weight, bias, pool, src),
        )  # fmt: skip

    return make


def conv_prefill(z: Sizes, lengths: list[int]) -> Callable[..., Prepared]:
    def make(device: torch.device) -> Prepared:
        x, weight, bias = rand(device, sum(lengths), z.C), rand(device, z.C, z.W), rand(device, z.C)
        R = len(lengths)
        pool = rand(device, 1 + 2 * R, z.W - 1, z.C)
        paging = {
            "query_start_loc": starts(device, lengths), "src_slots": slots(device, 1, R),
            "dst_slots": slots(device, 1 + R, R),
            "has_initial_state": torch.ones(R, dtype=torch.bool, device=device),
        }  # fmt: skip
        return Prepared(
            lambda: kernels.causal_conv1d_fn(x, weight, bias, pool, **paging), [pool],
            peers=peers.conv_prefill(x, weight, bias, pool[1 : 1 + R]),
        )  # fmt: skip

    return make


def gated_norm(z: Sizes, tokens: int) -> Callable[..., Prepared]:
    def make(device: torch.device) -> Prepared:
        inner = z.H * z.P
        x, gate = rand(device, tokens, inner), rand(device, tokens, inner)
        weight = rand(device, inner)
        size = inner // z.G
        return Prepared(
            lambda: kernels.rms_norm_gated(x, gate, weight, eps=1e-5, group_size=size),
            peers=peers.gated_norm(x, gate, weight, 1e-5, size),
        )

    return make


def copy_states(z: Sizes, triples: int, layers: int, state: torch.dtype) -> Callable[..., Prepared]:
    def make(device: torch.device) -> Prepared:
        pairs = [
            (rand(device, 1 + 2 * triples, z.W - 1, z.C),
             rand(device, 1 + 2 * triples, z.H, z.P, z.N, dtype=state))
            for _ in range(layers)
        ]  # fmt: skip
        src, dst = slots(device, 1, triples), slots(device, 1 + triples, triples)
        written = [tensor for pair in pairs for tensor in pair]
        return Prepared(lambda: kernels.copy_states(pairs, src, dst, src * 0), written)

    return make


def scan(
    z: Sizes, lengths: list[int], chunk_size: int, state: torch.dtype, stage: str = ""
) -> Callable[..., Prepared]:
    """``mamba_chunk_scan`` with its fused kernel or with its three, or one of the three by itself.

    Args:
        stage: the kernel; nothing is the three together.
    """

    def make(device: torch.device) -> Prepared:
        R, t = len(lengths), mixer(z, sum(lengths), device)
        pool = rand(device, 1 + 2 * R, z.H, z.P, z.N, dtype=state)
        src, dst = slots(device, 1, R), slots(device, 1 + R, R)
        initial = torch.ones(R, dtype=torch.bool, device=device)
        computed = torch.zeros(R, dtype=torch.int32)
        loc = torch.tensor([0, *lengths]).cumsum(0).int()
        layout = kernels.build_chunk_layout(loc, computed, chunk_size).to(device)
        if stage in ("", "fused_scan_kernel"):
            loc, computed = loc.to(device), computed.to(device)

            def whole() -> torch.Tensor:
                with stages.override_form("fused" if stage else "chunks"):
                    return kernels.mamba_chunk_scan(
                        **t, ssm_state=pool, query_start_loc=loc, num_computed_tokens=computed,
                        chunk_size=chunk_size, src_slots=src, dst_slots=dst,
                        has_initial_state=initial, layout=layout,
                    )  # fmt: skip

            return Prepared(
                whole, [pool],
                peers=peers.scan(t, pool[1 : 1 + R], R, chunk_size) if len(set(lengths)) == 1 else {},
            )  # fmt: skip

        def first() -> stages.Between:
            tensors = (t["x"], t["dt"], t["A"], t["B"], t["dt_bias"])
            return stages.launch_chunk_state(*tensors, layout, (0.0, math.inf), FORGETS)

        between = first()
        if stage == "chunk_state_kernel":
            return Prepared(lambda: first().states)
        fresh = between.states.clone()
        if stage == "pass_states_kernel":
            return Prepared(
                lambda: stages.launch_pass_states(between, pool, layout, src, dst, initial, None),
                [pool, between.states], reset=lambda: between.states.copy_(fresh),
            )  # fmt: skip
        return Prepared(
            lambda: stages.launch_chunk_scan(t["x"], t["B"], t["C"], t["D"], between, layout)
        )

    return make
