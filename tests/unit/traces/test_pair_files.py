"""Files of preference pairs: their ids are those that a person writes down by hand, and what is wrong is said with its line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from composer_replication.errors import InputError
from composer_replication.rollouts.tokens.pair_ids import tokenised_pairs
from composer_replication.traces.pairs import pair_sources, read_pair_rows

CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# the prompt is gone when an answer follows
FORGETFUL = "{% for m in messages[-1:] %}{{ m.content }}{% endfor %}"
REFUSING = "{{ raise_exception('roles must alternate') }}"
CHAT = {
    "prompt": [{"role": "user", "content": "hi"}],
    "chosen": [{"role": "assistant", "content": "yes"}],
    "rejected": [{"role": "assistant", "content": "no"}],
}


def byte_tokenizer(template: str | None = CHATML) -> Any:
    """Every byte is a token, so that ids can be written by hand."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={s: i for i, s in enumerate(["<pad>", "<eos>", *alphabet])}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", chat_template=template
    )


def written(tmp_path: Path, *rows: object) -> Path:
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def by_hand(text: str) -> tuple[int, ...]:
    tokenizer = byte_tokenizer()
    symbols = {" ": "Ġ", "\n": "Ċ"}
    return tuple(tokenizer.get_vocab()[symbols.get(character, character)] for character in text)


def test_both_shapes_become_ids(tmp_path: Path) -> None:
    text = {"prompt": "f(x):\n", "chosen": " x", "rejected": " y", "weight": 0.5, "source": "executed"}
    rows = read_pair_rows(written(tmp_path, text, "", CHAT))
    first, second = tokenised_pairs(rows, byte_tokenizer())
    assert (first.prompt_ids, first.chosen_ids, first.rejected_ids) == tuple(
        map(by_hand, ("f(x):\n", " x", " y"))
    )
    assert (first.weight, first.source) == (0.5, "executed")
    assert (second.weight, second.source) == (1.0, "")
    # "<eos>" is the token with the id 1; the line break that the template puts after it is none of the model's.
    assert second.prompt_ids == (*by_hand("<|user|>hi"), 1, *by_hand("\n<|assistant|>"))
    assert second.chosen_ids == (*by_hand("yes"), 1)
    assert second.rejected_ids == (*by_hand("no"), 1)


TEXT = {"prompt": "a", "chosen": "b", "rejected": "c"}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("{", "a line is not JSON"),
        ("[1]", "a line is not a JSON object"),
        ({"prompt": "a", "chosen": "b"}, "rejected is missing"),
        ({"prompt_ids": [1], "chosen_ids": [2], "rejected_ids": [3]}, "prompt is missing"),
        (TEXT | {"chosen": ["b"]}, "are neither three texts"),
        (TEXT | {"prompt": 3}, "are neither three texts"),
        (CHAT | {"chosen": [{"content": "b"}]}, "are neither three texts"),
        (TEXT | {"prompt": ""}, "prompt is empty"),
        (CHAT | {"rejected": []}, "rejected is empty"),
        (TEXT | {"weight": -1}, "weight is -1"),
        (TEXT | {"weight": "1"}, "weight is '1'"),
        (TEXT | {"weight": float("nan")}, "weight is nan"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, row: object, words: str) -> None:
    path = written(tmp_path, TEXT, row)
    with pytest.raises(InputError, match=words) as caught:
        read_pair_rows(path)
    assert (caught.value.code, caught.value.where) == ("CR0751", f"{path}:2")


def test_a_file_that_is_missing_empty_or_no_text(tmp_path: Path) -> None:
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b"\xff\xfe")
    for path in (tmp_path / "absent.jsonl", tmp_path, written(tmp_path, ""), binary):
        with pytest.raises(InputError) as caught:
            read_pair_rows(path)
        assert (caught.value.code, caught.value.where) == ("CR0751", str(path))


def test_separators_inside_a_text_do_not_end_a_line(tmp_path: Path) -> None:
    row = TEXT | {"chosen": "b\u2028c\u2029d\x85e"}
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(["", *[json.dumps(row, ensure_ascii=False)] * 2]), encoding="utf-8")
    assert read_pair_rows(path) == {f"{path}:2": row, f"{path}:3": row}


def test_pairs_that_all_weigh_nothing_are_refused(tmp_path: Path) -> None:
    nothing = TEXT | {"weight": 0}
    with pytest.raises(InputError, match="every pair of the file weighs 0") as caught:
        read_pair_rows(written(tmp_path, nothing, nothing))
    assert caught.value.code == "CR0751"
    assert len(read_pair_rows(written(tmp_path, nothing, TEXT))) == 2


def test_messages_without_a_chat_template_are_refused_by_their_own_code(tmp_path: Path) -> None:
    rows = read_pair_rows(written(tmp_path, TEXT, CHAT))
    with pytest.raises(InputError, match="no chat template") as caught:
        tokenised_pairs(rows, byte_tokenizer(None))
    assert (caught.value.code, caught.value.where) == ("CR0810", list(rows)[1])
    assert "as texts" in caught.value.fix


@pytest.mark.parametrize(
    ("template", "words"), [(FORGETFUL, "writes the prompt otherwise"), (REFUSING, "roles must alternate")]
)
def test_a_template_that_does_not_fit_is_said(tmp_path: Path, template: str, words: str) -> None:
    rows = read_pair_rows(written(tmp_path, TEXT, CHAT))
    with pytest.raises(InputError, match=words) as caught:
        tokenised_pairs(rows, byte_tokenizer(template))
    assert (caught.value.code, caught.value.where) == ("CR0751", list(rows)[1])


def test_pairs_that_read_alike_as_tokens_are_refused(tmp_path: Path) -> None:
    chat = CHAT | {"chosen": [{"role": "assistant", "content": "no", "name": "somebody"}]}
    rows = read_pair_rows(written(tmp_path, chat))
    with pytest.raises(InputError, match="the same once they are tokenised"):
        tokenised_pairs(rows, byte_tokenizer())


def test_pairs_are_counted_by_where_their_label_comes_from() -> None:
    rows = [{"source": "executed", "weight": 0.5}, {"source": "executed"}, {}]
    assert pair_sources(rows) == {
        "executed": {"pairs": 2, "weight": 1.5},
        "not said": {"pairs": 1, "weight": 1.0},
    }
