"""Engines over the ghost model: drafts as a test has written them down, and what must always hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch

from mamba_teach import Engine, EngineConfig, GhostModel, SamplingParams
from mamba_teach.cache.block_hash import first_parent, hash_block
from mamba_teach.cache.specs import MambaSpec, cdiv
from mamba_teach.events import Event
from mamba_teach.ghost import extend_hash
from mamba_teach.scheduler import Schedule, ScheduledRow
from mamba_teach.spec_decode.scripted_proposer import ScriptedProposer

Kind = TypeVar("Kind", bound=Event)
Content = tuple[int, int, int, int, int]  # tokens, hash of the prefix, window of 3 tokens


class PublishedStates:
    """What every block of an engine must hold once it is published, from the texts alone."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._content: dict[bytes, Content] = {}  # block hash -> state of the prefix it stands for

    def learn(self, text: Sequence[int], salt: str | None = None) -> None:
        """A request may publish blocks of this text."""
        size, parent, value = self.engine.cache.block_size, first_parent(salt), 0
        for end in range(size, len(text) + 1, size):
            parent = hash_block(parent, text[end - size : end])
            for token in text[end - size : end]:
                value = extend_hash(value, token)
            first, second, third = ([-1, -1, -1, *text[max(0, end - 3) : end]])[-3:]
            self._content[parent] = (end, value, first, second, third)

    def check(self) -> None:
        """Every published Mamba block holds exactly the state at its boundary, window included.

        The window is the first 3 entries: a block that is hit is read as if one token had been kept.
        """
        pool = self.engine.cache.pool
        blocks: dict[int, list[int]] = {}
        for block in range(1, pool.num_blocks):
            if (key := pool.key_of(block)) is not None:
                blocks.setdefault(key.group, []).append(block)
        for number, of_group in blocks.items():
            group = self.engine.cache.groups[number]
            if group.spec.kind != "mamba":
                continue
            keys = [pool.key_of(block) for block in of_group]
            needed = torch.tensor([self._content[key.block_hash] for key in keys if key])
            for layer in group.layers:
                cache = self.engine.runner.caches[layer]
                state = cache.ssm[of_group, 0, 0].view(torch.int32)  # (blocks, 2)
                window = cache.conv[of_group, :3, 0].view(torch.int32)  # (blocks, 3)
                found = torch.cat([state, window], dim=1)
                wrong = (found != needed).any(1).nonzero()[:, 0].tolist()
                assert not wrong, [
                    f"layer {layer}: block {of_group[i]} is filed under {needed[i].tolist()} and "
                    f"holds {found[i].tolist()}"
                    for i in wrong
                ]


def assert_few_blocks(engine: Engine) -> None:
    """No running request holds more blocks in a Mamba group than the spec says, and the spec says
    what it should: 1 + k without kept states, 2 + k where a step can pass one boundary. With replay,
    1 and 2 + cdiv(k, B): the checkpoint, the running column, and the boundaries drafts may pass."""
    for request in engine.scheduler.running:
        longest = request.max_computed_tokens
        tables = engine.cache.block_ids(request.request_id)
        for group, table in zip(engine.cache.groups, tables, strict=True):
            spec = group.spec
            if not isinstance(spec, MambaSpec):
                continue
            held, k = sum(block != 0 for block in table), spec.num_speculative_blocks
            limits = [spec.max_blocks_for(longest), cdiv(longest, spec.block_size) + k]
            if spec.mamba_cache_mode == "none":
                limits.append(1 + k)
            if spec.ring is not None:
                assert k == 0, "scratch columns are for slots"
                if spec.mamba_cache_mode == "align":
                    most_drafts = engine.config.num_speculative_tokens
                    limits.append(2 + cdiv(most_drafts, spec.block_size))
            elif spec.mamba_cache_mode == "align" and 1 + k <= spec.block_size:
                limits.append(2 + k)
            assert held <= min(limits), (
                f"{request.request_id} holds {held} blocks of {group.name}, allowed: {limits}"
            )


def watch_blocks(engine: Engine) -> None:
    """Check :func:`assert_few_blocks` in the middle of every step, when most blocks are held."""
    execute = engine.runner.execute

    def checked(schedule: Schedule) -> object:
        assert_few_blocks(engine)
        return execute(schedule)

    engine.runner.execute = checked  # type: ignore[assignment]


def drafts_with(said: Sequence[int], num_drafts: int, num_right: int, vocab: int) -> list[int]:
    """Drafts the first ``num_right`` of which are right, and the one behind them is not.

    Args:
        said: what the model is going to say, ``num_drafts`` tokens or more.
    """
    drafts = list(said[:num_drafts])
    assert len(drafts) == num_drafts, "nobody knows what comes that late"
    if num_right < num_drafts:
        drafts[num_right] = (drafts[num_right] + 1) % vocab
    return drafts


class ScriptedEngine:
    """An engine over the ghost, whose requests check the drafts that a test has written down.

    Attributes:
        texts: request id -> prompt, and what has to come behind it.
        asked: for every step so far, request id -> anchor and count that its row was given.
    """

    def __init__(
        self, layers: str, k: int, *, model: GhostModel | None = None, **config: object
    ) -> None:
        self.model = model or GhostModel(layers)
        defaults: dict[str, object] = dict(
            num_speculative_tokens=k, max_model_len=64, max_num_seqs=4, mamba_cache_mode="all",
            poison=True, device="cpu",
        )  # fmt: skip
        self.engine = Engine(
            self.model,
            EngineConfig(**(defaults | config)),  # type: ignore[arg-type]
            proposer=ScriptedProposer(self._script),
        )
        self.index = self.engine.runner.state_index
        self.texts: dict[str, tuple[list[int], list[int]]] = {}
        self.asked: list[dict[str, tuple[int, int]]] = []
        self._steps: dict[str, list[tuple[int, int]]] = {}
        self._preprocess = self.index.preprocess_mamba
        self.index.preprocess_mamba = self._recorded  # type: ignore[method-assign]

    def add(
        self, prompt: Sequence[int], steps: Sequence[tuple[int, int]] = (), max_tokens: int = 20,
        salt: str | None = None,
    ) -> str:  # fmt: skip
        """Add a request; ``steps`` are *(drafts, right ones among them)*, and then there are none.

        A request that is about to end checks fewer, as always.
        """
        request_id = self.engine.add_request(
            prompt, SamplingParams(max_tokens=max_tokens), cache_salt=salt
        )
        self.texts[request_id] = list(prompt), self.model.continuation(prompt, max_tokens)
        self._steps[request_id] = list(steps)
        return request_id

    def step(self) -> list[Event]:
        """One step and its events; what has been said so far must be right."""
        start = len(self.engine.events)
        for output in self.engine.step():
            _, said = self.texts[output.request_id]
            assert list(output.token_ids) == said[: len(output.token_ids)]
            assert output.finish_reason is None or len(output.token_ids) == len(said)
        return self.engine.events[start:]

    def to_the_end(self) -> None:
        while self.engine.has_unfinished_requests():
            self.step()

    def _script(self, request_id: str, tokens: list[int], max_drafts: int) -> list[int]:
        if not self._steps[request_id]:
            return []
        count, right = self._steps[request_id].pop(0)
        prompt, said = self.texts[request_id]
        coming, count = said[len(tokens) - len(prompt) :], min(count, max_drafts)
        return drafts_with(coming, count, min(right, count), self.model.config.vocab_size)

    def _recorded(
        self, rows: Sequence[ScheduledRow]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        anchors, counts = self._preprocess(rows)
        ids = [row.request.request_id for row in rows]
        if anchors is not None and counts is not None:
            pairs = zip(anchors.tolist(), counts.tolist(), strict=True)
            self.asked.append(dict(zip(ids, pairs, strict=True)))
        return anchors, counts


def of_kind(events: Sequence[Event], kind: type[Kind]) -> list[Kind]:
    """Those of a kind, in order."""
    return [event for event in events if isinstance(event, kind)]
