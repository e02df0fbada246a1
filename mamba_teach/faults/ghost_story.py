"""Ghost stories: a few requests, drafts as the author wants them, and what came of it.

The ghost model (see :mod:`mamba_teach.ghost`) says exactly which state a request found and which one
it needed, so a story is told until the ghost objects, anything else breaks, or a request says
something wrong; then the log ends at that very step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mamba_teach import Engine, EngineConfig, GhostModel, RequestOutput, SamplingParams
from mamba_teach.events import Event, RequestPreempted, RequestReleased
from mamba_teach.faults.exhibit import Finding
from mamba_teach.spec_decode.scripted_proposer import ScriptedProposer

WHEN_IDLE = 1_000_000  # a step nobody reaches: the request comes when all before it have finished
BLOCK_SIZE = 16


@dataclass
class Arrival:
    """A request of a story.

    Attributes:
        steps: *(drafts, right ones among them)* of its verify steps, then none.
        at_step: before which step it arrives.
    """

    prompt: list[int]
    max_tokens: int
    steps: list[tuple[int, int]]
    at_step: int


@dataclass
class GhostStory:
    """An engine over the ghost, and requests for it, all in steps of the author's choice.

    Attributes:
        layers: the ghost's pattern.
        k: drafts per step at most.
        config: other settings of the engine; by default blocks of 16 tokens in mode "all", poisoned.
        outputs: what every finished request returned, by id.
        engine: once it has begun.
    """

    layers: str = "M"
    k: int = 0
    config: dict[str, Any] = field(default_factory=dict)
    outputs: dict[str, RequestOutput] = field(default_factory=dict)
    engine: Engine | None = None
    _arrivals: list[Arrival] = field(default_factory=list)

    def add(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int = 8,
        steps: Sequence[tuple[int, int]] = (),
        at_step: int = 0,
    ) -> None:
        """A request; the ``i``-th one is called ``r<i>``. To be added in the order of arrival."""
        self._arrivals.append(Arrival(list(prompt), max_tokens, list(steps), at_step))

    def tell(self, before_step: Callable[[Engine, int], None] | None = None) -> Finding:
        """Serve everybody to the end, or to the first thing that is wrong.

        Args:
            before_step: is shown the engine and the number of the step that is about to run.
        """
        try:
            wrong = self._serve(before_step)
        except Exception as error:  # whatever it is, it is what we came to see
            wrong = f"{type(error).__name__}: {error}"
        if wrong is None:
            return Finding(False, "every request said what it should", self._events())
        return Finding(True, wrong, self._events())

    def _serve(self, before_step: Callable[[Engine, int], None] | None) -> str | None:
        model = GhostModel(self.layers)
        settings: dict[str, Any] = dict(
            num_speculative_tokens=self.k, mamba_cache_mode="all", block_size=BLOCK_SIZE,
            max_num_seqs=4, max_model_len=96, device="cpu", poison=True,
        )  # fmt: skip
        proposer = ScriptedProposer(self._drafts) if self.k else None
        self.engine = Engine(model, EngineConfig(**(settings | self.config)), proposer=proposer)
        # Drafts may reach beyond what a request is allowed to say.
        self._said = [model.continuation(a.prompt, a.max_tokens + self.k) for a in self._arrivals]
        self._steps = [list(arrival.steps) for arrival in self._arrivals]
        coming = list(self._arrivals)
        while coming or self.engine.has_unfinished_requests():
            step, idle = self.engine.num_steps, not self.engine.has_unfinished_requests()
            while coming and (idle or coming[0].at_step <= step):
                arrival = coming.pop(0)
                params = SamplingParams(max_tokens=arrival.max_tokens)
                self.engine.add_request(arrival.prompt, params)
                idle = False
            if before_step is not None:
                before_step(self.engine, step)
            for output in self.engine.step():
                said = list(output.token_ids)
                expected = self._said[int(output.request_id[1:])][: len(said)]
                if said != expected:
                    return f"{output.request_id} said {said} instead of {expected}"
                if output.finish_reason is not None:
                    self.outputs[output.request_id] = output
        return None

    def _drafts(self, request_id: str, tokens: list[int], max_drafts: int) -> list[int]:
        index = int(request_id[1:])
        if not self._steps[index]:
            return []
        count, right = self._steps[index].pop(0)
        start = len(tokens) - len(self._arrivals[index].prompt)
        drafts = self._said[index][start : start + count]
        return [token if i < right else token + 1 for i, token in enumerate(drafts)]

    def _events(self) -> tuple[Event, ...]:
        """The log, without the engine's tidying up after a step that failed."""
        events = [] if self.engine is None else list(self.engine.events)
        if self.engine is not None and self.engine.has_unfinished_requests():
            while isinstance(events[-1], RequestReleased | RequestPreempted):
                events.pop()
        return tuple(events)
