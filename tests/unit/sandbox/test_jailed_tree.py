"""What is said of a jail that did not start."""

from __future__ import annotations

import pytest

from composer_replication.errors import SandboxFailure
from composer_replication.records import Limits
from composer_replication.sandbox.jailed_tree import to_result
from composer_replication.sandbox.supervised_run import Ended, Verdict


@pytest.mark.parametrize(
    ("stderr", "why"),
    [
        (b'Traceback (most recent call last):\n  File "x", line 1\nOSError: refused\n', "OSError: refused."),
        (b" \n", "exit code 70."),
    ],
)
def test_why_it_did_not_start_is_one_line(stderr: bytes, why: str) -> None:
    ended = Ended(Verdict.ENDED, 70, b"", stderr, truncated=False, seconds=0.1)
    with pytest.raises(SandboxFailure) as caught:
        to_result(ended, b"<marker>", Limits(), backend="sandlock")
    assert caught.value.message == f"sandlock did not start the command: {why}"
