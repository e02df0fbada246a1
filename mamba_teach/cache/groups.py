"""Groups: layers that move together.

All layers of a group share one block table: block 7 of the group is page 7 in each of its layers.
Layers can share a table only if they keep the same thing, so they are bucketed by spec; and since
every group's page 7 has to be a different piece of memory, the buckets are cut into groups of equal
size. Layers at the same *position* in different groups then use the same raw buffer, and one pool of
ids serves all groups.

Six Mamba layers and two attention layers make four groups of two::

    position    mamba 0    mamba 1    mamba 2    attention 0        raw buffer
       0        layer 0    layer 4    layer 8     layer 2           bytes of block 0, 1, 2, ...
       1        layer 1    layer 5    layer 9     layer 6           bytes of block 0, 1, 2, ...
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from mamba_teach.cache.specs import LayerSpec


@dataclass(frozen=True)
class CacheGroup:
    """Layers with one block table.

    Attributes:
        name: for people, e.g. ``"mamba 1"``.
        spec: what a page of each of its layers holds.
        layers: layer indices; the place in this tuple is the layer's position, i.e. its raw buffer.
    """

    name: str
    spec: LayerSpec
    layers: tuple[int, ...]


def make_groups(specs: dict[int, LayerSpec]) -> tuple[CacheGroup, ...]:
    """Cut layers into groups of equal specs and (but for the last of a bucket) equal size.

    The size is that of the smallest bucket, unless the largest is less than half as large again:
    then one group per bucket wastes less than cutting would.
    """
    buckets: dict[LayerSpec, list[int]] = {}
    for layer, spec in sorted(specs.items()):
        buckets.setdefault(spec, []).append(layer)
    if not buckets:
        raise ValueError("the model has no layer that keeps anything: no Mamba2 and no attention layer")
    sizes = [len(layers) for layers in buckets.values()]
    size = max(sizes) if max(sizes) < 1.5 * min(sizes) else min(sizes)
    groups: list[CacheGroup] = []
    count: Counter[str] = Counter()
    for spec, layers in buckets.items():
        for start in range(0, len(layers), size):
            name = f"{spec.kind} {count[spec.kind]}"
            count[spec.kind] += 1
            groups.append(CacheGroup(name, spec, tuple(layers[start : start + size])))
    return tuple(groups)
