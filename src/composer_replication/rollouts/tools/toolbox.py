"""From a call to a result: whatever is wrong with the call, the answer is data."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from composer_replication.errors import CommandError, SandboxFileError
from composer_replication.interfaces import Sandbox
from composer_replication.records import ToolCall, ToolResult, ToolSpec
from composer_replication.rollouts.tools.command_tools import VisibleTests, bash, run_tests, search
from composer_replication.rollouts.tools.file_tools import list_files, read_file, str_replace, write_file
from composer_replication.rollouts.tools.tool_limits import ToolLimits, clip, refused
from composer_replication.rollouts.tools.tool_schemas import BadCallError, arguments_of, spec_of
from composer_replication.rollouts.tools.tool_signatures import TOOL_NAMES, ToolSignatures

TOOLS: tuple[ToolSpec, ...] = tuple(spec_of(getattr(ToolSignatures, name)) for name in TOOL_NAMES)
"""What the policy may call."""


@dataclass(slots=True)
class CallCounts:
    """Calls so far; ``num_invalid`` are those that could not be made: unknown tool, bad JSON, wrong arguments,
    or after the end. A command that fails, or a file that is not there, is a valid call.
    """

    num_calls: int = 0
    num_invalid: int = 0


@dataclass(slots=True)
class Toolbox:
    """The eight tools over one sandbox, for one attempt; used by one thread at a time.

    ``is_over`` is set by ``submit``, or by whoever ends the attempt; from then on every call is refused.

    Args:
        sandbox: where they work.
        tests: what ``run_tests`` runs.
        environment_variables: of every command, over those of the sandbox.
        limits: of each tool.
    """

    sandbox: Sandbox
    tests: VisibleTests
    environment_variables: Mapping[str, str] = field(default_factory=dict)
    limits: ToolLimits = field(default_factory=ToolLimits)
    counts: CallCounts = field(default_factory=CallCounts)
    is_over: bool = False

    def call(self, call: ToolCall) -> ToolResult:
        """Do what was asked; a call that cannot be made says why and shows a right one."""
        started = time.monotonic()
        self.counts.num_calls += 1
        try:
            spec, arguments = arguments_of(call, TOOLS)
            if self.is_over:
                raise BadCallError("the attempt is over. No tool can be used any more.")
        except BadCallError as error:
            self.counts.num_invalid += 1
            result = refused(str(error), "invalid")
        else:
            result = self._make(_ACTIONS[spec.name], arguments)
        text, was_cut = clip(result.text, self.limits.max_characters, "ask for less at a time")
        return replace(
            result,
            text=text.encode(
                "utf-8", "backslashreplace"
            ).decode(),  # halves of surrogate pairs: no tokenizer takes them
            is_truncated=result.is_truncated or was_cut,
            seconds=time.monotonic() - started,
        )

    def _make(self, action: Callable[..., ToolResult], arguments: Mapping[str, Any]) -> ToolResult:
        try:
            return action(self, **arguments)
        except SandboxFileError as error:
            place = f" [{error.where}]" if error.where else ""
            return refused(f"{error.message}{place}")
        except ValueError as error:  # a NUL byte, or text that has no bytes: see ``interfaces.Sandbox``
            why = error.message if isinstance(error, CommandError) else f"{error}."
            return refused(f"this cannot be done: {why}")


def _submit(box: Toolbox) -> ToolResult:
    box.is_over = True
    return ToolResult("submitted: the attempt is over.")


_ACTIONS: Mapping[str, Callable[..., ToolResult]] = {
    "bash": bash,
    "read_file": read_file,
    "write_file": write_file,
    "str_replace": str_replace,
    "list_files": list_files,
    "search": search,
    "run_tests": run_tests,
    "submit": _submit,
}
