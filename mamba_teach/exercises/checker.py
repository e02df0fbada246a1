"""A checker: many small cases, the first place that differs, hints on demand, a count of the work.

    check_block_size(block_size)          # prints what it found
    check_block_size(block_size, hint=1)  # and the first of three hints; 3 nearly gives it away

It never raises because of the reader's function, since a notebook of unsolved exercises must run to its
end: whatever that function does wrong is printed, with the inputs it was given.
"""

from __future__ import annotations

import copy
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mamba_teach.exercises.compare import first_difference, show

NUM_HINTS = 3
WIDTH = 96  # characters of a printed line


@dataclass(frozen=True)
class Case:
    """A call and what must come of it.

    Attributes:
        inputs: by parameter.
        expected: see :func:`~mamba_teach.exercises.compare.first_difference`.
    """

    inputs: Mapping[str, Any]
    expected: Any


@dataclass(frozen=True)
class Verdict:
    """What a checker found.

    Attributes:
        passed: whether every case came out right.
        text: for the reader.
    """

    passed: bool
    text: str


@dataclass(frozen=True)
class Checker:
    """Checks a reader's function.

    Attributes:
        task: what the function is to do, in a few words.
        make_cases: the cases, the simplest first; the same ones every time.
        reference: a function that solves it.
        hints: a thought, a direction, and nearly the line itself.
        mutates: parameters that the function is allowed to change.
        also: given a call's inputs (as they are after it) and its result, says what else is wrong
            with it, or None.
        score: what a right function costs, by name of the unit. The fewer the better.
    """

    task: str
    make_cases: Callable[[], Iterable[Case]]
    reference: Callable[..., Any]
    hints: tuple[str, str, str]
    mutates: tuple[str, ...] = ()
    also: Callable[[Mapping[str, Any], Any], str | None] | None = None
    score: Callable[[Callable[..., Any]], dict[str, int]] | None = None

    def __call__(self, function: Callable[..., Any], *, hint: int = 0) -> None:
        """Print the verdict on ``function``, and a hint.

        Args:
            hint: 1, 2 or 3, each plainer than the one before; 0 for none.

        Raises:
            ValueError: there is no such hint.
        """
        if not 0 <= hint <= NUM_HINTS:
            raise ValueError(f"hint={hint}: there are hints 1 to {NUM_HINTS}, and 0 for none")
        print(self.examine(function).text)
        if hint:
            print(textwrap.fill(f"hint {hint} of {NUM_HINTS}: {self.hints[hint - 1]}", WIDTH))

    def examine(self, function: Callable[..., Any]) -> Verdict:
        """Run the cases until one is wrong. Prints nothing, raises nothing."""
        cases = list(self.make_cases())
        for number, case in enumerate(cases, start=1):
            problem = self._problem(function, case)
            if problem is EMPTY:
                name = getattr(function, "__name__", "the function")
                return Verdict(False, f"not yet: {name} returns None so far ({self.task})")
            if problem is not None:
                found = f"not yet: case {number} of {len(cases)} {problem}"
                return Verdict(False, f"{found}\n{_inputs(case)}")
        praise = f"✓ {self.task}: {len(cases)} of {len(cases)} cases right"
        if self.score is None:
            return Verdict(True, praise)
        try:
            yours, best = self.score(function), self.score(self.reference)
        except Exception as error:
            return Verdict(False, f"not yet: the large case of the score {_raises(error)}")
        parts = [f"{yours[unit]:,} {unit} (reference {best[unit]:,})" for unit in yours]
        return Verdict(True, f"{praise}\n  score: {', '.join(parts)}")

    def _problem(self, function: Callable[..., Any], case: Case) -> str | None:
        inputs = copy.deepcopy(dict(case.inputs))
        try:
            found = function(**inputs)
            if found is None and case.expected is not None:
                return EMPTY
            place = first_difference(found, case.expected)
            if place is not None:
                where = f" at {place.where}" if place.where else ""
                return f"differs{where}\n  yours:  {place.yours}\n  right:  {place.right}"
            for name, value in case.inputs.items():
                if name not in self.mutates and _has_changed(inputs[name], value):
                    return f"changes its input {name}, which others still need"
            return self.also(inputs, found) if self.also is not None else None
        except Exception as error:  # the reader's, or an answer of a kind that nobody thought of
            return _raises(error)


EMPTY = "returns None"


def _raises(error: Exception) -> str:
    return f"raises {type(error).__name__}: {error}"


def _has_changed(now: Any, before: Any) -> bool:
    comparable = hasattr(before, "shape") or isinstance(before, list | tuple)
    return comparable and first_difference(now, before) is not None


def _inputs(case: Case) -> str:
    shown = [f"{name} = {show(value)}" for name, value in case.inputs.items()]
    text = "  inputs: " + ", ".join(shown)
    return text if len(text) <= WIDTH else "  inputs: " + "\n          ".join(shown)
