"""A vector in the plane."""


class Vector:
    """Two coordinates."""

    def __init__(self, x, y):
        self.x = x
        self.y = y

    def dot(self, other):
        """Return the inner product."""
        return self.x * other.x + self.y * other.y

    def scaled(self, factor):
        """Return the vector times a number."""
        return Vector(self.x * factor, self.y * factor)

    @property
    def length(self):
        """The Euclidean length."""
        return (self.x**2 + self.y**2) ** 0.5
