"""The text of a hint: a template for what no tool has said, else the environment's own words."""

from __future__ import annotations

import re
import textwrap

from composer_replication.rollouts.hints.hint_context import FailedTest, Fault, ObservedRollout

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


def write_hint(observed: ObservedRollout, fault: Fault) -> str | None:
    """The first text that is there and shows nothing that must stay hidden, cleaned, clamped and prefixed."""
    for text in (template_hint(observed, fault), environment_hint(observed, fault)):
        clamped = clamp(clean_text(text.strip()), MAX_CHARACTERS) if text else ""
        if text and clamped and not observed.is_leak(text) and not observed.is_leak(clamped):
            return f"{PREFIX}{clamped}"
    return None


def template_hint(observed: ObservedRollout, fault: Fault) -> str | None:
    """One text by kind of fault, where there is more to say than what the tool said: its refusals teach already."""
    turn = observed.turns[fault.turn_idx]
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


def environment_hint(observed: ObservedRollout, fault: Fault) -> str | None:
    """The last lines of what the failed call answered, else of why the test run itself failed."""
    idx, results = fault.call_idx, observed.turns[fault.turn_idx].results
    said = results[idx].text if idx is not None and idx < len(results) else observed.run_error
    lines = [line.rstrip() for line in said.splitlines() if line.strip()]
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
