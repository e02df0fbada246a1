"""The one door through which every Triton kernel is launched.

A kernel call is three things: the kernel, a grid, its arguments. Having them pass one function buys

* **recording**: a graph recorder needs to know what ran, on which tensors, in which order, and
  interpreted kernels are invisible to torch's own hooks (:func:`run_launches_with`);
* **counting**: "three launches per layer" is a claim that a test can check
  (:func:`count_launches`);
* **warming up**: Triton compiles a kernel anew for each *variant*: its constexpr values, the dtypes
  of its pointers, and which pointers and integers are multiples of 16 (or the integer 1). A graph
  capture must not meet a variant for the first time, so the warm-up collects what a model launches
  and a test compares (:func:`collect_variants`).

:class:`AotCase` names a variant without any tensors, for compiling where there is no GPU.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from mamba_kernels.backend import triton


def cdiv(n: int, block: int) -> int:
    """How many blocks cover ``n`` things."""
    return -(-n // block)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least ``n``; Triton's blocks must be one."""
    return 1 << max(n - 1, 0).bit_length()


@dataclass(frozen=True)
class Launch:
    """One kernel launch; ``run()`` does it (again) without telling the observers."""

    kernel_name: str
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    kernel: Any = field(repr=False)

    def run(self) -> None:
        self.kernel[self.grid](*self.args, **self.kwargs)


@dataclass(frozen=True)
class Variant:
    """What Triton compiles separately.

    Attributes:
        kernel_name: the kernel's function name.
        constexprs: ``(name, value)`` of every compile-time argument, and warps and stages.
        types: ``(name, type)`` of the rest: a pointer's dtype (``:16`` if aligned to 16 bytes), or
            an integer's class (``1``, ``int:16``, ``int``).
    """

    kernel_name: str
    constexprs: tuple[tuple[str, Any], ...]
    types: tuple[tuple[str, str], ...]


#: Called with each :class:`Launch` just before it runs, in order.
observers: list[Callable[[Launch], None]] = []
_runners: list[Callable[[Launch], None]] = [Launch.run]


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
    """Run ``kernel`` over ``grid``. A grid with a zero in it is no work, hence no launch."""
    if 0 in grid:
        return
    event = Launch(kernel.fn.__name__, tuple(grid), args, kwargs, kernel)
    for observer in observers:
        observer(event)
    _runners[-1](event)


@contextmanager
def run_launches_with(runner: Callable[[Launch], None]) -> Iterator[None]:
    """``with run_launches_with(runner): ...``: each launch inside is given to ``runner``, to run."""
    _runners.append(runner)
    try:
        yield
    finally:
        _runners.pop()


@contextmanager
def _observing(observer: Callable[[Launch], None]) -> Iterator[None]:
    observers.append(observer)
    try:
        yield
    finally:
        observers.remove(observer)


@dataclass
class LaunchCount:
    """Kernel name -> number of launches, in order of first appearance."""

    by_kernel: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.by_kernel.values())


@contextmanager
def count_launches() -> Iterator[LaunchCount]:
    """``with count_launches() as count: ...; count.total``"""
    count = LaunchCount()

    def add(event: Launch) -> None:
        count.by_kernel[event.kernel_name] = count.by_kernel.get(event.kernel_name, 0) + 1

    with _observing(add):
        yield count


@contextmanager
def collect_variants() -> Iterator[set[Variant]]:
    """``with collect_variants() as variants: ...``: the set of variants launched inside."""
    variants: set[Variant] = set()
    with _observing(lambda event: variants.add(variant_of(event))):
        yield variants


@functools.cache
def _parameters(function: Any) -> tuple[tuple[str, bool], ...]:
    """``(name, is constexpr)`` of a kernel's parameters."""
    parameters = inspect.signature(function).parameters.values()
    return tuple((p.name, "constexpr" in str(p.annotation)) for p in parameters)


def variant_of(event: Launch) -> Variant:
    """The variant that this launch needs."""
    parameters = _parameters(event.kernel.fn)
    values = dict(zip((name for name, _ in parameters), event.args)) | event.kwargs
    unspecialised = _do_not_specialize(event.kernel)
    constexprs, types = [], []
    for name, is_constexpr in parameters:
        value = values.pop(name)
        if is_constexpr:
            constexprs.append((name, value))
        else:
            types.append((name, _type_of(value, name in unspecialised)))
    constexprs += sorted(values.items())  # what is left: num_warps, num_stages
    return Variant(event.kernel_name, tuple(constexprs), tuple(types))


def _do_not_specialize(kernel: Any) -> list[str]:
    options = getattr(kernel, "kwargs", None)  # of an interpreted function
    if options is None:
        options = {"do_not_specialize": kernel.do_not_specialize}
    return list(options.get("do_not_specialize") or [])


def _type_of(value: Any, unspecialised: bool) -> str:
    if isinstance(value, torch.Tensor):
        aligned = value.data_ptr() % 16 == 0 and not unspecialised
        return f"*{value.dtype}".replace("torch.", "") + (":16" if aligned else "")
    if value is None or isinstance(value, float):
        return type(value).__name__
    if unspecialised:
        return "int"
    return "1" if value == 1 else "int:16" if value % 16 == 0 else "int"


@functools.cache
def address_table(addresses: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Addresses on the device, made once: copying them there is not for every step, and a captured
    graph must find its table where it was. So nothing is evicted; a table is a few hundred bytes.
    """
    return torch.tensor(addresses, dtype=torch.int64, device=device)


@dataclass(frozen=True)
class AotCase:
    """One variant to compile ahead of time, described without tensors.

    Each kernel file has ``aot_cases() -> list[AotCase]`` with the variants of real models.

    Attributes:
        kernel: the ``@jit`` function.
        name: which variant it is, for the report.
        signature: argument -> type, e.g. ``{"x_ptr": "*bf16", "stride_x": "i32"}``; what is in
            ``constexprs`` need not be here.
        constexprs: values of the constexpr arguments, and 1 for strides of 1 (as a launch has it).
        num_warps, num_stages: of the configuration.
        aligned: integer arguments that are multiples of 16. Pointers always count as aligned.
    """

    kernel: Any
    name: str
    signature: dict[str, str]
    constexprs: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    aligned: tuple[str, ...] = ()

    def source(self) -> Any:
        """For ``triton.compile(case.source(), target=..., options=case.options())``."""
        names = [name for name, _ in _parameters(self.kernel.fn)]
        signature = {n: "constexpr" if n in self.constexprs else self.signature[n] for n in names}
        attrs = {
            (position,): [["tt.divisibility", 16]]
            for position, name in enumerate(names)
            if signature[name].startswith("*") or name in self.aligned
        }
        constexprs = {(names.index(name),): value for name, value in self.constexprs.items()}
        return triton.compiler.ASTSource(self.kernel, signature, constexprs, attrs)

    def options(self) -> dict[str, Any]:
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


def aot_case(
    kernel: Any, name: str, pointers: dict[str, str], constexprs: dict[str, Any],
    unit_strides: tuple[str, ...] = (), floats: tuple[str, ...] = (), num_warps: int = 4,
    num_stages: int = 3,
) -> AotCase:  # fmt: skip
    """An :class:`AotCase` with the usual conventions filled in.

    Args:
        pointers: type of each pointer argument, such as ``"*bf16"``.
        unit_strides: strides that are 1; every other ``stride_...`` is a multiple of 16.
        floats: fp32 scalars. What is left are 32-bit integers.
    """
    signature, aligned = dict(pointers), []
    for parameter, is_constexpr in _parameters(kernel.fn):
        if is_constexpr or parameter in pointers:
            continue
        signature[parameter] = "fp32" if parameter in floats else "i32"
        if parameter.startswith("stride_") and parameter not in unit_strides:
            aligned.append(parameter)
    constexprs = constexprs | dict.fromkeys(unit_strides, 1)
    return AotCase(kernel, name, signature, constexprs, num_warps, num_stages, tuple(aligned))
