"""Tasks 9 and 10: after a step, states go home and are published; before the next, rows are padded.

Expected values come from following single tokens, and from plain lists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from mamba_teach.cache.columns import boundaries, last_scheduled_column
from mamba_teach.exercises.checker import Case, Checker
from mamba_teach.exercises.counting import count_work

# Boundaries -----------------------------------------------------------------------------------------


def _home_cases() -> Iterator[Case]:
    for n, q, a, block_size in (
        (13, 4, 4, 16), (13, 4, 2, 16), (12, 4, 4, 16), (15, 4, 1, 16), (16, 4, 4, 16), (3, 6, 6, 4),
        (3, 6, 5, 4), (2, 6, 6, 2), (2, 6, 3, 2), (7, 4, 4, 4), (0, 4, 4, 1), (30, 2, 2, 32),
        (31, 3, 1, 32), (5, 1, 1, 4), (9, 8, 7, 4),
    ):  # fmt: skip
        first = (n + q - 1) // block_size  # the step began to write there
        moves = [
            ((n + i + 1) // block_size - 1, first + i, i)
            for i in range(a)
            if (n + i + 1) % block_size == 0
        ]
        yield Case({"n": n, "q": q, "a": a, "B": block_size}, moves)


def _home_reference(n: int, q: int, a: int, B: int) -> list[tuple[int, int, int]]:
    last = last_scheduled_column(n + q, B)
    return [(b // B - 1, last + b - n - 1, b - n - 1) for b in boundaries(n, n + a, B)]


check_states_to_publish = Checker(
    task="boundary states to bring home and publish",
    make_cases=_home_cases,
    reference=_home_reference,
    hints=(
        "A block may be published when the state at its end is in it. A verify step has put that "
        "state somewhere else: into the slot of the token that completed the block.",
        "Every multiple b of B with n < b <= n + a, and there can be several. The state after b tokens "
        "was written by the step's token number b - n - 1, counted from 0; the step began to write at "
        "the column of its last token, kept or not. Home is the block that b completes.",
        "last = (n + q - 1) // B; for b in range((n // B + 1) * B, n + a + 1, B): "
        "(b // B - 1, last + b - n - 1, b - n - 1).",
    ),
)

# Padding --------------------------------------------------------------------------------------------

STALE = 77  # what an earlier, larger step has left in the buffers


def _padding_inputs(rows: int, size: int, k: int) -> dict[str, Any]:
    room = size + 3
    return {
        "query_start_loc": (torch.arange(rows + 1) * (1 + k)).int(),
        "slots": (torch.arange(rows * (1 + k)) + 1).reshape(rows, 1 + k).int(),
        "counts": (torch.arange(rows) % (1 + k) + 1).int(),
        "size": size,
        "buffers": (
            torch.full((room + 1,), STALE, dtype=torch.int32),
            torch.full((room, 1 + k), STALE, dtype=torch.int32),
            torch.full((room,), STALE, dtype=torch.int32),
        ),
    }


def _padding_cases() -> Iterator[Case]:
    for rows, size, k in ((2, 2, 1), (1, 2, 1), (3, 8, 3), (1, 4, 0), (5, 8, 2), (4, 4, 5)):
        inputs = _padding_inputs(rows, size, k)
        starts = [min(i, rows) * (1 + k) for i in range(size + 1)]
        slots = [*inputs["slots"].tolist(), *[[0] * (1 + k)] * (size - rows)]
        counts = [*inputs["counts"].tolist(), *[1] * (size - rows)]
        yield Case(inputs, (torch.tensor(starts), torch.tensor(slots), torch.tensor(counts)))


def _padding_reference(
    query_start_loc: torch.Tensor,
    slots: torch.Tensor,
    counts: torch.Tensor,
    size: int,
    buffers: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    starts_buffer, slots_buffer, counts_buffer = buffers
    rows = len(slots)
    starts_buffer[: rows + 1].copy_(query_start_loc)
    starts_buffer[rows + 1 : size + 1] = query_start_loc[-1]
    slots_buffer[:rows].copy_(slots)
    slots_buffer[rows:size].zero_()
    counts_buffer[:rows].copy_(counts)
    counts_buffer[rows:size].fill_(1)
    return starts_buffer[: size + 1], slots_buffer[:size], counts_buffer[:size]


def _in_the_buffers(inputs: Mapping[str, Any], found: Any) -> str | None:
    names = ("query_start_loc", "slots", "counts")
    for name, buffer, view in zip(names, inputs["buffers"], found, strict=True):
        if not isinstance(view, torch.Tensor) or view.data_ptr() != buffer.data_ptr():
            return (
                f"returns {name} in other memory: a graph reads the buffer, from its first row on"
            )
    return None


def _padding_score(function: Callable[..., Any]) -> dict[str, int]:
    work = count_work(function, _padding_inputs(20, 32, 3))
    return {"launches": work.launches, "bytes moved": work.bytes_moved}


check_pad_rows = Checker(
    task="a small batch in the graph of a larger one",
    make_cases=_padding_cases,
    reference=_padding_reference,
    hints=(
        "A row of padding must do nothing: no tokens, no state of anybody's, and a count that is a "
        "valid index. And the graph reads the memory that it has seen at capture, nothing else.",
        "Fill the front of each buffer in place, then write its padding into the rows behind, up to "
        "size. A row without tokens begins where the last one ended; the null slot is 0; a count of 1 "
        "points to entry 0.",
        "For each buffer: buffer[:rows].copy_(values), buffer[rows:size] = padding, return "
        "buffer[:size]; query_start_loc has one entry more everywhere, and its padding is its own "
        "last entry.",
    ),
    mutates=("buffers",),
    also=_in_the_buffers,
    score=_padding_score,
)
