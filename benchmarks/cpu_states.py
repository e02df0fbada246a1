"""What a request's states take, by cache mode; and replay against slots, in bytes and in time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cpu_model import CONFIG, random_prompts
from cpu_timing import Clock, compare, in_turns

from mamba_teach import Engine, EngineConfig, SamplingParams, load_model
from mamba_teach.cache.specs import MambaSpec, make_layer_specs
from mamba_teach.events import TokenSampled
from mamba_teach.spec_decode.scripted_proposer import ScriptedProposer

LENGTHS = (512, 2048, 8192)
DRAFTS = (0, 3)
VERIFY_STEPS, PROMPT, ROWS = 24, 64, 4


def memory() -> list[dict[str, Any]]:
    """Bytes of the Mamba layers' pages (and rings) that a request holds at most, from the specs."""
    lines = []
    layers = CONFIG.pattern.count("M")
    for k in DRAFTS:
        for mode in ("none", "align", "all"):
            for state in ("slots", "replay"):
                line: dict[str, Any] = {"mode": mode, "k": k, "spec_state": state}
                for length in LENGTHS:
                    config = EngineConfig(
                        max_model_len=length, num_speculative_tokens=k, spec_state=state,
                        enable_prefix_caching=mode != "none", mamba_cache_mode=mode, device="cpu",
                    )  # fmt: skip
                    spec = next(
                        s
                        for s in make_layer_specs(CONFIG, config, mode).values()
                        if isinstance(s, MambaSpec)
                    )
                    ring = 0 if spec.ring is None else spec.ring.num_bytes
                    content = spec.max_blocks_for(length) * spec.content_bytes + ring
                    line[f"bytes_{length}"] = layers * content
                lines.append(line)
    return lines


def step_bytes(num_tokens: int, accepted: float, capacity: int = 16) -> dict[str, float]:
    """State bytes per Mamba layer and verify step of ``num_tokens`` tokens, windows left out.

    Slots read one state and write one per token. Replay reads the checkpoint and the pending inputs (on
    average half a ring), appends the step's, and writes a state when the ring is full: every
    ``capacity / accepted`` steps.
    """
    state = CONFIG.mamba_num_heads * CONFIG.mamba_head_dim * CONFIG.ssm_state_size * 4
    entry = 4 * (
        CONFIG.d_inner + CONFIG.n_groups * CONFIG.ssm_state_size + 2 * CONFIG.mamba_num_heads
    )
    slots = state * (1 + num_tokens)
    replay = state * (1 + accepted / capacity) + entry * (capacity / 2 + num_tokens)
    return {"slots": slots, "replay": replay, "slots_over_replay": round(slots / replay, 2)}


def replay_time(folder: Path, rounds: int, clock: str) -> list[dict[str, Any]]:
    """Decode of :data:`ROWS` rows whose drafts are all right, slots against replay."""
    model = load_model(folder)
    prompts = random_prompts(ROWS, PROMPT, 5)
    longest = VERIFY_STEPS * (1 + max(DRAFTS)) + 8
    plain = Engine(model, EngineConfig(enable_prefix_caching=False, device="cpu"))
    outputs = plain.generate(prompts, SamplingParams(max_tokens=longest, ignore_eos=True))
    said = {f"r{i}": list(output.token_ids) for i, output in enumerate(outputs)}
    lines = []
    for k in DRAFTS:

        def turn_of(state: str, k: int = k) -> Any:
            def script(request_id: str, tokens: Any, most: int) -> list[int]:
                return said[request_id][len(tokens) - PROMPT :][: min(k, most)]

            def turn(number: int, watch: Clock) -> None:
                config = EngineConfig(
                    enable_prefix_caching=False, num_speculative_tokens=k, spec_state=state,
                    device="cpu", max_model_len=512,
                )  # fmt: skip
                proposer = ScriptedProposer(script) if k else None
                engine = Engine(model, config, proposer=proposer)
                for prompt in prompts:
                    engine.add_request(prompt, SamplingParams(max_tokens=longest, ignore_eos=True))
                engine.step()
                engine.step()
                with watch:
                    for _ in range(VERIFY_STEPS):
                        engine.step()
                drafted = sum(isinstance(e, TokenSampled) for e in engine.events)
                expected = ROWS * (1 + (1 + k) * (VERIFY_STEPS + 1))
                assert drafted == expected, (
                    f"{drafted} tokens instead of {expected}: a draft was wrong"
                )

            return turn

        turns = in_turns({state: turn_of(state) for state in ("replay", "slots")}, rounds)
        lines += [{"k": k} | line for line in compare(turns, ROWS * (1 + k) * VERIFY_STEPS, clock)]
    return lines
