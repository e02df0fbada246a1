"""The picker without a front end: every exhibit can be chosen, and a callback that fails is heard."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from html.parser import HTMLParser

import pytest
from viz.ghost_logs import by_hand

from mamba_teach.events import Event, reduce
from mamba_teach.faults import EXHIBITS
from mamba_teach.viz.exhibit_picker import ExhibitPicker, failing_board, page, visit

VIEW = "application/vnd.jupyter.widget-view+json"


@dataclass
class FakeFinding:
    symptom_seen: bool
    message: str
    events: tuple[Event, ...] = ()


@dataclass
class FakeExhibit:
    """On until its fault is left; remembers what was asked of it."""

    name: str
    events: tuple[Event, ...] = ()
    title: str = "A <bold> title"
    mechanism: str = "It went wrong & nobody saw it."
    reported_in: str = "nowhere 12"
    symptom: str = "Tears."
    before: str = "if a < b:"
    after: str = "if a <= b:"
    on: bool = False
    seen: list[bool] = field(default_factory=list)

    @contextmanager
    def fault(self) -> Iterator[None]:
        self.on = True
        yield
        self.on = False

    def observe(self) -> FakeFinding:
        self.seen.append(self.on)
        return FakeFinding(self.on, f"fault {'on' if self.on else 'off'}", self.events)


@pytest.fixture
def fakes() -> list[FakeExhibit]:
    return [FakeExhibit("one"), FakeExhibit("two", events=tuple(by_hand()))]


@pytest.fixture
def picker(fakes: list[FakeExhibit]) -> ExhibitPicker:
    return ExhibitPicker(fakes)


class Balance(HTMLParser):
    """Checks that tags are balanced, and collects the text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def text_of(html: str) -> str:
    parser = Balance()
    parser.feed(html)
    assert parser.open == []
    return parser.text


# Choosing -----------------------------------------------------------------------------------------


def test_the_first_is_chosen_and_run_with_and_without(
    picker: ExhibitPicker, fakes: list[FakeExhibit]
) -> None:
    assert picker.visit.exhibit is fakes[0]
    assert (picker.visit.with_fault.message, picker.visit.without.message) == (
        "fault on", "fault off",
    )  # fmt: skip
    assert fakes[0].seen == [True, False] and fakes[1].seen == []


def test_another_can_be_the_first(fakes: list[FakeExhibit]) -> None:
    assert ExhibitPicker(fakes, chosen="two").visit.exhibit is fakes[1]
    assert fakes[0].seen == []


def test_choosing_shows_it(picker: ExhibitPicker, fakes: list[FakeExhibit]) -> None:
    seen = picker.choose("two")
    assert picker.visit is seen and seen.exhibit is fakes[1]
    assert picker._page.value == page(seen)


def test_the_list_chooses(picker: ExhibitPicker, fakes: list[FakeExhibit]) -> None:
    assert picker._dropdown.options == ("one", "two")
    picker._dropdown.value = "two"
    assert picker.visit.exhibit is fakes[1]
    assert picker._page.value == page(picker.visit)


def test_a_wrong_name_is_an_error(picker: ExhibitPicker, fakes: list[FakeExhibit]) -> None:
    with pytest.raises(KeyError, match="no exhibit 'three'; there are one, two"):
        picker.choose("three")
    with pytest.raises(KeyError, match="no exhibit 'three'"):
        ExhibitPicker(fakes, chosen="three")
    with pytest.raises(ValueError, match="at least one exhibit"):
        ExhibitPicker([])


def test_errors_surface(picker: ExhibitPicker, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: FakeExhibit) -> FakeFinding:
        raise RuntimeError("a <broken> trace")

    monkeypatch.setattr(FakeExhibit, "observe", broken)
    with pytest.raises(RuntimeError, match="broken"):
        picker._dropdown.value = "two"  # a callback of a widget, and still it raises
    assert "a &lt;broken&gt; trace" in picker._trouble.value
    monkeypatch.undo()
    picker._dropdown.value = "one"
    assert picker._trouble.value == ""


# The page -----------------------------------------------------------------------------------------


def test_the_page_says_everything(fakes: list[FakeExhibit]) -> None:
    said = text_of(page(visit(fakes[0])))
    shown = fakes[0]
    for part in (shown.title, shown.mechanism, shown.before, shown.after, shown.symptom,
                 shown.reported_in, "fault on", "fault off"):  # fmt: skip
        assert part in said
    assert "request" not in said  # no board: no engine took part


def test_a_visit_is_a_small_table(fakes: list[FakeExhibit]) -> None:
    seen = visit(fakes[0])
    for said in (text_of(seen._repr_html_()), repr(seen)):
        positions = [said.index(part) for part in ("one: A <bold>", "fault on", "fault off",
                                                   "if a < b:", "if a <= b:")]  # fmt: skip
        assert positions == sorted(positions)


def test_the_failing_step_has_a_board(fakes: list[FakeExhibit]) -> None:
    seen = visit(fakes[1])
    assert seen.board == reduce(by_hand())
    said = text_of(page(seen))
    assert "step 1:" in said and "and here it fails" in said and "mamba 0" in said


def test_a_log_that_ends_between_steps_has_no_failing_board() -> None:
    assert failing_board(()) is None
    assert failing_board(by_hand()[:5]) is None  # blocks, and nothing computes yet
    assert failing_board(by_hand()) is not None


def test_the_bundle_has_words_a_page_and_a_widget(picker: ExhibitPicker) -> None:
    bundle = picker._repr_mimebundle_()
    assert bundle["text/plain"] == repr(picker) == "ExhibitPicker: one, one of 2"
    assert VIEW in bundle
    html = str(bundle["text/html"])
    assert page(picker.visit) in html and "Run the notebook to choose another." in text_of(html)
    assert "<script" not in html and "<style" not in html
    picker.choose("two")
    assert page(picker.visit) in str(picker._repr_mimebundle_()["text/html"])


# The museum ---------------------------------------------------------------------------------------


def test_every_exhibit_of_the_museum_can_be_chosen() -> None:
    """What the notebook does: all of them through the list, each symptom seen, and not without."""
    picker = ExhibitPicker(EXHIBITS)
    for exhibit in EXHIBITS:
        picker._dropdown.value = exhibit.name
        assert picker.visit.exhibit is exhibit
        assert picker.visit.with_fault.symptom_seen and not picker.visit.without.symptom_seen
        assert escape(picker.visit.with_fault.message) in picker._page.value
        said = text_of(picker._page.value)
        assert exhibit.before in said and exhibit.after in said
        failed = "Error: " in picker.visit.with_fault.message and picker.visit.with_fault.events
        assert bool(failed) == ("and here it fails" in said)
    assert picker._trouble.value == ""
