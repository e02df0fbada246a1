"""The same calls of the public libraries, where they are installed.

``mamba_ssm`` and ``causal_conv1d`` have the reference kernels of Mamba2. Each function here takes the
tensors of a workload and returns ``{name: call}``; a call imports its library when it is made, so a
missing one is an ImportError then, which the report turns into "not installed". Where their contract
differs (dense batches instead of packed ones, parameters spread over the head dim by strides of 0),
tensors are viewed, not copied, so that the time is the kernel's.

What the public libraries cannot do is not asked of them: several tokens a row with a state kept after
each, and states written into a cache at checkpoints.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

Calls = dict[str, Callable[[], object]]


def call_of(module: str, function: str, *args: Any, **kwargs: Any) -> Calls:
    """``{"library": call}``; the call imports first."""

    def call() -> object:
        return getattr(importlib.import_module(module), function)(*args, **kwargs)

    return {module.partition(".")[0]: call}


def state_update(t: dict[str, torch.Tensor], pool: torch.Tensor, slots: torch.Tensor) -> Calls:
    """One token a row, in place; parameters ``(H,)`` as views ``(H, P)`` and ``(H, P, N)``."""
    heads, head_dim, state_size = pool.shape[1:]
    over_dim = {
        name: t[name][..., None].expand(*t[name].shape, head_dim) for name in ("dt", "D", "dt_bias")
    }
    return call_of(
        "mamba_ssm.ops.triton.selective_state_update", "selective_state_update",
        pool, t["x"], over_dim["dt"], t["A"][:, None, None].expand(heads, head_dim, state_size),
        t["B"], t["C"], D=over_dim["D"], dt_bias=over_dim["dt_bias"], dt_softplus=True,
        state_batch_indices=slots,
    )  # fmt: skip


def conv_update(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, pool: torch.Tensor,
    slots: torch.Tensor,
) -> Calls:  # fmt: skip
    """``x`` and the windows with channels before time, as views."""
    dense = x.unflatten(0, (slots.numel(), -1)).transpose(1, 2)
    return call_of(
        "causal_conv1d", "causal_conv1d_update", dense, pool.transpose(1, 2), weight, bias,
        activation="silu", conv_state_indices=slots,
    )  # fmt: skip


def conv_prefill(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, windows: torch.Tensor
) -> Calls:
    """Sequences of equal length as a dense batch, channels last in memory."""
    dense = x.unflatten(0, (windows.shape[0], -1)).transpose(1, 2)
    return call_of(
        "causal_conv1d", "causal_conv1d_fn", dense, weight, bias,
        initial_states=windows.transpose(1, 2), return_final_states=True, activation="silu",
    )  # fmt: skip


def scan(t: dict[str, torch.Tensor], initial: torch.Tensor, batch: int, chunk_size: int) -> Calls:
    """Sequences of equal length as a dense batch."""
    x, dt, B, C = (t[name].unflatten(0, (batch, -1)) for name in ("x", "dt", "B", "C"))
    return call_of(
        "mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined", x, dt, t["A"], B, C,
        chunk_size, D=t["D"], dt_bias=t["dt_bias"], initial_states=initial, dt_softplus=True,
        return_final_states=True,
    )  # fmt: skip


def gated_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, group_size: int
) -> Calls:
    return call_of(
        "mamba_ssm.ops.triton.layernorm_gated", "rmsnorm_fn", x, weight, None, z=gate, eps=eps,
        group_size=group_size, norm_before_gate=False,
    )  # fmt: skip
