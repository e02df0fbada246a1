"""The hybrid stack: embeddings, one mixer per layer as the pattern says, final norm, lm_head.

The model has no state of its own. A forward pass takes packed token ids, one metadata object and
one cache per layer; what the caches mean is the engine's business. Module names are those of
``NemotronHForCausalLM``, so that a state dict is a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from tokenizers import Tokenizer
from torch import nn

from mamba_teach.config import ModelConfig
from mamba_teach.model.attention import Attention
from mamba_teach.model.linear import Linear
from mamba_teach.model.mamba2 import Mamba2Mixer
from mamba_teach.model.metadata import LayerCache, LayerMetadata
from mamba_teach.model.mlp import MLP
from mamba_teach.model.mtp import MTPHead

MIXERS = {"M": Mamba2Mixer, "*": Attention, "-": MLP}
KEPT_IN_FP32 = (".A_log", ".D", ".dt_bias")  # exponentials magnify what 16 bits would round


class Block(nn.Module):
    """One layer: ``x + mixer(norm(x))``."""

    def __init__(self, config: ModelConfig, kind: str) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.mixer = MIXERS[kind](config)

    def forward(
        self, hidden: torch.Tensor, metadata: LayerMetadata, cache: LayerCache
    ) -> torch.Tensor:
        mixer_input = self.norm(hidden)
        if metadata is None:  # an MLP: nothing to know about the other tokens
            return hidden + self.mixer(mixer_input)
        return hidden + self.mixer(mixer_input, metadata, cache)


class Trunk(nn.Module):
    """Everything between token ids and final hidden states."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, kind) for kind in config.pattern)
        self.norm_f = nn.RMSNorm(config.hidden_size, eps=config.layer_norm_epsilon)


class HybridModel(nn.Module):
    """A causal language model of Mamba2, attention and MLP layers, with an optional MTP head.

    Attributes:
        config: its sizes.
        model: the trunk.
        lm_head: ``hidden -> vocab``; shares the embedding's storage if tied.
        mtp: the drafter, or None.
        supports_checkpoints: whether prefill can keep states at positions inside a chunk.
        tokenizer: of the checkpoint the model came from, or None; not part of the state dict.
    """

    supports_checkpoints = True

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Trunk(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embeddings.weight
        self.mtp = MTPHead(config, Block) if config.mtp_pattern else None
        self.tokenizer: Tokenizer | None = None

    def forward(
        self,
        input_ids: torch.Tensor,
        metadata: Sequence[LayerMetadata],
        caches: Sequence[LayerCache],
    ) -> torch.Tensor:
        """Final hidden states ``(T, hidden)`` of packed ``input_ids (T,)``.

        Args:
            input_ids: int64, decode rows first.
            metadata: one per layer of the pattern (further entries belong to the MTP head).
            caches: likewise; those of Mamba and attention layers are mutated.
        """
        hidden = self.model.embeddings(input_ids)
        for i, layer in enumerate(self.model.layers):
            hidden = layer(hidden, metadata[i], caches[i])
        return self.model.norm_f(hidden)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``(..., hidden) -> (..., vocab)`` fp32."""
        return self.lm_head(hidden).float()

    def place(self, device: torch.device, dtype: torch.dtype) -> HybridModel:
        """Move to a device and floating-point type, in place, but for what stays fp32."""
        for name, parameter in self.named_parameters():
            kept = torch.float32 if name.endswith(KEPT_IN_FP32) else dtype
            parameter.data = parameter.data.to(device, kept)
        return self

    @property
    def device(self) -> torch.device:
        return self.lm_head.weight.device

    def num_parameters(self) -> int:
        """Parameters, a tied embedding counted once."""
        return sum(p.numel() for p in self.parameters())


@torch.no_grad()
def initialize(model: HybridModel, seed: int = 0) -> None:
    """Random weights to train from; mutates ``model``.

    Linear layers get normal weights of variance 1 / fan-in; those that write to the residual stream
    are scaled down with depth (GPT-2's rule); A, D and dt_bias follow the Mamba2 paper: step sizes
    log-uniform in 0.001 .. 0.1, decay rates in 1 .. 16.
    """
    generator = torch.Generator().manual_seed(seed)
    depth = len(model.config.pattern)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            std = module.in_features**-0.5
            if name.endswith(("out_proj", "o_proj", "down_proj")):
                std /= math.sqrt(depth)
            module.weight.normal_(0.0, std, generator=generator)
            if module.bias is not None:
                module.bias.zero_()
        elif isinstance(module, nn.Embedding):
            module.weight.normal_(0.0, module.embedding_dim**-0.5, generator=generator)
        elif isinstance(module, Mamba2Mixer):
            width = module.config.conv_kernel
            module.conv1d.weight.uniform_(-(width**-0.5), width**-0.5, generator=generator)
            if module.conv1d.bias is not None:
                module.conv1d.bias.zero_()
            log_step = torch.empty_like(module.dt_bias)
            log_step.uniform_(math.log(1e-3), math.log(1e-1), generator=generator)
            step = log_step.exp()
            module.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))  # inverse of softplus
            module.A_log.uniform_(1.0, 16.0, generator=generator).log_()
            module.D.fill_(1.0)
