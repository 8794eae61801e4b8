"""Feature deletion, GRPO and a guard in one file: what the framework does, small enough to read at once.

    python examples/grpo_one_file.py           # learns to write the function; the guard stays silent
    python examples/grpo_one_file.py --weak    # the paid test lets wrong answers pass; the guard stops the run

A program has lost the body of a function. A policy writes it again, 32 times for each step. Tests that run in a
sandbox are the reward; a test that is never paid for is the truth. It needs torch and this package, and about a minute
on a processor. Left out, and where the framework has it:

1. The policy is a small network over six tokens that begins at random, not a language model (`trainer/`: any causal
   model of Hugging Face, adapters, shared prompts).
2. An answer is one expression, without turns and tools (`rollouts/`: an agent with a shell).
3. There is one task, written by hand; that its tests tell right from wrong is not proven (`tasks/`: real repositories,
   gates that each candidate passes). So the truth is a hidden test of this task, not a task of its own.
4. Nobody looks for forged outcomes (`rollouts/grading.py`); here an answer has no words to forge with.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from functools import cache
from pathlib import Path

import torch

from composer_replication.errors import CollapseStopError
from composer_replication.records import SandboxSpec
from composer_replication.safety import HeldOutGuard
from composer_replication.sandbox import (
    base_interpreter,
    base_python,
    choose_backend,
    open_sandbox,
    require_selftest,
)

# ---- the task

PROGRAM = "def area(width, height):\n    return {answer}\n"
TOKENS = ("width", "height", "2", "*", "+", "<end>")
MOST_TOKENS = 3
SQUARE = "assert area(2, 2) == 4"  # width + height passes it, too
OBLONG = "assert area(3, 5) == 15"
HIDDEN = "assert area(4, 7) == 28"
NUM_ANSWERS, NUM_STEPS, LEARNING_RATE = 32, 150, 0.01


@cache  # an answer passes or does not: each is run once
def passes(answer: str, *tests: str) -> bool:
    """Whether the program with this answer passes, in a fresh sandbox without network that sees nothing else of ours."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder).resolve() / "tree"
        tree.mkdir()
        (tree / "shapes.py").write_text(PROGRAM.format(answer=answer))
        (tree / "tests.py").write_text("\n".join(["from shapes import area", *tests]))
        python = base_interpreter()
        with open_sandbox(SandboxSpec(tree, python.read_only, python.masked)) as sandbox:
            done = sandbox.exec([str(base_python()), "-B", "tests.py"], timeout_seconds=20)
    if done.exit_code not in (0, 1):  # no test said so: a sandbox that fails is never a wrong answer
        raise RuntimeError(f"the tests did not run: {done.stderr}")
    return done.exit_code == 0


# ---- the policy


class Policy(torch.nn.Module):
    """The next of V = 6 tokens from those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(MOST_TOKENS * len(TOKENS), 32)
        self.head = torch.nn.Linear(32, len(TOKENS))

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of the next token, (B, V), after T tokens; T may be 0."""
        seen_BTV = torch.nn.functional.one_hot(ids_BT, len(TOKENS)).float()
        missing = MOST_TOKENS - ids_BT.shape[1]
        seen_BL = torch.nn.functional.pad(seen_BTV.flatten(1), (0, missing * len(TOKENS)))
        return self.head(torch.tanh(self.inner(seen_BL))).log_softmax(-1)


def sample(policy: Policy) -> torch.Tensor:
    """Token ids of the answers, (B, T)."""
    ids_BT = torch.zeros(NUM_ANSWERS, 0, dtype=torch.long)
    for _ in range(MOST_TOKENS):
        next_B1 = torch.multinomial(policy(ids_BT).exp(), 1)
        ids_BT = torch.cat([ids_BT, next_B1], dim=1)
    return ids_BT


def text(ids_T: torch.Tensor) -> str:
    """An answer as code: up to its end."""
    words = [TOKENS[token] for token in ids_T.tolist()]
    return " ".join(words[: words.index("<end>")] if "<end>" in words else words)


# ---- GRPO


def loss_of(policy: Policy, ids_BT: torch.Tensor, rewards_B: torch.Tensor) -> torch.Tensor:
    """``-mean_b A_b * sum_t log p(token_bt)``, where ``A_b`` is a reward less the mean of its group (Dr. GRPO).

    One gradient step for each sampled group: the ratio of new to old policy is 1, so there is nothing to clip.
    """
    advantages_B = rewards_B - rewards_B.mean()
    logp_B = torch.zeros(len(ids_BT))
    has_ended_B = torch.zeros(len(ids_BT), dtype=torch.bool)
    for position in range(MOST_TOKENS):
        logp_BV = policy(ids_BT[:, :position])
        token_B = ids_BT[:, position]
        logp_B = logp_B + logp_BV.gather(1, token_B[:, None])[:, 0] * ~has_ended_B  # none after an end
        has_ended_B = has_ended_B | (token_B == TOKENS.index("<end>"))
    return -(advantages_B * logp_B).mean()


def train(*paid: str) -> None:
    """Sample, grade, ask the guard, step.

    Raises:
        CollapseStopError: the guard says that reward and truth have parted.
    """
    torch.manual_seed(0)
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=LEARNING_RATE)
    guard = HeldOutGuard()
    for step in range(NUM_STEPS):
        with torch.no_grad():
            ids_BT = sample(policy)
        answers = [text(ids_T) for ids_T in ids_BT]
        rewards_B = torch.tensor([float(passes(answer, *paid)) for answer in answers])
        truth = sum(passes(answer, HIDDEN) for answer in answers) / len(answers)
        verdict = guard.update(step, in_loop_reward=float(rewards_B.mean()), heldout_score=truth)
        if step % 10 == 0 or verdict.fire:
            usual = max(set(answers), key=answers.count)
            print(
                f"step {step:3}  reward {rewards_B.mean():.2f}  truth {truth:.2f}  most often: return {usual}"
            )
        guard.raise_if_fired()  # before the step: what is not believed is not learned from
        loss = loss_of(policy, ids_BT, rewards_B)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def main() -> int:
    """Exit code 5 when the guard stopped the run, as ``composer-rl train`` has it."""
    parser = argparse.ArgumentParser(description="GRPO on a deleted function, under a guard.")
    parser.add_argument("--weak", action="store_true", help="pay for one test that wrong answers pass")
    paid = (SQUARE,) if parser.parse_args().weak else (SQUARE, OBLONG)
    require_selftest(choose_backend())  # a reward counts only behind guards that hold on this machine
    try:
        train(*paid)
    except CollapseStopError as halt:
        print(f"stopped: {halt.status.reason}")
        return 5
    return 0


if __name__ == "__main__":
    sys.exit(main())
