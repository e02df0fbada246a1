"""The picker: choose a fault, see what it does, read the line that made the difference.

    ExhibitPicker(EXHIBITS)

It gets the exhibits from outside and asks of them what :class:`ExhibitLike` says. Choosing runs an
exhibit's trace twice, with the fault and without. Where no kernel runs (GitHub, nbviewer, a printed
page) the same object shows the exhibit that is chosen at the moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from html import escape
from typing import Any, Protocol

import ipywidgets as widgets

from mamba_teach.events import Board, Event, reduce
from mamba_teach.viz.board_markup import board_table, legend
from mamba_teach.viz.cells import roles_in, view

CELL = "border:1px solid #ccc;padding:3px 8px;text-align:left;vertical-align:top"
CODE = "font:12px/1.4 monospace;white-space:pre-wrap"


class FindingLike(Protocol):
    """What a trace saw."""

    @property
    def symptom_seen(self) -> bool: ...
    @property
    def message(self) -> str: ...
    @property
    def events(self) -> Sequence[Event]: ...


class ExhibitLike(Protocol):
    """A bug that can be switched on, with its label and its trace."""

    @property
    def name(self) -> str: ...
    @property
    def title(self) -> str: ...
    @property
    def mechanism(self) -> str: ...
    @property
    def reported_in(self) -> str: ...
    @property
    def symptom(self) -> str: ...
    @property
    def before(self) -> str: ...
    @property
    def after(self) -> str: ...
    @property
    def observe(self) -> Any: ...  # () -> FindingLike
    def fault(self) -> AbstractContextManager[None]: ...


@dataclass(frozen=True)
class Visit:
    """An exhibit, and what was seen on its trace with its fault and without.

    At the end of a notebook cell it shows itself as a small table.
    """

    exhibit: ExhibitLike
    with_fault: FindingLike
    without: FindingLike

    @property
    def board(self) -> Board | None:
        """The board of the step that failed; None if none was cut short, or no engine took part."""
        return failing_board(self.with_fault.events)

    def lines(self) -> list[tuple[str, str]]:
        """What was seen, and the line that made the difference: *(heading, text)*."""
        return [
            ("seen with the fault", self.with_fault.message),
            ("seen without it", self.without.message),
            ("before", self.exhibit.before),
            ("after", self.exhibit.after),
        ]

    def __repr__(self) -> str:
        table = "\n".join(f"  {heading:<20} {text}" for heading, text in self.lines())
        return f"{self.exhibit.name}: {self.exhibit.title}\n{table}"

    def _repr_html_(self) -> str:
        rows = "".join(_row(heading, text, is_code=True) for heading, text in self.lines())
        return _table(f"{self.exhibit.name}: {self.exhibit.title}", rows)


def visit(exhibit: ExhibitLike) -> Visit:
    """Run an exhibit's trace, with the fault and without."""
    with exhibit.fault():
        seen = exhibit.observe()
    return Visit(exhibit, seen, exhibit.observe())


def failing_board(events: Sequence[Event]) -> Board | None:
    """The board at the end of a log, if that is in the middle of a step."""
    board = reduce(events)
    computing = any(row.num_scheduled for row in board.rows.values())
    return board if computing else None


class ExhibitPicker:
    """A list of exhibits, and below it the one that is chosen.

    Args:
        exhibits: to choose from.
        chosen: name of the first one to show; by default the first of the list.

    Attributes:
        visit: what was seen of the chosen one.
        widget: what a notebook displays.
    """

    def __init__(self, exhibits: Sequence[ExhibitLike], chosen: str | None = None) -> None:
        self.exhibits = {exhibit.name: exhibit for exhibit in exhibits}
        if not self.exhibits:
            raise ValueError("a picker needs at least one exhibit")
        names = list(self.exhibits)
        self._page, self._trouble = widgets.HTML(), widgets.HTML()
        self._dropdown = widgets.Dropdown(
            options=names, value=self._known(chosen or names[0]), description="exhibit",
            layout=widgets.Layout(width="420px"),
        )  # fmt: skip
        self.visit = self.choose(self._dropdown.value)
        self._dropdown.observe(lambda change: self._guard(change["new"]), names="value")
        self.widget = widgets.VBox([self._dropdown, self._page, self._trouble])

    def choose(self, name: str) -> Visit:
        """Run an exhibit and show it.

        Raises:
            KeyError: there is none of that name.
        """
        self.visit = visit(self.exhibits[self._known(name)])
        self._page.value = page(self.visit)
        self._dropdown.value = name  # the list says so, too, whoever chose
        return self.visit

    def _known(self, name: str) -> str:
        if name not in self.exhibits:
            raise KeyError(f"no exhibit {name!r}; there are {', '.join(self.exhibits)}")
        return name

    def _guard(self, name: str) -> None:
        """The list's callback; an error is shown in the widget and raised, so that nobody misses it."""
        try:
            if name != self.visit.exhibit.name:  # else it is shown already
                self.choose(name)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            self._trouble.value = f'<pre style="color:#D55E00">{escape(said)}</pre>'
            raise
        self._trouble.value = ""

    def __repr__(self) -> str:
        return f"ExhibitPicker: {self.visit.exhibit.name}, one of {len(self.exhibits)}"

    def _repr_mimebundle_(self, **kwargs: object) -> dict[str, object]:
        heading = f"<p>{escape(repr(self))}. Run the notebook to choose another.</p>"
        bundle: dict[str, object] = dict(self.widget._repr_mimebundle_(**kwargs))
        return bundle | {"text/plain": repr(self), "text/html": heading + page(self.visit)}


def page(seen: Visit) -> str:
    """An exhibit's label, what was seen, and the board of the failing step, as HTML."""
    shown = seen.exhibit
    rows = "".join(_row(heading, text, is_code=True) for heading, text in seen.lines())
    rows += _row("its victims saw", shown.symptom) + _row("reported in", shown.reported_in)
    parts = [f'<p style="max-width:60em">{escape(shown.mechanism)}</p>', _table(shown.title, rows)]
    if seen.board is not None:
        cells = view(seen.board)
        parts += ["<br>", board_table(cells, note=", and here it fails"), legend(roles_in([cells]))]
    return f'<div role="group" aria-label="exhibit {escape(shown.name)}">{"".join(parts)}</div>'


def _table(caption: str, rows: str) -> str:
    style = "text-align:left;color:inherit;font-weight:bold"
    head = f'<caption style="{style}">{escape(caption)}</caption>'
    return (
        f'<table style="border-collapse:collapse;background:#fff;color:#000">{head}{rows}</table>'
    )


def _row(name: str, text: str, is_code: bool = False) -> str:
    inside = f'<code style="{CODE}">{escape(text)}</code>' if is_code else escape(text)
    return (
        f'<tr><th scope="row" style="{CELL};white-space:nowrap">{escape(name)}</th>'
        f'<td style="{CELL}">{inside}</td></tr>'
    )
