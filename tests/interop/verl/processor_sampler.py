"""Hands verl's weights of each step on to the sampler of ``processor_platform``."""

from __future__ import annotations

import os
from typing import Any

import ray
from verl.workers.rollout.base import BaseRollout


class ServerAdapter(BaseRollout):
    def __init__(self, config: Any, model_config: Any, device_mesh: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, model_config, device_mesh)
        self.server: Any = None

    async def resume(self, tags: Any) -> None:
        """Nothing sleeps."""

    async def release(self) -> None:
        """Nothing sleeps."""

    async def update_weights(self, weights: Any, global_steps: Any = None, **kwargs: Any) -> None:
        from verl.workers.rollout.utils import ensure_async_iterator

        found = {
            name: weight.detach().cpu().float().clone()
            async for name, weight in ensure_async_iterator(weights)
        }
        if self.server is None:
            self.server = ray.get_actor(f"hf_server_{os.environ['RANK']}")
        await self.server.set_weights.remote(found, global_steps)
