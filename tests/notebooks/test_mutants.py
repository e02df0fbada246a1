"""A notebook that is wrong must fail: small faults, put into copies of real notebooks.

Each copy holds the cells up to the spoilt one, with their committed outputs. Unspoilt it passes; with
an expected error taken away, a constant changed, a raise in a widget's callback, or a magic that
nobody knows, strict nbval must fail.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "notebooks" / "05_paged_state_cache.ipynb"
MUSEUM = ROOT / "notebooks" / "11_museum.ipynb"

pytestmark = pytest.mark.slow


def cells_of(path: Path, numbers: list[int]) -> dict:
    """A notebook of some of the code cells of another one."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return notebook | {"cells": [code[number] for number in numbers]}


def passes(notebook: dict, folder: Path) -> bool:
    """Whether strict nbval is content with it."""
    path = folder / "copy.ipynb"
    path.write_text(json.dumps(notebook), encoding="utf-8")
    done = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--nbval",
            "--nbval-current-env", "--nbval-cell-timeout", "120",
            "--nbval-sanitize-with", str(ROOT / "tests" / "notebooks" / "sanitize.cfg"), str(path),
        ],
        cwd=folder, env={**os.environ, "MPLBACKEND": "agg"}, capture_output=True, text=True,
    )  # fmt: skip
    assert " passed" in done.stdout or " failed" in done.stdout, done.stdout[-2000:] + done.stderr
    return done.returncode == 0


def spoil(notebook: dict, old: str, new: str) -> dict:
    """The last cell with one piece of its source replaced, which must be there once."""
    source = "".join(notebook["cells"][-1]["source"])
    assert source.count(old) == 1, source
    notebook["cells"][-1]["source"] = source.replace(old, new)
    return notebook


def test_the_pieces_pass_unspoilt(tmp_path: Path) -> None:
    assert passes(cells_of(NOTEBOOK, [0, 1, 2, 4, 6]), tmp_path)
    assert passes(cells_of(MUSEUM, [0, 24]), tmp_path)


def test_an_expected_error_that_does_not_come(tmp_path: Path) -> None:
    """The pool has no two blocks left; the notebook shows how it refuses."""
    spoilt = spoil(
        cells_of(NOTEBOOK, [0, 6]), "refusal(pool.allocate, 2)", "refusal(pool.free_order)"
    )
    assert not passes(spoilt, tmp_path)


def test_a_changed_constant_that_makes_a_check_false(tmp_path: Path) -> None:
    spoilt = spoil(cells_of(NOTEBOOK, [0, 1, 2, 4]), "mamba.conv[7] == 3", "mamba.conv[7] == 4")
    assert not passes(spoilt, tmp_path)


def test_a_changed_constant_that_changes_what_is_printed(tmp_path: Path) -> None:
    assert not passes(spoil(cells_of(NOTEBOOK, [0, 6]), "BlockPool(6)", "BlockPool(7)"), tmp_path)


def test_a_callback_of_a_widget_that_raises(tmp_path: Path) -> None:
    """The list's callback: choosing an exhibit runs it."""
    raising = "\n".join([
        "from unittest.mock import patch",
        "with patch('mamba_teach.viz.exhibit_picker.visit', side_effect=ZeroDivisionError):",
        "    picker._dropdown.value = 'one-slot-gather'",
        "picker",
    ])  # fmt: skip
    museum = cells_of(MUSEUM, [0, 24])
    source = "".join(museum["cells"][-1]["source"])
    museum["cells"][-1]["source"] = source.removesuffix("picker") + raising
    assert not passes(museum, tmp_path)


def test_an_unknown_magic(tmp_path: Path) -> None:
    spoilt = spoil(
        cells_of(NOTEBOOK, [0, 6]), "pool = BlockPool(6)", "%frobnicate\npool = BlockPool(6)"
    )
    assert not passes(spoilt, tmp_path)
