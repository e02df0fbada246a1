"""Toy models, and what they would say if nobody served them cleverly."""

from __future__ import annotations

from functools import cache

import torch
from model.stepper import Stepper
from model.test_recurrence import Reference

from mamba_teach import Engine, EngineConfig, HybridModel, ModelConfig, SamplingParams
from mamba_teach.events import RowScheduled, StateAccess, StateCopied
from mamba_teach.model.hybrid import initialize
from mamba_teach.model.metadata import MambaCache, uncached_step

NEAR_TIE = 1e-4  # logits closer than this may be ordered either way by rounding


def toy_config(pattern: str = "M*M-", **changes: object) -> ModelConfig:
    """Hidden 32, inner 64, 4 heads x 16, state 16, 2 groups: a Mamba page is 16 tokens of attention."""
    sizes: dict[str, object] = dict(
        vocab_size=64, hidden_size=32, pattern=pattern, mamba_num_heads=4, mamba_head_dim=16,
        ssm_state_size=16, n_groups=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        intermediate_size=48,
    )  # fmt: skip
    return ModelConfig(**(sizes | changes))


@cache
def toy_model(pattern: str = "M*M-", seed: int = 0, **changes: object) -> HybridModel:
    """Random weights with a spread of logits that makes near-ties rare.

    With ``mtp_pattern="*-"`` it has an MTP head, and the same trunk as without.
    """
    model = HybridModel(toy_config(pattern, **changes))
    initialize(model, seed)
    with torch.no_grad():
        model.lm_head.weight.mul_(4.0)
        for name, parameter in model.named_parameters():
            if name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight")):
                parameter.mul_(3.0)  # states and keys must matter for what is said
    return model


@torch.no_grad()
def logits_of(model: HybridModel, token_ids: list[int]) -> torch.Tensor:
    """``(len, vocab)`` logits of a text in one go, without any cache."""
    metadata, caches = uncached_step(model.config, [len(token_ids)])
    return model.compute_logits(model(torch.tensor(token_ids), metadata, caches))


def greedy_gap(model: HybridModel, prompt: list[int], output: list[int]) -> float:
    """By how much the worst token of ``output`` missed being the most likely one.

    0 for an exact greedy continuation; anything above :data:`NEAR_TIE` is a wrong token.
    """
    logits = logits_of(model, [*prompt, *output])[len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
    return float((logits.max(-1).values - chosen).max())


def random_prompt(length: int, seed: int, vocab: int = 64) -> list[int]:
    """The same tokens for the same seed, on every machine."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab, (length,), generator=generator).tolist()


@cache
def cold_tokens(
    model: HybridModel, prompt: tuple[int, ...], max_tokens: int, max_model_len: int = 128
) -> list[int]:
    """What our engine says to one request alone: no caching, no drafts. The yardstick."""
    config = EngineConfig(
        enable_prefix_caching=False, max_num_seqs=1, max_model_len=max_model_len, device="cpu"
    )
    output = Engine(model, config).generate([prompt], SamplingParams(max_tokens=max_tokens))[0]
    return list(output.token_ids)


def assert_says_what_cold_says(
    model: HybridModel, prompt: list[int], tokens: list[int], max_model_len: int = 128
) -> None:
    """Greedy tokens equal those of a request alone; an order that only rounding decides is free."""
    expected = cold_tokens(model, tuple(prompt), len(tokens), max_model_len)
    if tokens != expected:
        assert len(tokens) == len(expected)
        gap = greedy_gap(model, prompt, tokens)
        assert gap <= NEAR_TIE, f"{tokens} instead of {expected}, by a gap of {gap}"


def served_states(
    engine: Engine, request_id: str, num_tokens: int
) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """A request's window ``(W - 1, conv_dim)`` and state after ``num_tokens``, by Mamba layer.

    Found through the log alone: wherever its last step wrote, or copied, just that state.
    """
    found = {}
    for group, of_group in enumerate(engine.cache.groups):
        if of_group.spec.kind != "mamba":
            continue
        access, copied_to = None, set()
        for event in engine.events:
            if isinstance(event, RowScheduled) and event.request_id == request_id:
                kind, copied_to = event.kind, set()
            elif getattr(event, "group", None) != group or event.request_id != request_id:
                continue
            elif isinstance(event, StateAccess):
                access = event
            elif isinstance(event, StateCopied):
                copied_to.add(event.dst)
        assert access is not None, f"{request_id} has run no step"
        slot, offset = next((s, i) for i, (s, n) in enumerate(access.writes) if n == num_tokens)
        if kind == "prefill":
            window, offset = slot, 0
        else:  # one window per step, where the step began to write
            window = access.writes[0][0]
        if window in copied_to:
            slot, offset = window, 0  # the boundary state was brought home to that very column
        for layer in of_group.layers:
            cache = engine.runner.caches[layer]
            width = engine.model.config.conv_kernel - 1
            found[layer] = cache.conv[window, offset : offset + width], cache.ssm[slot]
    return found


def assert_states_are_exact(engine: Engine, request_id: str, tokens: list[int]) -> None:
    """A request's windows and states after ``tokens`` are those of a model that nobody serves."""
    exact = exact_states(engine.model, tuple(tokens))
    for layer, found in served_states(engine, request_id, len(tokens)).items():
        for ours, theirs in zip(found, exact[layer]):
            torch.testing.assert_close(ours.to(theirs.dtype), theirs, rtol=1e-4, atol=2e-5)


@cache
@torch.no_grad()
def exact_states(
    model: HybridModel, tokens: tuple[int, ...]
) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Windows and states after ``tokens``, by Mamba layer.

    Those of the first layer, whose inputs are known without running the model, from the float64
    recurrence; the others from one pass from scratch with hand-made caches.
    """
    stepper = Stepper(model, max_len=len(tokens))
    stepper.run(list(tokens), [len(tokens)])
    states = {
        layer: (cache.conv[1], cache.ssm[1])
        for layer, cache in enumerate(stepper.caches)
        if isinstance(cache, MambaCache)
    }
    if 0 in states:
        mixer = model.model.layers[0].mixer
        weights = {k: v.double().numpy() for k, v in mixer.state_dict().items()}
        reference = Reference(model.config, weights)
        inputs = model.model.layers[0].norm(model.model.embeddings(torch.tensor(tokens)))
        for u in inputs.double().numpy():
            reference.step(u)
        states[0] = torch.tensor(reference.window), torch.tensor(reference.h)
    return states
