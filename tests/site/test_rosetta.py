"""``docs/rosetta.md`` names nothing that is not there, and each row of its tables names something."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "rosetta.md"
OURS = re.compile(r"`(mamba_(?:teach|kernels)(?:\.\w+)+)`")


def find(name: str) -> object:
    """The object with a full import path: the longest module in it, then attributes.

    Raises:
        LookupError: there is none.
    """
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: object = import_module(".".join(parts[:cut]))
        except ModuleNotFoundError as error:
            if not name.startswith(error.name or "?"):
                raise  # something that the module needs is missing
            continue
        for attribute in parts[cut:]:
            if not hasattr(found, attribute):
                raise LookupError(f"{name}: no {attribute!r} in {found}")
            found = getattr(found, attribute)
        return found
    raise LookupError(f"{name}: no such module")


def names(text: str) -> list[str]:
    return list(dict.fromkeys(OURS.findall(text)))


def tables(text: str) -> list[list[list[str]]]:
    """Rows of cells of every table, its head first, the line below it left out."""
    found = []
    for block in re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE):
        rows = [re.split(r"\s*\|\s*", line.strip("| ")) for line in block.splitlines()]
        found.append([rows[0], *rows[2:]])
    return found


def nameless_rows(text: str) -> list[str]:
    """First cells without a name of ours, in the tables that compare symbols."""
    return [
        row[0]
        for head, *rows in tables(text)
        if head[0] == "here" and head[1].startswith(("vLLM: symbol", "SGLang"))
        for row in rows
        if not OURS.search(row[0])
    ]


@pytest.mark.parametrize("name", names(PAGE.read_text(encoding="utf-8")))
def test_what_the_page_names_exists(name: str) -> None:
    find(name)


def test_every_row_names_something_of_ours() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert nameless_rows(text) == []
    widths = [{len(row) for row in table} for table in tables(text)]
    assert all(len(width) == 1 for width in widths), (
        f"a row has too many or too few cells: {widths}"
    )
    assert len(names(text)) > 50  # the pattern still finds them


@pytest.mark.parametrize(
    "name",
    [
        "mamba_teach.cache.specs.MambaSpecs",
        "mamba_teach.caches.specs.MambaSpec",
        "mamba_teach.nobody",
    ],
)
def test_a_name_that_rotted_is_seen(name: str) -> None:
    with pytest.raises(LookupError, match=re.escape(name)):
        find(name)


def test_a_row_without_a_name_is_seen() -> None:
    table = "| here | vLLM: symbol, file | x |\n| --- | --- | --- |\n| `MambaSpec` | same | no |\n"
    assert nameless_rows(table) == ["`MambaSpec`"]
