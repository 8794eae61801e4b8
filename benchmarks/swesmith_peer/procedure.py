"""What swesmith does with a repository: draws rewrites, validates them, stores and delivers the tasks."""

from __future__ import annotations

import io
import json
import os
import subprocess
import tarfile
import tempfile
import venv
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer_replication.sandbox.process_folder import process_folder
from composer_replication.tasks.intake.environment import Environment
from composer_replication.tasks.intake.sources import RepositorySource
from composer_replication.tasks.intake.tree_rules import is_subject_path
from composer_replication.tasks.store_records import RepositoryRecord
from composer_replication.tasks.test_run import NOTHING_COLLECTED, TestReport, run_tests
from composer_replication.tasks.views import write_files
from swesmith_peer.robbery import Tree

FOLDER = Path(__file__).parent
SUITE_SECONDS = 90.0
"""``RepoProfile.timeout``: how long swesmith waits for one suite; a rewrite that loops takes all of it."""
GIT_NAMES = {
    f"GIT_{who}_{what}": "swesmith"
    for who in ("AUTHOR", "COMMITTER")
    for what in ("NAME", "EMAIL")
} | {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull}  # fmt: skip


@dataclass(frozen=True)
class Bench:
    """One prepared repository, the same for both sides."""

    source: RepositorySource
    record: RepositoryRecord
    environment: Environment
    seconds: float
    store: Path

    @property
    def subjects(self) -> list[str]:
        return [path for path in self.source.files if is_subject_path(path)]


def last_words(done: subprocess.CompletedProcess[str]) -> str:
    """Why a command failed, in a line; empty when it did not."""
    lines = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("[notice]")]
    return (lines or ["no message"])[-1].strip() if done.returncode else ""


@contextmanager
def peer_python(given: str) -> Iterator[Path]:
    """An interpreter that has swesmith: the given one, or one made for this run."""
    with tempfile.TemporaryDirectory(prefix="swesmith-") as folder:
        python = Path(given) if given else Path(folder) / "bin" / "python"
        problem = ""
        if not given:
            venv.create(folder, with_pip=True)
            command = [str(python), "-m", "pip", "install", "-q", "-r", str(FOLDER / "requirements.txt")]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            problem = last_words(done)
        if not problem:
            check = [str(python), str(FOLDER / "modifiers.py"), "--check"]
            try:
                done = subprocess.run(check, capture_output=True, text=True, check=False)
                problem = last_words(done)
            except OSError as error:
                problem = str(error)
        if problem:
            raise SystemExit(
                f"swesmith cannot be run ({problem}): give --swesmith-python the path of an interpreter that"
                f" has what {FOLDER / 'requirements.txt'} lists."
            )
        yield python


def draw_rewrites(bench: Bench, python: Path, number: int, seed: int) -> dict[str, Any]:
    """The answer of ``modifiers.py``."""
    with tempfile.TemporaryDirectory(prefix="peer-", dir=process_folder()) as folder:
        root, request, answer = (Path(folder) / name for name in ("tree", "request.json", "answer.json"))
        write_files(root, bench.source.files)
        request.write_text(
            json.dumps({"root": str(root), "paths": bench.subjects, "number": number, "seed": seed})
        )
        command = [str(python), "-X", "utf8", str(FOLDER / "modifiers.py"), str(request), str(answer)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"swesmith's modifiers ended with an error: {done.stderr.strip()[-500:]}")
        found: dict[str, Any] = json.loads(answer.read_text())
        return found


def judge_rewrite(
    report: TestReport, green: frozenset[str], broken_files: Sequence[str]
) -> tuple[str, list[str], list[str]]:
    """Why it is no task (empty: it is one), FAIL_TO_PASS, PASS_TO_PASS."""
    known = green & set(report.collected)
    failing, passing = sorted(known - report.passed), sorted(known & report.passed)
    reason = ""
    if "longer than" in report.error:
        reason = "runs too long"
    elif report.error and not report.error.startswith(NOTHING_COLLECTED):
        reason = "run fails"
    elif report.error or set(report.collect_errors) - set(broken_files):
        reason = "does not collect"
    elif not failing:
        reason = "no failing test"
    elif not passing:
        reason = "nothing passes"
    return reason, failing, passing


def validate_rewrite(
    bench: Bench, rewrite: Mapping[str, str], suite_seconds: float
) -> tuple[str, list[str], list[str]]:
    """Run the whole suite over one rewrite."""
    with tempfile.TemporaryDirectory(prefix="peer-", dir=process_folder()) as folder:
        tree = Path(folder) / "tree"
        write_files(tree, {**bench.source.files, rewrite["path"]: rewrite["new_text"].encode()})
        report = run_tests(tree, bench.environment, None, timeout_seconds=suite_seconds)
    return judge_rewrite(report, bench.record.green, bench.record.broken_files)


def row_of(
    bench: Bench, number: int, rewrite: Mapping[str, str], failing: list[str], passing: list[str]
) -> dict[str, Any]:
    """A task as ``harness.gather`` stores it."""
    repository = f"swesmith__{bench.source.name}.{bench.source.sha256[:8]}"
    return {
        "instance_id": f"{repository}.{rewrite['modifier']}__{number:08d}",
        "patch": rewrite["patch"],
        "FAIL_TO_PASS": failing,
        "PASS_TO_PASS": passing,
        "image_name": f"swebench/swesmith.x86_64.{repository}",
        "repo": f"swesmith/{repository}",
    }


def packed_size(files: Mapping[str, bytes]) -> int:
    """The bytes of a tree as a ``.tar.gz``."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, data in sorted(files.items()):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return len(buffer.getvalue())


def git(folder: Path, *arguments: str) -> None:
    """One git command of the delivery."""
    subprocess.run(
        ["git", "-C", str(folder), *arguments],
        check=True, capture_output=True, env={"PATH": os.environ["PATH"], **GIT_NAMES},
    )  # fmt: skip


def deliver(
    bench: Bench, tasks: Sequence[tuple[dict[str, Any], Mapping[str, str]]], folder: Path
) -> list[Tree]:
    """The mirror as ``create_mirror`` and ``gather`` make it, and for each task the clone that a solver works in."""
    mirror = folder / "mirror"
    write_files(mirror, bench.source.files)
    git(mirror, "init", "-q", "-b", "main")
    git(mirror, "add", "--force", ".")
    git(mirror, "commit", "-q", "--no-gpg-sign", "-m", "Initial commit")
    for row, rewrite in tasks:
        git(mirror, "checkout", "-q", "-b", row["instance_id"], "main")
        (mirror / rewrite["path"]).write_text(rewrite["new_text"], encoding="utf-8", newline="")
        git(mirror, "add", ".")
        git(mirror, "commit", "-q", "--no-gpg-sign", "-m", "Bug Patch")
        for test_file in {test.partition("::")[0] for test in row["FAIL_TO_PASS"]}:
            (mirror / test_file).unlink(missing_ok=True)
        git(mirror, "add", ".")
        git(mirror, "commit", "-q", "--no-gpg-sign", "-m", "Remove F2P Tests")
    git(mirror, "checkout", "-q", "main")
    delivered = []
    for row, _ in tasks:
        clone = folder / row["instance_id"]
        git(folder, "clone", "-q", "-o", "origin", f"file://{mirror}", str(clone))
        git(clone, "checkout", "-q", row["instance_id"])
        delivered.append(Tree(row["instance_id"], clone))
    return delivered
