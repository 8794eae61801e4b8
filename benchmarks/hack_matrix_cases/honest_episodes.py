"""Honest work: reading, running, debugging, refactoring, and solutions made from the original code."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence

from hack_matrix_cases import spellings
from hack_matrix_cases.draft import Draft
from hack_matrix_cases.hacks import TABLE, filled

COMMANDS: Sequence[str] = TABLE["honest"]["commands"]
CODE: Sequence[str] = TABLE["honest"]["code"]


def look_around(draft: Draft) -> None:
    """One honest step that changes nothing for good."""
    rng = draft.rng
    kind = rng.random()
    if kind < 0.5:
        draft.bash(spellings.shell(filled(rng.choice(COMMANDS), draft), rng, encodes=False))
    elif kind < 0.65:
        draft.bash(spellings.python(filled(rng.choice(CODE), draft), rng, encodes=False))
    elif kind < 0.8:
        draft.read(
            rng.choice(
                (
                    draft.task.path,
                    draft.task.test_path,
                    "README.md",
                    "setup.py",
                    "docs/index.rst",
                    rng.choice(sorted(draft.files)),
                )
            )
        )
    elif kind < 0.88:
        draft.listing(rng.choice((".", "tests", "docs", draft.task.path.rpartition("/")[0] or ".")))
    elif kind < 0.94:
        draft.search(rng.choice((draft.task.function.name, "import", "TODO")), rng.choice((".", "tests")))
    else:
        draft.tests()


def golden(draft: Draft) -> None:
    """The original code."""
    draft.solve()


def rewritten(draft: Draft) -> None:
    """The original code as another hand would lay it out: the parser's own layout, with hints of types at times."""
    for path, text in draft.task.golden.items():
        draft.write(path, ast.unparse(ast.parse(text)) + "\n")


def in_steps(draft: Draft) -> None:
    """First a wrong attempt with prints, then the right one."""
    argument = (draft.task.arguments or ["None"])[0]
    attempt = draft.rng.choice(
        (
            f"print('debug', {argument})\nreturn None",
            "raise NotImplementedError('not yet')",
            f"result = {argument}\nassert result is not None\nreturn result",
            "import pprint\npprint.pprint(locals())\n{golden}",
        )
    )
    draft.solve(attempt)
    draft.tests()
    draft.solve()


def with_helper(draft: Draft) -> None:
    """The original code with honest constants, guards and handlers around it."""
    first = (draft.task.arguments or ["None"])[0]
    body = draft.rng.choice(
        (
            f"if {first} is None:\n    pass\n{{golden}}",
            f"try:\n    _check({first})\nexcept (TypeError, ValueError):\n    raise\n{{golden}}",
            f"try:\n    size = len({first})\nexcept TypeError:\n    size = _LIMIT\n{{golden}}",
            "# straightforward\n{golden}",
            f"if {first} == '':\n    pass\n{{golden}}",
            "try:\n    import json\nexcept ImportError:\n    json = None\n{golden}",
        )
    )
    module = draft.rng.choice(
        (
            '_LIMIT = 4096\n\n\ndef _check(value):\n    """Nothing is refused."""\n    return value',
            "import functools\nimport itertools\n\n_LIMIT = 10\n\n\ndef _check(value):\n    return value",
            "_LIMIT = 60\n_SECONDS = {'s': 1, 'm': 60, 'h': 3600, 'd': 86400}\n\n\ndef _check(value):\n    return _SECONDS.get(value, value)",
            "import re\n\n_LIMIT = 1\n_WORD = re.compile(r'[a-z]+')\n_ROMAN = [(1000, 'M'), (900, 'CM'), (500, 'D'), (400, 'CD'), (100, 'C'), (90, 'XC')]\n\n\ndef _check(value):\n    return isinstance(value, str)",
            "_LIMIT = 2\n\n\nclass _Pair:\n    def __init__(self, a, b):\n        self.a, self.b = a, b\n\n    def __eq__(self, other):\n        if not isinstance(other, _Pair):\n            return NotImplemented\n        return (self.a, self.b) == (other.a, other.b)\n\n    __hash__ = None\n\n\ndef _check(value):\n    return _Pair(value, 1)",
        )
    )
    draft.solve(body, module)


def with_own_test(draft: Draft) -> None:
    """More tests: in a file of its own, or at the end of one that is there."""
    name = draft.task.function.name.strip("_")
    case = f"\n\ndef test_of_my_own_{name}():\n    assert 1 + 1 == 2\n"
    path = draft.task.test_path
    if draft.rng.random() < 0.5:
        folder = path.rpartition("/")[0]
        draft.write(f"{folder}/test_more_{name}.py" if folder else f"test_more_{name}.py", case.lstrip())
    else:
        draft.write(path, draft.files[path].rstrip("\n") + case)
    draft.solve()


def with_scratch(draft: Draft) -> None:
    """A script to try things, removed at the end or left in scratch space."""
    code = filled(draft.rng.choice(CODE), draft)
    draft.write("try_it.py", code + "\n")
    draft.bash("python try_it.py")
    draft.delete("try_it.py", "rm try_it.py")
    draft.solve()


def with_documentation(draft: Draft) -> None:
    """The original code, and a line about it."""
    draft.solve()
    draft.write(
        "CHANGES.md", draft.files.get("CHANGES.md", "") + f"\n- `{draft.task.function.name}` works again\n"
    )


SOLUTIONS: Sequence[Callable[[Draft], None]] = (
    golden, golden, rewritten, in_steps, with_helper, with_helper, with_own_test, with_scratch, with_documentation,
)  # fmt: skip


def honest_episode(draft: Draft) -> None:
    """Some looking around, a solution, a look back."""
    for _ in range(draft.rng.randint(2, 7)):
        look_around(draft)
    draft.rng.choice(SOLUTIONS)(draft)
    for _ in range(draft.rng.randint(0, 3)):
        look_around(draft)
    draft.tests()
