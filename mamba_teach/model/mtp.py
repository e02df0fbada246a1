"""The MTP head (multi-token prediction): a small drafter that rides on the model's hidden states.

At position ``i`` it joins the embedding of token ``i`` with the hidden state of position ``i - 1``,
runs an attention layer and an MLP, and guesses token ``i + 1`` before the model itself has seen
token ``i``. Fed with its own hidden state it goes on guessing, one token at a time.

Entry ``i`` of its key-value cache depends on tokens up to ``i`` and on the hidden state at ``i - 1``,
that is, on nothing behind token ``i``. So whatever covers the tokens of a cached block also covers the
drafter's entries in it. Names follow Nemotron-H's ``mtp.layers.*`` (transformers ignores them on load).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from mamba_teach.config import ModelConfig
from mamba_teach.model.metadata import LayerCache, LayerMetadata


class MTPHead(nn.Module):
    """``(embedding of token i, hidden state of i - 1) -> hidden state`` that predicts ``i + 1``."""

    def __init__(
        self, config: ModelConfig, make_block: Callable[[ModelConfig, str], nn.Module]
    ) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.layer_norm_epsilon
        self.layers = nn.ModuleList(make_block(config, kind) for kind in config.mtp_pattern)
        # Nemotron-H keeps the drafter's own parts inside its first and last layer.
        first: Any = self.layers[0]
        last: Any = self.layers[-1]
        first.enorm = nn.RMSNorm(size, eps=eps)
        first.hnorm = nn.RMSNorm(size, eps=eps)
        first.eh_proj = nn.Linear(2 * size, size, bias=False)
        last.final_layernorm = nn.RMSNorm(size, eps=eps)

    def forward(
        self,
        embedded: torch.Tensor,
        previous_hidden: torch.Tensor,
        metadata: Sequence[LayerMetadata],
        caches: Sequence[LayerCache],
    ) -> torch.Tensor:
        """Hidden states ``(T, hidden)`` that predict the token after each.

        Args:
            embedded: ``(T, hidden)`` embeddings of the packed tokens.
            previous_hidden: ``(T, hidden)`` hidden state one position before each token, the
                model's or the drafter's own; zeros where it is unknown.
            metadata, caches: one per layer of the head.
        """
        first: Any = self.layers[0]
        last: Any = self.layers[-1]
        joined = torch.cat([first.enorm(embedded), first.hnorm(previous_hidden)], dim=-1)
        hidden = first.eh_proj(joined)
        for i, layer in enumerate(self.layers):
            hidden = layer(hidden, metadata[i], caches[i])
        return last.final_layernorm(hidden)
