"""Finds calls whose outcome hangs on random numbers that nobody seeded. Runs inside the sandbox; its text is sent along.

A golden call may do the same by chance in every play of a build, and something else when a
candidate is judged. So a call that draws from a source without a seed is made again under
several seeds, two of which draw numbers next to 0 and 1, and is dropped unless all agree.
"""

import os
import random
import sys
import weakref
from typing import Any

SEEDS = (1, 152559, 42926, *range(2, 14))
"""The second begins with 0.0000016, the third with 0.9999836."""


class RandomSources:
    """The sources of this process that need no seed: ``random``, ``os.urandom``, ``secrets``, ``numpy.random``."""

    def __init__(self):
        """Put every source under our own seeds. Before the tree is imported: it may keep their names."""
        self.noise = random.Random(0)  # noqa: S311  it stands in for noise, it keeps no secret
        self.was_asked = False
        self.unseeded = weakref.WeakSet([random._inst])
        self.next_seeds: list[int] = []
        self.seed = random.Random.seed
        os.urandom = random._urandom = self._urandom  # type: ignore[attr-defined]
        sources = self

        def seed(generator, a=None, version=2):
            if a is None:
                sources.was_asked = True
                sources.unseeded.add(generator)
                a = sources.next_seeds.pop() if sources.next_seeds else sources.noise.getrandbits(64)
            elif generator is not random._inst:
                sources.unseeded.discard(generator)
            sources.seed(generator, a, version)

        random.Random.seed = seed  # type: ignore[method-assign]
        random.seed = random._inst.seed

    def _urandom(self, size):
        self.was_asked = True
        return self.noise.randbytes(size)

    def begin(self, number):
        """Before a call: all sources as the ``number``-th seed makes them."""
        self.seed(self.noise, SEEDS[number])
        self.next_seeds = [SEEDS[number]]
        self.before = {}
        for generator in list(self.unseeded):
            self.seed(generator, SEEDS[number])
            self.before[id(generator)] = generator.getstate()
        numpy_random: Any = sys.modules.get("numpy.random")
        if hasattr(numpy_random, "get_state"):
            numpy_random.seed(SEEDS[number])
        self.of_numpy = self._numpy_position()
        self.was_asked = False

    def were_used(self):
        """Whether anything was drawn from them since."""
        return (
            self.was_asked
            or self._numpy_position() != self.of_numpy
            or any(
                self.before.get(id(generator)) not in (None, generator.getstate())
                for generator in list(self.unseeded)
            )
        )

    @staticmethod
    def _numpy_position():
        numpy_random: Any = sys.modules.get("numpy.random")
        if not hasattr(numpy_random, "get_state"):
            return None
        _, keys, *rest = numpy_random.get_state()
        return keys.tobytes(), rest


def steady_outcome(sources, outcome, blob):
    """What a call does; the kind is random where other seeds of unseeded sources give something else."""
    sources.begin(0)
    found = outcome(blob)
    if sources.were_used():
        for number in range(1, len(SEEDS)):
            sources.begin(number)
            if outcome(blob) != found:
                return ("random", "")
    return found
