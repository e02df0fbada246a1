"""Which calls are timed: every kernel at the sizes of Nemotron-H, with the bytes it must move.

128 heads of 64 or 80, state 128, 8 groups; states in fp32 and bf16. Decode: batches of 1 to 128, 1
token (decode) or 4 (a verify step with three drafts). Prefill: 8192 tokens, one sequence or four. A
workload's tensors are made when its turn comes: a batch of 128 is half a gigabyte of states.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import gpu_bytes as by
import torch
from gpu_bytes import NEMOTRON_H, Sizes
from gpu_workloads import (
    Prepared,
    conv_prefill,
    conv_update,
    copy_states,
    gated_norm,
    materialize,
    replay_update,
    scan,
    state_update,
)

A_BYTES = 2  # of a bf16 activation
BATCHES, TOKENS, STATES = (1, 8, 32, 128), (1, 4), (torch.float32, torch.bfloat16)
PREFILLS = {"1 x 8192": [8192], "4 x 2048": [2048] * 4}
CHUNK_SIZE = 128  # Nemotron-H's own


@dataclass(frozen=True)
class Workload:
    """A call to time.

    Attributes:
        kernel: the Triton kernel (as the tuning table names it), or the function of several.
        name: sizes, for people.
        shape: what the tuning table tells apart for this kernel.
        bytes_moved: at least, by formula.
        make: allocates and fills its tensors.
    """

    kernel: str
    name: str
    shape: dict[str, int]
    bytes_moved: int
    make: Callable[[torch.device], Prepared]


def workloads() -> list[Workload]:
    """All of them, decode first."""
    found = []

    def add(kernel: str, name: str, shape: dict[str, int], moved: int, make: Callable) -> None:
        found.append(Workload(kernel, name, shape, moved, make))

    for label, z in NEMOTRON_H.items():
        conv, ssm = {"conv_dim": z.C}, {"head_dim": z.P, "state_size": z.N}
        for R in BATCHES:
            for T in TOKENS:
                rows = f"{label}, {R} x {T}"
                add("causal_conv1d_update_kernel", rows, conv,
                    by.conv_update(z, R, T, A_BYTES), conv_update(z, R, T))  # fmt: skip
                for state in STATES:
                    s = state.itemsize
                    add("selective_state_update_kernel", f"{rows}, {_short(state)} state",
                        ssm | {"state_bytes": s}, by.state_update(z, R, T, A_BYTES, s),
                        state_update(z, R, T, state))  # fmt: skip
                    add("replay_state_update_kernel", f"{rows}, 8 pending, {_short(state)} state",
                        {"head_dim": z.P, "state_bytes": s},
                        by.replay_update(z, R, T, 8 * R, 0, A_BYTES, s),
                        replay_update(z, R, T, 8, state))  # fmt: skip
                add("rms_norm_gated_kernel", rows, {"wide": 0},
                    by.gated_norm(z, R * T, A_BYTES), gated_norm(z, R * T))  # fmt: skip
        for state in STATES:
            add("copy_states_kernel", f"{label}, 8 triples, 8 layers, {_short(state)} state", {},
                by.copy_states(z, 8, 8, z.W - 1, A_BYTES, state.itemsize),
                copy_states(z, 8, 8, state))  # fmt: skip
            add("materialize_states_kernel", f"{label}, 8 rows, 8 layers, {_short(state)} state",
                {"head_dim": z.P, "state_bytes": state.itemsize},
                by.materialize(z, 8, 8, 8 * 6, 8, A_BYTES, state.itemsize),
                materialize(z, 8, 8, 6, state))  # fmt: skip
        for name, lengths in PREFILLS.items():
            add_prefill(add, z, f"{label}, {name}", lengths)
        tokens = sum(next(iter(PREFILLS.values())))
        add("rms_norm_gated_kernel", f"{label}, {tokens}", {"wide": 0},
            by.gated_norm(z, tokens, A_BYTES), gated_norm(z, tokens))  # fmt: skip
    return found


def add_prefill(add: Callable[..., None], z: Sizes, name: str, lengths: list[int]) -> None:
    L, R = sum(lengths), len(lengths)
    add("causal_conv1d_fn_kernel", name, {"conv_dim": z.C},
        by.conv_prefill(z, L, R, A_BYTES), conv_prefill(z, lengths))  # fmt: skip
    ssm, c = {"head_dim": z.P, "state_size": z.N}, L // CHUNK_SIZE
    fp32 = torch.float32
    for kernel, shape, moved, states in (
        ("chunk_state_kernel", ssm | {"dot_bytes": 2}, by.chunk_state(z, L, c, A_BYTES), [fp32]),
        ("pass_states_kernel", ssm, 0, STATES),
        ("chunk_scan_kernel", ssm | {"dot_bytes": 2}, by.chunk_scan(z, L, c, A_BYTES), [fp32]),
    ):
        for state in states:
            what = f"{name}, {_short(state)} state" if kernel == "pass_states_kernel" else name
            add(kernel, what, shape, moved or by.pass_states(z, R, c, R, state.itemsize),
                scan(z, lengths, CHUNK_SIZE, state, kernel))  # fmt: skip
    for state in STATES:
        add("fused_scan_kernel", f"{name}, {_short(state)} state", ssm | {"dot_bytes": 2},
            by.fused_scan(z, L, R, R, A_BYTES, state.itemsize),
            scan(z, lengths, CHUNK_SIZE, state, "fused_scan_kernel"))  # fmt: skip
    for chunk_size in (CHUNK_SIZE, 256):
        for state in STATES:
            moved = by.whole_scan(z, L, R, L // chunk_size, R, A_BYTES, state.itemsize)
            add("mamba_chunk_scan", f"{name}, chunks of {chunk_size}, {_short(state)} state", {},
                moved, scan(z, lengths, chunk_size, state))  # fmt: skip


def _short(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
