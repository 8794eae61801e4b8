"""Answers of teachers in SQLite, by the content of the request, and the budget that they are paid from.

What a request may cost at most is set aside before it is sent, by one statement with the check against the budget. It counts as
spent until it is settled or freed, also when nobody saw its end (a process that was killed): spending never passes the budget.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_TABLES = """
CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, body TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS charges (
    id INTEGER PRIMARY KEY, key TEXT NOT NULL, dollars REAL NOT NULL, tokens INTEGER NOT NULL, state TEXT NOT NULL
);
CREATE VIEW IF NOT EXISTS spent AS
    SELECT COALESCE(SUM(dollars), 0.0) AS dollars, COALESCE(SUM(tokens), 0) AS tokens FROM charges;
"""
_RESERVE = """
INSERT INTO charges (key, dollars, tokens, state)
SELECT :key, :dollars, :tokens, 'reserved' FROM spent
WHERE spent.dollars + :dollars <= :max_dollars AND spent.tokens + :tokens <= :max_tokens
"""


def request_key(model: str, url: str, request: Mapping[str, Any]) -> str:
    """Names a request by its content."""
    whole = json.dumps([url, model, request], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(whole.encode("utf-8", "replace")).hexdigest()


class AnswerStore:
    """One file of answers and charges.

    Args:
        path: the database; made where there is none.
        max_dollars, max_tokens: the budget over the whole life of the file.
    """

    def __init__(self, path: Path, *, max_dollars: float, max_tokens: int) -> None:
        self._limits = {"max_dollars": max_dollars, "max_tokens": max_tokens}
        self._database = sqlite3.connect(path, isolation_level=None, timeout=60.0)
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.execute("PRAGMA synchronous=FULL")
        self._database.executescript(_TABLES)

    def answer(self, key: str) -> Any:
        """The stored answer, None where there is none."""
        row = self._database.execute("SELECT body FROM answers WHERE key = ?", (key,)).fetchone()
        return None if row is None else json.loads(row[0])

    def spent(self) -> tuple[float, int]:
        """Dollars and tokens, what is set aside included."""
        dollars, tokens = self._database.execute("SELECT dollars, tokens FROM spent").fetchone()
        return float(dollars), int(tokens)

    def reserve(self, key: str, dollars: float, tokens: int) -> int | None:
        """Set aside what a request may cost at most; None where the budget does not have it any more."""
        values = {"key": key, "dollars": dollars, "tokens": tokens, **self._limits}
        made = self._database.execute(_RESERVE, values)
        return made.lastrowid if made.rowcount else None

    def settle(self, charge: int, key: str, body: Any, *, dollars: float, tokens: int) -> None:
        """Keep an answer, and then what it did cost in the place of what was set aside."""
        text = json.dumps(body, ensure_ascii=False)
        self._database.execute("INSERT OR IGNORE INTO answers VALUES (?, ?)", (key, text))
        change = "UPDATE charges SET dollars = ?, tokens = ?, state = 'paid' WHERE id = ?"
        self._database.execute(change, (dollars, tokens, charge))

    def free(self, charge: int) -> None:
        """A request that the server did not work on costs nothing."""
        self._database.execute("DELETE FROM charges WHERE id = ?", (charge,))

    def close(self) -> None:
        self._database.close()
