"""Run notebooks from clean kernels and save them with their outputs, the way they are committed.

    python tools/run_notebooks.py                            # all of notebooks/
    python tools/run_notebooks.py notebooks/03_slots.ipynb   # some

A notebook is saved only if every cell ran (a cell tagged `raises-exception` may fail). What differs
from run to run or from machine to machine without being a result is taken out, so that running
twice gives the same file: time stamps, widget state, the kernel's version, paths in tracebacks.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
KERNELSPEC = {"display_name": "Python 3", "language": "python", "name": "python3"}
LANGUAGE_INFO = {"file_extension": ".py", "mimetype": "text/x-python", "name": "python"}
BUDGET_S = 60  # of one notebook on two CPU cores


def execute(nb: NotebookNode, folder: Path, timeout: int) -> None:
    """Run every cell of `nb` in a new kernel that starts in `folder`, as nbval's does."""
    NotebookClient(
        nb,
        timeout=timeout,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,
        store_widget_state=False,
        coalesce_streams=True,
        extra_arguments=["--IPKernelApp.log_level=40"],  # no chatter between progress bars
    ).execute()


def tidy(nb: NotebookNode) -> None:
    """Take out, in place, what is not a result."""
    nb.metadata.pop("widgets", None)
    nb.metadata.kernelspec = KERNELSPEC
    nb.metadata.language_info = LANGUAGE_INFO
    for cell in nb.cells:
        for volatile in ("execution", "collapsed", "jp-MarkdownHeadingCollapsed"):
            cell.metadata.pop(volatile, None)
        for output in cell.get("outputs", []):
            drop_dead_widget(output)
            if output.output_type == "error":
                output.traceback = [shorten_paths(line) for line in output.traceback]


def drop_dead_widget(output: NotebookNode) -> None:
    """Without its state a saved widget is an error box, and hides the static picture beside it."""
    data = output.get("data", {})
    if WIDGET_VIEW in data and any(k == "text/html" or k.startswith("image/") for k in data):
        del data[WIDGET_VIEW]


def shorten_paths(line: str) -> str:
    """`/home/me/mamba_teach/engine.py` becomes `mamba_teach/engine.py`; likewise below the venv."""
    home = str(Path.home())
    for folder in (str(ROOT), sys.prefix, sys.base_prefix):
        line = line.replace(folder + "/", "")
        if folder.startswith(home + "/"):
            line = line.replace("~" + folder[len(home) :] + "/", "")
    return line


def run(path: Path, timeout: int) -> tuple[float, str | None]:
    """Execute, tidy and save one notebook: (seconds, None), or (seconds, what went wrong)."""
    nb = nbformat.read(path, as_version=4)
    start = time.perf_counter()
    try:
        execute(nb, path.parent, timeout)
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        return time.perf_counter() - start, str(error)
    tidy(nb)
    nbformat.validate(nb)
    nbformat.write(nb, path)
    return time.perf_counter() - start, None


def main() -> int:
    """Parse the command line, run what it names, report; 1 if a notebook failed."""
    parser = argparse.ArgumentParser(description="Run notebooks from clean kernels, in place.")
    parser.add_argument("notebooks", nargs="*", type=Path, help="default: all of notebooks/")
    parser.add_argument("--timeout", type=int, default=120, help="seconds per cell (%(default)s)")
    args = parser.parse_args()
    paths = args.notebooks or sorted((ROOT / "notebooks").rglob("*.ipynb"))
    paths = [p.resolve() for p in paths if ".ipynb_checkpoints" not in p.parts]

    failures = 0
    with tqdm(paths, unit="notebook") as bar:
        for path in bar:
            bar.set_description(path.stem)
            seconds, problem = run(path, args.timeout)
            failures += problem is not None
            if problem:
                bar.write(f"{path.name}: not saved\n{problem}")
            elif seconds > BUDGET_S:
                bar.write(f"{path.name}: {seconds:.0f} s, more than its {BUDGET_S} s")
    print(f"{len(paths) - failures} of {len(paths)} notebooks run and saved")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
