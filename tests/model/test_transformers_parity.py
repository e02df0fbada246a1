"""The same logits as transformers, which computes them with other code, from the same folders.

Always against transformers' full prefill of the whole text: its one-token path forgets the clamp
on dt. For Nemotron-H its prefill clamps with ``time_step_min`` instead of ``time_step_limit``, so
the two are given the same lower end here.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from model.stepper import Stepper, randomize

from mamba_teach.config import ModelConfig
from mamba_teach.model.checkpoint import load_model, save_model
from mamba_teach.model.hybrid import HybridModel
from mamba_teach.model.metadata import uncached_step

transformers = pytest.importorskip("transformers", reason="compares with transformers")
pytestmark = pytest.mark.peer

VOCAB, LENGTH = 50, 45


def ids_of(seed: int, length: int = LENGTH) -> list[int]:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def nemotron_h(pattern: str = "M*-M", seed: int = 0, **changes: object) -> torch.nn.Module:
    names = {"M": "linear_attention", "*": "full_attention", "-": "mlp"}
    settings = dict(
        vocab_size=VOCAB, hidden_size=32, layers_block_type=[names[kind] for kind in pattern],
        mamba_num_heads=6, mamba_head_dim=10, ssm_state_size=12, n_groups=3, conv_kernel=4,
        chunk_size=8, num_attention_heads=4, num_key_value_heads=2, head_dim=6,
        intermediate_size=40, time_step_min=1e-20, time_step_limit=(0.0, math.inf),
    )  # fmt: skip
    config = transformers.NemotronHConfig(**settings | changes)
    return finish(transformers.NemotronHForCausalLM(config), seed)


def mamba2(seed: int = 0, **changes: object) -> torch.nn.Module:
    settings = dict(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=3, num_heads=4, head_dim=16, expand=2,
        state_size=12, n_groups=2, conv_kernel=4, chunk_size=8,
    )  # fmt: skip
    config = transformers.Mamba2Config(**settings | changes)
    return finish(transformers.Mamba2ForCausalLM(config), seed)


def finish(theirs: torch.nn.Module, seed: int) -> torch.nn.Module:
    randomize(theirs, seed)
    theirs.tie_weights()
    return theirs.eval()


MODELS = {
    "hybrid, inner width 60 beside hidden 32": lambda: nemotron_h(),
    "hybrid, one group": lambda: nemotron_h("*MM-", 1, n_groups=1),
    "hybrid, a group per head": lambda: nemotron_h("M-*", 2, n_groups=6),
    "hybrid, biases everywhere": lambda: nemotron_h(
        "MM*-", 3, use_bias=True, mlp_bias=True, use_conv_bias=True
    ),
    "hybrid, no conv bias, width 3, short chunks": lambda: nemotron_h(
        "M*M-", 4, use_conv_bias=False, conv_kernel=3, chunk_size=5
    ),
    "hybrid, dt clamped from below": lambda: nemotron_h(
        "M*-M", 5, time_step_min=0.3, time_step_limit=(0.3, math.inf)
    ),
    "attention and MLP only": lambda: nemotron_h("*-*-", 6),
    "pure": lambda: mamba2(),
    "pure, tied": lambda: mamba2(1, tie_word_embeddings=True),
    "pure, one group, biases": lambda: mamba2(2, n_groups=1, use_bias=True),
    "pure, a group per head": lambda: mamba2(3, n_groups=4),
    "pure, dt clamped from both sides": lambda: mamba2(4, time_step_limit=(0.2, 0.6)),
    "pure, heads of 12, expand 3": lambda: mamba2(5, num_heads=8, head_dim=12, expand=3),
}


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert 0.5 < theirs.std() < 5, "logits too small or too large for the comparison to mean much"
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


@torch.no_grad()
def their_logits(theirs: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    return theirs(torch.tensor([ids]), use_cache=False).logits[0]


@torch.no_grad()
def uncached_logits(model: HybridModel, texts: list[list[int]]) -> tuple[torch.Tensor, ...]:
    lengths = [len(ids) for ids in texts]
    steps = uncached_step(model.config, lengths, chunk_size=model.config.chunk_size)
    ids = torch.tensor([i for ids in texts for i in ids])
    return model.compute_logits(model(ids, *steps)).split(lengths)


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
def test_logits(make, tmp_path: Path) -> None:
    theirs = make()
    theirs.save_pretrained(tmp_path)
    model = load_model(tmp_path)
    ids = ids_of(1)
    expected = their_logits(theirs, ids)

    close(uncached_logits(model, [ids])[0], expected)
    for splits in ([LENGTH], [7, 1, 13, 24], [3, 5, 8, 9, 1, 19], [1] * LENGTH):
        close(Stepper(model).run(ids, splits), expected)
        close(Stepper(model).run(ids, splits, decode_ones=True), expected)


@pytest.mark.parametrize("make", [nemotron_h, mamba2])
def test_several_sequences_in_one_step(make, tmp_path: Path) -> None:
    """Rows of one step never meet, whether they prefill, go on or decode."""
    theirs = make()
    theirs.save_pretrained(tmp_path)
    model = load_model(tmp_path)
    texts = [ids_of(2, 17), ids_of(3, 30), ids_of(4, 9)]
    expected = [their_logits(theirs, ids) for ids in texts]
    for ours, row in zip(uncached_logits(model, texts), expected):
        close(ours, row)

    stepper, seen = Stepper(model, 3), [[], [], []]
    plan = [
        ({0: 5, 1: 11}, []),
        ({0: 1, 2: 4, 1: 1}, [0]),  # a decode row beside a fresh prompt and a continued one
        ({1: 1, 0: 1, 2: 3}, [0, 1]),
        ({2: 1, 1: 17, 0: 10}, [2]),
        ({2: 1}, [2]),
    ]
    for sizes, decode in plan:
        at = stepper.computed
        pieces = {r: texts[r][at[r] : at[r] + n] for r, n in sizes.items()}
        for r, logits in stepper.step(pieces, decode).items():
            seen[r].append(logits)
    for ours, row in zip(seen, expected):
        close(torch.cat(ours), row)


OURS = {
    "hybrid": dict(pattern="M*-M"),
    "hybrid with a drafter": dict(pattern="M*-", mtp_pattern="*-"),
    "hybrid, tied": dict(pattern="M*-", tie_word_embeddings=True),
    "hybrid, dt clamped": dict(pattern="MM-", time_step_limit=(0.3, math.inf)),
    "pure, inner width not a multiple": dict(pattern="MM", mamba_head_dim=10),
    "pure, with a drafter": dict(pattern="MM", mtp_pattern="*-"),
    "pure": dict(pattern="MM"),
    "pure, tied, dt clamped": dict(
        pattern="MMM", tie_word_embeddings=True, time_step_limit=(0.2, 0.6)
    ),
}


@pytest.mark.parametrize("changes", OURS.values(), ids=OURS.keys())
def test_transformers_loads_what_we_save(changes: dict, tmp_path: Path) -> None:
    sizes = dict(
        vocab_size=VOCAB, hidden_size=32, mamba_num_heads=4, mamba_head_dim=16, ssm_state_size=12,
        n_groups=2, chunk_size=8, num_attention_heads=4, num_key_value_heads=2, head_dim=6,
        intermediate_size=40, bos_token_id=3, eos_token_ids=(4, 5),
    )  # fmt: skip
    ours = HybridModel(ModelConfig(**sizes | changes)).eval()
    randomize(ours)
    save_model(ours, tmp_path)
    pure = set(ours.config.pattern + ours.config.mtp_pattern) == {"M"}
    pure &= ours.config.d_inner % 32 == 0
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert type(theirs).__name__ == ("Mamba2ForCausalLM" if pure else "NemotronHForCausalLM")
    assert not any(report.values()), report
    assert theirs.generation_config.eos_token_id == [4, 5]
    ids = ids_of(5)
    close(uncached_logits(ours, [ids])[0], their_logits(theirs, ids))
