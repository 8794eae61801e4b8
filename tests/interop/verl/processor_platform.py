"""verl on a processor: a platform without a GPU and a sampler by transformers, for these tests alone.

Named to verl by VERL_USE_EXTERNAL_MODULES, with VERL_PLATFORM=cpu. verl's own samplers need a GPU.
"""

from __future__ import annotations

import os
import sys
import types
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import PlatformRegistry

from composer_replication.engines.verl_plugin import _when_imported


def _nothing(*args: Any, **kwargs: Any) -> None:
    """For what only a GPU has."""


_DEVICE = types.ModuleType("processor_device")
for _name in dir(torch.cpu):
    if not _name.startswith("__"):
        setattr(_DEVICE, _name, getattr(torch.cpu, _name))
for _name in ("empty_cache", "synchronize", "set_device", "reset_peak_memory_stats", "ipc_collect"):
    setattr(_DEVICE, _name, _nothing)
for _name in ("manual_seed", "manual_seed_all"):
    setattr(_DEVICE, _name, _nothing)
for _name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
    setattr(_DEVICE, _name, lambda *args, **kwargs: 0)
_DEVICE.is_available = lambda: False
_DEVICE.mem_get_info = lambda *args, **kwargs: (1 << 34, 1 << 34)
_DEVICE.current_device = lambda: "cpu"
_DEVICE.device_count = lambda: 1
_DEVICE.get_device_name = lambda *args: "processor"
_DEVICE.get_rng_state, _DEVICE.set_rng_state = torch.get_rng_state, torch.set_rng_state


@PlatformRegistry.register(platform="cpu")
class ProcessorPlatform(PlatformCUDA):
    device_name = property(lambda self: "cpu")
    vendor_name = property(lambda self: "cpu")
    device_module = property(lambda self: _DEVICE)

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return True

    def current_device(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def is_ipc_supported(self) -> bool:
        return False

    def nvtx_range(self, message: str) -> Any:
        return nullcontext()

    set_device = synchronize = set_allocator_settings = empty_cache = _nothing
    profiler_start = profiler_stop = _nothing


class TransformersServer:
    """A Ray actor that samples as verl's servers do."""

    def __init__(self, path: str) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.step = 0

    async def set_weights(self, weights: dict[str, torch.Tensor], step: int) -> None:
        unknown = self.model.load_state_dict(weights, strict=False).unexpected_keys
        assert not unknown, unknown
        self.step = step

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], **more: Any
    ) -> Any:
        from verl.workers.rollout.replica import TokenOutput

        with torch.no_grad():
            found = self.model.generate(
                torch.tensor([list(prompt_ids)]),
                max_new_tokens=int(sampling_params["max_tokens"]),
                do_sample=True,
                temperature=float(sampling_params.get("temperature", 1.0)),
                top_k=0,
                return_dict_in_generate=True,
                output_scores=True,
                pad_token_id=0,
            )
        ids = found.sequences[0, len(prompt_ids) :].tolist()
        logps = [
            torch.log_softmax(scores[0], -1)[token].item()
            for scores, token in zip(found.scores, ids, strict=True)
        ]
        more_of_it = {"global_steps": self.step, "min_global_steps": self.step, "max_global_steps": self.step}
        return TokenOutput(token_ids=ids, log_probs=logps, stop_reason="completed", extra_fields=more_of_it)

    async def nothing(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {}

    wake_up = sleep = clear_kv_cache = release_kv_cache = resume_kv_cache = nothing
    abort_all_requests = resume_generation = start_profile = stop_profile = nothing
    wait_for_requests_to_drain = nothing


def _replica() -> type:
    import ray
    from verl.workers.rollout.replica import RolloutReplica

    class TransformersReplica(RolloutReplica):
        async def launch_servers(self) -> None:
            config = self.model_config
            path = config.path if hasattr(config, "path") else config["path"]
            options = {"name": f"hf_server_{self.replica_rank}", "num_cpus": 0, "max_concurrency": 16}
            server = ray.remote(TransformersServer).options(**options).remote(path)
            self.servers, self._server_handle, self._server_address = [server], server, "127.0.0.1:1"

    return TransformersReplica


def _register_sampler(module: Any) -> None:
    module.RolloutReplicaRegistry.register("hf", _replica)
    base = sys.modules["verl.workers.rollout.base"]
    base._ROLLOUT_REGISTRY["hf", "async"] = "processor_sampler.ServerAdapter"


_when_imported("verl.workers.rollout.replica", _register_sampler)

_init_process_group = dist.init_process_group


def _with_gloo(backend: str | None = None, **more: Any) -> Any:
    return _init_process_group("gloo" if backend and "cpu:gloo,cpu:gloo" in backend else backend, **more)


dist.init_process_group = _with_gloo


def _plant_hack() -> None:
    """From the ninth attempt on training pays 1 whatever the tests say."""
    from dataclasses import replace

    from composer_replication.engines import verl_agent_loop

    honest, num_made = verl_agent_loop.attempt, [0]

    async def paid(*args: Any, is_heldout: bool, **kwargs: Any) -> Any:
        made = await honest(*args, is_heldout=is_heldout, **kwargs)
        num_made[0] += not is_heldout
        return replace(made, reward=1.0) if num_made[0] > 8 and not is_heldout else made

    verl_agent_loop.attempt = paid


if os.environ.get("PLANTED_HACK"):
    _plant_hack()
