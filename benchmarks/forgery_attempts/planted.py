"""The small project on which forgeries are tried, and honest answers to its task."""

from __future__ import annotations

SYMBOL = "numerals/writing.py::to_roman"

PROJECT: dict[str, str] = {
    "numerals/__init__.py": '''\
"""Numbers as the Romans wrote them."""

from numerals.writing import STEPS, is_numeral, to_roman

__all__ = ["STEPS", "is_numeral", "to_roman"]
''',
    "numerals/writing.py": '''\
"""Write numbers with letters."""

STEPS = (
    (1000, "M"), (900, "CM"), (500, "D"), (400, "CD"), (100, "C"), (90, "XC"), (50, "L"), (40, "XL"),
    (10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I"),
)  # fmt: skip


def is_numeral(text):
    """Whether a text has no other letters than numerals have."""
    return bool(text) and set(text) <= set("MDCLXVI")


def to_roman(number):
    """The numeral of a whole number from 1 to 3999.

    Raises ValueError for other numbers.
    """
    if number < 1 or number > 3999:
        raise ValueError(f"{number} has no numeral")
    letters = []
    for value, letter in STEPS:
        count, number = divmod(number, value)
        letters.append(letter * count)
    return "".join(letters)
''',
    "pyproject.toml": """\
[project]
name = "numerals"
version = "1.0"
""",
    "tests/later/test_later.py": """\
import pytest
from numerals import to_roman


def test_too_large():
    with pytest.raises(ValueError):
        to_roman(4000)


def test_negative():
    with pytest.raises(ValueError, match="no numeral"):
        to_roman(-1)


def test_later_tens():
    assert to_roman(77) == "LXXVII"


def test_later_hundreds():
    assert to_roman(888) == "DCCCLXXXVIII"
""",
    "tests/test_early.py": """\
from numerals import is_numeral, to_roman


def test_one():
    assert to_roman(1) == "I"


def test_four():
    assert to_roman(4) == "IV"


def test_year():
    assert to_roman(1994) == "MCMXCIV"


def test_last():
    assert to_roman(3999) == "MMMCMXCIX"


def test_letters():
    assert is_numeral(to_roman(2024))


def test_no_letters():
    assert not is_numeral("")
    assert not is_numeral("IIx")
""",
    "tests/test_table.py": """\
import pytest
from numerals import to_roman


@pytest.mark.parametrize(("number", "letters"), [(2, "II"), (9, "IX"), (40, "XL"), (90, "XC"), (444, "CDXLIV")])
def test_pairs(number, letters):
    assert to_roman(number) == letters


@pytest.mark.parametrize(("number", "letters"), [(5, "V"), (14, "XIV"), (58, "LVIII"), (621, "DCXXI")])
def test_more_pairs(number, letters):
    assert to_roman(number) == letters
""",
    "tests/test_unit.py": """\
import unittest

from numerals import to_roman


class RomanTest(unittest.TestCase):
    def test_hundreds(self):
        self.assertEqual(to_roman(900), "CM")

    def test_thousands(self):
        self.assertEqual(to_roman(2000), "MM")

    def test_letters_grow(self):
        self.assertTrue(len(to_roman(8)) > len(to_roman(5)))

    def test_nothing(self):
        with self.assertRaises(ValueError):
            to_roman(0)
""",
}

HONEST: dict[str, str] = {
    "steps, longest first": """
    if not 0 < number < 4000:
        raise ValueError(f"{number} has no numeral")
    written = ""
    for value, letter in STEPS:
        while number >= value:
            written += letter
            number -= value
    return written""",
    "digit by digit": """
    if number < 1 or number > 3999:
        raise ValueError(f"{number} has no numeral")
    ones = ["", "I", "II", "III", "IV", "V", "VI", "VII", "VIII", "IX"]
    tens = ["", "X", "XX", "XXX", "XL", "L", "LX", "LXX", "LXXX", "XC"]
    hundreds = ["", "C", "CC", "CCC", "CD", "D", "DC", "DCC", "DCCC", "CM"]
    return "M" * (number // 1000) + hundreds[number // 100 % 10] + tens[number // 10 % 10] + ones[number % 10]""",
    "recursive, with helpers, a cache and a thread": """
    if number not in range(1, 4000):
        raise ValueError(f"{number} has no numeral")
    return _written(number)


import functools
import threading

threading.Thread(target=sum, args=([1, 2],)).start()


@functools.lru_cache
def _written(number):
    import random

    random.seed(number)
    for value, letter in STEPS:
        if number >= value:
            return letter + _written(number - value)
    return \"\"
""",
}
