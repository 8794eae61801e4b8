"""Which files does a shell command read, write, remove or link?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from composer_replication.rollouts.monitor.command_python import python_start
from composer_replication.rollouts.monitor.known_output import known_output
from composer_replication.rollouts.monitor.shell_commands import ShellCommand
from composer_replication.rollouts.monitor.tree_paths import Place, locate

_PLAIN_READERS = frozenset({
    "cat", "tac", "head", "tail", "less", "more", "nl", "xxd", "od", "hexdump", "strings", "wc", "file", "zcat", "bat",
    "base64", "diff", "cmp", "source", ".", "vim", "vi", "nano", "view", "column", "cut", "sort", "uniq", "rev", "stat",
    "readlink", "realpath", "unzip", "tar", "zipinfo", "gunzip", "gzip", "bsdtar", "7z", "zless", "bzcat", "xzcat", "for", "paste",
    "sqlite3", "rsync", "scp", "jq", "decompyle3", "uncompyle6", "pycdc", "pycdas", "openssl", "zgrep", "pr", "fold",
})  # fmt: skip
_LISTERS = frozenset({"ls", "tree", "find", "fd", "du", "dir", "exa", "locate"})
_SEARCHERS = frozenset({"grep", "egrep", "fgrep", "rg", "ag", "ack", "sed", "awk", "gawk", "perl"})
_VALUE_OPTIONS: dict[str, frozenset[str]] = {
    "head": frozenset({"-n", "-c", "--lines", "--bytes"}), "tail": frozenset({"-n", "-c", "--lines", "--bytes"}),
    "grep": frozenset({"-A", "-B", "-C", "-m", "-e", "-f", "--include", "--exclude", "--exclude-dir"}),
    "rg": frozenset({"-A", "-B", "-C", "-m", "-e", "-g", "-t", "-T", "--glob"}),
    "sed": frozenset({"-e", "-f"}), "awk": frozenset({"-F", "-v", "-f"}), "ls": frozenset({"-I", "--ignore"}),
    "tree": frozenset({"-I", "-P", "-L"}), "xxd": frozenset({"-l", "-s", "-c"}), "od": frozenset({"-A", "-t", "-N", "-j"}),
    "tar": frozenset({"-C", "--exclude"}), "du": frozenset({"-d", "--exclude"}), "strings": frozenset({"-n", "-e"}),
    "cut": frozenset({"-d", "-f", "-c"}), "sort": frozenset({"-k", "-t", "-o"}), "hexdump": frozenset({"-n", "-s", "-e"}),
}  # fmt: skip
_VALUE_OPTIONS["egrep"] = _VALUE_OPTIONS["fgrep"] = _VALUE_OPTIONS["grep"]


@dataclass(frozen=True, slots=True)
class FileEffect:
    """What happens to one file.

    ``how`` is read, list, search, text (a text of code that may be a path), write, append, edit, delete, move or link.
    ``text`` is what is written, or the pattern of a search, where known; ``target`` where a link leads or a move goes.
    """

    place: Place
    how: str
    tool: str
    text: str | None = None
    quote: str = ""
    target: Place | None = None


def positionals(command: ShellCommand) -> list[str]:
    """The arguments that are no options and no values of options."""
    with_value = _VALUE_OPTIONS.get(command.program, frozenset())
    found: list[str] = []
    skips = False
    only_words = False
    for word in command.arguments:
        if skips:
            skips = False
        elif only_words or not word.startswith("-") or word == "-":
            found.append(word)
        elif word == "--":
            only_words = True
        else:
            skips = word in with_value
    return found


def file_effects(command: ShellCommand, *, root: str = "") -> Iterator[FileEffect]:
    """What a command does to files, as far as its words say.

    Args:
        command: a simple command.
        root: absolute path of the tree; empty: unknown.
    """

    def place(text: str) -> Place:
        return locate(text, folder=command.folder, root=root)

    for operator, target in command.redirects:
        if operator in (">", ">|", "&>", ">>", "&>>", "<>") and not target.startswith("&"):
            how = "append" if ">>" in operator else "write"
            yield _effect(command, place(target), how, known_output(command.words, command.stdin))
        elif operator == "<":
            yield _effect(command, place(target), "read")
    yield from _reads(command, place)
    yield from _writes(command, place)


def _effect(
    command: ShellCommand, place: Place, how: str, text: str | None = None, target: Place | None = None
) -> FileEffect:
    return FileEffect(place, how, "bash", text, command.quote, target)


def _reads(command: ShellCommand, place: Callable[[str], Place]) -> Iterator[FileEffect]:
    words = positionals(command)
    program = command.program
    how, chosen = "read", list[str]()
    if program == "for":
        chosen = words[2:]
    elif program in _PLAIN_READERS:
        chosen = words
    elif program in _LISTERS:
        how, chosen = "list", (_find_starts(command) if program == "find" else words) or ["."]
    elif program in _SEARCHERS:
        has_pattern_option = any(word in ("-e", "-f") for word in command.arguments)
        how, chosen = "search", words if has_pattern_option else words[1:]
    elif program in ("cp", "mv", "install") and len(words) > 1:
        chosen = words[:-1]
    elif program == "dd":
        chosen = [word[3:] for word in words if word.startswith("if=")]
    else:
        start = python_start(command)
        if start is not None and start.module in _READING_MODULES:
            chosen = [word for word in start.arguments if not word.startswith("-")]
    for word in chosen:
        yield _effect(command, place(word), how)


def copies(command: ShellCommand, *, root: str = "") -> Iterator[tuple[list[Place], Place]]:
    """Which files a command copies, links, moves or joins to which."""
    words = positionals(command)
    if command.program in ("cp", "mv", "install", "ln") and len(words) > 1:
        target = locate(words[-1], folder=command.folder, root=root)
        for word in words[:-1]:
            yield [locate(word, folder=command.folder, root=root)], target
    elif command.program == "cat" and words:
        sources = [locate(word, folder=command.folder, root=root) for word in words]
        for operator, target_word in command.redirects:
            if operator in (">", ">|"):
                yield sources, locate(target_word, folder=command.folder, root=root)


def _find_starts(command: ShellCommand) -> list[str]:
    starts: list[str] = []
    for word in command.arguments:
        if word in ("-H", "-L", "-P"):
            continue
        if word.startswith(("-", "(", "!")):
            break
        starts.append(word)
    return starts


_READING_MODULES = frozenset({"json.tool", "tokenize", "ast", "dis", "base64", "pickletools", "gzip"})
_CHANGERS: dict[str, tuple[str, slice]] = {  # what is done, and to which of the words
    "rm": ("delete", slice(None)), "unlink": ("delete", slice(None)), "shred": ("delete", slice(None)),
    "rmdir": ("delete", slice(None)), "truncate": ("delete", slice(None)), "touch": ("touch", slice(None)),
    "chmod": ("mode", slice(1, None)), "chown": ("mode", slice(1, None)), "cp": ("write", slice(-1, None)),
    "install": ("write", slice(-1, None)), "rsync": ("write", slice(-1, None)), "mv": ("write", slice(-1, None)),
}  # fmt: skip


def _writes(command: ShellCommand, place: Callable[[str], Place]) -> Iterator[FileEffect]:
    words = positionals(command)
    program, arguments = command.program, command.arguments
    if program in _CHANGERS:
        how, which = _CHANGERS[program]
        if program == "mv":
            for word in words[:-1]:
                yield _effect(command, place(word), "move", target=place(words[-1]))
        for word in words[which] if how != "write" or len(words) > 1 else ():
            yield _effect(command, place(word), how)
    elif program == "tee":
        how = "append" if {"-a", "--append"} & set(arguments) else "write"
        for word in words:
            yield _effect(command, place(word), how, command.stdin)
    elif program == "ln" and words:
        name = words[-1] if len(words) > 1 else words[0].rpartition("/")[2]
        yield _effect(command, place(name), "link", target=place(words[0]))
    elif program == "git":
        yield from _git_writes(command, words, place)
    else:
        edited = _edited(command, words)
        said = (command.stdin or command.text) if edited else ""
        for word in edited:
            yield _effect(command, place(word), "edit", said)


def _edited(command: ShellCommand, words: list[str]) -> list[str]:
    """The files that an editor changes in place."""
    program, arguments = command.program, command.arguments
    if program in ("sed", "perl", "ruby") and any(_in_place(word) for word in arguments):
        return words if "-e" in arguments else words[1:]
    if program == "dd":
        return [word[3:] for word in words if word.startswith("of=")]
    return words[:1] if program in ("patch", "ed", "ex") else []


def _in_place(word: str) -> bool:
    return word.startswith(("-i", "--in-place")) or (word[:1] == "-" and word[1:2] != "-" and "i" in word[:4])


def _git_writes(
    command: ShellCommand, words: list[str], place: Callable[[str], Place]
) -> Iterator[FileEffect]:
    if words[:1] == ["rm"] and "--cached" not in command.arguments:
        for word in words[1:]:
            yield _effect(command, place(word), "delete")
    elif words[:1] == ["mv"] and len(words) > 2:
        for word in words[1:-1]:
            yield _effect(command, place(word), "move", target=place(words[-1]))
