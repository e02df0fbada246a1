"""The recorder: a graph for machines without one, with a CUDA graph's manners.

While it captures, a ``TorchDispatchMode`` sees every torch operation and the launch wrapper every
kernel of ours. Each is run, its results are put into the graph's private pool, and it is noted together
with the *addresses* of what it read and wrote. Nothing else is kept: no tensor, no variable. A replay
runs the notes again on those addresses, so

* what was copied into a captured tensor is seen; a variable that was bound to another tensor is not;
* Python numbers, shapes and branches are those of the capture;
* memory that a graph reads must stay alive. A CUDA graph would read whatever lies there by then; the
  recorder notices and says so.

What a graph cannot record is refused in the middle of the capture, by name: reading a value on the host,
shapes that depend on values, tensors made of Python numbers, kernels that would have to be compiled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from mamba_kernels.launch import Launch, Variant, run_launches_with, variant_of
from mamba_teach.runner.graph_interface import GraphCaptureError, GraphReplayError
from mamba_teach.runner.graph_pool import GraphPool, storage_at
from mamba_teach.runner.graph_rules import HOST_READS, MAKES_NO_VALUES, refusal


@dataclasses.dataclass(frozen=True)
class GraphNode:
    """One recorded operation.

    Attributes:
        name: of the torch operation or kernel.
        kind: "op" or "kernel".
        reads: addresses of the tensors it was given.
        writes: addresses of the tensors it made or, in place, of those it was given.
        shape: of the first tensor that it made; None if it made none.
        run: does it again.
    """

    name: str
    kind: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    shape: tuple[int, ...] | None
    run: Callable[[], None] = dataclasses.field(repr=False)


class RecordedGraph:
    """See :class:`~mamba_teach.runner.graph_interface.Graph`.

    Attributes:
        nodes: what was recorded, in order.
        inputs: address -> bytes of all memory it uses that is not its own.
        pool: its own memory.
        warmed_variants: kernel variants that are compiled; a capture that meets another one is an
            error. None does not check (torch operations need no compiling).
        poison_empty: fill uninitialised results with NaN at every replay, so that whoever reads what
            nobody wrote shows it.
    """

    def __init__(
        self,
        device: torch.device | str,
        pool: GraphPool | None = None,
        warmed_variants: set[Variant] | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.pool = GraphPool(self.device) if pool is None else pool
        self.warmed_variants = warmed_variants
        self.poison_empty = False
        self.nodes: list[GraphNode] = []
        self.inputs: dict[int, int] = {}
        self._alive: dict[int, StorageWeakRef] = {}  # by address, of the inputs
        self._storages: dict[int, torch.UntypedStorage] = {}  # by address, without owning it
        self._state = "empty"

    @contextmanager
    def capture(self) -> Iterator[None]:
        """See :class:`~mamba_teach.runner.graph_interface.Graph`."""
        if self._state != "empty":
            raise GraphCaptureError("a graph is captured once; make another one")
        self._state = "broken"  # until it ends well
        operations, host = _Operations(self), _HostReads()

        def run(event: Launch) -> None:
            operations.paused = host.paused = True  # what a kernel does inside is its own affair
            try:
                self._record_launch(event)
            finally:
                operations.paused = host.paused = False

        with host, operations, run_launches_with(run):
            yield
        self._state = "captured"

    @torch.inference_mode()
    def replay(self) -> None:
        """See :class:`~mamba_teach.runner.graph_interface.Graph`."""
        if self._state != "captured":
            raise GraphReplayError(f"there is nothing to replay: the graph is {self._state}")
        for address, holder in self._alive.items():
            if holder.expired():
                user = next(n.name for n in self.nodes if address in (*n.reads, *n.writes))
                raise GraphReplayError(
                    f"a tensor that {user} used at capture has been freed ({self.inputs[address]} "
                    f"bytes): keep it, and copy new values into it"
                )
        for node in self.nodes:
            node.run()

    # Recording ----------------------------------------------------------------------------------

    def record_operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation and note it; returns its result, in the graph's memory."""
        if why := refusal(func, args, kwargs):
            raise GraphCaptureError(f"{func} during capture: {why}")
        frozen_args, frozen_kwargs = map_tensors(self._freeze, (args, kwargs))
        if func is torch.ops.aten.copy_.default and is_host_number(args[1]):
            # As in x[0] = 5.0: frozen by value, like any Python number.
            address = args[1].untyped_storage().data_ptr()
            self._alive.pop(address, None)
            self.inputs.pop(address, None)
            frozen_args = (frozen_args[0], args[1].clone(), *frozen_args[2:])
        given = tensors_in((args, kwargs))
        owners = {t.untyped_storage()._cdata for t in given}
        made: list[torch.Tensor] = []

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.untyped_storage()._cdata in owners:
                return tensor  # a view, or the argument itself
            made.append(self.pool.place_like(tensor))
            return made[-1]

        result = map_tensors(keep, func(*args, **kwargs))
        in_place = func._schema.is_mutable and torch.Tag.inplace_view not in func.tags
        if made or in_place:
            outputs = [self._freeze(tensor) for tensor in made]
            written = made or tensors_in(
                [
                    args[i] if i < len(args) else kwargs.get(argument.name)
                    for i, argument in enumerate(func._schema.arguments)
                    if argument.is_write
                ]
            )
            run = self._operation_again(func, frozen_args, frozen_kwargs, outputs)
            self._note(str(func), "op", given, written, made, run)
        return result

    def _operation_again(
        self, func: Any, args: Any, kwargs: Any, outputs: list[torch.Tensor]
    ) -> Callable[[], None]:
        if func.overloadpacket in MAKES_NO_VALUES:

            def poison() -> None:
                for output in outputs if self.poison_empty else ():
                    if output.is_floating_point():
                        output.fill_(torch.nan)

            return poison

        def again() -> None:
            result = func(*args, **kwargs)
            for output, value in zip(outputs, tensors_in(result) if outputs else (), strict=True):
                output.copy_(value)

        return again

    def _record_launch(self, event: Launch) -> None:
        if self.warmed_variants is not None:
            variant = variant_of(event)
            if variant not in self.warmed_variants:
                raise GraphCaptureError(
                    f"{event.kernel_name} during capture: this variant of the kernel would be "
                    f"compiled now, which cannot be recorded; run it once before (warm-up). {variant}"
                )
        args, kwargs = map_tensors(self._freeze, (event.args, event.kwargs))
        again = dataclasses.replace(event, args=args, kwargs=kwargs)
        event.run()
        # A kernel does not say which of its tensors it writes.
        given = tensors_in((event.args, event.kwargs))
        self._note(event.kernel_name, "kernel", given, given, [], again.run)

    def _note(
        self,
        name: str,
        kind: str,
        given: list[torch.Tensor],
        written: list[torch.Tensor],
        made: list[torch.Tensor],
        run: Callable[[], None],
    ) -> None:
        reads = tuple(t.untyped_storage().data_ptr() for t in given)
        writes = tuple(t.untyped_storage().data_ptr() for t in written)
        shape = tuple(made[0].shape) if made else None
        self.nodes.append(GraphNode(name, kind, reads, writes, shape, run))

    def _freeze(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory as ``tensor``, by its address, without keeping it alive."""
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        is_ours = self.pool.owns(address) or storage.nbytes() == 0
        if not is_ours and address not in self._alive:
            self._alive[address] = StorageWeakRef(storage)
            self.inputs[address] = storage.nbytes()
        known = self._storages.get(address)
        if known is None or known.nbytes() < storage.nbytes():
            known = storage_at(address, tensor.device, storage.nbytes())
            self._storages[address] = known
        frozen = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return frozen.set_(known, tensor.storage_offset(), tensor.shape, tensor.stride())


class _Operations(TorchDispatchMode):
    """Hands every torch operation to the graph."""

    def __init__(self, graph: RecordedGraph) -> None:
        super().__init__()
        self.graph = graph
        self.paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        return self.graph.record_operation(func, args, kwargs)


class _HostReads(TorchFunctionMode):
    """Refuses what brings values to the host, or from it, without being a torch operation."""

    paused = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.paused and func in HOST_READS:
            raise GraphCaptureError(f"{func.__name__} during capture: {HOST_READS[func]}")
        return func(*args, **(kwargs or {}))


def is_host_number(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a single number of its own on the host, not a view into something."""
    size = tensor.untyped_storage().nbytes()
    return tensor.dim() == 0 and tensor.device.type == "cpu" and size == tensor.element_size()


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """``value`` with every tensor in it replaced; looks into tuples, lists, dicts and dataclasses."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, tuple | list):
        items = [map_tensors(function, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {key: map_tensors(function, item) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = {
            field.name: map_tensors(function, getattr(value, field.name))
            for field in dataclasses.fields(value)
        }
        return dataclasses.replace(value, **changed)
    return value


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors in ``value``, in order."""
    found: list[torch.Tensor] = []

    def add(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(add, value)
    return found
