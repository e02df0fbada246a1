"""Compile every kernel for named GPUs, on any machine, and report what came out.

    python kernels/aot.py                          the table for sm_90
    python kernels/aot.py --arch all -j 2          sm_80, sm_90, sm_100 and gfx942, two at a time
    python kernels/aot.py --kernel "chunk scan P64 bf16" --sass      the machine code (or --ptx)
    python kernels/aot.py --json FILE              the table as data ("-": to the terminal)
    python kernels/aot.py --markdown kernels/README.md               refresh the table in there

No GPU and no driver is needed: Triton brings its own compilers. What such a report can tell: whether
a configuration compiles, fits into registers (no spills: memory traffic that nobody wrote) and into
shared memory, whether global memory is read in 16-byte pieces, and whether matrix products reached
the tensor cores. What it cannot tell is time.

Triton either interprets or compiles, decided at its import (``mamba_kernels/backend.py``). As a
script this file chooses the compiler. A process that interprets (a notebook without a GPU, a test)
asks for :func:`reports_from_subprocess`, which starts the script.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import multiprocessing
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
BEGIN, END = "<!-- aot.py --markdown: begin -->", "<!-- aot.py --markdown: end -->"


@dataclass(frozen=True)
class Target:
    """A GPU to compile for; ``shared_limit`` is the most shared memory one program may have."""

    name: str
    backend: str
    arch: int | str
    warp_size: int
    shared_limit: int


TARGETS = {
    target.name: target
    for target in (
        Target("sm_80", "cuda", 80, 32, 163 * 1024),  # A100
        Target("sm_90", "cuda", 90, 32, 227 * 1024),  # H100, H200
        Target("sm_100", "cuda", 100, 32, 227 * 1024),  # B200
        Target("gfx942", "hip", "gfx942", 64, 64 * 1024),  # MI300X
    )
}


@dataclass(frozen=True)
class Report:
    """What one kernel variant became on one target.

    Attributes:
        registers: per thread.
        spill_bytes: of registers that live in memory instead, per thread.
        shared_bytes: per program.
        programs_per_sm: how many fit on an SM by registers, shared memory and warps; 0 on AMD.
        loads, wide_loads: instructions that read global memory; those that read 16 bytes.
        tensor_core: matrix instructions (HMMA, HGMMA, UTC..MMA, MFMA).
        instructions: all but no-ops.
        code: ``"ptx"`` and ``"sass"``, or ``"amdgcn"``, if asked for.
    """

    case: str
    kernel: str
    arch: str
    num_warps: int
    num_stages: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    programs_per_sm: int
    loads: int
    wide_loads: int
    tensor_core: int
    instructions: int
    code: dict[str, str] | None = None


def all_cases(arch: str = "sm_90") -> list[Any]:
    """The :class:`AotCase` of every kernel file of the package, for ``arch``."""
    package = importlib.import_module("mamba_kernels")
    cases = []
    for module_info in sorted(pkgutil.iter_modules(package.__path__), key=lambda m: m.name):
        module = importlib.import_module(f"mamba_kernels.{module_info.name}")
        make = vars(module).get("aot_cases")
        if make is not None and make.__module__ == module.__name__:
            by_arch = "arch" in inspect.signature(make).parameters
            cases += make(arch) if by_arch else make()
    return cases


def compile_case(case: Any, target: Target, with_code: bool = False) -> Report:
    """Compile one case for one target.

    Raises:
        RuntimeError: kernels are interpreted in this process, or Triton is absent.
    """
    from mamba_kernels.backend import triton, triton_mode

    if triton_mode() not in ("compile", "gpu"):
        raise RuntimeError(
            f"compile_case: triton_mode() is {triton_mode()!r} in this process, where kernels cannot "
            "be compiled; use reports_from_subprocess()"
        )
    from triton.backends.compiler import GPUTarget

    gpu = GPUTarget(target.backend, target.arch, target.warp_size)
    # Fusing a multiply and an add into one instruction is Triton 3.9's default, not 3.10's; it changes
    # every count here, so it is chosen.
    options = case.options() | {"enable_fp_fusion": True}
    compiled = triton.compile(case.source(), target=gpu, options=options)
    report = _amd_report if target.backend == "hip" else _nvidia_report
    known = {
        "case": case.name,
        "kernel": case.kernel.fn.__name__,
        "arch": target.name,
        "num_warps": case.num_warps,
        "num_stages": case.num_stages,
        "shared_bytes": compiled.metadata.shared,
    }
    result = report(compiled, known)
    return result if with_code else replace(result, code=None)


_SASS = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)", re.MULTILINE)


def _nvidia_report(compiled: Any, known: dict[str, Any]) -> Report:
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(compiled.asm["cubin"])

        def tool(path: str, *options: str) -> str:
            command = [path, *options, str(cubin)]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout

        usage = tool(knobs.nvidia.cuobjdump.path, "-res-usage")
        sass = tool(knobs.nvidia.nvdisasm.path, "-c")
    registers = int(re.search(r"REG:(\d+)", usage)[1])  # type: ignore[index]
    stack = int(re.search(r"STACK:(\d+)", usage)[1])  # type: ignore[index]
    mnemonics = [m for m in _SASS.findall(sass) if m != "NOP"]
    loads = [m for m in mnemonics if m.startswith("LDG")]  # LDG, and LDGSTS straight to shared
    count = Counter(re.sub(r"^UTC\w*MMA$", "UTCMMA", m.split(".")[0]) for m in mnemonics)
    # An SM has 64 Ki registers, handed out to a warp in lots of 256; 64 warps; and the memory of the
    # architecture, of which each program costs 1 KiB besides its own.
    warps, shared_limit = known["num_warps"], TARGETS[known["arch"]].shared_limit
    programs = min(
        65536 // (warps * -(-registers * 32 // 256) * 256),
        (shared_limit + 1024) // (known["shared_bytes"] + 1024),
        64 // warps,
        32,
    )
    return Report(
        **known,
        registers=registers,
        spill_bytes=stack,
        programs_per_sm=programs,
        loads=len(loads),
        wide_loads=sum(".128" in m for m in loads),
        tensor_core=sum(count[m] for m in ("HMMA", "HGMMA", "UTCMMA", "DMMA")),
        instructions=len(mnemonics),
        code={"ptx": compiled.asm["ptx"], "sass": sass},
    )


def _amd_report(compiled: Any, known: dict[str, Any]) -> Report:
    text = compiled.asm["amdgcn"]

    def metadata(name: str) -> int:
        return int(re.search(rf"\.{name}:\s+(\d+)", text)[1])  # type: ignore[index]

    mnemonics = re.findall(r"^\s+((?:v|s|ds|global|buffer|flat|scratch)_\w+)", text, re.MULTILINE)
    mnemonics = [m for m in mnemonics if m != "s_nop"]
    loads = [m for m in mnemonics if m.startswith(("global_load", "buffer_load"))]
    return Report(
        **known,
        registers=metadata("vgpr_count"),
        spill_bytes=metadata("private_segment_fixed_size"),
        programs_per_sm=0,
        loads=len(loads),
        wide_loads=sum(m.endswith("dwordx4") for m in loads),
        tensor_core=sum(m.startswith("v_mfma") for m in mnemonics),
        instructions=len(mnemonics),
        code={"amdgcn": text},
    )


# ---------------------------------------------------------------------------------------------
# Many at a time, and from elsewhere
# ---------------------------------------------------------------------------------------------


def _compile_nth(job: tuple[str, int, bool]) -> Report:
    """Kernels do not travel between processes; "case 7 for sm_90" does."""
    arch, index, with_code = job
    return compile_case(all_cases(arch)[index], TARGETS[arch], with_code)


def compile_all(
    archs: Iterable[str], kernel: str = "", processes: int = 1, with_code: bool = False
) -> list[Report]:
    """Reports of all cases whose name or kernel contains ``kernel``, for each of ``archs``."""
    jobs = [
        (arch, index, with_code)
        for arch in archs
        for index, case in enumerate(all_cases(arch))
        if kernel in case.name or kernel in case.kernel.fn.__name__
    ]
    if processes <= 1:
        return [_compile_nth(job) for job in jobs]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_use_compiler) as pool:
        return list(pool.map(_compile_nth, jobs))


def reports_from_subprocess(
    archs: Iterable[str] = ("sm_90",), kernel: str = "", processes: int = 1, with_code: bool = False
) -> list[Report]:
    """:func:`compile_all` in a process of its own; for processes that interpret kernels."""
    command = [sys.executable, str(HERE / "aot.py"), "--json", "-", "--kernel", kernel]
    command += ["--arch", *archs, "-j", str(processes)] + ["--code"] * with_code
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    return [Report(**row) for row in json.loads(done.stdout)["reports"]]


def _use_compiler() -> None:
    """Before anything imports triton: compile, and find the package beside this file."""
    os.environ["MAMBA_KERNELS_TRITON"] = "compile"
    if str(HERE) not in sys.path:
        sys.path.insert(0, str(HERE))


# ---------------------------------------------------------------------------------------------
# Tables
# ---------------------------------------------------------------------------------------------

_COLUMNS = ("case", "arch", "warps", "regs", "spill B", "shared B", "progs/SM", "16-byte loads",
            "tensor", "instr")  # fmt: skip


def table(reports: list[Report], markdown: bool = False) -> str:
    """The reports as text, one line each."""
    rows = [_COLUMNS] + [
        (
            r.case, r.arch, str(r.num_warps), str(r.registers), str(r.spill_bytes),
            str(r.shared_bytes), str(r.programs_per_sm or "-"), f"{r.wide_loads} of {r.loads}",
            str(r.tensor_core), str(r.instructions),
        )
        for r in reports
    ]  # fmt: skip
    if markdown:
        lines = ["| " + " | ".join(row) + " |" for row in rows]
        lines.insert(1, "|---|---|" + "---:|" * (len(_COLUMNS) - 2))
        return "\n".join(lines)
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths))
        )
        for row in rows
    )


def _refresh(path: Path, measured: str) -> None:
    """Replace what lies between the two marks of a Markdown file."""
    text = path.read_text()
    if BEGIN not in text or END not in text:
        raise SystemExit(f"{path} has no place for the table: it needs the lines {BEGIN} and {END}")
    before, rest = text.split(BEGIN, 1)
    path.write_text(f"{before}{BEGIN}\n{measured}\n{END}{rest.split(END, 1)[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--arch", nargs="+", default=["sm_90"], choices=[*TARGETS, "all"])
    parser.add_argument("--kernel", default="", help="only cases whose name or kernel contains this")
    parser.add_argument("--ptx", action="store_true", help="print the PTX")
    parser.add_argument("--sass", action="store_true", help="print the machine code")
    parser.add_argument("--json", metavar="FILE", help="write the reports as JSON; - is the terminal")
    parser.add_argument("--code", action="store_true", help="put the code into the JSON as well")
    place = "the table as Markdown, printed or put between the marks of FILE"
    parser.add_argument("--markdown", metavar="FILE", nargs="?", const="-", help=place)
    parser.add_argument("-j", type=int, default=1, metavar="N", help="processes (default 1)")
    arguments = parser.parse_args()

    _use_compiler()
    from mamba_kernels.backend import triton  # sees to Triton's mode; a plain import would not

    archs = list(TARGETS) if "all" in arguments.arch else arguments.arch
    processes = min(max(arguments.j, 1), os.cpu_count() or 1)
    with_code = arguments.ptx or arguments.sass or arguments.code
    reports = compile_all(archs, arguments.kernel, processes, with_code)
    if not reports:
        raise SystemExit(f"no case matches --kernel {arguments.kernel!r}")

    if arguments.ptx or arguments.sass:
        for report in reports:
            code = report.code or {}
            wanted = "ptx" if arguments.ptx else "sass"
            print(f"// {report.case}, {report.arch}")
            print(code.get(wanted) or code.get("amdgcn"))
    if arguments.json:
        data = {"triton": triton.__version__, "reports": [asdict(r) for r in reports]}
        _write(arguments.json, json.dumps(data, indent=1))
    if arguments.markdown:
        measured = f"Compiled with triton {triton.__version__}.\n\n{table(reports, markdown=True)}"
        if arguments.markdown != "-":
            _refresh(Path(arguments.markdown), measured)
        else:
            print(measured)
    if not (arguments.ptx or arguments.sass or arguments.json or arguments.markdown):
        print(table(reports))


def _write(path: str, text: str) -> None:
    if path == "-":
        print(text)
    else:
        Path(path).write_text(text + "\n")


if __name__ == "__main__":
    main()
