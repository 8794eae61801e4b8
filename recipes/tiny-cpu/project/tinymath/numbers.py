"""Functions of numbers."""


def absolute(x):
    """Return ``x`` without its sign."""
    return -x if x < 0 else x


def square(x):
    """Return ``x`` times itself."""
    return x * x


def is_even(n):
    """Tell whether an integer is even."""
    return n % 2 == 0


def sign(x):
    """Return -1, 0 or 1."""
    if x < 0:
        return -1
    return 1 if x > 0 else 0


def clamp(x, low, high):
    """Return the number between ``low`` and ``high`` that is nearest to ``x``."""
    if x < low:
        return low
    return min(x, high)


def mean(values):
    """Return the arithmetic mean; no values give 0.0."""
    values = list(values)
    if not values:
        return 0.0
    return sum(values) / len(values)
