"""Everything that four verify steps in a row can do, from every place around a block boundary.

A verify step of a request is two numbers: how many drafts it checks, and how many tokens it keeps. With
2 drafts at most there are 6 such pairs, so 1296 scripts of four steps. All of them run, shuffled, as
concurrent requests of one engine, from prompts that end everywhere around a boundary, in blocks that
hold more and fewer tokens than a step checks, in all cache modes.
"""

from __future__ import annotations

import random
from itertools import product

import pytest
from support.ghost_checks import PublishedStates, assert_few_blocks, drafts_with, watch_blocks

from mamba_teach import Engine, EngineConfig, GhostModel, SamplingParams
from mamba_teach.events import BlockPublished, DraftsVerified, RequestPreempted, StateCopied
from mamba_teach.spec_decode.scripted_proposer import ScriptedProposer

VOCAB = 97
STEPS = [(drafts, kept) for drafts in (0, 1, 2) for kept in range(1, drafts + 2)]
SCRIPTS = list(product(STEPS, repeat=4))
random.Random(0).shuffle(SCRIPTS)  # so that rows of one step differ in width

# Blocks that are hit have all of a step inside, or less than one. Attention has its own blocks, so
# "M*" also has two groups.
PLACES = [
    (mode, layers, size, length)
    for layers, size, lengths in [("M*", 4, (6, 7, 8, 9)), ("MM", 2, (7, 8)), ("M", 1, (8,))]
    for length in lengths
    for mode in ("none", "align", "all")
    if mode != "none" or size == 4  # there, a block is the whole request anyway
]


def test_there_are_as_many_scripts_as_there_should_be() -> None:
    assert len(set(SCRIPTS)) == 6**4 == 1296
    # The prompts of the largest blocks end everywhere around a boundary.
    assert {length % 4 for _, _, size, length in PLACES if size == 4} == {0, 1, 2, 3}


@pytest.mark.parametrize(("mode", "layers", "size", "length"), PLACES)
def test_every_script_of_four_steps(mode: str, layers: str, size: int, length: int) -> None:
    scripts: dict[str, tuple[tuple[int, int], ...]] = {}
    said: dict[str, list[int]] = {}
    asked: dict[str, int] = {}

    def script(request_id: str, tokens: list[int], max_drafts: int) -> list[int]:
        step = asked[request_id] = asked.get(request_id, -1) + 1
        if step >= len(scripts[request_id]):
            return []  # the last two tokens come one by one, and read what the script has left
        drafts, kept = scripts[request_id][step]
        assert drafts <= max_drafts
        return drafts_with(said[request_id][len(tokens) - length :], drafts, kept - 1, VOCAB)

    model = GhostModel(layers, vocab_size=VOCAB)
    engine = Engine(
        model,
        EngineConfig(
            mamba_cache_mode=mode, block_size=size, num_speculative_tokens=2, max_num_seqs=48,
            max_num_batched_tokens=300, max_model_len=32, poison=True, device="cpu",
        ),
        proposer=ScriptedProposer(script),
    )  # fmt: skip
    watch_blocks(engine)
    published = PublishedStates(engine)
    for number, of_request in enumerate(SCRIPTS):
        # Texts of their own, so that nobody can take a neighbour's state for its own.
        prompt = random.Random(number).choices(range(VOCAB), k=length)
        output = 1 + sum(kept for _, kept in of_request) + 2
        salt = str(number)
        params = SamplingParams(max_tokens=output)
        request_id = engine.add_request(prompt, params, cache_salt=salt)
        scripts[request_id] = of_request
        said[request_id] = model.continuation(prompt, output)
        published.learn(prompt + said[request_id], salt)
    outputs: dict[str, list[int]] = {}
    while engine.has_unfinished_requests():
        for step_output in engine.step():
            if step_output.finish_reason:
                outputs[step_output.request_id] = list(step_output.token_ids)
        assert_few_blocks(engine)
        published.check()

    assert outputs == said
    verified: dict[str, list[tuple[int, int]]] = {request_id: [] for request_id in scripts}
    for event in engine.events:
        if isinstance(event, DraftsVerified):
            counts = (event.num_drafts, 1 + event.num_accepted)
            verified[event.request_id].append(counts)
    for request_id, of_request in scripts.items():
        assert verified[request_id] == [step for step in of_request if step[0] > 0]
    kinds = {type(event) for event in engine.events}
    assert RequestPreempted not in kinds, "a script was cut in two"
    caches = mode != "none"
    assert (BlockPublished in kinds, StateCopied in kinds) == (caches, caches)
