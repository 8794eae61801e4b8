"""What may the policy do? Eight tools over a sandbox, and what they answer.

tool_context.py    what a tool works with; its schema from signature and docstring; how it is called and refuses
toolbox.py         files, bash, search, run_tests (the visible tests, restored first), submit; a call -> a result, right or wrong
"""
