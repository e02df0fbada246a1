"""The MTP proposer against the head run over the whole text, from scratch, after every step."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from engine.test_speculation import MODES, VOCAB, engine_for, step
from support.models import (
    NEAR_TIE,
    assert_says_what_cold_says,
    cold_tokens,
    random_prompt,
    toy_model,
)

from mamba_teach import Engine, HybridModel, SamplingParams
from mamba_teach.cache.block_hash import first_parent, hash_block
from mamba_teach.cache.block_pool import BlockKey
from mamba_teach.events import DraftsVerified
from mamba_teach.model.metadata import uncached_step
from mamba_teach.spec_decode.proposer import DraftContext, Proposer

HEAD = {"mtp_pattern": "*-"}
PATTERNS = ["M*M-", "M*"]  # in "M*" the head's keys are a group of their own


@torch.no_grad()
def true_hidden(model: HybridModel, tokens: list[int]) -> torch.Tensor:
    """``(T, hidden)`` of the trunk, in one pass from scratch."""
    metadata, caches = uncached_step(model.config, [len(tokens)])
    return model(torch.tensor(tokens), metadata, caches)


@torch.no_grad()
def assert_drafts_are_those_of_the_head(
    model: HybridModel, tokens: list[int], drafts: list[int], unknown: int = 0
) -> None:
    """The drafts behind ``tokens``, each the head's first choice up to rounding.

    Entry ``i`` gets token ``i`` and hidden state ``i - 1``: the trunk's for all known tokens but the
    last, then the head's own. Behind a hit, that of entry ``unknown`` is zero, as entry 0's always is.
    """
    assert model.mtp is not None
    hidden = true_hidden(model, tokens)[:-1]
    previous = torch.cat([torch.zeros_like(hidden[:1]), hidden])
    previous[unknown] = 0.0
    trunk = len(model.config.pattern)
    for i, draft in enumerate(drafts):
        text = tokens + drafts[:i]
        metadata, _ = uncached_step(model.config, [len(text)])
        embedded = model.model.embeddings(torch.tensor(text))
        out = model.mtp(embedded, previous, metadata[trunk:], [None, None])
        logits = model.compute_logits(out[-1])
        gap = float(logits.max() - logits[draft])
        assert gap <= NEAR_TIE, f"draft {i} behind {len(tokens)} tokens is off by {gap}"
        previous = torch.cat([previous, out[-1:]])


class Corrected:
    """The MTP proposer, whose drafts are swapped for better ones after they have been noted.

    A toy head is hardly ever right; this way its keys live through steps of all kinds.
    """

    name = "by the MTP head, corrected"

    def __init__(self, mtp: Proposer, texts: dict[str, list[int]]) -> None:
        self.mtp, self.texts = mtp, texts
        self.noted: list[tuple[int, list[int], list[int]]] = []  # hit, text, drafts

    def propose(self, rows: Any, context: DraftContext) -> list[list[int]]:
        drafts = self.mtp.propose(rows, context)
        better = []
        for row, own in zip(rows, drafts):
            assert len(own) == row.max_drafts
            length = row.num_tokens
            self.noted.append((row.request.num_hit_tokens, row.tokens(0, length), list(own)))
            right = self.texts[row.request.request_id][length:][: row.max_drafts]
            good = Random(length).randint(0, len(right))
            better.append((right[:good] + [(t + 1) % VOCAB for t in right[good:]])[: len(own)])
        return better


def corrected_engine(k: int, mode: str, pattern: str, **settings: Any) -> tuple[Engine, Corrected]:
    engine = engine_for(k, None, mode, pattern, HEAD, **settings)
    assert engine.runner.proposer is not None
    corrected = Corrected(engine.runner.proposer, {})
    engine.runner.proposer = corrected
    return engine, corrected


def serve(
    engine: Engine, corrected: Corrected, prompts: list[list[int]], max_tokens: int
) -> list[tuple[int, list[int], list[int]]]:
    """Serve prompts, check tokens and every draft; returns *(hit, text, drafts)* of all rows."""
    pattern = engine.model.config.pattern
    ids = []
    for prompt in prompts:
        ids.append(engine.add_request(prompt, SamplingParams(max_tokens=max_tokens)))
        said = cold_tokens(toy_model(pattern), tuple(prompt), max_tokens)
        corrected.texts[ids[-1]] = prompt + said
    done: dict[str, list[int]] = {}
    while engine.has_unfinished_requests():
        done |= step(engine)
    found = [noted for noted in corrected.noted if noted[2]]
    corrected.noted.clear()
    for hit, tokens, drafts in found:
        assert_drafts_are_those_of_the_head(engine.model, tokens, drafts, unknown=hit)
    for request_id, prompt in zip(ids, prompts):
        assert_says_what_cold_says(toy_model(pattern), prompt, done[request_id])
    return found


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("k", "budget"), [(1, 64), (3, 64), (3, 16), (5, 24)])
def test_drafts_are_those_of_the_head_from_scratch(
    k: int, budget: int, mode: str, pattern: str
) -> None:
    engine, corrected = corrected_engine(k, mode, pattern, max_num_batched_tokens=budget)
    prompts = [random_prompt(n, seed=n) for n in (1, 14, 45, 33)]
    found = serve(engine, corrected, prompts, max_tokens=24)
    lengths = {len(drafts) for _, _, drafts in found}
    assert max(lengths) == k and (k == 1 or min(lengths) < k), "the last steps have fewer"
    kept = {e.num_accepted for e in engine.events if isinstance(e, DraftsVerified)}
    assert {0, 1, k} <= kept


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("mode", ["align", "all"])
def test_a_hit_costs_one_hidden_state_and_no_token(mode: str, pattern: str) -> None:
    engine, corrected = corrected_engine(3, mode, pattern)
    prompt = random_prompt(40, seed=40)
    first = serve(engine, corrected, [prompt], max_tokens=6)  # ends before another block is full
    again = serve(engine, corrected, [prompt, prompt[:36] + [1, 2, 3]], max_tokens=20)
    assert {hit for hit, _, _ in first} == {0}
    assert {hit for hit, _, _ in again} == {32}


# What is published ----------------------------------------------------------------------------


def published_keys(engine: Engine, tokens: list[int]) -> dict[int, torch.Tensor]:
    """Keys and values of the head, ``(2, 16, kv_heads, head_dim)``, by column of a text's blocks."""
    layer = len(engine.model.config.pattern)
    group = next(g for g, of_group in enumerate(engine.cache.groups) if layer in of_group.layers)
    cache, parent, found = engine.runner.caches[layer], first_parent(None), {}
    for start in range(0, len(tokens) - 15, 16):
        parent = hash_block(parent, tokens[start : start + 16])
        block = engine.cache.pool.lookup(BlockKey(parent, group))
        if block is not None:
            found[start // 16] = torch.stack([cache.key[block], cache.value[block]]).clone()
    return found


@torch.no_grad()
def keys_from_scratch(model: HybridModel, tokens: list[int], unknown: int = 0) -> torch.Tensor:
    """The same for a whole text, ``(2, T, kv_heads, head_dim)``, from the head's first layer."""
    assert model.mtp is not None
    first: Any = model.mtp.layers[0]
    hidden = true_hidden(model, tokens)
    previous = torch.cat([torch.zeros_like(hidden[:1]), hidden[:-1]])
    previous[unknown] = 0.0
    embedded = model.model.embeddings(torch.tensor(tokens))
    joined = first.eh_proj(torch.cat([first.enorm(embedded), first.hnorm(previous)], -1))
    inputs, mixer = first.norm(joined), first.mixer
    return torch.stack([mixer.k_proj(inputs), mixer.v_proj(inputs)]).unflatten(
        -1, (mixer.kv_heads, mixer.head_dim)
    )


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("budget", [64, 20, 16])
def test_published_entries_depend_on_tokens_that_the_hash_covers(budget: int, pattern: str) -> None:
    shared = random_prompt(32, seed=1)
    found = []
    for seed in (2, 3):  # another continuation, another set of drafts, a fresh cache
        engine, corrected = corrected_engine(3, "all", pattern, max_num_batched_tokens=budget)
        prompt = shared + random_prompt(8, seed=seed)
        serve(engine, corrected, [prompt], max_tokens=30)
        text = corrected.texts["r0"]
        blocks = published_keys(engine, text)
        assert list(blocks) == [0, 1, 2, 3]  # 69 of 70 tokens are computed
        exact = keys_from_scratch(engine.model, text)
        for column, ours in blocks.items():
            # The third and fourth were written over guesses, some right and some wrong.
            theirs = exact[:, 16 * column : 16 * (column + 1)]
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5)
        found.append(blocks)
    for column in (0, 1):
        torch.testing.assert_close(found[0][column], found[1][column], rtol=1e-4, atol=2e-5)


def test_entries_published_behind_a_hit_lack_one_hidden_state() -> None:
    engine, corrected = corrected_engine(3, "all", "M*M-")
    prompt = random_prompt(40, seed=4)
    serve(engine, corrected, [prompt], max_tokens=4)
    other = prompt[:35] + random_prompt(6, seed=5)
    serve(engine, corrected, [other], max_tokens=30)
    text = corrected.texts["r1"]
    blocks = published_keys(engine, text)
    assert list(blocks) == [0, 1, 2, 3]
    exact = keys_from_scratch(engine.model, text, unknown=32)
    for column, ours in blocks.items():
        theirs = exact[:, 16 * column : 16 * (column + 1)]
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5)
