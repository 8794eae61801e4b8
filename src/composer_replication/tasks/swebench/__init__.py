"""Can foreign task sets come in? Through the same gates as our own."""
