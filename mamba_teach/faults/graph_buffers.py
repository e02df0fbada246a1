"""Memory that stays: what goes wrong between a buffer, its padding and the graph that reads it."""

from __future__ import annotations

from typing import Any

import torch

from mamba_teach.cache.groups import CacheGroup
from mamba_teach.config import EngineConfig
from mamba_teach.faults.exhibit import Exhibit, Finding
from mamba_teach.faults.ghost_story import GhostStory
from mamba_teach.faults.state_step import step_with_one_token_each
from mamba_teach.model.metadata import MambaDecode
from mamba_teach.runner.attention_metadata import AttentionMetadataBuilder
from mamba_teach.runner.decode_buffers import DecodeBuffers, ReplaySlots
from mamba_teach.runner.persistent_buffer import PersistentBuffer

# Requests and tokens ------------------------------------------------------------------------------


def _rows_by_tokens(original: Any) -> Any:
    def refill(
        self: DecodeBuffers,
        query_start_loc: torch.Tensor,
        src_slots: torch.Tensor,
        dst_slots: torch.Tensor,
        num_accepted_tokens: torch.Tensor | None,
        num_padded: int | None = None,
        replay: ReplaySlots | None = None,
    ) -> MambaDecode:
        rows = int(query_start_loc[-1])
        return original(
            self, query_start_loc, src_slots, dst_slots, num_accepted_tokens, rows, replay
        )

    return refill


def _full_batch_with_drafts() -> Finding:
    story = GhostStory(k=2, config=dict(max_num_seqs=2))
    for start in (0, 40):
        story.add(range(start, start + 10), steps=[(2, 2)] * 3)
    return story.tell()


BUFFERS_CUT_BY_TOKENS = Exhibit(
    name="buffers-cut-by-tokens",
    title="A row per request, cut by tokens",
    mechanism=(
        "Index buffers have a row per request. They were cut to the number of tokens of the step, "
        "which is the same number for as long as every request decodes one token. With k drafts "
        "there are 1 + k times as many tokens, and the cut takes rows that mean nothing, or more "
        "rows than there are."
    ),
    reported_in="vLLM issue 39809 / PR 41233 (the second of three)",
    symptom="A shape error in the first batch with drafts, or a stale tail that is read as rows.",
    before="rows = int(query_start_loc[-1])",
    after="rows = len(src_slots) if num_padded is None else num_padded",
    seam="mamba_teach.runner.decode_buffers:DecodeBuffers.refill",
    swap=_rows_by_tokens,
    observe=_full_batch_with_drafts,
)

# Groups -------------------------------------------------------------------------------------------


def _one_set_for_all(original: Any) -> Any:
    sets: dict[tuple[int, int], DecodeBuffers] = {}

    def decode_buffers(
        group: str, max_num_seqs: int, k: int, num_slots: int, device: torch.device
    ) -> DecodeBuffers:
        made = original(group, max_num_seqs, k, num_slots, device)
        return sets.setdefault((max_num_seqs, k), made)

    return decode_buffers


def _two_mamba_groups() -> Finding:
    story = GhostStory("MMMM**")
    story.add(range(10), max_tokens=4)
    return story.tell()


GROUPS_SHARE_BUFFERS = Exhibit(
    name="groups-share-buffers",
    title="Two groups, one set of buffers",
    mechanism=(
        "Layers with equal specs are cut into groups, each with a block table of its own. The "
        "metadata of the second group was made from that of the first, and kept tensors that lay in "
        "the first one's buffers. Whoever fills such a buffer last decides what all groups read: the "
        "layers of one of them work on the other's slots."
    ),
    reported_in="vLLM issue 34865 / PR 34874",
    symptom="Garbage tokens or NaN from models with many Mamba layers, only in graphs or decoding.",
    before="return sets.setdefault((max_num_seqs, k), original(group, max_num_seqs, k, device))",
    after="self.buffers = DecodeBuffers(group.name, config.max_num_seqs, k, slots, device)",
    seam="mamba_teach.runner.mamba_metadata:DecodeBuffers",
    swap=_one_set_for_all,
    observe=_two_mamba_groups,
)

# Front and tail -----------------------------------------------------------------------------------


def _tail(original: Any) -> Any:
    def refill(
        self: PersistentBuffer, values: torch.Tensor, num_rows: int | None = None
    ) -> torch.Tensor:
        front = original(self, values, num_rows)
        return self.tensor[len(self.tensor) - len(front) :]

    return refill


def _small_batch_in_a_graph() -> Finding:
    story = GhostStory(config=dict(max_num_seqs=4, graphs="record"))
    for start in (0, 40):
        story.add(range(start, start + 10), max_tokens=4)
    return story.tell()


TAIL_CAPTURED = Exhibit(
    name="tail-captured",
    title="Filled at the front, captured at the tail",
    mechanism=(
        "A graph of two requests is captured on a slice of a buffer for four. The slice was the last "
        "two rows; every step fills the first two. No address ever moves, so nothing looks wrong to "
        "the graph: it reads, faithfully, the rows that nobody fills. Only the largest graph, whose "
        "slice is the whole buffer, is right."
    ),
    reported_in="SGLang PR 32555",
    symptom="Small batches decode from the padding; full batches are right.",
    before="return self.tensor[len(self.tensor) - len(front) :]",
    after="return self.tensor[:num_rows]",
    seam="mamba_teach.runner.persistent_buffer:PersistentBuffer.refill",
    swap=_tail,
    observe=_small_batch_in_a_graph,
)

# Rows that nobody has -----------------------------------------------------------------------------


def _tail_as_it_was(original: Any) -> Any:
    def refill(
        self: PersistentBuffer, values: torch.Tensor, num_rows: int | None = None
    ) -> torch.Tensor:
        self.tensor[tuple(slice(size) for size in values.shape)].copy_(values)
        return self.tensor[: len(values) if num_rows is None else num_rows]

    return refill


def _dummy_step_behind_a_real_one() -> Finding:
    buffers = DecodeBuffers("mamba 0", 3, 0, 1, torch.device("cpu"))
    starts = torch.arange(4, dtype=torch.int32)
    slots = torch.tensor([[1], [2], [3]], dtype=torch.int32)
    buffers.refill(starts, slots, slots, None)
    # Then two requests end, their blocks are given to others, and one row is padded to three. The
    # rows of padding run with a token each, as in a step that only keeps other machines company.
    rows = buffers.refill(starts[:2], slots[:1], slots[:1], None, num_padded=3)
    return step_with_one_token_each(rows.ssm_src_slots, owned=[1])


STALE_ROW = Exhibit(
    name="stale-row-under-padding",
    title="A row of padding with somebody's old slot",
    mechanism=(
        "A small batch is padded to the size of its graph. The rows behind the last request were not "
        "cleared, so they held the block ids of requests that sat there before. The dummy rows then "
        "did what rows do: they advanced the states in those blocks, which by now belonged to "
        "somebody else."
    ),
    reported_in="vLLM PR 37728",
    symptom="A running request's state moves without any step of its own.",
    before="# rows behind the last request stay as an earlier step left them",
    after="self.tensor[len(values) if whole else 0 :] = self.padding",
    seam="mamba_teach.runner.persistent_buffer:PersistentBuffer.refill",
    swap=_tail_as_it_was,
    observe=_dummy_step_behind_a_real_one,
)

# Width at capture, width at run time --------------------------------------------------------------


def _rounded_down(original: Any) -> Any:
    def init(
        self: AttentionMetadataBuilder,
        index: int,
        group: CacheGroup,
        config: EngineConfig,
        device: torch.device,
    ) -> None:
        original(self, index, group, config, device)
        width = config.max_model_len // self.spec.block_size
        name, rows = self.block_table.name, config.max_num_seqs
        self.block_table = PersistentBuffer(
            name, rows, width, padding=0, device=device, dtype=torch.int64
        )

    return init


def _into_the_last_block() -> Finding:
    story = GhostStory("M*", config=dict(max_model_len=40, graphs="record"))
    story.add(range(32), max_tokens=4)  # its first decode needs the third page
    return story.tell()


CAPTURED_TOO_NARROW = Exhibit(
    name="captured-too-narrow",
    title="Captured for fewer columns than a request has",
    mechanism=(
        "The graph's copy of the block table was as wide as the longest prompt's blocks, by a "
        "formula of its own. The first token generated behind a full-length prompt needs one more. "
        "Two formulas for one number: they agree on all the sizes that somebody tried."
    ),
    reported_in="nano-vllm PR 258",
    symptom="A shape error in the first decode step of the longest request.",
    before="width = config.max_model_len // self.spec.block_size",
    after='buffer("block_table", rows, group.spec.columns_for(config.max_model_len))',
    seam="mamba_teach.runner.attention_metadata:AttentionMetadataBuilder.__init__",
    swap=_rounded_down,
    observe=_into_the_last_block,
)
