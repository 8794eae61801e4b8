"""The card beside saved weights: what it says is what the run's files say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import yaml

from composer_replication.report import RunData, read_run, write_model_card
from composer_replication.report.model_card import render_card

RunMaker = Callable[..., Path]


def settings_of(run: RunData, **model: str) -> RunData:
    recipe = dict(run.recipe or {})
    return replace(run, recipe=recipe | {"model": recipe["model"] | model})


def test_it_says_data_split_verdict_rates_and_settings(make_run: RunMaker, tmp_path: Path) -> None:
    run = read_run(make_run())
    environment = run.environment or {}
    write_model_card(run, tmp_path)
    card = (tmp_path / "README.md").read_text()
    head, body = card.split("---\n", 2)[1:]
    assert yaml.safe_load(head)["library_name"] == "transformers"
    assert "base_model" not in yaml.safe_load(head)  # a wheel of the package registry is no name on a hub
    assert "**Clean" in body
    assert str(environment["split_fingerprint"]) in body
    assert "- `sdist:toolz==1.0.0`" in body
    assert "| Held-out tasks | hidden pass |" in body
    assert "| `trl.learning_rate` | 2e-05 |" in body
    assert f"| `versions.trl` | {environment['versions']['trl']} |" in body
    assert "hf_abcdefghijklmnop" not in card
    assert "![" in body and "(curves.svg)" in body
    picture = ET.fromstring((tmp_path / "curves.svg").read_text())
    assert picture.tag == "{http://www.w3.org/2000/svg}svg"
    assert len(list(picture.iter("{http://www.w3.org/2000/svg}path"))) > 4


def test_the_same_run_gives_the_same_bytes(make_run: RunMaker) -> None:
    root = make_run()
    assert render_card(read_run(root)) == render_card(read_run(root))


def test_a_name_of_a_hub_is_the_base_model(make_run: RunMaker) -> None:
    card = render_card(settings_of(read_run(make_run()), name="somebody/Some-Model-1.5B"))
    assert yaml.safe_load(card.split("---\n", 2)[1])["base_model"] == "somebody/Some-Model-1.5B"


def test_a_folder_of_this_machine_is_named_by_its_last_part(make_run: RunMaker) -> None:
    card = render_card(settings_of(read_run(make_run()), name="/somewhere/private/my-model"))
    assert "my-model, trained" in card
    assert "private" not in card


def test_what_a_recipe_holds_cannot_leave_its_cell_or_bring_a_tag(make_run: RunMaker) -> None:
    card = render_card(settings_of(read_run(make_run()), dtype="a|b\n\n# Title <script>x</script>"))
    row = next(line for line in card.splitlines() if line.startswith("| `model.dtype`"))
    assert row == "| `model.dtype` | a\\|b  # Title &lt;script&gt;x&lt;/script&gt; |"


def test_a_halted_or_unmeasured_run_says_so(make_run: RunMaker) -> None:
    run = read_run(make_run(is_hacked=True))
    card = render_card(replace(run, before=None, after=None, environment=None))
    assert "**Halted by the guard.**" in card
    assert "Nothing was measured before or after training." in card
    assert "No split was proved disjoint." in card
    assert "An unknown number of tasks to train on, an unknown number held out" in card
