-- What teachers answered, by the content of the request, and what each try did cost or may cost at most.
PRAGMA journal_mode=WAL;
PRAGMA synchronous=FULL;
CREATE TABLE IF NOT EXISTS messages (key TEXT PRIMARY KEY, answer TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS charges (
    id INTEGER PRIMARY KEY, key TEXT NOT NULL, dollars REAL NOT NULL, tokens INTEGER NOT NULL, state TEXT NOT NULL
);
CREATE VIEW IF NOT EXISTS spent AS
    SELECT COALESCE(SUM(dollars), 0.0) AS dollars, COALESCE(SUM(tokens), 0) AS tokens FROM charges;
