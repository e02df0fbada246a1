"""An exhibit: one real bug, as the small function it lived in and the smallest trace that shows it.

    with exhibit.fault():
        finding = exhibit.observe()

Production code has no switch for any bug. :meth:`Exhibit.fault` swaps one function, the exhibit's
*seam*, for its "before" version while inside, and puts the very same object back afterwards. The trace
is the same with and without: it runs our code, compares with what must come out, and reports. It never
raises what it came to see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from mamba_teach.events import Event


class SeamGone(AttributeError):
    """The function that an exhibit swaps is not where it was: production code has moved on."""


@dataclass(frozen=True)
class Finding:
    """What a trace saw.

    Attributes:
        symptom_seen: whether something was wrong.
        message: what, with the error's type and text if there was one; or what was right.
        events: the engine's log up to that moment, for a board; empty where no engine took part.
    """

    symptom_seen: bool
    message: str
    events: tuple[Event, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class Exhibit:
    """A bug with its label.

    Attributes:
        name: in kebab-case, to find it by.
        title: a line.
        mechanism: how it came about, in a few sentences.
        reported_in: where it was reported. It says nothing about the present state of that project.
        symptom: what its victims saw, in one sentence.
        before, after: the line that made the difference; ``after`` stands in our code as it is here.
        seam: what is swapped, as ``"package.module:name"`` or ``"package.module:Class.name"``.
        swap: makes the "before" version from the original.
        observe: runs the smallest trace that shows it, on whatever code is in force.
    """

    name: str
    title: str
    mechanism: str
    reported_in: str
    symptom: str
    before: str
    after: str
    seam: str
    swap: Callable[[Any], Any] = field(repr=False)
    observe: Callable[[], Finding] = field(repr=False)

    @contextmanager
    def fault(self) -> Iterator[None]:
        """The bug is back while inside; the original returns whatever happens there.

        Raises:
            SeamGone: there is nothing to swap any more.
        """
        owner, name = self._find_seam()
        original = vars(owner)[name]  # not getattr: a property or staticmethod as it lies there
        setattr(owner, name, self.swap(original))
        try:
            yield
        finally:
            setattr(owner, name, original)

    def card(self) -> str:
        """The label on the wall, as text."""
        return "\n".join(
            [
                self.title,
                "",
                self.mechanism,
                "",
                f"  before:   {self.before}",
                f"  after:    {self.after}",
                f"  symptom:  {self.symptom}",
                f"  reported in {self.reported_in}",
            ]
        )

    def _find_seam(self) -> tuple[Any, str]:
        """The module or class that owns the seam, and its name there."""
        module, _, path = self.seam.partition(":")
        *outer, name = path.split(".")
        try:
            owner = import_module(module)
            for part in outer:
                owner = getattr(owner, part)
            # An inherited name would be left behind on the subclass, so it has to be the owner's own.
            found = name in vars(owner)
        except (ImportError, AttributeError):
            found = False
        if not found:
            raise SeamGone(
                f"exhibit {self.name!r} swaps {self.seam}, which no longer exists: find where its "
                f"line went, or retire the exhibit"
            )
        return owner, name
