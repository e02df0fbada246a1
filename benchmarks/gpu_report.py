"""The report of a run: what is in the JSON file, and the tables on the terminal.

Plain data and text; no torch is needed to read or to test it.
"""

from __future__ import annotations

import datetime
import json
import platform
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]


@dataclass
class Report:
    """Everything a run found out.

    Attributes:
        machine: device name, driver, versions, date.
        checks: outcomes of the correctness parts: part, name, status, detail, seconds.
        timings: see ``gpu_timing.Timing``.
        copy_gb_per_s: bandwidth of a plain copy in the same run, or None if none was measured.
    """

    machine: dict[str, str]
    checks: list[Row] = field(default_factory=list)
    timings: list[Row] = field(default_factory=list)
    copy_gb_per_s: float | None = None

    @property
    def passed(self) -> bool:
        return not any(check["status"] == "failed" for check in self.checks)

    def add(self, line: Row) -> None:
        """Take in one line that a worker wrote."""
        if "status" in line:
            self.checks.append(line)
        elif "kernel" in line:
            self.timings.append(line)
        else:
            self.copy_gb_per_s = line["copy_gb_per_s"]

    def to_json(self) -> str:
        data = {
            "machine": self.machine, "passed": self.passed, "copy_gb_per_s": self.copy_gb_per_s,
            "checks": self.checks, "timings": self.timings,
        }  # fmt: skip
        return json.dumps(data, indent=1) + "\n"

    def write(self, folder: Path) -> Path:
        """``gpu_check_<device>_<date>.json``; a second run of a day replaces the first."""
        folder.mkdir(parents=True, exist_ok=True)
        name = f"gpu_check_{slug(self.machine['device'])}_{self.machine['date']}.json"
        (folder / name).write_text(self.to_json(), encoding="utf-8")
        return folder / name


def slug(name: str) -> str:
    """``"NVIDIA H200"`` -> ``"nvidia-h200"``."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def describe_machine(device_name: str) -> dict[str, str]:
    """Names and versions, for whoever reads the numbers later."""
    import torch

    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = "not installed"
    return {
        "device": device_name,
        "driver": _driver(),
        "torch": torch.__version__,
        "triton": triton_version,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else "unknown"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; numbers to the right, words to the left."""
    cells = [list(header), *[list(row) for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    columns = list(zip(*cells[1:])) or [()] * len(header)
    numeric = [all(re.match(r"^[\d.,%-]*$", cell) for cell in column) for column in columns]
    lines = [
        "  ".join(c.rjust(w) if n else c.ljust(w) for c, w, n in zip(row, widths, numeric)).rstrip()
        for row in cells
    ]
    return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])


def checks_table(checks: Sequence[Row]) -> str:
    """Counts by part, then every failure, reason to skip and remark in full."""
    parts = dict.fromkeys(check["part"] for check in checks)
    rows = []
    for part in parts:
        mine = [check for check in checks if check["part"] == part]
        counts = [sum(c["status"] == s for c in mine) for s in ("passed", "failed", "skipped")]
        seconds = sum(c["seconds"] for c in mine)
        rows.append([part, *map(str, counts), f"{seconds:.1f}"])
    lines = [table(["part", "passed", "failed", "skipped", "s"], rows)]
    lines += [
        f"{check['status'].upper()} {check['part']}: {check['name']}: {check['detail']}"
        for check in checks
        if check["status"] != "passed" or check["detail"]
    ]
    return "\n".join(lines)


def timings_table(timings: Sequence[Row], copy_gb_per_s: float | None) -> str:
    """One line per workload; a peer's missing number is explained once, below."""
    peers = list(dict.fromkeys(name for timing in timings for name in timing["peers"]))
    header = ["kernel", "sizes", "us", "MB", "GB/s", "of copy", *(f"{p}, us" for p in peers)]
    rows, remarks = [], {}
    for t in timings:
        row = [
            t["kernel"], t["name"], f"{t['microseconds']:.1f}", f"{t['bytes_moved'] / 1e6:.1f}",
            f"{t['gb_per_s']:.0f}", f"{t['share_of_copy']:.0%}",
        ]  # fmt: skip
        for peer in peers:
            value = t["peers"].get(peer)
            if isinstance(value, str):
                remarks[f"{peer}: {value}"] = None
            row.append(f"{value:.1f}" if isinstance(value, float | int) else "-")
        rows.append(row)
    lines = [table(header, rows), *remarks]
    if copy_gb_per_s is not None:
        lines.append(f"a plain copy: {copy_gb_per_s:.0f} GB/s")
    return "\n".join(lines)


def render(report: Report) -> str:
    """The whole report for the terminal."""
    machine = report.machine
    lines = [", ".join(f"{name} {value}" for name, value in machine.items())]
    if report.checks:
        lines += ["", checks_table(report.checks)]
    if report.timings:
        lines += ["", timings_table(report.timings, report.copy_gb_per_s)]
    lines += ["", "all checks passed" if report.passed else "some checks FAILED"]
    return "\n".join(lines)
