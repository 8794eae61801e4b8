"""Sessions that are held twice: the same, the beginning of a longer one, or nearly the same.

A program that keeps a copy at every checkpoint holds each session many times: almost half of the bytes of a real corpus were
beginnings of other sessions. Near duplicates are found by MinHash where the extra ``traces`` is installed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from composer_replication.traces.trace_records import Trace

try:
    import rensa
except ImportError:  # without the extra ``traces``
    rensa = None
HAS_MINHASH = rensa is not None
"""Whether the library for near duplicates is installed."""
_NUM_PERMUTATIONS = 128
THRESHOLD = 0.9
"""Share of five-word shingles in common from which two sessions are nearly the same."""
_LEAST_WORDS = 50


def step_chain(trace: Trace) -> tuple[int, ...]:
    """For each step a digest of it and of all before it; two traces share a beginning where these are equal."""
    chain, before = [], b""
    for step in trace.steps:
        calls = "".join(f"\0{call.name}\0{call.arguments}" for call in step.calls)
        whole = f"{step.source}{step.text}{calls}".encode("utf-8", "replace")
        before = hashlib.blake2b(before + whole, digest_size=8).digest()
        chain.append(int.from_bytes(before))
    return tuple(chain)


def minhash(trace: Trace) -> Any:
    """The MinHash of what the model wrote; None without the library or with too little text."""
    texts = [
        text for _, step in trace.agent_steps() for text in (step.text, *(c.arguments for c in step.calls))
    ]
    words = " ".join(texts).split()
    if rensa is None or len(words) < _LEAST_WORDS:
        return None
    sketch = rensa.RMinHash(num_perm=_NUM_PERMUTATIONS, seed=0)
    sketch.update(list(map(" ".join, zip(*(words[start:] for start in range(5)), strict=False))))
    return sketch


def duplicates(chains: Sequence[tuple[int, ...]], sketches: Sequence[Any]) -> dict[int, str]:
    """Which traces are left out, by their places, and why: ``the same``, ``the beginning of another``, ``nearly the same``.

    The first of equal ones is kept; of near ones the longest.
    """
    found: dict[int, str] = {}
    first: dict[int, int] = {}
    inner = {digest for chain in chains for digest in chain[:-1]}
    for place, chain in enumerate(chains):
        if chain and first.setdefault(chain[-1], place) != place:
            found[place] = "the same"
        elif chain and chain[-1] in inner:
            found[place] = "the beginning of another"
    rest = [place for place, sketch in enumerate(sketches) if place not in found and sketch is not None]
    if rest:
        kept = rensa.RMinHashLSH(THRESHOLD, _NUM_PERMUTATIONS, num_bands=16)
        for place in sorted(rest, key=lambda each: (-len(chains[each]), each)):
            own = sketches[place]
            if any(own.jaccard(sketches[other]) >= THRESHOLD for other in kept.query(own)):
                found[place] = "nearly the same"
            else:
                kept.insert(place, own)
    return found
