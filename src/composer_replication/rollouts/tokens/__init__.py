"""What did the policy say, turn by turn, and what was it answered?

token_ledger.py    messages, text to ids and back; a conversation as ids: those sampled, the template's own between them
pair_ids.py        prompts and answers of chats apart, as ids: preference pairs, actions to be scored
call_dialects.py   from a reply to tool calls, as its response template says, or in the dialect of its chat template
"""
