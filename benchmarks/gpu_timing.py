"""Timing a workload: median microseconds, GB/s by formula, share of what a plain copy reaches.

What is timed is the kernel launches of a call, recorded through the one door they pass
(``mamba_kernels/launch.py``) and run again: a serving engine replays them from a graph, so the
argument checks before them are not part of a step. A peer's call is timed as it is, its Python
included; at small batches that is what its time is made of. ``do_bench`` clears the L2 cache before
each run, so small states are read from memory, as in a model with dozens of layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from gpu_workload_list import Workload

from mamba_kernels import launch
from mamba_kernels.backend import triton

Bench = Callable[[Callable[[], object]], float]  # a call -> its median microseconds


@dataclass
class Timing:
    """One line of the report; ``peers`` has microseconds, or why there are none."""

    kernel: str
    name: str
    microseconds: float
    bytes_moved: int
    gb_per_s: float
    share_of_copy: float
    peers: dict[str, float | str] = field(default_factory=dict)


def do_bench(call: Callable[[], object]) -> float:
    """Median microseconds of a call on the GPU."""
    milliseconds = triton.testing.do_bench(call, warmup=20, rep=80, return_mode="median")
    return 1000.0 * float(milliseconds)


def launches_of(call: Callable[[], object]) -> Callable[[], object]:
    """Calls once; returns a call that only launches the same kernels on the same tensors again."""
    recorded: list[launch.Launch] = []
    observer = recorded.append
    launch.observers.append(observer)
    try:
        call()
    finally:
        launch.observers.remove(observer)
    if not recorded:
        return call  # a torch twin

    def again() -> None:
        for event in recorded:
            event.run()

    return again


def copy_bandwidth(device: torch.device, bench: Bench = do_bench, size: int = 2**30) -> float:
    """GB/s of copying ``size`` bytes, read and written: what "memory speed" means on this device."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / bench(lambda: target.copy_(source)) / 1e3


def time_workload(
    workload: Workload, device: torch.device, copy_gb_per_s: float, bench: Bench = do_bench
) -> Timing:
    """Make a workload, time it and its peers."""
    prepared = workload.make(device)
    microseconds = bench(launches_of(prepared.call))
    gb_per_s = workload.bytes_moved / microseconds / 1e3
    timing = Timing(
        workload.kernel, workload.name, round(microseconds, 2), workload.bytes_moved,
        round(gb_per_s, 1), round(gb_per_s / copy_gb_per_s, 3),
    )  # fmt: skip
    for name, call in prepared.peers.items():
        try:
            timing.peers[name] = round(bench(call), 2)
        except ImportError as error:
            timing.peers[name] = f"not installed ({error})"
        except Exception as error:  # a peer's fault is a remark, not a result of ours
            timing.peers[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return timing
