"""Sessions of our own agent loop on a real task, asked again of two local teachers, executed, paired, trained on."""

from __future__ import annotations

import asyncio
import io
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from chat_templates import FAMILIES, tokenizer_of
from policy_server import PolicyServer, calls
from scripted_policy import Scripted, hermes
from served_model import served_model

from composer_replication.cli.main import main
from composer_replication.config import AgentSection, ModelSection
from composer_replication.records import Task
from composer_replication.rollouts.environment.feature_deletion_env import FeatureDeletionEnv
from composer_replication.rollouts.episodes.agent_loop import EpisodeParts, LedgerTalk, run_episodes
from composer_replication.rollouts.episodes.trajectories import write_trajectories
from composer_replication.rollouts.grading import Grader
from composer_replication.tasks.store import TaskStore
from composer_replication.traces.ingest import read_traces
from composer_replication.traces.pairs import read_pair_rows

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
PINS = ("tinymath/numbers.py::clamp", "tinymath/numbers.py::sign", "tinymath/text.py::initials")
NUMBERS = "tinymath/numbers.py"


@dataclass
class Played:
    """Folders and what the verbs said."""

    store: TaskStore
    clamp: Task
    root: Path
    folder: Path
    said: dict[str, Any]


@pytest.fixture(scope="module")
def served() -> Iterator[str]:
    """A local model behind HTTP: random, so it mostly writes text that calls nothing."""
    from composer_replication.trainer.model_loading import load_model

    with served_model(*load_model(ModelSection(name="tiny-tools"), seed=0), "tiny-tools") as address:
        yield address


@pytest.fixture(scope="module")
def played(build_tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory, served: str) -> Played:
    root = tmp_path_factory.mktemp("traces")
    store = TaskStore.open(build_tiny(root / "tasks", PINS))
    clamp = next(task for task in store.tasks() if task.symbol == "clamp")
    golden = store.files(clamp, "golden")[NUMBERS].decode()
    heredoc = f"cat > {NUMBERS} <<'EOF'\n{golden}EOF"
    record(store, clamp, heredoc, root / "episodes.jsonl")

    def good(request: dict[str, Any]) -> dict[str, Any]:
        """Writes the golden code, unless something has been written: then it is done."""
        history = json.dumps(request["messages"])
        has_edited = "cat >" in history or "write_file" in history
        return calls("submit") if has_edited else calls("bash", command=heredoc)

    folder = root / "sessions"
    said: dict[str, Any] = {}
    with PolicyServer.running(good, {"prompt_tokens": 100, "completion_tokens": 10}) as server:
        ours = f"tiny={served}#tiny-tools"
        begin = ["traces", "replay", str(folder), "--teacher", server.spec("good"), "--teacher", ours]
        begin += ["--tasks", str(store.root), "--answer-tokens", "24", "--tries", "4", "--horizon", "2"]
        begin += ["--price", "good=1/2"]
        for name, words in (
            ("ingest", ["traces", "ingest", str(root / "episodes.jsonl"), "--out", str(folder)]),
            ("bind", ["traces", "bind", str(folder), "--tasks", str(store.root)]),
            ("replay", begin),
            ("pairs", ["traces", "pairs", str(folder), "--out", str(root / "pairs.parquet")]),
            ("lines", ["traces", "pairs", str(folder), "--out", str(root / "pairs.jsonl")]),
            ("sft", ["traces", "sft", str(folder), "--out", str(root / "sft.parquet")]),
            ("show", ["traces", "show", str(folder), "--out", str(root / "page.html")]),
        ):
            said[name] = run(words)
        said["asked"] = len(server.seen)
        said["again"] = run(begin)
        said["asked_again"] = len(server.seen) - said["asked"]
    return Played(store, clamp, root, folder, said)


def run(words: Sequence[str]) -> dict[str, Any]:
    """One verb in this process, as JSON."""
    out = io.StringIO()
    with redirect_stdout(out):
        code = main([*words, "--json", "--quiet"])
    return {**json.loads(out.getvalue()), "exit_code": code}


def record(store: TaskStore, task: Task, heredoc: str, path: Path) -> None:
    tokenizer = tokenizer_of(next(family for family in FAMILIES if family.name == "qwen2_5"))
    wrong = {"path": NUMBERS, "content": "def clamp(value, low, high):\n    return low\n"}
    edits = (("tinymath", hermes("bash", {"command": heredoc})), ("tests", hermes("write_file", wrong)))
    scripts = [
        [hermes("bash", {"command": f"ls {where}"}), edit, hermes("submit", {})] for where, edit in edits
    ]
    talk = LedgerTalk(tokenizer)
    with_grader = Grader(store)
    try:
        parts = EpisodeParts(Scripted(tokenizer, scripts), lambda: FeatureDeletionEnv(with_grader), talk)
        run = run_episodes([task.task_id] * 2, parts, options=AgentSection(max_turns=5))
        episodes = asyncio.run(run)
    finally:
        with_grader.close()
    assert sorted(episode.reward for episode in episodes) == [0.0, 1.0]
    write_trajectories(path, episodes)


def test_sessions_are_bound_and_what_they_did_is_reproduced(played: Played) -> None:
    traces = list(read_traces(played.folder))
    assert {trace.task_id for trace in traces} == {played.clamp.task_id}
    assert sorted(trace.passed for trace in traces) == [False, True]
    assert {trace.prompt_origin for trace in traces} == {"recorded"}
    replay = played.said["replay"]
    assert replay["recorded_calls"] > 0
    assert replay["reproduced_calls"] == replay["recorded_calls"]
    assert replay["not_bound"] == 0
    bound = played.said["bind"]
    assert bound["sessions"] == 2
    assert bound["reproduced_steps"] == bound["steps"] > 0


def test_a_branch_that_passes_is_better_and_one_that_only_talks_is_not(played: Played) -> None:
    rows = [json.loads(line) for line in (played.folder / "verdicts.jsonl").read_text().splitlines()]
    failing = next(trace for trace in read_traces(played.folder) if not trace.passed)
    (row,) = [row for row in rows if row["trace_id"] == failing.trace_id]
    verdict = next(each for each in row["verdicts"] if each["source"] == "good")
    assert (verdict["scores"], verdict["recorded_scores"]) == ([1.0] * 4, [0.0] * 4)
    assert verdict["decision"] == "better"
    assert verdict["interval"][0] > 0
    assert all(each["decision"] != "better" for each in row["verdicts"] if each["source"] == "tiny")


def test_the_same_command_again_pays_nothing_and_says_the_same(played: Played) -> None:
    first, again = played.said["replay"], played.said["again"]
    assert played.said["asked"] > 0
    assert played.said["asked_again"] == 0
    for key in ("answers", "others", "verdicts", "cost_usd", "tokens", "executed"):
        assert first[key] == again[key]


def test_pairs_are_taken_by_our_channel_with_tools_and_by_both_kinds_of_file(played: Played) -> None:
    rows = list(read_pair_rows(played.root / "pairs.parquet").values())
    assert rows == list(read_pair_rows(played.root / "pairs.jsonl").values())
    assert {row["source"] for row in rows} >= {"executed"}
    (executed,) = [row for row in rows if row["source"] == "executed" and "good" in row["evidence"]]
    assert executed["chosen"][0]["tool_calls"][0]["function"]["name"] == "bash"
    assert executed["rejected"][0]["tool_calls"][0]["function"]["name"] == "write_file"
    offered = {tool["function"]["name"] for tool in json.loads(executed["tools"])}
    assert offered >= {"bash", "write_file", "submit"}


def test_trl_takes_the_pairs_and_the_rows(played: Played) -> None:
    from datasets import load_dataset
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    from composer_replication.trainer.model_loading import load_model

    model, tokenizer = load_model(ModelSection(name="tiny-tools"), seed=0)
    folder, cache = str(played.root / "model"), str(played.root / "cache")
    # the tiny model's own template writes no calls of recorded answers
    tokenizer.chat_template = tokenizer_of(next(each for each in FAMILIES if each.name == "qwen2_5")).text
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    off = {"report_to": [], "bf16": False, "save_strategy": "no", "gradient_checkpointing": False}
    sizes = {"max_steps": 1, "per_device_train_batch_size": 1, "max_length": 4096}
    how = {"output_dir": str(played.root / "out"), "use_cpu": True, **off, **sizes}
    load = partial(load_dataset, "parquet", split="train", cache_dir=cache)
    pairs = load(data_files=str(played.root / "pairs.parquet"))
    dpo = DPOTrainer(folder, args=DPOConfig(**how), train_dataset=pairs, processing_class=tokenizer)
    said = tokenizer.decode(dpo.train_dataset[0]["chosen_ids"])
    assert "tool_call" in said
    assert dpo.train().training_loss > 0
    rows = load(data_files=str(played.root / "sft.parquet"))
    sft = SFTTrainer(folder, args=SFTConfig(**how), train_dataset=rows, processing_class=tokenizer)
    assert sft.train().training_loss > 0


def test_held_out_tasks_are_kept_out_by_id_and_by_their_code(played: Played, tmp_path: Path) -> None:
    store = tmp_path / "tasks"
    shutil.copytree(played.store.root, store)
    split = tmp_path / "split.json"
    from composer_replication.safety import HeldoutSplit

    opened = TaskStore.open(store)
    heldout = [task for task in opened.tasks() if task.symbol == "clamp"]
    train = [task for task in opened.tasks() if task.symbol != "clamp"]
    divided = HeldoutSplit(map(opened.content, train), map(opened.content, heldout))
    split.write_text(json.dumps(divided.state_dict()))
    guarded = ["--tasks", str(store), "--split", str(split)]
    refused = run(["traces", "pairs", str(played.folder), "--out", str(tmp_path / "none.jsonl"), *guarded])
    assert refused["error"]["code"] == "CR0942"
    assert "a held-out task, or its code in the text" in refused["error"]["message"]
    # the same sessions under another name: the code in their text is found all the same
    other = tmp_path / "other"
    other.mkdir()
    text = (played.folder / "traces.jsonl").read_text().replace(played.clamp.task_id, "somebody-elses-task")
    (other / "traces.jsonl").write_text(text)
    refused = run(["traces", "sft", str(other), "--out", str(tmp_path / "none.jsonl"), *guarded])
    assert refused["error"]["code"] == "CR0942"
    assert run(["traces", "sft", str(other), "--out", str(tmp_path / "some.jsonl")])["rows"] == 1


def test_the_page_shows_the_verdict_and_loads_nothing(played: Played) -> None:
    page = (played.root / "page.html").read_text()
    assert played.said["show"]["sessions"] == 2
    assert ">better<" in page
    assert "<script" not in page and "http://" not in page.replace("http://www.w3.org", "")
