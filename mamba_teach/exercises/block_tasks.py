"""Tasks 4 and 5: how large a block is, and which of them can be hit.

Expected values: a size found by trying one after the other, and hits of which the case knows the
length because it made them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mamba_teach.cache.block_hash import first_parent, hash_block
from mamba_teach.cache.specs import BLOCK_MULTIPLE, cdiv
from mamba_teach.exercises.checker import Case, Checker
from mamba_teach.exercises.counting import PublishedBlocks

# Size -----------------------------------------------------------------------------------------------


def _size_cases() -> Iterator[Case]:
    state_sizes = (1024, 512, 4096, 4097, 4095, 1, 29_696, 4_317_184, 0)
    for state_bytes in state_sizes:
        for token_bytes in (64, 96, 4096, 1):
            size = BLOCK_MULTIPLE
            while size * token_bytes < state_bytes:
                size += BLOCK_MULTIPLE
            yield Case({"state_bytes": state_bytes, "token_bytes": token_bytes}, size)


def _size_reference(state_bytes: int, token_bytes: int) -> int:
    return BLOCK_MULTIPLE * max(1, cdiv(state_bytes, BLOCK_MULTIPLE * token_bytes))


check_block_size = Checker(
    task="tokens per block, from bytes",
    make_cases=_size_cases,
    reference=_size_reference,
    hints=(
        "One pool of equal pages serves states and keys. A state cannot be cut, so it decides how "
        "large a page is; the number of tokens in it can be chosen.",
        "In units of 16 tokens: how many such units of keys and values are at least as large as one "
        "state? It is a division that rounds up, and there is at least one unit.",
        "16 * max(1, -(-state_bytes // (16 * token_bytes))): in Python, -(-a // b) rounds up.",
    ),
)

# Hits -----------------------------------------------------------------------------------------------


def _chain(tokens: Sequence[int], block_size: int, salt: str | None = None) -> list[bytes]:
    parent, hashes = first_parent(salt), []
    for end in range(block_size, len(tokens) + 1, block_size):
        parent = hash_block(parent, tokens[end - block_size : end])
        hashes.append(parent)
    return hashes


def _hit_case(tokens: list[int], block_size: int, kept: Sequence[int]) -> Case:
    """A case in which the states at the end of blocks ``kept`` (from 0 on) are published."""
    chain = _chain(tokens, block_size)
    # Strangers: every block's tokens behind nothing at all, and the whole prompt under a salt.
    strangers = [
        hash_block(first_parent(None), tokens[end - block_size : end])
        for end in range(2 * block_size, len(tokens) + 1, block_size)
    ]
    strangers += _chain(tokens, block_size, salt="somebody else")
    known = [chain[i] for i in kept]
    usable = [(i + 1) * block_size for i in kept if (i + 1) * block_size < len(tokens)]
    published = PublishedBlocks([*known, *(h for h in strangers if h not in chain)])
    inputs = {"tokens": tokens, "block_size": block_size, "published": published}
    return Case(inputs, max(usable, default=0))


def _hit_cases() -> Iterator[Case]:
    rng = random.Random(0)
    prompt = list(range(10, 30))
    yield _hit_case(prompt, 8, [0])
    yield _hit_case(prompt, 8, [0, 1])
    yield _hit_case(prompt, 8, [])
    yield _hit_case(prompt, 8, [1])  # the one before it was evicted
    yield _hit_case(prompt, 4, [4])  # all of the prompt: one token too many
    yield _hit_case(prompt, 4, [2, 4])
    yield _hit_case(prompt[:3], 4, [])
    yield _hit_case(prompt[:4], 4, [0])
    for _ in range(24):
        tokens = [rng.randrange(5) for _ in range(rng.randrange(1, 30))]
        block_size = rng.choice((1, 2, 4, 8))
        blocks = range(len(tokens) // block_size)
        yield _hit_case(tokens, block_size, [i for i in blocks if rng.random() < 0.3])


def _hit_reference(tokens: list[int], block_size: int, published: PublishedBlocks) -> int:
    hashes = _chain(tokens[: len(tokens) - 1], block_size)
    for blocks in range(len(hashes), 0, -1):
        if hashes[blocks - 1] in published:
            return blocks * block_size
    return 0


def _hit_score(function: Callable[..., Any]) -> dict[str, int]:
    case = _hit_case([i % 97 for i in range(2000)], 16, [10, 40, 121])
    function(**case.inputs)
    return {"look-ups": case.inputs["published"].num_lookups}


check_longest_hit = Checker(
    task="the longest hit of a state group",
    make_cases=_hit_cases,
    reference=_hit_reference,
    hints=(
        "A state is the sum of everything before it, so one block is all that a hit needs. Blocks in "
        "front of it may be gone. But at least one token must be left to compute.",
        "First the chain: each block's hash takes the hash of the block before it as its parent, and "
        "first_parent(None) stands before the first. Then look from the longest prefix of at most "
        "len(tokens) - 1 tokens to the shortest.",
        "parent = hash_block(parent, tokens[i * B : (i + 1) * B]) for each i in "
        "range((len(tokens) - 1) // B), all kept in a list; then the first of "
        "range(len(hashes), 0, -1) whose hashes[i - 1] is published, times B; else 0.",
    ),
    score=_hit_score,
)
