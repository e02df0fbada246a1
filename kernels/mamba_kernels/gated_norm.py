"""Gated RMSNorm: the last thing a Mamba2 mixer does before its output projection.

``y = rmsnorm(x * silu(gate)) * weight``, normalised separately in every group of ``group_size``
channels. Two things go wrong in the wild and both give fluent nonsense: taking the mean over all
channels when the model has several groups, and gating after the norm instead of before it (Mamba2
gates first; ``norm_before_gate=True`` is the other order). Source: Mamba2 paper, section 7.2, and
the grouped form of ``NemotronHForCausalLM`` in transformers.

Reads ``x`` and ``gate`` once, writes ``y`` once; computed in fp32 whatever comes in.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import torch.nn.functional as F

from mamba_kernels.backend import choose_backend, jit, tl
from mamba_kernels.checks import check_tensor
from mamba_kernels.device_math import silu
from mamba_kernels.launch import AotCase, aot_case, cdiv, launch, next_power_of_2
from mamba_kernels.tuning import config_for


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
    check_tensor("x", x, (None, None))
    check_tensor("gate", gate, x.shape, like=x)
    check_tensor("weight", weight, x.shape[-1:], like=x)
    if group_size < 1 or x.shape[-1] % group_size:
        raise ValueError(f"group_size={group_size} must divide d_inner={x.shape[-1]}")
    if choose_backend(x, backend) == "triton":
        return _rms_norm_gated_triton(x, gate, weight, eps, group_size, norm_before_gate)
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


# fmt: off
# ---------------------------------------------------------------------------------------------
# Triton
# ---------------------------------------------------------------------------------------------
# One program per (row, group): it holds the group in registers between the sum of squares and the
# scaling, so memory is touched once. Nemotron-H's groups of 1024 are 8 numbers a thread at 4 warps,
# one 16-byte load each of x and gate in bf16. Groups that are no power of two (1280 at head dim 80)
# leave some lanes masked: they move no bytes. Groups are neighbours in launch order, then rows: the
# order in which they lie in memory, and the weights stay in the cache.


@jit(do_not_specialize=["num_tokens"])
def rms_norm_gated_kernel(
    x_ptr, gate_ptr, weight_ptr, y_ptr, num_tokens, eps, stride_x_token, stride_gate_token,
    D_INNER: tl.constexpr, GROUP_SIZE: tl.constexpr, NORM_BEFORE_GATE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_GROUP: tl.constexpr,
):
    GROUPS: tl.constexpr = D_INNER // GROUP_SIZE
    program = tl.program_id(0)
    group = program % GROUPS
    row = (program // GROUPS * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
    in_group = tl.arange(0, BLOCK_GROUP)
    channel = group * GROUP_SIZE + in_group
    column_mask = in_group < GROUP_SIZE
    mask = (row < num_tokens)[:, None] & column_mask[None, :]

    x = tl.load(x_ptr + row[:, None] * stride_x_token + channel[None, :],
                mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row[:, None] * stride_gate_token + channel[None, :],
                   mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + channel, mask=column_mask, other=0.0).to(tl.float32)
    if not NORM_BEFORE_GATE:
        x = x * silu(gate)
    # Masked lanes hold 0 and add nothing; the mean divides by the real size.
    mean_square = tl.sum(x * x, axis=1) / GROUP_SIZE
    y = x * tl.rsqrt(mean_square + eps)[:, None] * weight[None, :]
    if NORM_BEFORE_GATE:
        y = y * silu(gate)
    tl.store(y_ptr + row[:, None] * D_INNER + channel[None, :], y, mask=mask)


def _rms_norm_gated_triton(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    group_size: int,
    norm_before_gate: bool,
) -> torch.Tensor:
    for name, tensor in (("x", x), ("gate", gate), ("weight", weight)):
        check_tensor(name, tensor, tensor.shape, unit_stride=True)
    num_tokens, d_inner = x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    config = config_for("rms_norm_gated_kernel", wide=int(group_size > 2048))
    launch(
        rms_norm_gated_kernel,
        (cdiv(num_tokens, config["BLOCK_ROWS"]) * (d_inner // group_size),),
        x, gate, weight, y, num_tokens, float(eps), x.stride(0), gate.stride(0),
        D_INNER=d_inner, GROUP_SIZE=group_size, NORM_BEFORE_GATE=norm_before_gate,
        BLOCK_GROUP=next_power_of_2(group_size), **config,
    )
    return y


def aot_cases() -> list[AotCase]:
    """Nemotron-H (8 groups; d_inner 8192 or 10240), and one group of the same widths."""
    cases = []
    for d_inner, groups, act in (
        (8192, 8, "bf16"), (10240, 8, "bf16"), (8192, 8, "fp32"), (8192, 1, "bf16"),
        (10240, 1, "bf16"),
    ):
        group_size = d_inner // groups
        config = config_for("rms_norm_gated_kernel", "sm_90", wide=int(group_size > 2048))
        warps, stages = config.pop("num_warps"), config.pop("num_stages")
        constexprs = dict(D_INNER=d_inner, GROUP_SIZE=group_size, NORM_BEFORE_GATE=False,
                          BLOCK_GROUP=next_power_of_2(group_size)) | config
        cases.append(aot_case(
            rms_norm_gated_kernel, f"norm {groups} groups of {group_size}, {act}",
            {f"{name}_ptr": f"*{act}" for name in ("x", "gate", "weight", "y")}, constexprs,
            floats=("eps",), num_warps=warps, num_stages=stages,
        ))
    return cases
