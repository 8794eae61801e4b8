"""A shell text as the commands that it would run: pipelines, substitutions, wrappers, ``sh -c``, ``find -exec``.

Every branch is taken, and every loop once: what might run counts. Never raises.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from composer_replication.rollouts.monitor.known_output import known_output
from composer_replication.rollouts.monitor.shell_words import (
    LONGEST,
    REDIRECTIONS,
    Token,
    Word,
    shell_tokens,
)

MOST_COMMANDS = 5000
"""In one call, nested ones included: a hostile text must end. What is left out is said."""
GROUP = "("
"""Among the wrappers of a command: it ends a group, or a loop, that goes to the background as a whole."""
_DEEPEST = 8
_LONGEST_QUOTE = 400
_MOST_EXPANDED = 1_000_000
"""Characters that the variables of one call become: ``x=$x$x`` doubles with each line."""
_MOST_WORDS = 2000
"""That one expansion becomes."""
_BRACES = re.compile(r"([^{}]*)\{([^{}]*,[^{}]*)\}([^{}]*)")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)\+?=(.*)", re.DOTALL)
_KEYWORDS = frozenset(
    {"if", "then", "else", "elif", "fi", "do", "done", "while", "until", "esac", "{", "}", "!", "time"}
)
_SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ksh", "ash"})
_WRAPPERS: dict[str, frozenset[str]] = {  # by name, the options that take a value
    "sudo": frozenset({"-u", "-g"}), "env": frozenset({"-u", "-C", "-S"}), "nice": frozenset({"-n"}),
    "timeout": frozenset({"-s", "-k"}), "nohup": frozenset(), "setsid": frozenset(), "command": frozenset(),
    "builtin": frozenset(), "exec": frozenset({"-a"}), "stdbuf": frozenset({"-i", "-o", "-e"}), "time": frozenset(),
    "xargs": frozenset({"-I", "-n", "-P", "-d", "-L", "-s", "-a", "-E"}), "ionice": frozenset({"-c", "-n"}),
    "busybox": frozenset(), "watch": frozenset({"-n"}), "doas": frozenset({"-u"}), "chronic": frozenset(),
    "unshare": frozenset(), "parallel": frozenset({"-j"}), "then": frozenset(), "else": frozenset(), "do": frozenset(),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ShellCommand:
    """One simple command.

    ``words`` are its program and arguments, wrappers like ``timeout 5`` taken off and named in ``wrappers``.
    ``redirects`` are operators with targets. ``stdin`` is what it reads, where the text says it. ``folder`` is the
    working directory, relative to where the shell started or absolute. ``upstream`` are the words of the commands
    before it in its pipeline. ``is_background`` says that the shell does not wait for it.
    """

    words: tuple[str, ...]
    assignments: tuple[tuple[str, str], ...] = ()
    redirects: tuple[tuple[str, str], ...] = ()
    stdin: str | None = None
    folder: str = ""
    upstream: tuple[tuple[str, ...], ...] = ()
    wrappers: tuple[str, ...] = ()
    is_background: bool = False

    @property
    def program(self) -> str:
        return posixpath.basename(self.words[0]) if self.words else ""

    @property
    def arguments(self) -> tuple[str, ...]:
        return self.words[1:]

    @property
    def text(self) -> str:
        """The command on one line, for people."""
        return " ".join((*(f"{name}={value}" for name, value in self.assignments), *self.words,
                         *(f"{operator} {target}" for operator, target in self.redirects)))  # fmt: skip

    @property
    def quote(self) -> str:
        """The beginning of its text, whose cost does not grow with the command."""
        words = [word[:_LONGEST_QUOTE] for word in self.words[:_LONGEST_QUOTE]]
        part = ShellCommand(tuple(words), self.assignments[:9], self.redirects[:9])
        return part.text[:_LONGEST_QUOTE]


@dataclass(frozen=True, slots=True)
class ShellReading:
    """The commands of a text, and in words what was not read of it; empty where all was."""

    commands: list[ShellCommand]
    left_out: str = ""


def read_shell(text: str, *, folder: str = "") -> ShellReading:
    """All commands of a shell text in the order in which they stand, nested ones included."""
    reader = _Reader()
    reader.read(text, folder, {}, 0)
    return ShellReading(reader.found[:MOST_COMMANDS], reader.left_out)


class _Reader:
    def __init__(self) -> None:
        self.found: list[ShellCommand] = []
        self.room = _MOST_EXPANDED
        self.left_out = ""

    def read(self, text: str, folder: str, variables: dict[str, str], depth: int) -> str:
        """Note the commands of a text; the answer is the folder in which it ends."""
        if depth > _DEEPEST or len(self.found) >= MOST_COMMANDS:
            self.left_out = (
                self.left_out or f"commands nested deeper than {_DEEPEST}: {text[:_LONGEST_QUOTE]}"
            )
            return folder
        if len(text) > LONGEST:
            self.left_out = f"the text of a command behind its first {LONGEST} characters"
        tokens = shell_tokens(text)
        folders = [folder]
        pipeline: list[ShellCommand] = []
        start = 0
        for position in range(len(tokens) + 1):
            operator = tokens[position].operator if position < len(tokens) else "\n"
            if not operator or operator in REDIRECTIONS:
                continue
            made = self._command(tokens[start:position], folders[-1], variables, pipeline, depth)
            start = position + 1
            if made is not None:
                made = replace(made, is_background=operator == "&")
                pipeline.append(made)
                folders[-1] = self._note(made, folders[-1], variables, depth)
            elif operator == "&" and self.found:  # a group goes to the background: its last command tells
                last = self.found[-1]
                self.found[-1] = replace(last, is_background=True, wrappers=(*last.wrappers, GROUP))
            if operator == "(":
                folders.append(folders[-1])
            elif operator == ")" and len(folders) > 1:
                folders.pop()
            if operator not in ("|", "|&"):
                pipeline = []
            if len(self.found) >= MOST_COMMANDS:
                if position < len(tokens) - 1:
                    self.left_out = f"commands of one call behind the first {MOST_COMMANDS}"
                break
        return folders[-1]

    def _command(
        self, tokens: Sequence[Token], folder: str, variables: dict[str, str],
        pipeline: Sequence[ShellCommand], depth: int,
    ) -> ShellCommand | None:  # fmt: skip
        words: list[str] = []
        redirects: list[tuple[str, str]] = []
        stdin: str | None = None
        operator = ""
        for token in tokens:
            if token.word is None:
                operator = token.operator
                continue
            text = self._expand(token.word, folder, variables, depth)
            if operator in ("<<", "<<-", "<<<"):
                stdin = text
            elif operator:
                redirects.append((operator, text))
            else:
                parts = _split(token.word, text)
                self._bound(len(parts))
                words += parts[:_MOST_WORDS]
            operator = ""
        if pipeline and stdin is None:
            stdin = known_output(pipeline[-1].words, pipeline[-1].stdin)
        if stdin and "xargs" in words:
            self._bound(len(stdin.split()))
        return _named(words, redirects, stdin, folder, tuple(each.words for each in pipeline), variables)

    def _bound(self, num_words: int) -> None:
        if num_words > _MOST_WORDS:
            self.left_out = f"words of a list behind the first {_MOST_WORDS}"

    def _expand(self, word: Word, folder: str, variables: dict[str, str], depth: int) -> str:
        parts: list[str] = []
        for kind, text in word.pieces:
            if kind == "text":
                parts.append(text)
            elif kind == "variable":
                value = variables.get(text, {"HOME": "~", "PWD": folder or "."}.get(text, f"${text}"))
                self.room -= len(value)
                if self.room <= 0:
                    self.left_out = f"variables behind the first {_MOST_EXPANDED} characters of their values"
                parts.append(value if self.room > 0 else f"${text}")
            else:
                start = len(self.found)
                self.read(text, folder, dict(variables), depth + 1)
                inner = self.found[start:]
                said = known_output(inner[-1].words, inner[-1].stdin) if inner else None
                parts.append(said.rstrip("\n") if said is not None else f"$({text})")
        return "".join(parts)[: 2 * LONGEST]

    def _note(self, made: ShellCommand, folder: str, variables: dict[str, str], depth: int) -> str:
        """Keep a command and what it runs in turn; the answer is the folder afterwards."""
        self.found.append(made)
        if not made.words or made.program in ("export", "declare"):
            variables.update(made.assignments)
        program, arguments = made.program, made.arguments
        if program in ("cd", "pushd"):
            target = next((each for each in arguments if not each.startswith("-")), "~")
            return (
                target
                if target.startswith(("/", "~"))
                else posixpath.normpath(posixpath.join(folder, target))
            )
        if program == "for" and len(arguments) > 2:
            variables[arguments[0]] = " ".join(arguments[2:])
        elif program == "set" and "--" in arguments:
            variables["@"] = variables["*"] = " ".join(arguments[arguments.index("--") + 1 :])
        inner = _inner_text(made)
        if inner:
            self.read(inner, folder, dict(variables), depth + 1)
        for words in _inner_commands(made):
            made_inside = _named(list(words), [], None, folder, (*made.upstream, made.words), variables)
            if depth >= _DEEPEST:
                self.left_out = f"commands nested deeper than {_DEEPEST}: {made.quote}"
            elif made_inside is not None:
                self._note(made_inside, folder, variables, depth + 1)
        return folder


def _split(word: Word, text: str) -> list[str]:
    """A word after expansion: what is not quoted falls apart at blanks, and into what its braces list."""
    if "$" in text or (word.is_quoted and not _all_arguments(word)):
        return [text]
    if any(kind != "text" for kind, _ in word.pieces):
        return text.split() if set(text) & set(" \t\n") else [text]
    return _braced(text)


def _all_arguments(word: Word) -> bool:
    return [piece for piece in word.pieces if piece[1]] in ([("variable", "@")], [("variable", "*")])


def _braced(text: str) -> list[str]:
    """``{a,b}c`` is ``ac`` and ``bc``."""
    found = _BRACES.fullmatch(text)
    if found is None:
        return [text]
    return [f"{found[1]}{each}{found[3]}" for each in found[2].split(",")]


def _named(  # noqa: PLR0917  the parts of one command, in the order in which they are read
    words: list[str], redirects: list[tuple[str, str]], stdin: str | None, folder: str,
    upstream: tuple[tuple[str, ...], ...], variables: dict[str, str],
) -> ShellCommand | None:  # fmt: skip
    """The command that words make: keywords, assignments and wrappers taken off."""
    assignments: list[tuple[str, str]] = []
    wrappers: list[str] = []
    at = 0
    while at < len(words):
        assignment = _ASSIGNMENT.fullmatch(words[at])
        name = posixpath.basename(words[at])
        if words[at] in _KEYWORDS or not words[at]:
            at += 1
        elif assignment:
            assignments.append((assignment[1], assignment[2]))
            at += 1
        elif name in ("export", "declare", "local", "readonly", "typeset") and at + 1 < len(words):
            assignments += [(m[1], m[2]) for word in words[at + 1 :] if (m := _ASSIGNMENT.fullmatch(word))]
            break
        elif name in _WRAPPERS and at + 1 < len(words):
            start, at = at + 1, _unwrapped(name, words, at + 1)
            if name == "xargs" and stdin and name not in wrappers:
                words = _with_input(words, start, at, stdin.split()[:_MOST_WORDS])
            wrappers.append(name)
        else:
            break
    words = words[at:]
    if not words and not assignments and not redirects:
        return None
    if not words:
        variables.update(assignments)
    return ShellCommand(tuple(words), tuple(assignments), tuple(redirects), stdin, folder, upstream, tuple(wrappers))  # fmt: skip


def _with_input(words: list[str], start: int, at: int, given: list[str]) -> list[str]:
    """What ``xargs`` runs: its command with the words of its input, at the end or for a placeholder.

    Its options stand from ``start`` up to ``at``, its command behind them.
    """
    mark = next((words[i + 1] for i in range(start, at - 1) if words[i] in ("-I", "-i")), "")
    if not mark or not given:
        return [*words, *given]
    return [*words[:at], *(word.replace(mark, given[0]) for word in words[at:])]


def _unwrapped(name: str, words: list[str], at: int) -> int:
    """Where the command of a wrapper begins."""
    with_value = _WRAPPERS[name]
    while at < len(words) and words[at].startswith("-") and len(words[at]) > 1:
        at += 2 if words[at] in with_value else 1
    if name == "timeout" and at < len(words) and words[at][:1].isdigit():
        at += 1
    return at


def _inner_text(made: ShellCommand) -> str:
    """The shell text that a command runs: ``sh -c TEXT``, ``eval TEXT``, ``TEXT | sh``, ``find -exec``."""
    if made.program == "eval":
        return " ".join(made.arguments)
    if made.program in _SHELLS:
        for position, word in enumerate(made.arguments):
            if re.fullmatch(r"-\w*c", word):
                return " ".join(made.arguments[position + 1 : position + 2])
        if _is_substituted(made):
            return made.arguments[0].removeprefix(_SUBSTITUTED)
        is_script = any(not word.startswith("-") for word in made.arguments)
        return made.stdin if made.stdin and not is_script else ""
    if made.program in ("source", "."):
        return made.arguments[0].removeprefix(_SUBSTITUTED) if _is_substituted(made) else ""
    if made.program in ("script", "su") and "-c" in made.arguments:
        return " ".join(made.arguments[made.arguments.index("-c") + 1 :][:1])
    return ""


_SUBSTITUTED = "/dev/fd/63"


def _is_substituted(made: ShellCommand) -> bool:
    """Whether the script is ``<(...)``, and what that prints is known."""
    first = next(iter(made.arguments), "")
    return first.startswith(_SUBSTITUTED) and not first.startswith(f"{_SUBSTITUTED}$(")


def _inner_commands(made: ShellCommand) -> list[tuple[str, ...]]:
    """The commands that ``find`` runs for what it finds; ``{}`` stands for the pattern."""
    if made.program not in ("find", "fd"):
        return []
    found: list[tuple[str, ...]] = []
    words = made.arguments
    pattern = next(
        (words[i + 1] for i, w in enumerate(words[:-1]) if w in ("-name", "-path", "-iname")), "{}"
    )
    start = None
    for position, word in enumerate(words):
        if start is None and word in ("-exec", "-execdir", "-ok", "-x"):
            start = position + 1
        elif start is not None and (word in (";", "+") or position == len(words) - 1):
            end = position if word in (";", "+") else position + 1
            found.append(tuple(each.replace("{}", pattern) for each in words[start:end]))
            start = None
    return found
