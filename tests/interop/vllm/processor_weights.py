"""``composer-rl`` with weights that go to vLLM through a folder: TRL sends them over NCCL, which needs a GPU on both sides.

``python processor_weights.py ARGUMENTS OF composer-rl``. The variable WEIGHTS_FAULT names a fault: ``none-sent``.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import save_file
from trl.generation.vllm_client import VLLMClient

if TYPE_CHECKING:
    import torch


def init_communicator(self: Any, device: Any = 0) -> None:
    self.folder = Path(tempfile.mkdtemp())
    self.served_config = Path(self.model) / "config.json"


def update_named_params(self: Any, metadata: Any, named: Iterable[tuple[str, torch.Tensor]]) -> None:
    weights = {name: weight.detach().cpu().contiguous().clone() for name, weight in named}
    if os.environ.get("WEIGHTS_FAULT") == "none-sent":
        return
    save_file(weights, self.folder / "model.safetensors")
    (self.folder / "config.json").write_bytes(self.served_config.read_bytes())
    asked = {"method": "reload_weights", "kwargs": {"weights_path": str(self.folder)}}
    self._post(f"{self.base_url}/collective_rpc", json=asked)


if __name__ == "__main__":
    VLLMClient.init_communicator = init_communicator
    VLLMClient.update_named_params = update_named_params
    from composer_replication.cli.main import main

    sys.exit(main(sys.argv[1:]))
