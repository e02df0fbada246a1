"""Pages: raw bytes, seen as keys and values by one layer and as a state by another.

The pool hands out block ids without asking what for. That works because memory is laid out by
position, not by layer: every position has one raw buffer of ``num_blocks`` equal pages, and each layer
at that position, whatever its kind, looks at the same bytes through tensors of its own shape::

    raw buffer 0   | page 0 (null) | page 1        | page 2          | page 3 ...
    layer 0 (M)    |               | conv | ssm |//|                 |
    layer 2 (*)    |               |               | keys | values   |

A view's slot stride is the page, larger than the tensor itself, so every kernel takes strided pools.
"""

from __future__ import annotations

import math

import torch

from mamba_kernels import ReplayRing
from mamba_teach.cache.groups import CacheGroup
from mamba_teach.cache.specs import LayerSpec, MambaSpec, RingSpec
from mamba_teach.model.metadata import AttentionCache, LayerCache, MambaCache


def allocate_pages(
    groups: tuple[CacheGroup, ...],
    num_layers: int,
    num_blocks: int,
    device: torch.device,
    max_num_seqs: int = 0,
) -> list[LayerCache]:
    """Allocate one raw buffer per position and give every layer its views of it.

    Args:
        groups: which layers there are, and at which positions.
        num_layers: of the model; layers that keep nothing get None.
        num_blocks: pages per buffer, the null page included.
        max_num_seqs: requests that may need a ring of inputs, where a spec has one.

    Returns:
        One cache per layer, in layer order, zero-filled.

    Raises:
        MemoryError: the pages do not fit into memory; says how large they are.
    """
    page_size = groups[0].spec.page_size_bytes
    positions = max(len(group.layers) for group in groups)
    try:
        raw = [
            torch.zeros(num_blocks, page_size, dtype=torch.uint8, device=device)
            for _ in range(positions)
        ]
    except RuntimeError:  # torch's out-of-memory errors, of every device
        raise MemoryError(
            f"the cache does not fit into the memory of {device}: {num_blocks} blocks of {page_size} "
            f"bytes in {positions} layers of a group are {num_blocks * page_size * positions / 1e9:.1f} "
            f"GB; lower max_num_seqs, max_model_len or num_blocks"
        ) from None
    caches: list[LayerCache] = [None] * num_layers
    for group in groups:
        for position, layer in enumerate(group.layers):
            first, second = page_views(raw[position], group.spec)
            if isinstance(group.spec, MambaSpec):
                ring = allocate_ring(group.spec.ring, max_num_seqs, device)
                caches[layer] = MambaCache(first, second, ring)
            else:
                caches[layer] = AttentionCache(first, second)
    return caches


def allocate_ring(
    spec: RingSpec | None, max_num_seqs: int, device: torch.device
) -> ReplayRing | None:
    """A layer's ring of inputs: a row per request, and the null row in front."""
    if spec is None:
        return None
    x, B, dt, log_decay = (
        torch.zeros(1 + max_num_seqs, *part.shape, dtype=getattr(torch, part.dtype), device=device)
        for part in spec.tensors
    )
    return ReplayRing(x, B, dt, log_decay, spec.capacity)


def page_views(raw: torch.Tensor, spec: LayerSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """The two tensors of a spec over ``raw (num_blocks, page bytes) uint8``; no copy."""
    views, offset = [], 0
    for tensor in spec.tensors:
        dtype = getattr(torch, tensor.dtype)
        flat = raw[:, offset : offset + tensor.num_bytes].view(dtype)  # (blocks, numel + alignment)
        numel = torch.Size(tensor.shape).numel()
        views.append(flat[:, :numel].unflatten(1, tensor.shape))
        offset += tensor.num_bytes
    return views[0], views[1]


def poison_blocks(caches: list[LayerCache], blocks: list[int]) -> None:
    """Fill blocks with NaN in every layer: from now on, whoever reads one shows it."""
    for cache in caches:
        for pool in () if cache is None else cache.pools:
            pool[blocks] = math.nan
