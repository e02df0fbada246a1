"""Numbers that mean "nobody", and rows that are nobody's."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch

from mamba_kernels import build_chunk_layout
from mamba_teach.cache.block_pool import BlockPool
from mamba_teach.faults.exhibit import Exhibit, Finding
from mamba_teach.faults.ghost_story import GhostStory
from mamba_teach.faults.state_step import step_with_one_token_each
from mamba_teach.faults.toy_model import mixers, remembering_model
from mamba_teach.model.metadata import MambaCache, MambaMetadata, MambaPrefill
from mamba_teach.request import Request

# The meaning of a sentinel ------------------------------------------------------------------------


def _null_is_live(original: Any) -> Any:
    def update(*args: Any) -> torch.Tensor:
        # With `src >= 0` for a guard, slot 0 is like any other. So it is in a pool with one more slot
        # in front, where every slot has the number of its neighbour.
        *inputs, pool, starts, src, dst, counts, dt_limit = args
        shifted = torch.cat([torch.zeros_like(pool[:1]), pool])
        y = original(*inputs, shifted, starts, src + 1, dst + 1, counts, dt_limit)
        pool.copy_(shifted[1:])
        return y

    return update


def _padded_with_null() -> Finding:
    return step_with_one_token_each(torch.tensor([[2], [0]], dtype=torch.int32), owned=[2])


GUARD_FOR_OLD_SENTINEL = Exhibit(
    name="guard-for-the-old-sentinel",
    title="Padding is 0 now; the guard asks for -1",
    mechanism=(
        "Rows of padding used to carry slot -1, and kernels left a row alone when its slot was "
        "negative. Then the block tables were padded with the null block, 0, and a guard here and "
        "there still tested for less than 0. To such a kernel block 0 is a state like any other: "
        "rows of padding read it, advance it and write it back."
    ),
    reported_in="vLLM PR 35431, PR 39064 and PR 33937",
    symptom="The null block, of which everybody believes that it is never written, is written.",
    before="live = (src >= 0) & (lengths > 0)  # (R,)",
    after="live = (src > 0) & (lengths > 0)  # (R,)",
    seam="mamba_kernels.state_update:_selective_state_update_torch",
    swap=_null_is_live,
    observe=_padded_with_null,
)


def _remapped(original: Any) -> Any:
    def update(*args: Any) -> torch.Tensor:
        *inputs, pool, starts, src, dst, counts, dt_limit = args
        src, dst = src % len(pool), dst % len(pool)
        return original(*inputs, pool, starts, src, dst, counts, dt_limit)

    return update


def _padded_with_minus_one() -> Finding:
    return step_with_one_token_each(torch.tensor([[2], [-1]], dtype=torch.int32), owned=[2])


SENTINEL_REMAPPED = Exhibit(
    name="sentinel-remapped",
    title="A sentinel made into a valid address",
    mechanism=(
        "An index of -1 would be out of bounds, so it was folded into the pool: index % pool, or "
        "simply the last row. That stops the crash and starts the damage, because the last row can "
        "be allocated like any other. From then on every row of padding writes a state that some "
        "request is going to read."
    ),
    reported_in="SGLang PR 36885 and vllm-gaudi PR 1431",
    symptom="The request that happens to own the last slot goes wrong under load.",
    before="src, dst = src % len(pool), dst % len(pool)",
    after="dst = torch.where(valid, dst_slots[:, i], 0).long().clamp(min=0)",
    seam="mamba_kernels.state_update:_selective_state_update_torch",
    swap=_remapped,
    observe=_padded_with_minus_one,
)

# The block that nobody may have -------------------------------------------------------------------


def _from_zero(original: Any) -> Any:
    def init(self: BlockPool, num_blocks: int) -> None:
        original(self, num_blocks)
        self._free = OrderedDict.fromkeys(range(num_blocks))

    return init


def _first_request() -> Finding:
    story = GhostStory()
    story.add(range(10))
    return story.tell()


NULL_BLOCK_HANDED_OUT = Exhibit(
    name="null-block-handed-out",
    title="The null block is given to a request",
    mechanism=(
        "Padding has to point somewhere, and the capture of a graph runs on padding alone. If the "
        "pool also hands that slot to a request, whatever capture and padding leave there is the "
        "request's first state; and where kernels leave the slot alone, its states are never kept."
    ),
    reported_in="SGLang PR 17404",
    symptom="One request in many, the first after the start, begins with garbage.",
    before="self._free = OrderedDict.fromkeys(range(num_blocks))",
    after="self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))",
    seam="mamba_teach.cache.block_pool:BlockPool.__init__",
    swap=_from_zero,
    observe=_first_request,
)

# Placeholders in a state --------------------------------------------------------------------------


def _as_long_as_padded(original: Any) -> Any:
    def mamba_chunk_scan(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        starts = kwargs["query_start_loc"].clone()
        starts[-1] = len(x)
        kwargs |= dict(query_start_loc=starts, layout=None)
        return original(x, *args, **kwargs)

    return mamba_chunk_scan


@torch.inference_mode()
def _state_after_a_padded_tail(placeholder: float) -> torch.Tensor:
    """State after one real token behind 16, in a row padded to three with ``placeholder``."""
    model = remembering_model()
    mixer = mixers(model)[0]
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, model.config.hidden_size, generator=generator)
    hidden[1:] = placeholder
    cache = MambaCache(
        conv=torch.randn(3, 3, model.config.conv_dim, generator=generator),
        ssm=torch.randn(3, 4, 16, 16, generator=generator),
    )
    starts, computed = torch.tensor([0, 1]).int(), torch.tensor([16]).int()
    row = MambaPrefill(
        query_start_loc=starts,
        num_computed_tokens=computed,
        src_slots=torch.tensor([1]).int(),
        dst_slots=torch.tensor([2]).int(),
        has_initial_state=computed > 0,
        layout=build_chunk_layout(starts, computed, 64),
    )
    mixer(hidden, MambaMetadata(0, None, row), cache)
    return cache.ssm[2]


def _two_placeholders() -> Finding:
    one, other = _state_after_a_padded_tail(0.5), _state_after_a_padded_tail(-2.0)
    if torch.equal(one, other):
        return Finding(False, "the state does not depend on what the row is padded with")
    distance = float((one - other).norm() / one.norm())
    return Finding(
        True, f"another placeholder, another state after the same token ({distance:.2f} relative)"
    )


PADDED_TAIL_FOLDED_IN = Exhibit(
    name="padded-tail-folded-in",
    title="Placeholders folded into the state",
    mechanism=(
        "To serve mixed rows with one shape, the one-token tail of a prompt was padded to the 1 + k "
        "tokens of a verify step. Attention can mask what it has read; a recurrence cannot take back "
        "what it has added. The prompt's path keeps only the state after the last token of the row, "
        "and the last tokens were placeholders."
    ),
    reported_in="vLLM PR 55178",
    symptom="Wrong answers to prompts whose last chunk is one token long.",
    before="starts[-1] = len(x)",
    after="query_start_loc=rows.query_start_loc,",
    seam="mamba_teach.model.mamba2:mamba_chunk_scan",
    swap=_as_long_as_padded,
    observe=_two_placeholders,
)

# Decode or prefill --------------------------------------------------------------------------------


def _by_length(original: Any) -> Any:
    def is_decode(self: Request) -> bool:
        return self.num_tokens - self.num_computed_tokens == 1

    return property(is_decode)


def _one_token_prompt() -> Finding:
    story = GhostStory()
    story.add([7])
    return story.tell()


DECODE_BY_LENGTH = Exhibit(
    name="decode-by-length",
    title="One token long, so it must be a decode",
    mechanism=(
        "Rows were sorted into prefills and decodes by their number of tokens. A decode row always "
        "has a state to go on from, so its path does not ask whether there is one. A prompt of a "
        "single token has none: it takes what the last tenant left in the slot."
    ),
    reported_in="vLLM PR 42430 and its successors, and PR 37303",
    symptom="Prompts of one token start from somebody's old state.",
    before="return self.num_tokens - self.num_computed_tokens == 1",
    after=(
        "return bool(self.output_token_ids) and self.num_computed_tokens == self.num_tokens - 1"
    ),
    seam="mamba_teach.request:Request.is_decode",
    swap=_by_length,
    observe=_one_token_prompt,
)
