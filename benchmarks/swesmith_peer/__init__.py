"""The other side of ``swesmith_tasks.py``: swesmith's modifiers and procedure, and the thief."""
