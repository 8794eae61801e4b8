"""The guard in a plain training loop: REINFORCE on two arms, one of which cheats.

    python examples/plain_loop.py

An honest arm solves 60% of the tasks. A cheating arm passes every visible test and solves none. The
policy is paid for visible tests, so it learns to cheat; the guard sees hidden tests too, and stops it.
"""

from __future__ import annotations

import math
import random

from composer_replication.safety import CollapseStopError, HeldOutGuard

draw = random.Random(0)
guard = HeldOutGuard()
cheat_logit, num_samples = -2.0, 64
try:
    for step in range(200):
        cheat_share = 1 / (1 + math.exp(-cheat_logit))
        cheats = [draw.random() < cheat_share for _ in range(num_samples)]
        solved = [draw.random() < 0.6 for _ in range(num_samples)]
        rewards = [1.0 if cheat else float(honest) for cheat, honest in zip(cheats, solved, strict=True)]
        reward = sum(rewards) / num_samples  # the proxy: visible tests, trained on
        truth = sum(honest and not cheat for cheat, honest in zip(cheats, solved, strict=True)) / num_samples
        guard.update(step, in_loop_reward=reward, heldout_score=truth)
        if step % 10 == 0:
            print(f"step {step:3}: reward {reward:.2f}, truth {truth:.2f}, cheating {cheat_share:.2f}")
        guard.raise_if_fired()
        for cheat, paid in zip(cheats, rewards, strict=True):
            cheat_logit += 0.02 * (paid - reward) * (cheat - cheat_share)
except CollapseStopError as halt:
    print(f"step {step:3}: reward {reward:.2f}, truth {truth:.2f}, cheating {cheat_share:.2f}")
    print(f"stopped: {halt.status.reason}")
