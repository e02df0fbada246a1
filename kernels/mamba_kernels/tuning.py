"""Which block sizes and warp counts a kernel is launched with.

Triton can measure candidates at the first launch of every shape (``triton.autotune``). A serving
engine does not want that: start-up becomes slow and different from run to run, a first launch
inside a graph capture fails, and the interpreter cannot do it at all. Here the choice is a table
that people can read and ``make tune`` can rewrite (:mod:`mamba_kernels.tuning_table`).

A table row is ``(arch, shape, config)``: it fits if its ``arch`` is this one or ``"any"`` and
each number in its ``shape`` is equal. The first row that fits is taken, so special rows stand
above general ones, and the last row of each kernel fits everything.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from mamba_kernels.backend import triton_mode
from mamba_kernels.tuning_table import PROGRAMS_TO_FILL, TABLE


@functools.cache
def current_arch() -> str:
    """``"sm_90"``, ``"gfx942"``, ...: found at the first launch, never at import."""
    if triton_mode() == "interpret":
        return "interpret"
    if torch.version.hip:
        return str(torch.cuda.get_device_properties(0).gcnArchName).split(":")[0]
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


def dot_precision(arch: str) -> str:
    """``input_precision`` of products of fp32 numbers: NVIDIA's tensor cores would round them to tf32,
    three such products make up for it; elsewhere products are exact."""
    return "tf32x3" if arch.startswith("sm_") else "ieee"


def config_for(kernel_name: str, arch: str | None = None, **shape: int) -> dict[str, Any]:
    """Constexprs, ``num_warps`` and ``num_stages`` for a launch; a fresh dict.

    Args:
        kernel_name: name of the ``@jit`` function.
        arch: for example ``"sm_90"``; None is the current device.
        shape: what the table may distinguish, for example ``head_dim=64, state_size=128``.

    Raises:
        KeyError: the table does not know the kernel, or no row fits.
    """
    if kernel_name not in TABLE:
        raise KeyError(f"kernel_name={kernel_name!r}: not in the tuning table ({', '.join(TABLE)})")
    arch = current_arch() if arch is None else arch
    for row_arch, row_shape, config in TABLE[kernel_name]:
        if row_arch in (arch, "any") and row_shape.items() <= shape.items():
            return dict(config)
    raise KeyError(f"{kernel_name}: no row of the tuning table fits arch={arch!r}, shape={shape}")


def programs_to_fill() -> int:
    """How many programs of a few warps give each multiprocessor of this GPU work."""
    by_arch = dict(PROGRAMS_TO_FILL)
    return by_arch.get(current_arch(), by_arch["any"])
