"""``eval --endpoint`` against a server that speaks as vLLM does over a real tiny model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from policy_server import PolicyServer

from composer_replication.cli.main import main
from composer_replication.rollouts.episodes.policies import PROBE, SampleOptions
from composer_replication.trainer.policy import ModelSampler
from composer_replication.trainer.tiny_models import make_tiny_tools_model

RECIPES = Path(__file__).parents[4] / "recipes"


@pytest.fixture(scope="module")
def store(build_tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("endpoint") / "tasks", ["tinymath/numbers.py::sign"])


@pytest.fixture
def server() -> Iterator[PolicyServer]:
    model, tokenizer = make_tiny_tools_model(0)
    filters = SimpleNamespace(top_p=1.0, top_k=0, min_p=None, repetition_penalty=1.0)
    sampler = ModelSampler(model, filters, tokenizer, eos_token_ids=[tokenizer.eos_token_id])

    def sample(request: dict[str, Any]) -> tuple[list[int], list[float]]:
        options = SampleOptions(request["max_tokens"], request["temperature"], request["seed"])
        [answer] = sampler([tuple(request["prompt"])], [options])
        return list(answer.token_ids), list(answer.token_logp)

    with PolicyServer.running() as running:
        running.sample = sample
        running.told["/tokenize"] = {"tokens": tokenizer.encode(PROBE, add_special_tokens=False)}
        running.told["/v1/models"] = {"data": [{"id": "served", "max_model_len": 8192}]}
        yield running


def evaluated(store: Path, *more: str) -> int:
    words = ["eval", "tiny-tools", "--tasks", str(store), "--samples", "2", *more]
    return main(["--json", "--quiet", *words])


def with_recipe(server: PolicyServer) -> tuple[str, ...]:
    return "--recipe", str(RECIPES / "tiny-tools" / "run.toml"), "--endpoint", server.url


def test_episodes_of_a_served_model_are_measured(
    server: PolicyServer, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluated(store, *with_recipe(server)) == 0
    here = json.loads(capsys.readouterr().out)
    assert (here["tasks"], here["samples"], here["rollouts"]) == (1, 2, "episodes")
    asked = [body for route, body in server.bodies if route == "/v1/completions"]
    assert len(asked) >= 3  # the trial of one token, and an answer of each episode
    assert all(body["model"] == "served" and body["top_p"] == 1.0 for body in asked)
    assert evaluated(store, *with_recipe(server)[:2]) == 0  # the same weights in this process say the same
    assert json.loads(capsys.readouterr().out)["stop_reasons"] == here["stop_reasons"]


@pytest.mark.parametrize(
    ("more", "code", "exit_code"),
    [
        (("--endpoint", "http://127.0.0.1:9"), "CR0206", 2),
        (
            ("--recipe", str(RECIPES / "tiny-tools" / "run.toml"), "--endpoint", "http://127.0.0.1:9"),
            "CR0824",
            3,
        ),
        (("--endpoint", "http://127.0.0.1:9", "--update-difficulty"), "CR0206", 2),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(
    store: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...], code: str, exit_code: int
) -> None:
    assert evaluated(store, *more) == exit_code
    assert json.loads(capsys.readouterr().out)["error"]["code"] == code
