"""The shipped checkpoint: what its card promises, and that others can load it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.models import logits_of

from mamba_teach import Engine, EngineConfig, load_model
from mamba_teach.cache.specs import make_layer_specs
from mamba_teach.model.checkpoint import SHIPPED
from mamba_teach.wordmath.evaluate import evaluate
from mamba_teach.wordmath.make_tokenizer import build_tokenizer
from mamba_teach.wordmath.train import WORDMATH_MODEL, TrainingSettings

FOLDER = SHIPPED["wordmath"]


def test_size_and_shape() -> None:
    assert sum(f.stat().st_size for f in FOLDER.iterdir()) <= 8_000_000
    model = load_model("wordmath")
    assert model.config == WORDMATH_MODEL
    assert model.mtp is not None and model.config.n_groups > 1
    config = EngineConfig()
    block_sizes = {s.block_size for s in make_layer_specs(model.config, config, "all").values()}
    assert max(block_sizes) <= 64, "states shall be kept often enough to be seen"


def test_the_tokenizer_is_the_one_that_training_makes() -> None:
    assert json.loads((FOLDER / "tokenizer.json").read_text()) == json.loads(
        build_tokenizer().to_str()
    )


def test_the_card_belongs_to_the_settings() -> None:
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    settings = TrainingSettings()
    assert f"{settings.num_tokens / 1e6:.1f} million tokens" in card
    for of_round in settings.rounds:
        assert f"{of_round.steps} (peak {of_round.learning_rate:g})" in card
    accuracy = float(re.search(r"right answers, eight worked .*\| ([\d.]+)%", card).group(1))  # type: ignore[union-attr]
    assert 90.0 <= accuracy <= 99.0


def test_accuracy_on_held_out_problems() -> None:
    evaluation = evaluate(Engine(load_model("wordmath"), EngineConfig(device="cpu")), 60)
    assert 0.85 <= evaluation.accuracy < 1.0  # 60 problems: the card has 500


@pytest.mark.peer
def test_transformers_loads_the_same_folder_to_the_same_logits() -> None:
    transformers = pytest.importorskip("transformers")
    peer = transformers.AutoModelForCausalLM.from_pretrained(FOLDER).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)
    model = load_model("wordmath")
    text = "Q: Rosa has 86 pies. Rosa sells 57 pies. How many pies does she have now?\nA:"
    assert model.tokenizer is not None
    ids = tokenizer(text).input_ids
    assert ids == model.tokenizer.encode(text).ids
    with torch.no_grad():
        theirs = peer(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(logits_of(model, ids), theirs, rtol=0, atol=1e-4)


def test_demo_prints_one_json_object() -> None:
    command = [sys.executable, "-m", "mamba_teach", "demo", "--json"]
    root = Path(__file__).resolve().parents[2]
    result = subprocess.run(command, capture_output=True, text=True, cwd=root)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert set(report) == {
        "problems", "accuracy", "generated_tokens", "steps", "cache_mode", "cached_tokens",
        "prompt_tokens", "accepted_per_step", "graphs", "device", "backend", "drafted_tokens",
        "accepted_drafts", "graph_steps", "hit_rate",
    }  # fmt: skip
    assert report["cache_mode"] == "all" and report["graphs"] in ("record", "cuda")
    assert report["accepted_per_step"] >= 2.5 and report["graph_steps"] > 0
    assert 0 < report["accepted_drafts"] <= report["drafted_tokens"]
    assert report["problems"] >= 32 and report["accuracy"] >= 0.9
    assert report["cached_tokens"] / report["prompt_tokens"] >= 0.7
