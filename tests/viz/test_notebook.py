"""What notebooks show: a small picture with alt text, and a stamp that lies on nothing."""

from __future__ import annotations

import base64
import io
from typing import Any

import matplotlib.pyplot as plt
import pytest
from matplotlib.figure import Figure
from PIL import Image

from mamba_teach.viz import notebook


def crowded(layout: str | None) -> Figure:
    """Tick labels where a corner stamp would lie."""
    figure, axes = plt.subplots(figsize=(4, 2), layout=layout)
    axes.plot(range(10))
    axes.set_xticks(range(10), [f"label {i}" for i in range(10)], rotation=40, ha="right")
    axes.set_xlabel("position")
    axes.yaxis.tick_right()
    return figure


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, dict[str, Any]]]:
    calls: list[tuple[Any, dict[str, Any]]] = []
    monkeypatch.setattr(notebook, "display", lambda data, **more: calls.append((data, more)))
    return calls


@pytest.mark.parametrize("layout", [None, "constrained", "tight"])
def test_the_stamp_lies_below_everything(layout: str | None) -> None:
    figure = crowded(layout)
    axes = figure.axes[0]
    notebook._stamp(figure, "simulated")
    figure.canvas.draw()
    stamp = figure.texts[0].get_window_extent()
    others = [*axes.get_xticklabels(), *axes.get_yticklabels(), axes.xaxis.label]
    assert not any(stamp.overlaps(other.get_window_extent()) for other in others)
    plt.close(figure)


def test_show_gives_one_small_picture_with_alt_text(shown: list) -> None:
    figure = crowded("constrained")
    full = io.BytesIO()
    figure.savefig(full, format="png", dpi=notebook.PNG_DPI)
    text = repr(figure)
    notebook.show(figure, "a line that rises", "computed")
    [(data, more)] = shown
    picture = base64.b64decode(data["image/png"])
    image = Image.open(io.BytesIO(picture))
    assert image.mode == "P"
    assert len(picture) < 0.6 * len(full.getvalue())
    assert data["text/plain"] == text  # nbval compares it
    meta = more["metadata"]["image/png"]
    assert meta["alt"] == "a line that rises" and more["raw"] is True
    assert meta["width"] / image.width == pytest.approx(figure.dpi / notebook.PNG_DPI, rel=0.01)
    assert not plt.fignum_exists(figure.number)


def test_no_picture_without_alt_text() -> None:
    figure = crowded(None)
    with pytest.raises(ValueError, match="alt text"):
        notebook.show(figure, "", "computed")
    plt.close(figure)


def test_colours_survive() -> None:
    figure, axes = plt.subplots(figsize=(1, 1))
    axes.set_facecolor("#0072B2")
    axes.set_position((0, 0, 1, 1))
    colours = Image.open(io.BytesIO(notebook.render(figure))).convert("RGB").getcolors()
    assert colours is not None
    assert dict((colour, count) for count, colour in colours)[0x00, 0x72, 0xB2] > 5000
    plt.close(figure)


def test_check_prints_or_raises(capsys: pytest.CaptureFixture[str]) -> None:
    notebook.check("two and two is four", 2 + 2 == 4)
    assert capsys.readouterr().out == "✓ two and two is four\n"
    with pytest.raises(AssertionError, match="does not hold: the moon is cheese"):
        notebook.check("the moon is cheese", False)
