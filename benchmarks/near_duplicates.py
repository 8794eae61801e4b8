"""Which changed copies HeldoutSplit finds, and which foreign functions it takes for copies.

    python benchmarks/near_duplicates.py [--functions 30000] [--sample 1500] [--seed 0] [--show 0]

Real functions: those of the standard library and of the packages that this project's
environment has anyway, without tests. The body of each (what a task deletes) is compared

- with versions of itself: written out anew by ``ast.unparse`` (no comments, other quotes,
  brackets and line ends), with every parameter and local variable renamed, with every
  number and string changed, with both, with one statement less on top of both, and the
  half of its statements in front of another function's;
- with the bodies of all functions of other packages: all pairs, not a sample.

A pair of two packages that is taken for a copy may be one: code is copied between packages.
``same_name`` counts those whose functions have one name, and ``--show`` prints the others.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import random
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from composer_replication.safety.code_tokens import line_words, logical_lines
from composer_replication.safety.split_overlaps import (
    MIN_SHARED_WORDS,
    NEAR_DUPLICATE_PERCENT,
    SHARED_WORDS_PERCENT,
    Alike,
    Member,
    containment_matches,
    jaccard_matches,
)
from composer_replication.safety.split_tasks import MIN_SHINGLES, SHINGLE_TOKENS, TaskReader, shingles

PACKAGES = (
    "click coverage hypothesis jinja2 networkx packaging pandas pydantic pygments requests rich tqdm".split()
)
NOT_CODE = {"test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip", "_vendor", "site-packages"}
LENGTHS = (3, 5, 7)
THRESHOLDS = (50, 60, 70, 80)


@dataclass(frozen=True)
class Function:
    """One function: its package (for the standard library, its module), its name, node and body."""

    package: str
    name: str
    node: ast.FunctionDef
    body: str


def functions(root: Path, packages: Sequence[str] | None = None) -> Iterator[Function]:
    """All functions below a folder, docstrings aside, in the order of their files."""
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        if NOT_CODE & set(inside.parts) or (packages is not None and inside.parts[0] not in packages):
            continue
        try:
            text = path.read_text()
            module = ast.parse(text)
        except (SyntaxError, ValueError):
            continue
        lines = text.splitlines(keepends=True)
        for node in ast.walk(module):
            if isinstance(node, ast.FunctionDef) and statements(node):
                body = "".join(lines[statements(node)[0].lineno - 1 : node.end_lineno])
                yield Function(inside.parts[0], node.name, node, body)


def statements(node: ast.FunctionDef) -> list[ast.stmt]:
    """The body without its docstring."""
    return node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body


def written(node: ast.FunctionDef) -> str:
    """The body, written out anew."""
    return "\n".join(ast.unparse(statement) for statement in statements(node))


class Renamed(ast.NodeTransformer):
    """Every parameter and local variable gets another name."""

    def __init__(self, node: ast.FunctionDef) -> None:
        names = {each.arg for each in ast.walk(node) if isinstance(each, ast.arg)}
        names |= {
            each.id
            for each in ast.walk(node)
            if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
        }
        self.names = {name: f"renamed_{number}" for number, name in enumerate(sorted(names))}

    def visit_Name(self, node: ast.Name) -> ast.Name:
        node.id = self.names.get(node.id, node.id)
        return node

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.arg = self.names.get(node.arg, node.arg)
        return node


class OtherConstants(ast.NodeTransformer):
    """Every number is one more, every string is longer; f-strings stay."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.JoinedStr:
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        if isinstance(node.value, str):
            node.value += "x"
        elif isinstance(node.value, int | float) and not isinstance(node.value, bool):
            node.value += 1
        return node


def versions(function: Function, rng: random.Random) -> Iterator[tuple[str, str]]:
    """Name and body of each changed copy."""
    node = function.node
    renamed = Renamed(node).visit(copy.deepcopy(node))
    both = OtherConstants().visit(copy.deepcopy(renamed))
    yield "written out anew", written(node)
    yield "renamed", written(renamed)
    yield "other constants", written(OtherConstants().visit(copy.deepcopy(node)))
    yield "renamed, other constants", written(both)
    if len(statements(both)) >= 4:
        both.body.remove(rng.choice(statements(both)))
        yield "both, one statement less", written(both)


def words(text: str, *, blind: bool) -> list[str]:
    """Tokens with or without the names of variables and the values of constants."""
    return [word for line in logical_lines(text) for word in line_words(line, blind=blind)]


def jaccard(one: frozenset[int], other: frozenset[int]) -> float:
    """Size of what they share, over size of both together."""
    return len(one & other) / len(one | other)


def found_versions(
    sample: Sequence[Function], length: int, seed: int, *, blind: bool
) -> dict[str, list[float]]:
    """Jaccard index of each function with each version of itself."""
    rng = random.Random(seed)
    found = defaultdict(list)
    for function in sample:
        own = shingles(words(function.body, blind=blind), length)
        if len(own) >= MIN_SHINGLES:
            for name, body in versions(function, rng):
                found[name].append(jaccard(own, shingles(words(body, blind=blind), length)))
    return dict(found)


def foreign_pairs(everything: Sequence[Function], matches: Iterator[Alike]) -> set[tuple[int, int]]:
    """Pairs of functions of two packages among the matches."""
    found = set()
    for ours, theirs in matches:
        for one, other in ((int(a), int(b)) for a in ours for b in theirs):
            if one < other and everything[one].package != everything[other].package:
                found.add((one, other))
    return found


def counted(
    everything: Sequence[Function], pairs: set[tuple[int, int]], num_compared: int
) -> dict[str, object]:
    """The pairs in figures."""
    num_same = sum(everything[one].name == everything[other].name for one, other in pairs)
    return {
        "functions": num_compared,
        "pairs_compared_millions": round(num_compared * (num_compared - 1) / 2e6),
        "taken_for_copies": len(pairs),
        "same_name": num_same,
    }


def near_duplicate_rows(
    everything: Sequence[Function], sample: Sequence[Function], seed: int, num_shown: int
) -> Iterator[dict[str, object]]:
    """One row for each length of a shingle, with and without blindness."""
    for blind, lengths in ((False, (SHINGLE_TOKENS,)), (True, LENGTHS)):
        for length in lengths:
            yield {
                "shingle": length,
                "blind_to_names_and_constants": blind,
                "found_percent": {
                    name: {
                        f"at {percent}": round(
                            100 * sum(100 * index >= percent for index in indices) / len(indices), 1
                        )
                        for percent in THRESHOLDS
                    }
                    for name, indices in found_versions(sample, length, seed, blind=blind).items()
                },
            }
    for length in LENGTHS:
        shapes = [shingles(words(function.body, blind=True), length) for function in everything]
        members = [Member(str(n), own) for n, own in enumerate(shapes) if len(own) >= MIN_SHINGLES]
        pairs = foreign_pairs(everything, jaccard_matches(members, members, min(THRESHOLDS)))
        index = {pair: jaccard(shapes[pair[0]], shapes[pair[1]]) for pair in pairs}
        for percent in THRESHOLDS:
            near = {pair for pair in pairs if 100 * index[pair] >= percent}
            yield {"shingle": length, "threshold": percent, **counted(everything, near, len(members))}
            if (length, percent) == (SHINGLE_TOKENS, NEAR_DUPLICATE_PERCENT):
                show(everything, near, num_shown, random.Random(seed))


def golden_line_rows(
    everything: Sequence[Function], sample: Sequence[Function], seed: int, num_shown: int
) -> Iterator[dict[str, object]]:
    """How often half a body in front of a foreign one is found, and what is taken for it wrongly."""
    all_lines = [golden_lines(function.body) for function in everything]
    weight = {line: number for lines in all_lines for line, number in lines.items()}
    members = [Member(str(n), frozenset(lines)) for n, lines in enumerate(all_lines)]
    rng, num_tried, num_found = random.Random(seed), 0, 0
    for function in sample:
        parts, foreign = statements(function.node), rng.choice(everything)
        own = golden_lines(function.body)
        if foreign.package == function.package or len(parts) < 2 or sum(own.values()) < 2 * MIN_SHARED_WORDS:
            continue
        half = "\n".join(ast.unparse(part) for part in parts[: (len(parts) + 1) // 2])
        lines = golden_lines(f"{half}\n{foreign.body}")
        both = [Member("own", frozenset(own))], [Member("version", frozenset(lines))]
        num_tried += 1
        num_found += any(containment_matches(*both, SHARED_WORDS_PERCENT, {**own, **lines}, MIN_SHARED_WORDS))
    yield {"golden_lines": "half of a body before a foreign one", "tried": num_tried, "found": num_found}
    for least in (4, 6, MIN_SHARED_WORDS, 12):
        matches = containment_matches(members, members, SHARED_WORDS_PERCENT, weight, least)
        pairs = foreign_pairs(everything, matches)
        yield {
            "golden_lines": "foreign functions",
            "least_words": least,
            **counted(everything, pairs, len(members)),
        }
        if least == MIN_SHARED_WORDS:
            show(everything, pairs, num_shown, rng)


def golden_lines(body: str) -> Mapping[int, int]:
    """The lines by which a split compares a golden, with their words."""
    tasks = [SimpleNamespace(task_id="one", golden=body)]
    return TaskReader(check_content=True).read(tasks, "tasks")[0].golden_lines


def show(everything: Sequence[Function], pairs: set[tuple[int, int]], num: int, rng: random.Random) -> None:
    """Print some pairs whose functions have two names, to look at."""
    others = sorted(pair for pair in pairs if everything[pair[0]].name != everything[pair[1]].name)
    for pair in rng.sample(others, min(num, len(others))):
        for each in (everything[number] for number in pair):
            print(f"---- {each.package}: {each.name}\n{each.body.rstrip()[:600]}", file=sys.stderr)
        print("====", file=sys.stderr)


def main() -> None:
    """Print one JSON line a row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--functions", type=int, default=30000, help="at most so many, drawn by the seed")
    parser.add_argument("--sample", type=int, default=1500, help="functions that are changed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", type=int, default=0, help="pairs to print on standard error")
    arguments = parser.parse_args()
    everything = list(functions(Path(sysconfig.get_path("stdlib"))))
    everything += functions(Path(sysconfig.get_path("purelib")), PACKAGES)
    rng = random.Random(arguments.seed)
    rng.shuffle(everything)
    del everything[arguments.functions :]
    sample = everything[: arguments.sample]
    print(
        json.dumps({"python": sys.version.split()[0], "functions": len(everything), "changed": len(sample)})
    )
    for rows in (near_duplicate_rows, golden_line_rows):
        for row in rows(everything, sample, arguments.seed, arguments.show):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
