"""What a graph cannot record, and why: the rules of the recorder, as tables.

A CUDA graph fails on these with "operation not permitted when stream is capturing", or does not notice
at all. They fall into three kinds: the host wants to know a value (it would have to wait for the device,
which is not running); a shape depends on values (it would have to be known to allocate the result); a
value comes from the host (it would be copied from memory that nobody keeps).
"""

from __future__ import annotations

from typing import Any

import torch

aten = torch.ops.aten

SYNC = "the host reads a value, and would have to wait for a device that only records"
SHAPE = "the result's shape depends on values, which nobody knows while recording"
FROM_HOST = (
    "a tensor is made of Python numbers, which are copied from the host and gone at replay; make it "
    "before the capture"
)

#: Functions that are no torch operations, so that only their names give them away.
HOST_READS: dict[Any, str] = {
    torch.Tensor.tolist: SYNC,
    torch.Tensor.numpy: SYNC,
    torch.Tensor.__array__: SYNC,
    torch.Tensor.__repr__: SYNC,
    torch.Tensor.__format__: SYNC,
    torch.Tensor.cpu: SYNC,
    torch.tensor: FROM_HOST,
    torch.as_tensor: FROM_HOST,
    torch.asarray: FROM_HOST,
    torch.Tensor.new_tensor: FROM_HOST,
}

#: Operations whose result is memory and no values: nothing to do at replay.
MAKES_NO_VALUES = (aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty)

_SYNCS = (aten._local_scalar_dense, aten.item, aten.is_nonzero, aten.equal, aten.allclose)
_SHAPES = (
    aten.nonzero, aten.argwhere, aten.masked_select, aten.unique_dim, aten._unique, aten._unique2,
    aten.unique_consecutive, aten.bincount, aten.where,
)  # fmt: skip
_INDEXING = (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_)


def refusal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Why an operation cannot be recorded, or None.

    Args:
        func: the overload, such as ``aten.mm.default``.
        args, kwargs: its arguments.
    """
    packet = func.overloadpacket
    if packet in _SYNCS or torch.Tag.data_dependent_output in func.tags:
        return SYNC
    if packet in _INDEXING:
        masks = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
        return f"it is indexed by a mask: {SHAPE}" if masks else None
    if packet is aten.repeat_interleave:
        sizes_unknown = any(isinstance(a, torch.Tensor) for a in (*args[1:2], kwargs.get("repeats")))
        of_repeats = func is aten.repeat_interleave.Tensor
        if (sizes_unknown or of_repeats) and kwargs.get("output_size") is None:
            return f"{SHAPE} (pass output_size)"
        return None
    if packet is aten.where and len(args) > 1:
        return None
    if packet in _SHAPES or torch.Tag.dynamic_output_shape in func.tags:
        return SHAPE
    tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
    target = kwargs.get("device")
    devices = {t.device.type for t in tensors} | ({torch.device(target).type} if target else set())
    if len(devices) > 1 and packet in (aten.copy_, aten._to_copy, aten.to):
        return SYNC
    return None
