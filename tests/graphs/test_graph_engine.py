"""Engines with graphs say and keep what engines without them do, whatever happens between replays."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest
import torch
from graphs.lockstep import Lockstep, drafts_of
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models import (
    assert_says_what_cold_says,
    assert_states_are_exact,
    cold_tokens,
    random_prompt,
    toy_model,
)

from mamba_teach import Engine, EngineConfig, GhostModel, SamplingParams
from mamba_teach.events import DraftsVerified
from mamba_teach.spec_decode.scripted_proposer import ScriptedProposer

MODES = ["none", "align", "all"]
PROMPTS = [random_prompt(n, seed=n) for n in (5, 9, 30, 1, 14)]
PROMPTS += [PROMPTS[2][:16] + random_prompt(3, seed=99)]  # a block of 16 to hit
LONGEST = 64
replayed: Counter[int] = Counter()  # rows of replays of all scenarios


def toy_pair(
    mode: str, k: int, pattern: str, texts: dict[str, list[int]], **changes: Any
) -> Lockstep:
    """Two engines over the toy model; drafts, if any, are written by the test."""
    model = toy_model(pattern)

    def make(graphs: str) -> Engine:
        settings_: dict[str, Any] = dict(
            max_model_len=LONGEST, max_num_batched_tokens=40, max_num_seqs=4, device="cpu",
            block_size=16, mamba_cache_mode=mode, num_speculative_tokens=k, poison=True,
            graphs=graphs, graph_capture_sizes=(1, 3) if graphs == "record" else None,
        )  # fmt: skip
        proposer = ScriptedProposer(drafts_of(texts, model.config.vocab_size)) if k else None
        return Engine(model, EngineConfig(**(settings_ | changes)), proposer=proposer)

    return Lockstep(make)


class ToyScenario:
    """Requests of a few texts on a pair of engines."""

    def __init__(self, mode: str, k: int, pattern: str) -> None:
        self.model, self.texts = toy_model(pattern), {}
        self.pair = toy_pair(mode, k, pattern, self.texts)
        self.greedy: dict[str, list[int]] = {}

    def arrive(self, which: int, max_tokens: int, temperature: float = 0.0) -> None:
        prompt = PROMPTS[which % len(PROMPTS)]
        request_id = self.pair.add(prompt, SamplingParams(max_tokens, temperature, seed=which))
        self.texts[request_id] = [*prompt, *cold_tokens(self.model, tuple(prompt), 24, LONGEST)]
        if temperature == 0.0:
            self.greedy[request_id] = prompt

    def check_states(self) -> None:
        """Windows and states of all that run, against the float64 recurrence."""
        for request in self.pair.graphs.scheduler.running:
            if request.num_computed_tokens:
                tokens = request.tokens(0, request.num_computed_tokens)
                assert_states_are_exact(self.pair.graphs, request.request_id, tokens)

    def end(self) -> None:
        self.pair.to_the_end()
        for request_id, tokens in self.pair.done.items():
            if request_id in self.greedy:
                prompt = self.greedy[request_id]
                assert_says_what_cold_says(self.model, prompt, tokens, LONGEST)
        for of_size in self.pair.replays.values():
            replayed.update(of_size)


@pytest.mark.parametrize("pattern", ["M*M-", "MM*M", "MMM"])
@pytest.mark.parametrize("k", [0, 2, 3])
@pytest.mark.parametrize("mode", MODES)
def test_tokens_and_states_are_those_of_eager_steps(mode: str, k: int, pattern: str) -> None:
    """Batches of one row, of all sizes up to four, and down again, with graphs of one and three."""
    scenario, choice = ToyScenario(mode, k, pattern), Random(f"{mode} {k} {pattern}")
    pair = scenario.pair
    scenario.arrive(0, 24)
    for turn in range(12):
        if turn in (2, 4, 5, 8):
            scenario.arrive(choice.randrange(6), 4 + 2 * turn, temperature=0.9 * (turn == 5))
        if turn == 7:
            pair.preempt(choice.randrange(4))
        if turn == 10:
            pair.abort(choice.randrange(4))
        pair.step()
        if turn in (3, 9):
            scenario.check_states()
    scenario.end()
    assert set(pair.replays) == {1, 3}, "a graph was not used"


def test_the_scenarios_met_every_kind_of_batch() -> None:
    if not replayed:
        pytest.skip("the scenarios did not run in this process")
    assert replayed.keys() == {1, 2, 3} and replayed[2] >= 10, replayed


operations = st.lists(
    st.one_of(
        st.tuples(st.just("arrive"), st.integers(0, 5), st.integers(1, 20)),
        st.tuples(st.just("step"), st.integers(1, 5), st.just(0)),
        st.tuples(st.just("step"), st.integers(1, 5), st.just(0)),
        st.tuples(st.just("abort"), st.integers(0, 3), st.just(0)),
        st.tuples(st.just("preempt"), st.integers(0, 3), st.just(0)),
    ),
    min_size=4,
    max_size=12,
)


@settings(max_examples=8)
@given(
    script=operations,
    mode=st.sampled_from(MODES),
    k=st.sampled_from([0, 2, 3]),
    pattern=st.sampled_from(["M*M-", "MM*M", "MMM"]),
)
def test_any_history_of_the_toy(
    script: list[tuple[str, int, int]], mode: str, k: int, pattern: str
) -> None:
    scenario = ToyScenario(mode, k, pattern)
    scenario.arrive(0, 12)
    for operation, number, max_tokens in script:
        if operation == "arrive":
            scenario.arrive(number, max_tokens)
        elif operation == "step":
            for _ in range(number):
                scenario.pair.step()
        else:
            getattr(scenario.pair, operation)(number)
    scenario.end()


@settings(max_examples=40)
@given(
    script=operations,
    mode=st.sampled_from(MODES),
    k=st.sampled_from([0, 1, 2, 3]),
    layers=st.sampled_from(["MM*M", "M*", "MMM", "MM*MM*M-"]),
    accuracy=st.sampled_from([0.0, 0.7, 1.0]),
    temperature=st.sampled_from([0.0, 0.0, 0.9]),
    sizes=st.sampled_from([(1, 2, 4), (3,), (4, 2)]),
    spare=st.integers(0, 30),
)
def test_any_history_of_the_ghost(
    script: list[tuple[str, int, int]], mode: str, k: int, layers: str, accuracy: float,
    temperature: float, sizes: tuple[int, ...], spare: int,
) -> None:  # fmt: skip
    """In blocks of 4 tokens and pools that run dry; the ghost knows every state by its content."""
    model = GhostModel(layers, draft_accuracy=accuracy)

    def make(graphs: str, num_blocks: int | None = None) -> Engine:
        config = EngineConfig(
            max_model_len=48, max_num_batched_tokens=24, max_num_seqs=4, device="cpu", block_size=4,
            mamba_cache_mode=mode, num_speculative_tokens=k, poison=True, graphs=graphs,
            graph_capture_sizes=sizes if graphs == "record" else None, num_blocks=num_blocks,
        )  # fmt: skip
        return Engine(model, config)

    cache = make("off").cache
    decoding = max(sizes) * sum(group.spec.min_blocks_for_decode() for group in cache.groups)
    num_blocks = 1 + max(cache.max_blocks_for(48), decoding) + spare
    pair = Lockstep(lambda graphs: make(graphs, num_blocks))
    expected: dict[str, list[int]] = {}
    for operation, number, max_tokens in [("arrive", 0, 12), *script]:
        if operation == "arrive":
            prompt = PROMPTS[number]
            request_id = pair.add(prompt, SamplingParams(max_tokens, temperature))
            expected[request_id] = model.continuation(prompt, max_tokens)
        elif operation == "step":
            for _ in range(number):
                pair.step()
        else:
            getattr(pair, operation)(number)
    pair.to_the_end()
    for request_id, tokens in pair.done.items() if temperature == 0.0 else ():
        assert tokens == expected[request_id]


@pytest.mark.parametrize("mode", ["align", "all"])
def test_the_models_own_drafter_beside_graphs(mode: str) -> None:
    """Hidden states come out of a graph with rows of padding; the head must find its own ones."""
    model = toy_model("M*M-", mtp_pattern="*-")

    def make(graphs: str) -> Engine:
        config = EngineConfig(
            max_model_len=LONGEST, max_num_seqs=4, device="cpu", block_size=16, mamba_cache_mode=mode,
            num_speculative_tokens=2, speculative_method="mtp", poison=True, graphs=graphs,
            graph_capture_sizes=(4,) if graphs == "record" else None,
        )  # fmt: skip
        return Engine(model, config)

    pair = Lockstep(make)
    for prompt in PROMPTS[:3]:
        pair.add(prompt, SamplingParams(max_tokens=15))
    pair.to_the_end()
    assert pair.replays and 3 in pair.replays[4]
    for i, prompt in enumerate(PROMPTS[:3]):
        assert_says_what_cold_says(model, prompt, pair.done[f"r{i}"], LONGEST)
    assert not pair.diverged and drafts_in(pair.graphs) == drafts_in(pair.eager) != []


def drafts_in(engine: Engine) -> list[DraftsVerified]:
    return [event for event in engine.events if isinstance(event, DraftsVerified)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
@pytest.mark.parametrize("k", [0, 2])
def test_both_kinds_of_graphs_agree_on_a_gpu(k: int) -> None:
    said, states = {}, {}
    for kind in ("off", "record", "cuda"):
        model = toy_model("M*M-")
        texts = {
            f"r{i}": [*prompt, *cold_tokens(model, tuple(prompt), 24, LONGEST)]
            for i, prompt in enumerate(PROMPTS)
        }
        config = EngineConfig(
            max_model_len=LONGEST, max_num_seqs=4, device="cuda", block_size=16, graphs=kind,
            num_speculative_tokens=k, graph_capture_sizes=None if kind == "off" else (1, 4),
        )  # fmt: skip
        proposer = ScriptedProposer(drafts_of(texts, model.config.vocab_size)) if k else None
        engine = Engine(model, config, proposer=proposer)
        outputs = engine.generate(PROMPTS, SamplingParams(max_tokens=12))
        said[kind] = [output.token_ids for output in outputs]
        states[kind] = [
            t.cpu() for c in engine.runner.caches if c is not None for t in c.pools
        ]
        model.place(torch.device("cpu"), torch.float32)
    for of_kind in said.values():
        for prompt, tokens in zip(PROMPTS, of_kind, strict=True):
            assert_says_what_cold_says(toy_model("M*M-"), prompt, list(tokens), LONGEST)
    for kind in ("off", "cuda"):
        for ours, theirs in zip(states[kind], states["record"], strict=True):
            if said[kind] == said["record"]:  # rounding may decide between two tokens
                torch.testing.assert_close(ours[1:], theirs[1:], rtol=1e-4, atol=1e-4)
