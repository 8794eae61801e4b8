"""What the behavioural twin adds to visible tests, repository by repository.

    python benchmarks/twin_strength.py [inflection==0.5.1 ...] [--mutants 6] [--functions 0] [--module strutils]

For each repository it builds the twins of all functions and prints how many have one, the calls
that they hold, and seconds; then, function by function, it puts faults into the golden body and
counts who notices: the visible tests (all tests that call the function), the twin, both. A lookup
solver that knows every recorded call shows what passing the visible tests is worth.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from composer_replication.tasks.intake.environment import Environment, open_environment
from composer_replication.tasks.intake.sources import open_source
from composer_replication.tasks.intake.tree_rules import is_subject_path
from composer_replication.tasks.planning.body_cuts import BodyCut, find_body_cuts
from composer_replication.tasks.repository import lock_repository
from composer_replication.tasks.test_run import run_tests
from composer_replication.tasks.twin.build_twins import Twin, build_twins, is_candidate, judge_twin
from composer_replication.tasks.twin.lookup_solver import lookup_files, visible_calls
from composer_replication.tasks.twin.mutants import mutants_of, passes_tests, passes_twin, strength
from composer_replication.tasks.views import write_files

REPOSITORIES = ("inflection==0.5.1", "funcy==2.1", "toolz==1.2.0", "boltons==26.2.0", "cachetools==8.0.0")
TEST_SECONDS = 60.0


@dataclass
class Figures:
    """The counts of one repository."""

    counts: Counter[str] = field(default_factory=Counter)
    lookup_shares: list[float] = field(default_factory=list)
    survivors: list[str] = field(default_factory=list)


def passed_tests(
    files: Mapping[str, bytes], environment: Environment, tests: Sequence[str]
) -> frozenset[str]:
    """Which of the tests pass in a tree."""
    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder) / "tree", files)
        report = run_tests(Path(folder) / "tree", environment, tests, timeout_seconds=TEST_SECONDS)
    return frozenset() if report.error else report.passed


def measure_function(  # noqa: PLR0917  the whole bench of one function
    files: Mapping[str, bytes],
    environment: Environment,
    cut: BodyCut,
    twin: Twin,
    max_mutants: int,
    figures: Figures,
) -> None:
    """Golden once more, the lookup solver, and the mutants of one function."""
    counts = figures.counts
    golden = judge_twin(files, environment, twin, timeout_seconds=TEST_SECONDS)
    counts["golden_agree"] += golden.recorded_agree + golden.mutated_agree
    counts["golden_vectors"] += golden.num_recorded + golden.num_mutated
    figures.lookup_shares.append(twin.lookup_failing_share)
    visible = sorted(
        passed_tests(files, environment, sorted({test for tests in twin.tests for test in tests}))
    )
    if not visible:
        counts["functions_without_a_green_test"] += 1
        return
    text = files[cut.path].decode()
    broken = {**files, cut.path: cut.break_text(text).encode()}
    solved = lookup_files(broken, cut, visible_calls(files, environment, twin))
    if len(passed_tests(solved, environment, visible)) == len(visible):
        counts["lookups_pass_visible"] += 1
        score = judge_twin(solved, environment, twin, timeout_seconds=TEST_SECONDS)
        counts["of_these_fail_twin"] += not score.passed
    found = strength(
        mutants_of(text, cut, max_mutants=max_mutants),
        passes_tests(files, cut, visible, environment, timeout_seconds=TEST_SECONDS),
        passes_twin(files, cut, twin, environment),
    )
    counts["functions_judged"] += 1
    counts["mutants"] += found.num_mutants
    counts["killed_visible"] += found.killed_by_visible
    counts["killed_twin"] += found.killed_by_hidden
    counts["killed_both"] += found.killed_by_both
    figures.survivors += [f"{cut.pin}:{mutant.line}: {mutant.operator}" for mutant in found.survivors]


def measure(repository: str, module: str, max_mutants: int, max_functions: int) -> dict[str, object]:
    """All figures of one repository."""
    source = open_source(f"sdist:{repository}")
    environment = open_environment(lock_repository(source))
    cuts = {
        cut.pin: cut
        for path, data in source.files.items()
        if is_subject_path(path) and module in path
        for cut in find_body_cuts(path, data.decode())
    }
    reasons: dict[str, str] = {}
    started = time.perf_counter()
    twins = build_twins(source.files, environment, list(cuts.values()), note=reasons.__setitem__)
    build_seconds = time.perf_counter() - started
    figures = Figures()
    started = time.perf_counter()
    for pin in list(twins)[: max_functions or None] if max_mutants else ():
        measure_function(source.files, environment, cuts[pin], twins[pin], max_mutants, figures)
    return {
        "repository": repository + (f" {module}" if module else ""),
        "functions": len(cuts),
        "candidates": sum(map(is_candidate, cuts.values())),
        "twins": len(twins),
        "median_recorded": statistics.median(len(twin.recorded) for twin in twins.values()) if twins else 0,
        "median_mutated": statistics.median(len(twin.mutated) for twin in twins.values()) if twins else 0,
        "vectors": sum(len(twin.vectors) for twin in twins.values()),
        "build_seconds": round(build_seconds, 1),
        "judge_seconds": round(time.perf_counter() - started, 1),
        "median_lookup_failing": statistics.median(figures.lookup_shares) if figures.lookup_shares else None,
        **figures.counts,
        "reasons": dict(Counter(reasons.values())),
        "survivors": figures.survivors,
    }


def share(row: Mapping[str, object], name: str) -> str:
    """A share of the mutants in percent."""
    killed, total = row.get(name, 0), row.get("mutants", 0)
    return f"{100 * int(str(killed)) / int(str(total)):.0f} %" if total else "-"


def main() -> None:
    """Measure and print one row a repository, then everything as JSON lines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("repositories", nargs="*", default=list(REPOSITORIES))
    parser.add_argument("--mutants", type=int, default=6, help="at most so many a function; 0: build alone")
    parser.add_argument("--functions", type=int, default=0, help="judge so many a repository; 0: all")
    parser.add_argument("--module", default="", help="only files whose path holds this")
    chosen = parser.parse_args()
    rows = []
    print("| repository | candidates | twins | recorded / mutated (median) | build s | golden | lookups that pass visible, fail twin | mutants | visible | twin | visible and twin |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for repository in chosen.repositories:
        row = measure(repository, chosen.module, chosen.mutants, chosen.functions)
        rows.append(row)
        cells = [
            row["repository"], row["candidates"], row["twins"], f"{row['median_recorded']} / {row['median_mutated']}",
            row["build_seconds"], f"{row.get('golden_agree', 0)}/{row.get('golden_vectors', 0)}",
            f"{row.get('lookups_pass_visible', 0)}, {row.get('of_these_fail_twin', 0)}", row.get("mutants", 0),
            share(row, "killed_visible"), share(row, "killed_twin"), share(row, "killed_both"),
        ]  # fmt: skip
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)
    for row in rows:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
