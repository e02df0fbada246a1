"""``make gpu-check`` and ``make tune``, as far as a CPU goes: what is to run on a GPU must not be
run there for the first time. The harness is fed kernels with known faults and has to notice."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path

import pytest
import torch

from mamba_kernels.tuning_table import TABLE

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "tools")]

import gpu_bytes  # noqa: E402
import gpu_check  # noqa: E402
import gpu_engine  # noqa: E402
import gpu_peers  # noqa: E402
import gpu_report  # noqa: E402
import gpu_timing  # noqa: E402
import gpu_workload_list  # noqa: E402
import gpu_workloads  # noqa: E402
import tune  # noqa: E402
from gpu_bytes import NEMOTRON_H, Sizes  # noqa: E402
from gpu_case_decode import conv_update_case, copy_case, norm_case, update_case  # noqa: E402
from gpu_case_list import FAMILIES, smoke_cases  # noqa: E402
from gpu_case_prefill import conv_prefill_case, scan_case  # noqa: E402
from gpu_case_shapes import Shape, shapes  # noqa: E402
from gpu_cases import Case, bytes_when_far, run  # noqa: E402
from gpu_runs import run_all  # noqa: E402
from gpu_workload_list import Workload  # noqa: E402

CPU = torch.device("cpu")
SHAPE = Shape(2, 8, 16, 2)


def test_formulas_give_the_floors_that_others_worked_out() -> None:
    """MiB of the state update at batch 128, and of the scan's kernels as kernels/README.md has them;
    microseconds at 4.3 TB/s of what moves each number once."""
    mib = {
        (size, T, s): gpu_bytes.state_update(NEMOTRON_H[size], 128, T, 2, s) / 2**20
        for size, T, s in product(NEMOTRON_H, (1, 2, 4, 8), (2, 4))
    }
    one_token = [mib[z, 1, s] for z in NEMOTRON_H for s in (4, 2)]
    assert one_token == pytest.approx([1028, 516, 1286, 646], abs=1)
    assert [mib["P64", T, 4] for T in (2, 4, 8)] == pytest.approx([1545, 2578, 4644], rel=1e-3)
    for chunk, states, together in ((64, 2048, 2506), (128, 1024, 1482), (256, 512, 970)):
        c, z = 8192 // chunk, NEMOTRON_H["P64"]
        no_pool = gpu_bytes.whole_scan(z, 8192, 0, c, 0, 2, 4)
        assert round(no_pool / 2**20) == together and 16 * c * z.HPN == states * 2**20
    microseconds = {
        "conv prefill": gpu_bytes.conv_prefill(NEMOTRON_H["P64"], 8192, 0, 2) / 4.3e6,
        "conv update": gpu_bytes.conv_update(NEMOTRON_H["P64"], 128, 1, 2) / 4.3e6,
        "norm": gpu_bytes.gated_norm(NEMOTRON_H["P80"], 8192, 2) / 4.3e6,
    }
    floors = {"conv prefill": 78, "conv update": 4.9, "norm": 117}
    assert microseconds == pytest.approx(floors, rel=0.01)


def test_copying_moves_the_state_and_its_window() -> None:
    z = Sizes(H=2, P=3, N=4, G=1)  # 24 numbers of state, 14 channels
    assert gpu_bytes.copy_states(z, triples=5, layers=7, window_len=3, a=2, s=4) == 5 * 7 * 360


def test_shapes_cover_every_pair() -> None:
    sizes = [(s.head_dim, s.state_size, s.groups) for s in shapes(torch.float32, torch.float32)]
    for i, j, count in ((0, 1, 9), (0, 2, 12), (1, 2, 12)):
        assert len({(size[i], size[j]) for size in sizes}) == count


@pytest.mark.parametrize("family", FAMILIES)
def test_cases_hold_for_the_torch_twins(family: str) -> None:
    """So the cases themselves are right. (The big ones need no GPU, but time.)"""
    make, all_types = FAMILIES[family]
    for act, state in (all_types[0], all_types[-1]):
        some = make(act, state)[: 1 if family == "scan" else 4]
        for outcome in run_all(family, some, CPU, "torch", 1):
            assert outcome.status == "passed", outcome


def broken(case: Case, fault: Callable[..., torch.Tensor | None]) -> Case:
    call = case.call
    return replace(case, call=lambda t, s, b: fault(call(t, s, b), t, s))


def wrong_value(y, t, states):  # type: ignore[no-untyped-def]
    y[0, 0, 0] += 0.01 * y.abs().max()
    return y


def wrong_state(y, t, states):  # type: ignore[no-untyped-def]
    states[0][int(t["dst_slots"][0, 0]), 1, 2, 3] += 0.1
    return y


def stray_write(y, t, states):  # type: ignore[no-untyped-def]
    states[0][0, 0, 0, 0] = 0.0  # the null slot
    return y


def write_behind_the_page(y, t, states):  # type: ignore[no-untyped-def]
    slot = states[0][1]
    slot.as_strided((1,), (1,), slot.storage_offset() + slot.numel())[0] = 0.0
    return y


def unwritten(y, t, states):  # type: ignore[no-untyped-def]
    fresh = torch.empty(y.shape)
    fresh[:-1] = y[:-1]
    return fresh


def race(y, t, states, runs=[0]):  # type: ignore[no-untyped-def]  # noqa: B006
    runs[0] += 1
    y[1, 0, 0] += 1e-6 * runs[0]  # within the tolerance, and not the same twice
    return y


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (wrong_value, "y: off by"),
        (wrong_state, "pool 0, slot .*: off by"),
        (stray_write, r"written without being asked: slots \[0\]"),
        (write_behind_the_page, r"written without being asked: slots \[1\]"),
        (unwritten, "y: not finite"),
        (race, "y differs in run 1"),
    ],
)
def test_the_harness_notices(fault: Callable[..., torch.Tensor], message: str) -> None:
    case = update_case(SHAPE, [1, 1], k=0, seed=1)
    run(case, CPU, "torch", repeats=2)
    with pytest.raises(AssertionError, match=message):
        run(broken(case, fault), CPU, "torch", repeats=2)
    run(case, CPU, "torch", repeats=1)  # and leaves the case as it was


def test_slots_and_tokens_far_apart() -> None:
    cases = [
        scan_case(SHAPE, [3, 5], 4), update_case(SHAPE, [1, 2], k=1), copy_case(SHAPE),
        conv_prefill_case(SHAPE, [3, 5]), conv_update_case(SHAPE, [1, 2], k=1), norm_case(SHAPE, 3),
    ]  # fmt: skip
    for case in cases:
        run(case, CPU, "torch", 2, slot_stride=2000, token_stride=3000)
    assert bytes_when_far(cases[1], 2000, 0) == 4 * cases[1].pools[0].raw.shape[0] * 2000
    assert bytes_when_far(cases[5], 2000, 3000) == 4 * 3 * 3000


def test_what_does_not_fit_the_budget_is_skipped() -> None:
    outcomes = list(run_all("part", smoke_cases()[:2], CPU, "torch", 1, seconds=-1.0))
    assert [o.status for o in outcomes] == ["skipped"] and "2 of 2 cases left" in outcomes[0].detail


def script(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.interpreter
def test_the_smoke_run_as_a_script(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="runs the interpreter")
    out = script("benchmarks/gpu_check.py", "--interpret-smoke", "--results", str(tmp_path))
    assert "all checks passed" in out
    (file,) = tmp_path.glob("gpu_check_interpreter_????-??-??.json")
    data = json.loads(file.read_text())
    assert data["passed"] and len(data["checks"]) == len(smoke_cases())
    assert {"device", "driver", "torch", "triton", "date"} <= set(data["machine"])


@pytest.mark.parametrize("main", [gpu_check.main, tune.main])
def test_without_a_gpu_one_line(main, monkeypatch, capsys) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([]) == 0
    assert "no GPU here" in capsys.readouterr().out


def test_a_worker_that_crashes_or_hangs_costs_its_own_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "GRACE_S", 0)
    line = json.dumps({"part": "kernels", "name": "a", "status": "passed"})
    crash = [sys.executable, "-c", f"import os; print({line!r}, flush=True); os._exit(7)"]
    done, crashed = gpu_check.run_job("kernels:scan", 20, crash)
    assert done["status"] == "passed"
    assert crashed["status"] == "failed" and "exit code 7" in crashed["detail"]
    (hung,) = gpu_check.run_job("kernels:scan", 0.3, [sys.executable, "-c", "while True: pass"])
    assert hung["status"] == "failed" and "killed" in hung["detail"]
    (late,) = gpu_check.run_job("kernels:scan", -1.0)
    assert late["status"] == "skipped"


def test_every_job_names_a_family_and_types() -> None:
    jobs = gpu_check.check_jobs(("kernels", "engine"))
    assert len(jobs) == 18 + 3 and "kernels:scan:bfloat16:float32" in jobs and "engine:all" in jobs


TIMING = gpu_timing.Timing(
    "scan", "P64", 10.0, 8_000_000, 800.0, 0.2, {"mamba_ssm": 12.5, "x": "why"}
)


def report(status: str) -> gpu_report.Report:
    result = gpu_report.Report({"device": "NVIDIA H200 (MIG)", "date": "2026-01-02"})
    result.add({"part": "scan", "name": "c", "status": status, "detail": "off", "seconds": 1.0})
    result.add(asdict(TIMING))
    result.add({"copy_gb_per_s": 4000.0})
    return result


def test_the_report_as_a_file(tmp_path: Path) -> None:
    file = report("passed").write(tmp_path / "new")
    assert file.name == "gpu_check_nvidia-h200-mig_2026-01-02.json"
    data = json.loads(file.read_text())
    assert data["passed"] and data["timings"][0]["microseconds"] == 10.0
    assert not json.loads(report("failed").to_json())["passed"]


def test_the_report_as_text() -> None:
    text = gpu_report.render(report("failed"))
    assert "scan       0       1        0  1.0" in text and "FAILED scan: c: off" in text
    assert "scan    P64    10.0  8.0   800      20%           12.5      -" in text
    assert "x: why" in text and "a plain copy: 4000 GB/s" in text and "some checks FAILED" in text


def test_near_ties_are_allowed_and_other_differences_are_not() -> None:
    asked = []

    def gap(tokens: list[int]) -> float:
        asked.append(tokens)
        return 5e-4 if tokens[0] == 1 else 0.5

    prompts, want = [[1], [2], [3]], [(7, 8), (7, 8), (7, 8)]
    result = gpu_engine.compare_tokens(prompts, want, [(7, 9), (7,), (7, 8)], gap)
    assert asked == [[1, 7], [2, 7]]
    assert result.near_ties == 1 and len(result.faults) == 1
    assert "problem 1, token 1: [8] and []" in result.faults[0]


def test_the_cpu_says_what_the_cpu_says() -> None:
    assert gpu_engine.compare_engines("all", "cpu", problems=1) == gpu_engine.Comparison(1, 0, ())
    assert gpu_engine.top2_gap_on_cpu()([1, 2, 3]) > 0


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> list[Workload]:
    monkeypatch.setattr(gpu_workload_list, "NEMOTRON_H", {"tiny": Sizes(2, 16, 16, 2)})
    monkeypatch.setattr(gpu_workload_list, "BATCHES", (2,))
    monkeypatch.setattr(gpu_workload_list, "PREFILLS", {"2 x 16": [16, 16]})
    monkeypatch.setattr(gpu_workload_list, "CHUNK_SIZE", 16)
    monkeypatch.setattr(gpu_workloads, "ACT", torch.float32)
    return gpu_workload_list.workloads()


@pytest.mark.interpreter
def test_every_workload_can_be_made_repeated_and_timed(
    tiny: list[Workload], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="stages of the scan have no twin")
    monkeypatch.setitem(sys.modules, "mamba_ssm", None)  # whatever is installed here
    monkeypatch.setitem(sys.modules, "causal_conv1d", None)
    assert {w.kernel for w in tiny} == set(TABLE) | {"mamba_chunk_scan"} == {
        *tune.CANDIDATES, "mamba_chunk_scan"}  # fmt: skip
    for workload in tiny:
        prepared = workload.make(CPU)
        first, second = prepared.results(), prepared.results()
        assert first and all(torch.equal(a, b) for a, b in zip(first, second)), workload.name
        assert all(t.isfinite().all() for t in first), workload.name
        timing = gpu_timing.time_workload(workload, CPU, 1000.0, lambda call: (call(), 2.0)[1])
        assert timing.gb_per_s == pytest.approx(workload.bytes_moved / 2e3, abs=0.1)
        assert all("not installed" in str(why) for why in timing.peers.values()), timing.peers


def test_peers_are_given_the_shapes_they_document(
    tiny: list[Workload], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = {}

    class Library:
        def __getattr__(self, function: str) -> Callable[..., None]:
            def call(*args: object, **kwargs: object) -> None:
                named = {**dict(enumerate(args)), **kwargs}
                seen[function] = {k: tuple(v.shape) for k, v in named.items() if torch.is_tensor(v)}

            return call

    importer = types.SimpleNamespace(import_module=lambda module: Library())
    monkeypatch.setattr(gpu_peers, "importlib", importer)
    for workload in tiny:
        if workload.kernel.endswith(("update_kernel", "fn_kernel", "gated_kernel", "_scan")):
            for call in workload.make(CPU).peers.values():
                call()
    heads = {"dt_bias": (2, 16), "D": (2, 16)}
    tokens = {0: (5, 2, 16, 16), 1: (2, 2, 16), 2: (2, 2, 16), 3: (2, 16, 16)}
    assert seen["selective_state_update"] == heads | tokens | {
        4: (2, 2, 16), 5: (2, 2, 16), "state_batch_indices": (2,)}  # fmt: skip
    assert seen["causal_conv1d_update"][0] == (2, 96, 4)
    assert seen["causal_conv1d_update"][1] == (5, 96, 6)
    assert seen["causal_conv1d_fn"][0] == (2, 96, 16)
    assert seen["causal_conv1d_fn"]["initial_states"] == (2, 96, 3)
    assert seen["mamba_chunk_scan_combined"][0] == (2, 16, 2, 16)
    assert seen["mamba_chunk_scan_combined"]["initial_states"] == (2, 2, 16, 16)
    assert seen["rmsnorm_fn"][0] == seen["rmsnorm_fn"]["z"] == (32, 32)


def test_tuning_keeps_the_fastest_that_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "copy_states_kernel"
    monkeypatch.setitem(TABLE, name, [("any", {}, {"n": 1})])
    monkeypatch.setitem(tune.CANDIDATES, name, [{"n": n} for n in range(1, 6)])

    def make(device: torch.device) -> gpu_workloads.Prepared:
        def call() -> torch.Tensor:
            n = TABLE[name][0][2]["n"]
            if n == 5:
                raise RuntimeError("out of resources")
            return torch.tensor([1.0 if n != 4 else 1.1])

        return gpu_workloads.Prepared(call)

    times = {1: 10.0, 2: 9.0, 3: 8.0, 4: 1.0, 5: 1.0}
    bench = lambda call: times[TABLE[name][0][2]["n"]]  # noqa: E731
    group = [Workload(name, "w", {}, 1, make)] * 2
    assert tune.tune_class(name, {}, group, "sm_90", CPU, bench) == {"n": 3}
    times[2], times[3] = 9.9, 9.9  # noise
    assert tune.tune_class(name, {}, group, "sm_90", CPU, bench) is None
    assert TABLE[name] == [("any", {}, {"n": 1})]


def test_the_table_is_written_as_it_was_read() -> None:
    source = tune.TABLE_FILE.read_text(encoding="utf-8")
    assert tune.updated_source(source, {}) == source
    rows = TABLE["chunk_scan_kernel"]
    new = ("sm_90", {"head_dim": 80, "state_size": 128, "dot_bytes": 2}, {"BLOCK_I": 128})
    once = tune.with_row(rows, new)
    assert once[0][0] == "interpret" and once[1] == new and once[2:] == rows[1:]
    assert tune.with_row(once, (*new[:2], {"BLOCK_I": 64}))[1][2] == {"BLOCK_I": 64}
    scope: dict = {}
    exec(tune.updated_source(source, {"chunk_scan_kernel": once}), scope)
    assert scope["TABLE"]["chunk_scan_kernel"] == once
