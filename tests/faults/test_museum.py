"""The museum: every bug bites when its fault is on, and nothing does when it is off."""

from __future__ import annotations

import re
import sys
from dataclasses import fields, replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mamba_teach import GhostModel, reduce
from mamba_teach.events import RequestPreempted, RequestReleased
from mamba_teach.faults import EXHIBITS, Exhibit, Finding, SeamGone, exhibit
from mamba_teach.faults.ghost_story import GhostStory

ROOT = Path(__file__).resolve().parents[2]

NO_STATE = r"GhostError: slot \d+ \(layer 0\) holds no state; r0 needs its own after "
NULL = r"GhostError: {} reads the null slot \(layer 0\)"

# What each must be seen to do, as an error's type and text or as a number that is wrong.
SYMPTOMS = {
    "table-without-scratch": r"IndexError: index 2 is out of bounds for dimension 1 with size 2",
    "buffers-cut-by-tokens": (
        r"ValueError: num_accepted_tokens \(mamba 0\): values of shape \(2,\) for 6 rows do not "
        r"fit into the buffer of shape \(2,\)"
    ),
    "one-slot-gather": (
        r"GhostError: slot \d+ \(layer 0\) holds the state after 14 tokens of a text that r0 "
        r"guessed; r1 needs its own after 12"
    ),
    "one-tensor-for-both": NO_STATE + "16",
    "index-past-allocation": NULL.format("r0"),
    "window-through-wrong-anchor": (
        r"GhostError: slot \d+ \(layer 0\) holds the window \[11, 12, 13\]; r0 needs "
        r"\[12, 13, \d+\] after 15 tokens"
    ),
    "wrong-state-published": (
        r"GhostError: slot \d+ \(layer 0\) holds the state after 13 tokens of r0; r1 needs its own "
        r"after 16"
    ),
    "speculation-means-align": r"cached tokens of the later requests: \[0, 0\]; 32 are .*",
    "counts-permuted-twice": (
        r"GhostError: slot \d+ \(layer 0\) holds the state after 7 tokens of a text that r1 "
        r"guessed; r1 needs its own after 6"
    ),
    "anchor-outlives-blocks": NULL.format("r0"),
    "slot-not-cleared": r"r1 said \[.*\]; alone it says \[.*\]",
    "groups-share-buffers": (
        r"GhostError: slot \d+ \(layer 2\) holds the state after 11 tokens of r0; r0 needs its own "
        r"after 10"
    ),
    "tail-captured": NULL.format("r0"),
    "stale-row-under-padding": r"slots \[2, 3\] were written; the step owns \[1\]",
    "captured-too-narrow": (
        r"ValueError: block_table \(attention 0\): values of shape \(1, 3\) for 1 rows do not fit "
        r"into the buffer of shape \(4, 2\)"
    ),
    "guard-for-the-old-sentinel": r"slots \[0\] were written; the step owns \[2\]",
    "sentinel-remapped": r"slots \[4\] were written; the step owns \[2\]",
    "null-block-handed-out": r"GhostError: somebody writes the null slot",
    "padded-tail-folded-in": r"another placeholder, another state .* \(0\.[1-9]\d relative\)",
    "decode-by-length": NO_STATE + "0",
    "published-at-allocation": r"r1 hit 32 tokens of r0 in the step .* said \[.*\] instead of .*",
    "sparse-hit-trimmed": NULL.format("r1"),
    "checkpoint-shifted": r"cached tokens of the later requests: \[0, 0, 0, 0\]; 64 are .*",
    "decay-from-chunk-start": r"the second sequence's state is off by 0\.\d[1-9] of its size",
}

PROJECTS = r"(vLLM|vllm-ascend|vllm-gaudi|SGLang|nano-vllm)"

every_exhibit = pytest.mark.parametrize("bug", EXHIBITS, ids=lambda bug: bug.name)


def owner_of(bug: Exhibit) -> tuple[Any, str]:
    """The module or class that an exhibit patches, and the name there."""
    module, path = bug.seam.split(":")
    *outer, name = path.split(".")
    owner: Any = import_module(module)
    for part in outer:
        owner = getattr(owner, part)
    return owner, name


# It bites, and nothing else does ------------------------------------------------------------------


@every_exhibit
def test_with_the_fault_its_symptom_appears(bug: Exhibit) -> None:
    with bug.fault():
        finding = bug.observe()
    assert finding.symptom_seen
    assert re.fullmatch(SYMPTOMS[bug.name], finding.message), finding.message


@every_exhibit
def test_without_the_fault_nothing_is_wrong(bug: Exhibit) -> None:
    finding = bug.observe()
    assert not finding.symptom_seen, finding.message


@every_exhibit
def test_a_fault_can_be_seen_twice_and_is_then_gone(bug: Exhibit) -> None:
    """No fault keeps anything from one visit to the next."""
    found = []
    for _ in range(2):
        with bug.fault():
            found.append((bug.observe().message, bug.observe().message))
    assert found[0] == found[1]
    assert not bug.observe().symptom_seen


def test_every_exhibit_has_a_symptom_here() -> None:
    assert sorted(SYMPTOMS) == sorted(bug.name for bug in EXHIBITS)
    assert len(EXHIBITS) >= 16


def in_words(finding: Finding) -> str | None:
    """The request that a ghost's complaint is about."""
    complaint = re.match(r"GhostError: .*?(r\d+) (?:needs|reads)", finding.message)
    return None if complaint is None else complaint[1]


@every_exhibit
def test_the_log_ends_at_the_moment_of_the_error(bug: Exhibit) -> None:
    """A board made of it shows the complaining request in its step, its blocks still its own."""
    with bug.fault():
        finding = bug.observe()
    if not re.match(r"\w+Error: ", finding.message):
        return  # served to the end, or no engine in it
    board = reduce(finding.events)
    computing = {rid for rid, row in board.rows.items() if row.num_scheduled}
    assert computing
    assert (in_words(finding) or "r0") in computing
    assert all(board.rows[rid].tables for rid in computing)


# Nothing is left behind, and nothing is taken for granted -----------------------------------------


@every_exhibit
def test_the_original_is_back_whatever_happens_inside(bug: Exhibit) -> None:
    owner, name = owner_of(bug)
    original, before = vars(owner)[name], dict(vars(owner))
    with bug.fault():
        assert vars(owner)[name] is not original
    assert vars(owner)[name] is original
    with pytest.raises(KeyboardInterrupt), bug.fault():
        raise KeyboardInterrupt
    assert vars(owner)[name] is original
    assert dict(vars(owner)) == before


@every_exhibit
def test_a_function_that_is_gone_is_an_error(bug: Exhibit, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name = owner_of(bug)
    monkeypatch.delattr(owner, name)
    with pytest.raises(SeamGone, match=rf"exhibit '{bug.name}' swaps {re.escape(bug.seam)}"):
        with bug.fault():
            raise AssertionError("there was nothing to swap")
    assert name not in vars(owner)


class Base:
    def inherited(self) -> int:
        return 1


class Derived(Base):
    def own(self) -> int:
        return 1


def halfway(seam: str) -> Exhibit:
    """An exhibit on a module of this test's own."""
    return replace(EXHIBITS[0], name="halfway", seam=seam, swap=lambda original: lambda *args: 2)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("fake_production")
    module.Derived = Derived  # type: ignore[attr-defined]
    module.gather = lambda: 1  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fake_production", module)
    return module


def test_functions_and_methods_are_swapped(fake: ModuleType) -> None:
    with halfway("fake_production:gather").fault(), halfway("fake_production:Derived.own").fault():
        assert (fake.gather(), Derived().own()) == (2, 2)
    assert (fake.gather(), Derived().own()) == (1, 1)


@pytest.mark.parametrize(
    "seam",
    [
        "fake_production:gathers",
        "fake_production:Derived.others",
        "fake_production:Derived.inherited",  # swapped here, it would stay behind on Derived
        "fake_production:Deriven.own",
        "fake_productions:gather",
    ],
)
def test_a_wrong_name_is_an_error(fake: ModuleType, seam: str) -> None:
    with pytest.raises(SeamGone, match=re.escape(seam)), halfway(seam).fault():
        pass
    assert "inherited" not in vars(Derived)


# The labels ---------------------------------------------------------------------------------------


@every_exhibit
def test_every_card_is_complete(bug: Exhibit) -> None:
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", bug.name)
    assert 10 <= len(bug.title) <= 60 and not bug.title.endswith(".")
    sentences = re.findall(r"[.:;?](?= [A-Z]|$)", bug.mechanism)
    assert 2 <= len(sentences) <= 5 and 150 <= len(bug.mechanism) <= 600, bug.mechanism
    assert re.search(PROJECTS + r" (issue |PR )?\d{2,}", bug.reported_in)
    assert " has " not in bug.reported_in, "reported in a place; what that place has now, who knows"
    assert bug.symptom.endswith(".") and 30 <= len(bug.symptom) <= 120
    assert bug.before.strip() and bug.after.strip() and bug.before != bug.after
    assert "\n" not in bug.before + bug.after and len(bug.before) <= 100 and len(bug.after) <= 100
    card = bug.card()
    for field in fields(bug):
        if field.name not in ("name", "seam", "swap", "observe"):
            assert getattr(bug, field.name) in card


@every_exhibit
def test_the_line_after_is_a_line_of_our_code(bug: Exhibit) -> None:
    assert "".join(bug.after.split()) in "".join(production_text().split())


def test_names_are_unique_and_found() -> None:
    assert (
        len({bug.name for bug in EXHIBITS}) == len({bug.title for bug in EXHIBITS}) == len(EXHIBITS)
    )
    for bug in EXHIBITS:
        assert exhibit(bug.name) is bug
    with pytest.raises(
        KeyError, match=r"no exhibit 'two-slot-gather'; there are .*one-slot-gather"
    ):
        exhibit("two-slot-gather")


def production_files() -> list[Path]:
    found = [*(ROOT / "mamba_teach").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]
    return [path for path in found if path.parent != ROOT / "mamba_teach" / "faults"]


def production_text() -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in production_files())


def test_production_knows_nothing_of_the_museum() -> None:
    """No import of it, and no flag for a bug."""
    words = re.compile(r"mamba_teach\.faults|import faults|from \.+faults|museum|\bfault_", re.I)
    for path in production_files():
        text = path.read_text(encoding="utf-8")
        assert not (found := words.search(text)), f"{path}: {found}"
        known = [
            bug.name for bug in EXHIBITS if bug.name in text or bug.name.replace("-", "_") in text
        ]
        assert not known, path


# Stories ------------------------------------------------------------------------------------------


def test_a_wrong_token_ends_a_story(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ghost objects to wrong states; a wrong token behind right ones has to be seen as well."""
    compute_logits = GhostModel.compute_logits
    monkeypatch.setattr(
        GhostModel, "compute_logits", lambda *args: compute_logits(*args).roll(1, 1)
    )
    story = GhostStory()
    story.add(range(5))
    right = GhostModel("M").continuation(range(5), 1)[0]
    finding = story.tell()
    assert finding.symptom_seen
    assert finding.message == f"r0 said [{(right + 1) % 97}] instead of [{right}]"


def test_a_story_without_error_has_all_of_its_log() -> None:
    story = GhostStory(k=2)
    story.add(range(20), steps=[(2, 2), (2, 0)], max_tokens=12)
    finding = story.tell()
    assert finding.message == "every request said what it should" and not finding.symptom_seen
    assert story.engine is not None and finding.events == tuple(story.engine.events)
    assert story.outputs["r0"].num_drafted_tokens == 4
    assert story.outputs["r0"].num_accepted_drafts == 2


def test_what_the_engine_tidies_up_after_an_error_is_not_in_the_log() -> None:
    bug = exhibit("one-tensor-for-both")
    with bug.fault():
        finding = bug.observe()
    assert not isinstance(finding.events[-1], RequestReleased | RequestPreempted)
