"""The layers that write hints, and the order in which they are asked."""

from __future__ import annotations

import re
import textwrap
from functools import partial

from composer_replication.channel_tables import HintWritingSection
from composer_replication.errors import UsageError
from composer_replication.records import Hint
from composer_replication.rollouts.hints.hint_context import FailedTest, HintContext, HintLayer
from composer_replication.rollouts.rewards import import_function, one_line

MAX_CHARACTERS = 400
"""Of a hint, cut at a word: about 100 tokens."""
PREFIX = "Hint: "
MAX_TESTS = 2
MAX_ASSERTION_CHARACTERS = 160
_CONTROL = re.compile(
    r"<(?=[|｜][^<>\s]{0,60}[|｜]>)"  # <|im_end|>, <｜Assistant｜>
    r"|<(?=/?(?:s|bos|eos|pad|unk|sep|cls|mask|think|thinking|tool_call|tool_calls|tool_response|tools"
    r"|start_of_turn|end_of_turn|end_of_utterance|arg_key|arg_value|image|sop|eop|[a-z]+_token)>)"
    r"|\[(?=/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS|TOOL_CONTENT|gMASK|ARGS|IMG)\])"
    r"|<(?=<SYS>>|</SYS>>)",
    re.IGNORECASE,
)


def write_hint(context: HintContext, layers: list[tuple[str, HintLayer]]) -> Hint | None:
    """The hint of the first layer that has something to say, and may.

    A text that shows what must stay hidden (``ObservedRollout.is_leak``) is thrown away, and the next layer
    has its turn. The text is cleaned, clamped and prefixed.
    """
    for name, layer in layers:
        text = _ask(name, layer, context)
        if text is None or not text.strip():
            continue
        clamped = clamp(clean_text(text.strip()), MAX_CHARACTERS)
        if clamped and not context.observed.is_leak(text) and not context.observed.is_leak(clamped):
            return Hint(context.fault.turn_idx, f"{PREFIX}{clamped}", context.fault.kind, name)
    return None


def open_layers(options: HintWritingSection) -> list[tuple[str, HintLayer]]:
    """The layers of the options by name, in order: ours, or ``package.module:function`` of (context) -> text or None."""
    known: dict[str, HintLayer] = {"template": template_hint, "environment": environment_hint}
    fix = "give package.module:function of one argument, the HintContext."
    return [
        (name, known.get(name) or import_function(name, ("context",), partial(_broken, name, fix=fix)))
        for name in options.layers
    ]


def template_hint(context: HintContext) -> str | None:
    """One text by kind of fault, where there is more to say than what the tool said: its refusals teach already."""
    fault, turn, observed = context.fault, context.observed_turn, context.observed
    num_tokens = len(turn.turn.completion.token_ids)
    match fault.kind:
        case "repeated-action":
            again = f"{fault.subject} again tells nothing new: take another step."
            return f"This very call was made right before, and its result is known. {again}"
        case "truncated":
            if turn.chat is None or len(observed.turns) == 1:
                advice = "The whole answer has to fit into {} tokens: write the shortest code that does it, without comments."
            else:
                advice = "The answer was cut off after {} tokens: think less, and make one short call."
            return advice.format(num_tokens)
        case "empty-answer" if observed.tools:
            names = ", ".join(tool.name for tool in observed.tools)
            return f"The answer was empty. Call one of the tools: {names}."
        case "empty-answer" if turn.chat is None:
            return "The body goes on the next line, indented below the function's header."
        case "empty-answer":
            return "The answer held no code: give the whole body in one fenced block."
        case "syntax-error":
            problem = " ".join(fault.evidence.split())
            return f"What was written does not parse: {problem}. Keep brackets, quotes and indentation whole."
        case "test-failure" if not observed.run_error:  # why the run itself failed, the environment says
            tests = observed.failed_tests or ((FailedTest(fault.subject),) if fault.subject else ())
            more = f" And {len(tests) - MAX_TESTS} more." if len(tests) > MAX_TESTS else ""
            return "\n".join(map(_told, tests[:MAX_TESTS])) + more
    return None


def _told(test: FailedTest) -> str:
    assertion = textwrap.shorten(test.assertion, MAX_ASSERTION_CHARACTERS, placeholder="...")
    name = test.node_id.rpartition("::")[2]
    return f"{name} fails" + (f": it checks `{assertion}`." if assertion else ".")


def environment_hint(context: HintContext) -> str | None:
    """The environment's own words: the last lines of the failed call, else of the test run."""
    lines = [line.rstrip() for line in context.error_text.splitlines() if line.strip()]
    return "The environment answered: " + "\n".join(lines[-6:]) if lines else None


def clean_text(text: str) -> str:
    """Without control characters, and with a space in whatever chat templates use as control tokens.

    >>> clean_text("end<|im_end|>")
    'end< |im_end|>'
    """
    kept = "".join(sign for sign in text.expandtabs(4) if sign.isprintable() or sign == "\n")
    return _CONTROL.sub(lambda found: f"{found[0]} ", kept)


def clamp(text: str, max_characters: int) -> str:
    """At most so many characters, cut at the end of a word, with three dots where something is left out."""
    text, room = text.strip(), max_characters - 3
    if len(text) <= max_characters or room < 1:
        return text[:max_characters]
    cut = max(text.rfind(" ", 0, room + 1), text.rfind("\n", 0, room + 1))
    return f"{text[: cut if cut > room // 2 else room].rstrip().rstrip(',;')}..."


def _ask(name: str, layer: HintLayer, context: HintContext) -> str | None:
    if ":" not in name:
        return layer(context)
    fix = "make it return a text or None for every context; then the same command with --resume goes on."
    try:
        text: object = layer(context)
    except Exception as error:  # the user's function may raise anything
        raise _broken(name, f"raised {one_line(error)}", fix=fix) from error
    if text is not None and not isinstance(text, str):
        raise _broken(name, f"gave {text!r:.80}, which is neither a text nor None", fix=fix)
    return text


def _broken(name: str, problem: str, *, fix: str) -> UsageError:
    return UsageError("CR0210", f"the hint layer {name!r} {problem}.", where="hints.writing.layers", fix=fix)
