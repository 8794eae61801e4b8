"""One tool call as what it does: files read and written, commands, Python that it runs. Never raises."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from composer_replication.records import ToolCall
from composer_replication.rollouts.monitor.command_files import FileEffect, copies, file_effects
from composer_replication.rollouts.monitor.command_python import python_texts, scripts_of
from composer_replication.rollouts.monitor.other_languages import other_code, paths_of, shell_texts_of
from composer_replication.rollouts.monitor.python_code import LONGEST, PythonCode, cut_text, parse_python
from composer_replication.rollouts.monitor.shell_commands import ShellCommand, read_shell
from composer_replication.rollouts.monitor.tree_paths import Place, locate

_SHELL_RUNNERS = (
    "os.system",
    "os.popen",
    "subprocess.getoutput",
    "subprocess.getstatusoutput",
    "asyncio.create_subprocess_shell",
)
_PROGRAM_RUNNERS = {  # by function, the place of the program's words, or of their list
    "os.execv": 1, "os.execvp": 1, "os.execve": 1, "os.execvpe": 1, "os.execl": 1, "os.execlp": 1, "os.spawnl": 2, "os.spawnlp": 2,
    "os.spawnv": 2, "os.spawnvp": 2, "os.posix_spawn": 1, "os.posix_spawnp": 1, "asyncio.create_subprocess_exec": 0, "pty.spawn": 0,
    "pip.main": 0, "pip._internal.main": 0, "pip._internal.cli.main.main": 0,
}  # fmt: skip
_SUBPROCESS = ("subprocess.run", "subprocess.call", "subprocess.Popen", "subprocess.check_output", "subprocess.check_call")  # fmt: skip
_DEEPEST = 5
_MAKEFILE = re.compile(r"^(GNUm|M|m)akefile$|\.mk$")


@dataclass(slots=True)
class Scripts:
    """Texts that an episode wrote, by path, so that they can be read when they are run.

    ``before`` are the texts that the tree had: they are known as well, and no script of the episode. ``grown`` are
    paths of files that were written piece by piece.
    """

    before: Mapping[str, str] = field(default_factory=dict)
    own: frozenset[str] = frozenset()
    texts: dict[str, str] = field(default_factory=dict)
    grown: set[str] = field(default_factory=set)

    def current(self, place: Place) -> str:
        """The text of a file now, as far as it is known."""
        return self.texts.get(place.path, self.before.get(place.path, "") if place.is_inside else "")

    def script(self, place: Place) -> str:
        """The same where the episode made the file; a file of the task is no script of the policy."""
        return "" if place.path in self.own else self.texts.get(place.path, "")


@dataclass(frozen=True, slots=True)
class Written:
    """What a file holds after a call wrote it."""

    place: Place
    text: str


@dataclass(slots=True)
class CallEvents:
    """What one call, or one piece of code, does.

    ``effects`` are on files, ``commands`` simple shell commands, ``snippets`` Python that is run or was written to be run,
    ``written`` files whose text is known and that no command of this call is seen to run, ``left_out`` in words what was
    too long to be looked at.
    ``is_unreadable`` says that the arguments, or Python that is run, could not be parsed.
    """

    effects: list[FileEffect] = field(default_factory=list)
    commands: list[ShellCommand] = field(default_factory=list)
    snippets: list[PythonCode] = field(default_factory=list)
    written: list[Written] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    is_unreadable: bool = False
    scripts: Scripts = field(default_factory=Scripts)


def call_arguments(call: ToolCall) -> Mapping[str, object] | None:
    """The arguments of a call, or None where they are no JSON object."""
    try:
        value = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def call_events(call: ToolCall, *, root: str = "", scripts: Scripts | None = None) -> CallEvents:
    """What a call of one of the tools does. A tool that is not known does nothing.

    Args:
        call: as the policy wrote it.
        root: absolute path of the tree; empty: unknown.
        scripts: what earlier calls wrote; what this one writes is added.
    """
    events = CallEvents(scripts=scripts or Scripts())
    arguments = call_arguments(call)
    if arguments is None:  # no tool runs it
        events.is_unreadable = True
        return events
    path = _text(arguments, "path")
    place = locate(path, root=root)
    if call.name == "bash":
        add_shell(events, _text(arguments, "command"), root=root)
    elif call.name in ("read_file", "list_files"):
        events.effects.append(FileEffect(place, "read" if call.name == "read_file" else "list", call.name))
    elif call.name == "search":
        events.effects.append(FileEffect(place, "search", call.name, text=_text(arguments, "pattern")))
    elif call.name == "write_file":
        text = _text(arguments, "content")
        events.effects.append(FileEffect(place, "write", call.name, text=text))
        _add_script(events, place, text, root=root)
    elif call.name == "str_replace":
        new = _text(arguments, "new_str")
        events.effects.append(FileEffect(place, "edit", call.name, text=new))
        _add_edit(events, place, _text(arguments, "old_str"), new, root=root)
    return events


def add_shell(events: CallEvents, text: str, *, root: str = "", folder: str = "", depth: int = 0) -> None:
    """Add what a shell text does."""
    reading = read_shell(text, folder=folder)
    if reading.left_out:
        events.left_out.append(reading.left_out)
    for command in reading.commands:
        events.commands.append(command)
        for effect in file_effects(command, root=root):
            events.effects.append(effect)
            if effect.text is not None and effect.how in ("write", "append"):
                _add_written(events, effect, root=root)
        _add_copies(events, command, root=root)
        for code in python_texts(command):
            add_python(events, code, root=root, folder=command.folder, depth=depth)
        if depth >= _DEEPEST:
            _say_nested(events, [path for path, _ in scripts_of(command)] or [other_code(command)])
        else:
            _add_run(events, command, root=root, depth=depth + 1)


def _add_copies(events: CallEvents, command: ShellCommand, *, root: str) -> None:
    """What a command makes of files of this episode under another name: copies, links, ``cat A B > C``."""
    for sources, target in copies(command, root=root):
        texts = [text for source in sources if (text := events.scripts.script(source))]
        if not texts or len(texts) < len(sources):
            continue
        _add_script(events, target, "".join(texts), root=root)
        if "." not in target.name and len(sources) == 1:  # it may be a folder
            below = locate(f"{target.path or '.'}/{sources[0].name}", root=root)
            _add_script(events, below, texts[0], root=root)


def _say_nested(events: CallEvents, texts: Iterable[str]) -> None:
    """Note that a text is run which is not looked at any more."""
    events.left_out += [f"code nested deeper than {_DEEPEST}: {text[:200]}" for text in texts if text][:1]


def _add_run(events: CallEvents, command: ShellCommand, *, root: str, depth: int) -> None:
    """Add what a command runs that this monitor can read: a script of this episode, a one-liner of another language."""
    code = other_code(command)
    for text in shell_texts_of(code):
        add_shell(events, text, root=root, folder=command.folder, depth=depth)
    for path in () if command.program.endswith("awk") else paths_of(code):
        place = locate(path, folder=command.folder, root=root)
        events.effects.append(FileEffect(place, "text", "python", None, command.quote))
    for path, language in scripts_of(command):
        _add_started(
            events, locate(path, folder=command.folder, root=root), language, command, root=root, depth=depth
        )


def _add_started(
    events: CallEvents, place: Place, language: str, command: ShellCommand, *, root: str, depth: int
) -> None:
    """Add what a script of this episode does, unless it was read when it was written."""
    text = events.scripts.script(place)
    if not text or (_is_read_when_written(place) and place.path not in events.scripts.grown):
        return
    if language == "make":
        add_shell(events, _recipes(text, ""), root=root, folder=command.folder, depth=depth)
    elif language == "python" or (not language and re.match(r"#!.*python", text)):
        add_python(events, text, root=root, folder=command.folder, depth=depth)
    else:
        add_shell(events, text, root=root, folder=command.folder, depth=depth)


def add_python(events: CallEvents, text: str, *, root: str = "", folder: str = "", depth: int = 0) -> None:
    """Add what a Python text does when it is run, texts that it executes in turn included."""
    if len(text) > LONGEST:
        events.left_out.append(cut_text(text))
    code = parse_python(text)
    if code is None:
        events.is_unreadable = True
        return
    events.snippets.append(code)
    add_code(events, code, root=root, folder=folder, depth=depth)


def add_code(
    events: CallEvents, code: PythonCode, *, root: str = "", folder: str = "", depth: int = 0
) -> None:
    """Add the file effects of parsed code, and what it hands to a shell or to ``exec``."""
    for use in code.file_uses:
        target = locate(use.target, folder=folder, root=root) if use.target else None
        place = locate(use.path, folder=folder, root=root)
        effect = FileEffect(place, use.how, "python", use.text, code.quote(use.node), target)
        events.effects.append(effect)
        if use.text and depth < _DEEPEST:
            _add_written(events, effect, root=root)
    if depth >= _DEEPEST:
        _say_nested(events, (*_shell_texts(code), *executed_texts(code)))
        return
    for shell in _shell_texts(code):
        add_shell(events, shell, root=root, folder=folder, depth=depth + 1)
    for inner in (*executed_texts(code), *_executed_files(events, code, root=root, folder=folder)):
        add_python(events, inner, root=root, folder=folder, depth=depth + 1)


def executed_texts(code: PythonCode) -> Iterator[str]:
    """Texts that code gives to ``exec``, ``eval`` or ``compile``, where they can be known."""
    for function, call in code.calls:
        if function.removeprefix("builtins.") in ("exec", "eval", "compile", "runpy.run_code") and call.args:
            text = code.names.text(call.args[0])
            if text:
                yield text


def _executed_files(events: CallEvents, code: PythonCode, *, root: str, folder: str) -> Iterator[str]:
    """Scripts of this episode that code reads and executes: ``exec(open(..).read())``, ``runpy.run_path``."""
    if any(
        name.removeprefix("builtins.") in ("exec", "eval", "compile", "runpy.run_path")
        for name, _ in code.calls
    ):
        for use in code.file_uses:
            text = (
                events.scripts.script(locate(use.path, folder=folder, root=root)) if use.how == "read" else ""
            )
            if text and text != code.text:
                yield text


def _shell_texts(code: PythonCode) -> Iterator[str]:
    for function, call in code.calls:
        keyword = next((each.value for each in call.keywords if each.arg in ("args", "cmd")), None)
        given = call.args or ([keyword] if keyword is not None else [])
        if function in _PROGRAM_RUNNERS:
            given = given[_PROGRAM_RUNNERS[function] :]
            listed = _listed(given[0], code) if given else None
            words = listed if listed is not None else [code.names.text(each) for each in given]
            yield _command_line(["pip", *words] if function.startswith("pip") else words)
        elif given and (function in _SHELL_RUNNERS or function in _SUBPROCESS):
            text = code.names.text(given[0])
            listed = _listed(given[0], code)
            if text:
                yield text
            elif listed is not None:
                yield _command_line(listed)


def _listed(node: ast.expr, code: PythonCode) -> list[str | None] | None:
    """The words of a list, or of a text that is split into one."""
    if isinstance(node, ast.Name):
        node = code.names.constants.get(node.id, node)
    if isinstance(node, ast.List | ast.Tuple):
        return [code.names.text(each) for each in node.elts]
    if not isinstance(node, ast.Call):
        return None
    text = None
    if code.names.dotted(node.func) == "shlex.split" and node.args:
        text = code.names.text(node.args[0])
    elif isinstance(node.func, ast.Attribute) and node.func.attr == "split":
        text = code.names.text(node.func.value)
    return list(text.split()) if text else None


def _command_line(words: Sequence[str | None]) -> str:
    """Words as a shell text; a program that is not known is Python's own, as ``sys.executable``."""
    return " ".join(
        _quoted(word) if word is not None else "python" if i == 0 else "''" for i, word in enumerate(words)
    )


def _quoted(word: str) -> str:
    return "'" + word.replace("'", "'\\''") + "'"


def _add_script(events: CallEvents, place: Place, text: str, *, root: str) -> None:
    """A script outside the tree, or for a shell, is written to be run: read it as if it had been."""
    events.scripts.texts[place.path] = text
    events.scripts.grown.discard(place.path)
    if place.name.endswith((".sh", ".bash")):
        add_shell(events, text, root=root, depth=1)
    elif place.name.endswith(".py") and place.is_scratch:
        add_python(events, text, root=root, depth=1)
    elif _MAKEFILE.search(place.name):
        add_shell(events, _recipes(text, events.scripts.before.get(place.path, "")), root=root, depth=1)
    else:
        events.written.append(Written(place, text))


def _add_written(events: CallEvents, effect: FileEffect, *, root: str) -> None:
    """What is written or appended.

    A file that grows piece by piece is not read anew with each: the pieces are, at once, and the whole when the call
    is over, or when it is run.
    """
    place, text = effect.place, effect.text or ""
    start = events.scripts.current(place) if effect.how == "append" else ""
    _add_script(events, place, text, root=root)
    if start:
        joint = "" if start.endswith("\n") else "\n"  # echo ends its line
        events.scripts.texts[place.path] = whole = f"{start}{joint}{text}"
        events.scripts.grown.add(place.path)
        events.written = [each for each in events.written if each.place != place]
        events.written.append(Written(place, whole))


def _add_edit(events: CallEvents, place: Place, old: str, new: str, *, root: str) -> None:
    """What an edit makes of a file whose text is known; of any other file the new words stand for themselves."""
    text = events.scripts.current(place)
    _add_script(events, place, text.replace(old, new, 1) if old and old in text else new, root=root)


def _recipes(text: str, before: str) -> str:
    """The new lines of a makefile that ``make`` hands to a shell."""
    known = set(before.splitlines())
    lines = [line for line in text.splitlines() if line.startswith("\t") and line not in known]
    return "\n".join(line.strip().lstrip("@-+").replace("$$", "$") for line in lines)


def _is_read_when_written(place: Place) -> bool:
    return place.name.endswith((".sh", ".bash")) or (place.name.endswith(".py") and place.is_scratch)


def _text(arguments: Mapping[str, object], name: str) -> str:
    value = arguments.get(name)
    return value if isinstance(value, str) else ""
