"""Toy models, and what they would say if nobody served them cleverly."""

from __future__ import annotations

from functools import cache

import torch

from mamba_teach import HybridModel, ModelConfig
from mamba_teach.model.hybrid import initialize
from mamba_teach.model.metadata import uncached_step

NEAR_TIE = 1e-4  # logits closer than this may be ordered either way by rounding


def toy_config(pattern: str = "M*M-", **changes: object) -> ModelConfig:
    """Hidden 32, inner 64, 4 heads x 16, state 16, 2 groups: a Mamba page is 16 tokens of attention."""
    sizes: dict[str, object] = dict(
        vocab_size=64, hidden_size=32, pattern=pattern, mamba_num_heads=4, mamba_head_dim=16,
        ssm_state_size=16, n_groups=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        intermediate_size=48,
    )  # fmt: skip
    return ModelConfig(**(sizes | changes))


@cache
def toy_model(pattern: str = "M*M-", seed: int = 0) -> HybridModel:
    """Random weights with a spread of logits that makes near-ties rare."""
    model = HybridModel(toy_config(pattern))
    initialize(model, seed)
    with torch.no_grad():
        model.lm_head.weight.mul_(4.0)
        for name, parameter in model.named_parameters():
            if name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight")):
                parameter.mul_(3.0)  # states and keys must matter for what is said
    return model


@torch.no_grad()
def logits_of(model: HybridModel, token_ids: list[int]) -> torch.Tensor:
    """``(len, vocab)`` logits of a text in one go, without any cache."""
    metadata, caches = uncached_step(model.config, [len(token_ids)])
    return model.compute_logits(model(torch.tensor(token_ids), metadata, caches))


def greedy_gap(model: HybridModel, prompt: list[int], output: list[int]) -> float:
    """By how much the worst token of ``output`` missed being the most likely one.

    0 for an exact greedy continuation; anything above :data:`NEAR_TIE` is a wrong token.
    """
    logits = logits_of(model, [*prompt, *output])[len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
    return float((logits.max(-1).values - chosen).max())


def random_prompt(length: int, seed: int, vocab: int = 64) -> list[int]:
    """The same tokens for the same seed, on every machine."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab, (length,), generator=generator).tolist()
