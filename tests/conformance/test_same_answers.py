"""What a program of everyday use says does not depend on which sandbox it runs in."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from composer_replication.records import SandboxSpec
from composer_replication.sandbox import choose_backend

COMMANDS = {
    "git init -q . && git add -A && git -c user.name=a -c user.email=a@b commit -qm x; git status": "tree clean",
    "git config --global user.name x && git clone -q . other && git -C other log --oneline | wc -l": "1",
    "rm -rf .git && git status": "not a git repository",
    "python3 -c 'import mimetypes; print(mimetypes.guess_type(\"a.py\"))'": "text/x-python",
    "nice": str(os.getpriority(os.PRIO_PROCESS, 0)),  # sandlock has raised its own and puts it back
    r"printf '#' > $'b\nad.py'; stat -c %s $'b\nad.py'": "1",
}


@pytest.mark.parametrize("name", ["bubblewrap", "sandlock"])
def test_programs_of_everyday_use(name: str, tmp_path: Path) -> None:
    backend = choose_backend(name)
    if not (check := backend.is_available()).ok:
        pytest.skip(check.detail)
    (tmp_path / "a.py").touch()
    with backend.open(SandboxSpec(tmp_path)) as sandbox:

        def run(command: str) -> str:
            done = sandbox.exec(["bash", "-c", f"({command}) 2>&1"], timeout_seconds=60)
            return done.stdout

        for command, said in COMMANDS.items():
            told = run(command)
            assert said in told and "Permission denied" not in told, (command, told)
