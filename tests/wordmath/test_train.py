"""Training: it learns, it repeats itself, and `make train` leaves a checkpoint that serves."""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from mamba_teach import load_model
from mamba_teach.config import ModelConfig
from mamba_teach.wordmath import model_card, train
from mamba_teach.wordmath.make_tokenizer import build_tokenizer
from mamba_teach.wordmath.problems import training_problems
from mamba_teach.wordmath.train import Round, TrainingSettings, pack_sequences

TINY = ModelConfig(
    vocab_size=768, hidden_size=32, pattern="M*-", mamba_num_heads=4, mamba_head_dim=8,
    ssm_state_size=8, n_groups=2, num_attention_heads=2, num_key_value_heads=2, head_dim=32,
    intermediate_size=32, mtp_pattern="*-", bos_token_id=0, eos_token_ids=(0,),
)  # fmt: skip
SHORT = TrainingSettings(
    rounds=(Round(12, 1e-2), Round(4, 5e-3)), sequences_per_step=2, sequence_length=96,
    warmup_steps=3,
)  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return build_tokenizer()


def test_sequences_begin_with_a_fresh_problem_and_flag_the_solutions(tokenizer: Tokenizer) -> None:
    for ids, in_solution in islice(pack_sequences(training_problems(0), tokenizer, 200), 20):
        assert (len(ids), len(in_solution)) == (201, 201)
        assert ids[0] == 0
        text = tokenizer.decode(ids, skip_special_tokens=False)
        assert text.startswith("<|end|>Q: ")
        solution = tokenizer.decode([i for i, flag in zip(ids, in_solution) if flag])
        assert "Q:" not in solution and "=" in solution


def test_it_learns_and_the_same_seed_gives_the_same_weights(tokenizer: Tokenizer) -> None:
    losses, weights = [], []
    for _ in range(2):
        model = train.HybridModel(TINY)
        train.initialize(model, SHORT.seed)
        losses.append(list(train.train_round(model, tokenizer, SHORT, 0)))
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert losses[0] == losses[1]
    assert torch.equal(*weights)
    assert losses[0][0] == pytest.approx(6.64, abs=0.7)  # log(768): it knows nothing yet
    assert losses[0][-1] < losses[0][0] - 1.0


def test_make_train_end_to_end(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "WORDMATH_MODEL", TINY)
    monkeypatch.setattr(train, "TrainingSettings", lambda: SHORT)
    monkeypatch.setattr(model_card, "NUM_PROBLEMS", 2)
    monkeypatch.setattr(sys, "argv", ["train", "--folder", str(tmp_path)])
    train.main()
    model = load_model(tmp_path)
    assert model.config == TINY
    assert model.mtp is not None and model.tokenizer is not None
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "12 (peak 0.01) and 4 (peak 0.005)" in card
    assert "Measured on 2 held-out problems" in card
