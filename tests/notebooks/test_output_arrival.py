"""Output may arrive in one message or in fifty: that must not make a notebook fail.

Twenty cells print fifty lines each and flush in between. Half of them have their output recorded as
one message, half as fifty; strict nbval must be content with all of them, and with none whose last
line is another.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SANITIZE = Path(__file__).with_name("sanitize.cfg")
SOURCE = "import sys\nfor i in range(50):\n    print('line', i)\n    sys.stdout.flush()"
LINES = [f"line {i}\n" for i in range(50)]


def cell(number: int, lines: list[str], in_one_message: bool) -> dict:
    messages = [lines] if in_one_message else [[line] for line in lines]
    outputs = [{"name": "stdout", "output_type": "stream", "text": text} for text in messages]
    return {
        "cell_type": "code", "execution_count": number, "id": f"c{number}", "metadata": {},
        "outputs": outputs, "source": SOURCE,
    }  # fmt: skip


def run(cells: list[dict], folder: Path) -> str:
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    path = folder / "arrival.ipynb"
    notebook = {
        "cells": cells,
        "metadata": {"kernelspec": kernel},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    path.write_text(json.dumps(notebook), encoding="utf-8")
    done = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--nbval",
            "--nbval-current-env", "--nbval-sanitize-with", str(SANITIZE), str(path),
        ],
        cwd=folder, env=dict(os.environ), capture_output=True, text=True,
    )  # fmt: skip
    return done.stdout


@pytest.mark.slow
def test_fifty_prints_pass_twenty_times(tmp_path: Path) -> None:
    assert "20 passed" in run([cell(i, LINES, i % 2 == 0) for i in range(1, 21)], tmp_path)


@pytest.mark.slow
def test_another_last_line_is_noticed(tmp_path: Path) -> None:
    wrong = [*LINES[:-1], "line 50\n"]
    assert "2 failed" in run([cell(1, wrong, True), cell(2, wrong, False)], tmp_path)
