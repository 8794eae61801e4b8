"""Prompts that the model cannot take are told before the first step, at a bounded cost."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
from datasets import Dataset
from tiny_trainer import tiny_model, tiny_tokenizer

from composer_replication.errors import InputError
from composer_replication.trainer import prompt_fit
from composer_replication.trainer.prompt_fit import refuse_unfit_prompts

TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
CHAT = [[{"role": "user", "content": "Fix last()."}]] * 4


def check(prompts: Any, *, template: str | None = None, max_new_tokens: int | None = 6) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    dataset = prompts if isinstance(prompts, Dataset) else Dataset.from_dict({"prompt": prompts})
    refuse_unfit_prompts(dataset, tokenizer, tiny_model(), template_options={}, max_new_tokens=max_new_tokens)


def refusal(action: Callable[[], object]) -> InputError:
    with pytest.raises(InputError) as caught:
        action()
    return caught.value


@pytest.mark.parametrize(
    ("prompts", "code"), [(CHAT, "CR0810"), (["def f():"] * 3 + ["x" * 400], "CR0705")], ids=["chat", "long"]
)
def test_a_run_does_not_begin_on_prompts_that_do_not_fit(
    make_trainer: Callable[..., Any], prompts: list[Any], code: str
) -> None:
    trainer = make_trainer(max_steps=1)
    trainer.train_dataset = Dataset.from_dict({"prompt": prompts})
    assert refusal(trainer.train).code == code
    assert trainer.state.global_step == 0


def test_a_rollout_function_makes_its_own_prompts(make_trainer: Callable[..., Any]) -> None:
    trainer = make_trainer(rollout_func=lambda prompts, trainer: {})
    trainer.train_dataset = Dataset.from_dict({"prompt": CHAT})
    assert trainer._check_before_training() is None
    trainer.rollout_func = None
    assert refusal(trainer._check_before_training).code == "CR0810"  # so there was something to refuse


def test_the_long_prompt_is_named() -> None:
    error = refusal(lambda: check(["short"] * 5 + ["x" * 256] + ["short"] * 5))
    assert (error.code, error.where) == ("CR0705", "train_dataset[5]")
    check(["short", "x" * 255])


def test_messages_are_counted_with_their_template() -> None:
    long = [{"role": "user", "content": "x" * 250}]
    check([long], template="{{ messages[0].content }}")
    assert refusal(lambda: check([*CHAT, long], template=TEMPLATE)).where == "train_dataset[4]"
    assert refusal(lambda: check(CHAT, template="{{ raise_exception('no') }}")).code == "CR0810"


def test_answers_that_can_go_past_the_context_are_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        check(["x" * 200], max_new_tokens=None)
        check(["x" * 200], max_new_tokens=56)
        assert caplog.text == ""
        check(["x" * 200], max_new_tokens=57)
    assert "200 tokens" in caplog.text


def test_the_longest_of_many_are_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(prompt_fit, "MOST_READ", 50)
    monkeypatch.setattr(prompt_fit, "MOST_TOKENISED", 3)
    monkeypatch.setattr(prompt_fit, "prompt_length", lambda _, prompt, **__: sizes.append(len(prompt)) or 1)
    check(["x" * length for length in range(1, 201)])
    assert sizes == [197, 193, 189]


def test_what_is_no_column_of_prompts_is_not_read() -> None:
    def fails(rows: Any) -> Any:
        raise AssertionError

    too_long = {"prompt": ["x" * 400]}
    assert refusal(lambda: check(Dataset.from_dict(too_long))).where == "train_dataset[0]"
    check(Dataset.from_dict({"text": ["x" * 400]}))
    check(Dataset.from_dict({"prompt": []}))
    check(Dataset.from_dict(too_long).with_transform(fails))
    refuse_unfit_prompts(iter(()), tiny_tokenizer(), tiny_model(), template_options={}, max_new_tokens=6)
