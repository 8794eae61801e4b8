"""What is too long for the kernel is told before it is asked."""

from __future__ import annotations

from composer_replication.sandbox.call_checks import are_too_long


def test_words_are_too_long_one_by_one_or_together() -> None:
    assert not are_too_long(["true"], {})
    assert not are_too_long(["true", "x" * 131_000], {"A": "x" * 131_000})
    assert are_too_long(["true", "x" * 131_072], {})
    assert are_too_long(["true"], {"A": "x" * 131_070})
    assert are_too_long(["true", *["é"] * 700_000], {})
