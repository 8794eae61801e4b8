"""Whole replies of a model, right in one of the dialects and then damaged, drawn by a seed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence

from malformed_replies import malformed_replies

from composer_replication.records import ToolCall
from composer_replication.rollouts.tools.tool_context import example_of
from composer_replication.rollouts.tools.toolbox import TOOLS


def _mistral_list(calls: Sequence[ToolCall]) -> str:
    return "[TOOL_CALLS] [" + ", ".join(f'{{"name": {json.dumps(c.name)}, "arguments": {c.arguments}}}' for c in calls) + "]</s>"  # fmt: skip


def _each(form: str, joint: str = "\n") -> Callable[[Sequence[ToolCall]], str]:
    def write(calls: Sequence[ToolCall]) -> str:
        return joint.join(
            form.replace("NAME", call.name).replace("JSON", call.arguments).replace("NUMBER", str(number))
            for number, call in enumerate(calls)
        )

    return write


def _tagged_pairs(begin: str, pair: str, end: str) -> Callable[[Sequence[ToolCall]], str]:
    def write(calls: Sequence[ToolCall]) -> str:
        parts = []
        for call in calls:
            try:
                pairs = dict(json.loads(call.arguments))
            except (ValueError, TypeError, RecursionError):
                pairs = {"command": call.arguments}
            inner = "".join(
                pair.replace("KEY", key).replace("VALUE", str(value)) for key, value in pairs.items()
            )
            parts.append(begin.replace("NAME", call.name) + inner + end)
        return "\n".join(parts)

    return write


WRITERS: dict[str, tuple[Callable[[Sequence[ToolCall]], str], ...]] = {
    "hermes": (
        _each('<tool_call>\n{"name": "NAME", "arguments": JSON}\n</tool_call>'),
        _each('<tool_call>{"function": {"name": "NAME", "arguments": JSON}, "id": "cNUMBER"}</tool_call>'),
        _tagged_pairs("<tool_call>\n<function=NAME>\n", "<parameter=KEY>\nVALUE\n</parameter>\n", "</function>\n</tool_call>"),
        _tagged_pairs("<tool_call>NAME\n", "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n", "</tool_call>"),
    ),
    "llama": (
        _each('{"name": "NAME", "parameters": JSON}', "; "),
        _each('<|python_tag|>{"type": "function", "name": "NAME", "parameters": JSON}<|eom_id|>'),
    ),
    "mistral": (_mistral_list, _each("[TOOL_CALLS]NAME[ARGS]JSON"), _each("[TOOL_CALLS]NAME[CALL_ID]cNUMBER[ARGS]JSON</s>")),
    "deepseek": (
        _each("<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>JSON<｜tool▁call▁end｜>"),
        _each("<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nJSON\n```<｜tool▁call▁end｜>"),
    ),
    "kimi": (_each("<|tool_call_begin|>functions.NAME:NUMBER<|tool_call_argument_begin|>JSON<|tool_call_end|>"),),
    "harmony": (_each("<|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>JSON<|call|>"),),
    "fenced": (_each("I look.\n```bash\nJSON\n```"), _each("````sh\nJSON\n````\n"), _each("```submit\n```")),
}  # fmt: skip
"""By dialect, how calls are written rightly."""
_ALIKE = {
    "<": "＜", "|": "｜", "_": "▁", '"': "”", "{": "｛", ":": "：", "`": "ˋ", "a": "а", "e": "е", "o": "ο", " ": "\u00a0",
}  # fmt: skip
_JUNK = (
    "\0", "\ud800", "\udfff", "\ufeff", "\u202e", "\u2028", "\r\n", "\x1b[31m", "é", "\U0001f600", "<think>", "</think>", "```", "````json\n", "~~~",
    "NaN", "-Infinity", "1e999", "9" * 5000, "[" * 2000, '{"a":' * 1200, "}" * 50, '"', "\\", "\\u", "\\ud83d", "null", "<tool_call>", "[TOOL_CALLS]",
    "<|message|>", "<|eot_id|>", "</s>", "functions.", ":0", "(", "a=" * 40, " " * 3000, "\n" * 500,
)  # fmt: skip


def _cut(text: str, dice: random.Random) -> str:
    start = dice.choice((0, 0, dice.randrange(len(text) + 1)))
    return text[start : dice.randrange(start, len(text) + 1)]


def _doubled(text: str, dice: random.Random) -> str:
    at = dice.randrange(len(text) + 1)
    part = text[at : at + dice.randrange(1, 60)]
    return text[:at] + part * dice.choice((2, 3, 40)) + text[at:]


def _nested(text: str, dice: random.Random) -> str:
    at = text.find("{") if dice.random() < 0.5 else dice.randrange(len(text) + 1)
    return text[: max(at, 0)] + text + text[max(at, 0) :]


def _alike(text: str, dice: random.Random) -> str:
    letter = dice.choice(sorted(_ALIKE))
    return text.replace(letter, _ALIKE[letter], dice.choice((1, -1)))


def _without(text: str, dice: random.Random) -> str:
    """Without one sign that opens or closes something."""
    return text.replace(
        dice.choice(("<", ">", '"', "{", "}", "```", "</", "\n", "|", ":", ",")), "", dice.choice((1, -1))
    )


def _with_junk(text: str, dice: random.Random) -> str:
    at = dice.randrange(len(text) + 1)
    return text[:at] + dice.choice(_JUNK) + text[at:]


def _in_a_fence(text: str, dice: random.Random) -> str:
    fence = dice.choice(("```json\n{}\n```", "```\n{}\n```", "<think>{}", "`{}`", "<pre>{}</pre>", "> {}"))
    return fence.format(text) if "{}" in fence else text


def _swapped(text: str, dice: random.Random) -> str:
    lines = text.split("\n")
    dice.shuffle(lines)
    return "\n".join(lines)


_DAMAGES = (_cut, _doubled, _nested, _alike, _without, _with_junk, _with_junk, _in_a_fence, _swapped)


def _deep(call: ToolCall, dice: random.Random) -> ToolCall:
    """JSON that is right and nested about as deeply as Python can read, compare or write it."""
    depth = dice.choice((90, 300, 480, 900, 960, 990, 3000))
    opening, closing = dice.choice((("[", "]"), ('{"a":', "}")))
    inner = opening * depth + ("1" if closing == "}" else "") + closing * depth
    return ToolCall(call.name, f'{{"{dice.choice(("command", "path", "arguments"))}": {inner}}}')


def malformed_texts(num_texts: int, seed: int = 0) -> Iterator[tuple[str, str]]:
    """Dialect and text: calls that are right or wrong in themselves, in a frame that is damaged up to three times."""
    dice = random.Random(seed)
    wrong = malformed_replies(num_texts * 3, seed)
    for number in range(num_texts):
        dialect = sorted(WRITERS)[number % len(WRITERS)]
        calls = []
        for _ in range(dice.choice((1, 1, 1, 2, 3))):
            tool = dice.choice(TOOLS)
            right = ToolCall(tool.name, example_of(tool))
            calls.append(
                right if dice.random() < 0.6 else next(wrong) if dice.random() < 0.9 else _deep(right, dice)
            )
        text = dice.choice(WRITERS[dialect])(calls)
        for _ in range(dice.randrange(4)):
            text = dice.choice(_DAMAGES)(text, dice)
        yield dialect, text
