"""A conversation as ids: equal to what the template makes of the whole, and to what was sampled, whatever it is."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from chat_templates import FAMILIES, TOOLS, Family, TemplateTokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from composer_replication.errors import InputError
from composer_replication.records import Completion, StopReason, ToolCall, ToolResult
from composer_replication.rollouts.tokens.token_ledger import Chat, TokenLedger

BEGIN = [{"role": "user", "content": "Begin."}]
ENDS = {
    "gemma": "<end_of_turn>",
    "gemma3": "<end_of_turn>",
    "phi3": "<|end|>",
    "gptoss": "<|end|>",
    "gemma4": "<turn|>",
    "gemma4_v2": "<turn|>",
    "phi3_5": "<|end|>",
    "muse_glimmer": "<|eot|>",
    "cohere2": "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>",
}
"""What ends a turn where it is not the family's end-of-sequence token; GLM ends one with the next role."""
CHATML = ("qwen3_instruct_2507", "qwen3_5_think", "qwen3_5_nothink", "qwen3_8", "nemotron_3_nano", "lfm2_v2")
MORE = (
    *(Family(name, "", "<|im_end|>", "own-message", tool_place="own-message") for name in CHATML),
    Family("llama3_2", "<|begin_of_text|>", "<|eot_id|>", "own-message", tool_place="own-message"),
    Family("gemma4_v2", "<bos>", "<eos>", "own-message", tool_place="own-message"),
    Family("muse_glimmer", "<bos>", "<|eot|>", "own-message", tool_place="own-message"),
    Family("deepseek_r1_distill", "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "own-message", tool_place="merged"),
    Family("phi3_5", "<s>", "<|endoftext|>", "own-message", "gpt2"),
    Family("cohere2", "<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>", "merged"),
)  # fmt: skip
ALL = (*FAMILIES, *MORE)
OPENS_A_THOUGHT = {
    "deepseekv3",
    "deepseek_r1_distill",
    "qwen3_5_think",
    "qwen3_5_nothink",
    "qwen3_8",
    "nemotron_3_nano",
}
"""Their generation prompts hold more than what they render of the same turn later: the ledger keeps what was seen."""
BY_NAME = {family.name: family for family in ALL}
by_name = pytest.mark.parametrize("family", ALL, ids=lambda family: str(family.name))
with_tools = pytest.mark.parametrize(
    "family", [f for f in ALL if f.tool_place and f.name != "gptoss"], ids=lambda family: str(family.name)
)
words = st.text(alphabet="ab Z9.,)(\n'\"{}[]#-é☃", max_size=30)
said_words = st.from_regex(r"[a-z][a-z .,()\n]{0,20}[a-z]", fullmatch=True)


@cache
def tokenizer_of(family: Family) -> TemplateTokenizer:
    """As that of the fixtures, with the control tokens that the newer templates of Gemma write."""
    tokenizer = TemplateTokenizer(family)
    more = set(re.findall(r"<\|\w+>|<\w+\|>", tokenizer.text)) if family.name.startswith("gemma4") else set()
    tokenizer.control |= more
    tokenizer.raw.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in sorted(more)]
    )
    return tokenizer


def encoded(tokenizer: TemplateTokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def shown(tokenizer: TemplateTokenizer, ids: tuple[int, ...]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def rendered(
    tokenizer: TemplateTokenizer, messages: list[dict[str, Any]], tools: Any = None, *, asks: bool = True
) -> str:
    return tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=asks)


def finished(ids: tuple[int, ...]) -> Completion:
    return Completion(ids, "", StopReason.FINISHED, tuple(-0.01 * (n + 1) for n in range(len(ids))))


def cut(ids: tuple[int, ...]) -> Completion:
    return Completion(ids, "", StopReason.LENGTH)


def begun(
    name: str, end: Callable[[tuple[int, ...]], Completion] = cut, said: str = "I look", tools: Any = None
) -> tuple[TemplateTokenizer, TokenLedger]:
    """A conversation after its first answer."""
    tokenizer = tokenizer_of(BY_NAME[name])
    ledger = TokenLedger(tokenizer, Chat(BEGIN, tools))
    ledger.add_completion(end(encoded(tokenizer, said)))
    return tokenizer, ledger


def tool_answers(draw: st.DrawFn) -> list[dict[str, Any]]:
    return [
        {"role": "tool", "name": "read", "tool_call_id": f"read:{n}", "content": draw(words)}
        for n in range(draw(st.integers(1, 3)))
    ]


@st.composite
def conversations(draw: st.DrawFn, family: Family) -> tuple[list[dict[str, Any]], list[Any]]:
    """First messages, and rounds of (what is said, what answers it)."""
    first = [{"role": "user", "content": draw(words)}]
    if family.has_system and draw(st.booleans()):
        first.insert(0, {"role": "system", "content": draw(words)})
    rounds = []
    for _ in range(draw(st.integers(1, 3))):
        has_tools = family.tool_place and family.name != "gptoss" and draw(st.booleans())
        answer = tool_answers(draw) if has_tools else [{"role": "user", "content": draw(words)}]
        rounds.append((draw(said_words), answer))
    return first, rounds


def end_of(family: Family, answer: list[dict[str, Any]]) -> str:
    if family.name == "glm4moe":
        return "<|observation|>" if answer[0]["role"] == "tool" else "<|user|>"
    return ENDS.get(family.name, family.eos)


@pytest.mark.long
@by_name
def test_ids_equal_the_whole_conversation_tokenised_at_once(family: Family) -> None:
    tokenizer = tokenizer_of(family)
    tools = TOOLS if family.tool_place else None

    @settings(max_examples=8)
    @given(conversations(family), st.data())
    def exact(conversation: tuple[list[dict[str, Any]], list[Any]], data: st.DataObject) -> None:
        first, rounds = conversation
        ledger = TokenLedger(tokenizer, Chat(first, tools))
        messages = [*first]
        for n, (words_said, answer) in enumerate(rounds):
            said, end = f"{words_said} no{n}", end_of(family, answer)
            prompt = rendered(tokenizer, messages, tools)
            is_exact = ledger.prompt_ids() == encoded(tokenizer, prompt)
            messages += [{"role": "assistant", "content": said}, *answer]
            text = rendered(tokenizer, messages, tools)
            whole = encoded(tokenizer, text)
            # what the template itself shows of the turn: from the prompt's end to the end of turn
            begin = len(prompt) if text.startswith(prompt) else text.index(said)
            stop = text.index(end, text.index(said) + len(said)) + len(end)
            sampled = encoded(tokenizer, text[begin:stop])
            is_cut = data.draw(st.booleans())
            ledger.add_completion(cut(sampled[:-1]) if is_cut else finished(sampled))
            before = ledger.num_tokens + is_cut
            ledger.add_messages(answer)
            assert ledger.prompt_ids()[before:] == whole[len(encoded(tokenizer, text[:stop])) :]
            is_exact = is_exact and text.startswith(prompt)
            assert is_exact or family.name in OPENS_A_THOUGHT
            if is_exact:
                assert shown(tokenizer, ledger.prompt_ids()) == text
            if family.name not in OPENS_A_THOUGHT:  # a line end joins that of the generation prompt there
                assert ledger.prompt_ids() == whole

    exact()


@pytest.mark.parametrize(
    "family",
    [
        family
        for family in (*ALL, Family("gemma4", "<bos>", "<eos>", "own-message", tool_place="own-message"))
        if family.tool_place and family.name not in OPENS_A_THOUGHT
    ],
    ids=lambda family: str(family.name),
)
def test_ids_after_calls_equal_the_whole_conversation(family: Family) -> None:
    """As above where the assistant's messages hold calls as records and the template writes them."""
    tokenizer = tokenizer_of(family)
    ends = {"gptoss": "<|call|>", "glm4moe": "<|observation|>", "gemma4": "<|tool_response>"}
    end = ends.get(family.name) or end_of(family, [{"role": "tool"}])

    @settings(max_examples=5)
    @given(st.lists(words, min_size=1, max_size=3))
    def exact(contents: list[str]) -> None:
        first = [{"role": "user", "content": "Fix it."}]
        ledger = TokenLedger(tokenizer, Chat(first, TOOLS))
        messages: list[dict[str, Any]] = [*first]
        for n, content in enumerate(contents):
            call_id = f"read:{n}"
            function = {"name": "read", "arguments": {"path": f"file{n}.py"}}
            call = {"type": "function", "id": call_id, "function": function}
            answer = [{"role": "tool", "name": "read", "tool_call_id": call_id, "content": content}]
            prompt = rendered(tokenizer, messages, TOOLS)
            messages += [{"role": "assistant", "content": "", "tool_calls": [call]}, *answer]
            whole = rendered(tokenizer, messages, TOOLS)
            assert whole.startswith(prompt)
            stop = whole.index(end, whole.index(f"file{n}.py")) + len(end)
            ledger.add_completion(finished(encoded(tokenizer, whole[len(prompt) : stop])))
            ledger.add_results([ToolCall("read", "{}", call_id)], [ToolResult(content)])
            assert ledger.prompt_ids() == encoded(tokenizer, whole)

    exact()


@by_name
def test_whatever_was_sampled_stays_and_each_prompt_extends_the_last(family: Family) -> None:
    tokenizer = tokenizer_of(family)
    size = tokenizer.raw.get_vocab_size()
    any_ids = st.lists(st.integers(0, size - 1), min_size=1, max_size=12).map(tuple)
    tools = TOOLS if family.tool_place else None

    @settings(max_examples=8)
    @given(st.lists(st.tuples(any_ids, st.booleans(), words), min_size=1, max_size=4))
    def kept(rounds: list[tuple[tuple[int, ...], bool, str]]) -> None:
        ledger = TokenLedger(tokenizer, Chat(BEGIN, tools))
        prompts = [ledger.prompt_ids()]
        for ids, is_cut, answer in rounds:
            ledger.add_completion(cut(ids) if is_cut else finished(ids))
            ledger.add_message(answer)
            prompts.append(ledger.prompt_ids())
        for (prompt, following), (ids, _, _) in zip(pairwise(prompts), rounds, strict=True):
            grown = prompt + ids
            assert following[: len(grown)] == grown
            assert len(following) > len(grown)

    kept()


@by_name
def test_an_end_of_turn_is_there_once_whether_it_was_sampled_or_not(family: Family) -> None:
    tokenizer = tokenizer_of(family)
    answer = [{"role": "user", "content": "Go on."}]
    said = encoded(tokenizer, "Done so far")
    end = encoded(tokenizer, end_of(family, answer))
    assert len(end) == 1 + (family.name == "cohere2")
    both = []
    for completion in (finished(said + end), cut(said), cut(said + end)):
        ledger = TokenLedger(tokenizer, Chat(BEGIN))
        ledger.add_completion(completion)
        ledger.add_messages(answer)
        both.append(ledger.prompt_ids())
    assert both[0] == both[1] == both[2]


@pytest.mark.parametrize(
    ("name", "sampled", "after"),
    [
        ("phi3", "<|endoftext|>", "\n<|user|>\nGo on."),
        ("llama3_1", "<|eom_id|>", "<|start_header_id|>user<|end_header_id|>"),
    ],
)
def test_another_end_token_of_the_model_ends_the_turn_once(name: str, sampled: str, after: str) -> None:
    tokenizer, ledger = begun(name, finished, f"Done{sampled}")
    ledger.add_message("Go on.")
    assert f"Done{sampled}{after}" in shown(tokenizer, ledger.prompt_ids())


def test_an_end_that_a_second_one_follows_is_not_doubled() -> None:
    tokenizer, ledger = begun("phi3", finished, "Done<|end|>\n<|endoftext|>")
    ledger.add_message("Go on.")
    assert (
        shown(tokenizer, ledger.prompt_ids()).count("<|end|>") == 3
    )  # of two messages of the user and one answer


def test_gpt_oss_ends_its_last_answer_otherwise_than_earlier_ones() -> None:
    tokenizer, ledger = begun("gptoss", finished, "<|channel|>final<|message|>Done<|return|>")
    ledger.add_message("Go on.")
    assert shown(tokenizer, ledger.prompt_ids()).endswith(
        "Done<|return|><|start|>user<|message|>Go on.<|end|><|start|>assistant"
    )


def test_thoughts_that_the_template_drops_later_stay_as_they_were_sampled() -> None:
    thought = "<think>\nlook first\n</think>\n\nNow."
    tokenizer, ledger = begun("qwen3", finished, f"{thought}<|im_end|>")
    sampled = encoded(tokenizer, f"{thought}<|im_end|>")
    ledger.add_message("Go on.")
    whole = [
        {"role": "user", "content": "Begin."},
        {"role": "assistant", "content": thought},
        {"role": "user", "content": "Go on."},
    ]
    assert "look first" not in rendered(tokenizer, whole)
    start = len(TokenLedger(tokenizer, Chat(BEGIN)).prompt_ids())
    stop = start + len(sampled)
    assert ledger.prompt_ids()[start:stop] == sampled
    plain = [*whole[:1], {"role": "assistant", "content": "Now."}, whole[2]]
    tail = encoded(tokenizer, rendered(tokenizer, plain).partition("Now.<|im_end|>")[2])
    assert ledger.prompt_ids()[stop:] == tail


def test_several_results_make_one_block() -> None:
    for name, block in (("deepseekv3", "<｜tool▁outputs▁begin｜>"), ("qwen3", "<|im_start|>user"), ("glm4moe", "<|observation|>")):  # fmt: skip
        tokenizer, ledger = begun(name, tools=TOOLS)
        before = ledger.num_tokens
        calls = [ToolCall("read", "{}"), ToolCall("read", "{}")]
        ledger.add_results(calls, [ToolResult("x = 1"), ToolResult("y = 2")])
        text = shown(tokenizer, ledger.prompt_ids()[before:])
        assert text.count(block) == 1
        assert text.index("x = 1") < text.index("y = 2")


def test_what_is_told_before_the_next_completion_is_one_answer() -> None:
    tokenizer = tokenizer_of(BY_NAME["qwen3"])
    result = [{"role": "tool", "name": "read", "tool_call_id": "read:0", "content": "x = 1"}]
    asked = {"role": "user", "content": "Sum it up."}
    at_once, in_parts = (TokenLedger(tokenizer, Chat(BEGIN, TOOLS)) for _ in range(2))
    for ledger in (at_once, in_parts):
        ledger.add_completion(cut(encoded(tokenizer, "I look")))
    at_once.add_messages([*result, asked])
    in_parts.add_messages(result)
    in_parts.add_message("Sum it up.")
    assert in_parts.prompt_ids() == at_once.prompt_ids()
    assert shown(tokenizer, at_once.prompt_ids()).count("<|im_start|>assistant") == 2


def test_results_as_a_message_of_the_user_where_the_template_has_no_tools() -> None:
    tokenizer = tokenizer_of(BY_NAME["gemma3"])
    ledger = TokenLedger(tokenizer, Chat(BEGIN), has_tool_messages=False)
    ledger.add_completion(cut(encoded(tokenizer, "I look")))
    ledger.add_results([ToolCall("bash", ""), ToolCall("bash", "")], [ToolResult("one"), ToolResult("two")])
    ledger.add_message("Sum it up.")
    assert shown(tokenizer, ledger.prompt_ids()).endswith(
        "I look<end_of_turn>\n<start_of_turn>user\none\n\ntwo\n\nSum it up.<end_of_turn>\n<start_of_turn>model\n"
    )


@pytest.mark.parametrize("family", [f for f in ALL if f.control], ids=lambda family: str(family.name))
def test_no_control_token_comes_out_of_a_content(family: Family) -> None:
    tokenizer = tokenizer_of(family)
    forged = "".join(sorted(tokenizer.control))
    ledger = TokenLedger(tokenizer, Chat([{"role": "user", "content": f"Begin {forged}."}]))
    honest = TokenLedger(tokenizer, Chat([{"role": "user", "content": "Begin ."}]))
    for each, content in ((ledger, f"a{forged}b"), (honest, "ab")):
        each.add_completion(cut(encoded(tokenizer, "I look")))
        each.add_message(content)
    control = {tokenizer.raw.token_to_id(token) for token in tokenizer.control}
    found, expected = ([i for i in each.prompt_ids() if i in control] for each in (ledger, honest))
    assert found == expected
    text = shown(tokenizer, ledger.prompt_ids())
    assert all(f"{token[0]} {token[1:]}" in text for token in tokenizer.control)


class Counting(TemplateTokenizer):
    """Counts the characters that it tokenises, and the messages that it renders at once."""

    num_characters = num_messages = 0

    def apply_chat_template(self, conversation: list[dict[str, Any]], **known: Any) -> str:
        self.num_messages = len(conversation)
        return super().apply_chat_template(conversation, **known)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self.num_characters += len(text)
        return super().encode(text, add_special_tokens=add_special_tokens)


@with_tools
def test_each_turn_tokenises_its_own_text_alone(family: Family) -> None:
    tokenizer = Counting(family)
    ledger = TokenLedger(tokenizer, Chat([{"role": "user", "content": "Begin. " * 50}], TOOLS))
    end = encoded(tokenizer, end_of(family, [{"role": "tool"}]))
    said, result = encoded(tokenizer, "I look into it"), "some output\n" * 40
    spent = []
    for _ in range(24):
        ledger.add_completion(finished(said + end))
        before = tokenizer.num_characters
        ledger.add_results([ToolCall("read", "{}")], [ToolResult(result)])
        spent.append(tokenizer.num_characters - before)
    assert all(len(result) <= count <= len(result) + 1000 for count in spent)
    assert max(spent[2:]) == min(spent[2:])
    assert tokenizer.num_messages <= 7  # at most two earlier rounds (DeepSeek-V3's), however many there were


def test_the_conversation_as_messages_renders_to_the_same_last_message() -> None:
    tokenizer = tokenizer_of(BY_NAME["qwen3"])
    ledger = TokenLedger(tokenizer, Chat(BEGIN, TOOLS))
    ledger.add_completion(cut(encoded(tokenizer, "I look")))
    ledger.add_results([ToolCall("read", "{}")], [ToolResult("x = 1")])
    chat = ledger.chat()
    whole = encoded(tokenizer, rendered(tokenizer, [dict(m) for m in chat.messages], chat.tools))
    after = encoded(tokenizer, rendered(tokenizer, [dict(m) for m in chat.messages]).partition("x = 1")[2])
    assert whole[-len(after) :] == ledger.prompt_ids()[-len(after) :] == after
    assert [m["role"] for m in chat.messages] == ["user", "assistant", "tool"]


def test_calls_that_end_otherwise_than_texts() -> None:
    tokenizer = tokenizer_of(BY_NAME["llama3_1"])
    chat = Chat(BEGIN, options={"builtin_tools": ["code_interpreter"]})
    for end, tail in (
        ("<|eom_id|>", "<|eom_id|><|start_header_id|>ipython<|end_header_id|>"),
        ("<|eot_id|>", ""),
    ):
        ledger = TokenLedger(tokenizer, chat)
        ledger.add_completion(finished(encoded(tokenizer, f"I look{end}")))
        if not tail:  # a text ends so; what the template would put between it and a result is not said
            with pytest.raises(InputError, match="CR0810"):
                ledger.add_results([ToolCall("read", "{}")], [ToolResult("x")])
            continue
        ledger.add_results([ToolCall("read", "{}")], [ToolResult("x")])
        assert f"I look{tail}" in shown(tokenizer, ledger.prompt_ids())


WANTS_TEXT = (
    "{% for m in messages %}"
    "{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}{{ raise_exception('no call') }}{% endif %}"
    "<|im_start|>{{ m.role }} "
    "{% if m.tool_calls %}{{ '' + m.tool_calls[0].function.arguments }}{% else %}{{ m.content }}{% endif %}"
    "<|im_end|>{% endfor %}<|im_start|>"
)


def test_a_template_that_wants_calls_with_arguments_as_text() -> None:
    tokenizer = Written(WANTS_TEXT)
    ledger = TokenLedger(tokenizer, Chat(BEGIN))
    ledger.add_completion(finished(encoded(tokenizer, "I look<|im_end|>")))
    ledger.add_results([ToolCall("read", "{}")], [ToolResult("x = 1")])
    assert shown(tokenizer, ledger.prompt_ids()).endswith(
        "I look<|im_end|><|im_start|>tool x = 1<|im_end|><|im_start|>"
    )


# ---- what is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mistral", "gemma3", "zephyr", "gptoss"])
def test_a_template_that_cannot_take_results_says_why_and_nothing_changes(name: str) -> None:
    _, ledger = begun(name)
    before = ledger.prompt_ids()
    with pytest.raises(InputError, match="CR0810"):
        ledger.add_results([ToolCall("read", "{}")], [ToolResult("x = 1")])
    assert ledger.prompt_ids() == before
    ledger.add_message("x = 1")  # the way that its remedy names
    assert ledger.prompt_ids()[: len(before)] == before


def test_a_conversation_that_the_template_refuses_or_does_not_show() -> None:
    tokenizer = tokenizer_of(BY_NAME["gemma"])
    with pytest.raises(InputError, match="CR0810"):
        TokenLedger(tokenizer, Chat([{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]))
    tokenizer = tokenizer_of(BY_NAME["zephyr"])
    with pytest.raises(InputError, match="CR0810"):
        TokenLedger(
            tokenizer, Chat([{"role": "developer", "content": "x"}, {"role": "user", "content": "y"}])
        )


class Written(TemplateTokenizer):
    """A template of our own."""

    def __init__(self, template: str) -> None:
        super().__init__(BY_NAME["smollm2"])
        self.template = self.template.environment.from_string(template)


def test_a_template_that_counts_its_messages_is_followed() -> None:
    text = "{% for m in messages %}<|im_start|>{{ loop.index }} {{ m.role }} {{ m.content }}<|im_end|>{% endfor %}<|im_start|>"
    tokenizer = Written(text)
    ledger, messages = TokenLedger(tokenizer, Chat(BEGIN)), [*BEGIN]
    for number in range(12):
        said = f"{len(messages) + 1} assistant I look {number}"
        ledger.add_completion(finished(encoded(tokenizer, f"{said}<|im_end|>")))
        answer = [{"role": "user" if number % 3 else "tool", "content": f"go on {number}"}]
        ledger.add_messages(answer)
        messages += [{"role": "assistant", "content": f"I look {number}"}, *answer]
        assert shown(tokenizer, ledger.prompt_ids()) == rendered(tokenizer, messages)


MOVES_TOOLS = (
    "{% for m in messages %}{% if m.role == 'user' and (loop.last or loop.index0 == messages|length - 1) %}"
    "[TOOLS]x[/TOOLS]{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}<|im_start|>"
)


def test_a_template_that_moves_what_stands_already() -> None:
    tokenizer = Written(MOVES_TOOLS)
    ledger = TokenLedger(tokenizer, Chat(BEGIN))
    ledger.add_completion(cut(encoded(tokenizer, "I look")))
    with pytest.raises(InputError, match="CR0812"):
        ledger.add_message("Go on.")


def test_a_template_that_shortens_the_round_before_is_refused_at_the_second_round() -> None:
    tokenizer = Written(
        "{% for m in messages %}<|im_start|>{{ m.role }} {% if m.role == 'tool' and not loop.last %}(old)"
        "{% else %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}<|im_start|>"
    )
    ledger = TokenLedger(tokenizer, Chat(BEGIN))
    ledger.add_completion(finished(encoded(tokenizer, "I look<|im_end|>")))
    ledger.add_messages([{"role": "tool", "content": "x = 1"}])
    ledger.add_completion(finished(encoded(tokenizer, "I look<|im_end|>")))
    with pytest.raises(InputError, match="CR0812"):
        ledger.add_messages([{"role": "tool", "content": "x = 2"}])


def test_a_seam_that_the_tokenizer_closes() -> None:
    tokenizer = Written("")
    word = next(w for w in sorted(tokenizer.raw.get_vocab()) if w[0] == "x" and w[1:].isalpha())
    tokenizer = Written(f"{{% for m in messages %}}{{{{ m.content }}}}{word[1:]}{{% endfor %}}")
    ledger = TokenLedger(tokenizer, Chat(BEGIN))
    ledger.add_completion(cut((3, 4)))
    with pytest.raises(InputError, match="CR0810"):
        ledger.add_message("Go on.")


def test_a_control_token_that_cannot_be_broken_up() -> None:
    class Stubborn(TemplateTokenizer):
        def apply_chat_template(self, conversation: list[dict[str, Any]], **known: Any) -> str:
            text = super().apply_chat_template(conversation, **known)
            return text.replace("< |im_end|>", "<|im_end|>")

    with pytest.raises(InputError, match="CR0816"):
        TokenLedger(Stubborn(BY_NAME["qwen3"]), Chat([{"role": "user", "content": "a<|im_end|>b"}]))


def test_a_turn_cut_off_whose_calls_end_in_a_way_of_their_own() -> None:
    tokenizer = tokenizer_of(Family("gemma4", "<bos>", "<eos>", "own-message", tool_place="own-message"))
    for said, reason in (("I look", "cut off"), ("I look<turn|>", "ended with '<turn|>'")):
        ledger = TokenLedger(tokenizer, Chat(BEGIN, TOOLS))
        ids = encoded(tokenizer, said)
        ledger.add_completion(finished(ids) if "turn" in said else cut(ids))
        with pytest.raises(InputError, match=f"CR0810.*{re.escape(reason)}"):
            ledger.add_results([ToolCall("read", "{}")], [ToolResult("x = 1")])


def test_completions_without_ids_or_with_other_numbers() -> None:
    _, ledger = begun("qwen3")
    ledger.add_message("Go on.")
    before = ledger.prompt_ids()
    for wrong in (cut(()), Completion((1, 2), "", StopReason.LENGTH, (-0.5,))):
        with pytest.raises(InputError, match="CR0821"):
            ledger.add_completion(wrong)
    assert ledger.prompt_ids() == before


def test_ids_that_the_policy_does_not_have() -> None:
    tokenizer, ledger = begun("qwen3")
    ledger.add_message("Go on.")
    before, last = ledger.prompt_ids(), len(tokenizer) - 1
    for wrong in (last + 1, -1, 2**31 - 1):
        said = rf"CR0821.*the id {wrong}, and there are those from 0 to {last}"
        with pytest.raises(InputError, match=said):
            ledger.add_completion(cut((1, wrong, 2)))
    assert ledger.prompt_ids() == before
    ledger.add_completion(cut((0, last)))
    assert ledger.prompt_ids() == (*before, 0, last)


def test_a_model_may_have_rows_for_more_ids_than_its_tokenizer() -> None:
    tokenizer = tokenizer_of(BY_NAME["qwen3"])
    beyond = len(tokenizer) + 6
    ledger = TokenLedger(tokenizer, Chat(BEGIN), num_ids=beyond + 1)
    with pytest.raises(InputError, match=f"the id {beyond + 1}, "):
        ledger.add_completion(cut((beyond + 1,)))
    ledger.add_completion(cut((beyond,)))
    ledger.add_message("Go on.")
    assert beyond in ledger.prompt_ids()


def test_what_is_called_in_a_wrong_order() -> None:
    _, ledger = begun("qwen3")
    with pytest.raises(ValueError, match="a completion follows a prompt"):
        ledger.add_completion(cut((1,)))
    with pytest.raises(ValueError, match="no message"):
        ledger.add_messages([])
    with pytest.raises(ValueError, match="argument"):
        ledger.add_results([ToolCall("read", "{}")], [])
