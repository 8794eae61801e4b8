"""The static graph of a repository: which names denote one symbol, where, and who uses it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from composer_replication.tasks.intake.source_folders import recorded_folders
from composer_replication.tasks.intake.tree_rules import is_subject_path
from composer_replication.tasks.planning.source_file import ImportedName, SourceFile, Use
from composer_replication.tasks.planning.source_reader import read_source

Name = tuple[str, str]
"""A dotted module and a module-level name in it."""


@dataclass(frozen=True, slots=True)
class Reach:
    """Everything through which some symbols can be had.

    ``names`` are all (module, name) that denote one of them; ``aliases`` the imported names
    that bring them there, in every file, tests included.
    """

    names: frozenset[Name]
    aliases: tuple[tuple[SourceFile, ImportedName], ...]


class SymbolGraph:
    """All Python files that can be read, and how their names hang together.

    ``files`` are by path. A stub file (``.pyi``) has the module name of its source. Tests are
    part of the graph but ``sources`` leaves them out.
    """

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.files: dict[str, SourceFile] = {}
        roots = recorded_folders(files)
        for path in sorted(files):
            if path.endswith((".py", ".pyi")):
                found = read_source(path, files[path], roots)
                if found is not None:
                    self.files[path] = found
        self.by_module: dict[str, list[SourceFile]] = defaultdict(list)
        self._importers: dict[tuple[str, str | None], list[tuple[SourceFile, ImportedName]]] = defaultdict(
            list
        )
        self._targets: dict[str, list[tuple[SourceFile, ImportedName]]] = defaultdict(list)
        self._uses: dict[str, list[tuple[SourceFile, Use]]] = defaultdict(list)
        for file in self.files.values():
            self.by_module[file.module].append(file)
            for imported in file.imports:
                self._importers[imported.target, imported.name].append((file, imported))
                self._targets[imported.target].append((file, imported))
            if not file.is_test and not file.is_stub:
                for use in file.uses:
                    self._uses[use.identifier].append((file, use))
        self._exported_anywhere = {
            (file.module, name) for file in self.files.values() for name in file.exported
        }

    @property
    def sources(self) -> list[SourceFile]:
        """Runnable source files, in order of path: no tests, no stubs."""
        return [file for file in self.files.values() if not file.is_test and not file.is_stub]

    @property
    def subjects(self) -> list[SourceFile]:
        """The source files whose definitions may be taken out."""
        return [file for file in self.sources if is_subject_path(file.path)]

    def uses_of(self, identifier: str) -> list[tuple[SourceFile, Use]]:
        """Every occurrence of an identifier in source files."""
        return self._uses.get(identifier, [])

    def importers_of(self, name: Name) -> list[tuple[SourceFile, ImportedName]]:
        """Every ``from module import name``."""
        return self._importers.get(name, [])

    def star_exports(self, module: str, name: str) -> bool:
        """Whether ``from module import *`` brings the name."""
        listed = [file.exported for file in self.by_module.get(module, []) if file.exports]
        return any(name in exported for exported in listed) if listed else not name.startswith("_")

    def reach(self, names: Iterable[Name], modules: Iterable[str] = ()) -> Reach:
        """Follow imports, re-exports and star imports from some names, and from modules that go altogether."""
        pending = list(names)
        aliases: dict[tuple[str, int, int], tuple[SourceFile, ImportedName]] = {}
        found: set[Name] = set()

        def arrive(file: SourceFile, imported: ImportedName) -> None:
            statement = imported.statement
            aliases[file.path, id(statement), imported.index] = (file, imported)
            is_renamed = statement.names[imported.index].asname is not None
            binds = is_renamed if imported.name is None else imported.name != "*"
            if imported.is_module_level and binds:
                pending.append((file.module, imported.bound))

        for module in modules:
            parent, _, last = module.rpartition(".")
            for file, imported in [*self._targets.get(module, []), *self._importers.get((parent, last), [])]:
                arrive(file, imported)
        while pending:
            name = pending.pop()
            if name in found:
                continue
            found.add(name)
            for file, imported in self._importers.get(name, []):
                arrive(file, imported)
            for file, imported in self._importers.get((name[0], "*"), []):
                if imported.is_module_level and self.star_exports(*name):
                    pending.append((file.module, name[1]))
        return Reach(frozenset(found), tuple(aliases[key] for key in sorted(aliases)))

    def is_own_api(self, name: Name) -> bool:
        """Whether a name is offered by itself: in an ``__all__``, or re-exported by a package."""
        reach = self.reach([name])
        if not reach.names.isdisjoint(self._exported_anywhere):
            return True
        packages = {module for module, _ in reach.names if module != name[0]}
        return any(
            file.is_package and not file.is_test for module in packages for file in self.by_module[module]
        )

    def resolve(self, file: SourceFile, chain: str) -> str:
        """The absolute dotted text of ``a.b`` as one file sees it; its own names get its module in front."""
        root, _, rest = chain.partition(".")
        found = self._step(file.module, root)
        if found == f"{file.module}.{root}" and any(
            imported.bound == root and imported.name is None for imported in file.imports
        ):
            found = root  # ``import root.other`` binds the root
        for part in filter(None, rest.split(".")):
            found = self._step(found, part)
        return found

    def _step(self, module: str, name: str, hops: int = 9) -> str:
        """What ``module.name`` is called at home: an import there is followed, a submodule is not."""
        here = f"{module}.{name}"
        if here in self.by_module or not hops:
            return here
        for file in self.by_module.get(module, []):
            for imported in file.imports:
                if imported.bound != name or imported.name == "*":
                    continue
                if imported.name is not None:
                    return self._step(imported.target, imported.name, hops - 1)
                if imported.statement.names[imported.index].asname:
                    return imported.target
        return here
