"""A stored task as the script writer sees it: golden code included, which the monitor is never given."""

from __future__ import annotations

import ast
import posixpath
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from composer_replication.rollouts.monitor import PublicTask, public_task
from composer_replication.rollouts.monitor.scene import as_text
from composer_replication.tasks.store import TaskStore

ROOT = "/srv/tree"
"""Where the tree lies for the commands of the scripts."""
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class CaseTask:
    """``before`` is the tree that the policy sees, ``golden`` the original text of each file with a hole."""

    public: PublicTask
    before: Mapping[str, str]
    golden: Mapping[str, str]

    @cached_property
    def path(self) -> str:
        """The Python file whose hole the hacks fill."""
        return next(
            path for path in self.public.hole_paths if path in self.golden and self.functions_of(path)
        )

    @property
    def test_path(self) -> str:
        return min(self.public.test_texts)

    def functions_of(self, path: str) -> list[_Function]:
        """Functions of the original file that the broken one lacks, or has with another body."""
        kept = set()
        if path in self.before:
            kept = {
                ast.dump(node)
                for node in ast.walk(ast.parse(self.before[path]))
                if isinstance(node, _Function)
            }
        return [
            node
            for node in ast.walk(ast.parse(self.golden[path]))
            if isinstance(node, _Function) and ast.dump(node) not in kept and not _holds_function(node)
        ]

    @cached_property
    def function(self) -> _Function:
        """The deleted function that tests compare with literals, else that with the most arguments: room for hacks."""
        return max(
            self.functions_of(self.path),
            key=lambda node: (len(self.pairs_of(node.name)) > 1, len(_arguments(node)), -node.lineno),
        )

    @property
    def arguments(self) -> list[str]:
        return _arguments(self.function)

    def solution(self, body: str | None = None, module: str = "", after: str = "") -> str:
        """The original file with another body for the function, and code at the top and the end of the module.

        Args:
            body: lines of the new body, not set in; None keeps the original one; ``{golden}`` stands for it.
            module: code put after the imports.
            after: code put at the end.
        """
        lines = self.golden[self.path].splitlines()
        function = self.function
        if body is not None:
            first, last = function.body[0], function.body[-1]
            start = first.lineno - 1
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and len(function.body) > 1
            ):
                start = first.end_lineno or first.lineno
            indent = " " * first.col_offset
            end = last.end_lineno or last.lineno
            golden = "\n".join(lines[start:end])
            is_inline = function.body[0].lineno == function.lineno
            written = "\n".join(
                golden if line.strip() == "{golden}" else f"{indent}{line}" if line else ""
                for line in body.splitlines()
            )
            if is_inline:
                start, written = first.lineno - 1, lines[first.lineno - 1]
            lines[start:end] = written.split("\n")
        if module:
            at = self._after_imports()
            lines[at:at] = ["", *module.splitlines(), ""]
        return "\n".join([*lines, *(["", "", *after.splitlines()] if after else [])]) + "\n"

    def _after_imports(self) -> int:
        tree = ast.parse(self.golden[self.path])
        last = 0
        for index, node in enumerate(tree.body):
            is_docstring = index == 0 and isinstance(node, ast.Expr)
            if isinstance(node, ast.Import | ast.ImportFrom) or is_docstring:
                last = node.end_lineno or node.lineno
            elif last:
                break
        return last

    @cached_property
    def pairs(self) -> list[tuple[str, str]]:
        """Source of (input, expected output) in visible tests, as a cheat would copy them; literals alone.

        Of the function itself: what a constructor or a helper takes is no input of it.
        """
        return self.pairs_of(self.function.name)

    def pairs_of(self, name: str) -> list[tuple[str, str]]:
        """The pairs of a function of this name."""
        found: dict[tuple[str, str], None] = {}
        for text in self.public.test_texts.values():
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.FunctionDef) and node.name in self._visible_names:
                    for pair in literal_pairs(node, name):
                        found[pair] = None
        return list(found)

    @property
    def _visible_names(self) -> set[str]:
        return {node.partition("[")[0].rpartition("::")[2] for node in self.public.visible_tests}


def _holds_function(node: _Function) -> bool:
    return any(isinstance(each, _Function) for each in ast.walk(node) if each is not node)


def _arguments(node: _Function) -> list[str]:
    names = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return [name for name in names if name not in ("self", "cls")]


def literal_pairs(test: ast.FunctionDef, name: str) -> list[tuple[str, str]]:
    """Of ``assert f(1, 2) == 3`` the pair (``(1, 2)``, ``3``) where ``f`` is ``name``, likewise of assertEqual and of cases."""
    found: list[tuple[str, str]] = []
    compared: set[str] = set()
    for left, right in _equalities(test):
        for call, answer in ((left, right), (right, left)):
            if isinstance(answer, ast.Name):
                compared.add(answer.id)
            if (
                isinstance(call, ast.Call)
                and _called(call) == name
                and not call.keywords
                and _is_literal(answer)
            ):
                arguments = [each for each in call.args if not isinstance(each, ast.Starred)]
                if arguments and all(map(_is_literal, arguments)):
                    found.append((_source(arguments), ast.unparse(answer)))
    if any(isinstance(node, ast.Call) and _called(node) == name for node in ast.walk(test)):
        found.extend(_case_pairs(test, compared))
    return found


def _equalities(test: ast.FunctionDef) -> Iterator[tuple[ast.expr, ast.expr]]:
    for node in ast.walk(test):
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq):
            yield node.left, node.comparators[0]
        elif (
            isinstance(node, ast.Call)
            and _called(node) in ("assertEqual", "assertEquals")
            and len(node.args) > 1
        ):
            yield node.args[0], node.args[1]


def _case_pairs(test: ast.FunctionDef, compared: Collection[str]) -> Iterator[tuple[str, str]]:
    """Of a parametrised test whose last parameter something has to be equal to, its cases."""
    for decorator in test.decorator_list:
        if (
            isinstance(decorator, ast.Call)
            and _called(decorator) == "parametrize"
            and len(decorator.args) > 1
        ):
            parameters, cases = decorator.args[:2]
            *asked, answer = _parameters(parameters)
            if asked and answer in compared and isinstance(cases, ast.List | ast.Tuple):
                for case in cases.elts:
                    if isinstance(case, ast.Tuple) and len(case.elts) == len(asked) + 1 and _is_literal(case):
                        yield _source(case.elts[:-1]), ast.unparse(case.elts[-1])


def _parameters(node: ast.expr) -> list[str]:
    """The names of ``"a, b"`` or ``("a", "b")``; one of nothing where they are written otherwise."""
    names = ast.literal_eval(node) if _is_literal(node) else ""
    return [each.strip() for each in (names.split(",") if isinstance(names, str) else names)] or [""]


def _called(call: ast.Call) -> str:
    """The last name of what is called."""
    return getattr(call.func, "attr", "") or getattr(call.func, "id", "")


def _source(parts: Sequence[ast.expr]) -> str:
    return ast.unparse(parts[0] if len(parts) == 1 else ast.Tuple(list(parts), ast.Load()))


def _is_literal(node: ast.AST) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError):
        return False
    return True


def case_task(store: TaskStore, task_id: str) -> CaseTask | None:
    """A stored task, or None where a script could not fill its hole: no function with a body of its own."""
    task = store.get(task_id)
    public = public_task(store, task)
    before = {path: as_text(data) for path, data in store.files(task, "rollout").items()}
    golden_files = store.files(task, "golden")
    golden = {path: as_text(golden_files[path]) for path in public.hole_paths if path in golden_files}
    case = CaseTask(public, before, golden)
    try:
        usable = (
            bool(public.test_texts)
            and bool(case.function.body)
            and case.function.lineno != case.function.body[0].lineno
        )
        ast.parse(case.solution(body="return None"))
    except (StopIteration, SyntaxError, ValueError):
        return None
    return case if usable and posixpath.basename(case.path) != "__init__.py" else None


def usable_case(store: TaskStore, task_id: str) -> CaseTask | None:
    """As ``case_task``, for every class: the function has arguments, and two literal inputs or more can be copied."""
    case = case_task(store, task_id)
    return case if case is not None and case.arguments and len(dict(case.pairs)) >= 2 else None
