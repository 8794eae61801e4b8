"""``composer-rl`` with weights that go to vLLM through a folder.

TRL sends them to a server over NCCL, which needs a GPU on both sides, and writes them into an engine of its own process
tensor by tensor, which vLLM for processors has packed anew. That engine computes in float32: TRL cannot be told
so, and vLLM takes bfloat16 for itself.
``python processor_weights.py ARGUMENTS OF composer-rl``. The variable WEIGHTS_FAULT names a fault: ``none-sent``.
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import save_file
from trl.generation import vllm_generation
from trl.generation.vllm_client import VLLMClient

if TYPE_CHECKING:
    import torch


def init_communicator(self: Any, device: Any = 0) -> None:
    """There is none."""


def update_named_params(self: Any, metadata: Any, named: Iterable[tuple[str, torch.Tensor]]) -> None:
    folder = saved(named, Path(self.model))
    if os.environ.get("WEIGHTS_FAULT") != "none-sent":
        asked = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        self._post(f"{self.base_url}/collective_rpc", json=asked)


def sync_weights(self: Any, of_a_server: Any = vllm_generation.VLLMGeneration.sync_weights) -> None:
    if self.mode == "server":
        of_a_server(self)
        return
    folder = saved(self._iter_named_params(), Path(self.model.name_or_path))
    if os.environ.get("WEIGHTS_FAULT") != "none-sent":
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
    self.llm.reset_prefix_cache()


def saved(named: Iterable[tuple[str, torch.Tensor]], model: Path) -> Path:
    folder = Path(tempfile.mkdtemp())
    weights = {name: weight.detach().cpu().contiguous().clone() for name, weight in named}
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_bytes((model / "config.json").read_bytes())
    return folder


if __name__ == "__main__":
    VLLMClient.init_communicator = init_communicator
    VLLMClient.update_named_params = update_named_params
    vllm_generation.VLLMGeneration.sync_weights = sync_weights
    vllm_generation.LLM = functools.partial(vllm_generation.LLM, dtype="float32", enforce_eager=True)
    from composer_replication.cli.main import main

    sys.exit(main(sys.argv[1:]))
