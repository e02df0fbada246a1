"""The player without a front end: frames, controls called as functions, and the static strip."""

from __future__ import annotations

import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook
from viz.ghost_logs import MODES, by_hand, ghost_log

from mamba_teach.events import reduce
from mamba_teach.viz.history import owner_history, step_ends
from mamba_teach.viz.player import BoardPlayer

VIEW = "application/vnd.jupyter.widget-view+json"


@pytest.fixture
def player() -> BoardPlayer:
    return BoardPlayer(ghost_log("all"))


@pytest.mark.parametrize("mode", MODES)
def test_a_frame_is_the_reduced_prefix(mode: str) -> None:
    log = ghost_log(mode)
    player = BoardPlayer(log)
    assert player.frames == [*(reduce(log[:end]) for end in step_ends(log)), reduce(log)]
    assert [frame.step for frame in player.frames[:-1]] == list(range(player.num_steps))


def test_steps_can_be_chosen() -> None:
    player = BoardPlayer(ghost_log("all"), steps=[5, 2])
    assert [frame.step for frame in player.frames] == [2, 5]
    assert player.num_steps == BoardPlayer(ghost_log("all")).num_steps
    with pytest.raises(ValueError, match=r"none of the steps \[99\]"):
        BoardPlayer(ghost_log("all"), steps=[99])


def test_a_log_that_goes_on_does_not_change_the_player() -> None:
    log = by_hand()[:9]
    player = BoardPlayer(log)
    log += by_hand()[9:]
    assert (player.num_steps, len(player.frames)) == (1, 2)


def test_owner_history(player: BoardPlayer) -> None:
    found = [(o.first_step, o.last_step, o.request_id) for o in owner_history(player.events, 3)]
    assert player.owner_history(3) == found != []


# Controls -------------------------------------------------------------------------------------


def test_select_shows_a_frame(player: BoardPlayer) -> None:
    player.select(3)
    assert "step 3:" in player._picture.value
    assert (player.index, player._slider.value) == (3, 3)


def test_the_slider_selects(player: BoardPlayer) -> None:
    player._slider.value = 2
    assert player.index == 2 and "step 2:" in player._picture.value


def test_buttons_step_and_stop_at_the_ends(player: BoardPlayer) -> None:
    back, forward = player._buttons
    forward.click()
    forward.click()
    back.click()
    assert player.index == 1
    player.step(-5)
    assert player.index == 0
    player.step(500)
    assert player.index == len(player.frames) - 1
    assert "end of the log" in player._picture.value


def test_every_frame_renders(player: BoardPlayer) -> None:
    pages = [player.html(i) for i in range(len(player.frames))]
    assert len(set(pages)) == len(pages)


def test_the_slot_box_answers(player: BoardPlayer) -> None:
    player._slot.value = 3
    assert "r0, column 2 of mamba 0" in player._answer.value
    assert player.ask(0) == "slot 0 is the null block: nobody ever owns it"


def test_errors_surface(player: BoardPlayer, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(IndexError, match="no frame 99"):
        player.select(99)
    with pytest.raises(ValueError, match="no slot 400"):
        player.ask(400)

    def broken(_: int) -> None:
        raise RuntimeError("a <broken> callback")

    monkeypatch.setattr(player, "html", broken)
    with pytest.raises(RuntimeError, match="broken"):
        player._slider.value = 4  # a callback of a widget, and still it raises
    assert "a &lt;broken&gt; callback" in player._trouble.value
    monkeypatch.undo()
    player._slider.value = 5
    assert player._trouble.value == ""


# Without a front end --------------------------------------------------------------------------


class Tags(HTMLParser):
    """Checks that tags are balanced, and collects captions and headers."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: dict[str, list[str]] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "th":
            assert dict(attrs).get("scope") in ("row", "col")
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)


def test_the_bundle_has_words_a_strip_and_a_widget(player: BoardPlayer) -> None:
    bundle = player._repr_mimebundle_()
    assert bundle["text/plain"] == repr(player) == "BoardPlayer: 9 steps, 4 requests, 40 blocks"
    assert VIEW in bundle
    html = str(bundle["text/html"])
    parsed = Tags()
    parsed.feed(html)
    assert parsed.open == []
    captions = parsed.texts["caption"]
    assert captions[0].startswith("step 0:") and captions[-1].endswith("(end of the log)")
    assert len(captions) == 6
    assert html == BoardPlayer(ghost_log("all")).strip()
    assert "<script" not in html and "<style" not in html


def test_a_large_strip_shows_fewer_frames() -> None:
    settings = dict(followers=30, prompt=300, num_blocks=2000, max_num_seqs=30, max_model_len=400)
    player = BoardPlayer(ghost_log("all", **settings, max_num_batched_tokens=1000))
    strip = player.strip()
    assert 1000 < len(strip.encode()) < 60_000


def test_request_ids_are_escaped() -> None:
    log = [*by_hand()]
    log[1] = type(log[1])("<b>", 10)  # type: ignore[call-arg]
    log = [
        type(e)(**{**vars(e), "request_id": "<b>"}) if hasattr(e, "request_id") else e for e in log
    ]
    assert "&lt;b&gt;" in BoardPlayer(log).strip()


@pytest.mark.slow
def test_a_cell_that_ends_in_a_player_passes_strict_nbval(tmp_path: Path) -> None:
    cells = [
        "from mamba_teach import Engine, EngineConfig, GhostModel, SamplingParams\n"
        "from mamba_teach.viz.player import BoardPlayer\n"
        "config = EngineConfig(block_size=4, max_model_len=64, max_num_seqs=2, num_blocks=40)\n"
        "engine = Engine(GhostModel(), config)\n"
        "_ = engine.generate([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6]], SamplingParams(max_tokens=4))",
        "BoardPlayer(engine.events)",
    ]
    notebook = new_notebook(cells=[new_code_cell(source) for source in cells])
    NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    assert "text/html" in notebook.cells[1].outputs[0].data
    notebook.metadata.pop("widgets", None)
    path = tmp_path / "player.ipynb"
    nbformat.write(notebook, path)
    command = [sys.executable, "-m", "pytest", "--nbval", "--nbval-current-env", "-q", str(path)]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0 and "2 passed" in run.stdout, run.stdout
