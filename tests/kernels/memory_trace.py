"""What a kernel really moves: distinct bytes loaded and stored, by pointer argument.

Triton's interpreter runs a kernel's loads and stores one after another, each with a block of addresses
and a mask. While it runs, this module keeps the addresses that are not masked, and afterwards looks up
which argument they belong to. Bytes count once, however many programs load them: what a memory-bound
kernel must move at least, and what ``benchmarks/gpu_bytes.py`` has formulas for.

An address that belongs to no argument is somebody else's memory, and an error.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from mamba_kernels.launch import Launch, run_launches_with


@dataclass
class Traffic:
    """Distinct bytes of all launches, by kernel and argument (without its ``_ptr``).

    Attributes:
        loaded, stored: *(kernel, argument)* -> bytes.
    """

    loaded: dict[tuple[str, str], int] = field(default_factory=dict)
    stored: dict[tuple[str, str], int] = field(default_factory=dict)

    def moved(self, kernel: str, arguments: Sequence[str]) -> int:
        """Bytes loaded and bytes stored of some arguments of a kernel."""
        both = (self.loaded, self.stored)
        return sum(of_kind.get((kernel, name), 0) for of_kind in both for name in arguments)

    def arguments(self, kernel: str) -> set[str]:
        """Those that were loaded from or stored to."""
        return {name for of_kernel, name in (*self.loaded, *self.stored) if of_kernel == kernel}


@contextmanager
def trace_memory(more: Mapping[str, Sequence[torch.Tensor]] | None = None) -> Iterator[Traffic]:
    """``with trace_memory() as traffic: ...``: what the kernels launched inside move.

    Args:
        more: name -> tensors that a kernel finds through a table of addresses, not as arguments.
    """
    from triton.runtime.interpreter import interpreter_builder

    traffic = Traffic()

    def run(event: Launch) -> None:
        accesses: dict[str, list[np.ndarray]] = {"loaded": [], "stored": []}

        def watched(kind: str, works: Any) -> Any:
            def access(ptrs: Any, *rest: Any, **named: Any) -> Any:
                mask = rest[0] if kind == "loaded" else rest[1]
                addresses = np.broadcast_to(ptrs.data, mask.data.shape)[mask.data]
                size = ptrs.get_element_ty().primitive_bitwidth // 8
                accesses[kind].append(np.stack([addresses, np.full_like(addresses, size)]))
                return works(ptrs, *rest, **named)

            return access

        with pytest.MonkeyPatch.context() as patch:
            for kind, name in (("loaded", "create_masked_load"), ("stored", "create_masked_store")):
                works = getattr(interpreter_builder, name)
                patch.setattr(interpreter_builder, name, watched(kind, works))
            event.run()
        owners = spans(event, more or {})
        for kind, of_kind in (("loaded", traffic.loaded), ("stored", traffic.stored)):
            if accesses[kind]:
                found = np.unique(np.concatenate(accesses[kind], axis=1), axis=1)
                add(of_kind, event.kernel_name, found.astype(np.int64), owners, kind)

    with run_launches_with(run):
        yield traffic


def spans(event: Launch, more: Mapping[str, Sequence[torch.Tensor]]) -> list[tuple[str, int, int]]:
    """*(name, first address, address behind the last)* of the tensors that a launch may touch."""
    names = list(inspect.signature(event.kernel.fn).parameters)
    tensors = [
        (name.removesuffix("_ptr"), value)
        for name, value in zip(names, event.args)
        if isinstance(value, torch.Tensor) and value.numel()
    ]
    tensors += [(name, tensor) for name, of_name in more.items() for tensor in of_name]
    found: dict[tuple[int, int], str] = {}
    for name, tensor in tensors:
        steps = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride()))
        first = tensor.data_ptr()
        span = (first, first + (steps + 1) * tensor.element_size())
        found.setdefault(span, name)  # a tensor that is passed twice counts for its first name
    in_order = sorted(found)
    for (_, end), (start, _) in pairwise(in_order):
        assert end <= start, f"{found} overlap: give the kernel tensors of their own"
    return [(found[span], *span) for span in in_order]


def add(
    of_kind: dict[tuple[str, str], int], kernel: str, found: np.ndarray,
    owners: list[tuple[str, int, int]], kind: str,
) -> None:  # fmt: skip
    """Count ``found (2, accesses)``, addresses and sizes, for their owners."""
    addresses, sizes = found
    counted = 0
    for name, first, end in owners:
        mine = (addresses >= first) & (addresses + sizes <= end)
        if mine.any():
            counted += int(mine.sum())
            of_kind[kernel, name] = of_kind.get((kernel, name), 0) + int(sizes[mine].sum())
    assert counted == len(addresses), f"{kernel}: {len(addresses) - counted} addresses are nobody's"
