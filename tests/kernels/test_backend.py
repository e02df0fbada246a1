"""Which implementation runs, in processes where triton is there, missing, or was there first."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import mamba_kernels
from mamba_kernels.backend import choose_backend, triton_mode

PACKAGE = Path(mamba_kernels.__file__).parent
HIDE_TRITON = "import sys; sys.modules['triton'] = None"

# A real call of every function's torch twin; `b` is the backend module.
TORCH_WORKS = """
x, ones = torch.ones(2, 3), torch.ones(3)
y = mamba_kernels.rms_norm_gated(x, x, ones, eps=1e-5, group_size=3)
assert y.shape == (2, 3) and b.choose_backend(x) == "torch"
"""
TRITON_REFUSED = """
try:
    mamba_kernels.rms_norm_gated(x, x, ones, eps=1e-5, group_size=3, backend="triton")
except (RuntimeError, ValueError) as error:
    print(type(error).__name__, error)
"""
TRITON_WORKS = """
z = mamba_kernels.rms_norm_gated(x, x, ones, eps=1e-5, group_size=3, backend="triton")
assert torch.allclose(y, z)
"""


def run(*code: str, switch: str | None = None, **environment: str) -> str:
    """Run lines in a fresh process; what it printed."""
    ours = ("TRITON_INTERPRET", "MAMBA_KERNELS_TRITON")
    setting = {name: value for name, value in os.environ.items() if name not in ours}
    setting |= environment | {"PYTHONPATH": os.pathsep.join([str(PACKAGE.parent), *sys.path])}
    if switch is not None:
        setting["MAMBA_KERNELS_TRITON"] = switch
    done = subprocess.run([sys.executable, "-c", "\n".join(code)], env=setting, capture_output=True,
                          text=True, timeout=120, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


IMPORT = "import torch, mamba_kernels; import mamba_kernels.backend as b; print(b.triton_mode())"
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="describes a machine without a GPU")
needs_triton = pytest.mark.skipif(triton_mode() == "absent", reason="triton is not installed")


@no_gpu
@needs_triton
def test_without_a_gpu_kernels_are_interpreted() -> None:
    assert triton_mode() == "interpret"
    assert os.environ["TRITON_INTERPRET"] == "1"
    assert run(IMPORT, TORCH_WORKS, TRITON_WORKS) == "interpret"


@no_gpu
@needs_triton
def test_the_switch_asks_for_compilation() -> None:
    out = run(IMPORT, TORCH_WORKS, TRITON_REFUSED, switch="compile")
    assert out.startswith("compile\nValueError backend='triton' on a cpu tensor in mode 'compile'")
    # Triton's own variable is not an instruction to us.
    assert run(IMPORT, TORCH_WORKS, TRITON_WORKS, TRITON_INTERPRET="0") == "interpret"


def test_a_switch_with_a_typo_is_refused() -> None:
    code = "try:\n    import mamba_kernels\nexcept ValueError as e:\n    print(e)"
    assert run(code, switch="interpreter") == (
        "MAMBA_KERNELS_TRITON='interpreter': 'compile', 'interpret' or unset"
    )


def test_without_triton_the_twins_work() -> None:
    out = run(HIDE_TRITON, IMPORT, TORCH_WORKS, TRITON_REFUSED)
    assert out.startswith("absent\nRuntimeError backend='triton': triton is not installed")


@no_gpu
@needs_triton
def test_triton_imported_first_in_the_other_mode() -> None:
    out = run("import triton", IMPORT, TORCH_WORKS, TRITON_REFUSED)
    assert out.startswith("conflict\nRuntimeError triton was imported before mamba_kernels")
    assert "kernels must be interpreted" in out and "TRITON_INTERPRET=1" in out
    out = run("import triton", IMPORT, TORCH_WORKS, TRITON_REFUSED, switch="compile",
              TRITON_INTERPRET="1")  # fmt: skip
    assert out.startswith("conflict\nRuntimeError") and "TRITON_INTERPRET=0" in out


@no_gpu
@needs_triton
def test_triton_imported_first_in_the_right_mode() -> None:
    early = run("import triton", IMPORT, TORCH_WORKS, TRITON_WORKS, TRITON_INTERPRET="1")
    assert early == "interpret"
    # Half right is wrong: the variable set after triton's import.
    late = "import triton, os; os.environ['TRITON_INTERPRET'] = '1'"
    assert run(late, IMPORT, TORCH_WORKS) == "conflict"


@pytest.mark.parametrize("hidden", [False, True])
def test_each_module_can_be_imported_first(hidden: bool) -> None:
    """Each in its own child of a process that has torch; with triton, and without."""
    if not hasattr(os, "fork"):
        pytest.skip("needs fork")
    stems = [path.stem for path in PACKAGE.glob("*.py") if path.stem != "__init__"]
    modules = [f"mamba_kernels.{stem}" for stem in stems]
    code = f"""
import os, sys, importlib, torch
assert "triton" not in sys.modules
{HIDE_TRITON if hidden else ""}
for name in {modules!r}:
    if (child := os.fork()) == 0:
        importlib.import_module(name)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        print("cannot import", name)
"""
    assert run(code) == ""


def test_choosing() -> None:
    x = torch.zeros(1)
    assert choose_backend(x) == "torch"
    assert choose_backend(x, "torch") == "torch"
    with pytest.raises(ValueError, match="backend='cuda': one of torch, triton, or None"):
        choose_backend(x, "cuda")


def test_every_function_asks_here() -> None:
    """The environment is read in one file, and no other names triton."""
    for path in PACKAGE.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        if path.name != "backend.py":
            assert "environ" not in text, path.name
            assert "import triton" not in text.replace("backend import triton", ""), path.name
