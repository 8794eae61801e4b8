"""Find the repository of a SWE-bench row at its base commit: in a folder of the user, else by git."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from composer_replication.errors import InputError
from composer_replication.tasks.fresh_git import has_fresh_git
from composer_replication.tasks.intake.archives import ARCHIVE_SUFFIXES
from composer_replication.tasks.intake.git_source import is_bare
from composer_replication.tasks.swebench.swebench_files import Instance

REMOTE = "git+https://github.com/{repo}@{commit}"
"""Where the published sets come from; a row names its repository as OWNER/NAME there."""
_SHORT_IDS = (12, 10, 8, 7)
_FULL_ID = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


def base_source(instance: Instance, folder: Path | None) -> str:
    """A SOURCE for the base tree of a row.

    In ``folder`` the row ``OWNER/NAME`` at ``COMMIT`` may be ``OWNER__NAME``, ``OWNER-NAME`` or
    ``NAME``, with or without ``-COMMIT`` (short ids too): a folder, an archive, or a clone with
    that commit in it. A name with the commit wins. A plain folder is taken at its word: what
    shows that it is the base is that the patches apply and the tests behave as stated.

    Args:
        instance: the row.
        folder: where repositories lie; None for none.

    Raises:
        InputError: it is not there, and the row names no repository and commit for git (CR0460).
    """
    for path in _candidates(instance, folder):
        if _is_clone(path):
            if _FULL_ID.fullmatch(instance.base_commit):
                return f"git+file://{path.resolve()}@{instance.base_commit}"
        elif path.is_dir() or path.is_file():
            return str(path)
    if instance.repo.count("/") == 1 and re.fullmatch(r"[0-9a-f]{40}", instance.base_commit):
        return REMOTE.format(repo=instance.repo, commit=instance.base_commit)
    raise InputError(
        "CR0460",
        f"there is no repository for {instance.repo} at {instance.base_commit[:12]}.",
        where=str(folder or ""),
        fix=f"--repositories FOLDER with {_stems(instance)[0]}-{instance.base_commit[:12]}, a folder, an archive or a clone.",
    )


def _stems(instance: Instance) -> list[str]:
    owner, _, name = instance.repo.rpartition("/")
    return [f"{owner}__{name}", f"{owner}-{name}", name] if owner else [name]


def _candidates(instance: Instance, folder: Path | None) -> Iterator[Path]:
    if folder is None:
        return
    commit = instance.base_commit
    shorter = [commit[:length] for length in _SHORT_IDS if len(commit) > length]
    for ending in (*(f"-{part}" for part in (commit, *shorter)), ""):
        for stem in _stems(instance):
            yield from (folder / f"{stem}{ending}{suffix}" for suffix in ("", ".git", *ARCHIVE_SUFFIXES))


def _is_clone(path: Path) -> bool:
    """Whether git may find the commit there; a tree that was exported has a ``.git`` without history."""
    has_history = (path / ".git").exists() and not has_fresh_git(path)
    return path.is_dir() and (is_bare(path) or has_history)
