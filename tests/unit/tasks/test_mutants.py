"""Small faults in a body, worked out by hand, and who notices them."""

from __future__ import annotations

import pytest

from composer_replication.tasks.planning.body_cuts import find_body_cuts
from composer_replication.tasks.truth import mutants_of

pytestmark = pytest.mark.timeout(600)  # the first test of all builds the twins for the rest

SOURCE = '''
def first(a, b="x"):
    """Doc 1 < 2."""
    if a < 1 and not b:
        return -a
    for c in b:
        if c == "é":  # é moves columns in bytes
            break
        a += 2
    print(f"{a + 1}")
    return a


def other():
    return 1 + 1
'''
CUT = find_body_cuts("m.py", SOURCE)[0]


def changed_line(mutant: str) -> tuple[str, str]:
    """The one line of the golden body that is not that of the mutant, and what stands there."""
    before, after = CUT.golden_body.split("\n"), mutant.split("\n")
    assert len(before) == len(after)
    (changed,) = ((a.strip(), b.strip()) for a, b in zip(before, after, strict=True) if a != b)
    return changed


def test_all_mutants_of_a_body_by_hand() -> None:
    found = [changed_line(mutant) for mutant in mutants_of(SOURCE, CUT)]
    test = "if a < 1 and not b:"
    loop = 'if c == "é":  # é moves columns in bytes'
    assert sorted(found) == sorted(
        [
            (test, "if (a < 1 or not b):"),
            (test, "if (a <= 1) and not b:"),
            (test, "if a < 2 and not b:"),
            (test, "if a < 1 and (b):"),
            (test, "if (not (a < 1 and (not b))):"),
            ("return -a", "return None"),
            ("return -a", "return (a)"),
            (loop, "if (c != 'é'):  # é moves columns in bytes"),
            (loop, "if c == 'XXé':  # é moves columns in bytes"),
            (loop, "if (not (c == 'é')):  # é moves columns in bytes"),
            ("break", "continue"),
            ("a += 2", "pass"),
            ("a += 2", "a -= 2"),
            ("a += 2", "a += 3"),
            ('print(f"{a + 1}")', "pass"),
            ("return a", "return None"),
        ]
    )


def test_the_cap_draws_and_keeps_the_order() -> None:
    every, some, again = (mutants_of(SOURCE, CUT, max_mutants=number) for number in (20, 5, 5))
    assert some == again == tuple(mutant for mutant in every if mutant in some)
    assert len(some) == 5 and some != every[:5]


def test_a_nested_docstring_stays() -> None:
    text = 'def f():\n    def g():\n        """Doc."""\n        return 1\n    return g\n'
    bodies = mutants_of(text, find_body_cuts("m.py", text)[0])
    assert bodies
    assert all('"""Doc."""' in body for body in bodies)


def test_a_cut_of_another_text_is_refused() -> None:
    with pytest.raises(ValueError, match="not enough values"):
        mutants_of("x = 1\n", CUT)
