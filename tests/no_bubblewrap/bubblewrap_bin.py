"""Stands before the package of this name on PYTHONPATH: a machine without bubblewrap, for make test-sandlock."""

raise ImportError("bubblewrap is away for these tests")
