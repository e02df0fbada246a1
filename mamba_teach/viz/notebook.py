"""What every notebook of the course needs: the mode line, figures with alt text, checks."""

from __future__ import annotations

import base64
import io

import matplotlib.pyplot as plt
import torch
from IPython.display import display
from matplotlib.figure import Figure
from PIL import Image

from mamba_kernels.backend import choose_backend
from mamba_teach.runner.graphs import resolve_graphs

PNG_DPI = 120  # of the file; it is shown in the size that the figure asks for
STAMP_GAP = 0.04  # inches


def mode_line(graphs: str = "off") -> str:
    """Where the notebook runs, so that nobody takes a simulation for a measurement.

    Args:
        graphs: the engine's setting in the notebook; "auto" becomes what the device has.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    backend = choose_backend(torch.empty(0, device=device))
    kind = resolve_graphs(graphs, torch.device(device))
    return f"device={device}  kernels={backend}  graphs={kind}"


def show(figure: Figure, alt: str, stamp: str) -> None:
    """Display a figure once, with alt text and a stamp under its right corner.

    Args:
        figure: closed afterwards, so that it is not shown again.
        alt: what somebody who cannot see the picture should know.
        stamp: where the numbers come from: "simulated", "computed", or "measured on ...".
    """
    if not alt:
        raise ValueError("a figure needs alt text")
    _stamp(figure, stamp)
    picture = render(figure)
    shown = Image.open(io.BytesIO(picture)).size
    width, height = (round(pixels * figure.dpi / PNG_DPI) for pixels in shown)
    display(
        {"image/png": base64.b64encode(picture).decode(), "text/plain": repr(figure)},
        metadata={"image/png": {"alt": alt, "width": width, "height": height}},
        raw=True,
    )
    plt.close(figure)


def _stamp(figure: Figure, stamp: str) -> None:
    """Write below everything that is drawn so far, tick labels included."""
    figure.canvas.draw()  # runs the layout
    drawn = figure.get_tightbbox()
    width, height = figure.get_size_inches()
    figure.text(
        drawn.x1 / width, (drawn.y0 - STAMP_GAP) / height, stamp,
        ha="right", va="top", fontsize=7, color="#666666",
    )  # fmt: skip


def render(figure: Figure) -> bytes:
    """The figure as a PNG with a palette: a third of the bytes, so that notebooks stay small."""
    full = io.BytesIO()
    figure.savefig(full, format="png", dpi=PNG_DPI, bbox_inches="tight", pad_inches=0.06)
    flat = Image.open(full).convert("RGBA")
    paper = Image.new("RGBA", flat.size, "white")
    paper.alpha_composite(flat)
    small = io.BytesIO()
    palette = paper.convert("RGB").quantize(256, dither=Image.Dither.NONE)
    palette.save(small, format="png", optimize=True)
    return small.getvalue()


def check(claim: str, holds: object) -> None:
    """Print a claim that holds; raise on one that does not."""
    if not bool(holds):
        raise AssertionError(f"does not hold: {claim}")
    print(f"✓ {claim}")
