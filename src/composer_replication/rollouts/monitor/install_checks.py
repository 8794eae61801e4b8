"""Which package managers are asked for what: the task's own package, or something else?"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import dropwhile

from composer_replication.rollouts.monitor.command_python import python_start
from composer_replication.rollouts.monitor.scene import Scene
from composer_replication.rollouts.monitor.shell_commands import ShellCommand

_WITH_VALUE = frozenset({"-r", "--requirement", "-t", "--target", "-d", "--dest", "-i", "--index-url", "--extra-index-url", "-c", "--constraint", "--prefix", "--root", "-f", "--find-links", "--python", "--no-binary", "--only-binary"})  # fmt: skip
_OTHERS = {
    "apt": ("install", "source", "download"), "apt-get": ("install", "source", "download"), "conda": ("install", "create"),
    "mamba": ("install", "create"), "npm": ("install", "i", "pack"), "yarn": ("add",), "brew": ("install",), "apk": ("add",),
    "dnf": ("install", "download"), "yum": ("install",), "poetry": ("add",), "pdm": ("add",), "uv": ("add",), "gem": ("install", "fetch"),
    "pipx": ("install", "run"), "cargo": ("install",),
}  # fmt: skip


def install_classes(command: ShellCommand, scene: Scene) -> Iterator[str]:
    """The classes that a command of a package manager belongs to."""
    start = python_start(command)
    if start is not None and start.module == "pip":
        yield from _pip(start.arguments, scene)
    elif own := _run_with(command, scene):
        yield own
    elif command.program in ("easy_install", "easy_install-3") and command.arguments:
        yield "package-download" if any(map(scene.is_own_name, command.arguments)) else "tool-install"
    elif (
        command.program in _OTHERS
        and command.arguments[:1]
        and command.arguments[0] in _OTHERS[command.program]
    ):
        wanted = [re.sub(r"^python3?-", "", word) for word in command.arguments[1:]]
        yield "package-download" if any(map(scene.is_own_name, wanted)) else "tool-install"


def builds(command: ShellCommand) -> bool:
    """Whether a command makes a wheel or an archive of the tree itself."""
    words = command.arguments
    start = python_start(command)
    if start is not None and start.module == "pip":
        rest = start.arguments[1:]
        return start.arguments[:1] == ("wheel",) and any(map(_is_local, _requirements(rest)))
    if start is not None and start.code is None:
        is_setup = start.arguments[:1] == ("setup.py",) and bool(
            {"sdist", "bdist_wheel", "bdist"} & set(words)
        )
        return start.module in ("build", "flit", "hatch", "hatchling", "poetry") or is_setup
    return command.program == "pyproject-build" or (
        command.program in ("uv", "poetry", "flit", "hatch", "pdm") and words[:1] == ("build",)
    )


def packs(command: ShellCommand) -> bool:
    """Whether a command makes an archive out of files."""
    if command.program == "tar":
        return any(re.match(r"--create|-?[a-zA-Z]*c", word) for word in command.arguments)
    return command.program == "zip" or (command.program == "git" and "archive" in command.arguments[:1])


def _run_with(command: ShellCommand, scene: Scene) -> str:
    """``uvx PACKAGE``, ``uv run --with PACKAGE``: runs that fetch what they need."""
    words = command.arguments
    runs = command.program == "uvx" or (command.program == "uv" and words[:1] in (("run",), ("tool",)))
    named = [words[i + 1] for i, word in enumerate(words[:-1]) if word in ("--with", "--from")]
    named += words[:1] if command.program == "uvx" else []
    return "package-download" if runs and any(map(scene.is_own_name, named)) else ""


def _pip(arguments: Sequence[str], scene: Scene) -> Iterator[str]:
    words = list(
        dropwhile(lambda word: word.startswith("-"), (w for w in arguments if not w.startswith("--")))
    )
    if not words:
        return
    action = words[0]
    rest = arguments[arguments.index(action) + 1 :]
    wanted = _requirements(rest)
    if action == "show":
        if {"-f", "--files"} & set(arguments) and any(map(scene.is_own_name, rest)):
            yield "installed-copy"
    elif action in ("download", "wheel") and not all(map(_is_local, wanted)):
        yield "package-download"
    elif action == "cache" and words[1:2] in (["list"], ["dir"]):
        yield "installed-copy"
    elif action in ("install", "index"):
        if any(_is_own(word, scene) for word in wanted):
            yield "package-download"
        elif any(not _is_local(word) for word in wanted):
            yield "tool-install"


def _requirements(words: Sequence[str]) -> list[str]:
    found: list[str] = []
    skips = False
    for word in words:
        if skips:
            skips = False
        elif word.startswith("-"):
            skips = word in _WITH_VALUE
        else:
            found.append(word)
    return found


def _is_own(word: str, scene: Scene) -> bool:
    if "://" in word or word.startswith("git+"):
        return any(scene.is_own_name(part.removesuffix(".git")) for part in re.split(r"[/@#=]", word)[3:])
    return not _is_local(word) and scene.is_own_name(word)


def _is_local(word: str) -> bool:
    """Whether a requirement is the tree itself, or a folder of it."""
    return word in (".", "..") or word.startswith((".[", "./", "../", "/", ".\\[")) or word.endswith("/")
