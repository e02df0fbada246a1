"""What does a step cost before and after the model runs? Scheduling, tables, metadata, commit.

    python benchmarks/bookkeeping.py                       a table; under a minute on one core
    python benchmarks/bookkeeping.py --json results.json   and the numbers
    python benchmarks/bookkeeping.py --profile             where the time goes, 64 requests

Requests of the ghost model decode side by side: its groups, tables and slots are those of a real
hybrid model, and the model itself is left out. The aim is under 2 ms a step for 64 requests, and no
growth with the width of the block tables (``max_model_len / block_size`` columns).
"""

from __future__ import annotations

import argparse
import cProfile
import json
import platform
import pstats
import statistics
import sys
from itertools import pairwise
from pathlib import Path
from time import perf_counter

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]


import torch  # noqa: E402

from mamba_teach import Engine, EngineConfig, GhostModel, SamplingParams  # noqa: E402

REQUESTS, WIDTHS = (1, 8, 32, 64), (64, 512, 4096)
MODES = ("none", "align", "all")
PHASES = ("schedule", "tables", "metadata", "commit")
LAYERS, BLOCK_SIZE, PROMPT = "MM*M", 16, 200
WARM_UP, STEPS = 20, 160
AIM_MS = 2.0


def engine_with(requests: int, width: int, mode: str) -> Engine:
    """An engine whose requests have had their prompts scheduled; all that follows is decode."""
    blocks = 1 + requests * 4 * (2 + (PROMPT + WARM_UP + STEPS) // BLOCK_SIZE)
    config = EngineConfig(
        mamba_cache_mode=mode, block_size=BLOCK_SIZE, max_model_len=width * BLOCK_SIZE,
        max_num_seqs=requests, max_num_batched_tokens=requests * PROMPT, num_blocks=blocks,
        device="cpu",
    )  # fmt: skip
    engine = Engine(GhostModel(LAYERS), config)
    for i in range(requests):  # prompts differ, so that nobody hits anybody's blocks
        prompt = [i % 97, *[(7 * i + j) % 97 for j in range(PROMPT - 1)]]
        engine.add_request(prompt, SamplingParams(max_tokens=WARM_UP + STEPS + 2))
    while any(not r.output_token_ids for r in engine.scheduler.running) or engine.scheduler.waiting:
        bookkeeping_step(engine)
    return engine


def bookkeeping_step(engine: Engine) -> list[float]:
    """One step without its forward pass: seconds of each phase."""
    scheduler, runner = engine.scheduler, engine.runner
    times = [perf_counter()]
    schedule = scheduler.schedule()
    times.append(perf_counter())
    runner.tables.apply(schedule.updates)
    times.append(perf_counter())
    runner.metadata.build(schedule, runner.tables, runner.state_index)
    times.append(perf_counter())
    for row in schedule.rows:
        scheduler.commit(row, [1] if row.samples else [])
    times.append(perf_counter())
    return [end - start for start, end in pairwise(times)]


def measure(requests: int, width: int, mode: str) -> dict[str, float]:
    """Medians in milliseconds: of each phase, and of their sum."""
    engine = engine_with(requests, width, mode)
    with torch.inference_mode():
        steps = [bookkeeping_step(engine) for _ in range(WARM_UP + STEPS)][WARM_UP:]
    medians = {
        phase: 1e3 * statistics.median(times)
        for phase, times in zip(PHASES, zip(*steps, strict=True), strict=True)
    }
    return medians | {"total": 1e3 * statistics.median(map(sum, steps))}


def print_table(results: dict[tuple[int, int], dict[str, float]], mode: str) -> None:
    print(f"\nmode {mode}: median milliseconds of a decode step's bookkeeping")
    print(f"{'requests':>8}  {'columns':>7}  " + "  ".join(f"{p:>8}" for p in (*PHASES, "total")))
    for (requests, width), times in results.items():
        cells = "  ".join(f"{times[p]:8.3f}" for p in (*PHASES, "total"))
        print(f"{requests:>8}  {width:>7}  {cells}")
    most, middle = REQUESTS[-1], WIDTHS[1]
    for requests in REQUESTS[1:]:
        ratio = results[requests, middle]["total"] / results[1, middle]["total"]
        print(f"{requests} requests cost {ratio:.1f} times as much as 1 ({middle} columns)")
    ratio = results[most, WIDTHS[-1]]["total"] / results[most, WIDTHS[0]]["total"]
    wider = WIDTHS[-1] // WIDTHS[0]
    print(f"{wider} times the columns cost {ratio:.2f} times as much ({most} requests)")
    total = results[most, middle]["total"]
    verdict = "within" if total <= AIM_MS else "over"
    print(f"{most} requests: {total:.2f} ms, {verdict} the aim of {AIM_MS:.0f} ms")


def print_profile(mode: str, lines: int = 18) -> None:
    engine = engine_with(REQUESTS[-1], WIDTHS[1], mode)
    profile = cProfile.Profile()
    with torch.inference_mode():
        profile.enable()
        for _ in range(STEPS):
            bookkeeping_step(engine)
        profile.disable()
    pstats.Stats(profile).sort_stats("tottime").print_stats(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["all"])
    parser.add_argument("--json", type=Path, help="write the medians to this file")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    report = []
    for mode in args.modes:
        if args.profile:
            print_profile(mode)
            continue
        results = {(r, w): measure(r, w, mode) for r in REQUESTS for w in WIDTHS}
        print_table(results, mode)
        report += [
            {"mode": mode, "requests": r, "columns": w, "milliseconds": times}
            for (r, w), times in results.items()
        ]
    if args.json and report:
        settings = {"layers": LAYERS, "block_size": BLOCK_SIZE, "steps": STEPS}
        machine = {"python": platform.python_version(), "torch": torch.__version__}
        document = {**settings, **machine, "machine": platform.machine(), "results": report}
        args.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
