"""``benchmarks/speculation.py`` counts verify steps, drafts and state bytes as one would by hand."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from mamba_teach import Engine, EngineConfig, GhostModel, SamplingParams, load_model
from mamba_teach.runner import state_index
from mamba_teach.spec_decode.scripted_proposer import ScriptedProposer

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import speculation

PROMPT = [5, 7]
LAYERS = "MMM**"  # groups: two Mamba layers, one Mamba layer, two attention layers


def scripted_engine(mode: str) -> Engine:
    """After a prompt of 2 tokens: two drafts, both right; one that is wrong; none. Blocks of 4.

    The rows compute tokens 2 3 4, then 5 6 (6 is thrown away), then 6.
    """
    ghost = GhostModel(LAYERS)
    right = ghost.continuation(PROMPT, 6)

    def script(request_id: str, tokens: list[int], max_drafts: int) -> Sequence[int]:
        said = len(tokens) - len(PROMPT)
        if said == 1:
            return right[1:3]
        return [(right[4] + 1) % 97] if said == 4 else []

    config = EngineConfig(
        mamba_cache_mode=mode, block_size=4, num_speculative_tokens=2, max_model_len=64
    )
    return Engine(ghost, config, proposer=ScriptedProposer(script))


@pytest.mark.parametrize(("mode", "copies"), [("none", 0), ("align", 2), ("all", 2)])
def test_a_scripted_run_by_hand(mode: str, copies: int) -> None:
    """A ghost's state has 8 bytes, an input of its window 20; W - 1 = 3 inputs are read, 5 kept.

    A copy of boundary 4 lies at token 3's place in the row of tokens 2 3 4: 4 inputs are left of the
    window. Each of the two Mamba groups copies it in two layers, as the larger one has two.
    """
    engine = scripted_engine(mode)
    engine.generate([PROMPT], SamplingParams(max_tokens=6))
    counts = speculation.count(engine)
    assert (counts.steps, counts.verify_steps, counts.with_drafts) == (4, 3, 2)
    assert (counts.tokens, counts.drafts_right, counts.drafts_wrong) == (5, 2, 1)
    three = (8 + 3 * 20) + (3 * 8 + 5 * 20)
    two = (8 + 3 * 20) + (2 * 8 + 4 * 20)
    one = (8 + 3 * 20) + (1 * 8 + 3 * 20)
    assert counts.row_bytes == 3 * (three + two + one) == 1476
    assert counts.copies == copies
    assert counts.copy_bytes == copies * 2 * 2 * (8 + 4 * 20) == copies * 352
    assert counts.tokens_per_verify_step == pytest.approx(5 / 3)
    assert counts.state_bytes_per_token == pytest.approx((1476 + copies * 352) / 5)


def test_copied_bytes_are_those_of_the_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by formula: what ``copy_states`` was really given, tensor by tensor."""
    launched = 0

    def watch(pairs: Any, src: Any, dst: Any, offsets: torch.Tensor, **slots: Any) -> None:
        nonlocal launched
        for offset in offsets.tolist():
            for conv, ssm in pairs:
                launched += 2 * (conv[0, offset:].numel() + ssm[0].numel()) * 4
        copy_states(pairs, src, dst, offsets, **slots)

    copy_states = state_index.copy_states
    monkeypatch.setattr(state_index, "copy_states", watch)
    config = EngineConfig(block_size=4, num_speculative_tokens=5, max_model_len=128)
    engine = Engine(GhostModel(LAYERS, draft_accuracy=0.8), config)
    engine.generate([[i, *range(9)] for i in range(12)], SamplingParams(max_tokens=40))
    assert speculation.count(engine).copy_bytes == launched > 0


def test_a_prefill_after_a_preemption_is_no_verify_step() -> None:
    """Without drafts a decode row yields one token. A request that has decoded, lost its blocks and
    is computed again samples one from a prefill row, which must not count."""
    config = EngineConfig(block_size=4, num_blocks=40, max_num_seqs=4, max_model_len=64)
    engine = Engine(GhostModel(LAYERS), config)
    prompts = [[i, 1, 2] for i in range(4)]
    outputs = engine.generate(prompts, SamplingParams(max_tokens=40))
    assert sum(output.num_preemptions for output in outputs) > 0
    counts = speculation.count(engine)
    assert counts.tokens == counts.verify_steps < 4 * (40 - 1)
    assert counts.row_bytes == counts.tokens * 3 * (2 * 8 + (3 + 3) * 20)


def test_without_drafts_a_token_costs_a_state_in_and_one_out() -> None:
    """wordmath: 6 Mamba layers, states of 10 x 32 x 16 fp32 numbers, 384 channels."""
    model = load_model("wordmath")
    runs = [speculation.measure(model, "all", k, "mtp" if k else None, 2) for k in (0, 3)]
    plain, drafts = speculation.with_savings(runs)
    per_token = 6 * (2 * 10 * 32 * 16 * 4 + (3 + 3) * 384 * 4)
    assert plain["state_bytes_per_token"] == per_token
    assert plain["row_bytes"] == plain["tokens"] * per_token
    assert plain["tokens_per_verify_step"] == 1 and plain["drafts_right"] == 0
    assert plain["tokens"] == drafts["tokens"]  # drafts change no token
    assert drafts["tokens"] == drafts["verify_steps"] + drafts["drafts_right"]
    assert drafts["steps_saved"] == plain["steps"] - drafts["steps"] > 0
    assert drafts["state_bytes_against_no_drafts"] == pytest.approx(
        drafts["state_bytes_per_token"] / per_token, abs=1e-4
    )


def test_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(speculation, "RUNS", [("all", 0, None), ("all", 3, "ngram")])
    file = tmp_path / "speculation.json"
    assert speculation.main(["--problems", "1", "--json", str(file)]) == 0
    document = json.loads(file.read_text())
    assert document["machine"]["torch"] == torch.__version__
    assert [(run["k"], run["method"]) for run in document["runs"]] == [(0, None), (3, "ngram")]
    assert "ngram" in capsys.readouterr().out
