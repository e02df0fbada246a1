"""Everything that four verify steps in a row can do, from every place around a block boundary.

A verify step of a request is two numbers: how many drafts it checks, and how many tokens it keeps. With
2 drafts at most there are 6 such pairs, so 1296 scripts of four steps. All of them run, shuffled, as
concurrent requests of one engine, from prompts that end everywhere around a boundary, in blocks that
hold more and fewer tokens than a step checks, in all cache modes: with a state per token, and with a
ring of inputs that is full after every step or two.
"""

from __future__ import annotations

import random
from itertools import product

import pytest
from support.ghost_checks import (
    PublishedStates,
    ScriptedEngine,
    assert_few_blocks,
    of_kind,
    watch_blocks,
)

from mamba_teach.cache import specs
from mamba_teach.events import (
    BlockPublished,
    DraftsVerified,
    Event,
    RequestFinished,
    RequestPreempted,
    RowScheduled,
    StateAccess,
    StateCopied,
)

Script = tuple[tuple[int, int], ...]
STEPS = [(drafts, kept) for drafts in (0, 1, 2) for kept in range(1, drafts + 2)]
SCRIPTS: list[Script] = list(product(STEPS, repeat=4))
random.Random(0).shuffle(SCRIPTS)  # so that rows of one step differ in width

# A step of 1 to 3 tokens passes at most one boundary of the larger blocks, and up to 3 of the smaller.
PLACES = [
    (mode, layers, size, length)
    for layers, size, lengths in [
        ("M*", 4, (6, 7, 8, 9)),
        ("M*", 3, (8, 9)),
        ("MM", 2, (7, 8)),
        ("M", 1, (8,)),
    ]
    for length in lengths
    for mode in ("none", "align", "all")
    if mode != "none" or size == 4  # there, a block is the whole request anyway
]
# Where replay may be at its most different: no boundary at all, one at most a step, several a step. A
# ring of 4 inputs cannot wait for a second step of 3.
REPLAYED = [
    ("none", "M*", 4, 8), ("align", "M*", 4, 7), ("all", "M*", 4, 9), ("align", "MM", 2, 8),
    ("all", "M", 1, 8),
]  # fmt: skip
CASES = [(*place, "slots") for place in PLACES] + [(*place, "replay") for place in REPLAYED]


def test_there_are_as_many_scripts_as_there_should_be() -> None:
    assert len(set(SCRIPTS)) == 6**4 == 1296
    # The prompts of the largest blocks end everywhere around a boundary.
    assert {length % 4 for _, _, size, length in PLACES if size == 4} == {0, 1, 2, 3}


@pytest.mark.parametrize(("mode", "layers", "size", "length", "spec_state"), CASES)
def test_every_script_of_four_steps(
    mode: str, layers: str, size: int, length: int, spec_state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(specs, "RING_CAPACITY", 4)
    s = ScriptedEngine(
        layers, 2, mamba_cache_mode=mode, block_size=size, max_num_seqs=48,
        max_num_batched_tokens=300, max_model_len=32, spec_state=spec_state,
    )  # fmt: skip
    watch_blocks(s.engine)
    published = PublishedStates(s.engine)
    script_of: dict[str, Script] = {}
    for number, script in enumerate(SCRIPTS):
        # Texts of their own, so that nobody can take a neighbour's state for its own. Behind the
        # script come two steps without drafts: they read what it has left.
        prompt = random.Random(number).choices(range(97), k=length)
        output = 1 + sum(kept for _, kept in script) + 2
        steps = [(drafts, kept - 1) for drafts, kept in script]
        request_id = s.add(prompt, steps, output, salt=str(number))
        script_of[request_id] = script
        published.learn(prompt + s.texts[request_id][1], salt=str(number))
    while s.engine.has_unfinished_requests():
        s.step()  # compares all tokens with the closed form
        assert_few_blocks(s.engine)
        published.check()

    events = s.engine.events
    assert sorted(e.request_id for e in of_kind(events, RequestFinished)) == sorted(script_of)
    verified: dict[str, list[tuple[int, int]]] = {request_id: [] for request_id in script_of}
    for event in of_kind(events, DraftsVerified):
        verified[event.request_id].append((event.num_drafts, 1 + event.num_accepted))
    for request_id, script in script_of.items():
        assert verified[request_id] == [step for step in script if step[0] > 0]
    if spec_state == "replay" and size == 4:  # smaller blocks are complete before a ring is full
        assert num_checkpoints(events) > 1000
    kinds = {type(event) for event in events}
    assert RequestPreempted not in kinds, "a script was cut in two"
    caches = mode != "none"
    assert (BlockPublished in kinds, StateCopied in kinds) == (caches, caches)


def num_checkpoints(events: list[Event]) -> int:
    """With replay, decode rows write a state only where they must."""
    kinds, count = {}, 0
    for event in events:
        if isinstance(event, RowScheduled):
            kinds[event.request_id] = event.kind
        elif isinstance(event, StateAccess) and kinds[event.request_id] == "decode":
            count += len(event.writes)
    return count
