"""A model of random weights that cannot help remembering: for traces that are about numbers."""

from __future__ import annotations

import torch

from mamba_teach import HybridModel, ModelConfig
from mamba_teach.model.hybrid import initialize
from mamba_teach.model.mamba2 import Mamba2Mixer


def remembering_model() -> HybridModel:
    """Two Mamba2 layers, 64 tokens. Most of what it says comes out of its state.

    With usual weights a token's own input outweighs the state, and a wrong state changes nothing that
    one would notice: half of why such bugs live long. Here states fade by about 4 % per token and the
    way around them (D) is shut.
    """
    config = ModelConfig(
        vocab_size=64, hidden_size=32, pattern="MM", mamba_num_heads=4, mamba_head_dim=16,
        ssm_state_size=16,
    )  # fmt: skip
    model = HybridModel(config)
    initialize(model)
    with torch.no_grad():
        for mixer in mixers(model):
            mixer.D.zero_()
            mixer.A_log.fill_(-3.0)
            mixer.dt_bias.zero_()
    return model


def mixers(model: HybridModel) -> list[Mamba2Mixer]:
    """Its Mamba2 mixers, in layer order."""
    return [module for module in model.modules() if isinstance(module, Mamba2Mixer)]
