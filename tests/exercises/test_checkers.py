"""Every checker accepts a right function, names the place where a wrong one goes wrong, and helps."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mamba_kernels import build_chunk_layout, selective_state_update
from mamba_teach import exercises
from mamba_teach.cache.block_hash import first_parent, hash_block
from mamba_teach.cache.specs import derived_block_size
from mamba_teach.exercises import CHECKERS, Case, Checker
from mamba_teach.exercises.counting import OperationCounter, PublishedBlocks, count_work
from mamba_teach.exercises.layer_tasks import _step_by_numbers, _step_inputs

every_checker = pytest.mark.parametrize("check", CHECKERS, ids=lambda check: check.task)


def named(name: str) -> Checker:
    return getattr(exercises, name)


# Wrong answers, one of a kind each ------------------------------------------------------------------


def per_head(groups: torch.Tensor, heads: int) -> torch.Tensor:
    return groups.repeat_interleave(heads // len(groups), 0)[:, None]  # (H, 1, N)


def forgets_to_fade(h, x, dt, A, B, C, D):
    new = h + (dt[:, None] * x)[..., None] * per_head(B, len(x))
    return new, (new * per_head(C, len(x))).sum(-1) + D[:, None] * x


def groups_in_turns(h, x, dt, A, B, C, D):
    B, C = (t.repeat(len(x) // len(t), 1)[:, None] for t in (B, C))  # head h reads group h % G
    new = (dt * A).exp()[:, None, None] * h + (dt[:, None] * x)[..., None] * B
    return new, (new * C).sum(-1) + D[:, None] * x


def step_in_place(h, x, dt, A, B, C, D):
    h.mul_((dt * A).exp()[:, None, None]).add_((dt[:, None] * x)[..., None] * per_head(B, len(x)))
    return h, (h * per_head(C, len(x))).sum(-1) + D[:, None] * x


def unchained(tokens, block_size, published):
    for blocks in range((len(tokens) - 1) // block_size, 0, -1):
        own = tokens[(blocks - 1) * block_size : blocks * block_size]
        if hash_block(first_parent(None), own) in published:
            return blocks * block_size
    return 0


def chain(tokens, block_size):
    parent = first_parent(None)
    for end in range(block_size, len(tokens) + 1, block_size):
        parent = hash_block(parent, tokens[end - block_size : end])
        yield end, parent


def left_to_right(tokens, block_size, published):
    hit = 0
    for end, block_hash in chain(tokens[:-1], block_size):
        if block_hash not in published:
            break
        hit = end
    return hit


def all_of_it(tokens, block_size, published):
    return max((end for end, block in chain(tokens, block_size) if block in published), default=0)


def look_everywhere(tokens, block_size, published):
    return all_of_it(tokens[:-1], block_size, published)


def one_tensor(table, rows, read_from, write_to, k):
    out = table[rows[:, None], read_from[:, None] + torch.arange(1 + k)]
    return out, out.copy_(table[rows[:, None], write_to[:, None] + torch.arange(1 + k)])


def same_source(table, rows, read_from, write_to, k):
    dst = table[rows[:, None], write_to[:, None] + torch.arange(1 + k)]
    return dst.clone(), dst


def unused_rows(table, rows, read_from, write_to, k):
    order = torch.arange(len(rows))
    return tuple(
        table[order[:, None], column[:, None] + torch.arange(1 + k)]
        for column in (read_from, write_to)
    )


def home(n, q, a, B):
    last = (n + q - 1) // B
    return [(b // B - 1, last + b - n - 1, b - n - 1) for b in range(1, n + a + 1)
            if b % B == 0 and b > n]  # fmt: skip


def pad(query_start_loc, slots, counts, size, buffers):
    starts, places, kept = buffers
    rows = len(slots)
    starts[: rows + 1], starts[rows + 1 : size + 1] = query_start_loc, query_start_loc[-1]
    places[:rows], places[rows:size] = slots, 0
    kept[:rows], kept[rows:size] = counts, 1
    return starts[: size + 1], places[:size], kept[:size]


def leaves_stale_rows(query_start_loc, slots, counts, size, buffers):
    stale = buffers[1].clone()
    starts, places, kept = pad(query_start_loc, slots, counts, size, buffers)
    places[len(slots) :] = stale[len(slots) : size]
    return starts, places, kept


def starts_at_zero(query_start_loc, slots, counts, size, buffers):
    starts, places, kept = pad(query_start_loc, slots, counts, size, buffers)
    starts[len(slots) + 1 :] = 0
    return starts, places, kept


def fresh_memory(*args, **kwargs):
    return tuple(view.clone() for view in pad(*args, **kwargs))


WRONG: list[tuple[str, Callable[..., Any], str]] = [
    ("check_state_step", forgets_to_fade, r"case 1 of 12 differs at entry 0, \[0, 0, 0\]"),
    ("check_state_step", groups_in_turns, r"case 5 of 12 differs at entry 0, \[1, 0, 0\]"),
    ("check_state_step", step_in_place, r"case 1 of 12 changes its input h"),
    ("check_window_after", lambda history, x: x[-len(history) :],
     r"case 3 of 18 differs at the shape\n  yours:  shape \(2, 2\)\n  right:  shape \(3, 2\)"),
    ("check_window_after", lambda history, x: torch.cat([history, x])[: len(history)],
     r"case 1 of 18 differs at \[0, 0\]\n  yours:  1\n  right:  7"),
    ("check_chunk_ends", lambda n, q, Q: [*range(Q, q, Q), q] if q else [],
     r"case 9 of 32 differs at entry 0\n  yours:  4\n  right:  2\n  inputs: n = 6, q = 13, Q = 4"),
    ("check_chunk_ends", lambda n, q, Q: [i for i in range(1, q + 1) if (n + i) % Q == 0],
     r"differs at entry 0\n  yours:  the list has ended\n  right:  4\n  inputs: n = 0, q = 4, Q = 8"),
    ("check_chunk_ends", lambda n, q, Q: [*range((n // Q + 1) * Q - n, q, Q), q],
     r"differs at entry 0\n  yours:  0\n  right:  the list has ended\n  inputs: n = 5, q = 0"),
    ("check_block_size", lambda state_bytes, token_bytes: state_bytes // token_bytes // 16 * 16,
     r"case 2 of 36 differs\n  yours:  0\n  right:  16\n  inputs: state_bytes = 1024, token_bytes = 96"),
    ("check_block_size", lambda state_bytes, token_bytes: -(-state_bytes // token_bytes),
     r"yours:  11\n  right:  16"),
    ("check_longest_hit", unchained, r"yours:  16\n  right:  8"),
    ("check_longest_hit", left_to_right, r"case 4 of 32 differs\n  yours:  0\n  right:  16"),
    ("check_longest_hit", all_of_it, r"case 5 of 32 differs\n  yours:  20\n  right:  0"),
    ("check_state_columns", lambda n, q, anchor, accepted, B: (
        (n - 1) // B, [(n + q - 1) // B + i for i in range(q)]),
     r"case 2 of 86 differs at entry 0\n  yours:  0\n  right:  2"),
    ("check_state_columns", lambda n, q, anchor, accepted, B: (
        (n - 1) // B if anchor < 0 else anchor + accepted - 1, [(n + i) // B for i in range(q)]),
     r"case 1 of 86 differs at entry 1, entry 0\n  yours:  0\n  right:  1"),
    ("check_state_columns", lambda n, q, anchor, accepted, B: (
        anchor + accepted - 1, [(n + q - 1) // B + i for i in range(q)]),
     r"yours:  -1\n  right:  0\n  inputs: n = 16"),
    ("check_verify_drafts", lambda drafts, chosen: [
        token for token, draft in zip(chosen, [*drafts, chosen[-1]]) if token == draft],
     r"case 1 of 44 differs at entry 2\n  yours:  4\n  right:  9"),
    ("check_verify_drafts", lambda drafts, chosen: chosen, r"entry 3\n  yours:  4\n  right:  the list"),
    ("check_gather_slots", one_tensor, r"differs at entry 0"),
    ("check_gather_slots", same_source, r"differs at entry 0, \[0, 0\]"),
    ("check_gather_slots", unused_rows, r"differs at entry 0, \[0, 0\]"),
    ("check_states_to_publish", lambda **inputs: home(**inputs)[-1:],
     r"case 6 of 15 differs at entry 0, entry 0\n  yours:  1\n  right:  0"),
    ("check_states_to_publish", lambda n, q, a, B: home(n, q, q, B),
     r"case 2 of 15 differs at entry 0\n  yours:  \(0, 3, 2\)\n  right:  the list has ended"),
    ("check_states_to_publish", lambda n, q, a, B: home(n, a, a, B),
     r"case 4 of 15 differs at entry 0, entry 1\n  yours:  0\n  right:  1"),
    ("check_pad_rows", leaves_stale_rows, r"case 2 of 6 differs at entry 1, \[1, 0\]\n  yours:  77"),
    ("check_pad_rows", starts_at_zero, r"differs at entry 0, \[2\]\n  yours:  0\n  right:  2"),
    ("check_pad_rows", fresh_memory, r"returns query_start_loc in other memory"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "function", "complaint"), WRONG)
def test_a_wrong_function_is_told_where(
    name: str, function: Callable[..., Any], complaint: str
) -> None:
    verdict = named(name).examine(function)
    assert not verdict.passed
    assert verdict.text.startswith("not yet: case ")
    assert re.search(complaint, verdict.text), verdict.text
    assert "inputs: " in verdict.text


def test_every_checker_has_two_wrong_functions() -> None:
    for name in exercises.__all__:
        if name.startswith("check_"):
            assert sum(wrong[0] == name for wrong in WRONG) >= 2, name


# Right answers --------------------------------------------------------------------------------------


@every_checker
def test_the_reference_is_right(check: Checker) -> None:
    verdict = check.examine(check.reference)
    assert verdict.passed, verdict.text
    assert ("score: " in verdict.text) == (check.score is not None)


RIGHT: list[tuple[str, Callable[..., Any]]] = [
    ("check_window_after", lambda history, x: torch.cat([history, x])[-len(history) :]),
    ("check_window_after", lambda history, x: [*history.tolist(), *x.tolist()][-len(history) :]),
    ("check_block_size", derived_block_size),
    ("check_longest_hit", look_everywhere),
    ("check_states_to_publish", home),
    ("check_pad_rows", pad),
    ("check_verify_drafts", lambda drafts, chosen: torch.tensor(
        chosen[: 1 + next((i for i, d in enumerate(drafts) if d != chosen[i]), len(drafts))])),
]  # fmt: skip


@pytest.mark.parametrize(("name", "function"), RIGHT)
def test_other_ways_to_be_right(name: str, function: Callable[..., Any]) -> None:
    verdict = named(name).examine(function)
    assert verdict.passed, verdict.text


def test_two_names_of_one_memory_are_no_two_tensors() -> None:
    def gather(table, rows, read_from, write_to, k):
        src, dst = exercises.check_gather_slots.reference(table, rows, read_from, write_to, k)
        return src, src if torch.equal(src, dst) else dst

    verdict = exercises.check_gather_slots.examine(gather)
    assert not verdict.passed and "returns two names of one memory" in verdict.text

    def halves_of_one(table, rows, read_from, write_to, k):
        slots = exercises.check_gather_slots.reference(table, rows, read_from, write_to, k)
        return tuple(torch.stack(slots))

    assert exercises.check_gather_slots.examine(halves_of_one).passed


def test_expected_states_are_those_of_the_kernel() -> None:
    """The loops that the first task is checked against, against the package's kernel."""
    inputs = _step_inputs(4, 2, 3, 5, seed=9)
    h, x, dt, A, B, C, D = inputs.values()
    pool = torch.stack([torch.zeros_like(h), h, torch.zeros_like(h)])
    raw = dt.exp().sub(1).log()[None]  # the kernel applies softplus
    y = selective_state_update(
        x[None], raw, A, B[None], C[None], D, torch.zeros_like(D), pool,
        query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
        src_slots=torch.tensor([[1]], dtype=torch.int32),
        dst_slots=torch.tensor([[2]], dtype=torch.int32),
    )  # fmt: skip
    new, expected_y = _step_by_numbers(**inputs)
    torch.testing.assert_close(pool[2].double(), new, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(y[0].double(), expected_y, rtol=1e-4, atol=1e-5)


def test_expected_chunks_are_those_of_the_package() -> None:
    for case in exercises.check_chunk_ends.make_cases():
        n, q, chunk_size = case.inputs.values()
        layout = build_chunk_layout(torch.tensor([0, q]), torch.tensor([n]), chunk_size)
        assert layout.cu_chunk_seqlens[1:].tolist() == case.expected


# Friendliness ---------------------------------------------------------------------------------------


def empty(*args: Any, **kwargs: Any) -> None: ...


@every_checker
def test_an_unsolved_task_prints_one_friendly_line(
    check: Checker, capsys: pytest.CaptureFixture[str]
) -> None:
    check(empty)
    printed = capsys.readouterr()
    assert printed.out == f"not yet: empty returns None so far ({check.task})\n"
    assert printed.err == ""


def unknown_length(*args: Any, **kwargs: Any) -> Any:
    return (i for i in range(10**6))


@every_checker
@pytest.mark.parametrize(
    "function",
    [lambda **inputs: 1 // 0, lambda: 3, lambda **inputs: "words", unknown_length, 5,
     lambda **inputs: torch.ones(2, 2), lambda **inputs: [None], lambda **inputs: {}],
)  # fmt: skip
def test_nothing_that_a_reader_writes_raises(check: Checker, function: Any) -> None:
    verdict = check.examine(function)
    assert not verdict.passed and verdict.text.startswith("not yet: ")


def test_an_error_is_shown_with_the_inputs() -> None:
    verdict = exercises.check_chunk_ends.examine(lambda n, q, Q: [1 // (n - 6)])
    assert "raises ZeroDivisionError" not in verdict.text  # the first case is wrong before that
    verdict = exercises.check_chunk_ends.examine(lambda n, q, Q: 1 // n)
    assert "case 1 of 32 raises ZeroDivisionError: " in verdict.text
    assert "n = 0, q = 4, Q = 4" in verdict.text


def test_a_function_that_breaks_on_the_large_case_is_not_right() -> None:
    def window_after(history: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if len(x) >= 100:
            raise MemoryError("too long")
        return torch.cat([history, x])[-len(history) :]

    verdict = exercises.check_window_after.examine(window_after)
    assert not verdict.passed
    assert verdict.text == "not yet: the large case of the score raises MemoryError: too long"


@every_checker
def test_hints_are_graded(check: Checker, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(set(check.hints)) == 3
    printed = []
    for hint in (0, 1, 2, 3):
        check(empty, hint=hint)
        printed.append(capsys.readouterr().out)
    assert "hint" not in printed[0]
    for hint in (1, 2, 3):
        assert f"hint {hint} of 3: " in printed[hint]
        assert "".join(check.hints[hint - 1].split()) in "".join(printed[hint].split())
        assert sum(other in " ".join(printed[hint].split()) for other in check.hints) == 1
        assert all(len(line) <= 100 for line in printed[hint].splitlines())
    code = re.compile(r"\w\(|\w\[|//|\b=\b| = ")
    assert not re.search(r"//|\w\[.*:|range\(", check.hints[0]), "the first hint is a thought"
    assert code.search(check.hints[2]), "the third has the line, nearly"


@pytest.mark.parametrize("hint", [-1, 4])
def test_there_are_three_hints(hint: int) -> None:
    with pytest.raises(ValueError, match=rf"hint={hint}: there are hints 1 to 3"):
        exercises.check_block_size(empty, hint=hint)


def test_cases_are_the_same_every_time() -> None:
    for check in CHECKERS:
        first, second = (
            [sorted(case.inputs) + [str(case.expected)] for case in check.make_cases()]
            for _ in range(2)
        )
        assert first == second and len(first) >= 6


def test_parameters_of_cases_are_those_of_the_reference() -> None:
    for check in CHECKERS:
        for case in check.make_cases():
            assert set(inspect.signature(check.reference).parameters) == set(case.inputs)


# Counting -------------------------------------------------------------------------------------------


def test_bytes_and_launches_are_counted() -> None:
    a, b = torch.ones(4, 8), torch.ones(8)

    def work(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        view = a[1:, :4].reshape(3, 4)[None].transpose(0, 1)  # views all the way: free
        total = a * b  # reads 32 + 8 numbers, writes 32
        total[0].zero_()  # writes 8
        total[1].copy_(b)  # reads 8, writes 8
        return view.sum() + total.sum()  # (12 + 1) + (32 + 1) + (1 + 1 + 1)

    counted = count_work(work, {"a": a, "b": b})
    assert counted.launches == 6
    assert counted.bytes_moved == 4 * (72 + 8 + 16 + 13 + 33 + 3)


def test_memory_alone_is_free() -> None:
    with OperationCounter() as counter:
        torch.empty(1000)
    assert (counter.launches, counter.bytes_moved) == (0, 0)


def test_lookups_are_counted() -> None:
    published = PublishedBlocks([b"a"])
    assert b"a" in published and b"b" not in published
    assert published.num_lookups == 2


def test_a_wasteful_answer_has_a_worse_score() -> None:
    def one_by_one(table, rows, read_from, write_to, k):
        src, dst = (
            torch.stack([torch.stack([table[r, c + i] for i in range(1 + k)])
                         for r, c in zip(rows, columns)])
            for columns in (read_from, write_to)
        )  # fmt: skip
        return src, dst

    for name, function, unit in (
        (
            "check_window_after",
            lambda history, x: torch.cat([history, x])[-len(history) :],
            "bytes",
        ),
        ("check_longest_hit", look_everywhere, "look-ups"),
        ("check_gather_slots", one_by_one, "launches"),
    ):
        check = named(name)
        assert check.score is not None
        yours, best = check.score(function), check.score(check.reference)
        (key,) = [key for key in yours if key.startswith(unit)]
        assert yours[key] > 10 * best[key]
        assert f"{yours[key]:,} {key} (reference {best[key]:,})" in check.examine(function).text


def test_a_score_can_be_better_than_the_reference() -> None:
    case = Case({"n": 1}, 1)
    costs = iter([3, 5])
    check = Checker(
        task="nothing", make_cases=lambda: [case], reference=lambda n: n, hints=("a", "b", "c"),
        score=lambda function: {"steps": next(costs)},
    )  # fmt: skip
    assert check.examine(lambda n: n).text.endswith("score: 3 steps (reference 5)")
