from tinymath import Vector


def test_dot():
    assert Vector(1, 2).dot(Vector(3, 4)) == 11


def test_dot_of_right_angle():
    assert Vector(1, 0).dot(Vector(0, 1)) == 0


def test_scaled():
    vector = Vector(1, -2).scaled(3)
    assert (vector.x, vector.y) == (3, -6)


def test_length():
    assert Vector(3, 4).length == 5


def test_length_of_zero():
    assert Vector(0, 0).length == 0
