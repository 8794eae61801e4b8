"""Recorded calls made again: sessions bound to the tree in which they began and proven there, and branches executed to the tests.

Both use the sandbox and the tools of training. A step is *executable* where everything before it came out as recorded: its
state is then known to be restored.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from composer_replication.errors import InputError, MissingError, SandboxFailure
from composer_replication.records import ToolCall, ToolResult
from composer_replication.rollouts.environment.feature_deletion_env import FeatureDeletionEnv, tools_at
from composer_replication.rollouts.grading import Grader
from composer_replication.tasks.difficulty import difference
from composer_replication.tasks.intake.git_source import names_commit
from composer_replication.traces import pairs
from composer_replication.traces.ingest import Redactor
from composer_replication.traces.json_values import parsed, text_at
from composer_replication.traces.pairs import EDITS, USUAL_FOLDER, ChosenStep, Message, our_calls
from composer_replication.traces.teachers import Classroom, UnfitTeacher
from composer_replication.traces.trace_records import Trace

Call = Callable[[ToolCall], ToolResult]
Outcome = Literal["the same", "another result", "not compared", "no tool of ours"]
_TEXTS = tomllib.loads(Path(__file__).with_name("result_texts.toml").read_text(encoding="utf-8"))
_VARYING = re.compile("|".join(_TEXTS["varying"]), re.MULTILINE)


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
    calls, broken, executable, num_steps = Counter[Outcome](), set[int](), [], 0
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


def redone(trace: Trace, places: Iterable[int], call: Call) -> Iterator[Outcome]:
    """Make the calls of these steps again, those without a recorded result left out, and say what came of each."""
    for place in places:
        known = {result.call_id: result for result in trace.steps[place].results}
        for recorded, ours in zip(trace.steps[place].calls, our_calls(trace, place), strict=True):
            says_nothing = ours.name in _TEXTS["no_state"] or _TEXTS["last_command"] in ours.arguments
            if ours.call_id not in known or says_nothing:
                continue
            before, result = known[ours.call_id], call(ours)
            if result.fault == "invalid" and ours is recorded:
                yield "no tool of ours"
            elif ours.name in _TEXTS["own_words"] and ours is not recorded:
                yield "not compared"
            elif ours.name in EDITS:  # each program says in its own words that it was done
                yield "the same" if before.failed == result.failed else "another result"
            else:
                texts = (before.text, Redactor().text(result.text))
                is_same = len({_plain(text, ours.name, trace.folder) for text in texts}) == 1
                is_same = is_same and before.exit_code in (None, result.exit_code)
                yield "the same" if is_same else "another result"


def _plain(text: str, tool: str, folder: str) -> str:
    """What a result says, without what a program writes around it and what differs between two runs."""
    text = (text_at(parsed(text), "output") or text).replace("\r", "")
    for frame in _TEXTS["frames"]:
        found = re.fullmatch(frame, text, re.DOTALL)
        text = text if found is None else found[1]
    text = re.sub(_TEXTS["line_number" if tool == "read_file" else "ours"], "", text, flags=re.MULTILINE)
    text = _VARYING.sub("*", text.replace(folder or USUAL_FOLDER, "*"))
    return re.sub(r"\n{2,}", "\n", text).strip("\n *")


def decide(interval: tuple[float, float]) -> str:
    """``better`` or ``worse`` where the whole interval says so, else ``not decided``."""
    return "better" if interval[0] > 0 else "worse" if interval[1] < 0 else "not decided"


@dataclass(frozen=True, slots=True)
class Execution:
    """How branches are run: in attempts that ``open_attempt`` makes, played on by the teacher ``goes_on``."""

    open_attempt: Callable[[], FeatureDeletionEnv]
    names: Mapping[str, str]
    room: Classroom
    goes_on: str
    num_tries: int
    horizon: int


async def execute(step: ChosenStep, how: Execution) -> dict[str, Any]:
    """Run the recorded answer and each other one from the same tree, and then the visible tests: a line of ``verdicts.jsonl``.

    ``reproduced`` of ``calls`` recorded results came back on the way to the step; ``problem`` says why nothing was compared;
    ``verdicts`` has for each other answer the shares of passed tests, a try each, beside those of the recorded one, the
    interval of their difference and the decision.
    """
    trace, idx = step.trace, step.idx
    row: dict[str, Any] = {"trace_id": trace.trace_id, "step": idx, "calls": 0, "reproduced": 0}
    row |= {"problem": "", "verdicts": []}
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
            restore = attempt.snapshot()
            for source, answer in (("", pairs.recorded_answer(trace, idx)), *step.others):
                scores: list[float] = []
                for number in range(how.num_tries):
                    restore()
                    scores.append(await _play(step, answer, attempt, how, number))
                recorded = verdicts[0]["scores"] if verdicts else scores
                verdict = {"source": source, "answer": answer, "scores": scores, "recorded_scores": recorded}
                interval = difference(scores, recorded)
                verdicts.append(verdict | {"interval": interval, "decision": decide(interval)})
        except SandboxFailure as error:
            return row | {"problem": f"the sandbox failed ({error.code})"}
        except UnfitTeacher:
            return row | {"problem": "the teacher that plays on gave no answer"}
    return row | {"verdicts": verdicts[1:]}


async def _play(
    step: ChosenStep, answer: Message, attempt: FeatureDeletionEnv, how: Execution, number: int
) -> float:
    """The score of one try: the answer, what the teacher does after it, and then the visible tests."""
    messages, tools = pairs.prompt_of(step.trace, step.idx), pairs.tools_of(step.trace)
    current: Message | None = answer
    for turn in range(how.horizon + 1):
        if current is None:
            break
        calls = pairs.calls_of(current)
        calls = [replace(call, call_id=f"call-{step.idx}-{turn}-{n}") for n, call in enumerate(calls)]
        messages.append(pairs.assistant_message(current["content"], calls))
        for call in calls:
            text = attempt.call(call).text
            messages.append({"role": "tool", "tool_call_id": call.call_id, "content": text})
        if attempt.is_done or not calls or turn == how.horizon:
            break
        request = how.room.request(messages, tools, sample=number + 1)
        current, teacher = await how.room.ask(how.goes_on, request), how.room.teachers[how.goes_on]
        has_failed = bool(teacher.left_out) or teacher.num_failures > 0 or how.room.is_spent
        if current is None and has_failed:  # else it ran out of tokens
            raise UnfitTeacher
    if (score := attempt.grade()) is None:
        raise SandboxFailure("CR0303", "the sandbox of a branch broke.", fix="composer-rl sandbox selftest")
    return score.pass_share
