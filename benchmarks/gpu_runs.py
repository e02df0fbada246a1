"""Running many checks: each has an outcome, none stops the others, and time is limited."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from gpu_cases import REPEATS, Case, bytes_when_far, run


@dataclass
class Outcome:
    """What became of a check: ``"passed"``, ``"failed"`` or ``"skipped"``, and why."""

    part: str
    name: str
    status: str
    detail: str = ""
    seconds: float = 0.0


def checked(part: str, name: str, check: Callable[[], str | None]) -> Outcome:
    """Run one check; an exception of any kind is a failure, a returned text a reason to skip."""
    start = time.monotonic()
    status, detail = "passed", ""
    try:
        if reason := check():
            status, detail = "skipped", reason
    except Exception as error:  # whatever it is, the report says so and the next check runs
        status, detail = "failed", f"{type(error).__name__}: {error}".strip()[:2000]
    return Outcome(part, name, status, detail, round(time.monotonic() - start, 3))


def run_all(
    part: str,
    cases: Sequence[Callable[[], Case]],
    device: torch.device,
    backend: str | None = None,
    repeats: int = REPEATS,
    seconds: float = float("inf"),
) -> Iterator[Outcome]:
    """Make and run cases one by one until the time is used up; the rest is skipped and says so."""
    end = time.monotonic() + seconds
    for number, make in enumerate(cases):
        left = f"{len(cases) - number} of {len(cases)} cases left"
        if time.monotonic() > end:
            yield Outcome(part, "the rest", "skipped", f"{seconds:.0f} s used up; {left}")
            return
        case = make()
        outcome = checked(part, case.name, lambda case=case: run(case, device, backend, repeats))
        yield outcome
        if device.type == "cuda" and outcome.status == "failed" and (lost := device_lost()):
            yield Outcome(part, "the rest", "failed", f"device lost ({lost}); {left}")
            return


def run_far(
    part: str, case: Case, device: torch.device, slot_stride: int, token_stride: int
) -> Outcome:
    """One case with 64-bit offsets, where there is memory for it."""

    def check() -> str | None:
        needed = bytes_when_far(case, slot_stride, token_stride)
        free = torch.cuda.mem_get_info(device)[0]
        if needed * 1.1 > free:
            return f"needs {needed / 2**30:.1f} GiB; {free / 2**30:.1f} are free"
        try:
            run(case, device, None, 2, slot_stride, token_stride)
        except torch.OutOfMemoryError:  # another process was quicker
            return f"needs {needed / 2**30:.1f} GiB; they were taken meanwhile"
        finally:
            torch.cuda.empty_cache()
        return None

    what = "slots" if slot_stride else "tokens"
    return checked(part, f"{case.name}, {what} 2^28 numbers apart", check)


def device_lost() -> str:
    """An illegal access makes every later call of the process fail; the reason, or nothing."""
    try:
        torch.cuda.synchronize()
    except Exception as error:
        return str(error).splitlines()[0]
    return ""
