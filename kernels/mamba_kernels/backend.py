"""Which implementation runs, and in which mode Triton runs: the only place that decides either.

Every public function of this package takes ``backend=None`` and asks :func:`choose_backend`.
``None`` means "whatever suits the tensor's device": the torch twin on a CPU, the Triton kernel on a
GPU. Tests pass a name to force one.

Triton itself has two modes, and it chooses between them for good when it is *imported*: with
``TRITON_INTERPRET=1`` in the environment each kernel is run step by step in numpy, on the CPU;
without it each kernel is compiled for a GPU. Setting the variable later half works, which is worse
than not at all (the kernels are interpreted, Triton's own helpers such as ``tl.sum`` are not). So
this module sets the variable, before it imports triton, and nobody else does:

===================================  =====================================================
no GPU in the machine                the interpreter: kernels can be stepped through and tested
a GPU                                the compiler
``MAMBA_KERNELS_TRITON=compile``     the compiler in any case (``kernels/aot.py`` needs no GPU)
``MAMBA_KERNELS_TRITON=interpret``   the interpreter in any case
===================================  =====================================================

If somebody imported triton before us in the other mode, the package still imports and the torch
twins still work; asking for a Triton kernel is then an error that says what to do. The same holds
where triton does not exist (macOS, Windows): ``triton`` and ``tl`` are None, and ``jit`` leaves a
kernel as the plain function it was, never to be called. Kernel files therefore import all three
from here and begin with ``from __future__ import annotations``, so that ``tl.constexpr`` in a
signature is a string that nobody evaluates.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import triton
    import triton.language as tl
else:
    triton = tl = None

BACKENDS = ("torch", "triton")
_override: str | None = None
_SWITCH = "MAMBA_KERNELS_TRITON"


def _wanted_mode() -> str:
    """``"interpret"``, ``"compile"`` (no GPU, for `aot.py`) or ``"gpu"``."""
    switch = os.environ.get(_SWITCH, "")
    if switch not in ("", "compile", "interpret"):
        raise ValueError(f"{_SWITCH}={switch!r}: 'compile', 'interpret' or unset")
    if switch:
        return switch if switch == "interpret" or not torch.cuda.is_available() else "gpu"
    return "gpu" if torch.cuda.is_available() else "interpret"


def _import_triton() -> str:
    """Import triton in the wanted mode; returns the mode that came out."""
    global triton, tl
    wanted = _wanted_mode()
    early = sys.modules.get("triton") is not None
    if not early:
        os.environ["TRITON_INTERPRET"] = "1" if wanted == "interpret" else "0"
    try:
        import triton as triton_module
        import triton.language as language
    except ImportError:
        return "absent"
    triton, tl = triton_module, language
    # Triton's own helpers were made at its import: their type tells the mode it was imported in.
    interpreted = type(tl.sigmoid).__name__ == "InterpretedFunction"
    if interpreted != (wanted == "interpret"):
        return "conflict"
    if early:  # the variable may have been changed since; our kernels must follow the helpers
        os.environ["TRITON_INTERPRET"] = "1" if interpreted else "0"
    return wanted


_MODE = _import_triton()


def triton_mode() -> str:
    """How Triton kernels run in this process, for display.

    ``"gpu"``: compiled and launched. ``"interpret"``: on the CPU, step by step. ``"compile"``: can
    be compiled, not launched. ``"absent"``: triton is not installed. ``"conflict"``: triton had
    been imported in the wrong mode before this package.
    """
    return _MODE


def jit(function: Any = None, **options: Any) -> Any:
    """``triton.jit``, or nothing at all where Triton cannot be used. With or without options."""
    if function is None:
        return lambda f: jit(f, **options)
    if _MODE in ("absent", "conflict"):
        return function
    return triton.jit(function, **options)


@contextmanager
def override_backend(name: str) -> Iterator[None]:
    """``with override_backend("triton"): ...``: for tests that run a whole engine on one backend.

    Calls that name a backend themselves are not affected.
    """
    global _override
    previous, _override = _override, name
    try:
        yield
    finally:
        _override = previous


def choose_backend(tensor: torch.Tensor, requested: str | None = None) -> str:
    """``"torch"`` or ``"triton"`` for a call on ``tensor``.

    Args:
        tensor: the call's main input. A tensor that needs a gradient gets the torch twin (the
            kernels are for inference and have no backward).
        requested: force one of :data:`BACKENDS`; None chooses by device.

    Raises:
        ValueError: no such backend, or Triton asked for where its mode does not fit the device.
        RuntimeError: Triton is needed and cannot be used in this process; the message says why.
    """
    requested = requested or _override
    if requested is None:
        # ROCm devices are "cuda" to torch, too. The interpreter is never chosen unasked.
        if not tensor.is_cuda or _MODE in ("absent", "interpret"):
            return "torch"
        if tensor.requires_grad and torch.is_grad_enabled():
            return "torch"
    elif requested == "torch":
        return "torch"
    elif requested != "triton":
        raise ValueError(f"backend={requested!r}: one of {', '.join(BACKENDS)}, or None")

    if _MODE == "absent":
        raise RuntimeError(
            "backend='triton': triton is not installed (it has wheels for Linux only); "
            "backend=None runs the torch implementation"
        )
    if _MODE == "conflict":
        mode, value = ("interpreted", 1) if _wanted_mode() == "interpret" else ("compiled", 0)
        raise RuntimeError(
            f"triton was imported before mamba_kernels in the wrong mode: on this machine kernels "
            f"must be {mode}. Import mamba_kernels first, or start Python with "
            f"TRITON_INTERPRET={value}, or pass backend='torch'"
        )
    if tensor.is_cuda == (_MODE == "interpret"):
        raise ValueError(
            f"backend='triton' on a {tensor.device} tensor in mode {_MODE!r}: interpreted kernels "
            f"work on CPU tensors, compiled ones on GPU tensors (environment variable: {_SWITCH})"
        )
    return "triton"
