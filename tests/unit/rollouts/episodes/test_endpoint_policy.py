"""Against a real server that misbehaves: asked again within the budget, or one sentence; never a wrong id."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from chat_templates import FAMILIES, tokenizer_of
from episode_parts import Lives, parts
from faulty_http import Fault, cut_the_answer, hang_up, no_http, no_json, status
from hypothesis import given
from hypothesis import strategies as st
from policy_server import PolicyServer, drip, half_a_chunked_answer, hold

from composer_replication.errors import SandboxFailure, UsageError
from composer_replication.records import Completion, StopReason
from composer_replication.rollouts.episodes import endpoint_policy
from composer_replication.rollouts.episodes.agent_loop import episodes_in_order
from composer_replication.rollouts.episodes.endpoint_answers import (
    NotAnAnswer,
    read_token_answer,
)
from composer_replication.rollouts.episodes.endpoint_policy import (
    EndpointPolicy,
    RetryOptions,
    open_policy_endpoint,
)
from composer_replication.rollouts.episodes.episode import Episode
from composer_replication.rollouts.episodes.episode_options import EpisodeOptions, EpisodeParts
from composer_replication.rollouts.episodes.ledger_talk import LedgerTalk
from composer_replication.rollouts.episodes.one_episode import sampling_seed

KEY = "sk-not-to-be-told-1234567890"
QUICK = RetryOptions(first_pause_seconds=0.001, max_pause_seconds=0.002, max_tries=4, total_seconds=20)
FAST = RetryOptions(
    first_pause_seconds=0.001, max_pause_seconds=0.002, max_tries=2, answer_seconds=0.05, total_seconds=20
)


def policy_of(server: PolicyServer, retries: RetryOptions = QUICK, **more: Any) -> EndpointPolicy:
    return EndpointPolicy(open_policy_endpoint(server.url, "tiny"), retries=retries, **more)


def sample(policy: EndpointPolicy, prompt: tuple[int, ...] = (5, 6), **how: Any) -> Completion:
    async def ask() -> Completion:
        return await policy.sample(prompt, **{"max_new_tokens": 8, "temperature": 0.5, "seed": 3, **how})

    try:
        return asyncio.run(ask())
    finally:
        policy.close()


WHOLE = Completion((14, 15, 16, 17), "14 15 16 17", StopReason.FINISHED, (-0.125, -0.25, -0.375, -0.5))


def test_ids_go_in_and_ids_come_back(server: PolicyServer) -> None:
    assert sample(policy_of(server, extra={"top_p": 1.0})) == WHOLE
    [(route, request)] = server.bodies
    assert route == "/v1/completions"
    assert request["prompt"] == [5, 6]
    wanted = {"model": "tiny", "max_tokens": 8, "temperature": 0.5, "seed": 3, "n": 1, "top_p": 1.0}
    assert {name: request[name] for name in wanted} == wanted
    assert request["return_token_ids"] is True
    assert server.authorizations == [None]


def test_an_answer_that_was_cut_says_so(server: PolicyServer) -> None:
    cut = sample(policy_of(server), max_new_tokens=2)
    assert (cut.token_ids, cut.stop_reason) == ((14, 15), StopReason.LENGTH)


def test_ids_that_are_written_as_tokens_are_read(server: PolicyServer) -> None:
    server.changes["token_ids"] = server.changes["prompt_token_ids"] = None
    assert sample(policy_of(server)) == WHOLE


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (status(429, "slow down"), "http-429"),
        (status(500, "oops"), "http-500"),
        (status(503, "later"), "http-503"),
        (status(408, "late"), "http-408"),
        (hang_up, "unreachable"),
        (no_http, "unreachable"),
        (cut_the_answer, "cut-off"),
        (half_a_chunked_answer, "cut-off"),
        (no_json, "not-an-answer"),
        (lambda handler: handler.say(200, {"choices": []}), "not-an-answer"),
        (lambda handler: handler.say(200, [1, 2]), "not-an-answer"),
        (lambda handler: handler.say(200, {"choices": ["x"]}), "not-an-answer"),
    ],
)
def test_what_may_pass_is_asked_again(server: PolicyServer, act: Callable[[Any], None], reason: str) -> None:
    server.faults.append(Fault("completions", act, times=2))
    policy = policy_of(server)
    assert sample(policy) == WHOLE
    assert policy.counts == {"answered": 1, reason: 2}
    assert len(server.seen) == 3


@pytest.mark.parametrize("act", [hold, drip])
def test_an_answer_that_comes_too_slowly_is_given_up(
    server: PolicyServer, act: Callable[[Any], None]
) -> None:
    server.faults.append(Fault("completions", act, times=9))
    policy = policy_of(server, FAST)
    with pytest.raises(SandboxFailure, match=r"CR0824.*2 tries.*timed-out"):
        sample(policy)
    assert policy.counts == {"timed-out": 2, "given-up": 1}


def test_no_thread_stays_behind_an_answer_that_never_comes(server: PolicyServer) -> None:
    server.faults.append(Fault("completions", hold, times=9))
    policy = policy_of(server, RetryOptions(answer_seconds=30))

    async def leave() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(policy.sample((1,), max_new_tokens=1, temperature=1.0, seed=0), 0.05)

    asyncio.run(leave())
    policy.close()
    left = [thread for thread in threading.enumerate() if thread.name.startswith("endpoint")]
    for thread in left:
        thread.join(10)
    assert not any(thread.is_alive() for thread in left)


@pytest.mark.parametrize("beyond", [0, 1000])
def test_ids_of_another_model_never_reach_a_conversation(server: PolicyServer, beyond: int) -> None:
    """The server speaks for a model with more ids than the tokenizer: tried again, dropped, and the run goes on."""
    tokenizer = tokenizer_of(next(family for family in FAMILIES if family.name == "qwen3"))
    server.changes = {"token_ids": [1, len(tokenizer) + beyond, 2], "logprobs": {}}
    talk, lives, counts = LedgerTalk(tokenizer, tokenizer.text), Lives(), Counter[str]()
    policy = policy_of(server)
    made = EpisodeParts(policy, lives.open, talk.open, talk.find_calls)
    options = EpisodeOptions(max_tries=2, max_turns=1)
    [episode] = asyncio.run(episodes_in_order(["task"], made, options=options, counts=counts))
    assert (episode.stop_reason, episode.failure) == (StopReason.INFRASTRUCTURE, "CR0821")
    assert (episode.reward, episode.turns) == (None, ())
    assert counts["failed_CR0821"] == counts["tries"] == 2 and lives.all_closed_once()

    talk = replace(talk, num_ids=len(tokenizer) + beyond + 1)  # the model has rows for them
    made = EpisodeParts(policy, lives.open, talk.open, talk.find_calls)
    [episode] = asyncio.run(episodes_in_order(["task"], made, options=options))
    policy.close()
    [turn] = episode.turns
    assert turn.observed.turn.completion.token_ids == (1, len(tokenizer) + beyond, 2)
    assert episode.training_segments()[0].mask == (1, 1, 1)


def test_a_server_that_never_gets_well_is_infrastructure(server: PolicyServer) -> None:
    server.faults.append(Fault("completions", status(500, "oops"), times=99))
    policy = policy_of(server)
    with pytest.raises(SandboxFailure, match=r"CR0824.*4 tries.*http-500"):
        sample(policy)
    assert len(server.seen) == 4
    nobody = EndpointPolicy(open_policy_endpoint("http://127.0.0.1:9", "tiny"), retries=QUICK)
    with pytest.raises(SandboxFailure, match=r"CR0824.*unreachable"):
        sample(nobody)


@pytest.mark.parametrize("after", ["7", "date"])
def test_a_pause_that_the_server_asks_for_is_kept_within_the_budget(
    server: PolicyServer, monkeypatch: pytest.MonkeyPatch, after: str
) -> None:
    pauses: list[float] = []

    async def note(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(endpoint_policy.asyncio, "sleep", note)
    text = after if after == "7" else time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 9))
    server.faults.append(Fault("completions", status(429, "wait", {"Retry-After": text}), times=1))
    assert sample(policy_of(server)) == WHOLE
    [pause] = pauses
    assert 5 < pause <= 9
    server.faults.append(Fault("completions", status(429, "wait", {"Retry-After": "3600"}), times=1))
    with pytest.raises(SandboxFailure, match=r"CR0824.*1 tries.*http-429"):
        sample(policy_of(server))
    assert len(pauses) == 1  # an hour is beyond the budget: not even begun


def test_pauses_grow_and_depend_on_the_seed_alone(
    server: PolicyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    async def note(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(endpoint_policy.asyncio, "sleep", note)
    slow = RetryOptions(first_pause_seconds=1.0, max_pause_seconds=4.0, max_tries=5)
    for _ in range(2):
        server.faults.append(Fault("completions", status(500, "oops"), times=4))
        sample(policy_of(server, slow))
    assert pauses[:4] == pauses[4:]
    for pause, most in zip(pauses, (1, 2, 4, 4), strict=False):
        assert most / 2 <= pause <= most


@pytest.mark.parametrize("code", [400, 401, 403, 404, 301, 422])
def test_what_will_not_pass_ends_the_run_at_once(server: PolicyServer, code: int) -> None:
    server.faults.append(Fault("completions", status(code, "the context is 4096"), times=1))
    with pytest.raises(UsageError, match=f"CR0826.*HTTP {code}") as caught:
        sample(policy_of(server))
    assert ("4096" in str(caught.value)) == (code in (400, 404, 422))
    assert len(server.seen) == 1


def test_the_key_is_sent_and_told_to_nobody(server: PolicyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINY_KEY", KEY)
    endpoint = open_policy_endpoint(server.url, "tiny", "TINY_KEY")
    policy = EndpointPolicy(endpoint, retries=QUICK)
    assert KEY not in f"{endpoint!r}{policy!r}{vars(policy)!r}"
    for code in (400, 401, 500):
        server.faults.append(Fault("completions", status(code, f"bad key {KEY}"), times=4))
        with pytest.raises((UsageError, SandboxFailure)) as caught:
            sample(EndpointPolicy(endpoint, retries=QUICK))
        assert KEY not in f"{caught.value!r}{caught.value}{caught.value.__cause__!r}"
        server.faults.clear()
    assert set(server.authorizations) == {f"Bearer {KEY}"}


@pytest.mark.parametrize(
    ("url", "model", "variable"),
    [("ftp://x", "m", ""), ("http://x", "", ""), ("http://x", "m", "NOT_SET_AT_ALL")],
)
def test_an_endpoint_that_is_none_is_refused(url: str, model: str, variable: str) -> None:
    with pytest.raises(UsageError, match="CR0826"):
        open_policy_endpoint(url, model, variable)


def test_retries_out_of_range_are_refused() -> None:
    with pytest.raises(UsageError, match="CR0820"):
        RetryOptions(answer_seconds=0)


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": None, "logprobs": {"tokens": [" a", " b"], "token_logprobs": [-1.0, -1.0]}},
        {"token_ids": None, "logprobs": None},
        {"prompt_token_ids": [5, 7]},
    ],
)
def test_a_server_without_the_ids_is_refused(server: PolicyServer, changes: dict[str, Any]) -> None:
    server.changes.update(changes)
    with pytest.raises(UsageError, match="CR0827"):
        sample(policy_of(server))


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": [1, 2]},
        {"token_ids": [1, 2, 3, -4]},
        {"token_ids": [1, 2, 3, True]},
        {"token_ids": [1, 2, 3, "4"]},
        {"token_ids": "1234"},
        {"token_ids": [], "logprobs": None},
        {"token_ids": list(range(9)), "logprobs": None},
        {"logprobs": {"token_logprobs": [-1.0, -1.0, float("nan"), -1.0]}},
        {"logprobs": {"token_logprobs": [-1.0, -1.0, None, -1.0]}},
        {"logprobs": {"token_logprobs": [-1.0, -1.0, float("-inf"), -1.0]}},
        {"logprobs": {"token_logprobs": [-1.0, -1.0, 0.5, -1.0]}},
        {"logprobs": {"token_logprobs": [-1.0, -1.0, -(10**400), -1.0]}},
        {"token_ids": [1, 2, 3, 10**400]},
        {"token_ids": [1, 2, 3, 2**40]},
        {"finish_reason": "abort"},
        {"finish_reason": None},
        {"text": None},
    ],
)
def test_numbers_that_do_not_fit_are_no_answer(server: PolicyServer, changes: dict[str, Any]) -> None:
    server.changes.update(changes)
    with pytest.raises(SandboxFailure, match="CR0824"):
        sample(policy_of(server))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["choices", "text", "token_ids", "logprobs", "message", "content", "finish_reason"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(st.binary(max_size=60) | JSON.map(lambda value: json.dumps({"choices": [value]}).encode()))
def test_any_body_is_an_answer_or_none(body: bytes) -> None:
    try:
        found = read_token_answer(body, (1,), 4)
    except (NotAnAnswer, UsageError):
        return
    assert isinstance(found, Completion)
    assert len(found.token_logp) in (0, len(found.token_ids))


def test_half_a_character_is_told_as_a_question_mark(server: PolicyServer) -> None:
    server.changes["text"] = "14 \ud800"
    assert sample(policy_of(server)).text == "14 ?"


def test_a_server_that_is_down_drops_the_episode_and_counts_it(server: PolicyServer) -> None:
    server.faults.append(Fault("completions", status(500, "oops"), times=999))
    lives, counts = Lives(), Counter()
    policy = policy_of(server)
    [episode] = asyncio.run(
        episodes_in_order(["task"], parts(policy, lives), options=EpisodeOptions(max_tries=2), counts=counts)
    )
    policy.close()
    assert (episode.reward, episode.failure, episode.num_tries) == (None, "CR0824", 2)
    assert counts["failed_CR0824"] == 2
    assert lives.all_closed_once()


def played(server: PolicyServer) -> tuple[list[Episode], Counter[str]]:
    """Two turns of two episodes that call a tool."""
    policy = policy_of(server)
    server.changes["text"] = '<echo>{"text": "one"}</echo>'
    lives, counts, wanted = Lives(), Counter[str](), EpisodeOptions(max_turns=2)
    made = parts(policy, lives)
    try:
        return asyncio.run(episodes_in_order(["task", "task"], made, options=wanted, counts=counts)), counts
    finally:
        policy.close()
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
    (whole, cut), counts = played(server)
    assert (whole.stop_reason, cut.stop_reason) == (StopReason.TURNS, StopReason.CONTEXT)
    assert len(cut.turns) == 1 and cut.reward is not None
    assert counts["refused_requests"] == 1


def test_a_first_request_that_is_refused_ends_the_run(server: PolicyServer) -> None:
    server.faults.append(Fault("completions", status(400, "unknown field"), times=99))
    with pytest.raises(UsageError, match="CR0826"):
        played(server)
