"""What may the policy do? Eight tools over a sandbox, and what they answer.

tool_context.py    what a tool works with, how it refuses, how long an answer is
tool_schemas.py    a signature and its docstring -> JSON schema; a call -> arguments, or an error that teaches
toolbox.py         a call -> a result, whatever is wrong with the call
file_tools.py      read_file, write_file, str_replace, list_files
command_tools.py   bash, search, and run_tests: the visible tests, restored first
"""
