"""Can the deleted code be read somewhere? A search of everything that a sandbox of a task shows."""
