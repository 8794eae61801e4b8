"""What should the policy have known before the turn that went wrong?

A hint is one short text put before one turn. The same policy under the hint is the teacher that scores the very
tokens which were sampled without it, so the two prompts differ by the hint and by nothing else.

    hint_context.py      what a hint may be made of; no golden code, no hidden test
    hint_texts.py        templates, else the environment's words
    hint_prompts.py      a hint into the ids of a conversation's prompt, or of a source file's beginning
    task_observer.py     what is read of a stored task, once; what is known of a single-turn rollout on one
    hinted_turns.py      a rollout -> the turns that went wrong, and why; all of it, for the trainer
"""
