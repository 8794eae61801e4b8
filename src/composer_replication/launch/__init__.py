"""Where does it run?

A job is rendered from a recipe as files that a person can read, and then submitted;
``--dry-run`` stops after the first half.
"""
