"""Ten functions to write, and a checker for each: the exercises of the course.

    from mamba_teach.exercises import check_chunk_ends

    def chunk_ends(n, q, Q): ...
    check_chunk_ends(chunk_ends)          # says where it goes wrong, or what it costs
    check_chunk_ends(chunk_ends, hint=1)  # hints 1 to 3

The tasks are in ``notebooks/exercises.ipynb``, one way to solve each in ``notebooks/solutions.ipynb``.
"""

from mamba_teach.exercises.block_tasks import check_block_size, check_longest_hit
from mamba_teach.exercises.checker import Case, Checker, Verdict
from mamba_teach.exercises.commit_tasks import check_pad_rows, check_states_to_publish
from mamba_teach.exercises.layer_tasks import (
    check_chunk_ends,
    check_state_step,
    check_window_after,
)
from mamba_teach.exercises.step_tasks import (
    check_gather_slots,
    check_state_columns,
    check_verify_drafts,
)

CHECKERS: tuple[Checker, ...] = (
    check_state_step,
    check_window_after,
    check_chunk_ends,
    check_block_size,
    check_longest_hit,
    check_state_columns,
    check_verify_drafts,
    check_gather_slots,
    check_states_to_publish,
    check_pad_rows,
)

__all__ = [
    "CHECKERS",
    "Case",
    "Checker",
    "Verdict",
    "check_block_size",
    "check_chunk_ends",
    "check_gather_slots",
    "check_longest_hit",
    "check_pad_rows",
    "check_state_columns",
    "check_state_step",
    "check_states_to_publish",
    "check_verify_drafts",
    "check_window_after",
]
