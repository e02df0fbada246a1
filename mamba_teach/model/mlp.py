"""The MLP of Nemotron-H: up, squared ReLU, down. No gate."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from mamba_teach.config import ModelConfig
from mamba_teach.model.linear import Linear


class MLP(nn.Module):
    """``(T, hidden) -> (T, hidden)``, token by token."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.relu(self.up_proj(hidden)).square())
