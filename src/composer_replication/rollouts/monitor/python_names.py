"""Python text as facts: its new nodes, the dotted names behind aliases, and texts folded from constants."""

from __future__ import annotations

import ast
import builtins
from functools import cached_property

from composer_replication.tasks.syntax_trees import parsed

LONGEST = 400_000
"""Characters of one text that are parsed."""
_LONGEST_TEXT = 10_000
_DEEPEST = 30
_IMPORTERS = ("__import__", "importlib.import_module")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


class PythonCode:
    """One parsed text; ``new`` are the numbers of its new lines."""

    def __init__(self, text: str, tree: ast.Module, new: set[int]) -> None:
        self._lines = text.splitlines()
        self._owners: dict[ast.AST, ast.AST | None] = {}
        # By the function or module that binds a name, and the name: what is imported, and what is assigned.
        self._bound: set[tuple[ast.AST | None, str]] = set()
        self._imported: dict[tuple[ast.AST | None, str], str] = {}
        self._values: dict[tuple[ast.AST | None, str], list[ast.AST]] = {}
        pending: list[tuple[ast.AST, ast.AST | None]] = [(tree, None)]
        while pending:
            node, owner = pending.pop()
            self._owners[node] = owner
            for name, what in _bound_by(node):
                self._bound.add((owner, name))
                if isinstance(what, str):
                    self._imported[owner, name] = what
                elif what is not None:
                    self._values.setdefault((owner, name), []).append(what)
            owner = node if isinstance(node, FUNCTIONS) else owner
            pending += [(child, owner) for child in reversed([*ast.iter_child_nodes(node)])]
        self.every = list(self._owners)
        self.nodes = [node for node in self.every if getattr(node, "lineno", 0) in new]
        """New nodes, parents first."""
        self.new = frozenset(self.nodes)

    def quote(self, node: ast.AST) -> str:
        """The line on which a node begins."""
        line = getattr(node, "lineno", 0)
        return self._lines[line - 1].strip() if 0 < line <= len(self._lines) else ""

    def scopes(self, node: ast.AST | None) -> list[ast.AST | None]:
        """The functions that a node stands in, innermost first, and None for the module."""
        found = []
        while node is not None:
            node = self._owners.get(node)
            found.append(node)
        return found

    def place(self, node: ast.AST) -> ast.AST | None:
        """The outermost function that a node stands in."""
        return [None, *self.scopes(node)][-2]

    def _bound_as(self, name: ast.Name) -> str:
        """What a name is imported as where it is bound, itself where it is nowhere; empty for any other binding."""
        for scope in self.scopes(name):
            if (scope, name.id) in self._bound:
                return self._imported.get((scope, name.id), "")
        return name.id

    def assigned(self, name: ast.Name) -> list[ast.AST]:
        """What its own function assigns to a name, or else the module; an argument stands for what is given."""
        own = self._values.get((self._owners.get(name), name.id))
        return own or self._values.get((None, name.id), [])

    def resolved(self, node: ast.AST | None) -> ast.AST | None:
        """What a name stands for, if that is one thing throughout; anything else is itself."""
        values = self.assigned(node) if isinstance(node, ast.Name) else []
        return values[0] if len(values) == 1 and not isinstance(values[0], ast.arg) else node

    def dotted(self, node: ast.AST | None, depth: int = 0) -> str:
        """The dotted name of an expression, aliases resolved: ``os._exit``; empty where it has none.

        ``getattr(a, "b")`` and ``a.__dict__["b"]`` are ``a.b``; ``sys.modules["a"]`` and ``__import__("a")`` are ``a``.
        An argument or variable ``a`` of unknown value is ``?a``: no module of that name.
        """
        if depth > _DEEPEST:
            return ""
        if isinstance(node, ast.Name):
            known = self.resolved(node)
            is_name = known is not node and isinstance(known, ast.Attribute | ast.Name | ast.Call)
            return (self.dotted(known, depth + 5) if is_name else "") or self._bound_as(node) or f"?{node.id}"
        if isinstance(node, ast.Attribute):
            return _joined(self.dotted(node.value, depth + 1), node.attr)
        if isinstance(node, ast.Subscript):
            owner, key = self.dotted(node.value, depth + 1), self.text(node.slice, depth + 1)
            return (key or "") if owner == "sys.modules" else _joined(owner.removesuffix(".__dict__"), key)
        if isinstance(node, ast.Call) and node.args:
            function, first = self.dotted(node.func, depth + 1), node.args[0]
            if function in _IMPORTERS:
                return self.text(first, depth + 1) or ""
            if function == "getattr" and len(node.args) > 1:
                return _joined(self.dotted(first, depth + 1), self.text(node.args[1], depth + 1))
        return ""

    def text(self, node: ast.AST | None, depth: int = 0) -> str | None:
        """The text that an expression is, folded from constants; None where it cannot be known."""
        if depth > _DEEPEST:
            return None
        if isinstance(node, ast.Constant):
            value = node.value.decode("utf-8", "replace") if isinstance(node.value, bytes) else node.value
            return value if isinstance(value, str) else None
        if isinstance(node, ast.Name):
            known = self.resolved(node)
            return self.text(known, depth + 5) if known is not node else None
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            left, right = self.text(node.left, depth + 1), self.text(node.right, depth + 1)
            return (left + right)[:_LONGEST_TEXT] if left is not None and right is not None else None
        return None

    @cached_property
    def calls(self) -> dict[ast.AST, ast.Call]:
        """New calls, by what is called."""
        return {node.func: node for node in self.nodes if isinstance(node, ast.Call)}

    @cached_property
    def mentions(self) -> list[tuple[str, ast.AST]]:
        """Every dotted name that new code uses, imported ones included."""
        found: list[tuple[str, ast.AST]] = []
        for node in self.nodes:
            if isinstance(node, ast.Import):
                found += [(alias.name, node) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                found += [(_imported(node, alias), node) for alias in node.names]
            elif name := self.dotted(node):
                found.append((name, node))
        return found

    @cached_property
    def stores(self) -> list[tuple[str, ast.AST]]:
        """Dotted names that new code assigns or deletes, plain names left out; also by ``setattr`` or ``d.update(...)``."""
        found: list[tuple[str, ast.AST]] = []
        for node in self.nodes:
            if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
                found.append((self.dotted(node), node))
            elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
                owner = self.dotted(node.value)
                key = self.text(node.slice) if owner == "sys.modules" else ""
                found.append((f"{owner}.{key or '*'}", node))
            elif isinstance(node, ast.Call) and node.args:
                function = self.dotted(node.func)
                if function in ("setattr", "delattr") and len(node.args) > 1:
                    found.append((f"{self.dotted(node.args[0])}.{self.text(node.args[1]) or '*'}", node))
                elif function.endswith((".update", ".setdefault", ".__setitem__")):
                    found.append((function, node))
        return found

    @cached_property
    def texts(self) -> list[tuple[str, ast.AST]]:
        """Texts of new code, sums of constants folded, docstrings left out."""
        seen: set[ast.AST] = {node.value for node in self.every if isinstance(node, ast.Expr)}
        found: list[tuple[str, ast.AST]] = []
        for node in self.nodes:
            if isinstance(node, ast.Constant | ast.BinOp) and node not in seen:
                text = self.text(node)
                if text is not None:
                    found.append((text, node))
                    seen.update(ast.walk(node))
        return found


def parse_python(text: str, new: set[int]) -> PythonCode | None:
    """A parsed text, up to ``LONGEST`` characters; None where it is no Python."""
    if len(text) > LONGEST:  # up to the end of a line, so that the rest can be parsed
        text = text[: text.rfind("\n", 0, LONGEST) + 1 or LONGEST]
    tree = parsed(text)
    return None if tree is None else PythonCode(text, tree, new)


def _bound_by(node: ast.AST) -> list[tuple[str, str | ast.AST | None]]:
    """The names that a node binds: to what is imported, a value, an argument, or None for anything else; a method is taken for a function, unless a builtin is named so."""
    if isinstance(node, ast.Import):
        roots = [(alias, alias.name.partition(".")[0]) for alias in node.names]
        return [(alias.asname or root, alias.name if alias.asname else root) for alias, root in roots]
    if isinstance(node, ast.ImportFrom):
        return [(alias.asname or alias.name, _imported(node, alias)) for alias in node.names]
    if isinstance(node, ast.arg):
        return [(node.arg, node)]
    if isinstance(node, ast.Name):
        return [] if isinstance(node.ctx, ast.Load) else [(node.id, None)]
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return [(target.id, node.value) for target in targets if isinstance(target, ast.Name)]
    name = None if isinstance(node, ast.alias) else getattr(node, "name", None)
    return [(name, None)] if isinstance(name, str) and not hasattr(builtins, name) else []


def _imported(node: ast.ImportFrom, alias: ast.alias) -> str:
    return f"{'.' * node.level}{node.module or ''}.{alias.name}"


def _joined(owner: str, name: str | None) -> str:
    return f"{owner}.{name}"[-500:] if owner and name else ""
