from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_replication.config import (
    RunConfig,
    Section,
    dump_config,
    load_config,
    parse_config,
    parse_override,
)
from composer_replication.errors import UsageError
from composer_replication.trainer.run_setup import lora_config

EVIDENCE = {"planned_evaluations": 10, "tolerated_gap": 0.1}
RECIPES = sorted((Path(__file__).resolve().parents[2] / "recipes").glob("*/run.toml"))
SDPO = {"trainer": {"alpha_sdpo": 0.5}}
REPLAY = {"trainer": {"beta_replay": 0.5}}
SMALL: dict[str, Any] = {"model": {"name": "tiny-random"}, "tasks": {"store": "tasks"}}


def refused(table: dict[str, Any]) -> str:
    with pytest.raises(UsageError) as error:
        parse_config(table, where="here")
    assert (error.value.code, error.value.where) == ("CR0204", "here")
    return error.value.message


def test_the_smallest_recipe_is_plain_grpo_without_channels() -> None:
    config = parse_config(SMALL, where="here")
    assert config.guard is None
    assert config.heldout is None
    assert config.model.lora is None
    assert config.curriculum is None
    assert (config.trainer.alpha_sdpo, config.trainer.beta_replay) == (0.0, 0.0)
    assert config.trl == {}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"modle": {}}, "unknown key modle; the nearest known key is model"),
        ({"trainer": {"effort_weigt": 0.1}}, "the nearest known key is trainer.effort_weight"),
        ({"model": {"name": "x", "lora": {"alpha": 3}}}, "the nearest known key is model.lora.lora_alpha"),
        ({"guard": {"ema": 0.5}, "heldout": {}}, "the nearest known key is guard.ema_alpha"),
        ({"model": {}}, "the key model.name is missing"),
        ({"model": {"name": 3}}, "model.name: Input should be a valid string"),
        ({"seed": "3"}, "seed: Input should be a valid integer"),
        ({"model": {"name": "x", "dtype": "int8"}}, "model.dtype: Input should be 'float32' or 'bfloat16'"),
        ({"tasks": {}}, "tasks: give exactly one of source and store"),
        ({"tasks": {"store": "a", "source": ["b"]}}, "tasks: give exactly one of source and store"),
        ({"hints": {"teacher": "lora-off"}, **SDPO}, 'hints.teacher = "lora-off" needs [model.lora]'),
        ({"hints": {}}, "[hints] does nothing while trainer.alpha_sdpo is 0"),
        ({"replay": {}}, "[replay] does nothing while trainer.beta_replay is 0"),
        ({"replay": {}, **REPLAY}, "trainer.beta_replay needs pairs to learn from"),
        (
            {"guard": {"kl_hard_stop": float("inf")}, "heldout": {}},
            "guard.kl_hard_stop: Input should be a finite",
        ),
        ({"curriculum": {"retire_above": 0.5}}, "unknown key curriculum.retire_above: its table has no keys"),
        ({"agent": {}, "reward": {"tests": "weakened"}}, "[reward] is about single answers"),
        ({"guard": {}}, "a [guard] needs a [heldout] table"),
        ({"heldout": {}, "evidence": EVIDENCE}, "needs a [guard] and a [heldout] table"),
        ({"heldout": {}, "guard": {}, "evidence": EVIDENCE}, "needs heldout.sample_size"),
        ({"heldout": {"split": "a", "fraction": 0.3}}, "give split alone, without repositories and fraction"),
        ({"heldout": {"split": "a", "repositories": ["b"]}}, "give split alone, without repositories and"),
        (
            {"ray": {"address": "auto", "resources": {"jail": -1.0}}},
            "ray.resources.jail: Input should be greater",
        ),
        ({"hints": {"top_k": 20}, **SDPO}, "the key hints.top_k has left: take the line out."),
        ({"heldout": {"has_sentinel": True}}, "the key heldout.has_sentinel has left"),
        ({"evidence": {"alpha": 0.05}}, "the key evidence.alpha has left: take the line out"),
        ({"trainer": {"effort": {"q": 1.0}}}, "the key trainer.effort has left: take the line out."),
    ],
)
def test_a_wrong_recipe_is_one_sentence_that_names_the_key(change: dict[str, Any], said: str) -> None:
    message = refused({**SMALL, **change})
    assert said in message
    assert message.endswith(".")
    assert "\n" not in message


def test_trl_keys_go_through_unchanged() -> None:
    table = {"max_steps": 3, "anything": {"deep": [1, 2]}}
    assert parse_config({**SMALL, "trl": table}, where="x").trl == table


def test_a_config_cannot_be_changed() -> None:
    config = parse_config(SMALL, where="x")
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 3  # type: ignore[misc]


def write(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text)
    return path


def test_overrides_reach_into_tables(tmp_path: Path) -> None:
    path = write(tmp_path, '[model]\nname = "tiny-random"\n[tasks]\nstore = "s"\n[trl]\nmax_steps = 9\n')
    lora = {"model.lora.rank": 4, "model.lora.target_modules": ["q_proj", "embed_tokens"]}
    config = load_config(path, {"trl.max_steps": 2, "seed": 7, "heldout.every": 3, **lora})
    assert config.trl["max_steps"] == 2
    assert config.seed == 7
    assert config.heldout is not None
    assert config.heldout.every == 3
    assert config.model.lora is not None
    assert config.model.lora.rank == 4
    adapter = lora_config(config.model.lora)
    assert (adapter.r, adapter.target_modules) == (4, {"q_proj", "embed_tokens"})


def test_an_override_leaves_the_tables_of_its_caller_alone() -> None:
    overrides = {"heldout": {"every": 2}, "heldout.every": 3}
    recipe = Path(__file__).parents[2] / "recipes" / "tiny-cpu" / "run.toml"
    config = load_config(recipe, overrides)
    assert config.heldout is not None and config.heldout.every == 3
    assert overrides["heldout"] == {"every": 2}


def test_an_override_of_an_unknown_key_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, dump_config(parse_config(SMALL, where="x")))
    with pytest.raises(UsageError, match=r"nearest known key is trainer\.checkpoint_every"):
        load_config(path, {"trainer.checkpoint_evry": 3})
    with pytest.raises(UsageError, match="seed is not a table"):
        load_config(path, {"seed.deep": 3})


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (None, "CR0201"),
        (b"a = ", "CR0201"),
        (b"a = 1\na = 2\n", "CR0201"),
        (b"a = '\xff'", "CR0201"),
        (b"a = 1", "CR0204"),
    ],
)
def test_an_unreadable_recipe_names_its_place(tmp_path: Path, content: bytes | None, code: str) -> None:
    path = tmp_path / "run.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError) as error:
        load_config(path)
    assert (error.value.code, error.value.where) == (code, str(path))
    assert "train" not in error.value.fix, "eval and guard scan read recipes too"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("trl.max_steps=2", ("trl.max_steps", 2)),
        ("a=true", ("a", True)),
        ("a=[1, 2]", ("a", [1, 2])),
        ("a = 0.5", ("a", 0.5)),
        ("model.name=HuggingFaceTB/SmolLM2-135M", ("model.name", "HuggingFaceTB/SmolLM2-135M")),
        ("a=b=c", ("a", "b=c")),
        ('a="3"', ("a", "3")),
        ("a=", ("a", "")),
    ],
)
def test_an_override_is_toml_or_else_a_string(text: str, expected: tuple[str, Any]) -> None:
    assert parse_override(text) == expected


@pytest.mark.parametrize("text", ["trl.max_steps", "=3", "", "a..b=1"])
def test_an_override_without_key_or_equals_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="CR0206"):
        parse_override(text)


SECTIONS = st.fixed_dictionaries(
    {"model": st.fixed_dictionaries({"name": st.text(min_size=1)}), "tasks": st.just({"store": "s"})},
    optional={
        "seed": st.integers(0, 2**31),
        "heldout": st.fixed_dictionaries(
            {}, optional={"fraction": st.floats(0.01, 0.99), "every": st.integers(1, 9)}
        ),
        "trainer": st.fixed_dictionaries(
            {}, optional={"alpha_sdpo": st.floats(0, 10), "prefix_sharing": st.booleans()}
        ),
        "trl": st.dictionaries(
            st.from_regex(r"[a-z_]{1,8}", fullmatch=True), st.integers(-9, 9) | st.booleans() | st.text()
        ),
    },
)


@given(SECTIONS)
def test_what_is_written_is_read_back_equal(table: dict[str, Any]) -> None:
    import tomllib

    config = parse_config(table, where="x")
    text = dump_config(config)
    again = parse_config(tomllib.loads(text), where="x")
    assert again == config
    assert dump_config(again) == text


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: str(path.parent.name))
def test_every_shipped_recipe_is_valid_and_comes_back(recipe: Path, tmp_path: Path) -> None:
    config = load_config(recipe)
    assert load_config(write(tmp_path, dump_config(config))) == config


def test_every_section_has_a_word_for_the_page_of_keys() -> None:
    sections = Section.__subclasses__()
    assert RunConfig in sections
    assert [kind.__name__ for kind in sections if not kind.__doc__] == []
