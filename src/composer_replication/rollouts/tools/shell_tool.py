"""``bash``: one command in the sandbox, and what it said."""

from __future__ import annotations

from composer_replication.records import ExecResult, ToolResult
from composer_replication.rollouts.tools.tool_limits import Bench, ToolLimits, clip, refused

# Not every machine has bash; the plain shell does for most commands.
_SHELL = 'if command -v bash >/dev/null 2>&1; then exec bash -c "$1"; else exec sh -c "$1"; fi'
HOW_TO_SEE = "write it to a file and read a part of it, or use head, tail or grep"


def bash(box: Bench, command: str, timeout_seconds: float = 60) -> ToolResult:
    """Run a command; its exit code, a time-out and a limit that it broke are said in the text too.

    Raises:
        SandboxFailure: the sandbox broke.
        ValueError: a NUL byte, or text that has no bytes.
    """
    if not command.strip():
        return refused("the command is empty. Give a shell command, such as: ls -la")
    if timeout_seconds < 1:
        return refused(f"timeout_seconds is {timeout_seconds}; it must be at least 1.")
    seconds = min(timeout_seconds, box.limits.max_command_seconds)
    words = ["/bin/sh", "-c", _SHELL, "sh", command]
    done = box.sandbox.exec(words, timeout_seconds=seconds, env=box.environment_variables)
    return told(done, seconds, box.limits)


def told(done: ExecResult, seconds: float, limits: ToolLimits) -> ToolResult:
    """What a command said, clipped in the middle; how it ended stands in the last lines, which are never cut."""
    parts = [done.stdout.rstrip("\n")] if done.stdout.strip() else []
    if done.stderr.strip():
        parts.append(f"[stderr]\n{done.stderr.rstrip()}" if parts else done.stderr.rstrip())
    ends = []
    if done.timed_out:
        ends.append(f"[stopped: it ran longer than {seconds:g} s, and everything it started was killed]")
    elif done.out_of_memory:
        ends.append("[killed: it used more memory than it may]")
    if done.truncated:
        ends.append("[it printed more than is kept]")
    if done.exit_code:
        ends.append(f"[exit code {done.exit_code}]")
    end = "\n".join(ends)
    text, was_cut = clip("\n".join(parts), limits.max_characters - len(end) - 1, HOW_TO_SEE)
    return ToolResult(
        text="\n".join(part for part in (text, end) if part) or "[no output]",
        exit_code=done.exit_code,
        timed_out=done.timed_out,
        is_truncated=was_cut or done.truncated,
        fault="out-of-memory" if done.out_of_memory and not done.timed_out else "",
    )
