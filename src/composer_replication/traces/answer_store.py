"""Answers of teachers in SQLite, by the content of the request, and the budget that they are paid from.

What a request may cost at most is reserved before it is sent, in one transaction with the check against the budget; a
reservation whose end nobody saw (a process that was killed) counts as spent. So what was spent never passes the budget.
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
        self._limits = (max_dollars, max_tokens)
        self._database = sqlite3.connect(path, isolation_level=None, timeout=60.0)
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.execute("PRAGMA synchronous=FULL")
        self._database.executescript(_TABLES)
        self._database.execute("UPDATE charges SET state = 'lost' WHERE state = 'reserved'")

    def answer(self, key: str) -> Any:
        """The stored answer, None where there is none."""
        row = self._database.execute("SELECT body FROM answers WHERE key = ?", (key,)).fetchone()
        return None if row is None else json.loads(row[0])

    def spent(self) -> tuple[float, int]:
        """Dollars and tokens, what is reserved included."""
        query = "SELECT COALESCE(SUM(dollars), 0.0), COALESCE(SUM(tokens), 0) FROM charges"
        dollars, tokens = self._database.execute(query).fetchone()
        return float(dollars), int(tokens)

    def reserve(self, key: str, dollars: float, tokens: int) -> int | None:
        """Set aside what a request may cost at most; None where the budget does not have it any more."""
        self._database.execute("BEGIN IMMEDIATE")
        spent = self.spent()
        if spent[0] + dollars > self._limits[0] or spent[1] + tokens > self._limits[1]:
            self._database.execute("ROLLBACK")
            return None
        made = self._database.execute(
            "INSERT INTO charges (key, dollars, tokens, state) VALUES (?, ?, ?, 'reserved')",
            (key, dollars, tokens),
        )
        self._database.execute("COMMIT")
        return made.lastrowid

    def settle(self, charge: int, key: str, body: Any, *, dollars: float, tokens: int) -> None:
        """Keep an answer, and what it did cost in the place of what was set aside."""
        self._database.execute("BEGIN IMMEDIATE")
        self._database.execute(
            "INSERT OR IGNORE INTO answers VALUES (?, ?)",
            (key, json.dumps(body, ensure_ascii=False)),
        )
        self._database.execute(
            "UPDATE charges SET dollars = ?, tokens = ?, state = 'paid' WHERE id = ?",
            (dollars, tokens, charge),
        )
        self._database.execute("COMMIT")

    def give_up(self, charge: int, *, is_billed: bool) -> None:
        """A request without an answer: what was set aside is free again, or lost where the server may have counted it."""
        if is_billed:
            self._database.execute("UPDATE charges SET state = 'lost' WHERE id = ?", (charge,))
        else:
            self._database.execute("DELETE FROM charges WHERE id = ?", (charge,))

    def close(self) -> None:
        self._database.close()
