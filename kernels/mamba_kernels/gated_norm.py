"""Gated RMSNorm: the last thing a Mamba2 mixer does before its output projection.

``y = rmsnorm(x * silu(gate)) * weight``, normalised separately in every group of ``group_size``
channels. Two things go wrong in the wild and both give fluent nonsense: taking the mean over all
channels when the model has several groups, and gating after the norm instead of before it (Mamba2
gates first; ``norm_before_gate=True`` is the other order). Source: Mamba2 paper, section 7.2, and
the grouped form of ``NemotronHForCausalLM`` in transformers.

Reads ``x`` and ``gate`` once, writes ``y`` once; computed in fp32 whatever comes in.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from mamba_kernels.backend import choose_backend


def rms_norm_gated(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    group_size: int,
    norm_before_gate: bool = False,
    backend: str | None = None,
) -> torch.Tensor:
    """Gate, normalise per group, scale. Pure: nothing is written in place.

    Args:
        x: ``(T, d_inner)`` scan output.
        gate: ``(T, d_inner)``; passes through SiLU.
        weight: ``(d_inner,)``.
        eps: added to the mean square.
        group_size: channels that share one mean square; divides ``d_inner``.
        norm_before_gate: normalise first and gate afterwards (not what Mamba2 does).
        backend: force an implementation; None chooses by device.

    Returns:
        ``(T, d_inner)`` in the dtype of ``x``.

    Raises:
        ValueError: ``group_size`` does not divide ``d_inner``, or shapes disagree.
    """
    if x.shape != gate.shape or weight.shape != x.shape[-1:]:
        raise ValueError(
            f"x {tuple(x.shape)}, gate {tuple(gate.shape)} and weight {tuple(weight.shape)}: "
            f"gate must equal x in shape and weight must have x's last dimension"
        )
    if group_size < 1 or x.shape[-1] % group_size:
        raise ValueError(f"group_size={group_size} must divide d_inner={x.shape[-1]}")
    choose_backend(x, backend)
    return _rms_norm_gated_torch(x, gate, weight, eps, group_size, norm_before_gate)


def _rms_norm_gated_torch(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    group_size: int,
    norm_before_gate: bool,
) -> torch.Tensor:
    activated_gate = F.silu(gate.float())
    y = x.float() if norm_before_gate else x.float() * activated_gate
    groups = y.unflatten(-1, (-1, group_size))  # (T, groups, group_size)
    y = F.rms_norm(groups, (group_size,), eps=eps).flatten(-2) * weight.float()
    if norm_before_gate:
        y = y * activated_gate
    return y.to(x.dtype)
