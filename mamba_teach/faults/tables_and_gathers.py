"""Where a step reads and where it writes: block tables, columns, gathers.

The first three are one story, vLLM issue 39809: each hid behind the one before it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from mamba_teach.cache.columns import last_computed_column, last_scheduled_column
from mamba_teach.cache.specs import MambaSpec, cdiv
from mamba_teach.events import StateAccess
from mamba_teach.faults.exhibit import Exhibit, Finding
from mamba_teach.faults.ghost_story import GhostStory
from mamba_teach.model.metadata import MambaMetadata
from mamba_teach.runner.mamba_metadata import MambaMetadataBuilder, StatePlan
from mamba_teach.runner.step_rows import StepRows

# The table's width --------------------------------------------------------------------------------


def _without_scratch(original: Any) -> Any:
    def columns_for(self: MambaSpec, num_tokens: int) -> int:
        return cdiv(num_tokens, self.block_size)

    return columns_for


def _last_block_with_drafts() -> Finding:
    story = GhostStory(k=2, config=dict(max_model_len=32, num_blocks=20))
    story.add(range(20), steps=[(2, 2)])  # its last block is column 1; drafts go to 2 and 3
    return story.tell()


TABLE_WITHOUT_SCRATCH = Exhibit(
    name="table-without-scratch",
    title="A block table without the drafts' columns",
    mechanism=(
        "A step that checks k drafts writes 1 + k states, to the column of its last token and to k "
        "scratch columns behind it. The code that sized one of the tables counted the blocks of the "
        "longest sequence and forgot the scratch. It takes a request near the maximum, or a graph "
        "capture at full width, to notice."
    ),
    reported_in="vLLM issue 39809 / PR 41233 (the first of three)",
    symptom="A shape or index error as soon as a table of the right width meets the narrow one.",
    before="return cdiv(num_tokens, self.block_size)",
    after="return cdiv(num_tokens, self.block_size) + self.num_speculative_blocks",
    seam="mamba_teach.cache.specs:MambaSpec.columns_for",
    swap=_without_scratch,
    observe=_last_block_with_drafts,
)

# One slot where 1 + k are needed ------------------------------------------------------------------


def _one_slot(original: Any) -> Any:
    def gather_slots(
        table: torch.Tensor, table_rows: torch.Tensor, column: torch.Tensor, offsets: torch.Tensor
    ) -> torch.Tensor:
        slots = table[table_rows, column]  # (R,)
        # A kernel asks no shape. It reads entry `a - 1` of row `r` at address r * 1 + (a - 1), which
        # is row r + a - 1; this view says so, with null slots behind the last row.
        rows, width = len(slots), offsets.shape[1]
        return F.pad(slots, (0, width)).as_strided((rows, width), (1, 1)).clone()

    return gather_slots


def _two_requests_with_drafts() -> Finding:
    story = GhostStory(k=1)
    for start in (0, 40):
        story.add(range(start, start + 12), steps=[(1, 1), (1, 1)])
    return story.tell()


ONE_SLOT_GATHER = Exhibit(
    name="one-slot-gather",
    title="One slot gathered, 1 + k read",
    mechanism=(
        "The layer looked up one source and one destination slot per request and handed the kernel "
        "tensors of one column. The kernel writes column i for token i and reads column a - 1 when a "
        "tokens were kept. A kernel does not check shapes: beyond the only column it finds the next "
        "request's slot, or whatever lies behind the tensor."
    ),
    reported_in="vLLM issue 39809 / PR 41233 (the third of three)",
    symptom="A crash in the kernel, or requests that overwrite each other's states.",
    before="slots = table[table_rows, column]",
    after="return table[table_rows[:, None], column[:, None] + offsets]",
    seam="mamba_teach.runner.mamba_metadata:gather_slots",
    swap=_one_slot,
    observe=_two_requests_with_drafts,
)

# Source and destination in one tensor -------------------------------------------------------------


def _one_buffer(original: Any) -> Any:
    buffers: dict[tuple[int, ...], torch.Tensor] = {}

    def gather_slots(*args: torch.Tensor) -> torch.Tensor:
        slots = original(*args)
        return buffers.setdefault(tuple(slots.shape), slots).copy_(slots)

    return gather_slots


def _step_into_a_new_block() -> Finding:
    story = GhostStory()
    story.add(range(16), max_tokens=4)  # token 16 reads column 0 and writes column 1
    return story.tell()


ONE_TENSOR_FOR_BOTH = Exhibit(
    name="one-tensor-for-both",
    title="The gather returns its one tensor twice",
    mechanism=(
        "A helper returned the slots to read and the slots to write, and both names meant the same "
        "tensor. Most steps read and write the same column, so most steps are right. The first step "
        "into a new block reads the block that it is about to write, which holds nothing yet."
    ),
    reported_in="vLLM PR 41233 (in review, before it was merged)",
    symptom="Every request is right up to its first block boundary and wrong behind it.",
    before="return buffers.setdefault(tuple(slots.shape), slots).copy_(slots)",
    after="dst_slots = gather_slots(table, rows.table_rows, plan.write_to, offsets)",
    seam="mamba_teach.runner.mamba_metadata:gather_slots",
    swap=_one_buffer,
    observe=_step_into_a_new_block,
)

# An index from the wrong step ---------------------------------------------------------------------


def _this_steps_column(original: Any) -> Any:
    def source_column(rows: StepRows, block_size: int) -> torch.Tensor:
        return last_scheduled_column(rows.seq_lens, block_size)

    return source_column


def _drafts_then_fewer() -> Finding:
    story = GhostStory(k=5, config=dict(mamba_cache_mode="align"))
    # Tokens 9 .. 14 go to columns 0 .. 5 and all are kept. Then one draft: tokens 15 and 16, the last
    # of them in column 1. The state lies in column 0 + 5; column 1 + 5 nobody allocated.
    story.add(range(9), max_tokens=16, steps=[(5, 5), (1, 1)])
    return story.tell()


INDEX_PAST_ALLOCATION = Exhibit(
    name="index-past-allocation",
    title="This step's column, last step's count",
    mechanism=(
        "The state to read is a - 1 columns behind the one where the previous step began to write. "
        "Here the count of the previous step was added to the column of the current one. While both "
        "steps are in one block that is the same number. When the current step reaches into the next "
        "block with fewer drafts, the sum points behind the last allocated block."
    ),
    reported_in="vLLM issue 41884 / PR 41898",
    symptom="An index past the request's blocks: the null block, or an illegal memory access.",
    before="return last_scheduled_column(rows.seq_lens, block_size)",
    after="return torch.where(anchors >= 0, anchors, last_computed)",
    seam="mamba_teach.runner.mamba_metadata:source_column",
    swap=_this_steps_column,
    observe=_drafts_then_fewer,
)

# The window's own anchor --------------------------------------------------------------------------


def _window_where_n_points(original: Any) -> Any:
    def update_block_table(
        self: MambaMetadataBuilder,
        plan: StatePlan,
        table: torch.Tensor,
        num_padded: int | None = None,
    ) -> tuple[MambaMetadata, list[StateAccess]]:
        metadata, accesses = original(self, plan, table, num_padded)
        if metadata.decode is not None:
            rows, decodes = plan.rows, plan.rows.num_decodes
            column = last_computed_column(rows.num_computed, self.spec.block_size).clamp(min=0)
            metadata.decode.conv_src_slots[:decodes] = table[rows.table_rows, column][:decodes]
        return metadata, accesses

    return update_block_table


def _rejection_across_a_boundary() -> Finding:
    story = GhostStory(k=3)
    # Tokens 14 .. 17 are written from column 1 on; one is kept. Token 14 belongs to column 0.
    story.add(range(14), steps=[(3, 0), (3, 3)])
    return story.tell()


WINDOW_THROUGH_WRONG_ANCHOR = Exhibit(
    name="window-through-wrong-anchor",
    title="The state found, the window not",
    mechanism=(
        "The previous step's column was remembered for the SSM state; the convolution's window was "
        "still looked up at the column of the last computed token. After a rejection across a block "
        "boundary the two differ: the step wrote its window to column 1, and the tokens that count "
        "end in column 0, where an older window lies. The filter sees inputs that are one token or more "
        "too old, which no test of short answers notices."
    ),
    reported_in=(
        "no thread known to us; found by simulating what vLLM PR 41233 merged (979 of 9000 reads)"
    ),
    symptom="Slightly wrong outputs after some rejections near a block boundary, and no error.",
    before="column = last_computed_column(rows.num_computed, self.spec.block_size).clamp(min=0)",
    after="conv_src_slots=self.conv_src_slots.refill(src_slots[:, 0], rows)",
    seam="mamba_teach.runner.mamba_metadata:MambaMetadataBuilder.update_block_table",
    swap=_window_where_n_points,
    observe=_rejection_across_a_boundary,
)
