"""What should the policy have known before the turn that went wrong?

A hint is one short text put before one turn. The same policy under the hint is the teacher that scores the very
tokens which were sampled without it, so the two prompts differ by the hint and by nothing else.

    hinted_turns.py      what a hint may be made of; a rollout -> the turns that went wrong, and what to say of each
    hint_prompts.py      a hint into the ids of a conversation's prompt, or of a source file's beginning
    task_observer.py     what is read of a stored task, once; what is known of a rollout on one
"""
