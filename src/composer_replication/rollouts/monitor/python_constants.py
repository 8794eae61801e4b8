"""What an expression is, where the text alone says so: folded strings, and the dotted names behind aliases."""

from __future__ import annotations

import ast
import builtins
import codecs
import posixpath
import re
from collections import Counter
from collections.abc import Mapping, Sequence

from composer_replication.rollouts.monitor.known_output import decoded_base64

_DEEPEST = 40
_LONGEST = 100_000
_IMPORTERS = ("__import__", "builtins.__import__", "importlib.import_module", "importlib.__import__")
_KNOWN_PLACES = {
    "pathlib.Path.home": "~", "Path.home": "~", "pathlib.Path.cwd": ".", "os.getcwd": ".",
    "tempfile.gettempdir": "/tmp",  # noqa: S108  named, not used
}  # fmt: skip
_PATHS = ("pathlib.Path", "Path", "pathlib.PurePath", "str", "os.fspath", "bytes", "os.path.abspath", "os.path.expanduser", "os.path.realpath")  # fmt: skip


_PUBLIC = {
    "posix": "os", "nt": "os", "_posixsubprocess": "subprocess", "_io": "io", "_socket": "socket", "_signal": "signal",
    "_frozen_importlib": "importlib", "_imp": "imp", "_ctypes": "ctypes", "posixpath": "os.path",
}  # fmt: skip
"""Modules under whose other name the interpreter keeps what a public one offers."""


def _public(dotted: str) -> str:
    """The public name of a dotted name: ``posix._exit`` is ``os._exit``."""
    first, dot, rest = dotted.partition(".")
    return f"{_PUBLIC[first]}{dot}{rest}" if dot and first in _PUBLIC else dotted


class Names:
    """The aliases and constants of one module, by which its expressions are read.

    An alias is an import or an assignment like ``leave = os._exit``; the last one counts, wherever it stands.
    """

    def __init__(self, tree: ast.AST) -> None:
        self.aliases: dict[str, str] = {}
        self.constants: dict[str, ast.expr] = {}
        self.parameters: set[str] = set()
        self._stars: list[str] = []
        self._defined: set[str] = set()
        self._num_assigned: Counter[str] = Counter()
        for node in ast.walk(tree):
            self._note(node)
        self.constants = {
            name: value for name, value in self.constants.items() if self._num_assigned[name] == 1
        }
        for name, value in list(self.constants.items()):
            if isinstance(value, ast.Attribute | ast.Call | ast.Name | ast.Subscript):
                dotted = self.dotted(value)
                if dotted and dotted != name and name not in self.aliases:
                    self.aliases[name] = dotted

    def _note(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.asname or alias.name.partition(".")[0]
                self.aliases[name] = alias.name if alias.asname else name
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            for alias in node.names:
                if alias.name == "*":
                    self._stars.append(module)
                else:
                    self.aliases[alias.asname or alias.name] = f"{module}.{alias.name}"
        else:
            self._note_name(node)

    def _note_name(self, node: ast.AST) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            self._defined.add(node.name)
        elif isinstance(node, ast.arg):
            self.parameters.add(node.arg)
        elif isinstance(node, ast.For) and isinstance(node.iter, ast.List | ast.Tuple) and node.iter.elts:
            self._note_value(node.target, node.iter.elts[0])  # a loop is gone through once
        elif isinstance(node, ast.withitem) and isinstance(node.optional_vars, ast.Name):
            self._note_value(node.optional_vars, node.context_expr)
        elif isinstance(node, ast.Assign | ast.NamedExpr | ast.AnnAssign) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                self._note_value(target, node.value)

    def _note_value(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name):
            self._num_assigned[target.id] += 1
            self.constants[target.id] = value

    def dotted(self, node: ast.AST | None, depth: int = 0) -> str:
        """The dotted name of an expression, aliases resolved: ``os._exit``; empty where it has none."""
        if depth > _DEEPEST:
            return ""
        if isinstance(node, ast.Name):
            return _public(self.aliases.get(node.id) or self._starred(node.id))
        if isinstance(node, ast.Attribute):
            owner = self.dotted(node.value, depth + 1)
            return _public(f"{owner}.{node.attr}"[-500:]) if owner else ""
        if isinstance(node, ast.Subscript):
            return _public(
                self._of_mapping(self.dotted(node.value, depth + 1), self.text(node.slice, depth + 1))
            )
        if isinstance(node, ast.Call):
            return _public(self._of_call(node, depth + 1))
        return ""

    def _starred(self, name: str) -> str:
        """A name that nothing here gives comes from the first ``import *``, unless Python itself has it."""
        is_known = name in self._defined or name in self.parameters or name in self._num_assigned
        return name if not self._stars or is_known or hasattr(builtins, name) else f"{self._stars[0]}.{name}"

    def _of_mapping(self, owner: str, key: str | None) -> str:
        if not key:
            return ""
        if owner == "sys.modules":
            return key
        if owner in ("__builtins__", "builtins.__dict__", "__builtins__.__dict__"):
            return f"builtins.{key}"
        return f"{owner.removesuffix('.__dict__')}.{key}" if owner.endswith(".__dict__") else ""

    def _of_call(self, node: ast.Call, depth: int) -> str:
        function = self.dotted(node.func, depth)
        first = node.args[0] if node.args else None
        if function in _IMPORTERS:
            module = self.text(first, depth) or ""
            is_top = function.endswith("__import__") and not node.keywords and len(node.args) < 4
            return module.partition(".")[0] if is_top else module  # __import__("a.b") gives a
        if function in ("functools.partial", "partial"):
            return self.dotted(first, depth)
        if isinstance(node.func, ast.Call) and self.dotted(node.func.func, depth) == "operator.attrgetter":
            owner, name = self.dotted(first, depth), self.text(next(iter(node.func.args), None), depth)
            return f"{owner}.{name}" if owner and name else ""
        if function in ("getattr", "builtins.getattr") and len(node.args) > 1:
            owner, name = self.dotted(first, depth), self.text(node.args[1], depth)
            return f"{owner}.{name}" if owner and name else ""
        if function in ("vars", "builtins.vars"):
            owner = self.dotted(first, depth)
            return f"{owner}.__dict__" if owner else ""
        if function == "sys.modules.get":
            return self.text(first, depth) or ""
        return ""

    def text(self, node: ast.AST | None, depth: int = 0) -> str | None:
        """The text that an expression is, folded from constants; None where it cannot be known."""
        if depth > _DEEPEST or node is None:
            return None
        if isinstance(node, ast.Constant):
            value = node.value
            if isinstance(value, bytes):
                return value.decode("utf-8", "replace")
            return value if isinstance(value, str) else None
        if isinstance(node, ast.Name):
            known = self.constants.get(node.id)
            return self.text(known, depth + 5) if known is not None else None
        if isinstance(node, ast.JoinedStr):
            return "".join(self._formatted(value, depth + 1) for value in node.values)[:_LONGEST]
        if isinstance(node, ast.BinOp):
            return self._of_operation(node, depth + 1)
        if isinstance(node, ast.Subscript) and _is_reversal(node.slice):
            inner = self.text(node.value, depth + 1)
            return inner[::-1] if inner is not None else None
        return self._of_text_call(node, depth + 1) if isinstance(node, ast.Call) else None

    def _formatted(self, node: ast.expr, depth: int) -> str:
        found = self.text(node.value if isinstance(node, ast.FormattedValue) else node, depth)
        return found if found is not None else "{}"

    def _of_operation(self, node: ast.BinOp, depth: int) -> str | None:
        left, right = self.text(node.left, depth), self.text(node.right, depth)
        if isinstance(node.op, ast.Add) and left is not None and right is not None:
            return (left + right)[:_LONGEST]
        if isinstance(node.op, ast.Mod) and left is not None:
            given = node.right.elts if isinstance(node.right, ast.Tuple) else [node.right]
            return _filled(r"%[-\d.]*[srd]", left, [self.text(each, depth) for each in given])
        if isinstance(node.op, ast.Div) and right is not None:
            return posixpath.join(left if left is not None else "{}", right)[:_LONGEST]
        return None

    def _of_text_call(  # noqa: PLR0911  a table of functions, one return each
        self, node: ast.Call, depth: int
    ) -> str | None:
        function = self.dotted(node.func, depth)
        method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        texts = [self.text(argument, depth) for argument in node.args]
        first = texts[0] if texts else None
        built = self._of_builder(node, function, method, texts, depth)
        if built is not None:
            return built
        if function in _PATHS:
            return "/".join(text for text in texts if text is not None) if first is not None else None
        if function in ("os.path.join", "posixpath.join"):
            known = [text if text is not None else "{}" for text in texts]
            return posixpath.join(*known)[:_LONGEST] if known else None
        if function == "chr" and isinstance(node.args[0] if node.args else None, ast.Constant):
            return _character(node.args[0])
        if method == "join" and node.args and isinstance(node.args[0], ast.List | ast.Tuple):
            parts = [self.text(each, depth) for each in node.args[0].elts]
            glue = self.text(node.func.value, depth) if isinstance(node.func, ast.Attribute) else None
            return (glue or "").join(part for part in parts if part is not None) if any(parts) else None
        if method in ("b64decode", "urlsafe_b64decode", "standard_b64decode", "fromhex", "unhexlify"):
            return decoded(method, first)
        if function == "codecs.decode" and first is not None and len(texts) > 1 and "rot" in (texts[1] or ""):
            return codecs.decode(first, "rot13")
        if method in ("decode", "encode", "strip", "expanduser", "resolve", "absolute", "lower") and isinstance(node.func, ast.Attribute):  # fmt: skip
            return self.text(node.func.value, depth)
        if method == "replace" and len(texts) == 2 and isinstance(node.func, ast.Attribute):
            inner = self.text(node.func.value, depth)
            return inner.replace(texts[0] or "", texts[1] or "")[:_LONGEST] if inner and texts[0] else inner
        if method == "joinpath" and isinstance(node.func, ast.Attribute):
            steps = [self.text(node.func.value, depth) or "{}", *(text or "{}" for text in texts)]
            return posixpath.join(*steps)[:_LONGEST]
        return None

    def _of_builder(
        self, node: ast.Call, function: str, method: str, texts: Sequence[str | None], depth: int
    ) -> str | None:
        """Texts that are put together of others, or of numbers."""
        if function in _KNOWN_PLACES:
            return _KNOWN_PLACES[function]
        if method == "format" and isinstance(node.func, ast.Attribute):
            form = self.text(node.func.value, depth)
            return _filled(r"\{\d*\}", form, texts) if form is not None else None
        if node.args and (method == "join" or function in ("bytes", "bytearray")):
            return _characters(node.args[0])
        return None


def decoded(method: str, text: str | None) -> str | None:
    """What a constant stands for in base64 or hexadecimal digits."""
    if text is None:
        return None
    if method in ("fromhex", "unhexlify"):
        try:
            return bytes.fromhex(text).decode("utf-8", "replace")
        except ValueError:
            return None
    return decoded_base64(text.replace("-", "+").replace("_", "/"))


def _filled(mark: str, form: str, texts: Sequence[str | None]) -> str:
    """A form with its marks replaced in turn; what is not known leaves ``{}``."""
    rest = iter(texts)
    return re.sub(mark, lambda _: next(rest, None) or "{}", form)[:_LONGEST]


def _characters(node: ast.expr) -> str | None:
    """The text of ``[103, 105]``, ``map(chr, [...])`` and ``(chr(c) for c in [...])``; None for anything else."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "map" and len(node.args) == 2:  # fmt: skip
        node = node.args[1]
    elif isinstance(node, ast.GeneratorExp | ast.ListComp):
        node = node.generators[0].iter
    if not isinstance(node, ast.List | ast.Tuple) or not node.elts:
        return None
    letters = [_character(each) for each in node.elts]
    return "".join(each for each in letters if each) if None not in letters else None


def _character(node: ast.expr) -> str | None:
    value = node.value if isinstance(node, ast.Constant) else None
    return chr(value) if isinstance(value, int) and 0 <= value < 0x110000 else None


def _is_reversal(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Slice) and node.lower is None and node.upper is None
        and isinstance(node.step, ast.UnaryOp) and isinstance(node.step.op, ast.USub)
    )  # fmt: skip


def literal_texts(names: Names, tree: ast.AST) -> Mapping[ast.AST, str]:
    """Every expression that is a text, the largest ones only: parts of a folded one are left out."""
    found: dict[ast.AST, str] = {}
    inside: set[ast.AST] = set()
    for node in ast.walk(tree):  # parents come first
        if node in inside:
            inside.update(ast.iter_child_nodes(node))
            continue
        if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp | ast.Call | ast.Subscript):
            text = names.text(node)
            if text is not None:
                found[node] = text
                inside.update(ast.iter_child_nodes(node))
    return found
