"""Tasks 1 to 3: what a layer computes and keeps.

Expected values come from loops over single numbers in float64 or over single tokens, not from the
package's kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from mamba_teach.exercises.checker import Case, Checker
from mamba_teach.exercises.counting import count_work

# One step of the recurrence -----------------------------------------------------------------------


def _step_inputs(
    heads: int, groups: int, head_dim: int, state_size: int, seed: int
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "h": random(heads, head_dim, state_size),
        "x": random(heads, head_dim),
        "dt": random(heads).abs(),
        "A": -random(heads).exp(),
        "B": random(groups, state_size),
        "C": random(groups, state_size),
        "D": random(heads),
    }


def _step_by_numbers(
    h: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    heads, head_dim, state_size = h.shape
    h, x, dt, A, B, C, D = (t.double() for t in (h, x, dt, A, B, C, D))
    new, y = torch.zeros_like(h), torch.zeros_like(x)
    for i in range(heads):
        g = i // (heads // len(B))  # the group that head i reads
        for p in range(head_dim):
            for s in range(state_size):
                new[i, p, s] = (dt[i] * A[i]).exp() * h[i, p, s] + dt[i] * x[i, p] * B[g, s]
                y[i, p] += new[i, p, s] * C[g, s]
            y[i, p] += D[i] * x[i, p]
    return new, y


def _step_cases() -> Iterator[Case]:
    sizes = [(1, 1, 1, 1), (1, 1, 2, 3), (2, 1, 2, 3), (2, 2, 1, 2), (4, 2, 2, 3), (6, 3, 1, 2)]
    for seed, size in enumerate(sizes * 2):
        inputs = _step_inputs(*size, seed)
        yield Case(inputs, _step_by_numbers(**inputs))


def _step_reference(
    h: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    B, C = (
        t[:, None].expand(-1, len(x) // len(B), -1).reshape(len(x), 1, h.shape[-1]) for t in (B, C)
    )  # (G, N) -> (H, 1, N)
    new = (dt * A).exp()[:, None, None] * h + (dt[:, None] * x)[:, :, None] * B  # (H, P, N)
    return new, (new * C).sum(-1) + D[:, None] * x


def _step_score(function: Callable[..., Any]) -> dict[str, int]:
    work = count_work(function, _step_inputs(8, 2, 16, 32, seed=0))
    return {"launches": work.launches, "bytes moved": work.bytes_moved}


check_state_step = Checker(
    task="one step of the recurrence",
    make_cases=_step_cases,
    reference=_step_reference,
    hints=(
        "The old state fades before anything is added: by exp(dt * A), one number per head. What is "
        "added is dt * x times B, every entry of x with every entry of B.",
        "Bring everything to (H, P, N) by inserting axes of length 1: dt is (H, 1, 1), x is (H, P, 1), "
        "B is (H, 1, N). B and C come per group, so each row must be repeated for H / G heads first; "
        "head h reads group h // (H / G).",
        "new = (dt * A).exp()[:, None, None] * h + (dt[:, None] * x)[:, :, None] * B[:, None], with "
        "B = B.repeat_interleave(len(x) // len(B), 0). Then y sums new * C[:, None] over its last "
        "axis, and adds D[:, None] * x.",
    ),
    score=_step_score,
)

# The window -----------------------------------------------------------------------------------------


def _window_inputs(entries: int, tokens: int, channels: int) -> dict[str, torch.Tensor]:
    numbers = torch.arange(1.0, 1 + (entries + tokens) * channels).reshape(-1, channels)
    return {"history": numbers[:entries], "x": numbers[entries:]}


def _window_cases() -> Iterator[Case]:
    for entries in (3, 1, 2):
        for tokens in (3, 5, 2, 1, 0, 8):
            inputs = _window_inputs(entries, tokens, channels=2)
            rows = [*inputs["history"].tolist(), *inputs["x"].tolist()]
            yield Case(inputs, torch.tensor(rows[len(rows) - entries :]))


def _window_reference(history: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.cat([history[len(x) :], x[-len(history) :]])


def _window_score(function: Callable[..., Any]) -> dict[str, int]:
    return {"bytes moved": count_work(function, _window_inputs(3, 1000, 64)).bytes_moved}


check_window_after = Checker(
    task="the window after q tokens",
    make_cases=_window_cases,
    reference=_window_reference,
    hints=(
        "What does the filter have to see when the next token comes? The inputs just before it, "
        "whether they came in this step or in an earlier one.",
        "Think of one list, history followed by x, and take its end. Some steps are shorter than the "
        "window; then a part of the history stays.",
        "torch.cat([history, x])[-len(history):] is right for every q. For a better score copy only "
        "what survives: nothing of x but its last entries, nothing of the history but what x leaves.",
    ),
    score=_window_score,
)

# Chunks ---------------------------------------------------------------------------------------------


def _chunk_cases() -> Iterator[Case]:
    for n, q in ((0, 4), (0, 10), (6, 13), (3, 1), (4, 4), (7, 2), (5, 0), (8, 9)):
        for chunk_size in (4, 8, 1, 5):
            ends = [i + 1 for i in range(q) if (n + i + 1) % chunk_size == 0 or i == q - 1]
            yield Case({"n": n, "q": q, "Q": chunk_size}, ends)


def _chunk_reference(n: int, q: int, Q: int) -> list[int]:
    inside = [end - n for end in range((n // Q + 1) * Q, n + q, Q)]
    return [*inside, q] if q else []


check_chunk_ends = Checker(
    task="chunk ends on absolute multiples",
    make_cases=_chunk_cases,
    reference=_chunk_reference,
    hints=(
        "A prompt must be cut in the same places however it arrives. So a chunk's end is a property "
        "of the whole sequence, not of the piece that is computed now.",
        "List the multiples of Q in (n, n + q) and subtract n. The last token ends a chunk, too, "
        "wherever it is; and no token, no chunk.",
        "range((n // Q + 1) * Q, n + q, Q) are the absolute ends before the last token; then q.",
    ),
)
