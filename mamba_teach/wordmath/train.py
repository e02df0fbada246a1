"""Train the shipped checkpoint: two million parameters, a few million tokens, one laptop evening.

The model reads a stream of worked problems, packed end to end into sequences of 768 tokens, so it
meets every problem with several others in front of it, as a few-shot prompt shows them. It runs
through the very functions that serve it: a training sequence is a prefill from zero whose state goes
to the null slot.

The MTP head is trained in the same run, on the trunk's hidden states, and once more on its own
(as drafts 2, 3, ... will feed it), so that it drafts well more than one token ahead.

``make train`` writes ``assets/`` anew: same seed, same machine, same weights.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from tqdm import tqdm

from mamba_teach.config import ModelConfig
from mamba_teach.model.hybrid import HybridModel, initialize
from mamba_teach.model.metadata import uncached_step
from mamba_teach.wordmath.problems import Problem, training_problems
from mamba_teach.wordmath.prompts import END_OF_TEXT, format_problem

WORDMATH_MODEL = ModelConfig(
    vocab_size=768,
    hidden_size=160,
    pattern="MM*-MM*-MM-",
    mamba_num_heads=10,
    mamba_head_dim=32,
    ssm_state_size=16,
    n_groups=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=40,
    intermediate_size=320,
    mtp_pattern="*-",
    bos_token_id=0,
    eos_token_ids=(0,),
)


@dataclass(frozen=True)
class Round:
    """One pass of the learning rate: up to ``learning_rate``, then down along a cosine."""

    steps: int
    learning_rate: float


@dataclass(frozen=True)
class TrainingSettings:
    """How long and how fast.

    Attributes:
        rounds: one after the other on the same weights, each with a fresh optimiser and new problems.
            The first learns the task; the second, at half the rate, makes it reliable.
        sequences_per_step, sequence_length: tokens of a step.
        mtp_loss_weight: of the MTP head's loss; its second pass counts half of that.
        question_loss_weight: of tokens that belong to a question. Stories are random, so most of
            their loss can never fall; solutions are what the model is for.
        seed: of the weights; problems are drawn with ``seed + round``.
    """

    rounds: tuple[Round, ...] = (Round(3200, 2e-3), Round(900, 1e-3))
    sequences_per_step: int = 4
    sequence_length: int = 768
    warmup_steps: int = 150
    weight_decay: float = 0.1
    gradient_clip: float = 1.0
    mtp_loss_weight: float = 0.3
    question_loss_weight: float = 0.3
    seed: int = 0

    @property
    def num_tokens(self) -> int:
        steps = sum(r.steps for r in self.rounds)
        return steps * self.sequences_per_step * self.sequence_length


def pack_sequences(
    problems: Iterator[Problem], tokenizer: Tokenizer, length: int
) -> Iterator[tuple[list[int], list[bool]]]:
    """Endless sequences of ``length + 1`` token ids, and which of them belong to a solution.

    Every sequence begins with the begin token and a fresh problem; what does not fit is dropped.
    """
    begin = tokenizer.token_to_id(END_OF_TEXT)
    assert begin is not None, f"the tokenizer has no {END_OF_TEXT}"
    ids, in_solution = [begin], [False]
    while batch := list(islice(problems, 64)):
        texts = [format_problem(p, with_solution=True) for p in batch]
        prompts = [format_problem(p, with_solution=False) for p in batch]
        encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
        cut = tokenizer.encode_batch(prompts, add_special_tokens=False)
        for whole, prompt in zip(encoded, cut, strict=True):
            ids += whole.ids
            in_solution += [i >= len(prompt.ids) for i in range(len(whole.ids))]
            if len(ids) > length:
                yield ids[: length + 1], in_solution[: length + 1]
                ids, in_solution = [begin], [False]


def learning_rate_at(step: int, of_round: Round, warmup_steps: int) -> float:
    """Linear warm-up, then a cosine down to a twentieth of the peak."""
    if step < warmup_steps:
        return of_round.learning_rate * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, of_round.steps - warmup_steps)
    return of_round.learning_rate * (0.05 + 0.475 * (1.0 + math.cos(math.pi * progress)))


def training_loss(
    model: HybridModel, ids: torch.Tensor, weights: torch.Tensor, mtp_loss_weight: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted loss of a batch: ``(trunk and MTP together, trunk alone)``.

    Args:
        ids: ``(R, L + 1)`` token ids.
        weights: ``(R, L)`` of the predicted tokens ``ids[:, 1:]``.
    """
    rows, length = ids.shape[0], ids.shape[1] - 1
    inputs, targets = ids[:, :-1].flatten(), ids[:, 1:].flatten()
    metadata, caches = uncached_step(model.config, [length] * rows)
    weights = weights.flatten() / weights.sum()

    def loss_of(hidden: torch.Tensor) -> torch.Tensor:
        logits = model.compute_logits(hidden)
        return (F.cross_entropy(logits, targets, reduction="none") * weights).sum()

    def one_earlier(hidden: torch.Tensor) -> torch.Tensor:
        """Hidden state of the position before, zeros at a sequence's first: (R * L, hidden)."""
        return F.pad(hidden.view(rows, length, -1)[:, :-1], (0, 0, 1, 0)).flatten(0, 1)

    hidden = model(inputs, metadata, caches)
    trunk_loss = loss = loss_of(hidden)
    if model.mtp is not None:
        depth = len(model.config.pattern)
        embedded = model.model.embeddings(inputs)
        for weight in (mtp_loss_weight, mtp_loss_weight / 2):
            hidden = model.mtp(embedded, one_earlier(hidden), metadata[depth:], caches[depth:])
            loss = loss + weight * loss_of(hidden)
    return loss, trunk_loss


def train(
    tokenizer: Tokenizer,
    config: ModelConfig = WORDMATH_MODEL,
    settings: TrainingSettings = TrainingSettings(),
) -> Iterator[HybridModel]:
    """Train from scratch with a progress bar; yields the model after every step.

    The same object each time: whoever iterates may measure or save it between steps.
    """
    model = HybridModel(config)
    initialize(model, settings.seed)
    for number in range(len(settings.rounds)):
        for _ in train_round(model, tokenizer, settings, number):
            yield model


def train_round(
    model: HybridModel, tokenizer: Tokenizer, settings: TrainingSettings, number: int
) -> Iterator[float]:
    """One round of training; mutates ``model`` and yields the trunk's loss after every step."""
    of_round = settings.rounds[number]
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]  # norms, biases, A, D, dt, conv
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)
    problems = training_problems(settings.seed + number)
    stream = pack_sequences(problems, tokenizer, settings.sequence_length)
    title = f"training, round {number + 1} of {len(settings.rounds)}"
    progress = tqdm(range(of_round.steps), desc=title, unit="step")
    for step in progress:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(step, of_round, settings.warmup_steps)
        batch = list(islice(stream, settings.sequences_per_step))
        ids = torch.tensor([ids for ids, _ in batch])
        in_solution = torch.tensor([flags for _, flags in batch])[:, 1:]
        weights = torch.where(in_solution, 1.0, settings.question_loss_weight)
        loss, trunk_loss = training_loss(model, ids, weights, settings.mtp_loss_weight)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.gradient_clip)
        optimizer.step()
        if step % 10 == 0:
            progress.set_postfix(loss=f"{trunk_loss.item():.3f}")
        yield trunk_loss.item()


@torch.no_grad()
def teacher_forced_accuracy(
    model: HybridModel, tokenizer: Tokenizer, problems: list[Problem]
) -> tuple[float, float]:
    """A quick look during training: no generation, the right solution is fed.

    Returns:
        The share of problems whose every solution token is the model's first choice, and the share
        of those tokens that are also the MTP head's first choice (one token ahead).
    """
    right = agreed = total = 0
    depth = len(model.config.pattern)
    for problem in problems:
        ids = torch.tensor(tokenizer.encode(format_problem(problem, with_solution=True)).ids)
        cut = len(tokenizer.encode(format_problem(problem, with_solution=False)).ids)
        metadata, caches = uncached_step(model.config, [len(ids)])
        hidden = model(ids, metadata, caches)
        choice = model.compute_logits(hidden)[cut - 1 : -1].argmax(-1)
        right += int((choice == ids[cut:]).all())
        if model.mtp is not None:
            draft = model.mtp(
                model.model.embeddings(ids), F.pad(hidden[:-1], (0, 0, 1, 0)),
                metadata[depth:], caches[depth:],
            )  # fmt: skip
            agreed += int((model.compute_logits(draft)[cut - 1 : -1].argmax(-1) == choice).sum())
        total += len(choice)
    return right / len(problems), agreed / total


def main() -> None:
    """Train, save, measure what was saved, and write its card."""
    from mamba_teach.model.checkpoint import SHIPPED, save_model
    from mamba_teach.wordmath.make_tokenizer import build_tokenizer
    from mamba_teach.wordmath.model_card import measure, write_card

    parser = argparse.ArgumentParser(description="Train the wordmath model again.")
    parser.add_argument("--folder", type=Path, default=SHIPPED["wordmath"], help="where it goes")
    arguments = parser.parse_args()
    settings = TrainingSettings()
    tokenizer = build_tokenizer()
    started = time.monotonic()
    for model in train(tokenizer, WORDMATH_MODEL, settings):  # noqa: B007  (the last is the result)
        pass
    minutes = (time.monotonic() - started) / 60
    save_model(model, arguments.folder, tokenizer)
    write_card(arguments.folder, settings, minutes, measure(arguments.folder))


if __name__ == "__main__":
    main()
