"""The guard in a loop of any kind: a policy is paid for visible tests, learns to cheat, and is stopped.

python examples/hello_guard.py
"""

import random

from composer_replication.safety import CollapseStopError, HeldOutGuard

guard, draw, cheating = HeldOutGuard(), random.Random(0), 0.1
try:
    for step in range(200):
        cheats = [
            draw.random() < cheating for _ in range(64)
        ]  # a cheat passes what is paid and solves nothing
        honest = [draw.random() < 0.6 for _ in range(64)]
        reward = sum(c or h for c, h in zip(cheats, honest, strict=True)) / 64  # visible tests: trained on
        truth = sum(h and not c for c, h in zip(cheats, honest, strict=True)) / 64  # hidden tests: never paid
        guard.update(step, in_loop_reward=reward, heldout_score=truth)
        guard.raise_if_fired()
        cheating = min(1.0, cheating * 1.02)  # what is paid better grows
    print(f"step {step}: reward {reward:.2f}, truth {truth:.2f}, never stopped")
except CollapseStopError as halt:
    print(f"step {step}: reward {reward:.2f}, truth {truth:.2f}; stopped: {halt.status.reason}")
