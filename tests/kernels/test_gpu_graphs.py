"""The graph part of ``make gpu-check``, with the recorder on a CPU: it finds no fault, and finds one."""

from __future__ import annotations

import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import gpu_check
import gpu_graphs

from mamba_teach.runner.graph_recorder import RecordedGraph


def test_graphs_and_eager_steps_say_the_same() -> None:
    (report,) = gpu_graphs.compare_graphs("all", 3, "cpu", ("record",), problems=3)
    assert report.faults == () and report.graph_steps > 0


def test_a_graph_that_does_nothing_is_noticed() -> None:
    with patch.object(RecordedGraph, "replay", lambda self: None):
        (report,) = gpu_graphs.compare_graphs("none", 0, "cpu", ("record",), problems=1)
    assert report.faults


def test_an_engine_that_uses_no_graph_is_noticed() -> None:
    report = gpu_graphs.GraphReport("cuda", gpu_graphs.Comparison(1, 0, ()), 0, 7)
    assert report.faults == ("no step of 7 ran as a graph",)


def test_steps_can_be_timed() -> None:
    with patch.multiple(gpu_graphs, WARM_STEPS=1, TIMED_STEPS=2):
        assert gpu_graphs.step_milliseconds("all", 3, "cpu", "record") > 0


def test_every_mode_is_a_job_of_its_own() -> None:
    jobs = gpu_check.check_jobs(("graphs",))
    assert jobs == ["graphs:none:0", "graphs:none:3", "graphs:all:0", "graphs:all:3"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_graphs_and_the_recorder_agree_on_a_gpu() -> None:
    for report in gpu_graphs.compare_graphs("all", 3, "cuda", ("cuda", "record"), problems=3):
        assert report.faults == ()
