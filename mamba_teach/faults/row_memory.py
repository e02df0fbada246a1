"""What is remembered of a request from step to step, and what of its predecessor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F

from mamba_teach import Engine, EngineConfig, SamplingParams
from mamba_teach.faults.exhibit import Exhibit, Finding
from mamba_teach.faults.ghost_story import GhostStory
from mamba_teach.faults.toy_model import remembering_model
from mamba_teach.runner.state_index import StateIndex
from mamba_teach.scheduler import ScheduledRow

# Counts and rows ----------------------------------------------------------------------------------


def _permuted_again(original: Any) -> Any:
    rows_before: WeakKeyDictionary[StateIndex, list[str]] = WeakKeyDictionary()

    def preprocess_mamba(
        self: StateIndex, rows: Sequence[ScheduledRow]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        anchors, counts = original(self, rows)
        if counts is None:
            return anchors, counts
        ids, before = [row.request.request_id for row in rows], rows_before.get(self, [])
        prev_positions = [before.index(r) if r in before else i for i, r in enumerate(ids)]
        rows_before[self] = ids
        padded = F.pad(counts, (0, len(before)), value=1)  # rows behind the last hold 1
        return anchors, padded[prev_positions]

    return preprocess_mamba


def _one_leaves_one_comes() -> Finding:
    story = GhostStory(k=2)
    story.add(range(0, 5), max_tokens=4, steps=[(2, 2)])  # ends with this verify step
    story.add(range(20, 25), steps=[(2, 0), (2, 2)])
    story.add(range(40, 45), steps=[(2, 1), (2, 2)])
    story.add(range(60, 65), at_step=2)
    return story.tell()


COUNTS_PERMUTED_TWICE = Exhibit(
    name="counts-permuted-twice",
    title="Accepted counts moved with their rows, twice",
    mechanism=(
        "How many tokens a request kept was stored by row of the batch. When a request leaves, the "
        "host closes the gap by moving rows, counts included; the device then gathered the counts "
        "by each row's previous position, a second time. A request reads another one's count, and "
        "with it the state after a token that was never kept."
    ),
    reported_in="vLLM PR 53919, PR 51599, PR 45100 and PR 53613; vllm-ascend PR 13863",
    symptom="Wrong tokens under load, when requests come and go; never with one request.",
    before="return anchors, padded[prev_positions]",
    after="counts = [self.num_accepted_tokens.get(request_id, 1) for request_id in ids]",
    seam="mamba_teach.runner.state_index:StateIndex.preprocess_mamba",
    swap=_permuted_again,
    observe=_one_leaves_one_comes,
)

# An anchor without blocks -------------------------------------------------------------------------


def _remember_everybody(original: Any) -> Any:
    def cleanup_mamba_state_idx(self: StateIndex, request_ids: Iterable[str]) -> None:
        pass

    return cleanup_mamba_state_idx


def _preempted_and_resumed() -> Finding:
    story = GhostStory(k=3)
    story.add(range(30), steps=[(3, 0)])  # tokens 30 .. 33 go to columns 2 .. 5; one is kept

    def take_its_blocks(engine: Engine, step: int) -> None:
        if step == 2:
            engine.scheduler.preempt(engine.scheduler.running[0])

    return story.tell(take_its_blocks)


ANCHOR_OUTLIVES_BLOCKS = Exhibit(
    name="anchor-outlives-blocks",
    title="The anchor survives the preemption",
    mechanism=(
        "The column at which a request's last step began to write was forgotten when the request "
        "finished, but not when it was preempted and resumed. It comes back with other blocks, "
        "starts behind a prefix hit, and looks for its state where it lay in its former life: a "
        "column that is new, or not there at all."
    ),
    reported_in="vLLM PR 41233 (its clean-up covers finished, preempted and resumed requests)",
    symptom="Requests that were preempted go on from an empty state.",
    before="# only requests that finish are forgotten",
    after="self.mamba_state_idx.pop(request_id, None)",
    seam="mamba_teach.runner.state_index:StateIndex.cleanup_mamba_state_idx",
    swap=_remember_everybody,
    observe=_preempted_and_resumed,
)

# A slot's last tenant -----------------------------------------------------------------------------


def _whatever_lies_there(original: Any) -> Any:
    def initial_states(
        ssm_state: torch.Tensor, src_slots: torch.Tensor, has_initial_state: torch.Tensor
    ) -> torch.Tensor:
        return ssm_state[src_slots.clamp(min=0)].float()

    return initial_states


def _two_tenants() -> Finding:
    model = remembering_model()
    settings = EngineConfig(
        enable_prefix_caching=False, max_num_seqs=1, num_blocks=2, max_model_len=64, device="cpu"
    )
    params = SamplingParams(max_tokens=8)
    first, second = list(range(40)), [20, 21, 22]
    (alone,) = Engine(model, settings).generate([second], params)
    engine = Engine(model, settings)
    _, behind = engine.generate([first, second], params)
    if behind.token_ids == alone.token_ids:
        return Finding(False, "the second tenant says what it says alone", tuple(engine.events))
    said, expected = list(behind.token_ids), list(alone.token_ids)
    return Finding(
        True, f"{behind.request_id} said {said}; alone it says {expected}", tuple(engine.events)
    )


SLOT_NOT_CLEARED = Exhibit(
    name="slot-not-cleared",
    title="The new tenant inherits the old state",
    mechanism=(
        "A recurrent state is read before it is written. Keys of a former tenant are never looked "
        "at, so an attention block can be handed on as it is; a state block cannot. Unless it is "
        "cleared, or the kernel is told that the sequence starts here, the first chunk of a prompt "
        "goes on from the end of a stranger's text."
    ),
    reported_in="vLLM PR 56524",
    symptom="The first answers after the start are right; later ones depend on who came before.",
    before="return ssm_state[src_slots.clamp(min=0)].float()",
    after="return torch.where(continues, ssm_state[src_slots.clamp(min=0)].float(), 0)",
    seam="mamba_kernels.chunk_scan:_initial_states",
    swap=_whatever_lies_there,
    observe=_two_tenants,
)
