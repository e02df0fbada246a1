"""The arrows of the house: who may import whom, read from the source with `ast`.

    mamba_kernels  <-  model  <-  runner  <-  engine

The tables below are the rule. A "noun" is a module or folder directly under mamba_teach/, or
mamba_kernels. Imports inside functions count; imports under `if TYPE_CHECKING:` do not, since
nothing is imported when the program runs.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# noun: what it may import of ours. Nouns that are not listed may import anything but FRONT_ONLY.
MAY_IMPORT = {
    "mamba_kernels": [],
    "config": [],
    "events": [],
    "request": ["config"],
    "cache": ["config", "events", "request"],
    "scheduler": ["config", "events", "request", "cache"],
    "model": ["config", "mamba_kernels"],
    "summary": ["config", "cache"],
    "spec_decode": ["config", "request", "model", "mamba_kernels"],
    "runner": [
        "config", "events", "request", "cache", "scheduler",
        "mamba_kernels", "model", "spec_decode",
    ],
    "engine": [
        "config", "events", "request", "cache", "scheduler",
        "mamba_kernels", "model", "spec_decode", "runner", "summary",
    ],
}  # fmt: skip

# Importing one of these loads no torch: bookkeeping is integers, and its tests start in no time.
TORCH_FREE = ["config", "events", "cache", "scheduler", "request"]
TORCH_AND_ITS_USERS = {"torch", "triton", "transformers", "mamba_kernels"}

# Watchers of the engine: they may import it, and it never knows of them.
FRONT_ONLY = ["viz", "faults", "ghost", "exercises", "two_clocks"]
FRONT = ["mamba_teach/__init__.py", "mamba_teach/__main__.py", "mamba_teach/demo.py"]

SOURCE_FOLDERS = ["mamba_teach", "kernels", "tools", "benchmarks"]
SOFT_LINES, HARD_LINES = 250, 350


# Reading imports ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Import:
    target: str  # dotted and absolute: mamba_teach.cache.pool, torch.nn
    line: int
    at_import: bool  # runs when the module is imported, not inside a function


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def walk(node: ast.AST, at_import: bool = True) -> Iterator[tuple[ast.stmt, bool]]:
    """Every import statement below `node`, and whether it runs at import."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, at_import
        elif isinstance(child, ast.If) and is_type_checking(child):
            for other in child.orelse:
                yield from walk(ast.Module([other], []), at_import)
        else:
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from walk(child, at_import and not inside)


class House:
    """The modules below one repository root."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files: dict[str, Path] = {}  # dotted name: file
        for base, package in [(root, "mamba_teach"), (root / "kernels", "mamba_kernels")]:
            for path in sorted((base / package).rglob("*.py")):
                parts = path.relative_to(base).with_suffix("").parts
                self.files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path

    def noun(self, module: str) -> str:
        """mamba_teach.cache.pool -> cache; the package itself -> mamba_teach."""
        parts = module.split(".")
        return parts[1] if parts[0] == "mamba_teach" and len(parts) > 1 else parts[0]

    def imports(self, module: str) -> list[Import]:
        """What `module` imports; `from a import b` is a.b where that is a module, else a."""
        path = self.files[module]
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        found = []
        for node, at_import in walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            else:
                assert isinstance(node, ast.ImportFrom)
                base = node.module or ""
                if node.level:
                    above = package.split(".")[: len(package.split(".")) - node.level + 1]
                    base = ".".join([*above, *([base] if base else [])])
                names = [f"{base}.{alias.name}" for alias in node.names]
                targets = [name if name in self.files else base for name in names]
            found += [Import(t, node.lineno, at_import) for t in dict.fromkeys(targets)]
        return found

    def ours(self, target: str) -> bool:
        return target.split(".")[0] in ("mamba_teach", "mamba_kernels")

    def where(self, module: str, line: int) -> str:
        return f"{self.files[module].relative_to(self.root).as_posix()}:{line}"


# The rules ------------------------------------------------------------------------------------


def wrong_arrows(house: House) -> list[str]:
    complaints = []
    for module in house.files:
        noun = house.noun(module)
        if noun not in MAY_IMPORT:
            continue
        for imp in house.imports(module):
            other = house.noun(imp.target)
            if house.ours(imp.target) and other != noun and other not in MAY_IMPORT[noun]:
                allowed = ", ".join(MAY_IMPORT[noun]) or "nothing of ours"
                where = house.where(module, imp.line)
                complaints.append(f"{where}: {noun} imports {other}; it may import {allowed}")
    return complaints


def watchers_known(house: House) -> list[str]:
    """Imports of viz, faults or ghost from outside the front page."""
    complaints = []
    for module, path in house.files.items():
        noun = house.noun(module)
        if path.relative_to(house.root).as_posix() in FRONT:
            continue
        for imp in house.imports(module):
            other = house.noun(imp.target)
            if house.ours(imp.target) and other in FRONT_ONLY and other != noun:
                complaints.append(
                    f"{house.where(module, imp.line)}: imports {other}; only {', '.join(FRONT)} may"
                )
    return complaints


def ways_to_torch(house: House, start: str) -> list[str]:
    """Chains of imports from `start` to torch that run when it is imported, parents included."""
    chains, seen, todo = [], set(), [(start,)]
    while todo:
        chain = todo.pop()
        module = chain[-1]
        parents = [m for m in house.files if module.startswith(m + ".")]
        targets = parents + [i.target for i in house.imports(module) if i.at_import]
        for target in targets:
            if target.split(".")[0] in TORCH_AND_ITS_USERS or target == "safetensors.torch":
                chains.append(" -> ".join([*chain, target]))
            elif target in house.files and target not in seen:
                seen.add(target)
                todo.append((*chain, target))
    return chains


def long_files(root: Path, limit: int) -> list[str]:
    found = []
    for folder in SOURCE_FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            lines = len(path.read_text(encoding="utf-8").splitlines())
            if lines > limit:
                found.append(f"{path.relative_to(root).as_posix()}: {lines} lines")
    return found


# This house keeps them ------------------------------------------------------------------------


def test_arrows_go_one_way() -> None:
    complaints = wrong_arrows(House(ROOT))
    assert not complaints, "\n".join(complaints)


def test_nothing_but_the_front_page_imports_the_watchers() -> None:
    complaints = watchers_known(House(ROOT))
    assert not complaints, "\n".join(complaints)


def torch_free_modules() -> list[str]:
    house = House(ROOT)
    return [m for m in house.files if m.startswith("mamba_teach.") and house.noun(m) in TORCH_FREE]


@pytest.mark.parametrize("module", torch_free_modules())
def test_bookkeeping_does_not_import_torch(module: str) -> None:
    chains = ways_to_torch(House(ROOT), module)
    assert not chains, "\n".join(chains)


def test_bookkeeping_loads_no_torch_in_a_fresh_process() -> None:
    """The same claim asked of Python itself, independent of the reading above."""
    modules = torch_free_modules()
    if not modules:
        pytest.skip("none of the torch-free modules exists yet")
    code = "import sys, importlib\n" + "".join(
        f"importlib.import_module({m!r})\nassert 'torch' not in sys.modules, {m!r}\n"
        for m in modules
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_one_noun_per_file_keeps_files_short() -> None:
    over = long_files(ROOT, SOFT_LINES)
    if over:
        warnings.warn(f"over the soft limit of {SOFT_LINES} lines: {'; '.join(over)}", stacklevel=1)
    too_long = long_files(ROOT, HARD_LINES)
    assert not too_long, f"over {HARD_LINES} lines:\n" + "\n".join(too_long)


# The rules bite -------------------------------------------------------------------------------


def build(root: Path, **files: str) -> House:
    """A house with one line of source per file; `cache__pool` is mamba_teach/cache/pool.py."""
    for name, source in files.items():
        base = root / "kernels" if name.startswith("mamba_kernels") else root / "mamba_teach"
        path = base / (name.replace("__", "/") + ".py")
        if path.name == "init.py":
            path = path.with_name("__init__.py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source + "\n", encoding="utf-8")
    return House(root)


WRONG = {
    "kernel-imports-us": dict(mamba_kernels__conv="import mamba_teach.config", config=""),
    "relative": dict(model__mamba2="from ..engine import Engine", engine=""),
    "relative-name": dict(model__mamba2="from .. import engine", engine=""),
    "absolute-name": dict(config="from mamba_teach import cache", cache__init=""),
    "in-a-function": dict(cache__pool="def f():\n    import mamba_teach.runner", runner__init=""),
    "in-an-init": dict(cache__init="from ..scheduler import S", scheduler=""),
    "front-page-from-inside": dict(runner__step="from mamba_teach import E", init="E = 1"),
    "unlisted-helper": dict(request="from .helpers import x", helpers="x = 1"),
}


@pytest.mark.parametrize("files", WRONG.values(), ids=WRONG.keys())
def test_a_wrong_arrow_is_seen(tmp_path: Path, files: dict[str, str]) -> None:
    complaints = wrong_arrows(build(tmp_path, **files))
    assert len(complaints) == 1
    assert "imports" in complaints[0]


RIGHT = {
    "down": dict(engine="from .runner.step import Step", runner__step="import mamba_kernels.conv"),
    "within": dict(cache__pool="from . import hash\nfrom .hash import h", cache__hash="h = 1"),
    "types-only": dict(
        model__mamba2="import typing\nif typing.TYPE_CHECKING:\n    from ..runner import R",
        runner__init="R = 1",
    ),
    "front": dict(init="from . import engine\nfrom .ghost import G", engine="", ghost="G = 1"),
    "viz-within": dict(viz__board="from .palette import p", viz__palette="p = 1"),
    "empty": {},
}


@pytest.mark.parametrize("files", RIGHT.values(), ids=RIGHT.keys())
def test_a_right_arrow_passes(tmp_path: Path, files: dict[str, str]) -> None:
    house = build(tmp_path, **files)
    assert wrong_arrows(house) + watchers_known(house) == []


@pytest.mark.parametrize("noun", FRONT_ONLY)
@pytest.mark.parametrize("importer", ["wordmath__train", "tokens", "viz__board", "faults"])
def test_a_known_watcher_is_seen(tmp_path: Path, noun: str, importer: str) -> None:
    house = build(tmp_path, **{noun: "", importer: f"from mamba_teach import {noun}"})
    expected = 0 if importer.split("__")[0] == noun else 1
    assert len(watchers_known(house)) == expected


def test_torch_is_found_through_the_package_and_its_parents(tmp_path: Path) -> None:
    house = build(
        tmp_path,
        init="from .engine import Engine",
        engine="import torch.nn",
        config="",
        cache__init="",
        cache__pool="from .. import config",
    )
    chain = "mamba_teach.cache.pool -> mamba_teach -> mamba_teach.engine -> torch.nn"
    assert ways_to_torch(house, "mamba_teach.cache.pool") == [chain]


def test_torch_in_a_function_is_not_loaded_at_import(tmp_path: Path) -> None:
    house = build(tmp_path, init="", config="def f():\n    import torch")
    assert ways_to_torch(house, "mamba_teach.config") == []


@pytest.mark.parametrize(("lines", "over"), [(350, False), (351, True)])
def test_a_long_file_is_seen(tmp_path: Path, lines: int, over: bool) -> None:
    build(tmp_path, long="x = 1\n" * (lines - 1) + "x = 1")
    assert bool(long_files(tmp_path, HARD_LINES)) is over
