"""Shapes, inputs and slots that cases are made of.

Shapes are chosen so that every *pair* of head dim (32, 64, 80), state (16, 64, 128) and groups (1,
2, 8, H) occurs: twelve instead of thirty-six, since each is a compilation. Half of
them are aligned as in the engine, half have odd strides and gaps (Triton compiles those apart).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from gpu_cases import FP32, ROUNDED, Inputs


@dataclass(frozen=True)
class Shape:
    """Sizes and types of one mixer; ``aligned`` is whether strides are multiples of 16."""

    heads: int = 2
    head_dim: int = 32
    state_size: int = 16
    groups: int = 1
    act: torch.dtype = torch.float32
    state: torch.dtype = torch.float32
    aligned: bool = True

    def __str__(self) -> str:
        types = " ".join(str(t).removeprefix("torch.") for t in (self.act, self.state))
        return (
            f"H{self.heads} P{self.head_dim} N{self.state_size} G{self.groups} {types}"
            f"{'' if self.aligned else ' odd'}"
        )

    @property
    def channels(self) -> int:
        return self.heads * self.head_dim + 2 * self.groups * self.state_size

    @property
    def computed(self) -> float:
        """Tolerance of an output that is computed in fp32 and rounded once."""
        return FP32 if self.act == torch.float32 else ROUNDED

    @property
    def gap(self) -> int:
        return 16 if self.aligned else 5


def shapes(act: torch.dtype, state: torch.dtype, heads: int = 16) -> list[Shape]:
    """Twelve shapes with every pair of head dim, state size and number of groups."""
    dims, sizes = (32, 64, 80), (16, 64, 128)
    return [
        Shape(heads, dims[d], sizes[(g + d) % 3], groups, act, state, (g + d) % 2 == 0)
        for g, groups in enumerate((1, 2, 8, heads))
        for d in range(3)
    ]


def randn(g: torch.Generator, *size: int) -> torch.Tensor:
    return torch.randn(size, generator=g)


def offsets(lengths: Sequence[int]) -> torch.Tensor:
    return torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)


def mixer_inputs(shape: Shape, tokens: int, g: torch.Generator) -> Inputs:
    """x, dt, B, C as views of one projection, as in the model; A, D and dt_bias."""
    heads, bc = shape.heads, shape.groups * shape.state_size
    widths = [heads * shape.head_dim, bc, bc, heads, shape.gap]
    x, B, C, dt, _ = randn(g, tokens, sum(widths)).to(shape.act).split(widths, dim=1)
    grouped = (shape.groups, shape.state_size)
    return {
        "x": x.unflatten(1, (heads, shape.head_dim)), "dt": dt * 2 - 2,
        "B": B.unflatten(1, grouped), "C": C.unflatten(1, grouped),
        "A": -torch.rand(heads, generator=g) * 4, "D": randn(g, heads), "dt_bias": randn(g, heads),
    }  # fmt: skip


class Slots:
    """Slot numbers in a shuffled order; 0 is the null slot."""

    def __init__(self, count: int, g: torch.Generator) -> None:
        self.free = (torch.randperm(count, generator=g) + 1).tolist()
        self.total = count + 2  # the last one is never handed out

    def take(self, *size: int) -> torch.Tensor:
        taken = [self.free.pop() for _ in range(math.prod(size))]
        return torch.tensor(taken, dtype=torch.int32).view(size)
