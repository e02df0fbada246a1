"""The engine: a door, a loop, and what comes out.

    engine = Engine(load_model("wordmath"), EngineConfig())
    outputs = engine.generate(["Q: Ann has 12 apples. ...\\nA:"], SamplingParams(max_tokens=64))

Requests are checked at the door and refused there, with the numbers, if they can never be served.
Then each step asks the scheduler who computes what, lets the model runner compute it, and hands every
sampled token back. Requests come and go between steps (*continuous batching*); none of them can tell
whether it is alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from pathlib import Path

import torch
from tqdm import tqdm

from mamba_teach import events
from mamba_teach.cache.coordinator import CacheCoordinator
from mamba_teach.cache.groups import make_groups
from mamba_teach.cache.mode import check_block_size, resolve_cache_mode
from mamba_teach.cache.specs import derived_num_blocks, make_layer_specs
from mamba_teach.config import EngineConfig
from mamba_teach.request import Request, RequestOutput, RequestRefused, SamplingParams, Status
from mamba_teach.runner.model_runner import ModelRunner
from mamba_teach.runner.served_model import ServedModel
from mamba_teach.scheduler import Scheduler
from mamba_teach.spec_decode.make_proposer import make_proposer, uses_mtp_head
from mamba_teach.spec_decode.proposer import Proposer
from mamba_teach.summary import EngineSummary, GraphSummary


class Engine:
    """Serves requests with one model.

    Attributes:
        model, config: as given; the model is moved to the device and dtype of the config.
            With ``num_speculative_tokens`` the config says who drafts, unless a ``proposer`` is given.
        cache_mode: the Mamba cache mode in force, and why.
        cache: who owns which block.
        scheduler: the queues.
        runner: the memory, and what runs on it.
        events: the log of everything that happened, see :mod:`mamba_teach.events`.
        num_steps: steps run so far.
    """

    def __init__(
        self,
        model: ServedModel,
        config: EngineConfig | None = None,
        *,
        proposer: Proposer | None = None,
    ) -> None:
        if isinstance(model, str | Path):
            raise TypeError(f"model={model!r} is a name: Engine(load_model({str(model)!r}), ...)")
        self.config = config = config or EngineConfig()
        self.device = resolve_device(config.device)
        self.model = model.place(self.device, getattr(torch, config.dtype))
        self.tokenizer = model.tokenizer
        self.cache_mode = mode = resolve_cache_mode(config, model.supports_checkpoints)
        mtp_drafts = proposer is None and uses_mtp_head(model, config)
        specs = make_layer_specs(model.config, config, mode.effective, mtp_drafts=mtp_drafts)
        groups = make_groups(specs)
        block_size = min(group.spec.block_size for group in groups)
        check_block_size(config, mode, block_size)
        num_blocks = config.num_blocks or derived_num_blocks(
            config, [group.spec for group in groups], mode.caches_prefixes
        )
        self.events: list[events.Event] = [
            events.EngineStarted(num_blocks, tuple(group.name for group in groups), block_size)
        ]
        emit = self.events.append
        k = config.num_speculative_tokens
        if proposer is None:
            proposer = make_proposer(model, config)
        elif k == 0:
            raise ValueError("a proposer is given, but num_speculative_tokens=0 leaves it no token")
        self.runner = ModelRunner(self.model, config, groups, num_blocks, emit, proposer)
        self.cache = CacheCoordinator(
            groups, num_blocks, mode.caches_prefixes, emit, num_lookahead_tokens=k * mtp_drafts
        )
        self.num_steps = 0
        self._requests: dict[str, Request] = {}
        self._num_arrivals = 0
        self.scheduler = Scheduler(config, self.cache, mode.effective == "align", emit)

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str | None = None,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Serve prompts to the end; outputs come in the order of the prompts.

        Args:
            prompts: texts, or lists of token ids.
            params: one for all, or one per prompt.
            cache_salt: share cached prefixes only with requests of the same salt.
            progress: show a progress bar.

        Raises:
            RequestRefused: a prompt cannot be served. Then none has been started.
            TypeError: ``prompts`` is a single text.
            RuntimeError: requests from :meth:`add_request` are still running; their outputs belong
                to whoever steps the engine.
        """
        if self.has_unfinished_requests():
            raise RuntimeError(
                f"generate() with {len(self._requests)} unfinished requests of add_request(): step "
                f"the engine until they are done, or add these prompts with add_request() too"
            )
        if isinstance(prompts, str):
            raise TypeError(f"prompts is one text, {prompts[:40]!r}; pass a list: generate([prompt])")
        if not isinstance(params, Sequence):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts but {len(params)} SamplingParams")
        checked = []
        for i, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
            try:
                checked.append((self._checked_prompt(prompt, p), p))
            except RequestRefused as refusal:
                raise RequestRefused(f"prompt {i}: {refusal}") from None
        ids = [self._enqueue(tokens, p, cache_salt) for tokens, p in checked]
        finished: dict[str, RequestOutput] = {}
        try:
            with tqdm(total=len(ids), desc="serving", unit="request", disable=not progress) as bar:
                while self.has_unfinished_requests():
                    for output in self.step():
                        if output.finish_reason is not None:
                            finished[output.request_id] = output
                            bar.update()
        finally:  # interrupted: nobody will ask for the rest
            for request_id in ids:
                self.abort(request_id)
        return [finished[request_id] for request_id in ids]

    def add_request(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        cache_salt: str | None = None,
    ) -> str:
        """Queue a prompt for the coming steps; returns its request id.

        Args:
            prompt: a text, or token ids.
            params: greedy with 64 tokens if None.
            cache_salt: share cached prefixes only with requests of the same salt.

        Raises:
            RequestRefused: it cannot be served; nothing has changed.
        """
        params = params or SamplingParams()
        return self._enqueue(self._checked_prompt(prompt, params), params, cache_salt)

    def step(self) -> list[RequestOutput]:
        """Run one step; returns what every request that sampled a token has so far.

        If the step fails half-way, the error is raised and nothing is lost: its requests go back to
        the queue and are computed again by the next step.
        """
        if not self.has_unfinished_requests():
            return []
        self.events.append(events.StepStarted(self.num_steps))
        schedule = self.scheduler.schedule()
        try:
            results = self.runner.execute(schedule)
        except BaseException:
            self.scheduler.discard(schedule)
            raise
        self.num_steps += 1
        outputs = []
        for row, result in zip(schedule.rows, results, strict=True):
            sampled, reason = self._until_the_end(row.request, result.sampled)
            self.scheduler.commit(row, sampled, result.drafts, reason)
            if sampled:
                outputs.append(self._output(row.request))
            if reason is not None:
                del self._requests[row.request.request_id]
        return outputs

    def abort(self, request_id: str) -> None:
        """End a request now, in whatever state it is; unknown or finished ids are ignored."""
        if (request := self._requests.pop(request_id, None)) is not None:
            self.scheduler.finish(request, "abort")

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    def summary(self) -> EngineSummary:
        """What was asked for, what it became, and why. Prints as a table."""
        graphs = GraphSummary("off")
        if (captured := self.runner.graphs) is not None:
            sizes = tuple(sorted(captured.steps))
            graphs = GraphSummary(captured.kind, sizes, captured.num_launches)
        return EngineSummary.of(
            self.model.config,
            self.config,
            self.cache_mode,
            self.cache,
            self.device.type,
            None if self.runner.proposer is None else self.runner.proposer.name,
            graphs,
        )

    def reset_prefix_cache(self) -> None:
        """Forget all published blocks; running requests go on."""
        self.cache.reset()

    def _enqueue(
        self, token_ids: tuple[int, ...], params: SamplingParams, cache_salt: str | None
    ) -> str:
        arrival = self._num_arrivals
        self._num_arrivals += 1
        seed = arrival if params.seed is None else params.seed
        request = Request(
            f"r{arrival}",
            token_ids,
            params,
            arrival,
            seed,
            self._max_computed_tokens(len(token_ids), params),
            cache_salt,
        )
        self._requests[request.request_id] = request
        self.scheduler.add(request)
        return request.request_id

    def _max_computed_tokens(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        """Tokens a request may grow to, but for the last: it is sampled and needs no place."""
        return min(num_prompt_tokens + params.max_tokens, self.config.max_model_len) - 1

    def _checked_prompt(
        self, prompt: str | Sequence[int], params: SamplingParams
    ) -> tuple[int, ...]:
        """Token ids of a prompt that can be served; raises RequestRefused otherwise."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestRefused("the model has no tokenizer: pass token ids instead of text")
            token_ids = tuple(self.tokenizer.encode(prompt).ids)
        else:
            token_ids = tuple(prompt)  # numpy's integers are integers, too
        if not token_ids:
            raise RequestRefused("the prompt is empty: at least 1 token is needed")
        vocab = self.model.config.vocab_size
        for i, token in enumerate(token_ids):
            is_integer = isinstance(token, Integral) and not isinstance(token, bool)
            if not is_integer or not 0 <= int(token) < vocab:
                raise RequestRefused(
                    f"token {token!r} at position {i} is unknown: ids are integers from 0 to {vocab - 1}"
                )
        longest = self.config.max_model_len
        if len(token_ids) >= longest:
            raise RequestRefused(
                f"the prompt has {len(token_ids)} tokens; max_model_len={longest} leaves room for "
                f"at most {longest - 1} and one generated token"
            )
        most = self._max_computed_tokens(len(token_ids), params)
        needed, usable = self.cache.max_blocks_for(most), self.cache.pool.num_blocks - 1
        if needed > usable:
            raise RequestRefused(
                f"the request may grow to {most} computed tokens and needs {needed} blocks; the pool "
                f"has {usable}"
            )
        return tuple(int(token) for token in token_ids)

    def _until_the_end(
        self, request: Request, sampled: list[int]
    ) -> tuple[list[int], str | None]:
        """New tokens up to the last one of the request, and why it is the last; or all, and None."""
        for count, token in enumerate(sampled, start=1):
            if token in self.model.config.eos_token_ids and not request.params.ignore_eos:
                return sampled[:count], "stop"
            if request.num_tokens + count > request.max_computed_tokens:
                return sampled[:count], "length"
        return sampled, None

    def _output(self, request: Request) -> RequestOutput:
        text = "" if self.tokenizer is None else self.tokenizer.decode(request.output_token_ids)
        return RequestOutput(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            token_ids=tuple(request.output_token_ids),
            text=text,
            finish_reason=request.finish_reason if request.status is Status.FINISHED else None,
            num_cached_tokens=request.num_cached_tokens,
            num_preemptions=request.num_preemptions,
            num_drafted_tokens=request.num_drafted_tokens,
            num_accepted_drafts=request.num_accepted_drafts,
        )


def resolve_device(name: str) -> torch.device:
    """The device of a config; "auto" is cuda where there is one.

    Raises:
        ValueError: cuda is asked for and there is none.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device={name!r}: torch sees no CUDA device; use 'cpu' or 'auto'")
    return torch.device(name)
