"""Which number is minimised?

Pure functions of tensors, masks and weights; no model, no trainer, no file. A channel
is off unless the recipe gives it a weight.

    chunked_head.py        log-probabilities and top-k of a linear head; no tensor of tokens times vocabulary
    divergence.py          how far the student is from the teacher, per token
    preferences.py         DPO, IPO and SimPO on pairs
    policy_terms.py        k1 KL in the reward, effort, truncated importance weights
    argument_checks.py     one sentence for each wrong argument
"""
