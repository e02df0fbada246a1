"""The model of the CPU benchmark: NemotronH at width 512, random weights, in a folder for all sides."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

import torch  # noqa: E402

from mamba_teach import HybridModel, ModelConfig  # noqa: E402
from mamba_teach.model.checkpoint import save_model  # noqa: E402
from mamba_teach.model.hybrid import initialize  # noqa: E402

CONFIG = ModelConfig(
    vocab_size=8192, hidden_size=512, pattern="MM*-MM*-", mamba_num_heads=16, mamba_head_dim=64,
    ssm_state_size=128, n_groups=2, chunk_size=128, num_attention_heads=8, num_key_value_heads=2,
    head_dim=64, intermediate_size=1024,
)  # fmt: skip


def write_model(folder: Path, config: ModelConfig = CONFIG, seed: int = 0) -> Path:
    """Save a model that says something definite, and says it because of its states.

    Logits and what mixers add to the residual stream are scaled up: with an initialisation for training
    the best tokens lie so close together that rounding decides between them.
    """
    model = HybridModel(config)
    initialize(model, seed)
    with torch.no_grad():
        model.lm_head.weight.mul_(4.0)
        for name, parameter in model.named_parameters():
            if name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight")):
                parameter.mul_(3.0)
    save_model(model, folder)
    return folder


def random_prompts(
    rows: int, length: int, seed: int, vocab: int = CONFIG.vocab_size
) -> list[list[int]]:
    """Prompts that share no prefix but by chance."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab, (rows, length), generator=generator).tolist()
