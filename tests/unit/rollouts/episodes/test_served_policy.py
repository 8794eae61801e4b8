"""Against a real server that misbehaves: asked again by the client, or one sentence; never a wrong id."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chat_templates import FAMILIES, tokenizer_of
from episode_parts import Lives, limits, parts
from faulty_http import Fault, hang_up, no_json, status
from policy_server import PolicyServer, half_a_chunked_answer, hold

from composer_replication.config import AgentSection
from composer_replication.errors import MissingError, SandboxFailure, UsageError
from composer_replication.records import Completion, StopReason
from composer_replication.rollouts.episodes.agent_loop import (
    EpisodeParts,
    LedgerTalk,
    run_episodes,
    sampling_seed,
)
from composer_replication.rollouts.episodes.episode import Episode, rollout_row
from composer_replication.rollouts.episodes.policies import (
    ServedPolicy,
    find_server,
    open_server,
    require_fit,
)

KEY = "sk-not-to-be-told-1234567890"
FILTERS = {"top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}


def policy_of(server: PolicyServer, key_variable: str = "", **changes: Any) -> ServedPolicy:
    endpoint = replace(open_server(server.url, key_variable), model="tiny", max_retries=1, **changes)
    return ServedPolicy(endpoint, filters=FILTERS, stop_token_ids=[2])


def sample(policy: ServedPolicy, prompt: tuple[int, ...] = (5, 6), **how: Any) -> Completion:
    async def asked() -> Completion:
        async with policy:
            return await policy.sample(prompt, **{"max_new_tokens": 8, "temperature": 0.5, "seed": 3, **how})

    return asyncio.run(asked())


def in_loop(policy: ServedPolicy, tasks: list[str], made: EpisodeParts, **more: Any) -> list[Episode]:
    async def all_of_them() -> list[Episode]:
        async with policy:
            return await run_episodes(tasks, made, **more)

    return asyncio.run(all_of_them())


WHOLE = Completion((14, 15, 16, 17), "14 15 16 17", StopReason.FINISHED, (-0.125, -0.25, -0.375, -0.5))


def test_ids_go_in_and_ids_come_back(server: PolicyServer) -> None:
    assert sample(policy_of(server)) == WHOLE
    [(route, request)] = server.bodies
    assert route == "/v1/completions"
    assert request["prompt"] == [5, 6]
    wanted = {"model": "tiny", "max_tokens": 8, "temperature": 0.5, "seed": 3, "top_p": 1.0}
    wanted |= {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "stop_token_ids": [2], "logprobs": 0}
    assert {name: request[name] for name in wanted} == wanted
    assert request["return_token_ids"] is True
    assert server.authorizations == ["Bearer none"]


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (status(429, "slow down"), "http-429"),
        (status(500, "oops"), "http-500"),
        (status(408, "late"), "http-408"),
        (hang_up, "unreachable"),
        (half_a_chunked_answer, "unreachable"),
        (no_json, "not-an-answer"),
        (lambda handler: handler.say(200, {"choices": []}), "not-an-answer"),
        (lambda handler: handler.say(200, [1, 2]), "not-an-answer"),
        (lambda handler: handler.say(200, {"choices": ["x"]}), "not-an-answer"),
    ],
)
def test_what_may_pass_is_asked_again_or_drops_one_answer(
    server: PolicyServer, act: Callable[[Any], None], reason: str
) -> None:
    server.faults.append(Fault("completions", act, times=1))
    if reason == "not-an-answer":
        with pytest.raises(SandboxFailure, match="CR0824"):
            sample(policy_of(server))
        return
    assert sample(policy_of(server)) == WHOLE
    assert len(server.seen) == 2
    server.faults.append(Fault("completions", act, times=2))
    gone = MissingError if reason == "unreachable" else SandboxFailure
    with pytest.raises(gone, match="CR0824") as caught:
        sample(policy_of(server))
    assert type(caught.value) is gone
    assert gone is MissingError or reason in str(caught.value)


def test_an_answer_that_comes_too_slowly_is_given_up(server: PolicyServer) -> None:
    server.faults.append(Fault("completions", hold, times=9))
    with pytest.raises(SandboxFailure, match=r"CR0824.*timed-out"):
        sample(policy_of(server, timeout_seconds=0.05))


def test_a_server_that_is_gone_ends_the_run_and_not_one_episode(server: PolicyServer) -> None:
    """Every further episode would meet the same: the run stops at once, and goes on when the server is back."""
    nobody = ServedPolicy(replace(open_server("http://127.0.0.1:9"), max_retries=0), filters=FILTERS)
    lives = Lives()
    with pytest.raises(MissingError, match=r"CR0824.*gone.*resume"):
        in_loop(nobody, ["task", "task"], parts(nobody, lives))
    assert lives.all_closed_once()


@pytest.mark.parametrize("beyond", [0, 1000])
def test_ids_of_another_model_never_reach_a_conversation(server: PolicyServer, beyond: int) -> None:
    """The server speaks for a model with more ids than the tokenizer: tried again, dropped, and the run goes on."""
    tokenizer = tokenizer_of(next(family for family in FAMILIES if family.name == "qwen3"))
    logps = {"token_logprobs": [-1.0] * 3}
    server.changes = {"token_ids": [1, len(tokenizer) + beyond, 2], "logprobs": logps}
    talk, lives = LedgerTalk(tokenizer), Lives()
    policy = policy_of(server)
    made = EpisodeParts(policy, lives.open, talk)
    options = AgentSection(max_turns=1)
    with limits(MAX_TRIES=2):
        [episode] = in_loop(policy, ["task"], made, options=options)
    assert (episode.stop_reason, episode.failure) == (StopReason.INFRASTRUCTURE, "CR0821")
    assert (episode.reward, episode.turns) == (None, ())
    assert episode.num_tries == len(lives.opened) == 2 and lives.all_closed_once()

    talk = replace(talk, num_ids=len(tokenizer) + beyond + 1)  # the model has rows for them
    made = EpisodeParts(policy, lives.open, talk)
    [episode] = in_loop(policy, ["task"], made, options=options)
    [turn] = episode.turns
    assert turn.completion.token_ids == (1, len(tokenizer) + beyond, 2)
    assert rollout_row(episode, filler_id=0).mask == [1, 1, 1]


@pytest.mark.parametrize("code", [400, 401, 403, 404, 301, 422])
def test_what_will_not_pass_ends_the_run_at_once(server: PolicyServer, code: int) -> None:
    server.faults.append(Fault("completions", status(code, "the context is 4096"), times=1))
    with pytest.raises(UsageError, match=f"CR0826.*HTTP {code}") as caught:
        sample(policy_of(server))
    assert "4096" in str(caught.value)
    assert len(server.seen) == 1


def test_the_key_is_sent_and_told_to_nobody(server: PolicyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINY_KEY", KEY)
    assert KEY not in f"{policy_of(server, 'TINY_KEY').endpoint!r}"
    for code in (400, 401, 500):
        server.faults.append(Fault("completions", status(code, f"bad key {KEY}"), times=4))
        with pytest.raises((UsageError, SandboxFailure)) as caught:
            sample(policy_of(server, "TINY_KEY"))
        assert KEY not in f"{caught.value!r}{caught.value}{caught.value.__cause__!r}"
        server.faults.clear()
    assert set(server.authorizations) == {f"Bearer {KEY}"}


@pytest.mark.parametrize(("url", "variable"), [("ftp://x", ""), ("http://x", "NOT_SET_AT_ALL")])
def test_an_address_that_is_none_is_refused(url: str, variable: str) -> None:
    with pytest.raises(UsageError, match="CR0826"):
        open_server(url, variable)


@pytest.mark.parametrize(
    "changes",
    [{"token_ids": None}, {"prompt_token_ids": None}, {"logprobs": None}, {"prompt_token_ids": [5, 7]}],
)
def test_a_server_without_the_ids_is_refused(server: PolicyServer, changes: dict[str, Any]) -> None:
    server.changes.update(changes)
    with pytest.raises(UsageError, match="CR0826"):
        sample(policy_of(server))


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": [1, 2, 3, "4"]},
        {"token_ids": [1, 2, 3, True]},
        {"logprobs": {"token_logprobs": [-1.0, -1.0, 0.5, -1.0]}},
        {"token_ids": 1234},
        {"token_ids": [1, 2]},
        {"token_ids": [], "logprobs": {"token_logprobs": []}},
        {"logprobs": {"token_logprobs": [-1.0, -1.0, float("nan"), -1.0]}},
        {"logprobs": {"token_logprobs": [-1.0, -1.0, None, -1.0]}},
        {"logprobs": {"token_logprobs": [-1.0, -1.0, -(10**400), -1.0]}},
        {"finish_reason": "abort"},
        {"finish_reason": None},
        {"text": None},
    ],
)
def test_numbers_that_do_not_fit_are_no_answer(server: PolicyServer, changes: dict[str, Any]) -> None:
    server.changes.update(changes)
    with pytest.raises(SandboxFailure, match="CR0824"):
        sample(policy_of(server))


def played(server: PolicyServer) -> list[Episode]:
    """Two turns of two episodes that call a tool."""
    policy = policy_of(server)
    server.changes["text"] = '<echo>{"text": "one"}</echo>'
    lives, wanted = Lives(), AgentSection(max_turns=2)
    try:
        return in_loop(policy, ["task", "task"], parts(policy, lives), options=wanted)
    finally:
        assert lives.all_closed_once()


@pytest.mark.parametrize("code", [400, 413])
def test_a_context_that_is_full_ends_its_episode_alone(server: PolicyServer, code: int) -> None:
    def refuse_second_turns(handler: Any) -> None:
        request = json.loads(handler.data)
        if request["seed"] == sampling_seed(0, 1, 1):
            handler.say(code, {"error": "the context is 4096"})
        else:
            handler.respond()

    server.faults.append(Fault("completions", refuse_second_turns, times=99))
    whole, cut = played(server)
    assert (whole.stop_reason, cut.stop_reason) == (StopReason.TURNS, StopReason.CONTEXT)
    assert len(cut.turns) == 1 and cut.reward is not None


def test_a_first_request_that_is_refused_ends_the_run(server: PolicyServer) -> None:
    server.faults.append(Fault("completions", status(400, "unknown field"), times=99))
    with pytest.raises(UsageError, match="CR0826"):
        played(server)


# ---- what a server says of itself ----------------------------------------------------------------------

OUR_MODEL = {"model_type": "qwen3", "vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 2}
TOKENIZER = tokenizer_of(next(family for family in FAMILIES if family.name == "qwen3"))


def fit(server: PolicyServer, **changes: Any) -> None:
    require_fit(
        find_server(open_server(server.url)),
        TOKENIZER,
        **{"max_context_tokens": 4096, "model_name": "a/b", "model_config": OUR_MODEL, **changes},
    )


def settings(**of_model: Any) -> dict[str, Any]:
    known = {"logprobs_mode": "processed_logprobs"}
    return {"vllm_config": {"model_config": {**known, **of_model}}}


def test_a_server_that_fits_is_taken(server: PolicyServer) -> None:
    from composer_replication.rollouts.episodes.policies import PROBE

    fit(server)  # as little as a server may tell
    server.told["/version"] = {"version": "0.32.0"}
    server.told["/server_info"] = settings()
    server.told["/tokenize"] = {"tokens": TOKENIZER.encode(PROBE, add_special_tokens=False)}
    fit(server)
    served = find_server(open_server(server.url))
    assert (served.endpoint.model, served.max_context_tokens, served.version) == ("tiny", 4096, "0.32.0")


@pytest.mark.parametrize(
    ("route", "told", "said"),
    [
        ("/v1/models", {"data": [{"id": "t", "max_model_len": 100}]}, "context has 100.*max-model-len 4096"),
        ("/v1/models", {"data": [{"id": "t", "root": "a/c"}]}, "behind it: a/c, and the recipe names a/b"),
        ("/server_info", settings(logprobs_mode="raw_logprobs"), "--logprobs-mode raw_logprobs"),
        ("/tokenize", {"tokens": [1, 2, 3]}, "its tokenizer is another"),
        ("/v1/models", {"data": []}, "it serves no model"),
        ("/v1/models", None, "/v1/models answers http-404"),
        ("logprobs", None, "no log-probabilities.*processed_logprobs"),
    ],
)
def test_a_server_that_does_not_fit_is_refused_by_name(
    server: PolicyServer, route: str, told: Any, said: str
) -> None:
    (server.told if route.startswith("/") else server.changes)[route] = told
    with pytest.raises(UsageError, match=f"CR0826.*{said}"):
        fit(server)


def test_weights_of_another_shape_are_refused(server: PolicyServer, tmp_path: Path) -> None:
    server.told["/v1/models"] = {"data": [{"id": "t", "root": str(tmp_path)}]}
    for hidden_size in (64, 32):
        (tmp_path / "config.json").write_text(json.dumps(OUR_MODEL | {"hidden_size": hidden_size}))
        if hidden_size == 64:
            fit(server)
            continue
        with pytest.raises(UsageError, match=r"CR0826.*its hidden_size is 32.*64"):
            fit(server)


@pytest.mark.long
def test_a_server_that_is_down_is_refused_or_waited_for(server: PolicyServer) -> None:
    nobody = open_server("http://127.0.0.1:9")
    for seconds in (0.0, 2.0):
        with pytest.raises(MissingError, match=r"CR0824.*nobody answers at http://127.0.0.1:9"):
            find_server(nobody, wait_seconds=seconds)
    server.faults.append(Fault("GET", status(503, "starting"), times=1))
    assert find_server(open_server(server.url), wait_seconds=9).endpoint.model == "tiny"
