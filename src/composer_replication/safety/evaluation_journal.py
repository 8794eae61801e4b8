"""Scores on disk before the detector sees them, so that a crash changes no verdict.

A journal is a file of JSON lines, one for each score and one that closes an evaluation. Each
line is synced before the call returns, and carries a hash over all lines before it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from composer_replication.errors import InputError
from composer_replication.safety.checked_numbers import integer, positive_count
from composer_replication.safety.evaluation_scores import (
    EvaluationScores,
    checked_pair,
    checked_scores,
    unit_score,
)
from composer_replication.safety.evidence_guard import EvidenceGuard
from composer_replication.safety.evidence_status import EvidenceStatus

JOURNAL_VERSION = 1
_FEWEST_SECRET_BYTES = 16
_NUM_SCORES = {"pair": 2, "canary": 1, "neutral": 0}
_Entry = tuple[int, str, tuple[float, ...]]


def evaluation_seed(secret: bytes, step: int) -> int:
    """The seed of evaluation ``step``: 63 bits of HMAC-SHA256(secret, step).

    The same after a crash, so that the same tasks are drawn again; unknown to whoever does
    not have the run's secret, so that no policy can be made for the draws to come.

    Raises:
        ValueError: fewer than 16 bytes of secret, or a step below 1.
    """
    key: object = secret
    if not isinstance(key, bytes) or len(key) < _FEWEST_SECRET_BYTES:
        raise ValueError(f"secret must be at least {_FEWEST_SECRET_BYTES} bytes")
    message = f"evaluation/{positive_count('step', step)}".encode()
    return int.from_bytes(hmac.digest(key, message, "sha256")[:8], "big") >> 1


class EvaluationJournal:
    """The scores of a run's evaluations, append-only.

    Evaluations are numbered 1, 2, …; only the one after the last closed one can be written.
    Within it each score has the place of its task in the draw, ``draw_idx``: what was scored
    before a crash (``open_draws``) need not be scored again, and cannot be scored twice.

    A last line without its line break is one that a crash tore: its call never returned, so
    it counts as not written and the next line takes its place. Anything else that is not as
    it was written is refused.

    Args:
        path: the file; made with the first line.
        run: what the scores belong to, such as a fingerprint of split and settings; a
            journal of another run is refused.

    Raises:
        InputError: a line is damaged, changed or out of order (CR0602), or the journal is
            another run's (CR0603).
    """

    def __init__(self, path: Path, *, run: str = "") -> None:
        self.path = Path(path)
        self.run = run
        self._size = 0
        self._chain = ""
        self._open: dict[int, tuple[str, tuple[float, ...]]] = {}
        self._events: list[EvaluationScores | str] = []  # text: why an evaluation was missed
        if self.path.is_file():
            self._read(self.path.read_bytes())

    @property
    def evaluations(self) -> tuple[EvaluationScores, ...]:
        """All closed evaluations."""
        return tuple(event for event in self._events if isinstance(event, EvaluationScores))

    @property
    def next_step(self) -> int:
        """The evaluation that is being written, or comes next."""
        return len(self.evaluations) + 1

    @property
    def open_draws(self) -> frozenset[int]:
        """Places of the draw that are scored already in evaluation ``next_step``."""
        return frozenset(self._open)

    def scores_of(self, step: int) -> EvaluationScores | None:
        """The scores of a closed evaluation, or None."""
        closed = self.evaluations
        return closed[step - 1] if 0 < step <= len(closed) else None

    def record_pair(self, step: int, draw_idx: int, visible: float, hidden: float) -> None:
        """One task's (visible, hidden) score.

        Raises:
            ValueError: another step than ``next_step``, a place that is scored already, or
                a score outside [0, 1]. Nothing is written then; so in all methods here.
        """
        self._append(
            {"kind": "pair", "step": step, "draw": draw_idx, "scores": [*checked_pair((visible, hidden))]}
        )

    def record_canary(self, step: int, draw_idx: int, passed: float) -> None:
        """Whether a task that cannot be solved honestly was passed."""
        self._append(
            {
                "kind": "canary",
                "step": step,
                "draw": draw_idx,
                "scores": [unit_score("a canary pass", passed)],
            }
        )

    def record_neutral(self, step: int, draw_idx: int) -> None:
        """A task or canary on which the infrastructure failed again."""
        self._append({"kind": "neutral", "step": step, "draw": draw_idx, "scores": []})

    def close_evaluation(self, step: int) -> EvaluationScores:
        """The draw is done: its scores, in the order of the draw, ready for ``update``."""
        self._append({"kind": "end", "step": step, "num": len(self._open)})
        return self.evaluations[-1]

    def record_evaluation(
        self,
        step: int,
        pairs: Iterable[Iterable[float]],
        canary_passes: Iterable[float] = (),
        *,
        neutral: int = 0,
    ) -> EvaluationScores:
        """A whole evaluation in one line, where scores are known all at once."""
        given = checked_scores(step, pairs, canary_passes, neutral)
        row = {"pairs": given.pairs, "canaries": given.canary_passes, "neutral": given.neutral}
        self._append({"kind": "evaluation", "step": given.step, **row})
        return self.evaluations[-1]

    def record_missed(self, step: int, reason: str) -> None:
        """Evaluation ``step`` raised or hung and will be tried again; its scores so far are kept."""
        self._append({"kind": "missed", "step": step, "reason": reason})

    def replay_into(self, guard: EvidenceGuard) -> list[EvidenceStatus]:
        """Feed the guard every closed evaluation, and every missed one, that it has not seen.

        Raises:
            ValueError: the guard has seen more evaluations than the journal holds.
        """
        closed = self.evaluations
        if guard.num_evaluations > len(closed):
            raise ValueError(
                f"the guard has seen {guard.num_evaluations} evaluations and the journal holds {len(closed)}"
            )
        last = closed[guard.num_evaluations - 1] if guard.num_evaluations else None
        begin = 0 if last is None else self._events.index(last) + 1
        seen = guard.last_status.missed_in_a_row if guard.last_status else 0
        statuses = []
        for event in self._events[begin:]:
            if isinstance(event, EvaluationScores):
                seen = 0
                statuses.append(
                    guard.update(event.step, event.pairs, event.canary_passes, neutral=event.neutral)
                )
            elif seen:
                seen -= 1
            else:
                statuses.append(guard.note_missed(event))
        return statuses

    def _append(self, row: dict[str, Any]) -> None:
        """Check, write and sync one line; only then does it count."""
        fact = self._judged(row)
        lines, chain = [], self._chain
        for each in [row] if self._size else [self._header(), row]:
            chain = _link(chain, each)
            lines.append(json.dumps({**each, "chain": chain}).encode() + b"\n")
        data = b"".join(lines)
        is_new = not self.path.exists()
        with self.path.open("wb" if is_new else "r+b") as handle:
            handle.seek(self._size)
            handle.truncate()  # what a torn line left behind
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())
        if is_new:
            _sync_folder(self.path.parent)
        self._size, self._chain = self._size + len(data), chain
        self._keep(fact)

    def _read(self, data: bytes) -> None:
        whole = data[: data.rfind(b"\n") + 1]
        for number, line in enumerate(whole.split(b"\n")[:-1], start=1):
            try:
                row = json.loads(line)
                chain = row.pop("chain")
                if chain != _link(self._chain, row):
                    raise ValueError("its hash does not fit")
                if number == 1:
                    self._check_header(row)
                else:
                    self._keep(self._judged(row))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise InputError(
                    "CR0602",
                    f"the evaluation journal is damaged: {error}.",
                    where=f"{self.path}:{number}",
                    fix="restore the file from a copy, or start a new run.",
                ) from error
            self._chain = chain
        self._size = len(whole)

    def _header(self) -> dict[str, Any]:
        return {"kind": "journal", "version": JOURNAL_VERSION, "run": self.run}

    def _check_header(self, row: Mapping[str, Any]) -> None:
        if row.get("kind") != "journal" or row.get("version") != JOURNAL_VERSION:
            raise ValueError(f"it begins with {row.get('kind')!r} of version {row.get('version')!r}")
        if row["run"] != self.run:
            raise InputError(
                "CR0603",
                f"the evaluation journal belongs to run {row['run']!r}, and this is {self.run!r}.",
                where=str(self.path),
                fix="resume with the run's own settings and split, or start a new run.",
            )

    def _judged(self, row: Mapping[str, Any]) -> EvaluationScores | str | _Entry:
        """What the line says, if it may come next."""
        step = integer("step", row["step"])
        if step != self.next_step:
            raise ValueError(f"step must be {self.next_step}, the next evaluation, got {step}")
        kind = row["kind"]
        if kind in _NUM_SCORES:
            return self._judged_entry(kind, row)
        if kind == "missed":
            return str(row["reason"])
        if kind == "end":
            if row["num"] != len(self._open):
                raise ValueError(
                    f"evaluation {step} closes with {row['num']} scores and has {len(self._open)}"
                )
            return self._closed(step)
        if kind != "evaluation":
            raise ValueError(f"there is no line of kind {kind!r}")
        if self._open:
            raise ValueError(f"evaluation {step} has single scores already: record the others and close it")
        return checked_scores(step, row["pairs"], row["canaries"], row["neutral"])

    def _judged_entry(self, kind: str, row: Mapping[str, Any]) -> _Entry:
        draw_idx = integer("draw_idx", row["draw"])
        if draw_idx < 0:
            raise ValueError(f"draw_idx must be >= 0, got {draw_idx}")
        if draw_idx in self._open:
            raise ValueError(f"place {draw_idx} of evaluation {row['step']} is scored already")
        scores = tuple(unit_score(f"the score of a {kind}", score) for score in row["scores"])
        if len(scores) != _NUM_SCORES[kind]:
            raise ValueError(f"a {kind} has {_NUM_SCORES[kind]} scores, got {len(scores)}")
        return draw_idx, kind, scores

    def _closed(self, step: int) -> EvaluationScores:
        in_order = [self._open[draw_idx] for draw_idx in sorted(self._open)]
        return checked_scores(
            step,
            [scores for kind, scores in in_order if kind == "pair"],
            [scores[0] for kind, scores in in_order if kind == "canary"],
            sum(kind == "neutral" for kind, _ in in_order),
        )

    def _keep(self, fact: EvaluationScores | str | _Entry) -> None:
        if isinstance(fact, tuple):
            draw_idx, kind, scores = fact
            self._open[draw_idx] = (kind, scores)
            return
        self._events.append(fact)
        if isinstance(fact, EvaluationScores):
            self._open = {}


def _link(chain: str, row: Mapping[str, Any]) -> str:
    """The hash that the line carries: over itself and, through ``chain``, all lines before it."""
    text = json.dumps([chain, row], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _sync_folder(folder: Path) -> None:
    """Make a new file's name durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
