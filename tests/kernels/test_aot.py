"""Every kernel compiles for every GPU we name, with nothing spilled; ``kernels/aot.py`` says so.

The interpreter accepts what no compiler does (tiles of any size, shared memory without end), so a
green interpreted test proves nothing about a GPU. Kernels are compiled in processes of their own:
this one may interpret them. About a minute and a half of one core when Triton's cache is empty.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pkgutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import mamba_kernels
from mamba_kernels.backend import triton_mode

pytest.importorskip("triton")
pytestmark = pytest.mark.aot

SCRIPT = Path(__file__).parents[2] / "kernels" / "aot.py"


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("aot", SCRIPT)
    assert spec is not None and spec.loader is not None
    sys.modules["aot"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


aot = _load()


@pytest.fixture(scope="module")
def reports() -> list[aot.Report]:  # type: ignore[name-defined]
    return aot.reports_from_subprocess(tuple(aot.TARGETS), processes=os.cpu_count() or 1)


def _kernels() -> set[str]:
    """Names of the package's kernels: jitted functions whose name says so."""
    names = set()
    for info in pkgutil.iter_modules(mamba_kernels.__path__):
        module = import_module(f"mamba_kernels.{info.name}")
        names |= {name for name in vars(module) if name.endswith("_kernel")}
    return names


@pytest.mark.slow
def test_everything_compiles_for_every_target(reports: list[aot.Report]) -> None:  # type: ignore[name-defined]
    by_arch = {arch: [r for r in reports if r.arch == arch] for arch in aot.TARGETS}
    assert {r.kernel for r in by_arch["sm_90"]} == _kernels()
    assert len({(r.case, r.arch) for r in reports}) == len(reports), "two cases of one name"
    for arch, of_arch in by_arch.items():
        assert [r.case for r in of_arch] == [r.case for r in by_arch["sm_90"]], arch


@pytest.mark.slow
def test_nothing_spills_and_everything_fits(reports: list[aot.Report]) -> None:  # type: ignore[name-defined]
    for r in reports:
        assert r.shared_bytes <= aot.TARGETS[r.arch].shared_limit, r
        assert r.spill_bytes == 0, r
        assert r.programs_per_sm >= 1 or r.arch.startswith("gfx"), r


@pytest.mark.slow
def test_products_reach_the_tensor_cores(reports: list[aot.Report]) -> None:  # type: ignore[name-defined]
    with_products = {"chunk_state_kernel", "chunk_scan_kernel", "fused_scan_kernel",
                     "replay_state_update_kernel", "materialize_states_kernel"}  # fmt: skip
    for r in reports:
        assert (r.tensor_core > 0) == (r.kernel in with_products), r


@pytest.mark.slow
def test_states_move_sixteen_bytes_at_a_time(reports: list[aot.Report]) -> None:  # type: ignore[name-defined]
    """By hand, for 128 threads: 8 x 128 numbers are two loads of 4 a thread, and there are three such
    tiles (the first state, a chunk's share, the next one's); 16 x 128 numbers are four loads."""
    least = {"pass states P64 fp32 pool": 6, "update P64 fp32 state, bf16, 1 tokens": 4}
    seen = set()
    for r in reports:
        if r.case in least and r.arch.startswith("sm_"):
            seen.add(r.case)
            assert r.wide_loads >= least[r.case], r
    assert seen == set(least)


@pytest.mark.slow
def test_the_readme_has_the_measured_table(reports: list[aot.Report]) -> None:  # type: ignore[name-defined]
    """Row by row with the same Triton; with another one only the names must be there."""
    import triton

    text = (SCRIPT.parent / "README.md").read_text()
    measured = text.split(aot.BEGIN)[1].split(aot.END)[0]
    of_sm_90 = [r for r in reports if r.arch == "sm_90"]
    if f"triton {triton.__version__}." in measured:
        assert aot.table(of_sm_90, markdown=True) in measured, "run: kernels/aot.py --markdown"
    for kernel in _kernels():
        assert f"`{kernel}`" in text, f"kernels/README.md says nothing about {kernel}"
    for r in of_sm_90:
        assert f"| {r.case} |" in measured


def test_the_script_prints_code(tmp_path: Path) -> None:
    def run(*options: str) -> str:
        command = [sys.executable, str(SCRIPT), "--kernel", "pass states toy", *options]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert ".entry pass_states_kernel" in run("--ptx")
    machine_code = run("--sass", "--arch", "sm_90", "gfx942")
    assert "LDG.E.128" in machine_code and "global_load_dwordx4" in machine_code

    out, readme = tmp_path / "out.json", tmp_path / "table.md"
    readme.write_text(f"before\n{aot.BEGIN}\nold\n{aot.END}\nafter\n")
    run("--json", str(out), "--markdown", str(readme))
    (row,) = json.loads(out.read_text())["reports"]
    assert row["arch"] == "sm_90" and row["registers"] > 0 and row["code"] is None
    assert row["case"] in aot.table([aot.Report(**row)]).splitlines()[1]
    text = readme.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "| pass states toy fp32 pool | sm_90 |" in text


def test_a_process_that_interprets_says_what_to_do() -> None:
    if triton_mode() != "interpret":
        pytest.skip("kernels are compiled in this process")
    case = aot.all_cases()[0]
    with pytest.raises(RuntimeError, match="reports_from_subprocess"):
        aot.compile_case(case, aot.TARGETS["sm_90"])


def test_a_kernel_that_does_not_compile_is_an_error_with_its_message() -> None:
    with pytest.raises(RuntimeError, match="no case matches"):
        aot.reports_from_subprocess(kernel="no such kernel")
