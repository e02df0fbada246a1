"""``make tune``: measure launch configurations on this GPU and keep the best in the tuning table.

    python tools/tune.py                                   every kernel
    python tools/tune.py --kernel chunk_scan_kernel        one of them
    python tools/tune.py --dry-run                         print what would change, write nothing

For each kernel and *shape class* (what the table may tell apart: head dim, state size, bytes of a
number) the candidates below are launched at the sizes of Nemotron-H, with the workloads of
``benchmarks/gpu_workload_list.py``. A candidate counts if it compiles, fits, and writes what the
configuration in force writes, to rounding. A class has several workloads (batches, lengths); a
candidate's score is the geometric mean of its times, each relative to the configuration in force. The
best one gets a row of its own for this architecture in ``kernels/mamba_kernels/tuning_table.py``, if
it wins by more than noise.

Only what was measured here is written. Without a GPU this says so in one line and changes nothing.
"""

from __future__ import annotations

import argparse
import itertools
import math
import pprint
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "kernels")]

import torch  # noqa: E402

if TYPE_CHECKING:
    from gpu_workload_list import Workload
    from gpu_workloads import Prepared

Config = dict[str, Any]
Row = tuple[str, dict[str, int], Config]
Table = dict[str, list[Row]]

TABLE_FILE = ROOT / "kernels" / "mamba_kernels" / "tuning_table.py"
WINS_BY = 0.02  # less than this is noise
#: Relative to the largest number, between two configurations: sums change their order.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 2e-2}


def every(**values: Sequence[int]) -> list[Config]:
    """All combinations, with one stage: see ``chunk_scan_launch.py`` on why nothing is pipelined."""
    combinations = itertools.product(*values.values())
    return [dict(zip(values, one)) | {"num_stages": 1} for one in combinations]


#: What is tried. Blocks are powers of two; matrix products want blocks of 16 or more.
CANDIDATES: dict[str, list[Config]] = {
    "selective_state_update_kernel": every(BLOCK_P=(4, 8, 16, 32), num_warps=(1, 2, 4, 8)),
    "causal_conv1d_update_kernel": every(BLOCK_C=(128, 256, 512), num_warps=(1, 2, 4)),
    "causal_conv1d_fn_kernel": every(BLOCK_T=(8, 16, 32), BLOCK_C=(128, 256), num_warps=(4, 8)),
    "rms_norm_gated_kernel": every(BLOCK_ROWS=(1, 2), num_warps=(2, 4, 8, 16)),
    "replay_state_update_kernel": every(BLOCK_P=(16, 32, 64), num_warps=(2, 4, 8)),
    "materialize_states_kernel": every(BLOCK_P=(16, 32, 64), num_warps=(2, 4, 8)),
    "fused_scan_kernel": every(BLOCK_T=(16, 32, 64), BLOCK_P=(16, 32, 64), num_warps=(4, 8)),
    "copy_states_kernel": every(BLOCK_WORDS=(512, 1024, 2048, 4096), num_warps=(4, 8)),
    "chunk_state_kernel": every(BLOCK_T=(32, 64), BLOCK_P=(16, 32, 64), num_warps=(4, 8)),
    "pass_states_kernel": every(BLOCK_P=(4, 8, 16), num_warps=(1, 2, 4)),
    "chunk_scan_kernel": every(
        BLOCK_I=(32, 64, 128), BLOCK_J=(32, 64), BLOCK_P=(64, 128), num_warps=(4, 8)
    ),
}


def main(argv: list[str] | None = None) -> int:
    """Tune, print, write; 0 unless a configuration in force does not run."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kernel", nargs="+", choices=CANDIDATES, default=list(CANDIDATES),
                        metavar="NAME", help=", ".join(CANDIDATES))  # fmt: skip
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("tune: no GPU here (torch sees none); the tuning table stays as it is")
        return 0

    from gpu_timing import do_bench
    from gpu_workload_list import workloads

    from mamba_kernels.tuning import current_arch
    from mamba_kernels.tuning_table import TABLE

    arch, device = current_arch(), torch.device("cuda")
    print(f"tuning for {arch} on {torch.cuda.get_device_name()}")
    changed: Table = {}
    for kernel, shape, group in classes(workloads(), args.kernel):
        best = tune_class(kernel, shape, group, arch, device, do_bench)
        if best is not None:
            changed.setdefault(kernel, list(TABLE[kernel]))
            changed[kernel] = with_row(changed[kernel], (arch, shape, best))
    if not changed:
        print("nothing beats the table by more than noise; it stays as it is")
    elif args.dry_run:
        print(f"not written: new rows for {', '.join(changed)}")
    else:
        TABLE_FILE.write_text(updated_source(TABLE_FILE.read_text(), changed), encoding="utf-8")
        print(f"written: {TABLE_FILE.relative_to(ROOT)}; now run `make test` and `make gpu-check`")
    return 0


def classes(
    all_workloads: Sequence[Workload], kernels: Sequence[str]
) -> Iterator[tuple[str, dict[str, int], list[Workload]]]:
    """*(kernel, shape class, its workloads)* of the given kernels."""
    groups: dict[tuple[str, tuple[tuple[str, int], ...]], list[Workload]] = {}
    for workload in all_workloads:
        if workload.kernel in kernels:
            groups.setdefault((workload.kernel, tuple(workload.shape.items())), []).append(workload)
    for (kernel, shape), group in groups.items():
        yield kernel, dict(shape), group


@contextmanager
def forced(kernel: str, config: Config | None) -> Iterator[None]:
    """The kernel is launched with ``config`` meanwhile; None is the table's own choice."""
    from mamba_kernels.tuning_table import TABLE

    rows = TABLE[kernel]
    if config is not None:
        TABLE[kernel] = [("any", {}, config)]
    try:
        yield
    finally:
        TABLE[kernel] = rows


def tune_class(
    kernel: str,
    shape: dict[str, int],
    group: Sequence[Workload],
    arch: str,
    device: torch.device,
    bench: Callable[[Callable[[], object]], float],
) -> Config | None:
    """The best candidate, or None if the configuration in force is as good; prints what it found."""
    from gpu_timing import launches_of

    from mamba_kernels.tuning import config_for

    in_force = config_for(kernel, arch, **shape)
    ratios: dict[int, list[float]] = {
        i: [] for i, c in enumerate(CANDIDATES[kernel]) if c != in_force
    }
    lines = []
    for workload in group:
        prepared = workload.make(device)
        expected = prepared.results()
        before = bench(launches_of(prepared.call))
        lines.append(f"    {workload.name}: {before:.1f} us")
        for number in list(ratios):
            with forced(kernel, CANDIDATES[kernel][number]):
                problem = disagreement(prepared, expected)
                if not problem:
                    ratios[number].append(bench(launches_of(prepared.call)) / before)
            if problem:
                del ratios[number]  # it must serve every size
                lines.append(f"    left out: {CANDIDATES[kernel][number]}: {problem}")
        del prepared, expected
        if device.type == "cuda":
            torch.cuda.empty_cache()
    scores = {number: geometric_mean(r) for number, r in ratios.items()}
    best = min(scores, key=scores.__getitem__, default=None)
    print(f"{kernel} {shape or ''}: {len(scores)} candidates beside {in_force}", *lines, sep="\n")
    if best is None or scores[best] > 1 - WINS_BY:
        print("    kept" + ("" if best is None else f" (the best other takes {scores[best]:.1%})"))
        return None
    print(f"    new: {CANDIDATES[kernel][best]}, takes {scores[best]:.1%} of the time")
    return CANDIDATES[kernel][best]


def disagreement(prepared: Prepared, expected: Sequence[torch.Tensor]) -> str:
    """Why the configuration in force cannot be used here, or nothing."""
    try:
        actual = prepared.results()
    except Exception as error:  # too much shared memory, too many registers, a compiler's fault
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:120]
    for got, want in zip(actual, expected):
        scale = max(1.0, float(want.abs().max()))
        off = float((got.float() - want.float()).abs().max()) / scale
        if not off <= TOLERANCE[want.dtype]:  # also if it is NaN
            return f"results differ by {off:.1e}"
    return ""


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def with_row(rows: Sequence[Row], row: Row) -> list[Row]:
    """The rows with a measured one added, or put in place of the same architecture and shape.

    The first row that fits is taken. A measured row names every number of its shape class, so on top
    it takes nothing from another; the others stay in their order.
    """
    kept = [old for old in rows if old[:2] != row[:2]]
    first = [old for old in kept if old[0] == "interpret"]
    return [*first, row, *(old for old in kept if old[0] != "interpret")]


def updated_source(source: str, changed: Table) -> str:
    """The text of the table's file with the rows of some kernels replaced.

    What stands above the table stays; the table is written anew, so it must hold no comments.
    """
    head, marker, old = source.partition("] = {\n")
    if not marker or "#" in old:
        raise ValueError(f"{TABLE_FILE.name}: expected `TABLE: ... = {{`, and no comment inside")
    scope: dict[str, Any] = {}
    exec(compile(source, str(TABLE_FILE), "exec"), scope)
    return f"{head}{marker}{rendered(scope['TABLE'] | changed)}}}\n"


def rendered(table: Table) -> str:
    """The table as the house's formatter would lay it out."""
    lines = []
    for kernel, rows in table.items():
        lines.append(f'    "{kernel}": [')
        for row in rows:
            parts = [_literal(part) for part in row]
            line = f"        ({', '.join(parts)}),"
            if len(line) <= 100:
                lines.append(line)
            else:
                lines += ["        (", *(f"            {part}," for part in parts), "        ),"]
        lines.append("    ],")
    return "\n".join(lines) + "\n"


def _literal(value: Any) -> str:
    text = pprint.pformat(value, width=10_000, sort_dicts=False)
    return text.replace("'", '"')


if __name__ == "__main__":
    sys.exit(main())
