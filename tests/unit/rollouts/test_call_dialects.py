"""Calls in replies: what templates write is read as it was meant, and nothing that a model writes raises."""

from __future__ import annotations

import json
from copy import copy
from typing import Any

import pytest
from chat_templates import FAMILIES, Family, TemplateTokenizer, tokenizer_of
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers.utils.chat_parsing import parse_response
from trl import chat_template_utils

from composer_replication.errors import InputError
from composer_replication.records import Completion, StopReason, ToolCall, ToolSpec, Turn
from composer_replication.rollouts.episodes.agent_loop import LedgerTalk
from composer_replication.rollouts.tokens.call_dialects import (
    DIALECTS,
    dialect_of,
    read_calls,
    read_completion,
)
from composer_replication.rollouts.tools.tool_context import RefusedError, arguments_of

OF_TEMPLATES = {
    **dict.fromkeys("qwen2_5 qwen3 glm4moe qwen3_5_think nemotron_3_nano".split(), "hermes"),
    **dict.fromkeys("llama3_1 llama3_2".split(), "llama"),
    "deepseekv3": "deepseek",
    "gptoss": "harmony",
    "kimi_k2": "kimi",
    **dict.fromkeys("smollm2 gemma3 mistral phi3".split(), "fenced"),
}
ONE_CALL = {"llama3_1", "llama3_2", "gptoss"}
KNOWN = {family.name: family for family in FAMILIES}
SCHEMA = {"properties": {"text": {"type": "string"}, "num": {"type": "integer"}, "more": {"type": "object"}}}
TOOLS = (ToolSpec("write_file", SCHEMA), ToolSpec("bash", {"properties": {"command": {"type": "string"}}}))

plain = st.text(alphabet="ab 1\n\"\\{}[],:'é☃\t`", max_size=20)
arguments = st.fixed_dictionaries(
    {},
    optional={
        "text": plain,
        "num": st.integers(-5, 5),
        "more": st.dictionaries(st.sampled_from("ab"), plain, max_size=2),
    },
)


def family_of(name: str) -> Family:
    return KNOWN.get(name) or Family(name, "", "<|im_end|>", "own-message")


def written(tokenizer: TemplateTokenizer, calls: list[dict[str, Any]], *, as_text: bool) -> str:
    """What the template itself makes of an assistant's message with these calls."""
    records = [
        {
            "type": "function",
            "id": f"functions.{call['name']}:{n}",
            "function": {
                "name": call["name"],
                "arguments": json.dumps(call["arguments"]) if as_text else call["arguments"],
            },
        }
        for n, call in enumerate(calls)
    ]
    first = {"role": "user", "content": "Fix it."}
    said = {"role": "assistant", "content": "", "tool_calls": records}
    options = {"tools": None, "tokenize": False}
    prompt = tokenizer.apply_chat_template([first], add_generation_prompt=True, **options)
    whole = tokenizer.apply_chat_template([first, said], add_generation_prompt=False, **options)
    common = next((n for n, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(prompt))
    return whole[common:]


def test_a_template_says_its_dialect() -> None:
    for name, dialect in OF_TEMPLATES.items():
        assert dialect_of(tokenizer_of(family_of(name)).text) == dialect, name
    assert dialect_of("{{ '[TOOL_CALLS]' }}") == "mistral"


@pytest.mark.parametrize("nothing", [None, "", {}, {"rag": "{{ messages }}"}])
def test_a_tokenizer_without_a_template(nothing: Any) -> None:
    tokenizer = copy(tokenizer_of(family_of("qwen3")))
    tokenizer.chat_template = nothing
    talk = LedgerTalk(tokenizer)
    for ask in (lambda: dialect_of(nothing), lambda: talk.open("Begin.", TOOLS)):
        with pytest.raises(InputError, match=r"CR0810.*no chat template"):
            ask()


@pytest.mark.parametrize("name", ["lfm2_v2", "gemma4", "muse_glimmer"])
def test_a_template_with_tools_in_another_way_is_not_guessed_at(name: str) -> None:
    with pytest.raises(InputError, match="CR0818"):
        dialect_of(tokenizer_of(family_of(name)).text)


class OwnTemplate(TemplateTokenizer):
    """As a tokenizer of transformers that ships with a response template: TRL's of the same family."""

    def __init__(self, name: str = "gemma4") -> None:
        super().__init__(family_of(name))
        marks = ["<|tool_call>", "<tool_call|>", '<|"|>', "<turn|>", "<eos>", "<|channel>", "<channel|>"]
        self.raw.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
        self.response_template = chat_template_utils.add_response_schema(copy(self)).response_template

    def parse_response(self, response: str, *, prefix: str, tools: Any) -> dict[str, Any]:
        return dict(parse_response(response, self.response_template, prefix=prefix, tools=tools))


def read_beside(name: str, text: str) -> list[ToolCall]:
    """The calls of an answer to the template's own prompt, by a tokenizer with a response template."""
    tokenizer = OwnTemplate(name)
    assert dialect_of(tokenizer.text, tokenizer) == OF_TEMPLATES.get(name, "own")
    chat = {"tools": None, "tokenize": False, "add_generation_prompt": True}
    shown = tokenizer.apply_chat_template([{"role": "user", "content": "Fix it."}], **chat)
    prompt, ids = (tuple(tokenizer.encode(each, add_special_tokens=False)) for each in (shown, text))
    turn = Turn(prompt, Completion(ids, text, StopReason.FINISHED))
    return list(LedgerTalk(tokenizer).find_calls(turn, TOOLS))


BASH = [("bash", '{"command": "ls"}')]
GOOD = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
BAD = '<tool_call>\n{"name": "bash", "arguments": {"command": ls}}\n</tool_call>'
XML = "I think.\n</think>\n\n<tool_call>\n<function=write_file>\n<parameter=num>\n3\n</parameter>\n<parameter=text>\n"


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("gemma4", '<|tool_call>call:bash{command:<|"|>ls<|"|>}<tool_call|><turn|>', BASH),
        ("gemma4", 'I look.<|tool_call>call:bash{command:<|"|>ls<|"|>}<tool_call|>', BASH),
        ("gemma4", "Done.<turn|>", []),
        ("gemma4", "Done.<eos>", []),
        ("gemma4", "Done.", []),
        ("gemma4", "<|channel>thought\n<|tool_call>call:bash{}<tool_call|><channel|>Done.<turn|>", []),
        # what transformers cannot read, or takes for text
        ("gemma4", "<|tool_call>call:bash{command:ls}<tool_call|>", [("", "<|tool_call>call:bash{command:ls}<tool_call|>")]),
        ("gemma4", "<|tool_call>bash ls<tool_call|><turn|>", [("", "<|tool_call>bash ls<tool_call|>")]),
        # in dialects that are known here, too
        ("qwen3", f"I look.\n{GOOD}\n{GOOD}<|im_end|>", BASH * 2),
        ("qwen3", f"<think>\n{BAD}\n</think>\n\n{GOOD}<|im_end|>", BASH),
        ("qwen3", f"<think>\n{GOOD}\n</think>\n\nDone.<|im_end|>", []),
        # by the schema a text stays a text and a number is one; the template trims what an edit of Python needs
        ("qwen3_5_think", f"{XML}  3\n\n</parameter>\n</function>\n</tool_call><|im_end|>", [("write_file", '{"num": 3, "text": "  3\\n"}')]),
        ("qwen3", GOOD.replace("ls", "</tool_call>"), [("bash", '{"command": "</tool_call>"}')]),  # transformers raises
        # ours takes it for text; then the template does
        ("llama3_1", 'I look: {"name": "bash", "parameters": {"command": "ls"}}<|eot_id|>', BASH),
        ("gptoss", '<|channel|>commentary to=functions.bash <|constrain|>json<|message|>{"command": "ls"}<|call|>', BASH),
    ],
)  # fmt: skip
def test_the_response_template_of_a_tokenizer_counts_where_calls_are_well_formed(
    name: str, text: str, expected: list[tuple[str, str]]
) -> None:
    assert [(call.name, call.arguments) for call in read_beside(name, text)] == expected


@pytest.mark.parametrize(
    ("name", "text", "num_good", "said"),
    [
        ("qwen3", f"{BAD}<|im_end|>", 0, "bad json"),  # transformers raises
        ("qwen3", f"{GOOD}\n{BAD}<|im_end|>", 1, "bad json"),
        ("qwen3_5_think", f"{XML}\n</tool_call><|im_end|>", 0, "bad json"),  # it leaves out the text, and that of a cut:
        ("qwen3_5_think", XML + "\n" * 20_000, 0, "bad json"),  # after hours, by the regular expression of the template
        ("qwen3_5_think", "I think.\n</think>\n\n<tool_call>\nbash ls\n</tool_call><|im_end|>", 0, "unknown tool"),  # it takes it for text
        ("llama3_1", 'I look: {"name": "bash", "parameters": {ls}}<|eot_id|>', 0, "bad json"),  # ours takes it for text
    ],
)  # fmt: skip
def test_a_malformed_call_is_kept_and_refused_beside_a_response_template(
    name: str, text: str, num_good: int, said: str
) -> None:
    *good, bad = read_beside(name, text)
    assert [(call.name, call.arguments) for call in good] == BASH * num_good
    with pytest.raises(RefusedError, match=rf"(?s){said}.*Example:"):
        arguments_of(bad, TOOLS)


@pytest.mark.parametrize("name", [name for name, dialect in OF_TEMPLATES.items() if dialect != "fenced"])
def test_calls_that_the_template_writes_are_read_as_they_were_meant(name: str) -> None:
    tokenizer, dialect = tokenizer_of(family_of(name)), OF_TEMPLATES[name]
    num_most = 1 if name in ONE_CALL else 3
    call = st.fixed_dictionaries({"name": st.sampled_from(["write_file", "bash"]), "arguments": arguments})

    @settings(max_examples=15)
    @given(st.lists(call, min_size=1, max_size=num_most))
    def meant(calls: list[dict[str, Any]]) -> None:
        if name in {"glm4moe", "nemotron_3_nano", "qwen3_5_think"}:
            for each in calls:  # only the schema of write_file knows these arguments
                each["name"] = "write_file"
        text = written(tokenizer, calls, as_text=name == "deepseekv3")
        found = read_calls(
            f"I write.\n{text}" if dialect in {"hermes", "kimi"} else text, dialect, tools=TOOLS
        )
        assert [each.name for each in found] == [each["name"] for each in calls]
        if name != "kimi_k2":
            assert [json.loads(each.arguments) for each in found] == [each["arguments"] for each in calls]
        else:
            assert [each.call_id for each in found] == [
                f"functions.{c['name']}:{n}" for n, c in enumerate(calls)
            ]

    meant()


TWO = [*BASH, ("submit", "{}")]
DEEPSEEK = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>"


@pytest.mark.parametrize(
    ("dialect", "text", "expected"),
    [
        ("hermes", '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call><|im_end|>', BASH),
        ("hermes", 'x<tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call><tool_call>submit\n</tool_call>', TWO),
        # cut after its JSON, or with the arguments as a text in JSON
        ("hermes", '<tool_call>{"name": "bash", "arguments": {"command": "ls"}}', BASH),
        ("hermes", '<tool_call>{"name": "bash", "arguments": "{\\"command\\": \\"ls\\"}"}</tool_call>', BASH),
        ("hermes", '<tool_call>{"type": "function", "function": {"name": "bash", "arguments": {"command": "ls"}}}</tool_call>', BASH),
        ("hermes", '<tool_call>{"name": "submit"}</tool_call>', [("submit", "{}")]),
        # the tags and thoughts stand in a string
        ("hermes", '<tool_call>{"name": "a", "arguments": {"t": "</tool_call><think>"}}</tool_call>', [("a", '{"t": "</tool_call><think>"}')]),
        ("hermes", '<think>say <tool_call>{"name": "a"}</tool_call></think><tool_call>{"name": "b"}</tool_call>', [("b", "{}")]),
        ("hermes", '<think>never ends <tool_call>{"name": "a"}</tool_call>', []),
        ("hermes", "<tool_call>\n<function=bash>\n<parameter=command>\nls\n</parameter>\n</function>\n</tool_call>", BASH),
        ("hermes", "<tool_call>bash\n<arg_key>command</arg_key>\n<arg_value>ls</arg_value>\n</tool_call>", BASH),
        ("llama", '{"name": "bash", "parameters": {"command": "ls"}}<|eot_id|>', BASH),
        ("llama", '<|python_tag|>{"name": "bash", "parameters": {"command": "ls"}}; {"name": "submit", "parameters": {}}<|eom_id|>', TWO),
        ("llama", 'I look:\n{"type": "function", "name": "bash", "parameters": {"command": "ls"}}', BASH),
        ("llama", '{"name": "Ann", "age": 3}', []),
        ("llama", 'for (i = 0;;) {"name"}', []),
        ("mistral", '[TOOL_CALLS] [{"name": "bash", "arguments": {"command": "ls"}}, {"name": "submit", "arguments": {}}]</s>', TWO),
        ("mistral", '[TOOL_CALLS]bash{"command": "ls"}[TOOL_CALLS]submit[ARGS]{}</s>', TWO),
        ("deepseek", DEEPSEEK.format('<｜tool▁call▁begin｜>function<｜tool▁sep｜>bash\n```json\n{"command": "ls"}\n```<｜tool▁call▁end｜>'), BASH),
        ("deepseek", DEEPSEEK.format('<｜tool▁call▁begin｜>bash<｜tool▁sep｜>{"command": "ls"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>submit<｜tool▁sep｜>{}<｜tool▁call▁end｜>'), TWO),
        ("kimi", '<|tool_calls_section_begin|><|tool_call_begin|>functions.bash:0<|tool_call_argument_begin|>{"command": "ls"}<|tool_call_end|><|tool_call_begin|>submit<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>', TWO),
        ("harmony", '<|channel|>analysis<|message|>I call to=functions.x<|end|><|start|>assistant<|channel|>commentary to=functions.bash <|constrain|>json<|message|>{"command": "ls"}<|call|>', BASH),
        ("harmony", ' to=functions.bash<|channel|>commentary json<|message|>{"command": "ls"}<|call|>', BASH),
        ("harmony", "<|channel|>final<|message|>Done.<|return|>", []),
        ("fenced", "I look.\n```bash\nls\n```\nThen:\n```submit\n```\n", [("bash", '{"command": "ls\\n"}'), ("submit", "{}")]),
        ("fenced", "````sh\n```\nx = 1\n```\n````\n", [("bash", '{"command": "```\\nx = 1\\n```\\n"}')]),
        ("fenced", "```json\n```bash\nls\n```\n", []),
        ("fenced", "no block, only `ls`", []),
    ],
)  # fmt: skip
def test_by_hand(dialect: str, text: str, expected: list[tuple[str, str]]) -> None:
    assert [(call.name, call.arguments) for call in read_calls(text, dialect)] == expected


@pytest.mark.parametrize(
    ("dialect", "text", "name", "arguments_text"),
    [
        ("hermes", '<tool_call>{"name": "bash", "arguments": {"command": ls}}</tool_call>', "bash", '{"name": "bash", "arguments": {"command": ls}}'),
        ("hermes", '<tool_call>{"name": "bash", "arguments": {}}}</tool_call>', "bash", '{"name": "bash", "arguments": {}}}'),
        ("hermes", "<tool_call>\nplease list it", "", "please list it"),
        ("hermes", '<tool_call>["bash"]</tool_call>', "", '["bash"]'),
        ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>', "", '{"name": 3, "arguments": {}}'),
        ("hermes", "<tool_call><function=bash><parameter=command>ls</function></tool_call>", "bash", "<function=bash><parameter=command>ls</function>"),
        ("hermes", '<tool_call>{"name": "bash", "arguments": ["ls"]}</tool_call>', "bash", '["ls"]'),
        ("llama", '{"name": "bash", "parameters": {"command": "l', "bash", '{"name": "bash", "parameters": {"command": "l'),
        ("llama", "<|python_tag|>search.call(1)<|eom_id|>", "", "search.call(1)"),
        ("mistral", "[TOOL_CALLS] let me see</s>", "", "let me see"),
        ("mistral", '[TOOL_CALLS]bash{"command": </s>', "bash", '{"command": '),
        ("deepseek", "<｜tool▁call▁begin｜>bash ls<｜tool▁call▁end｜>", "", "bash ls"),
        ("kimi", "<|tool_call_begin|>functions.bash:0", "", "functions.bash:0"),
        ("harmony", " to=functions.bash<|channel|>commentary json<|message|>ls<|call|>", "bash", "ls"),
        ("fenced", "```bash\nrm -r lib", "bash", "rm -r lib"),
    ],
)  # fmt: skip
def test_what_is_meant_as_a_call_and_is_none_keeps_its_raw_text(
    dialect: str, text: str, name: str, arguments_text: str
) -> None:
    [call] = read_calls(text, dialect)
    assert call == ToolCall(name, arguments_text)
    with pytest.raises(RefusedError):  # no environment takes it for whole
        arguments_of(call, TOOLS)


def test_values_between_tags_are_text_or_json_as_the_schema_says() -> None:
    text = (
        "<tool_call><function=write_file><parameter=text>\n{}\n</parameter><parameter=num>3</parameter>"
        "<parameter=more>\n{'no': JSON}\n</parameter></function></tool_call>"
    )
    [call] = read_calls(text, "hermes", tools=TOOLS)
    assert json.loads(call.arguments) == {"text": "{}", "num": 3, "more": "{'no': JSON}"}
    [call] = read_calls(text, "hermes")
    assert json.loads(call.arguments)["num"] == "3"


def test_a_completion_is_read_from_its_ids() -> None:
    tokenizer = tokenizer_of(KNOWN["qwen3"])
    ids = tokenizer.encode('a <tool_call>{"name": "b"}</tool_call></think>\n', add_special_tokens=False)
    ids += tokenizer.encode('<tool_call>{"name": "c"}</tool_call><|im_end|>', add_special_tokens=False)
    shut = tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)
    thinking = tokenizer.encode("<|im_start|>assistant\n<think>\n", add_special_tokens=False)
    assert [call.name for call in read_completion(tokenizer, shut, ids, "hermes")] == ["b", "c"]
    assert [call.name for call in read_completion(tokenizer, thinking, ids, "hermes")] == ["c"]


def test_the_end_token_right_behind_a_fence_hides_nothing() -> None:
    tokenizer = tokenizer_of(KNOWN["qwen3"])
    ids = tokenizer.encode("I look.\n```bash\nls\n```<|im_end|>", add_special_tokens=False)
    [call] = read_completion(tokenizer, (), ids, "fenced")
    assert call == ToolCall("bash", '{"command": "ls\\n"}')


PIECES = st.sampled_from(
    [
        "<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>", "<|eot_id|>", "[TOOL_CALLS]", "[ARGS]",
        "[CALL_ID]", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|message|>", "<|channel|>", "<|start|>", "<|call|>",
        " to=functions.x", "```", "````", "```bash\n", "\n```json\n", "<function=", "<parameter=", "</parameter>", "</function>",
        "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", '{"name": "x", "arguments": {', '"parameters":', '"function":',
        "{", "}", "[", "]", '"', "\\", ":", ",", ";", "\n", " ", ".call(", ")", 'a="', "=", ">", "1e999", "NaN", "null",
        "9" * 5000, "\\ud800", "\x00", "é", "[" * 3000, '{"a":' * 900, '{"name": "n", "arguments": ' + "[" * 700 + "]" * 700 + "}",
    ]
)  # fmt: skip


@settings(max_examples=50)
@given(st.lists(PIECES | st.text(max_size=5), max_size=15).map("".join), st.booleans())
@example('<tool_call>{"name": "n", "arguments": ' + '{"a":' * 940 + "1" + "}" * 940 + "}</tool_call>", False)
@example('<tool_call>{"name": "\\ud800", "arguments": "\\ud800"}</tool_call>', False)
def test_nothing_that_a_model_writes_raises(text: str, thought_is_open: bool) -> None:
    for dialect in DIALECTS:
        calls = read_calls(text, dialect, tools=TOOLS, thought_is_open=thought_is_open)
        for call in calls:
            for part in (call.name, call.arguments, call.call_id):
                assert part.encode("utf-8").decode("utf-8") == part


MANY = 20_000


@pytest.mark.parametrize(
    "text",
    [
        *(piece * MANY for piece in ("<tool_call>{", "<|message|>", "```a", "[TOOL_CALLS]x", ';{ "name"', "<think>")),
        "`" * 1_000_000 + "\n",
        "```" + "a" * 1_000_000,
        "<tool_call>" + " " * 1_000_000,
        '<tool_call>{"name": "' + "a" * 1_000_000,
        f"[TOOL_CALLS] [{', '.join(['1'] * MANY)}]",
    ],
    ids=lambda text: str(text)[:24],
)  # fmt: skip
def test_a_long_reply_of_one_piece_is_read_in_one_pass(text: str) -> None:
    """No time is asserted; a reader that goes back at each place would not end within the suite's limit."""
    for dialect in DIALECTS:
        assert len(read_calls(text, dialect)) <= MANY
