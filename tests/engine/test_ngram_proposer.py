"""The n-gram proposer: the longest repeated ending, at its latest earlier place."""

from __future__ import annotations

import pytest
from engine.test_speculation import MODES, engine_for, finish, step
from hypothesis import given
from hypothesis import strategies as st
from support.models import assert_says_what_cold_says, cold_tokens, random_prompt, toy_model

from mamba_teach import SamplingParams
from mamba_teach.events import DraftsVerified, RowScheduled
from mamba_teach.spec_decode.ngram_proposer import NgramProposer


@pytest.mark.parametrize(
    ("text", "count", "expected"),
    [
        ("abcdeXab", 3, "cde"),
        ("abcdeXab", 9, "cdeXab"),  # no further than the text goes
        ("abcdeXab", 1, "c"),
        ("abcdeXb", 3, ""),  # one token is too short a memory
        ("abXabYab", 2, "Ya"),  # the latest place
        ("cabXabYcab", 2, "Xa"),  # three tokens before two, however long ago
        ("aa", 3, ""),
        ("aaa", 3, "a"),  # an occurrence may overlap the ending
        ("ab", 3, ""),
        ("a", 3, ""),
    ],
)
def test_what_followed_the_last_time(text: str, count: int, expected: str) -> None:
    tokens = [ord(c) for c in text]
    assert NgramProposer().continue_text(tokens, count) == [ord(c) for c in expected]


def test_the_sizes_are_settings() -> None:
    tokens = [1, 2, 3, 9, 7, 3, 8, 1, 2, 3]
    assert NgramProposer(max_ngram=3, min_ngram=3).continue_text(tokens, 1) == [9]
    assert NgramProposer(max_ngram=1, min_ngram=1).continue_text(tokens, 1) == [8]
    for sizes in [(1, 2), (0, 0), (3, 0)]:
        with pytest.raises(ValueError, match=f"min_ngram={sizes[1]}, max_ngram={sizes[0]}"):
            NgramProposer(*sizes)


@given(
    tokens=st.lists(st.integers(0, 2), min_size=1, max_size=30),
    count=st.integers(1, 6),
    low=st.integers(1, 3),
    more=st.integers(0, 2),
)
def test_any_text(tokens: list[int], count: int, low: int, more: int) -> None:
    length = len(tokens)
    matches = [
        (size, end)
        for size in range(low, low + more + 1)
        for end in range(size, length)
        if tokens[end - size : end] == tokens[length - size :]
    ]
    drafts = NgramProposer(low + more, low).continue_text(tokens, count)
    if not matches:
        assert drafts == []
    else:
        _, end = max(matches)
        assert drafts == tokens[end:][:count]


@pytest.mark.parametrize("mode", MODES)
def test_steps_mix_any_number_of_drafts(mode: str) -> None:
    # A text that repeats what the model is going to say, one that repeats other things, and noise.
    start = random_prompt(12, seed=3)
    said = cold_tokens(toy_model(), tuple(start), 20)
    prompts = [
        start + said[:16] + start + said[:2],
        3 * random_prompt(9, seed=4) + [1],
        random_prompt(30, seed=5),
    ]
    engine = engine_for(3, None, mode, speculative_method="ngram")
    ids = [engine.add_request(prompt, SamplingParams(max_tokens=24)) for prompt in prompts]
    done = step(engine) | finish(engine)
    for request_id, prompt in zip(ids, prompts):
        assert_says_what_cold_says(engine.model, prompt, done[request_id])
    verified = [e for e in engine.events if isinstance(e, DraftsVerified)]
    decodes = [e for e in engine.events if isinstance(e, RowScheduled) and e.kind == "decode"]
    assert {e.num_drafts for e in verified} >= {1, 3}
    assert {e.num_tokens for e in decodes} >= {1, 2, 4}
