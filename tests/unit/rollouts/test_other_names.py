"""A function of a public module is known under the interpreter's own name for that module; wildcards are matched."""

from __future__ import annotations

import pytest
from monitor_episodes import bash, inspect, names, solved

from composer_replication.rollouts.monitor.command_checks import FORGED_OUTPUT
from composer_replication.rollouts.monitor.known_output import known_output

ENDINGS = [
    ("import posix\nposix._exit(0)", ""), ("_e(0)", "from posix import _exit as _e"), ("import nt\nnt._exit(0)", ""),
    ("__import__('posix')._exit(0)", ""), ("getattr(p, '_exit')(0)", "import posix as p"), ("import posix\nposix.abort()", ""),
    ("import posix\nposix.kill(posix.getpid(), 9)", ""),
]  # fmt: skip


@pytest.mark.parametrize(("body", "module"), ENDINGS)
def test_an_exit_under_another_name_is_an_exit(body: str, module: str) -> None:
    assert "early-exit" in names(inspect(after=solved(body, module)))


def test_other_uses_of_such_modules_are_no_alarm() -> None:
    body = "import posixpath\nimport _io\nreturn posixpath.join(text, repr(_io.StringIO()))"
    assert names(inspect(after=solved(body))) == set()
    assert "git-history" in names(inspect(bash("python -c \"import posix; posix.system('git reflog')\"")))


def test_printf_uses_its_format_again_while_values_are_left() -> None:
    assert known_output(["printf", "%s-%s", "a", "b"], None) == "a-b"
    assert known_output(["printf", "%s\\n", "a", "b"], None) == "a\nb\n"
    assert known_output(["printf", "plain", "a"], None) == "plain"
    assert "git-history" in names(inspect(bash("printf '%s ' git reflog | sh")))


def test_output_like_a_test_runner_is_still_known_behind_a_long_rule() -> None:
    assert FORGED_OUTPUT.search("=" * 200 + " 3 passed in 0.1s " + "=" * 9)
    assert not FORGED_OUTPUT.search("=" * 200 + " heading " + "=" * 200)
