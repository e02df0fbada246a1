"""What ``replay_state_update`` and ``materialize_states`` refuse, and how they say it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from mamba_kernels import ReplayRing, materialize_states, replay_state_update
from mamba_kernels.checks import debug_checks

Changes = Callable[[dict[str, Any]], dict[str, Any]]


def update_arguments() -> dict[str, Any]:
    """Two rows of 1 and 2 tokens; 2 heads of 8, state 16; a ring of 4 + 2 entries in 3 rows."""
    ring = ReplayRing(
        torch.zeros(3, 6, 2, 8), torch.zeros(3, 6, 1, 16), torch.zeros(3, 6, 2),
        torch.zeros(3, 6, 2), 4,
    )  # fmt: skip
    return dict(
        x=torch.zeros(3, 2, 8), dt=torch.zeros(3, 2), A=-torch.ones(2), B=torch.zeros(3, 1, 16),
        C=torch.zeros(3, 1, 16), D=torch.zeros(2), dt_bias=torch.zeros(2),
        ssm_state=torch.zeros(5, 2, 8, 16), ring=ring,
        query_start_loc=torch.tensor([0, 1, 3]).int(), src_slots=torch.tensor([1, 2]).int(),
        dst_slots=torch.tensor([3, 2]).int(), ring_rows=torch.tensor([1, 2]).int(),
        ring_starts=torch.tensor([0, 5]).int(), num_pending=torch.tensor([4, 0]).int(),
    )  # fmt: skip


def ring_with(**changes: Any) -> Changes:
    return lambda a: dict(ring=replace(a["ring"], **changes))


BAD_UPDATES: dict[str, tuple[Changes, str]] = {
    "x": (lambda a: dict(x=a["x"][:, 0]), r"x has shape \(3, 8\)"),
    "dt": (lambda a: dict(dt=a["dt"][:1]), r"dt has shape \(1, 2\); expected \(3, 2\)"),
    "B": (lambda a: dict(B=a["B"][:2]), r"B has shape \(2, 1, 16\)"),
    "C": (lambda a: dict(C=a["C"][..., :5]), r"C has shape .* expected \(3, 1, 16\)"),
    "groups": (
        lambda a: dict(B=a["B"].repeat(1, 3, 1), C=a["C"].repeat(1, 3, 1)),
        "B has 3 groups",
    ),
    "A": (lambda a: dict(A=a["A"].double()), "A has dtype torch.float64"),
    "device": (lambda a: dict(D=a["D"].to("meta")), "D is on meta; expected cpu"),
    "state": (lambda a: dict(ssm_state=a["ssm_state"][:, :1]), "ssm_state has shape"),
    "loc": (lambda a: dict(query_start_loc=torch.zeros(3)), "query_start_loc has dtype"),
    "src": (lambda a: dict(src_slots=a["src_slots"][:, None]), r"src_slots has shape \(2, 1\)"),
    "dst": (lambda a: dict(dst_slots=a["dst_slots"][:1]), r"dst_slots has shape \(1,\)"),
    "rows": (lambda a: dict(ring_rows=a["ring_rows"].float()), "ring_rows has dtype"),
    "starts": (lambda a: dict(ring_starts=a["ring_starts"][:1]), "ring_starts has shape"),
    "pending": (lambda a: dict(num_pending=a["num_pending"].repeat(2)), "num_pending has shape"),
    "limit": (lambda a: dict(dt_limit=(0.1, 0.0)), r"dt_limit=\(0.1, 0.0\)"),
    "ring.x": (ring_with(x=torch.zeros(3, 6, 2, 9)), "ring.x has shape"),
    "ring.B": (ring_with(B=torch.zeros(3, 5, 1, 16)), "ring.B has shape"),
    "ring.dt": (ring_with(dt=torch.zeros(3, 6, 2).bfloat16()), "ring.dt has dtype"),
    "ring.log_decay": (ring_with(log_decay=torch.zeros(2, 6, 2)), "ring.log_decay has shape"),
    "layout": (ring_with(dt=torch.zeros(3, 2, 6).transpose(1, 2)), "ring.dt has strides"),
    "no step": (ring_with(capacity=6), "ring.capacity=6 of length 6"),
    "long step": (ring_with(capacity=2), "ring.capacity=2 of length 6"),
}


@pytest.mark.parametrize("name", BAD_UPDATES)
def test_wrong_arguments_of_an_update_are_named(name: str) -> None:
    change, message = BAD_UPDATES[name]
    arguments = update_arguments()
    replay_state_update(**arguments, backend="torch")
    with pytest.raises(ValueError, match=message):
        replay_state_update(**(arguments | change(arguments)), backend="torch")


BAD_CONTENTS: dict[str, tuple[dict[str, list[int]], str]] = {
    "src": (dict(src_slots=[1, 5]), "src_slots holds slot 5; allowed: 1 .. 4"),
    "dst": (dict(dst_slots=[-1, 2]), "dst_slots holds slot -1"),
    "rows": (dict(ring_rows=[1, 3]), "ring_rows holds slot 3; allowed: 1 .. 2"),
    "start": (dict(ring_starts=[6, 0]), r"ring_starts holds 6; allowed: 0 \.\. 5"),
    "start below": (dict(ring_starts=[0, -1]), "ring_starts holds -1"),
    "pending": (dict(num_pending=[5, 0]), r"num_pending holds 5; allowed: 0 \.\. 4"),
    "pending below": (dict(num_pending=[0, -1]), "num_pending holds -1"),
    "row": (dict(query_start_loc=[0, 0, 3]), "a row of 3 tokens"),
}


@pytest.mark.parametrize("name", BAD_CONTENTS)
def test_debug_mode_reads_the_contents_of_an_update(name: str) -> None:
    changes, message = BAD_CONTENTS[name]
    arguments = update_arguments()
    arguments |= {key: torch.tensor(values).int() for key, values in changes.items()}
    with debug_checks(), pytest.raises(ValueError, match=message):
        replay_state_update(**arguments, backend="torch")


def materialize_arguments() -> dict[str, Any]:
    """Of two checkpoints the states after 2 and 3, and after 1 pending input."""
    arguments = update_arguments()
    return dict(
        layers=[(arguments["ssm_state"].clone(), arguments["ring"]) for _ in range(2)],
        src_slots=arguments["src_slots"], ring_rows=arguments["ring_rows"],
        ring_starts=arguments["ring_starts"], num_inputs=torch.tensor([[2, 3], [1, 0]]).int(),
        dst_slots=torch.tensor([[3, 1], [4, 0]]).int(),
    )  # fmt: skip


def second_layer(state: torch.Tensor | None = None, **changes: Any) -> Changes:
    def change(a: dict[str, Any]) -> dict[str, Any]:
        first, (second, ring) = a["layers"]
        return dict(layers=[first, (second if state is None else state, replace(ring, **changes))])

    return change


BAD_MATERIALIZATIONS: dict[str, tuple[Changes, str]] = {
    "state": (second_layer(torch.zeros(4, 2, 8, 16)), r"layers\[1\]: shapes"),
    "strides": (second_layer(torch.zeros(5, 2, 16, 8).transpose(2, 3)), r"layers\[1\]: .*strides"),
    "x": (second_layer(x=torch.zeros(3, 6, 2, 8).bfloat16()), r"layers\[1\]: .*dtypes"),
    "B": (second_layer(B=torch.zeros(3, 6, 1, 8)), r"layers\[1\]: shapes"),
    "src": (lambda a: dict(src_slots=a["dst_slots"]), "src_slots has shape"),
    "rows": (lambda a: dict(ring_rows=a["ring_rows"][:1]), "ring_rows has shape"),
    "dst": (lambda a: dict(dst_slots=a["src_slots"]), "dst_slots has shape"),
    "inputs": (lambda a: dict(num_inputs=a["num_inputs"][:, :1]), "num_inputs has shape"),
    "starts": (lambda a: dict(ring_starts=a["ring_starts"][:1]), "ring_starts has shape"),
    "dt": (second_layer(dt=torch.zeros(3, 6, 4)[..., ::2]), r"layers\[1\]"),
}


@pytest.mark.parametrize("name", BAD_MATERIALIZATIONS)
def test_wrong_arguments_of_a_materialization_are_named(name: str) -> None:
    change, message = BAD_MATERIALIZATIONS[name]
    arguments = materialize_arguments()
    materialize_states(**arguments, backend="torch")
    with pytest.raises(ValueError, match=message):
        materialize_states(**(arguments | change(arguments)), backend="torch")


BAD_MATERIALIZED_CONTENTS: dict[str, tuple[dict[str, Any], str]] = {
    "src": (dict(src_slots=[1, 5]), "src_slots holds slot 5"),
    "rows": (dict(ring_rows=[1, 3]), "ring_rows holds slot 3"),
    "dst": (dict(dst_slots=[[3, 9], [4, 0]]), "dst_slots holds slot 9"),
    "start": (dict(ring_starts=[6, 0]), "ring_starts holds 6"),
    "inputs": (dict(num_inputs=[[2, 5], [1, 0]]), r"num_inputs holds 5; allowed: 0 \.\. 4"),
}


@pytest.mark.parametrize("name", BAD_MATERIALIZED_CONTENTS)
def test_debug_mode_reads_the_contents_of_a_materialization(name: str) -> None:
    changes, message = BAD_MATERIALIZED_CONTENTS[name]
    arguments = materialize_arguments()
    arguments |= {key: torch.tensor(values).int() for key, values in changes.items()}
    with debug_checks(), pytest.raises(ValueError, match=message):
        materialize_states(**arguments, backend="torch")
