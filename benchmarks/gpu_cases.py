"""A case is one call of one kernel function with known answers; here is how a case is run.

The answers come from ``tests/support/kernel_reference.py``: the plain recurrence, token by token, in
float64. Inputs and pools are made on the CPU, copied to the device with their strides, and what the
kernel left there is copied back and compared on the CPU. So one case serves the GPU and the
interpreter alike. Four questions are asked of a run:

* **values**: outputs and kept states against the recurrence;
* **canary**: every number that is not to be written is bitwise what it was (unowned slots and the
  gaps between pages are NaN or 1e4 beforehand, so a stray *read* shows in the values);
* **races**: the same call again, 20 times, gives the same bits. Memory for outputs is filled with NaN
  before each, so an element that nobody writes cannot pass by luck;
* **64-bit offsets**: slots (or tokens) 2^28 numbers apart, so that number 8 starts at 2^31.

Tolerances are relative to the largest expected number (at least 1):

==========================  ======  ================================================================
:data:`EXACT`               0       windows and copied states: moved, not computed
:data:`FP32`                1e-4    computed and kept in fp32, from fp32 or bf16 inputs
:data:`ROUNDED`             5e-3    computed in fp32, rounded once to bf16 (half a unit is 2e-3)
:data:`PRODUCTS`            2e-2    matrix products of bf16 operands: each operand rounded once more
==========================  ======  ================================================================
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
for _folder in ("", "kernels", "tests"):  # as a script, and in a test, whatever is installed
    if str(ROOT / _folder) not in sys.path:
        sys.path.append(str(ROOT / _folder))

from support.kernel_reference import Pool, assert_close  # noqa: E402

EXACT, FP32, ROUNDED, PRODUCTS = 0.0, 1e-4, 5e-3, 2e-2
REPEATS = 20
FAR = 2**28  # numbers between neighbouring slots (or tokens): number 8 starts at 2^31

Inputs = dict[str, torch.Tensor]
Call = Callable[[Inputs, list[torch.Tensor], str | None], "torch.Tensor | None"]


@dataclass
class Expected:
    """The answers.

    Attributes:
        y: the output, or None if the function returns nothing.
        kept: ``(pool, slot) -> the first numbers of the slot``; nothing else may change.
    """

    y: np.ndarray | None = None
    kept: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)


@dataclass
class Case:
    """One call.

    Attributes:
        call: ``(inputs, states, backend) -> y``; states are views of the pools.
        inputs: tensors by name; ``"x"`` is the one that a far token stride applies to.
        pools: as they are before the call.
        expect: computes the answers; called once, when needed.
        tolerance: of outputs and of kept states.
    """

    name: str
    call: Call
    inputs: Inputs
    pools: list[Pool]
    expect: Callable[[], Expected]
    tolerance: tuple[float, float]


def on_device(tensor: torch.Tensor, device: torch.device, token_stride: int = 0) -> torch.Tensor:
    """A copy with the same strides (``.to`` would close the gaps), or with tokens further apart."""
    if token_stride:
        size = (tensor.shape[0] - 1) * token_stride + tensor[0].numel()
        far = torch.empty(size, dtype=tensor.dtype, device=device)
        inner = torch.empty(tensor.shape[1:], device="meta").stride()
        return far.as_strided(tensor.shape, (token_stride, *inner)).copy_(tensor)
    storage = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    return storage.to(device).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


class DevicePool:
    """A copy of a :class:`Pool` on the device, its slots ``slot_stride`` numbers apart if given."""

    def __init__(self, pool: Pool, device: torch.device, slot_stride: int = 0) -> None:
        slots, page = pool.raw.shape
        self.pool, self.initial = pool, pool.raw.to(device)
        stride = slot_stride or page
        memory = torch.empty((slots - 1) * stride + page, dtype=pool.raw.dtype, device=device)
        self.raw = memory.as_strided((slots, page), (stride, 1))
        self.state = self.raw[:, : pool.state[0].numel()].unflatten(1, pool.state.shape[1:])
        self.reset()

    def reset(self) -> None:
        self.raw.copy_(self.initial)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers: NaN equals itself, -0 is not 0."""
    return tensor.view({4: torch.int32, 2: torch.int16}[tensor.element_size()])


@contextmanager
def nan_in_new_memory() -> Iterator[None]:
    """``torch.empty`` gives NaN meanwhile, here and inside the kernels' launchers."""
    before = torch.are_deterministic_algorithms_enabled()
    warn = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn)


def run(
    case: Case,
    device: torch.device,
    backend: str | None = None,
    repeats: int = REPEATS,
    slot_stride: int = 0,
    token_stride: int = 0,
) -> None:
    """Run a case and compare; the pools of the case are as before afterwards.

    Raises:
        AssertionError: values, canary or bits are off; the message says where.
    """
    inputs = {
        name: on_device(tensor, device, token_stride if name == "x" else 0)
        for name, tensor in case.inputs.items()
    }
    pools = [DevicePool(pool, device, slot_stride) for pool in case.pools]
    states = [pool.state for pool in pools]
    with nan_in_new_memory():
        y = case.call(inputs, states, backend)
        kept = [pool.raw.clone() for pool in pools]
        compare(case, y, kept)
        for repeat in range(1, repeats):
            for pool in pools:
                pool.reset()
            again = case.call(inputs, states, backend)
            if y is not None and again is not None:
                assert torch.equal(bits(y), bits(again)), f"y differs in run {repeat}: a race?"
            for number, (pool, first) in enumerate(zip(pools, kept)):
                same = torch.equal(bits(pool.raw.contiguous()), bits(first.contiguous()))
                assert same, f"pool {number} differs in run {repeat}: a race?"


def compare(case: Case, y: torch.Tensor | None, raws: list[torch.Tensor]) -> None:
    """Outputs and pools against the answers."""
    expected = case.expect()
    before = [pool.raw.clone() for pool in case.pools]
    try:
        for pool, raw in zip(case.pools, raws):
            pool.raw.copy_(raw)
        for (number, slot), numbers in expected.kept.items():
            actual = case.pools[number].state[slot].flatten()[: numbers.size]
            assert_close(
                actual, numbers.flatten(), f"pool {number}, slot {slot}", case.tolerance[1]
            )
        if expected.y is not None:
            assert y is not None
            assert_close(y.cpu(), expected.y, "y", case.tolerance[0])
        for number, pool in enumerate(case.pools):
            pool.assert_untouched(
                {slot: v.size for (where, slot), v in expected.kept.items() if where == number}
            )
    finally:
        for pool, raw in zip(case.pools, before):
            pool.raw.copy_(raw)


def bytes_when_far(case: Case, slot_stride: int, token_stride: int) -> int:
    """What :func:`run` would allocate for far slots or tokens."""
    pools = sum(pool.raw.shape[0] * slot_stride * pool.raw.element_size() for pool in case.pools)
    x = case.inputs.get("x")
    return pools + (0 if x is None else x.shape[0] * token_stride * x.element_size())
