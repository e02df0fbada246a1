"""The model card: how a checkpoint was trained, and what it was measured to do."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

import torch

from mamba_teach.config import EngineConfig
from mamba_teach.engine import Engine
from mamba_teach.model.checkpoint import load_model
from mamba_teach.wordmath.evaluate import evaluate
from mamba_teach.wordmath.problems import held_out_problems
from mamba_teach.wordmath.train import TrainingSettings, teacher_forced_accuracy

NUM_PROBLEMS = 500


@dataclass(frozen=True)
class Measured:
    """What :func:`measure` found, on held-out problems.

    Attributes:
        few_shot, zero_shot: share of right final answers with and without the worked examples.
        mtp_agreement: share of solution tokens at which the MTP head's guess, made one token early,
            is the trunk's choice.
    """

    num_parameters: int
    few_shot: float
    zero_shot: float
    mtp_agreement: float


def measure(folder: Path) -> Measured:
    """Load the checkpoint as a user would and serve held-out problems with it."""
    model = load_model(folder)
    few_shot, zero_shot = (
        evaluate(Engine(model, EngineConfig()), NUM_PROBLEMS, few_shot=few, progress=True).accuracy
        for few in (True, False)
    )
    assert model.tokenizer is not None
    problems = held_out_problems(NUM_PROBLEMS)
    _, agreement = teacher_forced_accuracy(model, model.tokenizer, problems)
    return Measured(model.num_parameters(), few_shot, zero_shot, agreement)


def write_card(
    folder: Path, settings: TrainingSettings, minutes: float, measured: Measured
) -> None:
    """Write ``README.md`` into the checkpoint's folder."""
    rounds = " and ".join(f"{r.steps} (peak {r.learning_rate:g})" for r in settings.rounds)
    config = load_model(folder).config
    card = f"""# wordmath: a hybrid Mamba2 model that solves word problems

{measured.num_parameters / 1e6:.2f} million parameters, layers `{config.pattern}` (`M` Mamba2, `*` attention, `-` MLP) and an MTP
head `{config.mtp_pattern}`. It reads a story with numbers and answers in steps: `48+7=55;55-9=46 =46`. It knows nothing else.
transformers loads this folder as `NemotronHForCausalLM` (without the MTP head).

| what | value |
| --- | --- |
| hidden size | {config.hidden_size} |
| Mamba2 heads x head dim, state, groups | {config.mamba_num_heads} x {config.mamba_head_dim}, {config.ssm_state_size}, {config.n_groups} |
| attention heads (key-value heads) x head dim | {config.num_attention_heads} ({config.num_key_value_heads}) x {config.head_dim} |
| vocabulary | {config.vocab_size} (byte-level BPE, every digit a token) |
| trained on | {settings.num_tokens / 1e6:.1f} million tokens of generated problems, seed {settings.seed} |
| steps | {rounds}, {settings.sequences_per_step} sequences of {settings.sequence_length} tokens each |
| optimiser | AdamW, warm-up {settings.warmup_steps} steps, cosine; MTP loss weight {settings.mtp_loss_weight} |
| training time | {minutes:.0f} minutes, {torch.get_num_threads()} CPU thread(s) ({platform.machine()}, torch {torch.__version__}) |

Measured on {NUM_PROBLEMS} held-out problems, greedy, through the engine:

| what | value |
| --- | --- |
| right answers, eight worked examples in front | {measured.few_shot:.1%} |
| right answers, no examples | {measured.zero_shot:.1%} |
| solution tokens that the MTP head guesses one token early | {measured.mtp_agreement:.1%} |

Made by `make train` from `mamba_teach/wordmath`; the problems are generated, so no data set is needed.
"""
    (folder / "README.md").write_text(card, encoding="utf-8")
