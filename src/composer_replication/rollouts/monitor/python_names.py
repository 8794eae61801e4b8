"""Python text as facts: its new nodes, the dotted names behind aliases, and texts folded from constants."""

from __future__ import annotations

import ast
import builtins

from composer_replication.tasks.syntax_trees import parsed

LONGEST = 400_000
"""Characters of one text that are parsed."""
_LONGEST_TEXT = 10_000
_DEEPEST = 30
_IMPORTERS = ("__import__", "importlib.import_module")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
Facts = list[tuple[str, ast.AST]]


class PythonCode:
    """One parsed text; ``new`` are the numbers of its new lines.

    Of the new code ``mentions`` has every dotted name that is used, imported ones included; ``stores`` those that are
    assigned or deleted, plain names left out, also by ``setattr`` or ``d.update(...)``; ``texts`` its texts, sums of constants
    folded, docstrings left out; ``calls`` its calls, by what is called.
    """

    def __init__(self, text: str, tree: ast.Module, new: set[int]) -> None:
        self._lines = text.splitlines()
        self._owners: dict[ast.AST, ast.AST | None] = {}
        # By the function or module that binds a name, and the name: what is imported (empty: bound otherwise), what is assigned.
        self._bound: dict[tuple[ast.AST | None, str], str] = {}
        self._values: dict[tuple[ast.AST | None, str], list[ast.AST]] = {}
        pending: list[tuple[ast.AST, ast.AST | None]] = [(tree, None)]
        while pending:
            node, owner = pending.pop()
            self._owners[node] = owner
            for name, what in _bound_by(node):
                if isinstance(what, ast.AST):
                    self._values.setdefault((owner, name), []).append(what)
                if isinstance(what, str):
                    self._bound[owner, name] = what
                else:
                    self._bound.setdefault((owner, name), "")
            owner = node if isinstance(node, FUNCTIONS) else owner
            pending += [(child, owner) for child in reversed([*ast.iter_child_nodes(node)])]
        self.every = list(self._owners)
        self.nodes = [node for node in self.every if getattr(node, "lineno", 0) in new]
        """New nodes, parents first."""
        self.new = frozenset(self.nodes)
        self.mentions, self.stores, self.texts = Facts(), Facts(), Facts()
        self.calls: dict[ast.AST, ast.Call] = {}
        self._said: set[ast.AST] = {node.value for node in self.every if isinstance(node, ast.Expr)}
        for node in self.nodes:
            self._note(node)

    def _note(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import | ast.ImportFrom):
            self.mentions += [(name, node) for _, name in _imports(node)]
        elif name := self.dotted(node):
            self.mentions.append((name, node))
        match node:
            case ast.Attribute(ctx=ast.Store() | ast.Del()):
                self.stores.append((self.dotted(node), node))
            case ast.Subscript(ctx=ast.Store() | ast.Del()):
                owner = self.dotted(node.value)
                key = self.text(node.slice) if owner == "sys.modules" else ""
                self.stores.append((f"{owner}.{key or '*'}", node))
            case ast.Call(func=function, args=arguments):
                self.calls[function] = node
                name = self.dotted(function) if arguments else ""
                if name in ("setattr", "delattr") and len(arguments) > 1:
                    changed = f"{self.dotted(arguments[0])}.{self.text(arguments[1]) or '*'}"
                    self.stores.append((changed, node))
                elif name.endswith((".update", ".setdefault", ".__setitem__")):
                    self.stores.append((name, node))
            case ast.Constant() | ast.BinOp() if node not in self._said:
                text = self.text(node)
                if text is not None:
                    self.texts.append((text, node))
                    self._said.update(ast.walk(node))

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
        match node:
            case ast.Name(id=name):
                known = self.resolved(node)
                is_name = known is not node and isinstance(known, ast.Attribute | ast.Name | ast.Call)
                bound = (self._bound.get((scope, name)) for scope in self.scopes(node))
                own = next((each for each in bound if each is not None), name)
                return (self.dotted(known, depth + 5) if is_name else "") or own or f"?{name}"
            case ast.Attribute(value=value, attr=name):
                return _joined(self.dotted(value, depth + 1), name)
            case ast.Subscript(value=value, slice=index):
                owner, key = self.dotted(value, depth + 1), self.text(index, depth + 1)
                return (
                    (key or "") if owner == "sys.modules" else _joined(owner.removesuffix(".__dict__"), key)
                )
            case ast.Call(func=function, args=[first, *rest]):
                called = self.dotted(function, depth + 1)
                if called in _IMPORTERS:
                    return self.text(first, depth + 1) or ""
                if called == "getattr" and rest:
                    return _joined(self.dotted(first, depth + 1), self.text(rest[0], depth + 1))
        return ""

    def text(self, node: ast.AST | None, depth: int = 0) -> str | None:
        """The text that an expression is, folded from constants; None where it cannot be known."""
        if depth > _DEEPEST:
            return None
        match node:
            case ast.Constant(value=str() as value):
                return value
            case ast.Constant(value=bytes() as data):
                return data.decode("utf-8", "replace")
            case ast.Name():
                known = self.resolved(node)
                return self.text(known, depth + 5) if known is not node else None
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                texts = self.text(left, depth + 1), self.text(right, depth + 1)
                return None if None in texts else "".join(filter(None, texts))[:_LONGEST_TEXT]
        return None


def parse_python(text: str, new: set[int]) -> PythonCode | None:
    """A parsed text, up to ``LONGEST`` characters; None where it is no Python."""
    if len(text) > LONGEST:  # up to the end of a line, so that the rest can be parsed
        text = text[: text.rfind("\n", 0, LONGEST) + 1 or LONGEST]
    tree = parsed(text)
    return None if tree is None else PythonCode(text, tree, new)


def _bound_by(node: ast.AST) -> list[tuple[str, str | ast.AST | None]]:
    """The names that a node binds: to what is imported, a value, an argument, or None for anything else."""
    match node:
        case ast.Import(names=names):
            told = [(alias, alias.name.partition(".")[0]) for alias in names]
            return [(alias.asname or root, alias.name if alias.asname else root) for alias, root in told]
        case ast.ImportFrom():
            return [*_imports(node)]
        case ast.arg(arg=name):
            return [(name, node)]
        case ast.Name(id=name, ctx=ast.Store() | ast.Del()):
            return [(name, None)]
        case ast.Assign(targets=targets, value=value):
            return [(target.id, value) for target in targets if isinstance(target, ast.Name)]
        case (
            ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            | ast.NamedExpr(target=ast.Name(id=name), value=value)
        ):
            return [(name, value)]
        case ast.alias():
            return []
    other = getattr(node, "name", None)  # a method is taken for a function, unless a builtin is named so
    return [(other, None)] if isinstance(other, str) and not hasattr(builtins, other) else []


def _imports(node: ast.Import | ast.ImportFrom) -> list[tuple[str, str]]:
    """What an import makes known: by which name, and the whole name of what is imported."""
    root = f"{'.' * node.level}{node.module or ''}." if isinstance(node, ast.ImportFrom) else ""
    return [(alias.asname or alias.name, root + alias.name) for alias in node.names]


def _joined(owner: str, name: str | None) -> str:
    return f"{owner}.{name}"[-500:] if owner and name else ""
