"""What every notebook of the course needs: the mode line, figures with alt text, checks."""

from __future__ import annotations

import matplotlib.pyplot as plt
import torch
from IPython.display import display
from matplotlib.figure import Figure

from mamba_kernels.backend import choose_backend


def mode_line() -> str:
    """Where the notebook runs, so that nobody takes a simulation for a measurement."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    backend = choose_backend(torch.empty(0, device=device))
    return f"device={device}  kernels={backend}  graphs=off"


def show(figure: Figure, alt: str, stamp: str) -> None:
    """Display a figure once, with alt text and a stamp in its corner.

    Args:
        figure: closed afterwards, so that it is not shown again.
        alt: what somebody who cannot see the picture should know.
        stamp: where the numbers come from: "simulated", "computed", or "measured on ...".
    """
    if not alt:
        raise ValueError("a figure needs alt text")
    figure.text(0.995, 0.005, stamp, ha="right", va="bottom", fontsize=7, color="#666666")
    display(figure, metadata={"image/png": {"alt": alt}})
    plt.close(figure)


def check(claim: str, holds: object) -> None:
    """Print a claim that holds; raise on one that does not."""
    if not bool(holds):
        raise AssertionError(f"does not hold: {claim}")
    print(f"✓ {claim}")
