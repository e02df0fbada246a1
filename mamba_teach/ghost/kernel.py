"""The kernels' door, for a plain function: so that a graph can record the ghost like one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class GhostKernel:
    """A plain function that is launched like a kernel: ``kernel[grid](*args)``."""

    def __init__(self, run: Callable[..., None]) -> None:
        def ghost_kernel(*args: Any) -> None:
            run(*args)

        self.fn = ghost_kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self.fn
