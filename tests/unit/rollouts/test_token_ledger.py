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
words = st.text(alphabet="ab Z9.,)(\n'\"{}[]#-é☃", max_size=30)


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


def end_of(family: Family, answer: list[dict[str, Any]]) -> str:
    if family.name == "glm4moe":
        return "<|observation|>" if answer[0]["role"] == "tool" else "<|user|>"
    return ENDS.get(family.name, family.eos)


@pytest.mark.parametrize(
    "family",
    [*ALL, Family("gemma4", "<bos>", "<eos>", "own-message", tool_place="own-message")],
    ids=lambda family: str(family.name),
)
def test_ids_equal_the_whole_conversation_tokenised_at_once(family: Family) -> None:
    """After calls, which the template writes from records, where it knows tools; else after texts.

    Where a template writes another beginning of a turn later, it is what follows the turn that is compared.
    """
    tokenizer, tools = tokenizer_of(family), TOOLS if family.tool_place else None
    is_exact = family.name not in OPENS_A_THOUGHT
    ends = {"gptoss": "<|call|>", "glm4moe": "<|observation|>", "gemma4": "<|tool_response>"}
    end = (ends if tools else {}).get(family.name) or end_of(family, [{"role": "tool" if tools else "user"}])

    @settings(max_examples=5)
    @given(st.lists(words, min_size=1, max_size=3))
    def exact(contents: list[str]) -> None:
        first = [{"role": "user", "content": "Fix it."}]
        ledger = TokenLedger(tokenizer, Chat(first, tools))
        messages: list[dict[str, Any]] = [*first]
        for n, content in enumerate(contents):
            call_id = f"read:{n}"
            function = {"name": "read", "arguments": {"path": f"file{n}.py"}}
            call = {"type": "function", "id": call_id, "function": function}
            said: dict[str, Any] = {"content": f"I look at file{n}.py"}
            answer = {"role": "user", "content": content}
            if tools:
                said = {"content": "", "tool_calls": [call]} if is_exact else said
                answer = {"role": "tool", "name": "read", "tool_call_id": call_id, "content": content}
            prompt = rendered(tokenizer, messages, tools)
            messages += [{"role": "assistant", **said}, answer]
            whole = rendered(tokenizer, messages, tools)
            assert not is_exact or whole.startswith(prompt)
            begin = len(prompt) if is_exact else whole.index(f"file{n}.py")
            stop = whole.index(end, whole.index(f"file{n}.py")) + len(end)
            ledger.add_completion(finished(encoded(tokenizer, whole[begin:stop])))
            before = ledger.num_tokens
            if tools and is_exact:
                ledger.add_results([ToolCall("read", "{}", call_id)], [ToolResult(content)])
            else:
                ledger.add_messages([answer])
            ids = encoded(tokenizer, whole)
            assert ledger.prompt_ids()[before:] == ids[len(encoded(tokenizer, whole[:stop])) :]
            assert not is_exact or ledger.prompt_ids() == ids

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


def test_a_control_token_that_cannot_be_broken_up() -> None:
    class Stubborn(TemplateTokenizer):
        def apply_chat_template(self, conversation: list[dict[str, Any]], **known: Any) -> str:
            text = super().apply_chat_template(conversation, **known)
            return text.replace("< |im_end|>", "<|im_end|>")

    with pytest.raises(InputError, match="CR0816"):
        TokenLedger(Stubborn(BY_NAME["qwen3"]), Chat([{"role": "user", "content": "a<|im_end|>b"}]))


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
