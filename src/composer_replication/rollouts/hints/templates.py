"""One short hint by kind of fault, from what the environment knows: names, schemas, paths, tests.

None where the record does not hold enough to say more than "that was wrong": the next layer then has its turn.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from composer_replication.records import ToolSpec
from composer_replication.rollouts.hints.hint_context import FailedTest, HintContext, HintLayer

MAX_NAMES = 12
NUM_NEAREST = 3
MAX_TESTS = 2
MAX_ASSERTION_CHARACTERS = 160
_OUT_OF_MEMORY = "The run used more memory than allowed: look for a collection that grows without end."


def template_hint(context: HintContext) -> str | None:
    """The template of the fault's kind, filled in; None when there is none or it has nothing to say."""
    template = TEMPLATES.get(context.fault.kind)
    return template(context) if template is not None else None


def _unknown_tool(context: HintContext) -> str | None:
    names = [tool.name for tool in context.observed.tools]
    if not names:
        return None
    near = difflib.get_close_matches(context.fault.subject, names, 1)
    meant = f" The nearest is {near[0]}." if near else ""
    return (
        f"There is no tool named {context.fault.subject}. The available tools are: {_listed(names)}.{meant}"
    )


def _bad_json(context: HintContext) -> str:
    return (
        f"The arguments of a tool call are one JSON object: double quotes, escaped line ends, no trailing comma. "
        f"{_signature(context)}"
    ).strip()


def _missing_argument(context: HintContext) -> str:
    return f"The argument {context.fault.subject!r} is required. {_signature(context)}".strip()


def _unknown_argument(context: HintContext) -> str | None:
    return _signature(context) or None


def _wrong_type(context: HintContext) -> str:
    return f"{_sentence(context.fault.evidence)} {_signature(context)}".strip()


def _missing_file(context: HintContext) -> str | None:
    wanted = context.fault.subject
    nearest = nearest_paths(wanted, context.observed.tree)
    if not nearest:
        return f"There is no {wanted}. List the folder before you open a file in it." if wanted else None
    return f"There is no {wanted}. The nearest paths are: {', '.join(nearest)}."


def _command_not_found(context: HintContext) -> str:
    names = [tool.name for tool in context.observed.tools]
    also = f" Besides the shell there are these tools: {_listed(names)}." if len(names) > 1 else ""
    return f"The command {context.fault.subject} is not installed here, and nothing can be downloaded.{also}"


_EDIT_NOT_APPLIED = (
    "The edit was not applied: the text to replace must stand in the file exactly once, with its indentation and "
    "line ends. Read the lines again right before the edit, and copy them with enough lines around."
)


def _syntax_error(context: HintContext) -> str:
    return f"What was written does not parse: {_sentence(context.fault.evidence)} Keep brackets, quotes and indentation whole."


def _import_error(context: HintContext) -> str | None:
    name = context.fault.subject
    if not name:
        return None
    own = nearest_paths(name.replace(".", "/") + ".py", context.observed.tree, cutoff=0.6)
    near = f" The nearest modules of this repository are: {', '.join(own)}." if own else ""
    return f"{name} cannot be imported here, and nothing can be installed.{near}"


def _time_out(context: HintContext) -> str:
    what = "The tests ran" if context.fault.subject == "the tests" else "The command ran"
    return f"{what} longer than allowed and was stopped: look for a loop without end, a wait for input, or too much work."


def _repeated_action(context: HintContext) -> str:
    return f"This very call was made right before, and its result is known. {_call_name(context)} again tells nothing new: take another step."


def _truncated(context: HintContext) -> str:
    num_tokens = len(context.observed_turn.turn.completion.token_ids)
    if context.observed_turn.chat is None or len(context.observed.turns) == 1:
        return f"The whole answer has to fit into {num_tokens} tokens: write the shortest code that does it, without comments."
    return f"The answer was cut off after {num_tokens} tokens: think less, and make one short call."


def _empty_answer(context: HintContext) -> str:
    if context.observed.tools:
        return f"The answer was empty. Call one of the tools: {_listed([t.name for t in context.observed.tools])}."
    if context.observed_turn.chat is None:
        return "The body goes on the next line, indented below the function's header."
    return "The answer held no code: give the whole body in one fenced block."


def _test_failure(context: HintContext) -> str | None:
    tests = context.observed.failed_tests or (
        (FailedTest(context.fault.subject),) if context.fault.subject else ()
    )
    if not tests:
        return None
    more = f" And {len(tests) - MAX_TESTS} more." if len(tests) > MAX_TESTS else ""
    return "\n".join(_told(test) for test in tests[:MAX_TESTS]) + more


TEMPLATES: Mapping[str, HintLayer] = {
    "unknown-tool": _unknown_tool,
    "bad-json": _bad_json,
    "missing-argument": _missing_argument,
    "unknown-argument": _unknown_argument,
    "wrong-type": _wrong_type,
    "missing-file": _missing_file,
    "command-not-found": _command_not_found,
    "edit-not-applied": lambda _: _EDIT_NOT_APPLIED,
    "syntax-error": _syntax_error,
    "import-error": _import_error,
    "time-out": _time_out,
    "out-of-memory": lambda _: _OUT_OF_MEMORY,
    "repeated-action": _repeated_action,
    "truncated": _truncated,
    "empty-answer": _empty_answer,
    "test-failure": _test_failure,
}
"""By kind. A tool's own refusal (``tool-error``) has none: the environment's words are the better hint."""


def nearest_paths(wanted: str, tree: Sequence[str], *, cutoff: float = 0.5) -> list[str]:
    """Paths that were probably meant: the same file name elsewhere, then similar paths; at most three."""
    path = PurePosixPath(wanted.strip("/").removeprefix("./"))
    same = [each for each in tree if path.name and PurePosixPath(each).name == path.name]
    similar = difflib.get_close_matches(str(path), tree, NUM_NEAREST, cutoff) if wanted else []
    return list(dict.fromkeys([*same, *similar]))[:NUM_NEAREST]


def signature(tool: ToolSpec) -> str:
    """A tool on one line: ``read_file(path: string, limit?: integer)``."""
    properties = tool.parameters.get("properties")
    required = tool.parameters.get("required") or ()
    parts = [
        f"{name}{'' if name in required else '?'}: {_type(schema)}"
        for name, schema in (properties.items() if isinstance(properties, Mapping) else ())
    ]
    return f"{tool.name}({', '.join(parts)})"


def _signature(context: HintContext) -> str:
    call = context.call
    spec = next((t for t in context.observed.tools if call is not None and t.name == call.name), None)
    return f"It is called as {signature(spec)}." if spec is not None else ""


def _type(schema: Any) -> str:
    if not isinstance(schema, Mapping):
        return "any"
    enum = schema.get("enum")
    if isinstance(enum, list) and enum:
        return " | ".join(json.dumps(each) for each in enum[:6])
    kind = schema.get("type", "any")
    return " | ".join(map(str, kind)) if isinstance(kind, list) else str(kind)


def _told(test: FailedTest) -> str:
    assertion = " ".join(test.assertion.split())
    if len(assertion) > MAX_ASSERTION_CHARACTERS:
        assertion = f"{assertion[: MAX_ASSERTION_CHARACTERS - 3]}..."
    name = test.node_id.rpartition("::")[2]
    return f"{name} fails" + (f": it checks `{assertion}`." if assertion else ".")


def _call_name(context: HintContext) -> str:
    return context.fault.subject or "It"


def _sentence(text: str) -> str:
    text = " ".join(text.split()).rstrip(".")
    return f"{text[:1].upper()}{text[1:]}."


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more
