"""Served tokens equal those of transformers' ``generate``, which shares no code with us."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.models import NEAR_TIE, greedy_gap, random_prompt

from mamba_teach import Engine, EngineConfig, SamplingParams, load_model

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.peer

# transformers' NemotronH clamps dt from below by time_step_min in its prefill alone; so small a
# number changes nothing, and its two paths agree.
NEMOTRON_H = dict(
    vocab_size=64, hidden_size=32, ssm_state_size=16, mamba_num_heads=4, mamba_head_dim=12,
    n_groups=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=48,
    time_step_min=1e-9, initializer_range=0.3, eos_token_id=None, pad_token_id=None,
    layers_block_type=["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"],
)  # fmt: skip
MAMBA2 = dict(
    vocab_size=64, hidden_size=32, num_hidden_layers=3, num_heads=4, head_dim=16, state_size=16,
    n_groups=2, initializer_range=0.3, eos_token_id=None, pad_token_id=None, chunk_size=16,
    tie_word_embeddings=True,
)  # fmt: skip


@pytest.fixture(params=["nemotron_h", "mamba2"])
def peer(request: pytest.FixtureRequest) -> torch.nn.Module:
    torch.manual_seed(0)
    if request.param == "nemotron_h":
        config = transformers.NemotronHConfig(**NEMOTRON_H)
        return transformers.NemotronHForCausalLM(config).eval()
    return transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**MAMBA2)).eval()


def test_64_greedy_tokens(peer: torch.nn.Module, tmp_path: Path) -> None:
    peer.save_pretrained(tmp_path)
    model = load_model(tmp_path)
    prompts = [random_prompt(n, seed=n) for n in (1, 5, 17, 40)]
    expected = [
        peer.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=64, do_sample=False,
        )[0, len(prompt) :].tolist()
        for prompt in prompts
    ]  # fmt: skip
    config = EngineConfig(
        max_model_len=128, max_num_batched_tokens=16, device="cpu", enable_prefix_caching=False
    )
    engine = Engine(model, config)
    outputs = engine.generate(prompts, SamplingParams(max_tokens=64))
    for prompt, output, theirs in zip(prompts, outputs, expected):
        assert greedy_gap(model, prompt, theirs) <= NEAR_TIE
        assert list(output.token_ids) == theirs
