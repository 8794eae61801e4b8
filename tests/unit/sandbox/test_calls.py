"""What is too long for the kernel is told before it is asked, and why a jail did not start in one line."""

from __future__ import annotations

import pytest

from composer_replication.errors import SandboxFailure
from composer_replication.records import Limits
from composer_replication.sandbox.calls import are_too_long, to_result
from composer_replication.sandbox.supervised_run import Ended, Verdict


def test_words_are_too_long_one_by_one_or_together() -> None:
    assert not are_too_long(["true"], {})
    assert not are_too_long(["true", "x" * 131_000], {"A": "x" * 131_000})
    assert are_too_long(["true", "x" * 131_072], {})
    assert are_too_long(["true"], {"A": "x" * 131_070})
    assert are_too_long(["true", *["é"] * 700_000], {})


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
