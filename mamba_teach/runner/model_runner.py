"""The model runner: owns the caches and the block tables, and runs one step."""

from __future__ import annotations

import torch

from mamba_kernels.backend import choose_backend
from mamba_teach.cache.groups import CacheGroup
from mamba_teach.config import EngineConfig
from mamba_teach.runner.block_table import BlockTables
from mamba_teach.runner.pages import allocate_pages, poison_blocks
from mamba_teach.runner.sampler import sample
from mamba_teach.runner.served_model import ServedModel
from mamba_teach.runner.step_metadata import StepMetadataBuilder
from mamba_teach.runner.warmup import warm_up
from mamba_teach.scheduler import Schedule

CPU_CHUNK_SIZE = 64  # measured fastest there; on a GPU the model's own chunk size is used


class ModelRunner:
    """Executes schedules on a model.

    Attributes:
        caches: one per layer; page 0 of each is the null page.
        tables: the block tables.
    """

    def __init__(
        self,
        model: ServedModel,
        config: EngineConfig,
        groups: tuple[CacheGroup, ...],
        num_blocks: int,
    ) -> None:
        self.model = model
        self.poison = config.poison
        self.watch_step = getattr(model, "watch_step", None)  # the ghost's; others need none
        device = model.device
        chunk_size = CPU_CHUNK_SIZE if device.type == "cpu" else model.config.chunk_size
        num_layers = len(model.config.pattern)
        self.caches = allocate_pages(groups, num_layers, num_blocks, device)
        self.tables = BlockTables(groups, config.max_num_seqs, config.max_model_len)
        self.metadata = StepMetadataBuilder(groups, num_layers, chunk_size, device)
        if choose_backend(torch.empty(0, device=device)) == "triton":
            warm_up(model, groups, self.caches, chunk_size)

    @torch.inference_mode()
    def execute(self, schedule: Schedule) -> list[int | None]:
        """Run a step; mutates the caches.

        Returns:
            One entry per row: the token it sampled, or None if it has more known tokens to compute.
        """
        self.tables.apply(schedule.updates)
        if self.poison:
            poison_blocks(self.caches, schedule.updates.unowned)
        if not schedule.rows:
            return []
        inputs = self.metadata.build(schedule, self.tables)
        if self.watch_step is not None:
            self.watch_step(schedule.rows)
        hidden = self.model(inputs.token_ids, inputs.metadata, self.caches)
        logits = self.model.compute_logits(hidden[inputs.sample_positions])
        sampled = iter(sample(logits, [row.request for row in schedule.rows if row.samples]))
        return [next(sampled) if row.samples else None for row in schedule.rows]
