"""The twin of one function, what it says about a candidate, and its form in a file.

A twin is SECRET: it tells what the deleted code answers. It lies beside hidden tests, never
in a sandbox that holds a policy's tools; a judging sandbox gets its inputs alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

import zstandard

from composer_replication.errors import InputError
from composer_replication.tasks.blobs import decompress
from composer_replication.tasks.twin.canonical_encoding import NUM_DIGITS

FORMAT_VERSION = 3
"""A line of JSON, then all pickles one after the other. Version 2 also told which tests made a call."""
MUTATED_SHARE = 0.95
"""Share of the mutated calls that must agree. Lookup solvers miss a median of all of them, so this
is as strict against them as 1 would be, and forgives an honest candidate an unfair call."""
_LEVEL = 19
_MAX_BYTES = 512 * 1024**2


@dataclass(frozen=True, slots=True)
class Vector:
    """One call: its pickled arguments, and the canonical digest of what the golden code did."""

    blob: bytes
    digest: str


@dataclass(frozen=True, slots=True)
class Twin:
    """Recorded and mutated calls of one function.

    ``pickler`` is the hash of the cloudpickle that its blobs need.
    """

    pin: str
    path: str
    symbol: str
    recorded: tuple[Vector, ...]
    mutated: tuple[Vector, ...]
    pickler: str

    @property
    def vectors(self) -> tuple[Vector, ...]:
        """The recorded calls, then the mutated ones: the order in which they are judged."""
        return (*self.recorded, *self.mutated)


@dataclass(frozen=True, slots=True)
class TwinScore:
    """On how many calls a candidate does what the golden code did.

    ``error`` is empty, or says why the run as a whole is a failure of the candidate.
    """

    recorded_agree: int
    num_recorded: int
    mutated_agree: int
    num_mutated: int
    error: str = ""

    @property
    def passed(self) -> bool:
        """All recorded calls agree, and at least 95% of the mutated ones."""
        return (
            not self.error
            and self.num_recorded > 0
            and self.recorded_agree == self.num_recorded
            and self.mutated_agree >= math.ceil(MUTATED_SHARE * self.num_mutated)
        )


def score_digests(twin: Twin, digests: Mapping[int, str], error: str = "") -> TwinScore:
    """Compare a candidate's digests, by index in ``twin.vectors``, with the expected ones."""
    agree = [digests.get(index) == vector.digest for index, vector in enumerate(twin.vectors)]
    split = len(twin.recorded)
    return TwinScore(sum(agree[:split]), split, sum(agree[split:]), len(twin.mutated), error)


def twin_bytes(twin: Twin) -> bytes:
    """The compressed form of a twin: equal twins give equal bytes."""
    value = {
        "version": FORMAT_VERSION,
        "pin": twin.pin,
        "path": twin.path,
        "symbol": twin.symbol,
        "pickler": twin.pickler,
        "num_recorded": len(twin.recorded),
        "sizes": [len(vector.blob) for vector in twin.vectors],
        "digests": "".join(vector.digest for vector in twin.vectors),
    }
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    blobs = b"".join(vector.blob for vector in twin.vectors)
    return zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).compress(text.encode() + b"\n" + blobs)


def read_twin(data: bytes, *, where: str = "") -> Twin:
    """A twin from its compressed form. Nothing is unpickled.

    Raises:
        InputError: the bytes are no twin, or one of another version (CR0411).
    """
    try:
        plain = decompress(data, max_bytes=_MAX_BYTES)
        line, _, blobs = plain.partition(b"\n")
        value = json.loads(line)
        if value["version"] not in (2, FORMAT_VERSION):
            raise ValueError(f"version {value['version']}")
        sizes, digests, split = value["sizes"], str(value["digests"]), int(value["num_recorded"])
        if sum(sizes) != len(blobs) or min(sizes, default=0) < 0 or len(digests) != NUM_DIGITS * len(sizes):
            raise ValueError("the calls do not fill it")
        if not 0 < split <= len(sizes):
            raise ValueError(f"{split} of its {len(sizes)} calls are recorded ones")
        vectors = tuple(
            Vector(blobs[end - size : end], digests[NUM_DIGITS * index : NUM_DIGITS * (index + 1)])
            for index, (end, size) in enumerate(zip(accumulate(sizes), sizes, strict=True))
        )
        twin = Twin(
            pin=str(value["pin"]),
            path=str(value["path"]),
            symbol=str(value["symbol"]),
            recorded=vectors[:split],
            mutated=vectors[split:],
            pickler=str(value["pickler"]),
        )
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise damaged(f"the recorded behaviour of a function cannot be read: {error}", where) from error
    return twin


def damaged(problem: str, where: str) -> InputError:
    """The error for a twin that cannot be used."""
    return InputError(
        "CR0411", f"{problem}.", where=where, fix="build the tasks again with composer-rl tasks build."
    )
