import pytest
from tinymath import absolute, clamp, is_even, mean, sign, square


def test_absolute_of_negative():
    assert absolute(-3) == 3


def test_absolute_of_positive():
    assert absolute(5) == 5


@pytest.mark.parametrize(("x", "expected"), [(0, 0), (3, 9), (-4, 16)])
def test_square(x, expected):
    assert square(x) == expected


def test_square_of_fraction():
    assert square(0.5) == 0.25


def test_even_numbers_are_even():
    assert is_even(4) is True
    assert is_even(0) is True


def test_odd_numbers_are_not_even():
    assert is_even(7) is False


@pytest.mark.parametrize(("x", "expected"), [(-2, -1), (0, 0), (9, 1)])
def test_sign(x, expected):
    assert sign(x) == expected


def test_clamp_inside():
    assert clamp(5, 0, 10) == 5


def test_clamp_below():
    assert clamp(-5, 0, 10) == 0


def test_clamp_above():
    assert clamp(50, 0, 10) == 10


def test_mean():
    assert mean([1, 2, 3]) == 2


def test_mean_of_nothing():
    assert mean([]) == 0.0
