"""Turn a SWE-bench set into a task store: each row through the gates that our own tasks pass.

A row's original tree is base + test patch + patch; its broken tree is the original with the source edits of the patch
undone, which is a deletion of a feature like any other. Files that no task tree holds (documentation, version control) are
left out of the patches. A file that the patch deletes stays deleted: an edit of the original cannot bring it back.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from pathlib import Path, PurePosixPath
from typing import Any

from composer_replication.errors import InputError, UsageError
from composer_replication.records import Edit
from composer_replication.tasks.build import BuildSummary, check_arguments, open_build, summary_of
from composer_replication.tasks.build_state import Decision, Instance, Progress, Settings
from composer_replication.tasks.intake.archives import ARCHIVE_SUFFIXES
from composer_replication.tasks.intake.cache import sha256_of
from composer_replication.tasks.intake.sources import RepositorySource, open_source
from composer_replication.tasks.intake.tree_rules import (
    TreeRules,
    is_metadata_path,
    is_subject_path,
    is_test_path,
)
from composer_replication.tasks.leaks.shown_code import shows_any, spans_of
from composer_replication.tasks.patches import apply_patch
from composer_replication.tasks.planning.body_cuts import BodyCut, Deletion, find_body_cuts
from composer_replication.tasks.planning.edits import line_edits
from composer_replication.tasks.subject import GateFailed
from composer_replication.tasks.swebench.swebench_files import read_instances, tree_sha256

REMOTE = "git+https://github.com/{repo}@{commit}"
"""Where the published sets come from; a row names its repository as OWNER/NAME there."""
_FULL_ID = re.compile(r"[0-9a-f]{40}")
_SECTION = re.compile(r"^(?=diff --git )", re.MULTILINE)
_HEADER = re.compile(r'diff --git "?[a-z]/(.*?)"? "?[a-z]/(.*?)"?\r?$', re.MULTILINE)


def import_swebench(
    path: Path,
    out: Path,
    *,
    repositories: Path | None = None,
    jobs: int = 2,
    backend: str | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> BuildSummary:
    """Build a task store from a SWE-bench set.

    Rows with the same original tree share one repository, ``NAME==VERSION+HASH``. A row that cannot be used is counted
    under its reason, and the others go on: ``unreadable-row``, ``no-repository``, ``patch-fails``, ``nothing-to-undo``,
    ``not-text``, ``no-function``, ``statement-shows-code``, then the gates, where ``other-tests-fail`` says that the stated
    tests are not what was found, and the search for a truth beyond the reward (``no-truth``; see ``truth``).

    ``path`` is the set (``read_instances``), ``out`` the folder of the store, ``repositories`` one with the repositories
    (``base_source``). The other arguments and the errors are those of ``build_tasks``, but ``with_truth`` is usual here;
    without it rows are kept whose tests cannot be parted and whose functions cannot be recorded. CR0460 is a set of which
    no row can be read, or a folder that does not exist.
    """
    if repositories is not None and not repositories.is_dir():
        detail, fix = (
            "the folder of repositories does not exist.",
            "leave --repositories out to fetch them by git.",
        )
        raise UsageError("CR0460", detail, where=str(repositories), fix=f"give an existing folder, or {fix}")
    asked = Settings(**{"with_truth": True, **settings})
    check_arguments([str(path)], asked, jobs)
    instances, unreadable = read_instances(path)
    opened, proposals, refused = _propose_all(instances, repositories, progress)
    refused += [_refusal(row, "", row[0], "unreadable-row", row[1]) for row in unreadable.items()]
    # Of a source that has pins nobody notes what its tests call; this one names no size, so nothing is planned.
    asked = replace(asked, symbols={source.source: ("given@",) for source in opened})
    with open_build(out, asked, jobs=jobs, backend=backend, progress=progress) as run:
        ready = run.prepare_all(opened) if opened else {}
        run.decide(
            [
                run.candidate(ready[source], deletion, is_pinned=True, instance=instance)
                for source, instance, deletion in proposals
                if source in ready
            ]
        )
        for source, instance, deletion in proposals:
            if source not in ready:
                digest, error = instance.digest(deletion), run.unusable[source]
                why = {"reason": error.reason, "detail": error.detail}
                run.decisions.append(Decision(digest, source, instance.instance_id, **why))
        run.decisions += refused
        run.unusable.clear()  # each of its candidates counts, not the repository
    return summary_of(run)


def _propose_all(
    instances: Sequence[Instance], repositories: Path | None, progress: Progress | None
) -> tuple[list[RepositorySource], list[tuple[str, Instance, Deletion]], list[Decision]]:
    """The repositories of all rows, each once; the candidates, with the names of their repositories; the rows that are none."""
    opened: dict[str, RepositorySource] = {}
    proposals: list[tuple[str, Instance, Deletion]] = []
    refused: list[Decision] = []
    pool: dict[bytes, bytes] = {}  # commits differ in few files: what two of them have is kept once
    # Rows of one commit stand together; a thousand trees need not stay in memory.
    open_once = lru_cache(maxsize=1)(open_source)
    for done, instance in enumerate(instances):
        if progress is not None:
            progress(done, len(instances), "rows")  # each may be fetched
        try:
            source, deletion = propose(instance, open_once(base_source(instance, repositories)), pool)
            proposals.append((opened.setdefault(source.source, source).source, instance, deletion))
        except InputError as error:
            why = "no-repository", f"{error.message} ({error.where})"
            refused.append(_refusal(instance, instance.repo, instance.instance_id, *why))
        except GateFailed as error:
            why = error.reason, error.detail
            refused.append(_refusal(instance, instance.repo, instance.instance_id, *why))
    return list(opened.values()), proposals, refused


def _refusal(row: object, repository: str, name: str, reason: str, detail: str) -> Decision:
    return Decision(sha256_of(f"{row}".encode())[:32], repository, name, reason=reason, detail=detail)


def base_source(instance: Instance, folder: Path | None) -> str:
    """A SOURCE for the base tree of a row.

    In ``folder`` the row ``OWNER/NAME`` at ``COMMIT`` may be ``OWNER__NAME`` or ``NAME``, with or without ``-COMMIT``: a
    folder, an archive, or a clone with that commit in it. A name with the commit wins. A folder of anything else is taken
    at its word: what shows that it is the base is that the patches apply and the tests behave as stated.
    """
    commit, name = instance.base_commit, instance.repo.rpartition("/")[2]
    stems = dict.fromkeys([instance.repo.replace("/", "__"), name])
    parts = product((f"-{commit}", f"-{commit[:12]}", ""), stems, ("", ".git", *ARCHIVE_SUFFIXES))
    for path in (folder / f"{stem}{one}{suffix}" for one, stem, suffix in parts) if folder else ():
        if _FULL_ID.fullmatch(commit) and any((path / name).exists() for name in (".git", "HEAD")):
            return f"git+file://{path.resolve()}@{commit}"
        if path.is_dir() or path.is_file():
            return str(path)
    if instance.repo.count("/") == 1 and _FULL_ID.fullmatch(commit):
        return REMOTE.format(repo=instance.repo, commit=commit)
    raise InputError(
        "CR0460",
        f"there is no repository for {instance.repo} at {commit[:12]}.",
        where=str(folder or ""),
        fix=f"--repositories FOLDER with {name}-{commit[:12]}, a folder, an archive or a clone.",
    )


def propose(
    instance: Instance, base: RepositorySource, pool: dict[bytes, bytes]
) -> tuple[RepositorySource, Deletion]:
    """The original repository of a row, and the deletion that it asks for; ``pool`` has every file that was seen."""
    broken = _patched(instance, "test_patch", {**base.metadata, **base.files})
    golden = _patched(instance, "patch", broken)
    source = _golden_source(
        base, {name: pool.setdefault(data, data) for name, data in sorted(golden.items())}
    )
    deletion = make_deletion(source.files, broken)
    texts = {name: source.files[name].decode() for name in deletion.changes.source_files}
    spans = spans_of(texts, deletion.changes, [cut.edit for cut in deletion.bodies])
    if shows_any(instance.problem_statement, spans):
        raise GateFailed("statement-shows-code", "the problem statement holds the code that is asked for")
    return source, deletion


def _patched(instance: Instance, name: str, files: dict[str, bytes]) -> dict[str, bytes]:
    """A tree, sources and metadata together, with one of the row's patches in it."""
    patch: str = getattr(instance, name)
    try:
        return apply_patch(files, _inside(patch and patch.removesuffix("\n") + "\n", files))
    except InputError as error:
        raise GateFailed("patch-fails", f"{instance.instance_id}, {name}: {error.message}") from error


def _inside(patch: str, files: Mapping[str, bytes]) -> str:
    """The parts of a patch whose files belong to a task tree; a part of another form stays, for git to say so."""
    parts = [(part, _HEADER.match(part)) for part in _SECTION.split(patch)]
    names = {name for _, found in parts if found for name in found.groups()}
    rules = TreeRules(names.union(files))
    kept = {
        name
        for name in names
        for path in (PurePosixPath(name),)
        if rules.belongs(path) or is_metadata_path(path)
    }
    return "".join(part for part, found in parts if not found or not kept.isdisjoint(found.groups()))


def _golden_source(base: RepositorySource, golden: Mapping[str, bytes]) -> RepositorySource:
    """The original tree as a repository of its own, named by its content."""
    rules = TreeRules(golden)
    files = {
        name: data
        for name, data in golden.items()
        if rules.belongs(PurePosixPath(name)) or (name in base.files and name not in base.metadata)
    }
    metadata = {name: data for name, data in golden.items() if is_metadata_path(PurePosixPath(name))}
    digest = tree_sha256({name: sha256_of(data) for name, data in {**metadata, **files}.items()})
    version = f"{base.version or '0'}+{digest[:8]}"
    return replace(
        base, source=f"{base.name}=={version}", version=version, sha256=digest, files=files, metadata=metadata
    )


def make_deletion(original: Mapping[str, bytes], broken: Mapping[str, bytes]) -> Deletion:
    """The deletion that leads from an original tree back to a broken one, tests left as they are.

    It is called after the first function that it touches.
    """
    changed = [name for name, data in sorted(original.items()) if data != broken.get(name)]
    sources = [name for name in changed if not is_test_path(name)]
    removed = tuple(name for name in sources if name not in broken)
    edits: list[Edit] = []
    bodies: list[BodyCut] = []
    for name in sources:
        try:
            text = original[name].decode()
            own = () if name in removed else line_edits(name, text, broken[name].decode())
        except UnicodeDecodeError as error:
            raise GateFailed("not-text", f"{name} is not UTF-8") from error
        edits += own
        spans = [(0, len(text))] if name in removed else [(edit.start, edit.end) for edit in own]
        cuts = find_body_cuts(name, text) if is_subject_path(name) else []
        # A line that the broken tree adds counts too.
        bodies += [cut for cut in cuts if any(start <= cut.end and end >= cut.start for start, end in spans)]
    if not sources:
        raise GateFailed("nothing-to-undo", "the patch changes no source file of the tree")
    if not bodies:
        raise GateFailed("no-function", "the patch changes no function, so no stub can be told from it")
    first = bodies[0]
    return Deletion(first.path, first.symbol, "feature", "whole", tuple(edits), tuple(bodies), removed)
