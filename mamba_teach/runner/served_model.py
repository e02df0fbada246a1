"""What the engine needs of a model: anything that answers to this can be served."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from mamba_teach.config import ModelConfig
from mamba_teach.model.metadata import LayerCache, LayerMetadata


class ServedModel(Protocol):
    """A :class:`~mamba_teach.model.hybrid.HybridModel`, or a stand-in such as the ghost.

    A model may also have ``watch_step(rows)``, which is called with the scheduled rows before every
    forward pass.

    Attributes:
        config: its sizes; the engine derives pages and groups from them.
        tokenizer: with ``encode(text).ids`` and ``decode(ids)``, or None.
        supports_checkpoints: whether prefill can keep states at positions inside a chunk.
    """

    config: ModelConfig
    tokenizer: Any
    supports_checkpoints: bool

    @property
    def device(self) -> torch.device: ...

    def place(self, device: torch.device, dtype: torch.dtype) -> ServedModel:
        """Move to a device and floating-point type; returns itself."""

    def __call__(
        self,
        input_ids: torch.Tensor,
        metadata: Sequence[LayerMetadata],
        caches: Sequence[LayerCache],
    ) -> torch.Tensor:
        """Hidden states of packed tokens; mutates the caches."""

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``(S, ...) -> (S, vocab)`` fp32."""
