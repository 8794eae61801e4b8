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
STRAY = r"mkdir -p $'d\xff/e\xfe' closed && touch bad%FF $'bad\xff' $'d\xff/e\xfe/f' && ln -s /etc/passwd $'l\xff'; "
STRAY += r"touch $'closed/\xff'"


@pytest.mark.parametrize("name", ["bubblewrap", "sandlock"])
def test_programs_and_odd_names(name: str, tmp_path: Path) -> None:
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
        run(STRAY)
        count = "import os; print(sum(os.lstat(os.path.join(a, n)) is not None for a, b, c in os.walk('.') for n in b + c))"
        run("rm -rf other .git *.py")
        assert run(f'python3 -c "{count}"').strip() == "8"  # each entry can be looked at, and none is lost
        sandbox.write_file("n\udce9", b"x")
        assert run(f'python3 -c "{count}"').strip() == "9"
