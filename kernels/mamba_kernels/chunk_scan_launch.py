"""Launching the SSD scan: as one kernel or three; grids, block sizes, what lies between the three.

Grids come from host numbers alone (shapes and the :class:`ChunkLayout`), so nothing here waits for
the GPU. Block sizes come from the tuning table by architecture and shape. The three stages are
separate functions, so that a test can hand one of them what the stage before would never produce.

:func:`choose_form` decides between the forms, also by host numbers alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from mamba_kernels.backend import tl
from mamba_kernels.chunk_layout import ChunkLayout
from mamba_kernels.chunk_scan_triton import (
    chunk_scan_kernel,
    chunk_state_kernel,
    pass_states_kernel,
)
from mamba_kernels.fused_scan_triton import fused_scan_kernel
from mamba_kernels.launch import AotCase, aot_case, cdiv, launch, next_power_of_2
from mamba_kernels.tuning import config_for, current_arch, dot_precision, programs_to_fill

# Why the scan's rows in tuning_table.py are what they are.
#
# An M block of 64 rows is what the tensor cores of Hopper (wgmma) want. A product whose left
# operand was just computed in registers must not be in flight when the next round of a pipelined
# loop overwrites them, and Triton has let that happen there: one stage, hence no pipelining, in both
# kernels with products. Several programs on an SM hide each other's loads instead: the scan at head
# dim 64 has 128 registers a thread, so four programs fit. fp32 operands are split for the tensor
# cores and need twice the registers, hence small blocks. Head dim 80 fills 5/8 of a block of 128,
# which is too large for the registers of sm_80 and for the 64 KiB of LDS of gfx942.
#
# The fused kernel's tiles of P are narrow for the sake of their number: with 32, one prompt of 128
# heads of 64 makes 256 programs, two for each SM of an H200. Narrower ones would form the same scores
# still more often. Its steps are 64 tokens for the sake of their number, too: they are a chain.

#: The longest row of C or B, in bytes, that the fused kernel has registers for: 128 numbers in 16
#: bits, 64 in fp32. (With 128 in fp32, split for the tensor cores, it compiles and spills.)
FUSED_ROW_BYTES = 256

FORMS = ("fused", "chunks")
_override: str | None = None


@contextmanager
def override_form(form: str) -> Iterator[None]:
    """``with override_form("chunks"): ...``: for tests and measurements, which want to see both."""
    global _override
    if form not in FORMS:
        raise ValueError(f"form={form!r}: one of {', '.join(FORMS)}")
    previous, _override = _override, form
    try:
        yield
    finally:
        _override = previous


def choose_form(layout: ChunkLayout, x: torch.Tensor, B: torch.Tensor) -> str:
    """``"fused"`` (one kernel) or ``"chunks"`` (three) for a call on the GPU.

    The fused kernel moves a fraction of the bytes, but has a program only per sequence, head and tile
    of P, and the longest sequence says how long they take. Are there enough of them to keep the GPU
    busy on the way? If not, chunks are worked on side by side instead; so they are where a row of C
    is too long for the fused kernel's registers.
    """
    if _override is not None:
        return _override
    config = _config("fused_scan_kernel", x, B)
    at_once = layout.num_chunks / layout.max_chunks_per_seq  # sequences, were all like the longest
    programs = at_once * x.shape[1] * cdiv(x.shape[2], config["BLOCK_P"])
    fits = config["BLOCK_N"] * x.element_size() <= FUSED_ROW_BYTES or current_arch() == "interpret"
    return "fused" if fits and programs >= programs_to_fill() else "chunks"


def launch_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    ssm_state: torch.Tensor,
    layout: ChunkLayout,
    src_slots: torch.Tensor,
    dst_slots: torch.Tensor,
    has_initial_state: torch.Tensor,
    checkpoints: torch.Tensor | None,
    dt_limit: tuple[float, float],
    least_step: float,
) -> torch.Tensor:
    """The whole scan in its form; arguments as in :func:`mamba_kernels.mamba_chunk_scan`.

    Args:
        least_step: log decays are clamped there.
    """
    if choose_form(layout, x, B) == "chunks":
        between = launch_chunk_state(x, dt, A, B, dt_bias, layout, dt_limit, least_step)
        launch_pass_states(
            between, ssm_state, layout, src_slots, dst_slots, has_initial_state, checkpoints
        )
        return launch_chunk_scan(x, B, C, D, between, layout)
    _check_span(layout, x=x, dt=dt, B=B, C=C)
    num_heads, head_dim = x.shape[1:]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    y[layout.num_tokens :].zero_()  # padding; nothing is launched for an empty slice
    config = _config("fused_scan_kernel", x, B)
    launch(
        fused_scan_kernel, (cdiv(head_dim, config["BLOCK_P"]), num_heads, layout.num_seqs),
        x, dt, A, B, C, D, dt_bias, ssm_state, y, src_slots, dst_slots, has_initial_state,
        dst_slots if checkpoints is None else checkpoints,  # without checkpoints nobody looks
        layout.cu_seq_chunks, layout.cu_chunk_seqlens, layout.checkpoint_order,
        layout.cu_checkpoints, float(dt_limit[0]), float(dt_limit[1]), least_step,
        *x.stride(), *dt.stride(), *B.stride(), *C.stride(), *ssm_state.stride(), **config,
    )  # fmt: skip
    return y


@dataclass(frozen=True)
class Between:
    """What the kernels leave for each other, in fp32.

    Attributes:
        dt: ``(H, T)`` step sizes.
        hi, lo: ``(H, T)`` cumulative log-decays since the chunk's start, ``hi + lo``.
        states: ``(c, H, P, N)`` what each chunk adds; after ``pass_states`` the state before it.
    """

    dt: torch.Tensor
    hi: torch.Tensor
    lo: torch.Tensor
    states: torch.Tensor


def launch_chunk_state(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    dt_bias: torch.Tensor,
    layout: ChunkLayout,
    dt_limit: tuple[float, float],
    least_step: float,
) -> Between:
    """Step sizes, exponents, and what each chunk adds to the state."""
    _check_span(layout, x=x, dt=dt, B=B)
    num_tokens, num_heads, head_dim = x.shape
    per_token = torch.empty(3, num_heads, num_tokens, dtype=torch.float32, device=x.device)
    shape = (layout.num_chunks, num_heads, head_dim, B.shape[2])
    states = torch.empty(shape, dtype=torch.float32, device=x.device)
    between = Between(per_token[0], per_token[1], per_token[2], states)
    config = _config("chunk_state_kernel", x, B)
    launch(
        chunk_state_kernel, (cdiv(head_dim, config["BLOCK_P"]), num_heads, layout.num_chunks),
        x, dt, A, B, dt_bias, *per_token, states, layout.cu_chunk_seqlens,
        num_tokens, float(dt_limit[0]), float(dt_limit[1]), least_step,
        *x.stride(), *dt.stride(), *B.stride(), **config,
    )  # fmt: skip
    return between


def launch_pass_states(
    between: Between,
    ssm_state: torch.Tensor,
    layout: ChunkLayout,
    src_slots: torch.Tensor,
    dst_slots: torch.Tensor,
    has_initial_state: torch.Tensor,
    checkpoints: torch.Tensor | None,
) -> None:
    """Turns ``between.states`` into states before each chunk; stores the kept ones in the pool."""
    num_heads, head_dim, state_size = between.states.shape[1:]
    config = _pass_states_config(current_arch(), num_heads, head_dim, state_size)
    launch(
        pass_states_kernel, (cdiv(head_dim, config["BLOCK_P"]), num_heads, layout.num_seqs),
        between.states, between.hi, between.lo, ssm_state, src_slots, dst_slots, has_initial_state,
        dst_slots if checkpoints is None else checkpoints,  # without checkpoints nobody looks
        layout.cu_seq_chunks, layout.cu_chunk_seqlens, layout.checkpoint_order,
        layout.cu_checkpoints, between.hi.shape[1], *ssm_state.stride(), **config,
    )  # fmt: skip


def launch_chunk_scan(
    x: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    between: Between,
    layout: ChunkLayout,
) -> torch.Tensor:
    """The outputs, given the states before each chunk."""
    _check_span(layout, x=x, B=B, C=C)
    num_tokens, num_heads, head_dim = x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    y[layout.num_tokens :].zero_()  # padding; nothing is launched for an empty slice
    config = _config("chunk_scan_kernel", x, B)
    tiles = cdiv(layout.longest_chunk, config["BLOCK_I"]) * cdiv(head_dim, config["BLOCK_P"])
    launch(
        chunk_scan_kernel, (tiles, num_heads, layout.num_chunks),
        x, B, C, D, between.dt, between.hi, between.lo, between.states, y, layout.cu_chunk_seqlens,
        num_tokens, *x.stride(), *B.stride(), *C.stride(), **config,
    )  # fmt: skip
    return y


def _check_span(layout: ChunkLayout, **tensors: torch.Tensor) -> None:
    """Kernels find a chunk with 64-bit arithmetic and its tokens, from there, with 32-bit."""
    for name, tensor in tensors.items():
        span = layout.longest_chunk * tensor.stride(0)
        if span >= 2**31:
            raise ValueError(
                f"{name} has a token stride of {tensor.stride(0)}: a chunk of {layout.longest_chunk} "
                f"tokens spans {span} numbers; allowed are fewer than 2**31"
            )


def _config(kernel_name: str, x: torch.Tensor, B: torch.Tensor) -> dict[str, Any]:
    sizes = x.shape[1], B.shape[1], x.shape[2], B.shape[2]
    return _products_config(kernel_name, current_arch(), x.dtype, *sizes)


def _products_config(
    kernel_name: str,
    arch: str,
    dtype: torch.dtype,
    num_heads: int,
    groups: int,
    head_dim: int,
    state_size: int,
) -> dict[str, Any]:
    """Every compile-time argument of a kernel with matrix products."""
    # 16-bit inputs go to the tensor cores as they are. For fp32 ones, three tf32 products are as
    # good as one in fp32 and far faster (AMD has fp32 matrix instructions). The interpreter knows
    # fp32 only.
    dot = tl.float32
    if arch != "interpret" and dtype != torch.float32:
        dot = tl.bfloat16 if dtype == torch.bfloat16 else tl.float16
    dot_bytes = 4 if dot == tl.float32 else 2
    config = config_for(
        kernel_name, arch, head_dim=head_dim, state_size=state_size, dot_bytes=dot_bytes
    )
    # Tensor cores know no side below 16.
    config["BLOCK_P"] = min(config["BLOCK_P"], max(16, next_power_of_2(head_dim)))
    return config | {
        "HEADS": num_heads,
        "HEADS_PER_GROUP": num_heads // groups,
        "HEAD_DIM": head_dim,
        "STATE_SIZE": state_size,
        "BLOCK_N": max(16, next_power_of_2(state_size)),
        "DOT_DTYPE": dot,
        "PRECISION": dot_precision(arch),
    }


def _pass_states_config(
    arch: str, num_heads: int, head_dim: int, state_size: int
) -> dict[str, Any]:
    """Every compile-time argument of ``pass_states_kernel``."""
    config = config_for("pass_states_kernel", arch, head_dim=head_dim, state_size=state_size)
    config["BLOCK_P"] = min(config["BLOCK_P"], next_power_of_2(head_dim))
    return config | {
        "HEADS": num_heads,
        "HEAD_DIM": head_dim,
        "STATE_SIZE": state_size,
        "BLOCK_N": next_power_of_2(state_size),
    }


def aot_cases(arch: str = "sm_90") -> list[AotCase]:
    """What Nemotron-H (128 heads of 64 or 80, state 128, 8 groups) and a toy in fp32 launch."""
    models = {"P64": (128, 8, 64, 128), "P80": (128, 8, 80, 128), "toy": (8, 1, 32, 64)}
    pass_pointers = {
        f"{name}_ptr": type_
        for type_, names in {
            "*fp32": ("states", "hi", "lo"),
            "*i32": ("src_slots", "dst_slots", "checkpoints"),
            "*i64": ("cu_seq_chunks", "cu_chunk_seqlens", "checkpoint_order", "cu_checkpoints"),
            "*i1": ("has_initial_state",),
        }.items()
        for name in names
    }
    cases = []
    for model, pool in (("P64", "fp32"), ("P64", "bf16"), ("P80", "fp32"), ("toy", "fp32")):
        num_heads, _, head_dim, state_size = models[model]
        config = _pass_states_config(arch, num_heads, head_dim, state_size)
        warps, stages = config.pop("num_warps"), config.pop("num_stages")
        cases.append(aot_case(
            pass_states_kernel, f"pass states {model} {pool} pool",
            pass_pointers | {"pool_ptr": f"*{pool}"}, config, ("stride_pool_state",), (), warps,
            stages,
        ))  # fmt: skip

    unit_strides = ("stride_x_dim", "stride_dt_head", "stride_B_state", "stride_C_state",
                    "stride_pool_state")  # fmt: skip
    # x, B and C are views of the conv's output, dt of the projection's: rows are aligned.
    inputs = {"x_ptr", "raw_dt_ptr", "B_ptr", "C_ptr", "D_ptr", "dt_bias_ptr", "y_ptr"}
    wanted = [("P64", "bf16"), ("P80", "bf16"), ("P64", "fp32"), ("P80", "fp32"), ("toy", "fp32")]
    for kernel, label, pool in (
        (chunk_state_kernel, "chunk state", ""), (chunk_scan_kernel, "chunk scan", ""),
        (fused_scan_kernel, "fused scan", "fp32"), (fused_scan_kernel, "fused scan", "bf16"),
    ):  # fmt: skip
        for model, act in wanted:
            dtype = torch.bfloat16 if act == "bf16" else torch.float32
            if pool and models[model][3] * dtype.itemsize > FUSED_ROW_BYTES:
                continue
            config = _products_config(kernel.fn.__name__, arch, dtype, *models[model])
            warps, stages = config.pop("num_warps"), config.pop("num_stages")
            names = [n for n in kernel.arg_names if n.endswith("_ptr")]
            pointers = {
                n: f"*{act}" if n in inputs else pass_pointers.get(n, "*fp32") for n in names
            }
            if pool:
                pointers["pool_ptr"] = f"*{pool}"
            cases.append(aot_case(
                kernel, f"{label} {model} {act}" + f", {pool} pool" * bool(pool), pointers, config,
                tuple(n for n in unit_strides if n in kernel.arg_names),
                ("dt_min", "dt_max", "least_step"), warps, stages,
            ))  # fmt: skip
    return cases
