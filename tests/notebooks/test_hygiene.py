"""What must hold of every committed notebook, and for each rule a small notebook that breaks it.

A rule is a function from a notebook to a list of complaints; an empty list is a pass. Nothing is
executed here: nbval does that, and compares outputs.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted(
    path
    for path in (ROOT / "notebooks").rglob("*.ipynb")
    if ".ipynb_checkpoints" not in path.relative_to(ROOT).parts
)
MAX_BYTES = 300_000
SOFT_LINES, HARD_LINES = 12, 15
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
MODE_LINE = re.compile(r"device=\S+.*\bkernels=\S+.*\bgraphs=\S+")
# A well-known top folder, or any two folders in a row; not a closing tag, a URL or base64.
ABSOLUTE_PATH = re.compile(
    r"(?<![\w.:/<+=~])/(?:(?:home|root|Users|tmp|usr|opt|work|var|mnt|private|etc)/|(?:[\w.-]+/){2,})"
    r"|\bfile:///|\b[A-Za-z]:\\\w|(?<!\w)~/\w"
)


# Reading a notebook ---------------------------------------------------------------------------


def code_cells(nb: NotebookNode) -> list[NotebookNode]:
    return [c for c in nb.cells if c.cell_type == "code" and c.source.strip()]


def outputs(nb: NotebookNode) -> Iterator[tuple[int, NotebookNode]]:
    """(execution count of the cell, output), for every output."""
    for number, cell in enumerate(code_cells(nb), start=1):
        for output in cell.outputs:
            yield number, output


def texts(output: NotebookNode) -> Iterator[str]:
    """The readable parts of an output, without terminal colours and image bytes."""
    for text in coloured_texts(output):
        yield re.sub(r"\x1b\[[0-9;]*m", "", text)


def coloured_texts(output: NotebookNode) -> Iterator[str]:
    if output.output_type == "stream":
        yield output.text
    elif output.output_type == "error":
        yield "\n".join([output.evalue, *output.traceback])
    else:
        for mime, data in output.data.items():
            if mime.startswith("text/") or mime == "image/svg+xml":
                yield data
            elif mime.endswith("json"):
                yield json.dumps(data)


def non_blank_lines(cell: NotebookNode) -> list[str]:
    return [line for line in cell.source.splitlines() if line.strip()]


# The rules ------------------------------------------------------------------------------------


def is_valid(nb: NotebookNode) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:  # e.g. cells without an id
        warnings.simplefilter("always")
        try:
            nbformat.validate(nb)
        except nbformat.ValidationError as error:
            return [f"not a valid notebook: {error.message}"]
    return [f"not quite a valid notebook: {w.message}" for w in caught]


def ran_in_order(nb: NotebookNode) -> list[str]:
    counts = [cell.execution_count for cell in code_cells(nb)]
    if counts == list(range(1, len(counts) + 1)):
        return []
    return [f"execution counts are {counts}: run it from a clean kernel (make notebooks)"]


def has_no_widget_state(nb: NotebookNode) -> list[str]:
    stored = "widgets" in nb.metadata
    return ["metadata.widgets is stored: strip it (make notebooks)"] if stored else []


def widgets_have_a_static_twin(nb: NotebookNode) -> list[str]:
    return [
        f"cell [{n}]: a widget without text/html or an image beside it is an empty box on GitHub"
        for n, out in outputs(nb)
        if WIDGET_VIEW in out.get("data", {})
        and not any(m == "text/html" or m.startswith("image/") for m in out.data)
    ]


def has_no_absolute_paths(nb: NotebookNode) -> list[str]:
    found = ((n, ABSOLUTE_PATH.search(text)) for n, out in outputs(nb) for text in texts(out))
    return [f"cell [{n}]: absolute path near {m.group()!r} in an output" for n, m in found if m]


def errors_are_meant(nb: NotebookNode) -> list[str]:
    return [
        f"cell [{n}]: error output without the tag raises-exception"
        for n, cell in enumerate(code_cells(nb), start=1)
        if any(out.output_type == "error" for out in cell.outputs)
        and "raises-exception" not in cell.metadata.get("tags", [])
    ]


def is_small(nb: NotebookNode) -> list[str]:
    size = len(nbformat.writes(nb).encode())
    return [f"{size} bytes; at most {MAX_BYTES}"] if size > MAX_BYTES else []


def images_have_alt_text(nb: NotebookNode) -> list[str]:
    bad = [
        f"cell [{n}]: {mime} without alt text (display(fig, metadata={{{mime!r}: {{'alt': ...}}}}))"
        for n, out in outputs(nb)
        for mime in out.get("data", {})
        if mime.startswith("image/") and not out.metadata.get(mime, {}).get("alt", "").strip()
    ]
    for cell in nb.cells:
        if cell.cell_type == "markdown" and re.search(r"!\[\s*\]\(", cell.source):
            bad.append(f"markdown image without alt text: {cell.source[:60]!r}")
    return bad


def has_no_trailing_semicolons(nb: NotebookNode) -> list[str]:
    return [
        f"cell [{n}]: ends in a semicolon, which nbval does not honour (write `_ = ...`)"
        for n, cell in enumerate(code_cells(nb), start=1)
        if non_blank_lines(cell)[-1].split("  #")[0].rstrip().endswith(";")
    ]


def starts_with_a_title(nb: NotebookNode) -> list[str]:
    first = nb.cells[0] if nb.cells else None
    if first is not None and first.cell_type == "markdown" and re.match(r"# \S", first.source):
        return []
    return ["the first cell is not a markdown title (# ...)"]


def has_no_stderr(nb: NotebookNode) -> list[str]:
    return [
        f"cell [{n}]: writes to stderr: {out.text[:60]!r}"
        for n, out in outputs(nb)
        if out.output_type == "stream" and out.name == "stderr"
    ]


def prints_the_mode_first(nb: NotebookNode) -> list[str]:
    cells = code_cells(nb)
    if cells and any(MODE_LINE.search(text) for out in cells[0].outputs for text in texts(out)):
        return []
    return ["the first code cell does not print the mode line (device=... kernels=... graphs=...)"]


def cells_are_short(nb: NotebookNode) -> list[str]:
    sizes = [len(non_blank_lines(cell)) for cell in code_cells(nb)]
    return [
        f"cell [{n}]: {size} lines; aim at {SOFT_LINES}, never over {HARD_LINES}"
        for n, size in enumerate(sizes, start=1)
        if size > HARD_LINES
    ]


RULES: list[Callable[[NotebookNode], list[str]]] = [
    is_valid,
    ran_in_order,
    has_no_widget_state,
    widgets_have_a_static_twin,
    has_no_absolute_paths,
    errors_are_meant,
    is_small,
    images_have_alt_text,
    has_no_trailing_semicolons,
    starts_with_a_title,
    has_no_stderr,
    prints_the_mode_first,
    cells_are_short,
]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_committed_notebook(path: Path) -> None:
    nb = nbformat.from_dict(json.loads(path.read_text(encoding="utf-8")))
    for cell in nb.get("cells", []):  # files may hold a text as a list of lines
        cell.source = "".join(cell.source)
        for out in cell.get("outputs", []):
            if "text" in out:
                out.text = "".join(out.text)
            for mime, data in out.get("data", {}).items():
                if isinstance(data, list):
                    out.data[mime] = "".join(data)
    complaints = [complaint for rule in RULES for complaint in rule(nb)]
    assert not complaints, f"{path.name}:\n  " + "\n  ".join(complaints)


# Every rule bites -----------------------------------------------------------------------------

MODE = "device=cpu  kernels=torch  graphs=recorder\n"


def stream(text: str, name: str = "stdout") -> NotebookNode:
    return new_output("stream", text=text, name=name)


def shown(data: dict, **metadata: dict) -> NotebookNode:
    return new_output("display_data", data=data, metadata=metadata)


def good() -> NotebookNode:
    """The smallest notebook that keeps every rule: title, mode line, one more cell."""
    return new_notebook(
        cells=[
            new_markdown_cell("# Slots\n\nWhich slot will step 2 read?"),
            new_code_cell("print(mode())", execution_count=1, outputs=[stream(MODE)]),
            new_code_cell("print(7)", execution_count=2, outputs=[stream("7\n")]),
        ]
    )


def with_output(output: NotebookNode) -> NotebookNode:
    nb = good()
    nb.cells[2].outputs = [output]
    return nb


def with_source(source: str) -> NotebookNode:
    nb = good()
    nb.cells[2].source = source
    return nb


def with_change(change: Callable[[NotebookNode], object]) -> NotebookNode:
    nb = good()
    change(nb)
    return nb


FAILED = new_output("error", ename="KeyError", evalue="7", traceback=["KeyError: 7"])
PNG = {"image/png": "iVBORw0KGgo=", "text/plain": "<Figure size 600x300>"}
VIEW = {WIDGET_VIEW: {"model_id": "ab", "version_major": 2, "version_minor": 0}, "text/plain": "P"}

BROKEN: list[tuple[Callable[[NotebookNode], list[str]], NotebookNode]] = [
    (is_valid, with_change(lambda nb: nb.cells[2].pop("outputs"))),
    (is_valid, with_change(lambda nb: nb.cells[2].pop("id"))),
    (ran_in_order, with_change(lambda nb: nb.cells[2].update(execution_count=3))),
    (ran_in_order, with_change(lambda nb: nb.cells[1].update(execution_count=None))),
    (ran_in_order, with_change(lambda nb: nb.cells.insert(1, nb.cells.pop(2)))),
    (has_no_widget_state, with_change(lambda nb: nb.metadata.update(widgets={}))),
    (widgets_have_a_static_twin, with_output(shown(VIEW))),
    (has_no_absolute_paths, with_output(stream("saved to /tmp/x.json"))),
    (has_no_absolute_paths, with_output(stream("<object in '/srv/me/x.py'>"))),
    (has_no_absolute_paths, with_output(stream(r"C:\Users\me"))),
    (has_no_absolute_paths, with_output(shown({"text/html": "<b>/home/me/x</b>"}))),
    (
        has_no_absolute_paths,
        with_output(new_output("error", ename="E", evalue="", traceback=["File ~/src/x.py:3"])),
    ),
    (has_no_absolute_paths, with_output(stream("File \x1b[32m/tmp/x.py:3\x1b[39m"))),
    (errors_are_meant, with_output(FAILED)),
    (is_small, with_output(stream("x" * 300_001))),
    (images_have_alt_text, with_output(shown(PNG))),
    (images_have_alt_text, with_output(shown(PNG, **{"image/png": {"alt": " "}}))),
    (images_have_alt_text, with_change(lambda nb: nb.cells[0].update(source="# A\n![](a.png)"))),
    (has_no_trailing_semicolons, with_source("plot(x);\n")),
    (has_no_trailing_semicolons, with_source("plot(x);  # quiet\n\n")),
    (starts_with_a_title, with_change(lambda nb: nb.cells.pop(0))),
    (starts_with_a_title, with_change(lambda nb: nb.cells[0].update(source="## Slots"))),
    (starts_with_a_title, with_change(lambda nb: nb.cells.clear())),
    (has_no_stderr, with_output(stream("careful", name="stderr"))),
    (prints_the_mode_first, with_change(lambda nb: nb.cells[1].outputs.clear())),
    (
        prints_the_mode_first,
        with_change(lambda nb: nb.cells[1].update(outputs=[stream("device=cpu")])),
    ),
    (cells_are_short, with_source("x = 1\n" * 16)),
]


@pytest.mark.parametrize(
    ("rule", "nb"), BROKEN, ids=[f"{rule.__name__}-{i}" for i, (rule, _) in enumerate(BROKEN)]
)
def test_rule_bites(rule: Callable[[NotebookNode], list[str]], nb: NotebookNode) -> None:
    assert len(rule(nb)) == 1
    assert rule(good()) == []


def test_every_rule_has_a_notebook_that_breaks_it() -> None:
    assert {rule for rule, _ in BROKEN} == set(RULES)


MEANT = {"tags": ["raises-exception"]}
HARMLESS = [
    with_output(shown(PNG, **{"image/png": {"alt": "Block table after step 2."}})),
    with_output(shown(VIEW | {"text/html": "<table><tr><td>7</td></tr></table>"})),
    with_output(stream("3/4 of 1/2; a/b/c; https://example.org/a/b/c; benchmarks/results/x.json")),
    with_source("x = 1\n\n" * 15),
    with_source("a = 1; b = 2"),
    with_change(lambda nb: nb.cells[2].update(outputs=[FAILED], metadata=MEANT)),
    with_change(lambda nb: nb.cells.append(new_code_cell(""))),
]


@pytest.mark.parametrize("nb", HARMLESS, ids=range(len(HARMLESS)))
def test_no_rule_bites_what_is_harmless(nb: NotebookNode) -> None:
    assert [complaint for rule in RULES for complaint in rule(nb)] == []
