"""What can be taken out of a repository: at four sizes, in two ways.

function   one function or method
class      a class, all its methods
module     everything that a file defines
feature    a public symbol with everything that only it needs, across files

body       each function keeps its signature and docstring and raises ``NotImplementedError``
whole      the definitions are gone, with their re-exports, ``__all__`` entries and imports
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Literal, get_args

from composer_replication.records import Edit
from composer_replication.tasks.planning.body_cuts import BodyCut

Granularity = Literal["function", "class", "module", "feature"]
Removal = Literal["body", "whole"]
SIZES: tuple[tuple[Granularity, Removal], ...] = tuple(product(get_args(Granularity), get_args(Removal)))


@dataclass(frozen=True, slots=True)
class Deletion:
    """One candidate: what is taken out, as edits of the original files.

    ``path`` and ``symbol`` name what it is about (a module's symbol is its dotted name).
    ``edits`` change source files; ``removed_files`` are gone altogether and
    have no edits. ``bodies`` are the cuts of all functions inside, in original offsets: with
    ``removal`` body they are the edits; with whole they make the stubs that must fail.
    ``test_edits`` let test files be collected without the deleted names: an import moves into
    the tests that use it. ``functions`` are path and first line of all functions taken out.
    """

    path: str
    symbol: str
    granularity: Granularity
    removal: Removal
    edits: tuple[Edit, ...]
    bodies: tuple[BodyCut, ...]
    removed_files: tuple[str, ...] = ()
    test_edits: tuple[Edit, ...] = ()

    @property
    def pin(self) -> str:
        """Its name in a build: ``path::symbol``, with ``@size/way`` unless it is a function's body."""
        is_plain = self.granularity == "function" and self.removal == "body"
        return f"{self.path}::{self.symbol}" + ("" if is_plain else f"@{self.granularity}/{self.removal}")

    @property
    def functions(self) -> frozenset[tuple[str, int]]:
        """Path and first line of every function whose code is taken out."""
        return frozenset((cut.path, cut.first_line) for cut in self.bodies)

    @property
    def source_files(self) -> tuple[str, ...]:
        """The files that it touches, tests aside, sorted."""
        return tuple(sorted({*(edit.path for edit in self.edits), *self.removed_files}))

    def golden_code(self, original: Mapping[str, bytes]) -> str:
        """The deleted text, span after span. Never to be shown to a policy."""
        spans = [original[edit.path].decode()[edit.start : edit.end] for edit in self.edits]
        return "\n".join(
            [*spans, *(original[path].decode("utf-8", "replace") for path in self.removed_files)]
        )


def body_deletion(cut: BodyCut) -> Deletion:
    """The deletion of one function's body."""
    return Deletion(cut.path, cut.symbol, "function", "body", (cut.edit,), (cut,))
