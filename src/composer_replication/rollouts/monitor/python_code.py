"""Python text as facts: calls by their true name, what is assigned, texts, files that it reads and writes."""

from __future__ import annotations

import ast
import textwrap
import warnings
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property

from composer_replication.rollouts.monitor.python_constants import Names, literal_texts
from composer_replication.tasks.syntax_trees import parse_syntax

LONGEST = 400_000
"""Characters of one text that are parsed."""
_READERS = ("read_text", "read_bytes", "iterdir", "glob", "rglob", "stat", "exists")
_READ_CALLS = frozenset({
    "glob.glob", "glob.iglob", "os.listdir", "os.scandir", "linecache.getline", "linecache.getlines",
    "runpy.run_path", "fileinput.input", "pkgutil.get_data", "tokenize.open", "os.open", "numpy.load", "zipfile.ZipFile",
    "tarfile.open", "shutil.unpack_archive", "zipimport.zipimporter", "py_compile.compile", "os.stat",
})  # fmt: skip
_ASKERS = frozenset({"isinstance", "issubclass", "hasattr", "getattr", "type", "repr", "id", "typing.cast"})
"""Functions that call nothing that they are given."""
_WALKERS = frozenset({"os.walk", "os.fwalk"})
_DELETERS = frozenset({"os.remove", "os.unlink", "shutil.rmtree", "os.truncate", "os.rmdir"})
_MOVERS = frozenset({"os.rename", "os.replace", "shutil.move"})
_COPIERS = frozenset({"shutil.copy", "shutil.copyfile", "shutil.copy2", "shutil.copytree"})
_LINKERS = frozenset({"os.symlink", "os.link"})
_PATH_WRITERS = {"write_text": "write", "write_bytes": "write", "unlink": "delete", "touch": "append",
                 "symlink_to": "link", "hardlink_to": "link", "rename": "move", "replace": "move"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class FileUse:
    """A file that code names: ``how`` is read, search (all below it), text (only named), write, append, delete, move or link."""

    path: str
    how: str
    node: ast.AST
    text: str | None = None
    target: str = ""
    """Where a link leads, or a move goes."""


class PythonCode:
    """One parsed text. ``new_lines`` are the lines of interest (from 1); None: all."""

    def __init__(self, text: str, tree: ast.Module, new_lines: Collection[int] | None = None) -> None:
        self.text = text
        self.tree = tree
        self.new_lines = None if new_lines is None else frozenset(new_lines)
        self.names = Names(tree)

    def is_new(self, node: ast.AST) -> bool:
        """Whether a node begins on a line of interest."""
        line = getattr(node, "lineno", None)
        return self.new_lines is None or (line is not None and line in self.new_lines)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """The nodes of interest, parents first."""
        return [node for node in ast.walk(self.tree) if self.is_new(node)]

    @cached_property
    def calls(self) -> list[tuple[str, ast.Call]]:
        """Calls with the dotted name of what is called, which may be empty; ``partial(f, x)`` is a call of f, too."""
        found: list[tuple[str, ast.Call]] = []
        for node in self.nodes:
            if not isinstance(node, ast.Call):
                continue
            found.append((self.names.dotted(node.func), node))
            function = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            if function == "partial" and len(node.args) > 1:
                inner = ast.Call(node.args[0], node.args[1:], node.keywords)
                found.append((self.names.dotted(node.args[0]), ast.copy_location(inner, node)))
        return found

    @cached_property
    def handed_on(self) -> list[tuple[str, ast.AST]]:
        """Dotted names that are given to a call, which may call them: ``Timer(1, os._exit)``, ``map(urlopen, urls)``."""
        return [
            (dotted, given)
            for function, call in self.calls if function not in _ASKERS
            for given in (*call.args, *(keyword.value for keyword in call.keywords))
            if isinstance(given, ast.Name | ast.Attribute) and (dotted := self.names.dotted(given))
        ]  # fmt: skip

    @cached_property
    def mentions(self) -> list[tuple[str, ast.AST]]:
        """Every dotted name that is used, imported ones included."""
        found: list[tuple[str, ast.AST]] = []
        for node in self.nodes:
            if isinstance(node, ast.Attribute | ast.Name | ast.Call | ast.Subscript):
                dotted = self.names.dotted(node)
                if dotted:
                    found.append((dotted, node))
            elif isinstance(node, ast.Import):
                found += [(alias.name, node) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                module = "." * node.level + (node.module or "")
                found += [(f"{module}.{alias.name}", node) for alias in node.names]
        return found

    @cached_property
    def stores(self) -> list[tuple[str, ast.AST]]:
        """Dotted names that are assigned, deleted or given by ``setattr``, plain local names left out."""
        found: list[tuple[str, ast.AST]] = []
        for node in self.nodes:
            if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
                is_entry = isinstance(node, ast.Subscript)
                dotted = self.names.dotted(node) or (f"{self.names.dotted(node.value)}[]" if is_entry else "")
                if isinstance(node, ast.Subscript) and self.names.dotted(node.value) == "sys.modules":
                    dotted = "sys.modules[]"
                found.append((dotted, node))
        for function, call in self.calls:
            if function in ("setattr", "builtins.setattr", "delattr", "object.__setattr__", "type.__setattr__") and len(call.args) > 1:  # fmt: skip
                found.append(
                    (f"{self.names.dotted(call.args[0])}.{self.names.text(call.args[1]) or '*'}", call)
                )
            elif (
                function.endswith((".monkeypatch.setattr", "mock.patch.object", "patch.object")) and call.args
            ):
                found.append((f"{self.names.dotted(call.args[0])}.*", call))
            elif function.endswith("mock.patch") and call.args:
                found.append((self.names.text(call.args[0]) or "", call))
        return found

    @cached_property
    def texts(self) -> list[tuple[str, ast.AST]]:
        """Folded texts, docstrings left out."""
        documents = _docstrings(self.tree)
        every = literal_texts(self.names, self.tree)
        return [(text, node) for node, text in every.items() if node not in documents and self.is_new(node)]

    @cached_property
    def file_uses(self) -> list[FileUse]:
        """Files that it reads, writes, removes or links, and every short text, which may be a path."""
        found = [use for function, call in self.calls for use in self._uses_of(function, call)]
        known = {use.path for use in found}
        found += [
            FileUse(text, "text", node) for text, node in self.texts
            if 2 < len(text) < 1000 and not set(" \n") & set(text) and text not in known
        ]  # fmt: skip
        return found

    def _uses_of(self, function: str, call: ast.Call) -> Iterator[FileUse]:
        texts = [self.names.text(argument) for argument in call.args]
        first = texts[0] if texts else None
        second = texts[1] if len(texts) > 1 else None
        if function in ("open", "io.open", "builtins.open", "codecs.open") and first:
            yield FileUse(first, self._mode(call, 1), call)
        elif function in _WALKERS and first:
            yield FileUse(first, "search", call)
        elif function in _READ_CALLS and first:
            yield FileUse(first, "read", call)
        elif function in _DELETERS and first:
            yield FileUse(first, "delete", call)
        elif function in _MOVERS and first:
            yield FileUse(first, "move", call, target=second or "")
            if second:
                yield FileUse(second, "write", call)
        elif function in _COPIERS and first is not None:
            yield FileUse(first, "read", call)
            if second:
                yield FileUse(second, "write", call)
        elif function in _LINKERS and second:
            yield FileUse(second, "link", call, target=first or "")
        elif isinstance(call.func, ast.Attribute):
            yield from self._path_uses(call, call.func, first)

    def _path_uses(self, call: ast.Call, function: ast.Attribute, first: str | None) -> Iterator[FileUse]:
        """What a method of a path does."""
        owner, method = self.names.text(function.value), function.attr
        if method == "write" and first:
            yield from self._written(function.value, first, call)
        if not owner:
            return
        if method == "open":
            yield FileUse(owner, self._mode(call, 0), call)
        elif method in _READERS:
            is_walk = method == "rglob" or (method == "glob" and "**" in (first or ""))
            yield FileUse(owner, "search" if is_walk else "read", call)
            if method in ("glob", "rglob") and first:
                yield FileUse(f"{owner}/{first}", "read", call)
        elif method in _PATH_WRITERS and (method != "replace" or self._is_path(function)):
            text = first if method == "write_text" else None
            yield FileUse(owner, _PATH_WRITERS[method], call, text=text, target=first or "")

    def _written(self, file: ast.expr, text: str, call: ast.Call) -> Iterator[FileUse]:
        """What ``open(path, "w").write(text)`` writes, the open file named by ``with`` or not."""
        if isinstance(file, ast.Name):
            file = self.names.constants.get(file.id, file)
        if isinstance(file, ast.Call) and self.names.dotted(file.func) in (
            "open",
            "io.open",
            "builtins.open",
        ):
            path = self.names.text(file.args[0]) if file.args else None
            mode = self._mode(file, 1)
            if path and mode != "read":
                yield FileUse(path, mode, call, text=text)

    def _is_path(self, function: ast.expr) -> bool:
        """Whether a method is a path's and not a text's: its owner was made by ``Path``."""
        value = function.value if isinstance(function, ast.Attribute) else None
        return isinstance(value, ast.Call) and self.names.dotted(value.func).endswith("Path")

    def _mode(self, call: ast.Call, position: int) -> str:
        given = call.args[position] if len(call.args) > position else None
        keyword = next((each.value for each in call.keywords if each.arg == "mode"), None)
        mode = self.names.text(given) or self.names.text(keyword) or "r"
        return "append" if "a" in mode else "write" if set(mode) & set("wx+") else "read"

    def quote(self, node: ast.AST) -> str:
        """The line on which a node begins."""
        line = getattr(node, "lineno", 0)
        return self._lines[line - 1].strip() if 0 < line <= len(self._lines) else ""

    @cached_property
    def _lines(self) -> list[str]:
        return self.text.splitlines()


def _docstrings(tree: ast.AST) -> set[ast.AST]:
    """Texts that stand as a statement of their own."""
    return {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }


def cut_text(text: str) -> str:
    """What is said of a text that is longer than what is parsed."""
    return f"Python behind its first {LONGEST} characters: ...{text[-80:]}"


def parse_python(text: str, new_lines: Collection[int] | None = None) -> PythonCode | None:
    """A parsed text, or None where it is no Python. A fragment that is set in is parsed as if it were not."""
    if len(text) > LONGEST:  # up to the end of a line, so that the rest can be parsed
        text = text[: text.rfind("\n", 0, LONGEST) + 1 or LONGEST]
    for form in dict.fromkeys((text, textwrap.dedent(text), f"def _():\n{textwrap.indent(text, '    ')}")):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = parse_syntax(form)
            return PythonCode(form, tree, new_lines)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
    return None
