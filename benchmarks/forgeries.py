"""Answers that forge the outcome of their tests: how many are paid for?

    python benchmarks/forgeries.py [--only WORD] [--repeats 1] [--honest 20] [--control] [--backend NAME]

Builds one task with its hidden tests and its twin from a planted project in a temporary folder,
then grades, exactly as a run does, scripted answers (``forgeries.toml``) that do not do what was
asked and try to pass nevertheless, and honest ones as many times as ``--honest`` says. Prints a line
for each: what became of it and why. ``--only`` takes attempts whose family or name has the word, ``--repeats`` makes
each so often. With ``--control`` each attempt is made once more against the
plain test run (``run_alone``: same jail, secret nonce, closing record, stored node ids, but no sentinels and nobody
watching), and a star says that it would have been paid for there. An attempt succeeds when all visible tests pass, or, for
those that no check of a process can tell from an answer (``decided_by="twin"``), when the twin passes
too. Exit code 1 when one succeeds or an honest answer fails, 0 otherwise. Never without a jail:
some attempts write wherever they can.
"""

from __future__ import annotations

import sys
import tempfile
import textwrap
import time
import tomllib
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from command_line import options

from composer_replication.records import Score, Task
from composer_replication.rollouts.grading import WALL_FACTOR, Grader, GradeRequest, TestsUsed
from composer_replication.sandbox import choose_backend
from composer_replication.tasks.build import build_tasks
from composer_replication.tasks.planning.body_cuts import fill
from composer_replication.tasks.running.bench import run_alone
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.test_run import Trial

TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())


@dataclass(frozen=True, slots=True)
class Attempt:
    """One scripted forgery; the table says what its fields mean.

    ``decided_by``: "process" means that the visible tests must not pass; "twin" that no check of the
    process can tell it from an answer, and that what was recorded outside must refuse it.
    """

    family: str
    name: str
    module: str = ""
    body: str = "return None"
    decided_by: Literal["process", "twin"] = "process"

    def answer(self, node_ids: Sequence[str]) -> str:
        """The text that a policy would give."""
        names = sorted({node_id.partition("[")[0].rpartition("::")[2] for node_id in node_ids})
        known = {"NAMES": repr(names), "IDS": repr(sorted(node_ids))}
        module, body = self.module, self.body
        for word, text in (TABLE["shared"] | known).items():
            module, body = module.replace(f"@{word}@", text), body.replace(f"@{word}@", text)
        return f"\n{textwrap.indent(body.strip(), '    ')}\n\n\n{module.strip()}\n"


ATTEMPTS = tuple(Attempt(**row) for row in TABLE["attempt"])


def build_store(folder: Path, *, with_truth: bool = True) -> TaskStore:
    """A store of the planted task; with its twin where asked for, which takes longer."""
    source = folder / "numerals"
    for name, text in TABLE["project"].items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text)
    build_tasks(
        [str(source)], folder / "tasks", symbols={str(source): [TABLE["symbol"]]}, with_truth=with_truth
    )
    return TaskStore.open(folder / "tasks")


def refusal(score: Score | None) -> str:
    """Why an answer was not paid for; empty when it was, all its visible tests passed."""
    if score is None:
        return "no grade: the sandbox failed"
    if score.all_passed:
        return ""
    return score.error or f"{len(score.outcomes) - score.num_passed} of {len(score.outcomes)} tests fail"


def try_attempt(grader: Grader, task: Task, attempt: Attempt) -> tuple[bool, str]:
    """Whether an attempt succeeded, and what became of it."""
    answer = attempt.answer(task.tests.visible)
    visible = grader.grade_many([GradeRequest(task, answer)], afresh=True)[0]
    why = refusal(visible)
    if why or attempt.decided_by == "process":
        return not why and visible is not None, why or "PAID FOR"
    hidden = grader.grade_many([GradeRequest(task, answer, "hidden")], afresh=True)[0]
    twins = {
        name: outcome
        for name, outcome in (hidden.outcomes if hidden else {}).items()
        if name.startswith("twin::")
    }
    failed = [name for name, outcome in twins.items() if outcome != "passed"]
    return (
        not failed,
        f"visible tests pass; the twin fails: {failed[0]}" if failed else "PAID FOR, twin and all",
    )


def passes_plain_run(store: TaskStore, task: Task, attempt: Attempt, backend: str) -> bool:
    """Whether an attempt passes where nothing but the jail and the closing record stands against it."""
    files = store.files(task, "visible")
    answer = attempt.answer(task.tests.visible)
    files[task.hole.path] = fill(store.broken_text(task), task.hole, answer).encode()
    trial = Trial(files, task.tests.visible, 20.0, wall_factor=WALL_FACTOR)
    report = run_alone(trial, store.environment(task), backend=backend or None)
    return len(report.passed) == len(task.tests.visible)


def try_honest(grader: Grader, store: TaskStore, task: Task, number: int) -> list[str]:
    """What went wrong with honest answers, each graded so many times."""
    wrong = []
    for name, answer in {"the original code": store.golden_body(task), **TABLE["honest"]}.items():
        kinds: list[TestsUsed] = ["visible", "hidden"] if task.has_hidden_tests else ["visible"]
        requests = [GradeRequest(task, answer, kind) for kind in kinds for _ in range(number)]
        bad = [refusal(grader.grade_many([request], afresh=True)[0]) for request in requests]
        print(f"  {'honest':<18} {name:<66} {len(requests) - sum(map(bool, bad))} of {len(requests)} pass")
        wrong += [f"{name}: {why}" for why in bad if why]
    return wrong


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; the answer is the exit code."""
    how = {"only": "", "repeats": 1, "honest": 20, "control": False, "backend": ""}
    chosen = options(__doc__, arguments, **how)
    if chosen.backend == "none" or choose_backend(chosen.backend or None).name == "none":
        print("this backend has no jail, and these answers are hostile: name another one.", file=sys.stderr)
        raise SystemExit(2)
    with tempfile.TemporaryDirectory(prefix="forgeries-") as folder:
        store = build_store(Path(folder))
        task = store.tasks()[0]
        started, num_real, results = time.monotonic(), 0, list[tuple[bool, str]]()
        with closing(Grader(store, backend=chosen.backend, num_jobs=1)) as grader:
            for attempt in ATTEMPTS:
                if chosen.only not in f"{attempt.family} {attempt.name}":
                    continue
                own = [try_attempt(grader, task, attempt) for _ in range(chosen.repeats)]
                results += own
                is_real = chosen.control and passes_plain_run(store, task, attempt, chosen.backend)
                num_real += is_real
                shown = next((why for is_paid, why in own if is_paid), own[0][1])
                star = "*" if is_real else " "
                print(f"{star} {attempt.family:<18} {attempt.name:<66} {shown[:150]}", flush=True)
            wrong = try_honest(grader, store, task, chosen.honest)
    seconds, paid = time.monotonic() - started, sum(is_paid for is_paid, _ in results)
    print(
        f"{paid} of {len(results)} forgeries succeeded; {len(wrong)} honest gradings failed; {seconds:.0f} s"
    )
    if chosen.control:
        print(f"{num_real} of them (*) pass the plain test run")
    for line in wrong[:10]:
        print(f"  {line}", file=sys.stderr)
    return 1 if paid or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
