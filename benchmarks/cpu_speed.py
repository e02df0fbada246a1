"""Prefill and decode of the engine and its peers: the same tokens first, then how fast."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from cpu_model import CONFIG, random_prompts
from cpu_sides import EngineSide, Side
from cpu_timing import Clock, compare, in_turns

from mamba_teach import HybridModel, load_model
from mamba_teach.model.metadata import uncached_step

PREFILLS = ((1, 128), (1, 512), (1, 2048), (8, 64))  # prompts, tokens of each
DECODES = ((1, 64), (8, 64))
COMPARED = 16  # greedy tokens that are compared
DECODED = 24  # that are timed
NEAR_TIE = 1e-3
SHARED, OWN = 1856, 64  # tokens of a prefix that is cached, and behind it


def check_agreement(folder: Path, sides: Sequence[Side]) -> list[dict[str, Any]]:
    """Greedy tokens of all sides on all workloads, held against the first side's.

    Where two part, the logits are computed anew without any cache; if both tokens are within
    :data:`NEAR_TIE` of the best, rounding may decide and it is a *tie*.

    Raises:
        RuntimeError: they part for no such reason; there is nothing to time then.
    """
    model, lines = load_model(folder), []
    for number, (rows, length) in enumerate(dict.fromkeys((*PREFILLS, *DECODES))):
        prompts = random_prompts(rows, length, 1000 + number)
        said = {side.name: continuations(side, prompts, COMPARED) for side in sides}
        expected = said[sides[0].name]
        for name, texts in said.items():
            ties = 0
            for prompt, ours, theirs in zip(prompts, expected, texts, strict=True):
                same = [a == b for a, b in zip(ours, theirs, strict=True)]
                if all(same):
                    continue
                at = same.index(False)
                gap = logit_gap(model, [*prompt, *ours[:at]], (ours[at], theirs[at]))
                if gap > NEAR_TIE:
                    raise RuntimeError(
                        f"{name} and {sides[0].name} part at token {at} behind a prompt of "
                        f"{length}: {theirs[at]} and {ours[at]}, {gap:.2g} apart"
                    )
                ties += 1
            lines.append({"prompts": rows, "length": length, "side": name, "near_ties": ties})
    return lines


def continuations(side: Side, prompts: Sequence[list[int]], num_tokens: int) -> list[list[int]]:
    """Tokens of every prompt."""
    steps = [side.start(prompts, num_tokens), *(side.step() for _ in range(num_tokens - 1))]
    side.finish()
    return [list(of_row) for of_row in zip(*steps, strict=True)]


@torch.no_grad()
def logit_gap(model: HybridModel, text: list[int], tokens: tuple[int, int]) -> float:
    """By how much the worse of two tokens misses being the most likely one behind a text."""
    metadata, caches = uncached_step(model.config, [len(text)])
    hidden = model(torch.tensor(text), metadata, caches)[-1]
    logits = model.compute_logits(hidden)
    return float(logits.max() - logits[list(tokens)].min())


def measure(sides: Sequence[Side], rounds: int, clock: str) -> list[dict[str, Any]]:
    """Tokens per second of all workloads, a line per workload and side."""
    lines = []
    for rows, length in PREFILLS:
        turns = in_turns({s.name: prefill_of(s, rows, length) for s in sides}, rounds)
        what = {"phase": "prefill", "rows": rows, "length": length}
        lines += [what | line for line in compare(turns, rows * length, clock)]
    for rows, length in DECODES:
        turns = in_turns({s.name: decode_of(s, rows, length) for s in sides}, rounds)
        what = {"phase": "decode", "rows": rows, "length": length}
        lines += [what | line for line in compare(turns, rows * DECODED, clock)]
    return lines


def prefill_of(side: Side, rows: int, length: int) -> Any:
    """A turn: prompts to first tokens. All sides read the same prompts, new ones in every round."""

    def turn(number: int, clock: Clock) -> None:
        prompts = random_prompts(rows, length, number)
        with clock:
            side.start(prompts, 2)
        side.finish()

    return turn


def decode_of(side: Side, rows: int, length: int) -> Any:
    """A turn: so many steps behind short prompts."""

    def turn(number: int, clock: Clock) -> None:
        side.start(random_prompts(rows, length, number), DECODED + 2)
        side.step()
        with clock:
            for _ in range(DECODED):
                side.step()
        side.finish()

    return turn


def measure_hits(folder: Path, rounds: int, clock: str) -> list[dict[str, Any]]:
    """A prompt whose prefix is cached, against the same prompt on an engine without a cache.

    The hit engine has served another prompt with that prefix; the time of that is not counted.
    """
    cold, lines = EngineSide(folder, "no caching"), []
    for mode in ("align", "all"):
        side = EngineSide(folder, f"hit, {mode}", enable_prefix_caching=True, mamba_cache_mode=mode)

        def hit(number: int, clock: Clock, side: EngineSide = side) -> None:
            (prefix,) = random_prompts(1, SHARED, number)
            continuations(side, [prefix + random_prompts(1, OWN, 7)[0]], 2)
            with clock:
                side.start([prefix + random_prompts(1, OWN, 8)[0]], 2)
            side.finish()

        def miss(number: int, clock: Clock) -> None:
            (prefix,) = random_prompts(1, SHARED, number)
            with clock:
                cold.start([prefix + random_prompts(1, OWN, 8)[0]], 2)
            cold.finish()

        turns = in_turns({side.name: hit, cold.name: miss}, rounds)
        block = side.engine.cache.block_size
        what = {"phase": "hit", "mode": mode, "block_size": block, "length": SHARED + OWN}
        what["cached_tokens"] = SHARED // block * block
        lines += [what | line for line in compare(turns, SHARED + OWN, clock)]
    return lines


def describe_model() -> dict[str, Any]:
    """What the numbers are about."""
    return {
        "pattern": CONFIG.pattern, "hidden_size": CONFIG.hidden_size,
        "vocab_size": CONFIG.vocab_size, "state": [CONFIG.mamba_num_heads, CONFIG.mamba_head_dim,
        CONFIG.ssm_state_size], "parameters": HybridModel(CONFIG).num_parameters(),
    }  # fmt: skip
