"""Single-turn protocol: the model writes the deleted body.

``completion`` style: the prompt is the file up to the hole, cut to the lines just
before the function, and ends right after the docstring's closing quotes (or the
signature's colon) without a newline; the model goes on with the body. Small models
can do this. ``chat`` style: the same excerpt in one user message, the answer in a
fenced code block; needs a chat template.
"""

from __future__ import annotations

import ast
import re
import textwrap

from composer_replication.config import RolloutsSection
from composer_replication.errors import InputError
from composer_replication.records import Hole
from composer_replication.tasks.syntax_trees import first_line, parse_syntax, parsed

_FENCE = re.compile(r"```[a-zA-Z]*\n(.*?)(?:```|\Z)", re.DOTALL)

_CHAT_REQUEST = """\
The body of the last function in this file was removed. Write that body again.
Answer with one fenced code block that holds only the body.

```python
{excerpt}
```"""


def build_prompt(broken_text: str, hole: Hole, options: RolloutsSection) -> str:
    """The prompt in the style of the recipe: some lines, then the function around the hole, from its decorators to the hole."""
    line = broken_text.count("\n", 0, hole.start) + 1
    starts = [
        first_line(node)
        for node in ast.walk(parse_syntax(broken_text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.lineno <= line <= (node.end_lineno or 0)
    ]
    first = max(starts, default=line) - 1
    lines = broken_text[: hole.start].splitlines(keepends=True)
    shown = "".join(lines[max(0, first - options.context_lines) :])
    return shown if options.prompt_style == "completion" else _CHAT_REQUEST.format(excerpt=shown)


def is_finished(text: str) -> bool:
    """True once a completion has left the body: a non-blank line, dedented from the first."""
    return _body_end(text) is not None


def extract_answer(text: str, broken_text: str, hole: Hole, *, style: str = "completion") -> str:
    """The text to splice into the hole: the body alone, at the hole's indentation.

    An answer without a usable body gives an empty string, which breaks the file and
    fails its tests like any other wrong answer.
    """
    if style == "completion":
        end = _body_end(text)
        body = (text if end is None else text[:end]).rstrip()
        first = next((line for line in body.split("\n")[1:] if line.strip()), "")
        return body if first.startswith(marker_indent(broken_text, hole)) else ""
    fenced = _FENCE.search(text)
    body = _body_of_whole_function(fenced.group(1) if fenced else text)
    indented = textwrap.indent(textwrap.dedent(body).strip("\n"), marker_indent(broken_text, hole))
    return "\n" + indented.rstrip() if indented.strip() else ""


def shows_golden(prompt: str, golden_body: str) -> bool:
    """Whether the golden body's lines stand in the prompt, one after the other, indentation aside."""
    golden = [line.strip() for line in golden_body.splitlines() if line.strip()]
    lines = [line.strip() for line in prompt.splitlines() if line.strip()]
    places = range(len(lines) - len(golden) + 1)
    return bool(golden) and any(lines[place : place + len(golden)] == golden for place in places)


def refuse_leaking_prompt(prompt: str, golden_body: str, *, task_id: str) -> None:
    """The last wall before a policy: stop when the prompt shows the golden body."""
    if shows_golden(prompt, golden_body):
        raise InputError(
            "CR0429",
            "the prompt contains the deleted code.",
            where=task_id,
            fix="leave this task out, or lower rollouts.context_lines.",
        )


def _body_end(text: str) -> int | None:
    """Offset of the first non-blank line that has no indentation, or less than the first one."""
    position = text.find("\n") + 1
    lines = text[position:].splitlines(keepends=True) if position else []
    depth = next((len(_indent(line)) for line in lines if line.strip()), 0)
    for line in lines:
        if line.strip() and len(_indent(line)) < max(depth, 1):
            return position
        position += len(line)
    return None


def marker_indent(broken_text: str, hole: Hole) -> str:
    """The indentation of the body that is missing."""
    return _indent(broken_text[hole.start : hole.end].lstrip("\r\n"))


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip(" \t"))]


def _body_of_whole_function(code: str) -> str:
    """Models often repeat the signature: take the body when the code is one function."""
    dedented = textwrap.dedent(code)
    match parsed(dedented):
        case ast.Module(body=[ast.FunctionDef() | ast.AsyncFunctionDef() as function]):
            statements = function.body[1:] if ast.get_docstring(function) else function.body
            if statements:
                return "\n".join(dedented.splitlines()[statements[0].lineno - 1 : function.end_lineno])
    return code
