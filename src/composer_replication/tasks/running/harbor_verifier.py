"""Runs in a container of Harbor, as ``/tests/verify.py``: judges what an agent left, and writes the reward.

Not imported by the package. ``plan.json`` beside it says what is run. The reward is 1 where every test passes that the
deletion broke and every one that it did not break, else 0. The tests run in a tree of their own: tests, their data and
their configuration are those of ``/tests/tree``, every other file is the agent's.
"""

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def make_tree(plan: dict[str, Any], folder: Path) -> None:
    """Put together what is judged: the kept files, and beside them the agent's."""
    agent = Path(plan["workdir"])
    shutil.copytree(HERE / "tree", folder, dirs_exist_ok=True)
    for place, folders, names in os.walk(agent):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
        for name in names:
            source = Path(place, name)
            path = source.relative_to(agent)
            target = folder / path
            is_left_out = any(fnmatchcase(name, pattern) for pattern in plan["left_out_names"])
            if is_left_out and path.as_posix() not in plan["touched"]:
                continue
            if source.is_symlink() or not source.is_file() or target.exists():
                continue
            # It may stand in the way of a kept one, or its new name may be too long.
            with contextlib.suppress(OSError):
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)


def run_tests(plan: dict[str, Any], tree: Path) -> dict[str, str]:
    """The outcome of each test, or nothing where the run broke off; only records with the nonce of this run count."""
    nonce = secrets.token_hex(16)
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-B", HERE / "pytest_runner.py"],
            cwd=tree,
            env={**plan["variables"], "PATH": path, "HOME": str(tree.parent)},
            input=json.dumps({**plan["request"], "nonce": nonce}).encode(),
            stdout=subprocess.PIPE,
            timeout=plan["seconds"],
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {}
    records = []
    for line in done.stdout.decode(errors="replace").split("\n"):
        with contextlib.suppress(ValueError, RecursionError):
            record = json.loads(line)
            if isinstance(record, dict) and record.get("nonce") == nonce:
                records.append(record)
    tests = [record for record in records if record.get("event") == "test"]
    outcomes = {str(record.get("id")): str(record.get("outcome")) for record in tests}
    is_whole = bool(records) and records[-1].get("event") == "end" and len(outcomes) == len(tests)
    return outcomes if is_whole else {}


def pay(logs: Path, reward: int) -> None:
    """Write the reward alone: Harbor reads a ``reward.json`` first, which the code that was tested may have left."""
    for path in (logs / "reward.json", logs / "reward.txt"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
    (logs / "reward.txt").write_text(f"{reward}\n")


def main() -> None:
    """Judge once; ``outcomes.json`` beside the reward has what each test did."""
    plan = json.loads((HERE / "plan.json").read_text())
    logs = Path(plan["logs"])
    logs.mkdir(parents=True, exist_ok=True)
    pay(logs, 0)  # whatever breaks off below
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder).resolve() / "tree"
        make_tree(plan, tree)
        outcomes = run_tests(plan, tree)
    passed = all(outcomes.get(test) == "passed" for test in plan["request"]["node_ids"])
    (logs / "outcomes.json").write_text(json.dumps(outcomes, indent=1))
    pay(logs, int(passed))


main()
