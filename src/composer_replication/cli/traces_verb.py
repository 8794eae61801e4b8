"""``composer-rl traces``: recorded sessions in, teachers asked, branches executed, preference pairs out."""

from __future__ import annotations

import argparse
import asyncio
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from shlex import quote
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from composer_replication.cli.flags import chosen_backend, given_up, refuse_unwritable
from composer_replication.cli.terminal import counted, note, progress_bar
from composer_replication.errors import InputError, MissingError, NothingToDoError, UsageError, needs_extra
from composer_replication.run_folder import read_jsonl, rewrite_jsonl, write_json
from composer_replication.traces.ingest import FORMATS, SECRETS_NAME, ingest, read_traces

if TYPE_CHECKING:  # ``ingest`` runs where no sandbox does: what needs one is imported by the other verbs
    from composer_replication.traces.replay import Classroom
Result = tuple[dict[str, object], int]
REPLAY_NAME, VERDICTS_NAME, BINDINGS_NAME = "replay.jsonl", "verdicts.jsonl", "bindings.jsonl"
_LEAST_GOLDEN_CHARACTERS = 20  # held-out code that is shorter is an idiom that anybody writes
_INCOMPLETE = 6  # exit code where the budget or a teacher ended: the same command goes on
_NOTHING_SENT = {"dry_run": True, "cost_usd": 0.0, "cached": 0, "failed": 0}


def run_ingest(args: argparse.Namespace) -> Result:
    if args.format and args.format not in FORMATS:
        problem = f"there is no format {args.format!r}."
        raise UsageError("CR0206", problem, where="--format", fix=f"one of {', '.join(FORMATS)}")
    refuse_unwritable(args.out)
    with progress_bar(quiet=args.quiet) as report:
        sums = ingest(args.paths, args.out, only=args.format, num_processes=args.jobs, report=report)
    result = {**sums, "kept": sums["traces"], "dropped": {**sums["duplicates"], **sums["files_left_out"]}}
    write_json(args.out / "summary.json", result)
    if any(sums["redactions"].values()) and not args.quiet:
        note(f"what stands for what was taken out is in {args.out / SECRETS_NAME}: keep that to yourself")
    return result, 0


def run_bind(args: argparse.Namespace) -> Result:
    from composer_replication.tasks.intake.git_source import names_commit
    from composer_replication.traces import replay

    if args.commit and not names_commit(f"git+file:///.@{args.commit}"):
        problem, fix = "the commit is not named by its full id.", "git rev-parse HEAD"
        raise UsageError("CR0206", problem, where=f"--commit {args.commit}", fix=fix)
    traces, backend = _sessions(args), chosen_backend(args)
    with _graded(args, backend) as (grader, names), progress_bar(quiet=args.quiet) as report:
        how = (grader, names, backend, (args.repository, args.commit))
        rows = [replay.proven(trace, *how) for trace in counted(traces, report, "sessions")]
    rewrite_jsonl(args.folder / BINDINGS_NAME, rows)
    bound = [row for row in rows if not row["problem"]]
    problems = dict(Counter(row["problem"] for row in rows if row["problem"]))
    if not bound:
        fix = "--tasks STORE, or --repository FOLDER --commit SHA"
        problem = f"no session is bound to a tree: {problems}."
        raise NothingToDoError("CR0942", problem, where=str(args.folder), fix=fix)
    result = {
        "sessions": len(bound),
        "not_bound": problems,
        **{key: sum(row[key] for row in bound) for key in ("steps", "reproduced_steps")},
        "executable_steps": sum(len(row["executable"]) for row in bound),
        "calls": dict(sum((Counter(row["calls"]) for row in bound), Counter())),
        **given_up(),
    }
    return result, 0


@contextmanager
def _graded(args: argparse.Namespace, backend: str) -> Iterator[tuple[Any, Mapping[str, str]]]:
    """A grader of the store of ``--tasks`` and the names of its tasks; nothing without the flag."""
    from composer_replication.rollouts.grading import Grader
    from composer_replication.tasks.store import TaskStore
    from composer_replication.traces.replay import task_names

    if args.tasks is None:
        yield None, {}
        return
    with closing(Grader(TaskStore.open(args.tasks), backend=backend)) as grader:
        yield grader, task_names(grader)


def run_replay(args: argparse.Namespace) -> Result:
    from composer_replication.traces.replay import replay_request

    chosen = _chosen(args, takes_all=args.every_step or bool(args.first))
    room = _open_room(args, args.goes_on, args.first)
    with closing(room.store):
        cost = room.cost(replay_request(room, step) for step in chosen)
        if args.tasks:  # how long the prompts of these get, nobody knows before
            sides = sum(bool(step.trace.task_id) for step in chosen) * (1 + len(room.teachers))
            cost["most_continuations"] = sides * args.tries * args.horizon
        if args.dry_run:
            return {**_NOTHING_SENT, **cost}, 0
        return asyncio.run(_replay(args, room, chosen, cost))


def run_distill(args: argparse.Namespace) -> Result:
    from composer_replication.config import ModelSection
    from composer_replication.traces import pairs, replay

    refuse_unwritable(args.out.parent)
    with needs_extra("train", "the student's tokenizer"):
        from composer_replication.trainer.model_loading import load_model
    student = ModelSection(name=args.model)
    tokenizer = load_model(student, seed=0, needs_chat_template=True, has_weights=False)[1]
    chosen = _chosen(args, takes_all=args.every_step)
    rows, dropped = replay.scoring_rows(chosen, tokenizer, _heldout_rows(args))
    room = _open_room(args)
    with closing(room.store), progress_bar(quiet=args.quiet) as room.report:
        cost = room.cost(map(replay.scoring_request, rows))
        if args.dry_run:
            return {**_NOTHING_SENT, **cost, "dropped": dropped}, 0
        found = asyncio.run(replay.scored_rows(rows, room, tokenizer))
        paid, code = _paid(room)
    if not found and not room.is_spent:
        problem = f"no teacher gave log-probabilities of the student's tokens: {_reasons(room)}; dropped: {dropped}."
        fix = "a server with prompt_logprobs (vLLM, composer-rl serve-model) and a model with the student's tokenizer"
        raise NothingToDoError("CR0944", problem, where="--teacher", fix=fix)
    pairs.write_rows(args.out, found)
    sources = dict(Counter(row["source"] for row in found))
    result = {"dry_run": False, **cost, **paid, "rows": len(found), "sources": sources}
    return {**result, "dropped": dropped, "out": str(args.out.absolute())}, code


def _chosen(args: argparse.Namespace, *, takes_all: bool) -> list[Any]:
    from composer_replication.traces.pairs import chosen_steps

    chosen = chosen_steps(_sessions(args), args.max_steps, takes_all=takes_all)
    if not chosen:
        problem = "no step is worth asking about: no errors, objections or edits."
        raise NothingToDoError("CR0942", problem, where=str(args.folder), fix="--every-step")
    return chosen


def _sessions(args: argparse.Namespace) -> list[Any]:
    """Of a folder, into which the verb writes as well; a file is refused before anything runs."""
    if args.folder.is_file():
        problem = "this is a file; what is found out is written beside the sessions, into their folder."
        fix = f"composer-rl traces ingest {quote(str(args.folder))} --out DIR"
        raise InputError("CR0942", problem, where=str(args.folder), fix=fix)
    refuse_unwritable(args.folder)
    return list(read_traces(args.folder))


def _open_room(args: argparse.Namespace, *named: str) -> Classroom:
    """The teachers, of whom those that are ``named`` have to be some; an empty name is nobody's."""
    from composer_replication.traces import replay

    keys, prices = dict(args.key), dict(args.price)
    opened = [replay.open_teacher(text, keys, prices, args.concurrent) for text in args.teacher]
    by_name = {teacher.name: teacher for teacher in opened}
    unknown = {*keys, *prices, *filter(None, named)} - by_name.keys()
    if unknown or len(by_name) < len(opened):
        problem = f"there is no teacher {min(unknown)!r}." if unknown else "two teachers have one name."
        fix = "--teacher NAME=URL#MODEL, each with a name of its own"
        raise UsageError("CR0206", problem, where="--teacher", fix=fix)
    limits = {"max_dollars": args.budget_usd, "max_tokens": args.max_tokens}
    store = replay.AnswerStore(args.folder / "answers.sqlite", **limits)
    return replay.Classroom(by_name, store, max_tokens=args.answer_tokens)


def _reasons(room: Classroom) -> dict[str, Any]:
    return {name: each.left_out or dict(each.counts) for name, each in room.teachers.items()}


def _paid(room: Classroom) -> Result:
    """What was spent and how each teacher did, with the exit code."""
    dollars, tokens = room.store.spent()
    asked = room.teachers.values()
    result: dict[str, object] = {
        "cost_usd": dollars,
        "tokens": tokens,
        "cached": sum(teacher.counts["cached"] for teacher in asked),
        "failed": sum(teacher.counts.total() - teacher.num_answered for teacher in asked),
        "budget_is_spent": room.is_spent,
        "fix": "raise --budget-usd or --max-tokens and give the command again." if room.is_spent else "",
        "teachers": {each.name: {**each.counts, "left_out": each.left_out} for each in asked},
    }
    return result, _INCOMPLETE if room.is_spent or any(teacher.left_out for teacher in asked) else 0


async def _replay(
    args: argparse.Namespace, room: Classroom, chosen: Sequence[Any], cost: Mapping[str, Any]
) -> Result:
    from composer_replication.traces.replay import replay_steps

    with progress_bar(quiet=args.quiet) as room.report:
        steps = await replay_steps(chosen, room, args.first)
        if not room.is_spent and not any(teacher.num_answered for teacher in room.teachers.values()):
            problem = f"no teacher answered: {_reasons(room)}."
            fix = "check address, model and key of each, and whether its server runs."
            raise NothingToDoError("CR0944", problem, where="--teacher", fix=fix)
        rewrite_jsonl(args.folder / REPLAY_NAME, [step.row() for step in steps])
        executed = await _execute(args, room, steps) if args.tasks else {}
    paid, code = _paid(room)
    answers = sum(answer is not None for step in steps for answer in step.answers.values())
    others = sum(len(step.others) for step in steps)
    return {"dry_run": False, **cost, **executed, "answers": answers, "others": others, **paid}, code


async def _execute(args: argparse.Namespace, room: Classroom, steps: Sequence[Any]) -> dict[str, object]:
    from composer_replication.rollouts.environment.feature_deletion_env import FeatureDeletionEnv
    from composer_replication.traces import replay

    done, failures = list[dict[str, Any]](), list[InputError | MissingError]()
    with _graded(args, chosen_backend(args)) as (grader, names):
        bound = [each for each in steps if each.trace.task_id in names]
        attempt = partial(FeatureDeletionEnv, grader, monitor="off")
        goes_on = args.goes_on or next(iter(room.teachers))
        how = replay.Execution(attempt, names, room, goes_on, args.tries, args.horizon)
        for step in counted(bound, room.report, "executed"):
            try:
                done.append(await replay.execute(step, how))
            except (InputError, MissingError) as error:  # of this task; the others go on
                failures.append(error)
    if failures and len(failures) == len(bound):
        raise failures[0]
    problems = [row["problem"] for row in done if row["problem"]]
    problems += [f"{error.code}: {error.message}" for error in failures]
    rewrite_jsonl(args.folder / VERDICTS_NAME, done)
    return {
        "not_bound": len(steps) - len(bound),
        "executed": sum(bool(row["verdicts"]) for row in done),
        "not_executed": dict(Counter(problems)),
        "recorded_calls": sum(row["calls"] for row in done),
        "reproduced_calls": sum(row["reproduced"] for row in done),
        "verdicts": dict(Counter(verdict["decision"] for row in done for verdict in row["verdicts"])),
        **given_up(),
    }


def run_pairs(args: argparse.Namespace) -> Result:
    from composer_replication.traces import pairs

    refuse_unwritable(args.out.parent)
    traces, found = list[Any](), list[dict[str, Any]]()
    for folder in args.folders:  # an id is of one session within its folder
        traces += (own := [*read_traces(folder)])
        by_id = {trace.trace_id: trace for trace in own}
        verdicts = [row for row in read_jsonl(folder / VERDICTS_NAME) if row["trace_id"] in by_id]
        if any(row["step"] >= len(by_id[row["trace_id"]].steps) for row in verdicts):
            problem = f"{VERDICTS_NAME} speaks of steps that its sessions no longer have: they were read again since."
            fix = f"composer-rl traces replay {quote(str(folder))} --teacher … --tasks STORE"
            raise InputError("CR0942", problem, where=str(folder / VERDICTS_NAME), fix=fix)
        found += pairs.executed_pairs(by_id, verdicts)
    found += [*pairs.sibling_pairs(traces), *pairs.objection_pairs(traces)]
    return _written(args, pairs.balanced(found, _heldout_rows(args)), "pairs")


def run_sft(args: argparse.Namespace) -> Result:
    from composer_replication.traces.pairs import sft_rows

    refuse_unwritable(args.out.parent)
    traces = [trace for folder in args.folders for trace in read_traces(folder)]
    return _written(args, sft_rows(traces, _heldout_rows(args)), "rows")


def _heldout_rows(args: argparse.Namespace) -> Callable[[Sequence[Mapping[str, Any]]], set[int]]:
    """Finds rows of held-out tasks by their id, and by their code in any text of the row."""
    if (args.split is None) != (args.tasks is None):
        fix = "--tasks STORE --split STORE/split.json"
        raise UsageError("CR0206", "--split and --tasks go together.", where="--split", fix=fix)
    if args.split is None:
        return lambda _: set()
    from composer_replication.cli.task_division import open_split
    from composer_replication.errors import SplitOverlapError
    from composer_replication.safety import HeldoutSplit
    from composer_replication.tasks.store import TaskStore

    store = TaskStore.open(args.tasks)
    heldout = open_split(args.split, store).heldout_ids
    golden = [_lines(store.content(store.get(task_id)).golden) for task_id in heldout]
    golden = [lines for lines in golden if sum(map(len, lines)) >= _LEAST_GOLDEN_CHARACTERS]

    def find(rows: Sequence[Mapping[str, Any]]) -> set[int]:
        found = {place for place, row in enumerate(rows) if row.get("task_id") in heldout}
        texts = [_texts(row) for row in rows]
        found |= {n for n, text in enumerate(texts) if any(lines <= _lines(text) for lines in golden)}
        try:
            own = [SimpleNamespace(task_id=f"row-{n}", golden=text) for n, text in enumerate(texts)]
            HeldoutSplit(own, map(store.content, map(store.get, heldout)))
        except SplitOverlapError as error:
            found |= {int(train.removeprefix("row-")) for _, train, _ in error.pairs}
        return found

    return find


def _lines(text: str) -> set[str]:
    return {line.strip() for line in text.splitlines()} - {""}


def _texts(value: Any) -> str:
    """Every text inside, a line number before a line taken off: tools show files with them."""
    if isinstance(value, str):
        return re.sub(r"(?m)^\s*\d+[\t|:]\s?", "", value)
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return "\n".join(_texts(each) for each in inner)


def _written(
    args: argparse.Namespace, found: tuple[list[dict[str, Any]], Mapping[str, int]], what: str
) -> Result:
    from composer_replication.traces.pairs import write_rows

    rows, dropped = found[0], {why: number for why, number in found[1].items() if number}
    if not rows:
        problem = f"no {what.removesuffix('s')} was found; dropped: {dropped or 'nothing'}."
        fix = "composer-rl traces replay DIR --teacher … --tasks STORE executes branches first."
        raise NothingToDoError("CR0942", problem, where=str(args.folders[0]), fix=fix)
    is_file = args.out.suffix in (".jsonl", ".parquet")
    path = args.out if is_file else args.out / f"{what}.jsonl"
    write_rows(path, rows)
    sources = dict(Counter(row.get("source", "passing attempts") for row in rows))
    result = {what: len(rows), "sources": sources, "dropped": dropped, "out": str(path.absolute())}
    if not is_file:
        write_json(args.out / "summary.json", result)
    return result, 0


def run_show(args: argparse.Namespace) -> Result:
    from composer_replication.report.trace_page import write_trace_page

    refuse_unwritable(args.out.parent)
    num_sessions = write_trace_page(args.folder, read_traces(args.folder), args.out)
    return {"page": str(args.out.absolute()), "sessions": num_sessions}, 0
