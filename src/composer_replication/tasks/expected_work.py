"""How many candidates will a build judge until it has enough tasks?"""

from __future__ import annotations


def expected_decisions(num_decided: int, num_valid: int, num_candidates: int, max_tasks: int | None) -> int:
    """The candidates that will have been judged in the end, decided ones included; for a time left.

    ``num_decided * max_tasks / num_valid``, rounded up: the share of candidates that are tasks is taken to
    stay what it was. Never below ``num_decided``, never above ``num_candidates``, which is also the answer
    where all are judged (``max_tasks`` None) or none is valid yet.

    Args:
        num_decided: candidates judged so far.
        num_valid: those of them that are tasks.
        num_candidates: all there are.
        max_tasks: how many tasks are asked for.
    """
    if max_tasks is None or num_valid == 0:
        return num_candidates
    expected = -(-num_decided * max_tasks // num_valid)
    return min(max(expected, num_decided), num_candidates)
