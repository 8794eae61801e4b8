"""A fresh sandbox with the task's tree in it, and its end, whatever happens to whoever asked for it."""

from __future__ import annotations

import tempfile
import weakref
from dataclasses import dataclass, field
from pathlib import Path

from composer_replication.errors import SandboxFailure
from composer_replication.interfaces import Sandbox, SandboxBackend
from composer_replication.records import Limits, SandboxSpec, Task
from composer_replication.rollouts.candidate_tree import rule_of
from composer_replication.rollouts.tools.command_tools import VisibleTests
from composer_replication.rollouts.tools.tool_limits import ToolLimits
from composer_replication.rollouts.tools.toolbox import Toolbox
from composer_replication.sandbox import open_sandbox
from composer_replication.sandbox.process_folder import process_folder, remove_abandoned
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.suite_options import suite_arguments
from composer_replication.tasks.test_run import import_roots, variables

BROKEN = "The sandbox of this attempt broke. It is not your fault, and the attempt is not counted."
"""What a policy is told where nobody can end its attempt at once."""


@dataclass(frozen=True, slots=True)
class AttemptOptions:
    """How the sandbox of an attempt is opened.

    Args:
        is_warm: where the backend has a warm kind that holds (``Grader.attempt_backend``), one process stays in the
            sandbox and starts the commands, so that a call costs a message and no new jail. It ends with the attempt.
        sandbox_limits: of its memory, processes, disk and output.
        tool_limits: of each call.
    """

    is_warm: bool = True
    sandbox_limits: Limits = field(default_factory=Limits)
    tool_limits: ToolLimits = field(default_factory=ToolLimits)


class Attempt:
    """One attempt's sandbox and tools; ``close`` takes everything away, and so does the garbage collector.

    Args:
        store: where the task is.
        task: of which the tree is made.
        options: how; its ``is_warm`` is settled by ``backend``.
        backend: whose self-test has passed.

    Raises:
        InputError: the store is damaged, or its environment does not fit this machine.
        SandboxFailure: the sandbox cannot be opened.
    """

    def __init__(
        self, store: TaskStore, task: Task, options: AttemptOptions, backend: SandboxBackend
    ) -> None:
        self.task = task
        environment = store.environment(task)
        folder = Path(tempfile.mkdtemp(prefix="attempt-", dir=_folder()))
        end = weakref.finalize(self, remove_abandoned, folder)
        try:
            folder.chmod(0o755)  # a jail of another user must be able to reach the tree
            tree = folder / "tree"
            store.write_tree(task, tree, "rollout")
            tests = _visible_tests(store, task, tree)
            spec = SandboxSpec(tree, environment.read_only, environment.masked, options.sandbox_limits)
            self.sandbox: Sandbox = open_sandbox(spec, backend)
        except BaseException:
            end()
            raise
        end.detach()
        self._end = weakref.finalize(self, _end, self.sandbox, folder)
        self.toolbox = Toolbox(self.sandbox, tests, variables(environment), options.tool_limits)

    @property
    def is_open(self) -> bool:
        return self._end.alive

    def close(self) -> None:
        """End the sandbox and remove its tree; idempotent.

        Raises:
            SandboxFailure: the sandbox did not end as it should; its tree is removed all the same.
        """
        self._end()


def _folder() -> Path:
    try:
        return process_folder()
    except OSError as error:
        raise SandboxFailure("CR0302", f"no folder for an attempt can be made: {error}.") from error


def _end(sandbox: Sandbox, folder: Path) -> None:
    try:
        sandbox.close()
    finally:
        remove_abandoned(folder)


def _visible_tests(store: TaskStore, task: Task, tree: Path) -> VisibleTests:
    rule = rule_of(store, task)
    files = {path: data for path, data in store.files(task, "rollout").items() if not rule.takes(path)}
    return VisibleTests(
        node_ids=task.tests.shown,
        files=files,
        import_roots=tuple(import_roots(tree)),
        options=tuple(suite_arguments(tree)),
        is_left_out=lambda path: not rule.takes(path) and not path.startswith(".git/"),
    )
