"""What did the policy do?

A rollout is one attempt at one task: the prompt is cut from the broken file, the
answer is spliced back into the tree, and the tests of the store say what it is worth.

    single_turn.py          prompt, stop rule, answer
    candidate_tree.py       what of a policy's whole tree is graded
    grading.py              answer or tree -> Score, in a fresh sandbox each; what else a tree broke
    rewards.py              (answer, score) -> in-loop reward; the function that TRL calls keeps every rollout
    curriculum.py           which task the policy should try next
    heldout_evaluation.py   fresh attempts judged by visible and hidden tests: pass rates, the truth for the guard
    tools/                  what a policy may do, over a sandbox
    environment/            one attempt at one task: tools, grading outside, faces for trainers
    hints/                  which turn went wrong, and the prompt with a hint before it
    tokens/                 a conversation as token ids, and the calls in a reply
    episodes/               the agent loop: many episodes of many turns, policies, stored trajectories
    cluster/                attempts and gradings on the nodes of a Ray cluster
"""
