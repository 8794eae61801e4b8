import pytest
from tinymath import initials, is_palindrome, repeat, shout


def test_shout():
    assert shout("hey") == "HEY!"


def test_shout_at_nobody():
    assert shout("") == "!"


def test_repeat_twice():
    assert repeat("tick", 2) == "tick tick"


def test_repeat_never():
    assert repeat("tick", 0) == ""
    assert repeat("tock", 1) == "tock"


class TestInitials:
    def test_two_words(self):
        assert initials("ada lovelace") == "AL"

    # One word is a name as well.
    def test_one_word(self):
        assert initials("plato") == "P"


@pytest.mark.parametrize("text", ["Otto", "never odd or even", ""])
def test_palindromes(text):
    assert is_palindrome(text)


def test_no_palindrome():
    assert not is_palindrome("tiny")
