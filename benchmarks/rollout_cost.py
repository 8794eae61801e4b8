"""What rollouts cost, here and in another checkout: an episode of many calls, the tokens of long conversations, a grading.

    python benchmarks/rollout_cost.py [--rounds 3]
    python benchmarks/rollout_cost.py --against PATH       # and another checkout, by its PATH/.venv/bin/python

No model runs: a policy says what is written down. *Episodes*: 32 at once, each of 15 commands and a submit in a sandbox of its
own; all leave their task unsolved, so that its tests run once for all, before the clock starts. *Tokens*: one conversation over
``LedgerTalk`` and TRL's template of Qwen 3, in processor seconds of the whole loop; the growth between the last two (an
exponent: 1 is linear), how often each of its characters is tokenised, and how many copies of its ids are kept. *Grading*: one in a fresh sandbox, each of another
tree. *Judgement*: how often it reads a file of an attempt's tree, counted at the sandbox. Every row is a cost, the least of the
rounds, in which the checkouts take turns, a process each; below 1 in the last column this one costs less. What another one
cannot be asked, since its parts have other names, is said, and ``nan`` in the table.
"""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import sys
import tempfile
import time
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from command_line import options

from composer_replication import records
from composer_replication.rollouts.environment import feature_deletion_env as attempts
from composer_replication.rollouts.episodes import agent_loop as loop
from composer_replication.rollouts.grading import Grader
from composer_replication.sandbox import accept, choose_backend
from composer_replication.sandbox.local_sandbox import LocalSandbox
from composer_replication.tasks.build import build_tasks
from composer_replication.tasks.store import TaskStore
from composer_replication.trainer.tiny_models import make_tiny_tools_model

PROJECT = str(Path(__file__).parents[1] / "recipes" / "tiny-cpu" / "project")
FILE, NUM_EPISODES, NUM_GRADINGS, TURNS = "tinymath/numbers.py", 32, 4, (16, 64, 256)
RESULT = "\n".join(f"{n:4d}  def value_{n}(self): return self._items[{n}].weight" for n in range(12))
CALL = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call><|im_end|>'
Rows = dict[str, float]
PLACE = SimpleNamespace(  # an environment that costs nothing
    tools=(records.ToolSpec("look", {"type": "object", "properties": {}}, "Look around."),),
    is_done=False,
    reset=lambda task_id: f"Look around, and find {task_id}.",
    call=lambda _: records.ToolResult(RESULT),
    finish=lambda: attempts.Judgement(records.Score({"looked": records.Outcome.PASSED}), 1.0, 1.0),
    close=lambda: None,
)


class Bench:
    """A grader over one task, a tokenizer whose characters are counted, and the parts, each of which gives rows."""

    def __init__(self, folder: Path, backend: str) -> None:
        build_tasks([PROJECT], folder, symbols={PROJECT: [f"{FILE}::clamp"]}, backend=backend)
        self.grader = Grader(TaskStore.open(folder), backend=backend)
        self.task = self.grader.store.tasks()[0]
        self.golden = self.grader.store.files(self.task, "golden")[FILE].decode()
        _, self.tokenizer = make_tiny_tools_model(0)
        templates = Path(find_spec("trl").origin).parent / "chat_templates"
        self.tokenizer.chat_template = (templates / "qwen3.jinja").read_text()
        self.count, encode = Counter(), self.tokenizer.encode
        self.tokenizer.encode = lambda text, **how: self.count.update(x=len(text)) or encode(text, **how)

    def play(self, texts: list[str], open_environment: Any, num: int = 1) -> list[Any]:
        """So many episodes at once, in each of which the policy says these texts."""
        ids = [tuple(self.tokenizer.encode(text, add_special_tokens=False)) for text in texts]
        answers = [records.Completion(own, "", records.StopReason.FINISHED) for own in ids]
        turn_of = {loop.sampling_seed(0, n, turn): turn for n in range(num) for turn in range(len(texts))}

        async def sample(_: Any, *, seed: int, **__: Any) -> Any:
            return answers[turn_of[seed]]

        sizes = {"max_turns": len(texts), "max_context_tokens": 10**7, "max_concurrent": num}
        limits = loop.AgentSection(**sizes)
        talk = loop.LedgerTalk(self.tokenizer)
        parts = loop.EpisodeParts(SimpleNamespace(sample=sample), open_environment, talk)
        self.count.clear()
        found = asyncio.run(loop.run_episodes([self.task.task_id] * num, parts, options=limits))
        assert all(each.num_calls == len(texts) and not each.failure for each in found), found[0]
        return found

    def episodes(self) -> Rows:
        commands = (json.dumps({"command": f"sed -n {n},+9p {FILE}"}) for n in range(1, 16))
        texts = [*(CALL.format("bash", command) for command in commands), CALL.format("submit", "{}")]
        for num in (1, NUM_EPISODES):  # the first one warms up
            started = time.perf_counter()
            self.play(texts, lambda: attempts.FeatureDeletionEnv(self.grader), num)
        return {"episodes: seconds for each": (time.perf_counter() - started) / NUM_EPISODES}

    def tokens(self) -> Rows:
        rows: Rows = {}
        self.play([CALL.format("look", "{}")], lambda: PLACE)  # warms up
        for num in TURNS:
            started = time.process_time()
            (episode,) = self.play([CALL.format("look", "{}")] * num, lambda: PLACE)
            rows[f"tokens: processor seconds of {num} calls"] = time.process_time() - started
        few, many = [*rows.values()][-2:]
        rows["tokens: growth"] = math.log(many / few, TURNS[-1] / TURNS[-2])
        ids = [*episode.prompt_ids(num - 1), *episode.turns[-1].completion.token_ids]
        kept = sum(len(turn.added_ids) + len(turn.completion.token_ids) for turn in episode.turns)
        rows["tokens: times a character is tokenised"] = self.count["x"] / len(self.tokenizer.decode(ids))
        return {**rows, "tokens: copies of its ids that are kept": kept / len(ids)}

    def grading(self) -> Rows:
        files, took = self.grader.store.files(self.task, "rollout"), []
        for n in range(NUM_GRADINGS + 1):  # the first one learns what golden code does
            started = time.perf_counter()
            score = self.grader.grade_tree(self.task, {**files, FILE: f"{self.golden}# {n}\n".encode()})
            took.append(time.perf_counter() - started)
            assert score is not None and score.pass_share == 1.0, score
        return {"grading: seconds": min(took[1:])}

    def judgement(self) -> Rows:
        content, read_file = json.dumps({"path": FILE, "content": self.golden}), LocalSandbox.read_file
        with attempts.FeatureDeletionEnv(self.grader) as env:
            env.reset(self.task.task_id)
            env.call(records.ToolCall("write_file", content, "1"))
            with patch.object(LocalSandbox, "read_file", autospec=True, side_effect=read_file) as read:
                judged = env.finish()
        assert judged is not None and judged.reward == 1.0, judged
        return {"judgement: reads of a file": max(Counter(call.args for call in read.mock_calls).values())}


def measured() -> dict[str, Any]:
    """All parts, in this process; ``none`` is the backend where there is no jail."""
    jails = [name for name in ("bubblewrap", "sandlock") if choose_backend(name).is_available().ok]
    if not jails:
        accept(["everything"])
    rows, problems = {}, []
    with tempfile.TemporaryDirectory(prefix="rollout-cost-") as folder:
        bench = Bench(Path(folder) / "tasks", [*jails, "none"][0])
        for part in (bench.episodes, bench.tokens, bench.grading, bench.judgement):
            try:
                rows |= part()
            except Exception as error:  # noqa: BLE001  of another checkout it may be anything
                problems.append(f"no {part.__name__} ({type(error).__name__}: {error})".splitlines()[0])
        return {"jail": bench.grader.attempt_backend().name, "rows": rows, "problems": problems}


def asked(python: Path) -> dict[str, Any]:
    """The same in another process, by this interpreter."""
    done = subprocess.run([str(python), __file__, "--one"], capture_output=True, text=True, check=False)
    if done.returncode:
        why = (done.stderr.strip() or f"it ended with {done.returncode}").splitlines()[-1]
        return {"jail": "?", "rows": {}, "problems": [f"nothing ({why})"]}
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    """Measure by turns, and print the table; 1 where this checkout cannot be measured."""
    args = options(__doc__, rounds=3, against=[], one=False)
    if args.one:
        print(json.dumps(measured()))
        return 0
    pythons = [Path(sys.executable), *(Path(path).absolute() / ".venv/bin/python" for path in args.against)]
    if absent := [str(python) for python in pythons if not python.exists()]:
        raise SystemExit(f"there is no {', '.join(absent)}: give checkouts in which make setup has been run.")
    rounds = [[asked(python) for python in pythons] for _ in range(args.rounds)]
    print(
        f"attempts in {rounds[0][0]['jail']}; the least of {args.rounds} rounds; here, there, here by there"
    )
    for name in rounds[0][0]["rows"]:
        sides = ([each["rows"].get(name, math.nan) for each in side] for side in zip(*rounds, strict=True))
        here, *there = map(min, sides)
        print(f"{name:<42}{here:10.4g}" + "".join(f"{cost:10.4g}{here / cost:8.2f}" for cost in there))
    for python, found in zip(pythons, rounds[-1], strict=True):
        for problem in found["problems"]:
            print(f"{python} measures {problem}")
    return int(bool(rounds[-1][0]["problems"]))


if __name__ == "__main__":
    sys.exit(main())
