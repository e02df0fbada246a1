"""The block board of a run: the one page for which something is computed."""

from __future__ import annotations

from mamba_teach import Engine, EngineConfig, load_model
from mamba_teach.viz.board_html import board_page
from mamba_teach.wordmath.evaluate import evaluate

NUM_PROBLEMS = 6
BACK = '<body>\n<p><a href="index.html">mamba_teach</a> · the block board</p>'


def board_of_a_run() -> str:
    """The shipped model answers word problems; every step of it as one self-contained page."""
    config = EngineConfig(max_num_seqs=4, num_speculative_tokens=3)
    engine = Engine(load_model("wordmath"), config)
    evaluate(engine, NUM_PROBLEMS)
    page = board_page(
        engine.events,
        f"{NUM_PROBLEMS} word problems, {config.max_num_seqs} at a time, "
        f"{config.num_speculative_tokens} guesses per step",
    )
    return page.replace("<body>", BACK, 1)
