"""Sessions that are held twice: the same, the beginning of a longer one, or nearly the same.

A program that keeps a copy at every checkpoint holds each session many times: almost half of the bytes of a real corpus were
beginnings of other sessions. Near duplicates are found by MinHash where the extra ``traces`` is installed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from composer_replication.traces.trace_records import Trace

NUM_PERMUTATIONS = 128
NUM_BANDS = 16
THRESHOLD = 0.9
"""Share of five-word shingles in common from which two sessions are nearly the same."""


def step_chain(trace: Trace) -> tuple[int, ...]:
    """For each step a digest of it and of all before it; two traces share a beginning where these are equal."""
    chain, before = [], b""
    for step in trace.steps:
        hasher = hashlib.blake2b(before, digest_size=8)
        hasher.update(step.source.encode() + step.text.encode("utf-8", "replace"))
        for call in step.calls:
            hasher.update(f"\0{call.name}\0{call.arguments}".encode("utf-8", "replace"))
        before = hasher.digest()
        chain.append(int.from_bytes(before))
    return tuple(chain)


def has_minhash() -> bool:
    """Whether the library for near duplicates is installed."""
    try:
        import rensa  # noqa: F401
    except ImportError:
        return False
    return True


def minhash(trace: Trace) -> tuple[int, ...]:
    """The MinHash of what the model wrote; empty without the library or with too little text."""
    if not has_minhash():
        return ()
    from rensa import RMinHash

    words = [
        word
        for _, step in trace.agent_steps()
        for word in _words(step.text, (c.arguments for c in step.calls))
    ]
    if len(words) < 50:
        return ()
    sketch = RMinHash(num_perm=NUM_PERMUTATIONS, seed=0)
    sketch.update([" ".join(words[place : place + 5]) for place in range(len(words) - 4)])
    return tuple(sketch.digest())


def duplicates(chains: Sequence[tuple[int, ...]], hashes: Sequence[tuple[int, ...]]) -> dict[int, str]:
    """Which traces are left out, by their places, and why: ``the same``, ``the beginning of another``, ``nearly the same``.

    The first of equal ones is kept; of near ones the longest.
    """
    found: dict[int, str] = {}
    first: dict[int, int] = {}
    inner: set[int] = set()
    for chain in chains:
        inner.update(chain[:-1])
    for place, chain in enumerate(chains):
        if chain and first.setdefault(chain[-1], place) != place:
            found[place] = "the same"
        elif chain and chain[-1] in inner:
            found[place] = "the beginning of another"
    rest = [place for place in range(len(chains)) if place not in found and hashes[place]]
    for place in _near(sorted(rest, key=lambda each: (-len(chains[each]), each)), hashes):
        found[place] = "nearly the same"
    return found


def _near(places: Iterable[int], hashes: Sequence[tuple[int, ...]]) -> list[int]:
    """Places whose hashes agree with one before them: compared are those that share a band."""
    rows = NUM_PERMUTATIONS // NUM_BANDS
    bands: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    found = []
    for place in places:
        own = hashes[place]
        keys = [(band, own[band * rows : (band + 1) * rows]) for band in range(NUM_BANDS)]
        others = {other for key in keys for other in bands.get(key, ())}
        if any(_agreement(own, hashes[other]) >= THRESHOLD for other in others):
            found.append(place)
            continue
        for key in keys:
            bands.setdefault(key, []).append(place)
    return found


def _agreement(first: Sequence[int], second: Sequence[int]) -> float:
    return sum(a == b for a, b in zip(first, second, strict=True)) / len(first)


def _words(text: str, arguments: Iterable[str]) -> list[str]:
    return " ".join((text, *arguments)).split()
