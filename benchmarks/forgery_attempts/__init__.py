"""Answers that do not do what was asked and try to be paid for it; run by ``forgeries.py``."""
