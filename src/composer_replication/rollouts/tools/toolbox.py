"""From a call to a result: whatever is wrong with the call, the answer is data."""

from __future__ import annotations

import time
from dataclasses import replace

from composer_replication.errors import CommandError, SandboxFileError
from composer_replication.records import ToolCall, ToolResult, ToolSpec
from composer_replication.rollouts.tools.command_tools import bash, run_tests, search
from composer_replication.rollouts.tools.file_tools import list_files, read_file, str_replace, write_file
from composer_replication.rollouts.tools.tool_context import RefusedError, ToolContext, clip
from composer_replication.rollouts.tools.tool_schemas import arguments_of, clean, spec_of


def submit(box: ToolContext) -> ToolResult:
    """End the attempt: the repository as it stands is your answer. Nothing can be done afterwards.

    Example: {}
    """
    box.is_over = True
    return ToolResult("submitted: the attempt is over.")


ACTIONS = {
    tool.__name__: tool
    for tool in (bash, read_file, write_file, str_replace, list_files, search, run_tests, submit)
}
"""The tools by name, in the order in which the policy sees them."""
TOOLS: tuple[ToolSpec, ...] = tuple(spec_of(tool) for tool in ACTIONS.values())
"""What the policy is told of them: each signature and docstring, as a JSON schema."""


class Toolbox(ToolContext):
    """The eight tools over one sandbox, for one attempt; used by one thread at a time."""

    def call(self, call: ToolCall) -> ToolResult:
        """Do what was asked; a call that cannot be made says why and shows a right one."""
        started = time.monotonic()
        self.counts.num_calls += 1
        result = self._made(call)
        text, was_cut = clip(result.text, self.max_characters, "ask for less at a time")
        is_truncated, seconds = result.is_truncated or was_cut, time.monotonic() - started
        return replace(result, text=clean(text), is_truncated=is_truncated, seconds=seconds)

    def _made(self, call: ToolCall) -> ToolResult:
        try:
            spec, arguments = arguments_of(call, TOOLS)
            if self.is_over:
                raise RefusedError("the attempt is over. No tool can be used any more.", "invalid")
            return ACTIONS[spec.name](self, **arguments)
        except RefusedError as error:
            self.counts.num_invalid += error.fault == "invalid"
            return ToolResult(str(error), is_error=True, fault=error.fault)
        except SandboxFileError as error:
            place = f" [{error.where}]" if error.where else ""
            return ToolResult(f"{error.message}{place}", is_error=True)
        except ValueError as error:  # a NUL byte, or text that has no bytes: see ``interfaces.Sandbox``
            why = error.message if isinstance(error, CommandError) else f"{error}."
            return ToolResult(f"this cannot be done: {why}", is_error=True)
