"""What a replay computes is what eager work computes: by operation, by program, by model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graphs.test_recorder import Function, recorded
from hypothesis import given, settings
from hypothesis import strategies as st
from model.stepper import Stepper
from support.models import logits_of, random_prompt, toy_model

from mamba_teach.model.metadata import AttentionMetadata, MambaMetadata
from mamba_teach.runner.graph_recorder import tensors_in


def rows(seed: int) -> torch.Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(seed))


INDEX = torch.tensor([4, 0, 4, 2, 1, 0])


def in_place(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y.add_(1.0)[1:3].mul_(x[3:5])
    y[:, 2:5] = x[:, 5:]
    y[4].zero_()
    return y


def split_and_cat(x: torch.Tensor) -> torch.Tensor:
    left, middle, right = x.split([3, 1, 4], dim=-1)
    return torch.cat([right.contiguous(), left * middle, torch.stack([middle[:, 0]] * 2, 1)], -1)


def attend(x: torch.Tensor) -> torch.Tensor:
    q = x.view(1, 6, 2, 4).transpose(1, 2)
    visible = torch.arange(6) <= torch.arange(6)[:, None]
    return F.scaled_dot_product_attention(q, q[:, :1], q[:, 1:], visible, enable_gqa=True)


def scatter(x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros_like(x).index_add_(0, INDEX, x)
    y = y.scatter(1, INDEX[:, None], x[:, :1])
    y[INDEX, torch.arange(6)] = x[:, 7]
    return y.gather(1, INDEX[None, :].expand(6, -1))


def unfinished(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    y[:, :5] = x[:, 3:]
    return y[:, :5].sum(1)  # what was not written is not read


OPERATIONS: dict[str, Function] = {
    "views": lambda x: x.view(3, 16)[1:, ::2].transpose(0, 1).unflatten(0, (4, 2)).flip(0) * 2.0,
    "in place": in_place,
    "split and cat": split_and_cat,
    "attention": attend,
    "index": lambda x: x[INDEX][:, INDEX[:3]] + x[2, INDEX[0:1]],
    "where": lambda x: torch.where(x > 0, x.cumsum(0), x.masked_fill(x < -1, 7.0)),
    "scatter": scatter,
    "several results": lambda x: torch.cat([x.max(0).values, x.topk(2, dim=1).values.flatten()]),
    "norm": lambda x: F.layer_norm(x, (8,)) + F.silu(x).mean(-1, keepdim=True),
    "types": lambda x: (x.double().exp() > 1).int() + x.argmax(1)[:, None],
    "uninitialised": unfinished,
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_replay_equals_eager_work(name: str, inference: bool) -> None:
    function = OPERATIONS[name]
    with torch.inference_mode(inference):
        x = rows(0)
        graph, y = recorded(function, x)
        torch.testing.assert_close(y, function(rows(0)), rtol=0, atol=0)
        graph.poison_empty = True
        for seed in (1, 2):
            x.copy_(rows(seed))
            graph.replay()
            torch.testing.assert_close(y, function(rows(seed)), rtol=0, atol=0)


STEPS: list[Function] = [
    lambda a, b: a + b,
    lambda a, b: a.mul_(0.5).sub_(b[0].clone()),
    lambda a, b: (a @ b).tanh(),
    lambda a, b: torch.cat([a[2:], b[:2]]),
    lambda a, b: torch.where(a > b, a, b.t()),
    lambda a, b: torch.cat([a, b], 1).sort(1).values[:, 2:6],
    lambda a, b: a[:, :3].contiguous().repeat(1, 2)[:, :4],
]


@settings(max_examples=60)
@given(
    program=st.lists(
        st.tuples(st.sampled_from(STEPS), st.integers(0, 3), st.integers(0, 3), st.integers(0, 3)),
        min_size=1,
        max_size=25,
    )
)
def test_any_program_that_lets_go_of_results_equals_eager_work(
    program: list[tuple[Function, int, int, int]],
) -> None:
    """Four variables, always bound anew: what nobody holds any more is overwritten."""

    def run(variables: list[torch.Tensor]) -> list[torch.Tensor]:
        variables = [v.clone() for v in variables]
        for step, a, b, target in program:
            variables[target] = step(variables[a], variables[b])
        return variables

    def start(seed: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return [torch.randn(4, 4, generator=generator) for _ in range(4)]

    inputs = start(0)
    graph, outputs = recorded(run, inputs)
    for seed in (1, 2):
        for tensor, value in zip(inputs, start(seed)):
            tensor.copy_(value)
        graph.replay()
        for ours, theirs in zip(outputs, run(start(seed))):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("no_gradients", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("pattern", ["M*M-", "MMM"])
def test_a_whole_model_decodes_in_a_graph(pattern: str, no_gradients: Callable[[], Any]) -> None:
    """Two texts go on for six tokens; each token's logits are those of its text without a cache."""
    model, texts = toy_model(pattern), [random_prompt(19, seed=0), random_prompt(11, seed=1)]
    stepper = Stepper(model, num_sequences=2, max_len=32)
    stepper.step({0: texts[0][:13], 1: texts[1][:5]})

    def step_inputs() -> tuple[torch.Tensor, MambaMetadata, AttentionMetadata]:
        ids = torch.tensor([text[n] for text, n in zip(texts, stepper.computed)])
        attention = stepper.attention_metadata({0: 1, 1: 1})
        mamba = stepper.mamba_metadata({0: 1, 1: 1}, decode=[0, 1])
        return ids, mamba, dataclasses.replace(attention, max_seq_len=32)

    def caches() -> list[torch.Tensor]:
        return tensors_in(stepper.caches)

    with no_gradients():
        ids, mamba, attention = inputs = step_inputs()
        kinds = {"M": mamba, "*": attention, "-": None}
        before = [cache.clone() for cache in caches()]
        graph, logits = recorded(
            lambda: model.compute_logits(model(ids, [kinds[k] for k in pattern], stepper.caches))
        )
        graph.poison_empty = True
        for cache, content in zip(caches(), before):  # the recorder does the work at capture, too
            cache.copy_(content)
        for _ in range(6):
            for captured, new in zip(tensors_in(inputs), tensors_in(step_inputs())):
                captured.copy_(new)
            graph.replay()
            for r, text in enumerate(texts):
                alone = logits_of(model, text[: stepper.computed[r] + 1])[-1]
                torch.testing.assert_close(logits[r], alone, rtol=1e-4, atol=1e-4)
                stepper.computed[r] += 1
