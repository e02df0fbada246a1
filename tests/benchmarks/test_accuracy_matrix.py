"""``benchmarks/accuracy_matrix.py`` tells a wrong token from a tie, and counts both."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from mamba_teach import Engine, EngineConfig, load_model
from mamba_teach.request import RequestOutput
from mamba_teach.wordmath.evaluate import Evaluation, evaluate
from mamba_teach.wordmath.problems import held_out_problems

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import accuracy_matrix as matrix

PROMPT = (9, 9, 9)


def logits_after(token_ids: Sequence[int]) -> torch.Tensor:
    """Behind ``9 9 9 1`` tokens 2 and 3 are 5e-5 apart, 4 is far below; elsewhere 0 leads by 1."""
    logits = torch.zeros(10, dtype=torch.float64)
    if list(token_ids) == [*PROMPT, 1]:
        logits[2], logits[3] = 1.0, 1.0 - 5e-5
    else:
        logits[0] = 1.0
    return logits


def output(tokens: Sequence[int], text: str) -> RequestOutput:
    return RequestOutput("r", PROMPT, tuple(tokens), text, "stop", 0, 0)


@pytest.mark.parametrize(
    ("expected", "got", "tie"),
    [
        ((1, 2, 5), (1, 3, 6), True),
        ((1, 3, 5), (1, 2, 5), True),  # whichever of them the reference said
        ((1, 2, 5), (1, 4, 5), False),  # the two best are a tie, and it is neither of them
        ((1, 4, 5), (1, 2, 5), False),
        ((1, 2, 5), (7, 3, 5), False),  # they part earlier than the tie
        ((1, 2, 5), (1, 2, 6), False),  # and later
        ((1,), (1, 2), False),  # the other ends where a tie would be
        ((1, 2), (1,), False),
    ],
)
def test_a_tie_is_one_and_a_wrong_token_is_not(
    expected: tuple[int, ...], got: tuple[int, ...], tie: bool
) -> None:
    assert matrix.is_tie(PROMPT, expected, got, logits_after) is tie


def test_logits_further_apart_than_rounding_are_no_tie() -> None:
    logits = torch.tensor([0.0, 1.0, 1.0 - 1.5e-4])
    assert not matrix.is_tie((0,), (1,), (2,), lambda _: logits)


def test_differences_are_counted_by_kind() -> None:
    said = [((1, 2), " =7"), ((1, 2), " =7"), ((1, 2), " =7"), ((1, 2), " =7"), ((1, 2), " =7")]
    others = [((1, 2), " =7"), ((1, 3), " =7"), ((1, 3), " =8"), ((1, 4), " =7"), ((1,), "")]
    problems = held_out_problems(5)
    reference, other = (
        Evaluation(problems, [output(*o) for o in outputs], [True] * 5)
        for outputs in (said, others)
    )
    assert matrix.compare(reference, other, logits_after) == matrix.Comparison(
        different_answers=2, different_tokens=2, ties=2
    )


def test_configurations_do_what_they_are_called() -> None:
    shown = [tuple(s.values()) for s, _ in matrix.CONFIGURATIONS]
    assert shown[0] == ("off", 0, "off")
    every = product(("off", "align", "all"), (0, 3), ("off", "record"))
    assert sorted(shown) == sorted(every)
    model = load_model("wordmath")
    for (mode, k, graphs), (_, settings) in zip(shown, matrix.CONFIGURATIONS, strict=True):
        engine = Engine(model, EngineConfig(device="cpu", **settings))
        assert engine.cache_mode.effective == {"off": "none"}.get(mode, mode)
        assert engine.config.num_speculative_tokens == k
        assert engine.runner.graph_kind == graphs


def test_uncached_logits_are_those_behind_the_greedy_tokens() -> None:
    model = load_model("wordmath")
    (said,) = evaluate(Engine(model, EngineConfig(device="cpu")), 1, few_shot=False).outputs
    logits = matrix.uncached_logits(model)
    for i in range(0, len(said.token_ids), 5):
        text = [*said.prompt_token_ids, *said.token_ids[:i]]
        assert int(logits(text).argmax()) == said.token_ids[i]


@pytest.mark.parametrize("spoilt", [False, True])
def test_whole_run(
    spoilt: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Four problems, the reference and one more configuration; with a token changed, it is found."""

    def evaluate_and_spoil(engine: Engine, problems: int, *, progress: bool) -> Evaluation:
        evaluation = evaluate(engine, problems, progress=progress)
        if spoilt and engine.config.num_speculative_tokens:
            tokens = evaluation.outputs[2].token_ids
            changed = (*tokens[:4], (tokens[4] + 1) % 768, *tokens[5:])
            evaluation.outputs[2] = replace(evaluation.outputs[2], token_ids=changed)
        return evaluation

    monkeypatch.setattr(matrix, "evaluate", evaluate_and_spoil)
    rows = matrix.CONFIGURATIONS
    monkeypatch.setattr(matrix, "CONFIGURATIONS", [rows[0], rows[-1]])
    file = tmp_path / "accuracy.json"
    assert matrix.main(["--problems", "4", "--json", str(file)]) == int(spoilt)
    plain, both = json.loads(file.read_text())["runs"]
    assert (plain["mode"], plain["k"], both["mode"], both["k"]) == ("off", 0, "all", 3)
    assert plain["different_tokens"] == plain["ties"] == plain["hit_rate"] == 0
    assert (both["different_tokens"], both["ties"], both["different_answers"]) == (spoilt, 0, 0)
    assert plain["accuracy"] == both["accuracy"]
    assert plain["tokens_per_verify_step"] == 1 < both["tokens_per_verify_step"]
    assert plain["steps"] > both["steps"]
    # They have the worked examples in common: more than 520 of at most 720 tokens.
    assert both["hit_rate"] == round(both["cached_tokens"] / both["prompt_tokens"], 4) > 0.3
    out = capsys.readouterr().out
    assert "tokens differ" in out and "off" in out
