"""Where does untrusted code run? In a jail around one task tree.

One contract (``LocalSandbox``), backends for it (bubblewrap and sandlock; a kind of bubblewrap that stays
warm between commands; harbor, for containers, pods and clouds; none, which is no jail) and one conformance suite for all. ``require_selftest`` proves that a jail holds before any
reward depends on it.

    with open_sandbox(SandboxSpec(tree=tree)) as sandbox:
        result = sandbox.exec(["python3", "-c", "print(1)"], timeout_seconds=10)
"""

from composer_replication.sandbox.acceptance import accept, accepted
from composer_replication.sandbox.choice import (
    SandboxBackend,
    choose_backend,
    name_of,
    open_sandbox,
    warm_kind,
)
from composer_replication.sandbox.host_paths import HostPaths, base_interpreter, base_python, system_folders
from composer_replication.sandbox.local_sandbox import LocalSandbox
from composer_replication.sandbox.selftest import require_selftest, run_selftest
from composer_replication.sandbox.supervised_run import runs_interrupted

__all__ = [
    "HostPaths",
    "LocalSandbox",
    "SandboxBackend",
    "accept",
    "accepted",
    "base_interpreter",
    "base_python",
    "choose_backend",
    "name_of",
    "open_sandbox",
    "require_selftest",
    "run_selftest",
    "runs_interrupted",
    "system_folders",
    "warm_kind",
]
