"""Which Python does a shell command run, and how is the interpreter started?"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from composer_replication.rollouts.monitor.shell_commands import ShellCommand

_PYTHON = re.compile(r"(?:i?python|pypy)[\d.]*w?")


@dataclass(frozen=True, slots=True)
class PythonStart:
    """How an interpreter is started: its flags (``O``, ``I``, …), module or script, code and arguments."""

    flags: str = ""
    module: str = ""
    code: str | None = None
    arguments: tuple[str, ...] = ()
    """With a script its path comes first."""


def python_start(command: ShellCommand) -> PythonStart | None:
    """How a command starts Python, or None where it does not. ``pytest`` alone counts as ``-m pytest``."""
    program = command.program
    if program in ("pytest", "py.test"):
        return PythonStart(module="pytest", arguments=command.arguments)
    if re.fullmatch(r"pip[\d.]*", program):
        return PythonStart(module="pip", arguments=command.arguments)
    words = list(command.arguments)
    if program in ("uv", "poetry", "pipx", "pdm", "hatch", "coverage") and words[:1] == ["run"]:
        inner = [word for word in words[1:] if program != "coverage" or word != "--branch"]
        return python_start(ShellCommand(("python", *inner) if program == "coverage" else tuple(inner)))
    if program == "uv" and words[:1] == ["pip"]:
        return PythonStart(module="pip", arguments=tuple(words[1:]))
    if not _PYTHON.fullmatch(program):
        return None
    return _started(words, command.stdin)


def _started(given: Sequence[str], stdin: str | None) -> PythonStart:
    flags = ""
    words = deque(given)
    while words:
        word = words.popleft()
        if word == "-" or not word.startswith("-"):
            code = stdin if word == "-" else None
            return PythonStart(flags, code=code, arguments=(word, *words))
        if word.startswith("--"):
            continue
        letters = word[1:]
        for position, letter in enumerate(letters):
            rest = letters[position + 1 :]
            if letter in "cm":
                value = rest or (words.popleft() if words else "")
                if letter == "c":
                    return PythonStart(flags, code=value, arguments=tuple(words))
                return PythonStart(flags, module=value, arguments=tuple(words))
            if letter in "XW":
                if not rest and words:
                    words.popleft()
                break
            flags += letter
    return PythonStart(flags, code=stdin)


def scripts_of(command: ShellCommand) -> Iterator[tuple[str, str]]:
    """Every script that a command runs, with its language: by name, as a module, or as its input."""
    started = script_start(command)
    if started is not None:
        yield started
    start = python_start(command)
    if start is not None and start.module and start.module not in ("pytest", "unittest", "pip"):
        stem = start.module.replace(".", "/")
        yield from ((path, "python") for path in (f"{stem}.py", f"{stem}/__main__.py"))
    if command.program in ("make", "gmake"):
        words = command.arguments
        yield from ((words[i + 1], "make") for i, word in enumerate(words[:-1]) if word in ("-f", "--file"))
    language = _reads_program(command, start)
    if language:
        yield from ((path, language) for operator, path in command.redirects if operator == "<")
        before = command.upstream[-1] if command.upstream else ()
        if before[:1] == ("cat",):
            yield from ((path, language) for path in before[1:] if not path.startswith("-"))


def _reads_program(command: ShellCommand, start: PythonStart | None) -> str:
    """The language of the program that a command reads as its input; empty where it reads none."""
    if start is not None:
        is_open = start.code is None and not start.module and start.arguments[:1] in ((), ("-",))
        return "python" if is_open else ""
    is_shell = command.program in ("sh", "bash", "dash", "zsh", "ksh", "ash")
    return "shell" if is_shell and all(word.startswith("-") for word in command.arguments) else ""


def script_start(command: ShellCommand) -> tuple[str, str] | None:
    """The path of the script that a command runs, and its language: ``python``, ``shell``, or empty for what its first line says."""
    start = python_start(command)
    if start is not None:
        has_script = start.code is None and not start.module and start.arguments
        return (start.arguments[0], "python") if has_script else None
    if command.program in ("sh", "bash", "dash", "zsh", "ksh", "ash", "source", "."):
        if any(re.fullmatch(r"-\w*c", word) for word in command.arguments):
            return None
        path = next((word for word in command.arguments if not word.startswith("-")), "")
        return (path, "shell") if path else None
    return (command.words[0], "") if command.words and "/" in command.words[0] else None


def python_texts(command: ShellCommand) -> list[str]:
    """The Python that a command runs, where its words or its input say it."""
    start = python_start(command)
    return [start.code] if start is not None and start.code else []
