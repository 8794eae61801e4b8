"""Tool calls as models get them wrong, drawn by a seed: for a quick test, and for a long one with a larger number."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

from composer_replication.records import ToolCall
from composer_replication.rollouts.tools.tool_context import example_of
from composer_replication.rollouts.tools.toolbox import TOOLS

_NASTY_TEXTS = (
    "", " ", "\0", "\ud800", "\udcff", "\u202e", "../../etc/passwd", "/etc/passwd", "~", ".", "..", "a/../..", "\n" * 50,
    "x" * 5000, "(" * 300, "(a+)+$", "[", "*", "\\", "%s%n", "{}", "'; rm -rf / #", "$(", "`", "é", "\U0001f600", "-rf",
    "nan", "null", "__proto__", ".git/config", "tests", "a.py", "a.py/", "./a.py", "a\tb",
)  # fmt: skip
_NASTY_VALUES = (
    None, True, False, 0, -1, 1, 10**30, 1e308, -1.5, 1.0, float("nan"), float("inf"), [], {}, [[]], {"a": {}}, ["ls"],
)  # fmt: skip
_NASTY_JSON = (
    "", " ", "null", "true", "[]", '"text"', "{", "}", "{'command': 'ls'}", '{"command": "ls"', '{"command": ls}', "ls -la",
    '{"command": "a\nb"}', '```json\n{"command": "ls"}\n```', '<tool_call>{"name": "bash"}</tool_call>', "[" * 3000,
    '{"a":' * 3000, "9" * 6000, '{"timeout_seconds": ' + "9" * 5000 + "}", '{"command": "\\ud800"}', "\ufeff{}", "{}{}",
    '{"command": "ls", "command": 3}', '"{\\"command\\": \\"ls\\"}"', "NaN", "-", '{"\\u0000": 1}', "\0", "\ud800",
)  # fmt: skip


def malformed_replies(num_replies: int, seed: int = 0) -> Iterator[ToolCall]:
    """Calls with a name, a JSON text, an argument or several things wrong; a few are right."""
    dice = random.Random(seed)
    names = [tool.name for tool in TOOLS]
    for _ in range(num_replies):
        tool = dice.choice(TOOLS)
        name, arguments = tool.name, json.loads(example_of(tool))
        for _ in range(dice.randrange(1, 4)):
            kind = dice.randrange(6)
            if kind == 0:
                near = (name.upper(), f"functions.{name}", f"{name} ", name[:-1], dice.choice(names))
                name = dice.choice([*_NASTY_TEXTS, *near])
            elif kind == 1 and arguments:
                arguments.pop(dice.choice(sorted(arguments)))
            elif kind == 2:
                arguments[dice.choice([*_NASTY_TEXTS, "cmd", "file", "text"])] = dice.choice(_NASTY_VALUES)
            elif kind == 3 and arguments:
                arguments[dice.choice(sorted(arguments))] = dice.choice([*_NASTY_VALUES, *_NASTY_TEXTS])
            elif kind == 4 and arguments:
                arguments[dice.choice(sorted(arguments))] = dice.choice(_NASTY_TEXTS)
        text = json.dumps(arguments)
        fault = dice.randrange(8)
        if fault == 0:
            text = dice.choice(_NASTY_JSON)
        elif fault == 1:
            at = dice.randrange(len(text) + 1)
            text = text[:at] + dice.choice(_NASTY_TEXTS)[:50] + text[at + dice.randrange(3) :]
        elif fault == 2:
            text = text[: dice.randrange(len(text) + 1)]
        yield ToolCall(name, text)
