"""What is kept under which name, for how long, and who finds it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mamba_teach import Engine, EngineConfig, GhostModel, SamplingParams
from mamba_teach.cache.block_pool import NULL_BLOCK_ID, BlockKey
from mamba_teach.cache.coordinator import CacheCoordinator
from mamba_teach.cache.managers import HashList, MambaManager
from mamba_teach.cache.mode import CacheMode
from mamba_teach.events import BlockPublished
from mamba_teach.faults.exhibit import Exhibit, Finding
from mamba_teach.faults.ghost_story import WHEN_IDLE, GhostStory
from mamba_teach.faults.toy_model import remembering_model
from mamba_teach.request import Request
from mamba_teach.scheduler import Scheduler


def _hits(story: GhostStory, least: int) -> Finding:
    """Tell a story and look at the cached tokens of everybody but the first.

    Args:
        least: tokens that each of them should have found.
    """
    finding = story.tell()
    cached = [output.num_cached_tokens for rid, output in story.outputs.items() if rid != "r0"]
    if finding.symptom_seen or all(count >= least for count in cached):
        return finding
    message = f"cached tokens of the later requests: {cached}; {least} are the same for all"
    return Finding(True, message, finding.events)


# A name with an old content ------------------------------------------------------------------------


def _none_inside(original: Any) -> Any:
    def boundaries(n: int, seq_len: int, block_size: int) -> Sequence[int]:
        return ()

    return boundaries


def _hit_a_block_that_drafts_filled() -> Finding:
    prompt = list(range(13))
    text = prompt + GhostModel("M").continuation(prompt, 3)
    story = GhostStory(k=3)
    # Tokens 13 .. 16 leave their states in columns 1 .. 4, all are kept, block 0 is complete. What
    # it holds is the state at the end of the prompt.
    story.add(prompt, steps=[(3, 3)])
    story.add([*text, 50, 51], at_step=WHEN_IDLE)
    return story.tell()


WRONG_STATE_PUBLISHED = Exhibit(
    name="wrong-state-published",
    title="A block filled by drafts, published with an older state",
    mechanism=(
        "A verify step writes its states to the last column and the scratch behind it. When its "
        "accepted tokens complete an earlier block, nobody writes that block again: it still holds "
        "the state with which it was left. It was hashed all the same, under all of its tokens. The "
        "request itself is right to its end; the next one that shares the prefix is not."
    ),
    reported_in=(
        "no thread known to us; found by simulating what vLLM PR 41233 merged (300 of 300 traces)"
    ),
    symptom="Only prefix hits are wrong, and only on text that was generated with drafts.",
    before="ends = ()",
    after="ends = boundaries(n, n + accepted, spec.block_size) if row.num_drafts else ()",
    seam="mamba_teach.runner.state_index:boundaries",
    swap=_none_inside,
    observe=_hit_a_block_that_drafts_filled,
)

# A name before there is a content ------------------------------------------------------------------


def _when_allocated(original: Any) -> Any:
    def admit(
        self: CacheCoordinator, request: Request, hit: int, num_tokens: int, budget: int
    ) -> bool:
        admitted = original(self, request, hit, num_tokens, budget)
        for manager in self.managers if admitted else ():
            hashes, end = self._hashes(request), hit + num_tokens
            for column, block in manager.publish(request.request_id, hashes, hit, end, 0):
                self._emit(BlockPublished(request.request_id, manager.group, column, block))
        return admitted

    return admit


def _twins_in_one_step() -> Finding:
    # The ghost computes one row after the other and would find the state there in time. Real kernels
    # read all initial states first.
    settings = EngineConfig(block_size=16, max_model_len=64, device="cpu")
    engine = Engine(remembering_model(), settings)
    one, other = engine.generate([list(range(40))] * 2, SamplingParams(max_tokens=8))
    if one.token_ids == other.token_ids:
        return Finding(False, "twins say the same", tuple(engine.events))
    message = (
        f"r1 hit {other.num_cached_tokens} tokens of r0 in the step that was to write them, and said "
        f"{list(other.token_ids)} instead of {list(one.token_ids)}"
    )
    return Finding(True, message, tuple(engine.events))


PUBLISHED_AT_ALLOCATION = Exhibit(
    name="published-at-allocation",
    title="Published before it is written",
    mechanism=(
        "Blocks got their hash when they were allocated, before the step that fills them. For keys "
        "that is harmless: a step writes the keys of all its tokens before anybody attends to them. "
        "A state is read at the start of the step and written at its end. A second request with the "
        "same prompt, let in in the same step, hit the first one's block and read what was there "
        "before."
    ),
    reported_in="vLLM PR 29387",
    symptom="Of equal prompts that arrive together, one is answered differently.",
    before="manager.publish(request.request_id, hashes, hit, end, 0)  # in admit()",
    after="manager.publish(rid, hashes, n, n_after, num_drafts)",
    seam="mamba_teach.cache.coordinator:CacheCoordinator.admit",
    swap=_when_allocated,
    observe=_twins_in_one_step,
)

# Checkpoints that nobody finds --------------------------------------------------------------------


def _wherever_the_budget_ends(original: Any) -> Any:
    def tokens_for(self: Scheduler, request: Request, n: int, budget: int) -> int:
        end = min(n + budget, request.num_tokens + len(request.draft_token_ids))
        return end - n

    return tokens_for


def _one_preface_four_questions() -> Finding:
    story = GhostStory(
        "M*", config=dict(mamba_cache_mode="align", max_num_batched_tokens=50, max_model_len=128)
    )
    preface = list(range(64))
    for i in range(5):
        question = [70 + i, 80 + i, 90 - i] * 3
        story.add(preface + question, max_tokens=2, at_step=i * WHEN_IDLE)
    return _hits(story, 64)


CHECKPOINT_SHIFTED = Exhibit(
    name="checkpoint-shifted",
    title="The checkpoint moves, and the hit rate is 0",
    mechanism=(
        "In mode align a state is kept where a chunk of the prompt ends, and found again only if "
        "that is a block boundary inside the part that prompts share. The chunk's end moved, with "
        "the budget or the length of something in front: now it lies off the grid, or among tokens "
        "that are this request's alone. Every state is right, and none is ever found."
    ),
    reported_in="vLLM 45238 (52 of 64 requests hit; with a shift of 100 tokens none)",
    symptom="No error and no wrong token: the cache is as good as switched off.",
    before="aligned = end  # wherever the budget ends",
    after="aligned = end // block_size * block_size",
    seam="mamba_teach.scheduler:Scheduler._tokens_for",
    swap=_wherever_the_budget_ends,
    observe=_one_preface_four_questions,
)

# Dense and sparse ---------------------------------------------------------------------------------


def _trimmed(original: Any) -> Any:
    def hit_blocks(self: MambaManager, hashes: HashList, num_blocks: int) -> list[int]:
        longest = self.longest_hit(hashes, len(hashes))
        if longest == 0:
            return []
        block = self.pool.lookup(BlockKey(hashes[longest - 1], self.group))
        assert block is not None
        return ([NULL_BLOCK_ID] * (longest - 1) + [block])[:num_blocks]

    return hit_blocks


def _the_same_prompt_twice() -> Finding:
    story = GhostStory("M*")
    # 64 tokens are known as four blocks; a hit has three at most, for one token must be computed.
    story.add(range(64), max_tokens=2)
    story.add(range(64), max_tokens=2, at_step=WHEN_IDLE)
    return story.tell()


SPARSE_HIT_TRIMMED = Exhibit(
    name="sparse-hit-trimmed",
    title="A list of one, cut at the wrong end",
    mechanism=(
        "Attention needs every block of a hit; a Mamba group needs the last one, and its list is "
        "null, null, null, S. When the groups agreed on a shorter length, all lists were cut to it "
        "from the right. That is right for the dense list. The sparse one lost its only state and "
        "still claimed three blocks; the shorter length needs another look-up."
    ),
    reported_in="vLLM 46453",
    symptom="A request that hit the cache starts from nothing, at full length.",
    before="return ([NULL_BLOCK_ID] * (longest - 1) + [block])[:num_blocks]",
    after="return [NULL_BLOCK_ID] * (num_blocks - 1) + [block]",
    seam="mamba_teach.cache.managers:MambaManager.hit_blocks",
    swap=_trimmed,
    observe=_the_same_prompt_twice,
)

# A rule that came between -------------------------------------------------------------------------


def _speculation_is_align(original: Any) -> Any:
    def resolve_cache_mode(config: EngineConfig, supports_all: bool) -> CacheMode:
        mode = original(config, supports_all)
        if mode.effective == "all" and config.num_speculative_tokens > 0:
            return CacheMode(mode.requested, "align", "drafts are configured")
        return mode

    return resolve_cache_mode


def _a_preface_shorter_than_a_chunk() -> Finding:
    story = GhostStory(k=2)
    for i in range(3):
        question = [70 + i, 80 + i, 90 - i] * 8
        story.add([*range(40), *question], max_tokens=2, at_step=i * WHEN_IDLE)
    return _hits(story, 32)


SPECULATION_MEANS_ALIGN = Exhibit(
    name="speculation-means-align",
    title="Ask for all, draft, get align",
    mechanism=(
        "As long as mode all crashed with drafts, a rule turned it into align whenever drafts were "
        "configured, without a word to whoever had asked. In align a long chunk keeps one state, at "
        "its end. Prompts that share less than a chunk, which hit in mode all, no longer do."
    ),
    reported_in="vLLM PR 40454 (a workaround for issue 39809; PR 41233 removed it)",
    symptom="Switching drafts on makes the hit rate fall, and the prompts slow.",
    before='return CacheMode(mode.requested, "align", "drafts are configured")',
    after='return CacheMode(requested, "all", reason)',
    seam="mamba_teach.engine:resolve_cache_mode",
    swap=_speculation_is_align,
    observe=_a_preface_shorter_than_a_chunk,
)
