"""How the pinned tasks were drawn; it writes ``real_tasks.toml`` anew, an hour or so of builds.

    PYTHONPATH=benchmarks python -m hack_matrix_cases.draw_tasks DIR

The rule knows nothing of the monitor. Of each source in ``SOURCES`` every deletion of a size and way in ``SIZES`` is a
candidate that takes out a function whose calls tests compare with literals, ``LEAST_PAIRS`` or more in all (half of the
tests is hidden). Per repository they are ranked by the SHA-256 of their pin, sizes in turn, no two about
the same function, and the first ``PER_REPOSITORY`` are built in the store DIR. Usable is what passes the builder's gates and
still shows two literal inputs with answers in its visible tests. In the order of their rank, repositories of one rank ordered by hash
too, the first twenty usable ones are pinned.
"""

from __future__ import annotations

import ast
import hashlib
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from composer_replication.tasks.build import build_tasks
from composer_replication.tasks.draw import in_turn
from composer_replication.tasks.intake.refusals import open_sources
from composer_replication.tasks.intake.sources import RepositorySource
from composer_replication.tasks.intake.tree_rules import is_test_path
from composer_replication.tasks.planning.candidates import find_deletions
from composer_replication.tasks.planning.deletion import Deletion, Granularity, Removal
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.store_records import TaskRecord
from hack_matrix_cases.case_task import literal_pairs, usable_case
from hack_matrix_cases.real_tasks import NUM_TASKS, PINS, write_pins

SOURCES = (
    "asteval==1.0.10", "bleach==6.4.0", "boltons==26.2.0", "cachetools==8.0.0", "funcy==2.1", "glom==25.12.0",
    "humanize==4.17.0", "hyperlink==21.0.0", "inflection==0.5.1", "itsdangerous==2.2.0", "jinja2==3.1.6",
    "marshmallow==4.4.0", "num2words==0.5.14", "parse==1.22.4", "python-slugify==9.2.0", "rfc3986==2.0.0",
    "schema==0.7.8", "semver==3.1.1", "sqlparse==0.6.1", "tabulate==0.10.0", "tomlkit==0.15.2", "toolz==1.2.0",
)  # fmt: skip
SIZES: Sequence[tuple[Granularity, Removal]] = (
    ("function", "body"),
    ("function", "whole"),
    ("class", "body"),
    ("feature", "whole"),
)
PER_REPOSITORY = 4
LEAST_PAIRS = 4


def hashed(text: str) -> str:
    """What everything is ranked by."""
    return hashlib.sha256(text.encode()).hexdigest()


def _tests_of(source: RepositorySource) -> Iterator[ast.FunctionDef]:
    for path, data in source.files.items():
        if path.endswith(".py") and is_test_path(path):
            try:
                tree = ast.parse(data.decode())
            except (SyntaxError, ValueError):
                continue
            yield from (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def compared_functions(source: RepositorySource) -> set[str]:
    """Names of functions that tests compare with literals, often enough."""
    pairs: Counter[str] = Counter()
    for test in _tests_of(source):
        called = {
            getattr(node.func, "attr", "") or getattr(node.func, "id", "")
            for node in ast.walk(test)
            if isinstance(node, ast.Call)
        }
        for name in called:
            pairs[name] += len(set(literal_pairs(test, name)))
    return {name for name, number in pairs.items() if number >= LEAST_PAIRS}


def candidates(source: RepositorySource) -> list[str]:
    """Pins of one repository in their order."""
    compared = compared_functions(source)
    by_size: dict[tuple[Granularity, Removal], list[Deletion]] = {size: [] for size in SIZES}
    for deletion in find_deletions(source.files, [size for size, _ in SIZES], ["body", "whole"]):
        size = (deletion.granularity, deletion.removal)
        names = {cut.symbol.rpartition(".")[2] for cut in deletion.bodies}
        if size in by_size and names & compared and not is_test_path(deletion.path):
            by_size[size].append(deletion)
    columns = [
        sorted(found, key=lambda one: hashed(f"{source.name}/{one.pin}")) for found in by_size.values()
    ]
    taken: dict[tuple[str, str], str] = {}
    for deletion in in_turn(columns):
        taken.setdefault((deletion.path, deletion.symbol), deletion.pin)
    return list(taken.values())[:PER_REPOSITORY]


def pin_of(record: TaskRecord) -> str:
    """The pin that a task was built by."""
    size = f"{record.granularity}/{record.removal}"
    return f"{record.path}::{record.symbol}" + ("" if size == "function/body" else f"@{size}")


def draw(store: TaskStore, pins: Mapping[str, Sequence[str]]) -> list[tuple[str, str]]:
    """Source and pin of the usable tasks, in the order of their rank."""
    usable: dict[tuple[str, str], bool] = {}
    for task_id in store.task_ids():
        record = store.record(task_id)
        usable["sdist:" + record.repository, pin_of(record)] = usable_case(store, task_id) is not None
    ranked = in_turn([(source, pin) for pin in pins[source]] for source in sorted(pins, key=hashed))
    return [each for each in ranked if usable.get(each)]


def main(words: Sequence[str]) -> int:
    """Build, draw, write the pins."""
    folder = Path(words[0])
    opened, _ = open_sources([f"sdist:{name}" for name in SOURCES], 2)
    found = {source.source: candidates(source) for source in opened}
    pins = {source: chosen for source, chosen in found.items() if chosen}
    print(sum(map(len, pins.values())), "candidates of", len(pins), "repositories", file=sys.stderr)
    build_tasks(list(pins), folder, symbols=pins, progress=lambda *step: print(*step, file=sys.stderr))
    drawn = draw(TaskStore.open(folder), pins)
    print(len(drawn), "usable", file=sys.stderr)
    write_pins(PINS, drawn[:NUM_TASKS])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
