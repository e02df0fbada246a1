"""Tasks 6 to 8: a step that checks drafts. Where it reads and writes, and what it yields.

Expected values come from walks: requests that are followed token by token, with a note of where every
state was put.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from mamba_teach.exercises.checker import Case, Checker
from mamba_teach.exercises.counting import count_work
from mamba_teach.runner.mamba_metadata import gather_slots
from mamba_teach.spec_decode.rejection import verify

# Columns --------------------------------------------------------------------------------------------


def _column_of(token: int, block_size: int) -> int:
    """By counting the blocks that are complete before the token."""
    return sum(1 for before in range(1, token + 1) if before % block_size == 0)


def _walk(prompt: int, block_size: int, k: int, num_steps: int, seed: int) -> Iterator[Case]:
    """The verify steps of one request."""
    rng = random.Random(seed)
    n, anchor, accepted = prompt, _column_of(prompt - 1, block_size), 1
    where = {n: anchor}  # state after so many tokens: column
    if prompt % block_size == 0 and rng.random() < 0.5:
        anchor = -1  # the prompt was a prefix hit: there was no step that began to write anywhere
    for _ in range(num_steps):
        q = 1 + rng.randint(0, k)
        last = _column_of(n + q - 1, block_size)
        writes = [last + i for i in range(q)]
        inputs = {"n": n, "q": q, "anchor": anchor, "accepted": accepted, "B": block_size}
        yield Case(inputs, (where[n], writes))
        kept = rng.randint(1, q)
        where = {n + 1 + i: column for i, column in enumerate(writes)}
        n, anchor, accepted = n + kept, last, kept


def _column_cases() -> Iterator[Case]:
    yield Case({"n": 13, "q": 4, "anchor": 0, "accepted": 1, "B": 16}, (0, [1, 2, 3, 4]))
    yield Case({"n": 15, "q": 4, "anchor": 1, "accepted": 2, "B": 16}, (2, [1, 2, 3, 4]))
    for seed, (prompt, block_size, k) in enumerate(
        [(5, 4, 3), (16, 16, 3), (8, 8, 1), (30, 16, 5), (1, 4, 2), (12, 4, 0), (4, 4, 5)]
    ):
        yield from _walk(prompt, block_size, k, 12, seed)


def _columns_reference(n: int, q: int, anchor: int, accepted: int, B: int) -> tuple[int, list[int]]:
    read = (n - 1) // B if anchor < 0 else anchor + accepted - 1
    last = (n + q - 1) // B
    return read, list(range(last, last + q))


check_state_columns = Checker(
    task="columns that a step reads and writes",
    make_cases=_column_cases,
    reference=_columns_reference,
    hints=(
        "Reading and writing are two questions. Where it writes depends on this step's tokens; where "
        "it reads depends on where the step before it wrote, and on how many of those states count.",
        "The first state goes to the column of the step's last token, number n + q - 1, the others "
        "behind it. The state to read is the accepted-th of those that began at the anchor. Without "
        "an anchor (-1) nothing was rejected, and the state is in the column of token n - 1.",
        "read = anchor + accepted - 1 if anchor >= 0 else (n - 1) // B; "
        "last = (n + q - 1) // B; writes = list(range(last, last + q)).",
    ),
)

# Verification ---------------------------------------------------------------------------------------


def _says(text: tuple[int, ...]) -> int:
    """A toy model: the next token of a text of tokens 0 to 2."""
    return (len(text) * 7 + sum((i + 1) * t for i, t in enumerate(text))) % 3


def _verify_cases() -> Iterator[Case]:
    yield Case({"drafts": [5, 8, 2], "chosen": [5, 8, 9, 4]}, [5, 8, 9])
    yield Case({"drafts": [5, 8, 2], "chosen": [6, 8, 9, 4]}, [6])
    yield Case({"drafts": [5, 8, 2], "chosen": [5, 8, 2, 4]}, [5, 8, 2, 4])
    yield Case({"drafts": [], "chosen": [3]}, [3])
    rng = random.Random(1)
    for _ in range(40):
        text = tuple(rng.randrange(3) for _ in range(rng.randrange(5)))
        drafts = [rng.randrange(3) for _ in range(rng.randrange(5))]
        chosen = [_says((*text, *drafts[:i])) for i in range(len(drafts) + 1)]
        said: list[int] = []  # what the model says on its own, for as long as the step knows it
        while not said or (said == drafts[: len(said)]):
            said.append(_says((*text, *said)))
            if len(said) > len(drafts):
                break
        yield Case({"drafts": drafts, "chosen": chosen}, said)


check_verify_drafts = Checker(
    task="tokens that a verify step yields",
    make_cases=_verify_cases,
    reference=verify,
    hints=(
        "The model's second choice was made behind the first draft, its third behind the first two. "
        "Such a choice means something only if the text really goes on like that.",
        "Take the model's choices one by one. The first that differs from its draft is still the "
        "model's own word; everything behind it was said about a text that will never exist.",
        "Count the drafts that agree from the front, say m; the answer is chosen[: m + 1].",
    ),
)

# Gather ---------------------------------------------------------------------------------------------


def _gather_inputs(rows: int, width: int, k: int, seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)

    def below(limit: int, count: int) -> torch.Tensor:
        return torch.randint(limit, (count,), generator=generator)

    slots = torch.randperm((rows + 2) * width, generator=generator) + 1
    return {
        "table": slots.reshape(rows + 2, width).int(),
        "rows": torch.randperm(rows + 2, generator=generator)[:rows],
        "read_from": below(width - k, rows),
        "write_to": below(width - k, rows),
        "k": k,
    }


def _gather_cases() -> Iterator[Case]:
    sizes = [(1, 4, 0), (1, 5, 3), (2, 6, 1), (3, 8, 3), (4, 9, 5), (5, 3, 2)]
    for seed, size in enumerate(sizes * 2):
        inputs = _gather_inputs(*size, seed)
        table, k = inputs["table"].tolist(), inputs["k"]
        expected = tuple(
            torch.tensor(
                [
                    table[row][column : column + 1 + k]
                    for row, column in zip(inputs["rows"].tolist(), inputs[name].tolist())
                ]
            )
            for name in ("read_from", "write_to")
        )
        yield Case(inputs, expected)


def _gather_reference(
    table: torch.Tensor, rows: torch.Tensor, read_from: torch.Tensor, write_to: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    offsets = torch.arange(1 + k)[None]  # (1, 1 + k)
    src = gather_slots(table, rows, read_from, offsets)
    return src, gather_slots(table, rows, write_to, offsets)


def _two_tensors(inputs: Mapping[str, Any], found: Any) -> str | None:
    src, dst = (torch.as_tensor(slots) for slots in found)
    before = dst.clone()
    src.zero_()
    if torch.equal(dst, before):
        return None
    return "returns two names of one memory: filling the sources has changed the destinations"


def _gather_score(function: Callable[..., Any]) -> dict[str, int]:
    work = count_work(function, _gather_inputs(16, 40, 3, seed=0))
    return {"launches": work.launches}


check_gather_slots = Checker(
    task="source and destination slots of all rows",
    make_cases=_gather_cases,
    reference=_gather_reference,
    hints=(
        "Two gathers, two tensors: a step may read other blocks than it writes. And the i-th row of "
        "the step is not the i-th row of the table.",
        "Indexing with two integer tensors pairs them up after broadcasting. You want (R, 1) for the "
        "table's rows and (R, 1 + k) for its columns; arange(1 + k) makes neighbours of a column.",
        "table[rows[:, None], read_from[:, None] + torch.arange(1 + k)], and the same for write_to.",
    ),
    also=_two_tensors,
    score=_gather_score,
)
