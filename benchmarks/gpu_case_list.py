"""Which cases are run: every family over its shapes, a handful for the interpreter, far offsets.

Lists are of calls that make the cases, since a case at production sizes is hundreds of megabytes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from gpu_case_decode import conv_update_case, copy_case, norm_case, update_case
from gpu_case_prefill import conv_prefill_case, scan_case
from gpu_case_shapes import Shape, shapes
from gpu_cases import Case

Maker = Callable[[], Case]
Types = tuple[torch.dtype, torch.dtype]  # of activations, of states

FP32_TYPES: Types = (torch.float32, torch.float32)
ALL_TYPES: list[Types] = [
    (act, state)
    for act in (torch.float32, torch.bfloat16)
    for state in (torch.float32, torch.bfloat16)
]
PRODUCTION = ((128, 64, 128, 8), (128, 80, 128, 8))  # Nemotron-H: the variants that will be served
UNEVEN = [1, 4, 3, 0, 2, 4, 1, 3, 4]  # rows of a verify step with k = 3


def edges(size: int) -> list[int]:
    """Lengths at which something of ``size`` tokens begins, ends, or is just missed."""
    return [0, 1, 2, 3, size - 1, size, size + 1]


def scan_cases(act: torch.dtype, state: torch.dtype) -> list[Maker]:
    cases, chunks = [], (64, 128, 256)
    for i, shape in enumerate(shapes(act, state)):
        size = chunks[i % 3]
        cases.append(partial(scan_case, shape, [*edges(size), 17], size, seed=i))
    small = Shape(2, 64, 128, 1, act, state)
    for seed, size in enumerate((1, 12, 50, 100)):  # no power of two, no multiple of a tile
        cases.append(partial(scan_case, small, edges(min(size, 50) + 15), size, seed))
    cases.append(partial(scan_case, small, [1, 2, 3] * 40 + [30], 16, seed=2))
    for sizes in PRODUCTION:
        cases.append(partial(scan_case, Shape(*sizes, act, state), [129, 5, 40], 128, seed=2))
    if act == torch.float32:
        cases.append(partial(scan_case, small, [256, 90], 256, seed=2, violent=True))
    return cases


def conv_prefill_cases(act: torch.dtype, state: torch.dtype) -> list[Maker]:
    cases = []
    for i, shape in enumerate(shapes(act, state)):
        lengths, width = [*edges(16), *edges(32), 100], (4, 4, 3, 2)[i % 4]
        cases.append(partial(conv_prefill_case, shape, lengths, width, seed=i, k=i % 3))
    # More sequences than a program looks at in one go; long ones, whose tiles finish in any order.
    small = Shape(2, 64, 128, 1, act, state)
    for seed in range(4):
        lengths = ([1, 2, 5] * 50, [2000, 333])[seed // 2]
        cases.append(partial(conv_prefill_case, small, lengths, seed=seed, k=seed))
    return cases


def update_cases(act: torch.dtype, state: torch.dtype) -> list[Maker]:
    cases = []
    for i, shape in enumerate(shapes(act, state)):
        cases.append(partial(update_case, shape, [1, 1, 1, 0, 1, 1, 1], k=0, seed=i))
        cases.append(partial(update_case, shape, UNEVEN, k=3, seed=i + 1))
    for sizes in PRODUCTION:
        cases.append(partial(update_case, Shape(*sizes, act, state), [1, 1, 1, 0], k=0, seed=2))
        cases.append(partial(update_case, Shape(*sizes, act, state), [1, 4, 2, 3], k=3, seed=2))
    return [*cases, partial(update_case, Shape(2, 64, 128, 1, act, state), [0, 0, 0], k=1)]


def conv_update_cases(act: torch.dtype, state: torch.dtype) -> list[Maker]:
    cases = []
    for i, shape in enumerate(shapes(act, state)):
        width = (4, 4, 3, 2)[i % 4]
        cases.append(partial(conv_update_case, shape, [1, 1, 1, 0, 1, 1, 1], 0, width, seed=i))
        cases.append(partial(conv_update_case, shape, UNEVEN, 3, width, seed=i + 1))
    return cases


def norm_cases(act: torch.dtype, state: torch.dtype) -> list[Maker]:
    some = enumerate(shapes(act, state))
    cases = [partial(norm_case, shape, tokens=(1, 3, 17)[i % 3], seed=i) for i, shape in some]
    wide = [Shape(128, dim, 128, groups, act, state) for dim in (64, 80) for groups in (1, 8)]
    return cases + [partial(norm_case, shape, tokens=5) for shape in wide]


def copy_cases(act: torch.dtype, state: torch.dtype) -> list[Maker]:
    some = enumerate(shapes(act, state))
    cases = [partial(copy_case, shape, padding=130 * (i % 2), seed=i) for i, shape in some]
    return [*cases, partial(copy_case, Shape(3, 10, 6, 3, act, state, aligned=False))]


#: Family -> its cases, and the types it is run with (the conv and the norm have no SSM state).
FAMILIES: dict[str, tuple[Callable[[torch.dtype, torch.dtype], list[Maker]], list[Types]]] = {
    "scan": (scan_cases, ALL_TYPES),
    "update": (update_cases, ALL_TYPES),
    "copy": (copy_cases, ALL_TYPES),
    "conv_prefill": (conv_prefill_cases, [ALL_TYPES[0], ALL_TYPES[3]]),
    "conv_update": (conv_update_cases, [ALL_TYPES[0], ALL_TYPES[3]]),
    "norm": (norm_cases, [ALL_TYPES[0], ALL_TYPES[3]]),
}


def far_case(family: str, act: torch.dtype, state: torch.dtype) -> tuple[Case, bool, bool]:
    """A case for 64-bit offsets, and whether its slots and its tokens can be far apart."""
    small = Shape(2, 64, 128, 1, act, state)
    if family == "scan":
        return scan_case(small, [2, 4, 5], 4, seed=2), True, True
    if family == "update":
        return update_case(small, [2, 1, 2, 2, 1], k=1, seed=3), True, True
    if family == "copy":
        return copy_case(small, layers=1), True, False
    if family == "conv_prefill":
        return conv_prefill_case(small, [2, 4, 5], seed=2), True, True
    if family == "conv_update":
        return conv_update_case(small, [1, 1, 1, 2, 2, 2], k=1, seed=2), True, True
    return norm_case(small, 10), False, True


def smoke_cases() -> list[Maker]:
    """Few and small, fp32: shows that this harness works where kernels are only interpreted."""
    shape, odd = Shape(2, 32, 16, 2), Shape(2, 10, 6, 1, aligned=False)
    return [
        partial(scan_case, shape, [5, 0, 9, 17], 8, seed=2),
        partial(scan_case, odd, [3, 9, 1], 8, seed=1),
        partial(conv_prefill_case, shape, [5, 0, 2, 33], seed=2, k=1),
        partial(conv_prefill_case, odd, [1, 2, 9], 3, seed=1),
        partial(update_case, shape, [1, 2, 2, 0], k=1, seed=2),
        partial(update_case, odd, [1, 1, 1], k=0, seed=1),
        partial(conv_update_case, shape, [1, 2, 2, 0], k=1, seed=2),
        partial(norm_case, shape, 3),
        partial(copy_case, odd, layers=1),
    ]
