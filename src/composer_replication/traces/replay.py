"""Steps asked again of teachers, recorded calls made again, and branches executed to the tests.

Teachers stand behind OpenAI-compatible servers: asked patiently, paid from one budget, and left out one by one when they fail.
Answers are kept in SQLite, by the content of the request. What a request may cost at most is set aside before it is sent, and counts
as spent until it is settled or freed, also when nobody saw its end (a process that was killed): spending never passes the budget.

Where it is asked how likely the student's own tokens are, prompt and action are sent as ids to the completions API with
``prompt_logprobs`` (a field of vLLM's). The text of each id in the answer tells whether the teacher has the student's tokenizer.

Sessions are bound to the tree in which they began and proven there, with the sandbox and the tools of training.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import re
import sqlite3
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from composer_replication.errors import InputError, MissingError, SandboxFailure, UsageError
from composer_replication.model_endpoint import Endpoint, failure_reason, open_endpoint
from composer_replication.records import ToolResult
from composer_replication.rollouts.environment.feature_deletion_env import FeatureDeletionEnv, tools_at
from composer_replication.rollouts.grading import Grader
from composer_replication.rollouts.tokens.pair_ids import PairRow, tokenised
from composer_replication.rollouts.tokens.token_ledger import Tokenizer
from composer_replication.tasks.difficulty import difference
from composer_replication.tasks.intake.git_source import names_commit
from composer_replication.traces import pairs
from composer_replication.traces.ingest import Redactor, Report
from composer_replication.traces.json_values import at, json_value, parsed, text_at
from composer_replication.traces.pairs import ChosenStep, HeldoutRows, Message, Rows
from composer_replication.traces.readers.messages import said_in
from composer_replication.traces.trace_records import Trace

_RESERVE = """
INSERT INTO charges (key, dollars, tokens, state)
SELECT :key, :dollars, :tokens, 'reserved' FROM spent
WHERE spent.dollars + :dollars <= :max_dollars AND spent.tokens + :tokens <= :max_tokens
"""
_PASSING = {"http-408", "http-409", "http-425", "http-429"}
_ONE_REQUEST = {"http-400", "http-413", "http-422"}  # of the request, not of the server: a prompt is too long
_BILLED = {"not-an-answer", "cut-off", "timed-out"}  # the server may have done its work
_RAN_OUT = "cut-off at --answer-tokens"
MAX_FAILURES = 3  # requests in a row without an answer, after which a teacher is left out
MAX_TRIES = 5  # of one request, each with a reservation of its own, so that the client's own tries are off
_NUM_AT_A_TIME = 32  # requests that are held in memory
_CUT_CHARACTER = "\ufffd"  # in the text of an id that is a part of a character: each server spells it its way
Request = Mapping[str, Any]
Read = Callable[[Any], Any]  # what is wanted from the choice of a server's answer
_TEXTS = tomllib.loads(Path(__file__).with_name("result_texts.toml").read_text(encoding="utf-8"))
_VARYING = re.compile("|".join(_TEXTS["varying"]), re.MULTILINE)


class AnswerStore:
    """One file of answers and charges, made where there is none; the budget holds over its whole life."""

    def __init__(self, path: Path, *, max_dollars: float, max_tokens: int) -> None:
        self._limits = {"max_dollars": max_dollars, "max_tokens": max_tokens}
        try:
            database = sqlite3.connect(path, isolation_level=None, timeout=60.0)
            database.executescript(Path(__file__).with_name("answers.sql").read_text(encoding="utf-8"))
        except sqlite3.Error as error:
            problem = f"the answers cannot be read: {error}."
            fix = "move that file away; all is asked, and paid, again."
            raise InputError("CR0401", problem, where=str(path), fix=fix) from error
        self._execute, self.close = database.execute, database.close

    def answer(self, key: str) -> str | None:
        """The JSON of the stored answer, which is ``null`` for one that ran out of tokens; None where there is none."""
        row = self._execute("SELECT answer FROM messages WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def spent(self) -> tuple[float, int]:
        """Dollars and tokens, what is set aside included."""
        dollars, tokens = self._execute("SELECT dollars, tokens FROM spent").fetchone()
        return float(dollars), int(tokens)

    def reserve(self, key: str, dollars: float, tokens: int) -> int | None:
        """Set aside what a request may cost at most; None where the budget does not have it any more."""
        made = self._execute(_RESERVE, {"key": key, "dollars": dollars, "tokens": tokens, **self._limits})
        return made.lastrowid if made.rowcount else None

    def settle(self, charge: int, key: str, answer: str, cost: tuple[float, int]) -> None:
        """Keep an answer, and then what it did cost in the place of what was set aside."""
        self._execute("INSERT OR IGNORE INTO messages VALUES (?, ?)", (key, answer))
        change = "UPDATE charges SET dollars = ?, tokens = ?, state = 'paid' WHERE id = ?"
        self._execute(change, (*cost, charge))

    def free(self, charge: int) -> None:
        """A request that the server did not work on costs nothing."""
        self._execute("DELETE FROM charges WHERE id = ?", (charge,))


class UnfitTeacher(Exception):
    """The server answers, and not as it is needed: the message is the reason for which it is left out."""


@dataclass(slots=True)
class Teacher:
    """A server and a model, what a million of its tokens costs, how many requests it gets at a time, and how it does."""

    name: str
    endpoint: Endpoint
    prices: tuple[float, float]
    limit: asyncio.Semaphore
    left_out: str = ""  # the reason for which it is not asked any more
    num_failures: int = 0
    num_answered: int = 0  # whole answers, stored ones and those that ran out of tokens among them
    counts: Counter[str] = field(default_factory=Counter)

    def dollars(self, num_in: int, num_out: int) -> float:
        """What so many tokens of a prompt and of an answer cost."""
        return (num_in * self.prices[0] + num_out * self.prices[1]) / 1e6


def open_teacher(
    text: str, keys: Mapping[str, str], prices: Mapping[str, tuple[float, float]], max_concurrent: int = 8
) -> Teacher:
    """A teacher from ``NAME=URL#MODEL`` (else CR0944); ``keys`` has the variable with its key, ``prices`` dollars a million tokens."""
    name, _, rest = text.partition("=")
    url, _, model = rest.rpartition("#")
    try:
        endpoint = open_endpoint(url, model, keys.get(name, ""))
    except UsageError as error:
        problem = f"a teacher cannot be asked: {error.message}"
        fix = "--teacher NAME=http://HOST:PORT/v1#MODEL, and where it wants a key --key NAME=VARIABLE"
        raise UsageError("CR0944", problem, where=f"--teacher {text}", fix=fix) from None
    limit = asyncio.Semaphore(max_concurrent)
    return Teacher(name, replace(endpoint, max_retries=0), prices.get(name, (0.0, 0.0)), limit)


def message_in(choice: Any) -> Message | None:
    """What a choice says or calls; None where it ran out of tokens, and would again."""
    said = said_in({**choice["message"], "role": "assistant"})
    if choice.get("finish_reason") == "length":
        return None
    if not (said.text or said.calls):
        raise ValueError("an empty answer")
    return pairs.assistant_message(said.text, [replace(call, call_id="") for call in said.calls])


@dataclass(slots=True)
class Classroom:
    """Asks teachers, each answer once, at most ``max_tokens`` long.

    ``pause_seconds`` stand before the second try of a request; they double with each. ``is_spent`` says whether the budget ended it.
    """

    teachers: Mapping[str, Teacher]
    store: AnswerStore
    max_tokens: int = 2048
    answer_seconds: float = 300.0
    pause_seconds: float = 0.5
    report: Report | None = None
    is_spent: bool = field(default=False, init=False)
    _num_reserved: int = field(default=0, init=False)
    _asking: dict[str, asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock), init=False)

    def request(self, messages: Sequence[Message], tools: Sequence[Any], sample: int = 0) -> dict[str, Any]:
        """The body of a request: the likeliest answer, or at temperature 1 the one with the number ``sample``."""
        body = {"messages": [*map(pairs.with_text, messages)], "max_tokens": self.max_tokens}
        offered = {"tools": list(tools)} if tools else {}
        return {**body, **offered, "temperature": float(sample > 0), "seed": sample, "stream": False}

    def most(self, teacher: Teacher, request: Request) -> tuple[float, int]:
        """Dollars and tokens that a request can cost at most: no tokenizer makes more tokens of a prompt than it has bytes."""
        num_prompt = len(json.dumps(request, ensure_ascii=False).encode("utf-8", "replace"))
        return teacher.dollars(num_prompt, request["max_tokens"]), num_prompt + request["max_tokens"]

    def cost(self, requests: Iterable[Request]) -> dict[str, Any]:
        """What asking every teacher all of this can cost at most; nothing is sent."""
        most = [[self.most(teacher, each) for teacher in self.teachers.values()] for each in requests]
        dollars, tokens = map(sum, zip((0.0, 0), *itertools.chain(*most), strict=True))
        calls = len(most) * len(self.teachers)
        return {"steps": len(most), "calls": calls, "most_dollars": dollars, "most_tokens": tokens}

    async def ask(self, name: str, request: Request, read: Read = message_in) -> Any:
        """A stored answer, else one of the server; None where the teacher is left out or did not answer this, or the budget ended.

        A request with ``prompt`` goes to the completions API.
        """
        teacher = self.teachers[name]
        named = [teacher.endpoint.url, teacher.endpoint.model, request]
        whole = json.dumps(named, sort_keys=True, ensure_ascii=False).encode("utf-8", "replace")
        key = hashlib.sha256(whole).hexdigest()
        async with self._asking[key], teacher.limit:  # attempts at one task begin with the same request
            if (found := self.store.answer(key)) is not None:
                teacher.counts["cached"] += 1
            elif not teacher.left_out:
                found = await self._bought(teacher, key, request, read)
            teacher.num_answered += found is not None
        return None if found is None else json.loads(found)

    async def ask_all(
        self, things: Sequence[Any], asked_of: Callable[[Any], tuple[Request, Read]], names: Collection[str]
    ) -> list[dict[str, Any]]:
        """What the teachers of these names answer to each, by name, None where one did not; ``is_spent`` says why."""
        at_a_time, done = asyncio.Semaphore(_NUM_AT_A_TIME), itertools.count(1)

        async def about(thing: Any) -> dict[str, Any]:
            async with at_a_time:
                request, read = asked_of(thing)
                answers = await asyncio.gather(*(self.ask(name, request, read) for name in names))
            if self.report is not None:
                self.report(next(done), len(things), f"asked, {self.store.spent()[0]:.2f} dollars")
            return dict(zip(names, answers, strict=True))

        return list(await asyncio.gather(*map(about, things)))

    async def _bought(self, teacher: Teacher, key: str, request: Request, read: Read) -> str | None:
        """The JSON of an answer of the server, which is stored; None where there is none."""
        most, pause_seconds = self.most(teacher, request), 0.0
        for number in range(MAX_TRIES):
            await asyncio.sleep(pause_seconds)
            # what others of this process have reserved may become free again, and is waited for
            while (charge := self.store.reserve(key, *most)) is None:
                if self._num_reserved == 0:
                    self.is_spent = True
                    return None
                await asyncio.sleep(0.05)
            self._num_reserved += 1
            try:
                answer = await self._sent(teacher, key, request)
                text = json.dumps(read(answer["choices"][0]), ensure_ascii=False, allow_nan=False)
            except Exception as error:  # noqa: BLE001  what is no JSON, or of another form, is met in many ways
                reason = "timed-out" if isinstance(error, TimeoutError) else failure_reason(error)
                has_begun = "Connect" not in type(error.__cause__).__name__
                reason = "cut-off" if reason == "unreachable" and has_begun else reason
                teacher.left_out = teacher.left_out or (str(error) if isinstance(error, UnfitTeacher) else "")
                headers: Mapping[str, str] = getattr(getattr(error, "response", None), "headers", {})
            else:
                teacher.counts[_RAN_OUT if text == "null" else "answered"] += 1
                counts = [at(answer, "usage", name) for name in ("prompt_tokens", "completion_tokens")]
                are_counts = all(type(count) is int and count >= 0 for count in counts)
                cost = (teacher.dollars(*counts), sum(counts)) if are_counts else most
                self.store.settle(charge, key, text, cost)
                teacher.num_failures = 0
                return text
            finally:
                self._num_reserved -= 1
            teacher.counts[reason] += 1
            if reason not in _BILLED:
                self.store.free(charge)
            if reason.startswith(("http-3", "http-4")) and reason not in _PASSING | _ONE_REQUEST:
                teacher.left_out = teacher.left_out or f"it refuses every request ({reason})"
            asked = headers.get("retry-after", "")
            pause_seconds = float(asked) if asked.replace(".", "", 1).isdecimal() else 0.0
            if pause_seconds > self.answer_seconds:
                teacher.left_out = teacher.left_out or f"it wants to be asked in {asked} seconds ({reason})"
            if teacher.left_out or reason in _ONE_REQUEST:
                return None
            pause_seconds = max(pause_seconds, self.pause_seconds * 2**number)
        teacher.num_failures += 1
        if teacher.num_failures >= MAX_FAILURES:
            teacher.left_out = teacher.left_out or f"{MAX_FAILURES} requests in a row without an answer"
        return None

    async def _sent(self, teacher: Teacher, key: str, request: Request) -> Any:
        """The JSON that a server answers."""
        async with asyncio.timeout(self.answer_seconds), teacher.endpoint.client(is_async=True) as client:
            route = client.completions if "prompt" in request else client.chat.completions
            how = {"model": teacher.endpoint.model, "extra_headers": {"Idempotency-Key": key}}
            answer = await route.with_raw_response.create(**how, **request)
        return json_value(answer.http_response.content)


def replay_request(room: Classroom, step: ChosenStep) -> dict[str, Any]:
    """What a teacher is sent about a step."""
    return room.request(pairs.prompt_of(step.trace, step.idx), pairs.tools_of(step.trace))


async def replay_steps(chosen: Sequence[ChosenStep], room: Classroom, first: str = "") -> list[ChosenStep]:
    """Ask every teacher about each step: the same steps with ``answers``. ``room.is_spent`` says whether the budget ended it.

    A cheap teacher may come ``first``: where it does what was recorded, and there is no other sign, nobody else is asked.
    """

    async def asked(steps: Sequence[ChosenStep], names: Collection[str]) -> list[ChosenStep]:
        found = await room.ask_all(steps, lambda step: (replay_request(room, step), message_in), names)
        return [s._replace(answers={**s.answers, **own}) for s, own in zip(steps, found, strict=True)]

    if first:
        seen = [(step, ["disagreement"] * bool(step.others)) for step in await asked(chosen, [first])]
        chosen = [step._replace(reasons=step.reasons + more) for step, more in seen if step.reasons + more]
    return await asked(chosen, [name for name in room.teachers if name != first])


def scoring_rows(chosen: Sequence[ChosenStep], tokenizer: Tokenizer, heldout: HeldoutRows) -> Rows:
    """The ids of the prompt and of the recorded action at each step, and how many steps were dropped by reason."""
    rows, dropped, chats = list[PairRow](), Counter[str](), list[dict[str, Any]]()
    for trace, idx, *_ in chosen:
        sides = {"prompt": pairs.prompt_of(trace, idx), "action": [pairs.recorded_answer(trace, idx)]}
        known = {"trace_id": trace.trace_id, "step": idx, "prompt_origin": trace.prompt_origin}
        chats.append({**sides, "tools": pairs.tools_of(trace), "task_id": trace.task_id, "known": known})
    for chat in pairs.without_heldout(chats, heldout, dropped):
        try:
            prompt, action = tokenised(chat, ("prompt", "action"), tokenizer, chat["known"]["trace_id"])
        except InputError as error:
            dropped[error.message] += 1
            continue
        rows.append({"prompt_ids": list(prompt), "completion_ids": list(action), **chat["known"]})
    return rows, +dropped


def scoring_request(row: PairRow) -> dict[str, Any]:
    """What a teacher is sent about a row."""
    how = {"max_tokens": 1, "temperature": 0.0, "extra_body": {"prompt_logprobs": 0}}
    return {"prompt": row["prompt_ids"] + row["completion_ids"], **how}


async def scored_rows(rows: list[PairRow], room: Classroom, tokenizer: Tokenizer) -> list[PairRow]:
    """Each row once for each teacher that answered, with ``teacher_logp`` of ``completion_ids`` and its ``source``."""
    decode = partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def asked_of(row: PairRow) -> tuple[Request, Read]:
        ids = row["completion_ids"]
        return scoring_request(row), partial(_scores_in, ids=ids, texts=[decode([token]) for token in ids])

    found = await room.ask_all(rows, asked_of, room.teachers)
    scores = [(row, name, logps) for row, own in zip(rows, found, strict=True) for name, logps in own.items()]
    return [{**row, "teacher_logp": logps, "source": name} for row, name, logps in scores if logps]


def _scores_in(choice: Any, *, ids: Sequence[int], texts: Sequence[str]) -> list[float]:
    """The log-probabilities of the last ids of the prompt."""
    if not isinstance(rows := choice.get("prompt_logprobs"), list):
        raise UnfitTeacher("it gives no log-probabilities of given tokens (prompt_logprobs)")
    own = [row[str(token)] for row, token in zip(rows[-len(ids) :], ids, strict=True)]
    for said, text in zip((row["decoded_token"] for row in own), texts, strict=True):
        if said != text and _CUT_CHARACTER not in said + text:
            raise UnfitTeacher(f"its tokenizer is another one than the student's: {said!r} is not {text!r}")
    return [float(row["logprob"]) for row in own]


def task_names(grader: Grader) -> dict[str, str]:
    """The ids of a store's tasks, by themselves and by the names that SWE-bench has for them."""
    named = ((task, (grader.store.record(task).instance_id, task)) for task in grader.store.task_ids())
    return {name: task for task, names in named for name in names if name}


def commit_of(trace: Trace, repository: str, commit: str) -> str:
    """A git address with the commit in which a session began, as the user or else the session says; empty where none is known."""
    where = f"file://{Path(repository).resolve()}" if repository else trace.repository
    if re.fullmatch(r"[\w.-]+/[\w.-]+", where):  # as rows of SWE-bench name it
        where = f"https://github.com/{where}"
    is_known = repository or where.startswith(("https://", "ssh://", "git@"))  # a folder is yours to name
    address = f"{'' if where.startswith('git@') else 'git+'}{where}@{commit or trace.commit}"
    return address if is_known and names_commit(address) else ""


def proven(
    trace: Trace, grader: Grader | None, names: Mapping[str, str], backend: str, given: tuple[str, str]
) -> dict[str, Any]:
    """Bind a session and make every call of it again: a line of ``bindings.jsonl``.

    It is bound by a task of the ``grader`` (``names``: ``task_names``), else by folder and commit of the user (``given``), where
    empty ones are taken from the session. The line has ``problem`` where that was not possible; else ``steps``: answers with
    calls whose results were recorded; ``reproduced_steps`` of them gave the same; ``executable``: the places of answers before
    which nothing came out otherwise; ``calls`` by what came of each.
    """
    task, commit = names.get(trace.task_id, ""), commit_of(trace, *given)
    row: dict[str, Any] = {"trace_id": trace.trace_id, "tree": task or commit, "problem": ""}
    if not row["tree"]:
        return row | {"problem": "neither a task of the store nor a repository with its commit is known"}
    calls, broken, executable, num_steps = Counter[str](), set[int](), [], 0
    try:
        env: Any = FeatureDeletionEnv(grader, monitor="off") if task and grader else tools_at(commit, backend)
        with env as tools:
            if task:
                tools.reset(task)
            for idx, _ in trace.agent_steps():
                if broken.isdisjoint(trace.path_to(idx)):
                    executable.append(idx)
                found = Counter(redone(trace, [idx], tools.call))
                if found.keys() - {"the same", "not compared"}:
                    broken.add(idx)
                num_steps += bool(found)
                calls += found
    except (InputError, MissingError) as error:
        return row | {"problem": f"{error.code}: {error.message}"}
    row |= {"steps": num_steps, "reproduced_steps": num_steps - len(broken), "executable": executable}
    return row | {"calls": dict(calls)}


def redone(trace: Trace, places: Iterable[int], call: Callable[..., ToolResult]) -> Iterator[str]:
    """Make the calls of these steps again but those without a result and those that never ran; say what came of each."""
    for place in places:
        step = trace.steps[place]
        # of an answer that the user refused, what failed was never run
        known = {r.call_id: r for r in step.results if not (r.failed and "denied" in step.flags)}
        for recorded, ours in zip(step.calls, pairs.our_calls(trace, place), strict=True):
            says_nothing = ours.name in _TEXTS["no_state"] or _TEXTS["last_command"] in ours.arguments
            if ours.call_id not in known or says_nothing:
                continue
            before, result = known[ours.call_id], call(ours)
            if ours is not recorded and not {ours.name, recorded.name}.isdisjoint(_TEXTS["own_words"]):
                yield "not compared"
                continue
            texts = (before.text, Redactor().text(result.text))
            is_same = len({_plain(text, ours.name, trace.folder) for text in texts}) == 1
            is_same = is_same and before.exit_code in (None, result.exit_code)
            if ours.name in pairs.EDITS:  # each program says in its own words that it was done
                is_same = before.failed == result.failed
            yield "the same" if is_same else "another result"


def _plain(text: str, tool: str, folder: str) -> str:
    """What a result says, without what a program writes around it and what differs between two runs."""
    text = (text_at(parsed(text), "output") or text).replace("\r", "")
    for frame in _TEXTS["frames"]:
        found = re.fullmatch(frame, text, re.DOTALL)
        text = text if found is None else found[1]
    text = re.sub(_TEXTS["line_number" if tool == "read_file" else "ours"], "", text, flags=re.MULTILINE)
    text = _VARYING.sub("*", text.replace(folder or pairs.USUAL_FOLDER, "*"))
    return re.sub(r"\n{2,}", "\n", text).strip("\n *")


class Execution(NamedTuple):
    """How branches are run: in attempts that ``open_attempt`` makes, played on by the teacher ``goes_on``."""

    open_attempt: Callable[[], FeatureDeletionEnv]
    names: Mapping[str, str]
    room: Classroom
    goes_on: str
    num_tries: int
    horizon: int


async def execute(step: ChosenStep, how: Execution) -> dict[str, Any]:
    """Run the recorded answer and each other one from the same tree, and then the visible tests: a line of ``verdicts.jsonl``.

    ``reproduced`` of ``calls`` recorded results came back on the way; ``problem`` says why nothing was compared; ``verdicts`` has
    for each other answer the shares of passed tests beside the recorded one's, the interval of their difference, the decision.
    """
    trace, idx = step.trace, step.idx
    row = dict[str, Any](trace_id=trace.trace_id, step=idx, calls=0, reproduced=0, problem="", verdicts=[])
    if not step.others:
        return row | {"problem": "every teacher does the same"}
    verdicts = list[dict[str, Any]]()
    with how.open_attempt() as attempt:
        try:
            attempt.reset(how.names[trace.task_id])
            outcomes = Counter(redone(trace, trace.path_to(idx), attempt.call))
            row["calls"] = outcomes.total() - outcomes["not compared"]
            row["reproduced"] = outcomes["the same"]
            if row["reproduced"] < row["calls"] or attempt.is_done:
                return row | {"problem": "recorded results are not reproduced"}
            restore, seeds = attempt.snapshot(), range(1, how.num_tries + 1)
            for source, answer in (("", pairs.recorded_answer(trace, idx)), *step.others):
                scores = [await _play(step, answer, attempt, restore, how, seed=seed) for seed in seeds]
                recorded = verdicts[0]["scores"] if verdicts else scores
                verdict = {"source": source, "answer": answer, "scores": scores, "recorded_scores": recorded}
                low, high = difference(scores, recorded)
                decision = "better" if low > 0 else "worse" if high < 0 else "not decided"
                verdicts.append(verdict | {"interval": (low, high), "decision": decision})
        except SandboxFailure as error:
            return row | {"problem": f"the sandbox failed ({error.code})"}
        except UnfitTeacher:
            return row | {"problem": "the teacher that plays on gave no answer"}
    return row | {"verdicts": verdicts[1:]}


async def _play(
    step: ChosenStep, answer: Message, attempt: FeatureDeletionEnv, restore: Any, how: Execution, *, seed: int
) -> float:
    """The score of one try: the answer, what the teacher does after it, and then the visible tests."""
    restore()
    messages, tools = pairs.prompt_of(step.trace, step.idx), pairs.tools_of(step.trace)
    current: Message | None = answer
    for turn in range(how.horizon + 1):
        if current is None:
            break
        calls = pairs.calls_of(current)
        calls = [replace(call, call_id=f"call-{step.idx}-{turn}-{n}") for n, call in enumerate(calls)]
        messages.append(pairs.assistant_message(current["content"], calls))
        results = [(call.call_id, attempt.call(call).text) for call in calls]
        messages += [{"role": "tool", "tool_call_id": name, "content": text} for name, text in results]
        if attempt.is_done or not calls or turn == how.horizon:
            break
        request = how.room.request(messages, tools, sample=seed)
        current, teacher = await how.room.ask(how.goes_on, request), how.room.teachers[how.goes_on]
        has_failed = bool(teacher.left_out) or teacher.num_failures > 0 or how.room.is_spent
        if current is None and has_failed:  # else it ran out of tokens
            raise UnfitTeacher
    if (score := attempt.grade()) is None:
        raise SandboxFailure("CR0303", "the sandbox of a branch broke.", fix="composer-rl sandbox selftest")
    return score.pass_share
