"""What did the policy say, turn by turn, and what was it answered?

token_ledger.py    a conversation as ids: sampled ids as they were sampled, the template's own between them; who opens one
chat.py            messages, and the way from text to ids and back
call_dialects.py   from a reply to tool calls, in the dialect of its chat template
"""
