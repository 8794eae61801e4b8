"""``composer-rl traces``: recorded sessions in, teachers asked, branches executed, preference pairs out."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer_replication.cli.isolation_flags import add_isolation_flags

if TYPE_CHECKING:
    from composer_replication.traces.teachers import Classroom
    from composer_replication.traces.trace_records import Trace

_HERE = "composer_replication.cli.traces_verb"
REPLAY_NAME, VERDICTS_NAME, ANSWERS_NAME = "replay.jsonl", "verdicts.jsonl", "answers.sqlite"
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
    _add_replay(verbs, common)
    for name, what in (("pairs", "preference pairs"), ("sft", "chat rows of passing attempts")):
        made = verbs.add_parser(
            name,
            parents=[common],
            help=f"write {what}",
            description=f"Write {what}, for TRL and for our own trainer.",
        )
        made.add_argument(
            "folders",
            metavar="DIR",
            type=Path,
            nargs="+",
            help="folders of traces ingest, or files of trajectories",
        )
        made.add_argument(
            "--out", type=Path, required=True, metavar="FILE", help="FILE.parquet or FILE.jsonl"
        )
        made.add_argument(
            "--tasks", type=Path, metavar="STORE", help="the task store, for the held-out tasks of --split"
        )
        made.add_argument(
            "--split", type=Path, metavar="FILE", help="a split: nothing of its held-out tasks is written"
        )
        made.set_defaults(run=f"{_HERE}:run_{name}", render=f"{_HERE}:render_rows")
    show = verbs.add_parser(
        "show",
        parents=[common],
        help="write one HTML page",
        description="Sessions, steps, branches and verdicts on one self-contained page.",
    )
    show.add_argument("folder", metavar="DIR", type=Path)
    show.add_argument("--out", type=Path, required=True, metavar="PAGE.html")
    show.set_defaults(run=f"{_HERE}:run_show", render=f"{_HERE}:render_show")


def _add_ingest(verbs: Any, common: argparse.ArgumentParser) -> None:
    parser = verbs.add_parser(
        "ingest",
        parents=[common],
        help="read sessions of any known format",
        description="Read sessions, take keys, addresses and home folders out, leave duplicates out, and write ATIF lines.",
    )
    parser.add_argument("paths", metavar="PATH", type=Path, nargs="+", help="files and folders")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--format", metavar="NAME", default="", help="read as this format, where two fit")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes (default 2)")
    parser.set_defaults(run=f"{_HERE}:run_ingest", render=f"{_HERE}:render_ingest")


def _add_replay(verbs: Any, common: argparse.ArgumentParser) -> None:
    parser = verbs.add_parser(
        "replay",
        parents=[common],
        help="ask teachers what they would have done, and execute it",
        description="Ask OpenAI-compatible teachers about the steps that matter; with --tasks the answers are executed from the "
        "recorded state and compared. Answers are kept in DIR: the same command again asks nothing twice and goes on.",
    )
    parser.add_argument("folder", metavar="DIR", type=Path, help="of traces ingest")
    parser.add_argument(
        "--teacher", action="append", required=True, metavar="NAME=URL#MODEL", help="any number of times"
    )
    parser.add_argument(
        "--key",
        action="append",
        default=[],
        metavar="NAME=VARIABLE",
        help="environment variable with a teacher's key",
    )
    parser.add_argument(
        "--price", action="append", default=[], metavar="NAME=IN/OUT", help="dollars a million tokens"
    )
    parser.add_argument(
        "--max-dollars", type=float, default=5.0, metavar="X", help="budget, never passed (default 5)"
    )
    parser.add_argument(
        "--max-tokens", type=int, default=20_000_000, metavar="N", help="budget (default 20 million)"
    )
    parser.add_argument(
        "--max-steps", type=int, default=200, metavar="N", help="steps that are asked about (default 200)"
    )
    parser.add_argument(
        "--answer-tokens", type=int, default=2048, metavar="N", help="most of one answer (default 2048)"
    )
    parser.add_argument(
        "--concurrent", type=int, default=8, metavar="N", help="requests at a time, each teacher (default 8)"
    )
    parser.add_argument(
        "--every-step", action="store_true", help="also steps where nothing went wrong and nothing was edited"
    )
    parser.add_argument(
        "--first-decides",
        action="store_true",
        help="ask the others only where the first teacher parts from the recording",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="say steps, calls and the most that they can cost; send nothing",
    )
    parser.add_argument(
        "--tasks", type=Path, metavar="STORE", help="execute branches of sessions on these tasks"
    )
    parser.add_argument(
        "--goes-on",
        default="",
        metavar="NAME",
        help="the teacher that plays a branch on (default: the first)",
    )
    parser.add_argument(
        "--tries", type=int, default=4, metavar="N", help="executions of each branch (default 4)"
    )
    parser.add_argument(
        "--horizon", type=int, default=6, metavar="N", help="answers after the branch (default 6)"
    )
    add_isolation_flags(parser)
    parser.set_defaults(run=f"{_HERE}:run_replay", render=f"{_HERE}:render_replay")


def run_ingest(args: argparse.Namespace) -> tuple[dict[str, object], int]:
    """Read sessions into a folder.

    Raises:
        UsageError: an unknown ``--format`` or ``--jobs`` below 1 (CR0206).
        InputError: a path that is not there (CR0941), or a named file that two formats fit (CR0940).
        NothingToDoError: nothing of a known format, or no answer of a model (CR0942).
    """
    from composer_replication.cli.output_folder import refuse_unwritable
    from composer_replication.cli.progress_bar import progress_bar
    from composer_replication.errors import UsageError
    from composer_replication.traces.ingest import FORMATS, ingest

    names = [kind.name for kind in FORMATS]
    if args.format and args.format not in names:
        raise UsageError(
            "CR0206",
            f"there is no format {args.format!r}.",
            where="--format",
            fix=f"one of {', '.join(names)}",
        )
    if args.jobs < 1:
        raise UsageError("CR0206", f"--jobs {args.jobs} is below 1.", where="--jobs", fix="--jobs 2")
    refuse_unwritable(args.out)
    with progress_bar(quiet=args.quiet, after_seconds=1.0) as report:
        return ingest(args.paths, args.out, only=args.format, num_processes=args.jobs, report=report), 0


def render_ingest(result: dict[str, Any]) -> str:
    """The sum of all records, and what was taken out."""
    total = max(1, result["records"])
    became = [
        f"  {number:>9}  {100 * number / total:5.1f}%  {what}" for what, number in result["became"].items()
    ]
    lost = [f"  {number:>9}  {what}" for what, number in result["redactions"].items() if number]
    left = [f"left out: {number} file(s), {what}" for what, number in result["files_left_out"].items()]
    twice = ", ".join(f"{number} {what}" for what, number in result["duplicates"].items()) or "none"
    return "\n".join(
        [
            f"{result['files']} file(s), {result['bytes']} bytes: {', '.join(result['formats'])}",
            f"{result['records']} records became",
            *became,
            f"duplicates left out: {twice} (near ones {result['near_duplicates']})",
            *(
                [
                    f"taken out, by rule; what stands for what is in {result['out']}/redactions.local.json",
                    *lost,
                ]
                if lost
                else []
            ),
            *left,
            f"{result['traces']} session(s), {result['steps']} answers, {result['calls']} calls, {result['failed_results']} of {result['results']} results failed: {result['out']}/traces.jsonl",
        ]
    )


def run_replay(args: argparse.Namespace) -> tuple[dict[str, object], int]:
    """Ask teachers; exit code 6 where the budget or a teacher ended early.

    Raises:
        UsageError: a number out of range, an unknown teacher (CR0206), or a teacher that is none (CR0944).
        InputError: no traces (CR0941), no store (CR0410).
        NothingToDoError: no step is worth asking about (CR0942), or no teacher answered (CR0944).
    """
    import asyncio

    from composer_replication.errors import NothingToDoError
    from composer_replication.traces.ingest import read_traces
    from composer_replication.traces.prompts import chosen_steps
    from composer_replication.traces.replay import replay_cost

    traces = list(read_traces(args.folder))
    chosen = chosen_steps(traces, args.max_steps, takes_all=args.every_step)
    if not chosen:
        raise NothingToDoError(
            "CR0942",
            "no step is worth asking about: no errors, objections or edits.",
            where=str(args.folder),
            fix="--every-step",
        )
    room = _open_room(args)
    try:
        cost = replay_cost(chosen, room)
        if args.dry_run:
            return {"dry_run": True, **cost}, 0
        return asyncio.run(_replay(args, room, chosen, cost))
    finally:
        room.close()


def _open_room(args: argparse.Namespace) -> Classroom:
    from composer_replication.errors import UsageError
    from composer_replication.traces.answer_store import AnswerStore
    from composer_replication.traces.teachers import Classroom, open_teacher

    keys = dict(_named(args.key, "--key", str))
    prices = dict(_named(args.price, "--price", _price))
    teachers = [open_teacher(text, keys, prices) for text in args.teacher]
    names = [teacher.name for teacher in teachers]
    unknown = {*keys, *prices, *([args.goes_on] if args.goes_on else [])} - set(names)
    if unknown or len(set(names)) < len(names):
        problem = f"there is no teacher {min(unknown)!r}" if unknown else "two teachers have one name"
        raise UsageError(
            "CR0206",
            f"{problem}.",
            where="--teacher",
            fix="--teacher NAME=URL#MODEL, each with a name of its own",
        )
    for flag in ("max_steps", "answer_tokens", "concurrent", "tries", "horizon"):
        if getattr(args, flag) < 1:
            raise UsageError(
                "CR0206", f"--{flag.replace('_', '-')} is below 1.", fix="leave it out: the default is good."
            )
    store = AnswerStore(args.folder / ANSWERS_NAME, max_dollars=args.max_dollars, max_tokens=args.max_tokens)
    return Classroom(teachers, store, max_tokens=args.answer_tokens, max_concurrent=args.concurrent)


def _named(texts: Sequence[str], flag: str, read: Callable[[str], Any]) -> list[tuple[str, Any]]:
    from composer_replication.errors import UsageError

    try:
        return [(name, read(value)) for name, value in (text.split("=", 1) for text in texts)]
    except ValueError as error:
        raise UsageError(
            "CR0206",
            f"{flag} is not as it should be.",
            where=flag,
            fix="--key NAME=VARIABLE, --price NAME=3/15",
        ) from error


def _price(text: str) -> tuple[float, float]:
    dollars_in, dollars_out = map(float, text.split("/"))
    if not (0 <= dollars_in < float("inf") and 0 <= dollars_out < float("inf")):
        raise ValueError
    return dollars_in, dollars_out


async def _replay(
    args: argparse.Namespace, room: Classroom, chosen: Sequence[Any], cost: Mapping[str, Any]
) -> tuple[dict[str, object], int]:
    from composer_replication.cli.progress_bar import progress_bar
    from composer_replication.errors import NothingToDoError
    from composer_replication.run_folder import rewrite_jsonl
    from composer_replication.traces.replay import branching_row, replay_steps

    with progress_bar(quiet=args.quiet) as report:
        branchings, is_spent = await replay_steps(
            chosen, room, first_decides=args.first_decides, report=report
        )
        if not is_spent and not any(_came_back(teacher.counts) for teacher in room.teachers.values()):
            reasons = {
                name: teacher.left_out or dict(teacher.counts) for name, teacher in room.teachers.items()
            }
            raise NothingToDoError(
                "CR0944",
                f"no teacher answered: {reasons}.",
                where="--teacher",
                fix="check address, model and key of each, and whether its server runs.",
            )
        rewrite_jsonl(args.folder / REPLAY_NAME, [branching_row(each) for each in branchings])
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
        "dollars": dollars,
        "tokens": tokens,
        "budget_is_spent": is_spent,
        "teachers": teachers,
    }
    is_whole = not is_spent and not any(teacher.left_out for teacher in room.teachers.values())
    return result, 0 if is_whole else _INCOMPLETE


def _came_back(counts: Mapping[str, int]) -> int:
    """Whole answers, those that ran out of tokens among them."""
    return sum(
        number
        for what, number in counts.items()
        if what in ("answered", "cached") or what.startswith("cut-off")
    )


async def _execute(
    args: argparse.Namespace, room: Classroom, branchings: Sequence[Any], report: Any
) -> tuple[dict[str, object], bool]:
    from collections import Counter

    from composer_replication.cli.isolation_flags import chosen_backend, given_up
    from composer_replication.rollouts.environment.feature_deletion_env import FeatureDeletionEnv
    from composer_replication.rollouts.grading import Grader
    from composer_replication.run_folder import rewrite_jsonl
    from composer_replication.tasks.store import TaskStore
    from composer_replication.traces.branches import Execution, execute, executed_row
    from composer_replication.traces.teachers import BudgetSpent

    backend = chosen_backend(args)
    store = TaskStore.open(args.tasks)
    known = set(store.task_ids())
    bound = [each for each in branchings if each.trace.state.task_id in known]
    grader = Grader(store, backend=backend)
    how = Execution(
        lambda: FeatureDeletionEnv(grader, monitor="off"),
        room,
        args.goes_on or next(iter(room.teachers)),
        args.tries,
        args.horizon,
    )
    done = []
    is_spent = False
    try:
        for number, branching in enumerate(bound, start=1):
            try:
                done.append(await execute(branching, how))
            except BudgetSpent:
                is_spent = True
                break
            if report is not None:
                report(number, len(bound), "executed")
    finally:
        grader.close()
    rewrite_jsonl(args.folder / VERDICTS_NAME, [executed_row(each) for each in done])
    decisions = Counter(verdict.decision for each in done for verdict in each.verdicts)
    return {
        "not_bound": len(branchings) - len(bound),
        "executed": sum(bool(each.verdicts) for each in done),
        "not_executed": dict(Counter(each.problem for each in done if each.problem)),
        "recorded_calls": sum(each.num_calls for each in done),
        "reproduced_calls": sum(each.num_same for each in done),
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
        f"Spent {result['dollars']:.4f} dollars and {result['tokens']} tokens in all.",
    ]
    for name, teacher in result["teachers"].items():
        counts = ", ".join(f"{number} {what}" for what, number in teacher.items() if what != "left_out")
        lines.append(
            f"{name}: {counts}" + (f"; LEFT OUT: {teacher['left_out']}" if teacher["left_out"] else "")
        )
    if "verdicts" in result:
        lines.append(
            f"Recorded results reproduced: {result['reproduced_calls']} of {result['recorded_calls']} calls."
        )
        lines.append(
            "Verdicts: "
            + (", ".join(f"{number} {what}" for what, number in result["verdicts"].items()) or "none")
        )
        lines += [f"not executed: {number}, {why}" for why, number in result["not_executed"].items()]
        lines += (
            [f"not executed: {result['not_bound']}, of no task of the store"] if result["not_bound"] else []
        )
    if result["budget_is_spent"]:
        lines.append(
            "The budget is spent: raise --max-dollars or --max-tokens and give the same command again."
        )
    return "\n".join(lines)


def run_pairs(args: argparse.Namespace) -> tuple[dict[str, object], int]:
    """Write preference pairs.

    Raises:
        InputError: no traces (CR0941), a split or a store that cannot be used.
        NothingToDoError: no pair was found (CR0942).
        MissingError: Parquet needs pyarrow (CR0101).
    """
    import json

    from composer_replication.traces.pair_rules import (
        balanced,
        executed_pairs,
        objection_pairs,
        sibling_pairs,
    )

    traces = _all_traces(args.folders)
    by_id = {trace.trace_id: trace for trace in traces}
    verdicts = [
        json.loads(line)
        for folder in args.folders
        if (folder / VERDICTS_NAME).is_file()
        for line in (folder / VERDICTS_NAME).read_text().splitlines()
    ]
    found = [*executed_pairs(by_id, verdicts), *sibling_pairs(traces), *objection_pairs(traces)]
    rows, dropped = balanced(found, _heldout_rows(args))
    return _written(args, rows, dropped, "pair")


def run_sft(args: argparse.Namespace) -> tuple[dict[str, object], int]:
    """Write chat rows of passing attempts; raises as ``run_pairs``."""
    from composer_replication.traces.pair_rules import sft_rows

    rows, dropped = sft_rows(_all_traces(args.folders), _heldout_rows(args))
    return _written(args, rows, dropped, "row")


def render_rows(result: dict[str, Any]) -> str:
    """How many were written, and why others were not."""
    by_source = ", ".join(f"{number} {source}" for source, number in result["sources"].items())
    lines = [f"{result['rows']} row(s) ({by_source}): {result['out']}"]
    return "\n".join(lines + [f"dropped: {number}, {why}" for why, number in result["dropped"].items()])


def _all_traces(folders: Sequence[Path]) -> list[Trace]:
    from composer_replication.traces.ingest import read_traces

    return [trace for folder in folders for trace in read_traces(folder)]


def _heldout_rows(args: argparse.Namespace) -> Callable[[Sequence[Mapping[str, Any]]], set[int]]:
    """Finds rows of held-out tasks by their id, and by their code in any text of the row."""
    from composer_replication.errors import UsageError

    if (args.split is None) != (args.tasks is None):
        raise UsageError(
            "CR0206",
            "--split and --tasks go together.",
            where="--split",
            fix="--tasks STORE --split STORE/split.json",
        )
    if args.split is None:
        return lambda _: set()
    from composer_replication.cli.stored_split import open_split, split_items
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
            HeldoutSplit(
                [_RowText(f"row-{place}", text) for place, text in enumerate(texts)],
                split_items(store, map(store.get, heldout)),
            )
        except SplitOverlapError as error:
            found |= {int(train.removeprefix("row-")) for _, train, _ in error.pairs}
        return found

    return find


def _lines(text: str) -> set[str]:
    return {line.strip() for line in text.splitlines()} - {""}


class _RowText:
    """A row's texts as a split compares them: as code."""

    def __init__(self, task_id: str, golden: str) -> None:
        self.task_id, self.golden = task_id, golden


def _texts(value: Any) -> str:
    """Every text inside, a line number before a line taken off: tools show files with them."""
    import re

    if isinstance(value, str):
        return re.sub(r"(?m)^\s*\d+[\t|:]\s?", "", value)
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return "\n".join(_texts(each) for each in inner)


def _written(
    args: argparse.Namespace, rows: list[dict[str, Any]], dropped: Mapping[str, int], what: str
) -> tuple[dict[str, object], int]:
    from collections import Counter

    from composer_replication.errors import NothingToDoError
    from composer_replication.traces.pair_rules import write_rows

    dropped = {why: number for why, number in dropped.items() if number}
    if not rows:
        raise NothingToDoError(
            "CR0942",
            f"no {what} was found; dropped: {dropped or 'nothing'}.",
            where=str(args.folders[0]),
            fix="composer-rl traces replay DIR --teacher … --tasks STORE executes branches first.",
        )
    write_rows(args.out, rows)
    sources = dict(Counter(row.get("source", "passing attempts") for row in rows))
    return {"rows": len(rows), "sources": sources, "dropped": dropped, "out": str(args.out)}, 0


def run_show(args: argparse.Namespace) -> tuple[dict[str, object], int]:
    """Write the page; raises as ``read_traces``."""
    from composer_replication.report.trace_page import write_trace_page
    from composer_replication.traces.ingest import read_traces

    num_sessions = write_trace_page(args.folder, read_traces(args.folder), args.out)
    return {"page": str(args.out), "sessions": num_sessions}, 0


def render_show(result: dict[str, Any]) -> str:
    """Where it is."""
    return f"{result['sessions']} session(s): {result['page']}"
