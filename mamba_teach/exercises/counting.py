"""What a function costs, counted instead of timed: launches, bytes, look-ups.

A count is the same on every machine. It says nothing about how long something takes on this one, and
much about how long it takes where memory is what everybody waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten

MAKES_NO_VALUES = (aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty)
OVERWRITES = (aten.copy_, aten.fill_, aten.zero_)  # these do not read what they write to


@dataclass(frozen=True)
class Work:
    """Work of a call.

    Attributes:
        launches: operations that touch values; a view of a tensor is none.
        bytes_moved: read and written by them, each operation reading its inputs whole.
    """

    launches: int
    bytes_moved: int


class OperationCounter(TorchDispatchMode):
    """Counts every torch operation inside a ``with`` block.

    On a GPU each would be a kernel launch of its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches = 0
        self.bytes_moved = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not _is_view(func) and func.overloadpacket not in MAKES_NO_VALUES:
            read = tree_leaves((args, kwargs))
            if func.overloadpacket in OVERWRITES:
                read = read[1:]
            self.launches += 1
            self.bytes_moved += sum(t.nbytes for t in _tensors([*read, *tree_leaves(result)]))
        return result


def _is_view(func: Any) -> bool:
    """Whether the result is another look at an argument that is not written."""
    aliases = [r.alias_info for r in func._schema.returns if r.alias_info is not None]
    return bool(aliases) and not any(alias.is_write for alias in aliases)


def _tensors(values: list[Any]) -> Iterator[torch.Tensor]:
    return (value for value in values if isinstance(value, torch.Tensor))


def count_work(function: Callable[..., Any], inputs: Mapping[str, Any]) -> Work:
    """Call ``function(**inputs)`` and count."""
    with OperationCounter() as counter:
        function(**inputs)
    return Work(counter.launches, counter.bytes_moved)


class PublishedBlocks:
    """A set of block hashes that can be asked ``block_hash in published``, and counts who asks.

    Attributes:
        num_lookups: so far.
    """

    def __init__(self, hashes: Collection[bytes]) -> None:
        self._hashes = frozenset(hashes)
        self.num_lookups = 0

    def __contains__(self, block_hash: object) -> bool:
        self.num_lookups += 1
        return block_hash in self._hashes

    def __repr__(self) -> str:
        return f"{len(self._hashes)} published blocks"
