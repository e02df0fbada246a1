"""``make gpu-check``: are the kernels right on a real GPU, and how near are they to its memory?

    python benchmarks/gpu_check.py                     everything; at most 8 minutes on one GPU
    python benchmarks/gpu_check.py --only timings      one part (kernels, engine, graphs, timings)
    python benchmarks/gpu_check.py --interpret-smoke   a few cases on the CPU, interpreted: shows
                                                       that the harness itself works

1. **kernels**: every kernel, compiled, in fp32 and bf16, against a float64 recurrence
   (:mod:`gpu_cases`, :mod:`gpu_case_list`).
2. **engine**: greedy tokens on the GPU against the CPU's, in every cache mode (:mod:`gpu_engine`).
3. **graphs**: decode steps captured as CUDA graphs and by the recorder against eager ones, and the
   time of a step either way (:mod:`gpu_graphs`).
4. **timings**: each kernel at the sizes of Nemotron-H (:mod:`gpu_workload_list`, :mod:`gpu_timing`).

Compiling is most of the work of parts 1 to 3, so they run as several processes at once; a process
each also means that a kernel that reads wild addresses, which ends all CUDA work of its process, or
one that never returns, costs its own cases and no others. Part 4 has the machine to itself. Each part
has a budget; what does not fit is skipped and says so.

Without a GPU this prints one line and ends well: there is nothing to check.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]

from gpu_report import Report, describe_machine, render  # noqa: E402

CHECKS_S, TIMINGS_S, GRACE_S = 230, 190, 25  # 445 s with grace, of 480
PARTS = ("kernels", "engine", "graphs", "timings")


def main(argv: list[str] | None = None) -> int:
    """0 if nothing failed, or there was nothing to check with."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART",
                        help=f"of {', '.join(PARTS)}")  # fmt: skip
    parser.add_argument("--jobs", type=int, default=min(8, max(1, (os.cpu_count() or 2) // 2)))
    parser.add_argument("--results", type=Path, help="folder (default: benchmarks/results)")
    parser.add_argument("--interpret-smoke", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)  # what the processes are started with
    parser.add_argument("--seconds", type=float, default=CHECKS_S, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)

    if args.worker:
        for line in work(args.worker, args.seconds):
            print(json.dumps(line), flush=True)
        return 0
    if args.interpret_smoke:
        report = smoke()
    else:
        import torch

        if not torch.cuda.is_available():
            print("gpu_check: no GPU here (torch sees none), so there is nothing to check")
            return 0
        if problem := triton_problem():
            print(f"gpu_check: {problem}")
            return 1
        report = Report(describe_machine(torch.cuda.get_device_name()))
        for line in run_parts(args.only, args.jobs):
            report.add(line)
    print(render(report))
    if args.results or not args.interpret_smoke:
        print(f"written: {report.write(args.results or HERE / 'results')}")
    return 0 if report.passed else 1


def triton_problem() -> str:
    """Why kernels cannot be compiled and launched in this process, or nothing."""
    import gpu_cases  # noqa: F401  (finds the packages)

    from mamba_kernels.backend import triton_mode

    mode = triton_mode()
    return (
        "" if mode == "gpu" else f"there is a GPU, but triton's mode is {mode!r} (see backend.py)"
    )


def smoke() -> Report:
    """A handful of cases through the interpreter, in this process."""
    os.environ["MAMBA_KERNELS_TRITON"] = "interpret"  # also where there is a GPU
    import torch
    from gpu_case_list import smoke_cases
    from gpu_runs import run_all

    report = Report(describe_machine("interpreter"))
    for outcome in run_all("smoke", smoke_cases(), torch.device("cpu"), "triton", repeats=2):
        report.add(asdict(outcome))
    return report


# Processes ------------------------------------------------------------------------------------


def check_jobs(only: tuple[str, ...]) -> list[str]:
    """Names of the worker processes of all parts but the last, long ones first."""
    import gpu_cases  # noqa: F401  (finds the packages)
    import gpu_graphs
    from gpu_case_list import FAMILIES
    from gpu_engine import MODES

    kernels = [
        ":".join(["kernels", family, *(str(t).removeprefix("torch.") for t in types)])
        for family, (_, all_types) in FAMILIES.items()
        for types in all_types
    ]
    engine = [f"engine:{mode}" for mode in MODES]
    graphs = [f"graphs:{mode}:{k}" for mode in gpu_graphs.MODES for k in gpu_graphs.DRAFTS]
    return (
        engine * ("engine" in only) + graphs * ("graphs" in only) + kernels * ("kernels" in only)
    )


def run_parts(only: tuple[str, ...], jobs: int) -> Iterator[dict[str, Any]]:
    """All checks side by side, then the timings; the lines that the workers wrote."""
    end = time.monotonic() + CHECKS_S
    with ThreadPoolExecutor(jobs) as pool:
        for lines in pool.map(lambda job: run_job(job, end - time.monotonic()), check_jobs(only)):
            yield from lines
    if "timings" in only:
        yield from run_job("timings", TIMINGS_S)


def run_job(job: str, seconds: float, command: list[str] | None = None) -> list[dict[str, Any]]:
    """Run one worker to its end, or to the end of its time; what it wrote, and how it ended."""
    part = job.partition(":")[0]
    remark = {"part": part, "name": job, "seconds": 0.0}
    if seconds <= 0:
        return [remark | {"status": "skipped", "detail": "the budget of this part is used up"}]
    command = command or [sys.executable, __file__, "--worker", job, "--seconds", f"{seconds:.0f}"]
    threads = {"OMP_NUM_THREADS": "2"}  # several processes share the cores
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, env=os.environ | threads)
        try:
            ended = f"exit code {process.wait(timeout=seconds + GRACE_S)}"
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            ended = f"killed: still running {GRACE_S} s after its {seconds:.0f} s"
        out.seek(0)
        err.seek(0)
        lines = [json.loads(line) for line in out if line.startswith("{") and line.endswith("}\n")]
        if ended != "exit code 0":
            last = "\n".join(err.read().splitlines()[-8:])
            lines.append(remark | {"status": "failed", "detail": f"{ended}\n{last}"})
    return lines


def work(job: str, seconds: float) -> Iterator[dict[str, Any]]:
    """What a worker process does: yields its outcomes and timings one by one."""
    import gpu_runs
    import torch
    from gpu_cases import FAR

    device, end = torch.device("cuda"), time.monotonic() + seconds
    part, _, what = job.partition(":")
    if part == "kernels":
        from gpu_case_list import FAMILIES, far_case

        family, *names = what.split(":")
        act, state = (getattr(torch, name) for name in names)
        part = f"{family} {names[0]}/{names[1]}"
        cases = FAMILIES[family][0](act, state)
        for outcome in gpu_runs.run_all(part, cases, device, "triton", seconds=seconds):
            yield asdict(outcome)
        case, *can_be_far = far_case(family, act, state)
        for strides, possible in zip(((FAR, 0), (0, FAR)), can_be_far):
            if possible:
                yield asdict(gpu_runs.run_far(part, case, device, *strides))
    elif part == "engine":
        from gpu_engine import compare_engines

        def compare() -> None:
            comparison = compare_engines(what, "cuda")
            found.append(str(comparison))
            assert not comparison.faults, comparison

        found: list[str] = []
        outcome = gpu_runs.checked(part, f"mode {what}", compare)
        outcome.detail = outcome.detail or "; ".join(found)
        yield asdict(outcome)
    elif part == "graphs":
        from gpu_graphs import check

        mode, k = what.split(":")
        said: list[str] = []
        outcome = gpu_runs.checked(
            part, f"mode {mode}, k={k}", lambda: said.append(check(mode, int(k), "cuda"))
        )
        outcome.detail = outcome.detail or "; ".join(said)
        yield asdict(outcome)
    else:
        yield from time_all(device, end)


def time_all(device: Any, end: float) -> Iterator[dict[str, Any]]:
    """The copy bandwidth, then every workload that the time allows."""
    import torch
    from gpu_runs import Outcome
    from gpu_timing import copy_bandwidth, time_workload
    from gpu_workload_list import workloads

    copy_gb_per_s = copy_bandwidth(device)
    yield {"copy_gb_per_s": round(copy_gb_per_s, 1)}
    todo = workloads()
    for number, workload in enumerate(todo):
        if time.monotonic() > end:
            reason = f"time used up; {len(todo) - number} of {len(todo)} left"
            yield asdict(Outcome("timings", "the rest", "skipped", reason))
            return
        try:
            yield asdict(time_workload(workload, device, copy_gb_per_s))
        except Exception as error:
            name = f"{workload.kernel}, {workload.name}"
            detail = f"{type(error).__name__}: {error}"[:1000]
            yield asdict(Outcome("timings", name, "failed", detail))
        torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
