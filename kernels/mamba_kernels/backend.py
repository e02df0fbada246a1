"""Which implementation runs: the only place that decides.

Every public function of this package takes ``backend=None`` and asks :func:`choose_backend`.
``None`` means "whatever suits the tensors' device"; tests pass a name to force one.
"""

from __future__ import annotations

import torch

AVAILABLE_BACKENDS = ("torch",)


def choose_backend(tensor: torch.Tensor, requested: str | None = None) -> str:
    """The backend for a call on ``tensor``.

    Raises:
        ValueError: ``requested`` is not one of :data:`AVAILABLE_BACKENDS`.
    """
    if requested is None:
        return "torch"
    if requested not in AVAILABLE_BACKENDS:
        raise ValueError(
            f"backend={requested!r} is not available for tensors on {tensor.device}; "
            f"choose one of {', '.join(AVAILABLE_BACKENDS)} or None"
        )
    return requested
