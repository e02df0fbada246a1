"""The player: step through an event log, forwards and backwards, and ask who owned a slot.

    BoardPlayer(engine.events)

All frames are made first, so the slider only selects one: the same log always gives the same player,
``player.frames[7]`` is a board like any other, and nothing is computed by a drag. Where no kernel runs
(GitHub, nbviewer, a printed page) the same object shows a strip of key frames.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from html import escape

import ipywidgets as widgets

from mamba_teach.events import Board, Event, RequestAdded, reduce
from mamba_teach.viz import history
from mamba_teach.viz.board_markup import board_table, film_strip, legend
from mamba_teach.viz.cells import BoardView, roles_in, view
from mamba_teach.viz.history import Difference, first_difference

__all__ = ["BoardPlayer", "Difference", "first_difference"]


class BoardPlayer:
    """A board for every step, behind a slider.

    Args:
        events: the log.
        steps: show only these steps; all of them, and the end of the log, if None.

    Attributes:
        frames: one board per step, at the moment when it computes (its rows planned, nothing
            committed yet), and the board at the end of the log.
        evicted: by frame, the blocks evicted in its step.
        num_steps: in the log.
        has_end: whether the last frame is the end of the log.
        index: of the frame that is shown.
        widget: what a notebook displays.
    """

    def __init__(self, events: Sequence[Event], *, steps: Collection[int] | None = None) -> None:
        self.events = tuple(events)
        self.frames: list[Board] = []
        self.evicted: list[tuple[int, ...]] = []
        wanted = None if steps is None else set(steps)
        self.num_steps = 0
        for board, evicted in history.step_boards(self.events):
            self.num_steps += 1
            if wanted is None or board.step in wanted:
                self.frames.append(copy.deepcopy(board))
                self.evicted.append(evicted)
        self.has_end = wanted is None
        if self.has_end:
            self.frames.append(reduce(self.events))
            self.evicted.append(())
        if not self.frames:
            raise ValueError(f"none of the steps {sorted(wanted or ())} is in the log")
        self._rendered: dict[int, str] = {}
        self.index = 0
        self.widget = self._make_widget()
        self.select(0)
        self.ask(min(1, self.num_blocks - 1))

    # What the controls do ---------------------------------------------------------------------

    def select(self, index: int) -> None:
        """Show a frame.

        Raises:
            IndexError: there is no such frame.
        """
        if not 0 <= index < len(self.frames):
            raise IndexError(f"no frame {index}: there are {len(self.frames)}, from 0 on")
        self.index = index
        self._picture.value = self.html(index)
        self._slider.value = index

    def step(self, by: int) -> None:
        """Show a later frame, or an earlier one; stop at the ends."""
        self.select(min(max(self.index + by, 0), len(self.frames) - 1))

    def ask(self, slot: int) -> str:
        """Who owned a slot, in words; also shown below the board."""
        said = history.answers(self.events, [slot])[slot]
        self._answer.value = f'<pre style="margin:2px 0">{escape(said)}</pre>'
        self._slot.value = slot
        return said

    def owner_history(self, slot: int) -> list[tuple[int, int, str]]:
        """*(first step, last step, request id)* of every ownership, in order."""
        found = history.owner_history(self.events, slot)
        return [(o.first_step, o.last_step, o.request_id) for o in found]

    # Pictures ---------------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        """Of the pool, the null block included."""
        return self.frames[-1].num_blocks

    def view(self, index: int) -> BoardView:
        """The cells of a frame."""
        return view(self.frames[index], self.evicted[index])

    def html(self, index: int) -> str:
        """A frame as an HTML table, rendered when it is first asked for."""
        if index not in self._rendered:
            self._rendered[index] = board_table(self.view(index), tall=True, note=self.note(index))
        return self._rendered[index]

    def strip(self) -> str:
        """Key frames below each other, for where no kernel runs."""
        heading = f"{self!r}. Run the notebook to step through it."
        indices = range(len(self.frames))
        return film_strip([*map(self.view, indices)], [*map(self.note, indices)], heading)

    def note(self, index: int) -> str:
        """What has to be said about a frame besides its title."""
        return " (end of the log)" if self.has_end and index == len(self.frames) - 1 else ""

    def __repr__(self) -> str:
        requests = sum(isinstance(event, RequestAdded) for event in self.events)
        return f"BoardPlayer: {self.num_steps} steps, {requests} requests, {self.num_blocks} blocks"

    def _repr_mimebundle_(self, **kwargs: object) -> dict[str, object]:
        bundle: dict[str, object] = dict(self.widget._repr_mimebundle_(**kwargs))
        return bundle | {"text/plain": repr(self), "text/html": self.strip()}

    # Controls ---------------------------------------------------------------------------------

    def _make_widget(self) -> widgets.VBox:
        last = len(self.frames) - 1
        self._slider = widgets.IntSlider(
            min=0, max=last, description="frame", layout=widgets.Layout(width="420px")
        )
        self._play = widgets.Play(min=0, max=last, interval=700)
        self._link = widgets.jslink((self._play, "value"), (self._slider, "value"))
        back = widgets.Button(description="back", icon="step-backward")
        forward = widgets.Button(description="forward", icon="step-forward")
        for button in (back, forward):
            button.layout.width = "90px"
        self._slot = widgets.BoundedIntText(
            value=min(1, self.num_blocks - 1), min=0, max=self.num_blocks - 1,
            description="who owned slot", style={"description_width": "initial"},
        )  # fmt: skip
        self._slot.layout.width = "190px"
        self._picture, self._answer, self._trouble = (widgets.HTML() for _ in range(3))
        self._slider.observe(lambda change: self._guard(self.select, change["new"]), names="value")
        self._slot.observe(lambda change: self._guard(self.ask, change["new"]), names="value")
        back.on_click(lambda _: self._guard(self.step, -1))
        forward.on_click(lambda _: self._guard(self.step, 1))
        self._buttons = (back, forward)
        key = widgets.HTML(legend(roles_in(self.view(i) for i in range(len(self.frames)))))
        controls = widgets.HBox([self._play, back, forward, self._slider])
        return widgets.VBox([controls, self._picture, key, self._slot, self._answer, self._trouble])

    def _guard(self, callback: Callable[[int], object], argument: int) -> None:
        """Run a callback; an error is shown in the widget and raised, so that nobody misses it."""
        try:
            callback(argument)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            self._trouble.value = f'<pre style="color:#D55E00">{escape(said)}</pre>'
            raise
        self._trouble.value = ""
