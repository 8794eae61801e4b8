"""What a command may leave closed or deep, where the jail's user is our own: none of it is a failure of the jail.

Root may open and remove everything, so these run as an ordinary user, where there is one to be.
"""

from __future__ import annotations

import pytest
from ordinary_user import as_ordinary_user

from composer_replication.sandbox import choose_backend

PROGRAM = """
import json, os, sys
from pathlib import Path
from composer_replication.errors import SandboxFileError
from composer_replication.records import SandboxSpec
from composer_replication.sandbox import base_python, choose_backend
from composer_replication.sandbox.process_folder import process_folder

backend = choose_backend(sys.argv[1])
check = backend.is_available()
if not check.ok:
    print(json.dumps({"skip": check.detail})); sys.exit()
tree = Path(os.environ["TMPDIR"]) / "tree"
tree.mkdir()
found = {}
DEEP = "\\nfor _ in range(%d): os.mkdir(%r); os.chdir(%r)\\nopen('said', 'w').write('told'); os.chmod('.', 0o500)"
def close_and_ask(jail, what, *asks):
    for name, ask in asks:
        done = jail.exec(what, timeout_seconds=60)
        found[f"{what}, {name}"] = ask() if done.exit_code == 0 else done.stderr
with backend.open(SandboxSpec(tree)) as jail:
    run = lambda command: jail.exec(command, timeout_seconds=60)
    python = lambda code: run([str(base_python()), "-I", "-S", "-c", "import os" + code])
    empty = jail.snapshot()
    for mode in ("000", "400", "500"):
        close_and_ask(
            jail, f'rm -rf f; chmod {mode} "$HOME" "$TMPDIR" .',
            ("exec", lambda: run("pwd").stdout == f"{tree}\\n"),
            ("snapshot", lambda: bool(jail.snapshot())),
            ("restore", lambda: jail.restore(empty) is None),
            ("list", lambda: jail.list_files() == []),
        )
    run("chmod 700 .; echo kept > f; chmod 000 f; mkdir d; touch d/g; chmod 500 d; chmod 555 .")
    closed = jail.snapshot()
    run("chmod 700 . d; rm -rf f d")
    jail.restore(closed)
    found["modes"] = run("stat -c %a . f d; chmod 700 . d; chmod 600 f; cat f d/g").stdout
    run("chmod 400 d")
    found["listed"] = [entry.path for entry in jail.list_files()]
    run("chmod 700 . d; rm -rf f d")
    place = "; os.chdir(os.environ['TMPDIR'])"
    if backend.name != "sandlock":
        python("; os.chdir('/tmp')" + DEEP % (230, "aa", "aa"))
        found["next"] = run("ls -d /tmp/a* 2> /dev/null; chmod -R u+rwx /tmp; grep -rhs told /tmp").stdout
    python(place + DEEP % (230, "aa", "aa"))
    python(DEEP % (230, "a", "a"))
found["left"] = os.listdir(process_folder())
print(json.dumps(found))
"""


@pytest.mark.long
@pytest.mark.parametrize("backend", ["bubblewrap", "bubblewrap-warm", "sandlock"])
def test_what_a_command_closed_is_no_failure_of_the_jail(backend: str) -> None:
    check = choose_backend(backend).is_available()
    if not check.ok:
        pytest.skip(check.detail)
    found = as_ordinary_user(PROGRAM, backend)
    assert (found.pop("modes"), found.pop("listed")) == ("555\n0\n500\nkept\n", ["d", "d/g", "f"])
    assert (found.pop("left"), found.pop("next", "")) == ([], "")
    assert set(found.values()) == {True}, found
