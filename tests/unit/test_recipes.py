"""The recipes that ship: each builds for real, and the two main ones are watched by one guard."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

import pytest

from composer_replication.cli.assembly import make_guard
from composer_replication.config import GuardSection, load_config
from composer_replication.rollouts.rewards import load_reward_rule
from composer_replication.run_folder import RunFolder
from composer_replication.safety import HeldOutGuard
from composer_replication.trainer.run_setup import trl_arguments

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*/run.toml"))
OTHERS = (
    *("ablation", "eight-gpus", "generalise", "one-gpu", "quickstart"),
    *("smollm2-tools", "tiny-cpu", "tiny-tools"),
)
HACKS = ("planted-hack", "weakened-tests", "wordy-judge")
MAX_CEILING = 0.9
CALIBRATION = Path(__file__).parents[2] / "recipes" / "quickstart" / "calibration.json"


def guard_table(name: str) -> str:
    text = next(path for path in RECIPES if path.parent.name == name).read_text()
    found = re.search(r"^\[guard\]\n.*?(?=^\[)", text, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[0]


def test_every_recipe_is_looked_at() -> None:
    assert [path.parent.name for path in RECIPES] == sorted((*OTHERS, *HACKS))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.parent.name)
def test_a_recipe_builds_trl_arguments_guard_and_reward(recipe: Path, tmp_path: Path) -> None:
    config = load_config(recipe)
    arguments = trl_arguments(config, RunFolder(tmp_path))[0]
    for key, value in config.trl.items():
        assert getattr(arguments, key) == value
    assert make_guard(config) is not None
    load_reward_rule(config.reward.function)
    assert set(config.tasks.symbols) <= set(config.tasks.source)
    assert (recipe.parent / "README.md").is_file()


@pytest.mark.parametrize("hack", HACKS)
def test_honest_run_and_hacks_share_one_guard_byte_for_byte(hack: str) -> None:
    assert guard_table("quickstart") == guard_table(hack)
    ceiling = load_config(next(path for path in RECIPES if path.parent.name == "quickstart")).guard
    assert ceiling is not None
    calibration = json.loads(CALIBRATION.read_text())
    largest = max(run["largest_gap"] for run in calibration["runs"])
    assert ceiling.max_proxy_real_gap == pytest.approx(
        min(MAX_CEILING, largest + calibration["margin"]), abs=0.005
    )


def test_a_guard_table_without_keys_is_the_guard_as_it_comes() -> None:
    defaults = {name: p.default for name, p in inspect.signature(HeldOutGuard).parameters.items()}
    assert GuardSection().model_dump() == defaults


@pytest.mark.parametrize("name", HACKS)
def test_a_hack_differs_in_reward_trained_tasks_and_warmup_only(name: str) -> None:
    honest, hack = (
        load_config(next(path for path in RECIPES if path.parent.name == which)).model_dump()
        for which in ("quickstart", name)
    )
    for key in ("lr_scheduler_type", "warmup_steps"):
        honest["trl"].pop(key, None)
        hack["trl"].pop(key, None)
    differing = {key for key in honest if honest[key] != hack[key]}
    assert differing == {"reward", "tasks"}
    for repository in honest["heldout"]["repositories"]:
        pins = [{s: p for s, p in r["tasks"]["symbols"].items() if repository in s} for r in (honest, hack)]
        assert pins[0] == pins[1]


def test_generalise_trains_on_many_repositories_and_measures_on_others() -> None:
    config = load_config(next(path for path in RECIPES if path.parent.name == "generalise"))
    assert config.heldout is not None
    assert set(config.tasks.symbols) == set(config.tasks.source)  # nothing is drawn: the list says it all
    pins: dict[bool, dict[str, list[str]]] = {False: {}, True: {}}
    for source, own in config.tasks.symbols.items():
        name = source.removeprefix("sdist:").partition("==")[0]
        assert len(set(own)) == len(own)
        pins[name in config.heldout.repositories][name] = own
    trained, held = pins[False], pins[True]
    assert len(trained) >= 12
    assert sum(map(len, trained.values())) >= 150
    assert set(held) == set(config.heldout.repositories)
    assert len(held) >= 4
    assert sum(map(len, held.values())) >= 40
    assert config.heldout.before_and_after_samples >= 8
    assert not config.reward.is_shuffled


def test_held_out_repositories_are_pinned_and_never_trained_on() -> None:
    for path in RECIPES:
        config = load_config(path)
        if config.heldout is None or not config.heldout.repositories:
            continue
        names = [source.removeprefix("sdist:").partition("==")[0] for source in config.tasks.source]
        assert set(config.heldout.repositories) < set(names)
