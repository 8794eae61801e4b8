"""``composer-rl traces``: recorded sessions in, teachers asked, branches executed, preference pairs out."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from composer_replication.cli.flags import (
    add_isolation_flags,
    chosen_backend,
    given_up,
    number,
    refuse_unwritable,
    whole_number,
)
from composer_replication.cli.terminal import progress_bar
from composer_replication.errors import InputError, NothingToDoError, SplitOverlapError, UsageError
from composer_replication.run_folder import rewrite_jsonl, write_json

if TYPE_CHECKING:
    from composer_replication.traces.teachers import Classroom
    from composer_replication.traces.trace_records import Trace

_HERE = "composer_replication.cli.traces_verb"
REPLAY_NAME, VERDICTS_NAME, ANSWERS_NAME = "replay.jsonl", "verdicts.jsonl", "answers.sqlite"
BINDINGS_NAME = "bindings.jsonl"
_LEAST_GOLDEN_CHARACTERS = 20
"""Held-out code that is shorter is an idiom that anybody writes; from here on its lines are looked for as they are."""
_INCOMPLETE = 6
"""Exit code where the budget or a teacher ended: what was answered is kept, and the same command goes on."""


def add_parser(subparsers: Any, common: argparse.ArgumentParser) -> None:
    """Register the verb and its sub-verbs; ``common`` carries ``--json`` and ``--quiet``."""
    parser = subparsers.add_parser(
        "traces",
        help="recorded agent sessions: ingest, ask teachers again, execute branches, make pairs",
        description="Recorded sessions of agents become preference pairs: docs/traces.md walks through it.",
    )
    verbs = parser.add_subparsers(dest="sub_verb", metavar="VERB", required=True, title="verbs")
    _add_ingest(verbs, common)
    _add_bind(verbs, common)
    _add_replay(verbs, common)
    for name, what in (("pairs", "preference pairs"), ("sft", "chat rows of passing attempts")):
        about = f"Write {what}, for TRL and for our own trainer."
        made = verbs.add_parser(name, parents=[common], help=f"write {what}", description=about)
        folders = "folders of traces ingest, or files of trajectories"
        made.add_argument("folders", metavar="DIR", type=Path, nargs="+", help=folders)
        made.add_argument(
            "--out", type=Path, required=True, metavar="DIR", help="a folder, or FILE.parquet or FILE.jsonl"
        )
        made.add_argument("--tasks", type=Path, metavar="STORE", help="the task store of --split")
        nothing = "a split: nothing of its held-out tasks is written"
        made.add_argument("--split", type=Path, metavar="FILE", help=nothing)
        made.set_defaults(run=f"{_HERE}:run_{name}", render=f"{_HERE}:render_rows")
    about = "Sessions, steps, branches and verdicts on one self-contained page."
    show = verbs.add_parser("show", parents=[common], help="write one HTML page", description=about)
    show.add_argument("folder", metavar="DIR", type=Path)
    show.add_argument("--out", type=Path, required=True, metavar="PAGE.html")
    show.set_defaults(run=f"{_HERE}:run_show", render=f"{_HERE}:render_show")


def _add_ingest(verbs: Any, common: argparse.ArgumentParser) -> None:
    about = "Read sessions, take keys, addresses and home folders out, leave duplicates out, and write ATIF lines."
    what = "read sessions of any known format"
    parser = verbs.add_parser("ingest", parents=[common], help=what, description=about)
    parser.add_argument("paths", metavar="PATH", type=Path, nargs="+", help="files and folders")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--format", metavar="NAME", default="", help="read as this format, where two fit")
    parser.add_argument("--jobs", type=whole_number(), default=2, metavar="N", help="processes (default 2)")
    parser.set_defaults(run=f"{_HERE}:run_ingest", render=f"{_HERE}:render_ingest")


def _add_bind(verbs: Any, common: argparse.ArgumentParser) -> None:
    about = (
        "Make the calls of sessions again in the tree in which they began, and say which results came back."
    )
    what = "make recorded calls again and compare"
    parser = verbs.add_parser("bind", parents=[common], help=what, description=about)
    parser.add_argument("folder", metavar="DIR", type=Path, help="of traces ingest")
    parser.add_argument("--tasks", type=Path, metavar="STORE", help="sessions on its tasks, SWE-bench's too")
    where = "the clone in which sessions worked (default: what each recorded)"
    parser.add_argument("--repository", metavar="FOLDER", default="", help=where)
    parser.add_argument(
        "--commit", metavar="SHA", default="", help="where sessions began (default: likewise)"
    )
    add_isolation_flags(parser)
    parser.set_defaults(run=f"{_HERE}:run_bind", render=f"{_HERE}:render_bind")


_NUMBERS: Mapping[str, tuple[float, str]] = {
    "--budget-usd": (5.0, "budget, never passed (default 5)"),
    "--max-tokens": (20_000_000, "budget (default 20 million)"),
    "--max-steps": (200, "steps that are asked about (default 200)"),
    "--answer-tokens": (2048, "most of one answer (default 2048)"),
    "--concurrent": (8, "requests at a time, each teacher (default 8)"),
    "--tries": (4, "executions of each branch (default 4)"),
    "--horizon": (6, "answers after the branch (default 6)"),
}
_SWITCHES = {
    "--every-step": "also steps where nothing went wrong and nothing was edited",
    "--first-decides": "ask the others only where the first teacher parts from the recording",
    "--dry-run": "say steps, calls and the most that they can cost; send nothing",
}


def _add_replay(verbs: Any, common: argparse.ArgumentParser) -> None:
    parser = verbs.add_parser(
        "replay",
        parents=[common],
        help="ask teachers what they would have done, and execute it",
        description="Ask OpenAI-compatible teachers about the steps that matter; with --tasks the answers are executed from the "
        "recorded state and compared. Answers are kept in DIR: the same command again asks nothing twice and goes on.",
    )
    add = parser.add_argument
    add("folder", metavar="DIR", type=Path, help="of traces ingest")
    add("--teacher", action="append", required=True, metavar="NAME=URL#MODEL", help="any number of times")
    several: dict[str, Any] = {"action": "append", "default": []}
    add("--key", metavar="NAME=VARIABLE", help="environment variable with a teacher's key", **several)
    add("--price", metavar="NAME=IN/OUT", help="dollars a million tokens", **several)
    for flag, (default, what) in _NUMBERS.items():
        kind = whole_number() if isinstance(default, int) else number()
        add(flag, type=kind, default=default, metavar="N", help=what)
    for flag, what in _SWITCHES.items():
        add(flag, action="store_true", help=what)
    add("--tasks", type=Path, metavar="STORE", help="execute branches of sessions on these tasks")
    add(
        "--goes-on",
        default="",
        metavar="NAME",
        help="the teacher that plays a branch on (default: the first)",
    )
    add_isolation_flags(parser)
    parser.set_defaults(run=f"{_HERE}:run_replay", render=f"{_HERE}:render_replay")


def run_ingest(args: argparse.Namespace) -> tuple[dict[str, object], int]:
    """Read sessions into a folder.

    Raises:
        UsageError: an unknown ``--format`` (CR0206).
        InputError: a path that is not there (CR0942), or a named file that two formats fit (CR0206).
        NothingToDoError: nothing of a known format, or no answer of a model (CR0942).
    """
    from composer_replication.traces.ingest import FORMATS, ingest

    if args.format and args.format not in FORMATS:
        problem = f"there is no format {args.format!r}."
        raise UsageError("CR0206", problem, where="--format", fix=f"one of {', '.join(FORMATS)}")
    refuse_unwritable(args.out)
    with progress_bar(quiet=args.quiet) as report:
        sums = ingest(args.paths, args.out, only=args.format, num_processes=args.jobs, report=report)
    dropped = {**sums["duplicates"], **sums["files_left_out"]}
    result = {**sums, "kept": sums["traces"], "dropped": dropped}
    write_json(args.out / "summary.json", result)
    return result, 0


def render_ingest(result: dict[str, Any]) -> str:
    """The sum of all records, and what was taken out."""
    total = max(1, result["records"])
    twice = ", ".join(f"{number} {what}" for what, number in result["duplicates"].items()) or "none"
    lost = [f"  {number:>9}  {what}" for what, number in result["redactions"].items() if number]
    lines = [
        f"{result['files']} file(s), {result['bytes']} bytes: {', '.join(result['formats'])}",
        f"{result['records']} records became",
        *(
            f"  {number:>9}  {100 * number / total:5.1f}%  {what}"
            for what, number in result["became"].items()
        ),
        f"duplicates left out: {twice} (near ones {result['near_duplicates']})",
    ]
    if lost:
        place = f"{result['out']}/redactions.local.json"
        lines += [f"taken out, by rule; what stands for what is in {place}", *lost]
    lines += [f"left out: {number} file(s), {what}" for what, number in result["files_left_out"].items()]
    failed = f"{result['failed_results']} of {result['results']} results failed"
    counts = f"{result['traces']} session(s), {result['steps']} answers, {result['calls']} calls, {failed}"
    return "\n".join([*lines, f"{counts}: {result['out']}/traces.jsonl"])


def run_bind(args: argparse.Namespace) -> tuple[dict[str, object], int]:
    """Make recorded calls again.

    Raises:
        UsageError: ``--commit`` is no full id (CR0206).
        InputError: no traces (CR0942), no store (CR0410).
        NothingToDoError: no session is bound to a tree (CR0942).
    """
    from composer_replication.traces.state_binding import is_full_id, proven

    if args.commit and not is_full_id(args.commit):
        problem, fix = "the commit is not named by its full id.", "git rev-parse HEAD"
        raise UsageError("CR0206", problem, where=f"--commit {args.commit}", fix=fix)
    traces, backend = _traces_of_folder(args.folder), chosen_backend(args)
    rows = []
    with _graded(args, backend) as (grader, names), progress_bar(quiet=args.quiet) as report:
        for number, trace in enumerate(traces, start=1):
            rows.append(proven(trace, grader, names, backend, (args.repository, args.commit)))
            if report is not None:
                report(number, len(traces), "sessions")
    rewrite_jsonl(args.folder / BINDINGS_NAME, rows)
    bound, problems = [row for row in rows if not row["problem"]], Counter(row["problem"] for row in rows)
    del problems[""]
    if not bound:
        fix = "--tasks STORE, or --repository FOLDER --commit SHA"
        problem = f"no session is bound to a tree: {dict(problems)}."
        raise NothingToDoError("CR0942", problem, where=str(args.folder), fix=fix)
    sums = {key: sum(row[key] for row in bound) for key in ("steps", "reproduced_steps")}
    result = {
        "sessions": len(bound),
        "not_bound": dict(problems),
        **sums,
        "executable_steps": sum(len(row["executable"]) for row in bound),
        "calls": dict(sum((Counter(row["calls"]) for row in bound), Counter())),
        **given_up(),
    }
    return result, 0


@contextmanager
def _graded(args: argparse.Namespace, backend: str) -> Iterator[tuple[Any, dict[str, str]]]:
    """What runs the tests of the tasks of ``--tasks``, and the names of those; None and no names without the flag."""
    from composer_replication.rollouts.grading import Grader
    from composer_replication.tasks.store import TaskStore
    from composer_replication.traces.state_binding import task_names

    if args.tasks is None:
        yield None, {}
        return
    with closing(Grader(TaskStore.open(args.tasks), backend=backend)) as grader:
        yield grader, task_names(grader)


def render_bind(result: dict[str, Any]) -> str:
    """The share that was reproduced, and why others were not."""
    share = 100 * result["reproduced_steps"] / max(1, result["steps"])
    same = f"{result['reproduced_steps']} of {result['steps']} steps reproduced ({share:.0f}%)"
    lines = [
        f"{result['sessions']} session(s): {same}, {result['executable_steps']} executable",
        *(f"  {number:>7}  call(s): {what}" for what, number in result["calls"].items()),
    ]
    return "\n".join(lines + [f"not bound: {number}, {why}" for why, number in result["not_bound"].items()])


def run_replay(args: argparse.Namespace) -> tuple[dict[str, object], int]:
    """Ask teachers; exit code 6 where the budget or a teacher ended early.

    Raises:
        UsageError: a number out of range, an unknown teacher (CR0206), or a teacher that is none (CR0944).
        InputError: no traces (CR0942), no store (CR0410).
        NothingToDoError: no step is worth asking about (CR0942), or no teacher answered (CR0944).
    """
    import asyncio

    from composer_replication.traces.branches import replay_cost
    from composer_replication.traces.prompts import chosen_steps

    chosen = chosen_steps(_traces_of_folder(args.folder), args.max_steps, takes_all=args.every_step)
    if not chosen:
        problem = "no step is worth asking about: no errors, objections or edits."
        raise NothingToDoError("CR0942", problem, where=str(args.folder), fix="--every-step")
    room = _open_room(args)
    try:
        cost = replay_cost(chosen, room)
        if args.dry_run:
            return {"dry_run": True, **cost, "cost_usd": 0.0, "cached": 0, "failed": 0}, 0
        return asyncio.run(_replay(args, room, chosen, cost))
    finally:
        room.store.close()


def _open_room(args: argparse.Namespace) -> Classroom:
    from composer_replication.traces.teachers import AnswerStore, Classroom, open_teacher

    try:
        keys = dict(text.split("=", 1) for text in args.key)
        prices = {name: _price(value) for name, value in (text.split("=", 1) for text in args.price)}
    except ValueError as error:
        problem, fix = "--key or --price is not as it should be.", "--key NAME=VARIABLE, --price NAME=3/15"
        raise UsageError("CR0206", problem, where="--price", fix=fix) from error
    teachers = [open_teacher(text, keys, prices) for text in args.teacher]
    names = [teacher.name for teacher in teachers]
    unknown = {*keys, *prices, *filter(None, [args.goes_on])} - set(names)
    if unknown or len(set(names)) < len(names):
        problem = f"there is no teacher {min(unknown)!r}." if unknown else "two teachers have one name."
        fix = "--teacher NAME=URL#MODEL, each with a name of its own"
        raise UsageError("CR0206", problem, where="--teacher", fix=fix)
    store = AnswerStore(args.folder / ANSWERS_NAME, max_dollars=args.budget_usd, max_tokens=args.max_tokens)
    return Classroom(teachers, store, max_tokens=args.answer_tokens, max_concurrent=args.concurrent)


def _price(text: str) -> tuple[float, float]:
    dollars_in, dollars_out = map(float, text.split("/"))
    if not (0 <= dollars_in < float("inf") and 0 <= dollars_out < float("inf")):
        raise ValueError
    return dollars_in, dollars_out


async def _replay(
    args: argparse.Namespace, room: Classroom, chosen: Sequence[Any], cost: Mapping[str, Any]
) -> tuple[dict[str, object], int]:
    from composer_replication.traces.branches import replay_steps

    with progress_bar(quiet=args.quiet) as report:
        branchings, is_spent = await replay_steps(
            chosen, room, first_decides=args.first_decides, report=report
        )
        if not is_spent and not any(_came_back(teacher.counts) for teacher in room.teachers.values()):
            reasons = {name: each.left_out or dict(each.counts) for name, each in room.teachers.items()}
            fix = "check address, model and key of each, and whether its server runs."
            raise NothingToDoError("CR0944", f"no teacher answered: {reasons}.", where="--teacher", fix=fix)
        rewrite_jsonl(args.folder / REPLAY_NAME, [each.row() for each in branchings])
        result: dict[str, object] = {"dry_run": False, **cost}
        if args.tasks is not None:
            executed, was_spent = await _execute(args, room, branchings, report)
            is_spent = is_spent or was_spent
            result |= executed
    dollars, tokens = room.store.spent()
    teachers = {
        name: {**teacher.counts, "left_out": teacher.left_out} for name, teacher in room.teachers.items()
    }
    result |= {
        "answers": sum(answer is not None for branching in branchings for _, answer in branching.answers),
        "others": sum(len(branching.others) for branching in branchings),
        "cost_usd": dollars,
        "tokens": tokens,
        "cached": sum(teacher.counts["cached"] for teacher in room.teachers.values()),
        "failed": sum(
            sum(teacher.counts.values()) - _came_back(teacher.counts) for teacher in room.teachers.values()
        ),
        "budget_is_spent": is_spent,
        "teachers": teachers,
    }
    is_whole = not is_spent and not any(teacher.left_out for teacher in room.teachers.values())
    return result, 0 if is_whole else _INCOMPLETE


def _came_back(counts: Mapping[str, int]) -> int:
    """Whole answers, those that ran out of tokens among them."""
    return sum(
        n for what, n in counts.items() if what in ("answered", "cached") or what.startswith("cut-off")
    )


async def _execute(
    args: argparse.Namespace, room: Classroom, branchings: Sequence[Any], report: Any
) -> tuple[dict[str, object], bool]:
    from composer_replication.rollouts.environment.feature_deletion_env import FeatureDeletionEnv
    from composer_replication.traces.branches import Execution, execute
    from composer_replication.traces.teachers import BudgetSpent

    done: list[dict[str, Any]] = []
    is_spent = False
    with _graded(args, chosen_backend(args)) as (grader, names):
        bound = [each for each in branchings if each.trace.state.task_id in names]
        goes_on = args.goes_on or next(iter(room.teachers))
        attempt = partial(FeatureDeletionEnv, grader, monitor="off")
        how = Execution(attempt, names, room, goes_on, args.tries, args.horizon)
        try:
            for branching in bound:
                done.append(await execute(branching, how))
                if report is not None:
                    report(len(done), len(bound), "executed")
        except BudgetSpent:
            is_spent = True
    rewrite_jsonl(args.folder / VERDICTS_NAME, done)
    decisions = Counter(verdict["decision"] for row in done for verdict in row["verdicts"])
    return {
        "not_bound": len(branchings) - len(bound),
        "executed": sum(bool(row["verdicts"]) for row in done),
        "not_executed": dict(Counter(row["problem"] for row in done if row["problem"])),
        "recorded_calls": sum(row["calls"] for row in done),
        "reproduced_calls": sum(row["reproduced"] for row in done),
        "verdicts": dict(decisions),
        **given_up(),
    }, is_spent


def render_replay(result: dict[str, Any]) -> str:
    """What was asked, what it cost, and what the tests said."""
    most = f"at most {result['most_dollars']:.2f} dollars and {result['most_tokens']} tokens"
    if result["dry_run"]:
        return f"{result['steps']} step(s), {result['calls']} call(s), {most}. Nothing was sent."
    lines = [
        f"{result['steps']} step(s): {result['answers']} answer(s), {result['others']} of them do something else.",
        f"Spent {result['cost_usd']:.4f} dollars and {result['tokens']} tokens in all.",
    ]
    for name, teacher in result["teachers"].items():
        counts = ", ".join(f"{number} {what}" for what, number in teacher.items() if what != "left_out")
        left_out = f"; LEFT OUT: {teacher['left_out']}" if teacher["left_out"] else ""
        lines.append(f"{name}: {counts}{left_out}")
    if "verdicts" in result:
        same = f"{result['reproduced_calls']} of {result['recorded_calls']} calls"
        verdicts = ", ".join(f"{number} {what}" for what, number in result["verdicts"].items()) or "none"
        lines += [f"Recorded results reproduced: {same}.", f"Verdicts: {verdicts}"]
        others = {**result["not_executed"], "of no task of the store": result["not_bound"]}
        lines += [f"not executed: {number}, {why}" for why, number in others.items() if number]
    if result["budget_is_spent"]:
        lines.append("The budget is spent: raise --budget-usd or --max-tokens and give the command again.")
    return "\n".join(lines)


def run_pairs(args: argparse.Namespace) -> tuple[dict[str, object], int]:
    """Write preference pairs.

    Raises:
        InputError: no traces (CR0942), a split or a store that cannot be used.
        NothingToDoError: no pair was found (CR0942).
        MissingError: Parquet needs pyarrow (CR0101).
    """
    from composer_replication.traces import pair_rules

    traces = _all_traces(args.folders)
    by_id = {trace.trace_id: trace for trace in traces}
    verdicts = [
        json.loads(line)
        for folder in args.folders
        if (folder / VERDICTS_NAME).is_file()
        for line in (folder / VERDICTS_NAME).read_text().splitlines()
    ]
    found = [*pair_rules.executed_pairs(by_id, verdicts), *pair_rules.sibling_pairs(traces)]
    found += pair_rules.objection_pairs(traces)
    rows, dropped = pair_rules.balanced(found, _heldout_rows(args))
    return _written(args, rows, dropped, "pairs")


def run_sft(args: argparse.Namespace) -> tuple[dict[str, object], int]:
    """Write chat rows of passing attempts; raises as ``run_pairs``."""
    from composer_replication.traces.pair_rules import sft_rows

    rows, dropped = sft_rows(_all_traces(args.folders), _heldout_rows(args))
    return _written(args, rows, dropped, "rows")


def render_rows(result: dict[str, Any]) -> str:
    """How many were written, and why others were not."""
    by_source = ", ".join(f"{number} {source}" for source, number in result["sources"].items())
    lines = [f"{result.get('pairs') or result['rows']} row(s) ({by_source}): {result['out']}"]
    return "\n".join(lines + [f"dropped: {number}, {why}" for why, number in result["dropped"].items()])


def _traces_of_folder(folder: Path) -> list[Trace]:
    """Of a folder into which the verb will write; a file is refused before anything runs."""
    if folder.is_file():
        problem = "this is a file; what is found out is written beside the sessions, into their folder."
        fix = f"composer-rl traces ingest {shlex.quote(str(folder))} --out DIR"
        raise InputError("CR0942", problem, where=str(folder), fix=fix)
    return _all_traces([folder])


def _all_traces(folders: Sequence[Path]) -> list[Trace]:
    from composer_replication.traces.ingest import read_traces

    return [trace for folder in folders for trace in read_traces(folder)]


def _heldout_rows(args: argparse.Namespace) -> Callable[[Sequence[Mapping[str, Any]]], set[int]]:
    """Finds rows of held-out tasks by their id, and by their code in any text of the row."""
    if (args.split is None) != (args.tasks is None):
        fix = "--tasks STORE --split STORE/split.json"
        raise UsageError("CR0206", "--split and --tasks go together.", where="--split", fix=fix)
    if args.split is None:
        return lambda _: set()
    from composer_replication.cli.task_division import open_split, split_items
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
            HeldoutSplit(own, split_items(store, map(store.get, heldout)))
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
    args: argparse.Namespace, rows: list[dict[str, Any]], dropped: Mapping[str, int], what: str
) -> tuple[dict[str, object], int]:
    from composer_replication.traces.pair_rules import write_rows

    dropped = {why: number for why, number in dropped.items() if number}
    if not rows:
        problem = f"no {what.removesuffix('s')} was found; dropped: {dropped or 'nothing'}."
        fix = "composer-rl traces replay DIR --teacher … --tasks STORE executes branches first."
        raise NothingToDoError("CR0942", problem, where=str(args.folders[0]), fix=fix)
    is_file = args.out.suffix in (".jsonl", ".parquet")
    path = args.out if is_file else args.out / f"{what}.jsonl"
    write_rows(path, rows)
    sources = dict(Counter(row.get("source", "passing attempts") for row in rows))
    result = {what: len(rows), "sources": sources, "dropped": dropped, "out": str(path)}
    if not is_file:
        write_json(args.out / "summary.json", result)
    return result, 0


def run_show(args: argparse.Namespace) -> tuple[dict[str, object], int]:
    """Write the page; raises as ``read_traces``."""
    from composer_replication.report.trace_page import write_trace_page
    from composer_replication.traces.ingest import read_traces

    num_sessions = write_trace_page(args.folder, read_traces(args.folder), args.out)
    return {"page": str(args.out), "sessions": num_sessions}, 0


def render_show(result: dict[str, Any]) -> str:
    """Where it is."""
    return f"{result['sessions']} session(s): {result['page']}"
