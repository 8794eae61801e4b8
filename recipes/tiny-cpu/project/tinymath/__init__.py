"""A few small functions to cut tasks from."""

from tinymath.numbers import absolute, clamp, is_even, mean, sign, square
from tinymath.text import initials, is_palindrome, repeat, shout
from tinymath.vector import Vector

__all__ = [
    "Vector",
    "absolute",
    "clamp",
    "initials",
    "is_even",
    "is_palindrome",
    "mean",
    "repeat",
    "shout",
    "sign",
    "square",
]
