"""What the kernels must compute: token by token, in float64, from the formulas and nothing clever.

Also the pools the kernel tests run on. They look like the engine's: a slot is a page, longer than
the state in it, and whatever a test does not own is poison.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterable
from math import prod

import numpy as np
import torch

TOLERANCE = 1e-4  # relative to the largest expected number; the kernels compute in float32


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def conv(
    history: np.ndarray,
    x: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray | None,
    activation: str | None,
) -> np.ndarray:
    """One sequence: ``history (W-1, C)``, ``x (q, C)`` -> ``y (q, C)``."""
    inputs = np.concatenate([history, x])
    y = np.zeros_like(x)
    for t in range(len(x)):
        for w in range(weight.shape[1]):
            y[t] += weight[:, w] * inputs[t + w]
        if bias is not None:
            y[t] += bias
    return silu(y) if activation else y


def ssm(
    state: np.ndarray, x: np.ndarray, dt: np.ndarray, A: np.ndarray, B: np.ndarray, C: np.ndarray,
    D: np.ndarray, dt_bias: np.ndarray, dt_limit: tuple[float, float],
) -> tuple[np.ndarray, list[np.ndarray]]:  # fmt: skip
    """One sequence: ``state (H, P, N)``, ``x (q, H, P)`` -> ``y``, the state after each token."""
    heads, groups = x.shape[1], B.shape[1]
    y, states, state = np.zeros_like(x), [], state.copy()
    for t in range(len(x)):
        for h in range(heads):
            group = h // (heads // groups)
            step = np.clip(np.logaddexp(0.0, dt[t, h] + dt_bias[h]), *dt_limit)
            state[h] = np.exp(step * A[h]) * state[h] + step * np.outer(x[t, h], B[t, group])
            y[t, h] = state[h] @ C[t, group] + D[h] * x[t, h]
        states.append(state.copy())
    return y, states


def gated_norm(
    x: np.ndarray, gate: np.ndarray, weight: np.ndarray, eps: float, group_size: int,
    norm_before_gate: bool,
) -> np.ndarray:  # fmt: skip
    y = np.empty_like(x)
    for t in range(len(x)):
        for start in range(0, x.shape[1], group_size):
            group = slice(start, start + group_size)
            g = silu(gate[t, group])
            v = x[t, group] if norm_before_gate else x[t, group] * g
            v = v / np.sqrt((v * v).mean() + eps) * weight[group]
            y[t, group] = v * g if norm_before_gate else v
    return y


def f64(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().double().numpy()


def assert_close(
    actual: torch.Tensor, expected: np.ndarray, what: str, rtol: float = TOLERANCE
) -> None:
    """Largest difference, relative to the largest expected number (at least 1)."""
    assert actual.shape == expected.shape, f"{what}: {tuple(actual.shape)} != {expected.shape}"
    if expected.size == 0:
        return
    difference = np.abs(f64(actual) - expected)
    assert np.isfinite(difference).all(), f"{what}: not finite"
    allowed = rtol * max(1.0, np.abs(expected).max())
    worst = np.unravel_index(difference.argmax(), difference.shape)
    assert difference.max() <= allowed, f"{what}: off by {difference.max():.2e} at {worst}"


def lazy_memory(count: int) -> torch.Tensor:
    """``count`` float32 zeros of which only the touched pages exist: gigabytes for nothing."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    if sys.platform == "linux":
        flags |= 0x4000  # MAP_NORESERVE; the mmap module knows the name from Python 3.13 on only
    return torch.frombuffer(mmap.mmap(-1, count * 4, flags=flags), dtype=torch.float32)


class Pool:
    """``slots`` pages; ``state`` is the view of the states in them, ``page_gap`` numbers apart."""

    def __init__(
        self, slots: int, shape: tuple[int, ...], poison: float = float("nan"), page_gap: int = 5,
        dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        size = prod(shape)
        self.raw = torch.full((slots, size + page_gap), poison, dtype=dtype)
        self.state = self.raw[:, :size].unflatten(1, shape)
        self._before = self.raw.clone()

    def own(self, slots: Iterable[int], generator: torch.Generator) -> None:
        """Fill slots with ordinary numbers, then remember how everything looks."""
        for slot in slots:
            shape = self.state[slot].shape
            self.state[slot] = torch.randn(shape, generator=generator).to(self.state.dtype)
        self._before = self.raw.clone()

    def before(self, slot: int) -> torch.Tensor:
        return self._before[slot, : self.state[slot].numel()].unflatten(0, self.state.shape[1:])

    def assert_untouched(self, except_for: dict[int, int] | None = None) -> None:
        """All is bitwise as it was, but for the first so-many numbers of the given slots."""
        as_bits = {4: torch.int32, 2: torch.int16}[self.raw.element_size()]
        changed = self.raw.view(as_bits) != self._before.view(as_bits)
        for slot, written in (except_for or {}).items():
            changed[slot, :written] = False
        slots = changed.any(1).nonzero()[:, 0].tolist()
        assert not slots, f"written without being asked: slots {slots}"
