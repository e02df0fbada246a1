"""Where two answers part, in words: the first place, and what stands there in each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

import torch

RTOL, ATOL = 1e-4, 1e-5  # an fp32 answer against a float64 one
MAX_SHOWN = 24  # numbers of a tensor or list that are written out


@dataclass(frozen=True)
class Place:
    """Where an answer is wrong.

    Attributes:
        where: in words; empty if the answer is a single number.
        yours, right: what stands there.
    """

    where: str
    yours: str
    right: str


def first_difference(found: Any, expected: Any, where: str = "") -> Place | None:
    """The first place at which ``found`` is not ``expected``, or None.

    Args:
        found: a number, a list or tuple of such, or a tensor, as ``expected`` is. A list is taken for
            a tuple, and the other way round; where a tensor is expected, a list of numbers will do.
        where: the place of both in something larger.
    """
    if isinstance(expected, torch.Tensor):
        return _tensor_difference(found, expected, where)
    if isinstance(expected, Sequence) and not isinstance(expected, bytes):
        return _list_difference(found, expected, where)
    if isinstance(expected, int):
        try:
            found = index(found)
        except (TypeError, RuntimeError, ValueError):
            return Place(where, show(found), show(expected))
    return None if found == expected else Place(where, show(found), show(expected))


def _list_difference(found: Any, expected: Sequence[Any], where: str) -> Place | None:
    try:
        items = list(found)
    except TypeError:
        return Place(where, show(found), show(expected))
    for i, (one, other) in enumerate(zip(items, expected, strict=False)):
        if place := first_difference(one, other, _join(where, f"entry {i}")):
            return place
    end = min(len(items), len(expected))
    if len(items) == len(expected):
        return None
    yours, right = (
        show(of[end]) if len(of) > end else "the list has ended" for of in (items, expected)
    )
    return Place(_join(where, f"entry {end}"), yours, right)


def _tensor_difference(found: Any, expected: torch.Tensor, where: str) -> Place | None:
    try:
        found = torch.as_tensor(found)
    except (TypeError, ValueError, RuntimeError):
        return Place(where, show(found), show(expected))
    if found.shape != expected.shape:
        shapes = (f"shape {tuple(t.shape)}" for t in (found, expected))
        return Place(_join(where, "the shape"), *shapes)
    if expected.is_floating_point():
        same = torch.isclose(found.double(), expected.double(), rtol=RTOL, atol=ATOL)
    else:
        same = found == expected
    if bool(same.all()):
        return None
    at = tuple((~same).nonzero()[0].tolist())
    return Place(_join(where, f"[{', '.join(map(str, at))}]"), show(found[at]), show(expected[at]))


def _join(where: str, part: str) -> str:
    return f"{where}, {part}" if where else part


def show(value: Any) -> str:
    """A value in one line; large ones by their shape."""
    if isinstance(value, torch.Tensor):
        if value.numel() > MAX_SHOWN:
            return f"a tensor of shape {tuple(value.shape)}"
        return show(value.tolist())
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, bytes):
        return value.hex()[:8]
    if isinstance(value, list | tuple):
        if len(value) > MAX_SHOWN:
            first = ", ".join(map(show, value[:8]))
            return f"[{first}, ...: {len(value)} entries]"
        inside = ", ".join(map(show, value))
        return f"[{inside}]" if isinstance(value, list) else f"({inside})"
    return repr(value)
