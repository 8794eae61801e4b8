"""Training on rollouts of several turns by a recipe: real trainer, loop, ledger, tools in a jail and grading; scripted words."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from full_vocabulary import jensen_shannon, sharpened, support, token_logps
from policy_server import PolicyServer, says
from scripted_tools import ASSISTANT, END, ScriptedSampler, said, sampler_of
from stored_episodes import stored_episodes

from composer_replication.cli.main import main
from composer_replication.cli.train_verb import run_recipe
from composer_replication.config import dump_config, load_config
from composer_replication.errors import ComposerError, SandboxFailure, UsageError
from composer_replication.records import StopReason, Turn
from composer_replication.rollouts.environment.feature_deletion_env import FeatureDeletionEnv
from composer_replication.rollouts.episodes import shortcut_judge
from composer_replication.rollouts.episodes.episode import Episode
from composer_replication.rollouts.hints.hinted_turns import HintedTurnMaker
from composer_replication.run_folder import RunFolder, read_jsonl
from composer_replication.tasks.store import TaskStore
from composer_replication.trainer import episode_rollouts, model_loading
from composer_replication.trainer.composer_trainer import ComposerReplicationTrainer
from composer_replication.trainer.generation import Generation
from composer_replication.trainer.preset_settings import sampling_settings
from composer_replication.trainer.tiny_models import make_tiny_tools_model

pytestmark = pytest.mark.timeout(600)

RECIPE = Path(__file__).parents[3] / "recipes" / "tiny-tools" / "run.toml"
PROJECT = RECIPE.parents[1] / "tiny-cpu" / "project"
NUMBERS = "tinymath/numbers.py"
COST = 0.125
WITHOUT_GUARD = {"heldout": None, "guard": None}  # test_agentic_guard.py has runs with them


@pytest.fixture(scope="module")
def store(build_tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> TaskStore:
    folder = tmp_path_factory.mktemp("agent-store") / "tasks"
    return TaskStore.open(build_tiny(folder, (f"{NUMBERS}::clamp", f"{NUMBERS}::sign")))


@pytest.fixture(scope="module")
def scripts() -> list[list[str]]:
    """The words of every policy here: solves any task of the file; makes mistakes and gives up; plants an exit and solves."""
    golden = (PROJECT / NUMBERS).read_text()
    return [
        [said("write_file", path=NUMBERS, content=golden), said("submit")],
        [
            said("fly_away", height=3),
            said("bash", cmd="ls"),
            said("bash", command="echo hello"),
            f"I give up.{END}",
        ],
        [
            said("bash", command="echo 'def leave(): import os; os._exit(0)' >> tinymath/__init__.py"),
            said("write_file", path=NUMBERS, content=golden),
            said("submit"),
        ],
    ]


class Recorded:
    """What the trainer made of each generation, as it went into the loss."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batches: list[dict[str, Any]] = []
        self.trainers: list[Any] = []
        inner = ComposerReplicationTrainer._generate_and_score_completions

        def generate(trainer: Any, inputs: Any) -> Any:
            batch = inner(trainer, inputs)
            self.batches.append(
                {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
            )
            self.trainers.append(trainer)
            return batch

        monkeypatch.setattr(ComposerReplicationTrainer, "_generate_and_score_completions", generate)


def train(folder: Path, store: TaskStore, **settings: Any) -> RunFolder:
    overrides = {
        "tasks": {"store": str(store.root)},
        **WITHOUT_GUARD,
        "agent.reward.invalid_call_cost": COST,
        "agent.max_new_tokens": 2048,
    }
    run_recipe(RECIPE, overrides | settings, folder, resume=False, quiet=True)
    return RunFolder(folder)


@pytest.fixture(scope="module")
def run(
    tmp_path_factory: pytest.TempPathFactory, store: TaskStore, scripts: list[list[str]]
) -> tuple[RunFolder, Recorded]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(episode_rollouts, "model_sampler", sampler_of(scripts))
        recorded = Recorded(patch)
        return train(tmp_path_factory.mktemp("agent-run") / "run", store), recorded


def episodes_of(folder: RunFolder) -> list[list[Episode]]:
    return [stored_episodes(path) for path in sorted(folder.rollouts.glob("episodes-*.jsonl"))]


def test_rows_are_the_sampled_ids_and_only_they_carry_loss(run, scripts) -> None:
    folder, recorded = run
    steps = episodes_of(folder)
    assert len(steps) == len(recorded.batches) == 2
    tokenizer = recorded.trainers[0].processing_class
    for episodes, batch in zip(steps, recorded.batches, strict=True):
        assert len({episode.task_id for episode in episodes}) == 2
        for row, episode in enumerate(episodes):
            real = batch["completion_mask"][row].bool()
            ids = batch["completion_ids"][row][real].tolist()
            mask = batch["tool_mask"][row][real].bool()
            prompt = batch["prompt_ids"][row][batch["prompt_mask"][row].bool()].tolist()
            words = [turn.completion.text for turn in episode.turns]
            script = next(each for each in scripts if each[0] == words[0] + END)
            said_ids = [i for move in script for i in tokenizer.encode(move, add_special_tokens=False)]
            assert tuple(prompt) == episode.turns[0].added_ids
            last = len(episode.turns) - 1
            assert tuple(prompt + ids) == (
                *episode.prompt_ids(last),
                *episode.turns[last].completion.token_ids,
            )
            assert torch.tensor(ids)[mask].tolist() == said_ids
            text = tokenizer.decode(torch.tensor(ids)[~mask])
            assert "tool_response" in text and "<tool_call>" not in text
        loss_mask = batch["completion_mask"] * batch["tool_mask"]
        assert batch["num_items_in_batch"] == loss_mask.sum()


def test_a_flagged_episode_is_paid_nothing_and_weighs_in_its_group(run) -> None:
    """The scripts' last one passes every test, with an exit planted beside the answer."""
    folder, recorded = run
    by_first_call = {"write_file": 1.0, "fly_away": 0.0 - 2 * COST, "bash": 0.0}
    for number, (episodes, batch) in enumerate(zip(episodes_of(folder), recorded.batches, strict=True), 1):
        lines = read_jsonl(folder.rollouts / f"step-{number:06d}.jsonl")
        rewards = [line["reward"] for line in lines]
        names = [e.turns[0].calls[0].name for e in episodes]
        assert rewards == [by_first_call[name] for name in names] and "bash" in names
        mask = (batch["completion_mask"] * batch["tool_mask"]).bool()
        for start in range(0, len(rewards), 4):
            group = rewards[start : start + 4]
            weights = [batch["advantages"][row][mask[row]].mean().item() for row in range(start, start + 4)]
            mean = sum(group) / 4  # each weight is times the importance of its token, which is nearly 1
            assert weights == pytest.approx([reward - mean for reward in group], abs=1e-3)


def test_tokens_are_weighed_by_importance_though_the_recipe_says_nothing_of_it(run) -> None:
    folder, recorded = run
    rows = read_jsonl(folder.metrics)
    assert [row["sampling/truncated_share"] for row in rows] == [0.0, 0.0]
    assert [row["sampling/effective_sample_size"] for row in rows] == pytest.approx([1.0, 1.0], abs=1e-3)
    for batch in recorded.batches:
        assert batch["advantages"].shape == batch["completion_ids"].shape  # a weight for each token


def test_log_probabilities_of_the_first_step_are_those_of_an_independent_forward_pass(run) -> None:
    folder, recorded = run
    assert [row["checks/token_drift_max"] for row in read_jsonl(folder.metrics)] == pytest.approx(
        [0, 0], abs=1e-4
    )
    model, batch = make_tiny_tools_model(0)[0].eval(), recorded.batches[0]
    mask = (batch["completion_mask"] * batch["tool_mask"]).bool()
    checked = 0
    for row in mask.any(-1).nonzero().flatten().tolist():
        prompt = batch["prompt_ids"][row][batch["prompt_mask"][row].bool()].tolist()
        ids = batch["completion_ids"][row][batch["completion_mask"][row].bool()].tolist()
        with torch.no_grad():
            expected = token_logps(model, prompt, ids)[range(len(ids)), ids]
        kept = mask[row][: len(ids)]
        sampled = batch["sampling_per_token_logps"][row][: len(ids)]
        torch.testing.assert_close(sampled[kept], expected[kept], rtol=0, atol=1e-4)
        checked += int(kept.sum())
    assert checked == batch["num_items_in_batch"] > 100


def test_what_happened_is_in_the_log(run) -> None:
    folder, _ = run
    for episodes, row in zip(episodes_of(folder), read_jsonl(folder.metrics), strict=True):
        num = len(episodes)
        ended = [episode.stop_reason for episode in episodes]
        names = [episode.turns[0].calls[0].name for episode in episodes]
        assert row["rollouts/stopped_submitted"] == ended.count(StopReason.SUBMITTED) / num
        assert (
            row["rollouts/stopped_finished"]
            == ended.count(StopReason.FINISHED) / num
            == names.count("fly_away") / num
        )
        assert row["rollouts/turns"] == pytest.approx(sum(len(e.turns) for e in episodes) / num)
        assert row["rollouts/invalid_calls"] == 2 * names.count("fly_away")
        assert (row["rollouts/monitor_masked"], row["rollouts/dropped"]) == (names.count("bash"), 0)
        assert row["rollouts/infrastructure_failures"] == 0
    findings = [
        line for path in sorted(folder.rollouts.glob("findings-*.jsonl")) for line in read_jsonl(path)
    ]
    assert findings and all(line["masks_reward"] and "early-exit" in line["counts"] for line in findings)
    assert {(f["turn_idx"], f["call_idx"]) for line in findings for f in line["findings"]} == {(0, 0)}


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch, scripts: list[list[str]]) -> pytest.MonkeyPatch:
    monkeypatch.setattr(episode_rollouts, "model_sampler", sampler_of(scripts))
    return monkeypatch


@pytest.mark.long
def test_hints_of_failed_calls_are_what_the_hint_channel_distils(
    scripted: pytest.MonkeyPatch, store: TaskStore, tmp_path: Path
) -> None:
    """The logged loss of the first step is that of plain forwards over the turns with and without their hint."""

    def sharp(seed: int) -> Any:
        model, tokenizer = make_tiny_tools_model(seed)
        sharpened(model, 3.0)
        return model, tokenizer

    seen: list[Any] = []
    inner = HintedTurnMaker.hinted_turns

    def hinted_turns(maker: HintedTurnMaker, rollouts: Any) -> Any:
        observed = map(maker.observe, rollouts)
        found = [[] if each is None else list(maker.hinted(each)) for each in observed]
        seen.extend(zip(found, rollouts, strict=True))
        return inner(maker, rollouts)

    scripted.setattr(model_loading, "make_tiny_tools_model", sharp)
    scripted.setattr(HintedTurnMaker, "hinted_turns", hinted_turns)
    settings = {"trl.max_steps": 1, "trainer.alpha_sdpo": 0.5}
    folder = train(tmp_path / "run", store, **settings)
    (row,) = read_jsonl(folder.metrics)
    (episodes,) = episodes_of(folder)
    model, total, num_tokens = sharp(0)[0].eval(), 0.0, 0
    for episode, (of_row, rollout) in zip(episodes, seen, strict=True):
        is_poor = episode.turns[0].calls[0].name == "fly_away"
        kinds = [fault.kind for fault, _ in of_row]
        assert kinds[:2] == (["invalid-call", "invalid-call"] if is_poor else [])
        assert bool(of_row) is is_poor and (rollout.turns or episode.turns[0].calls[0].name == "bash")
        for fault, turn in of_row:
            assert turn.prompt_ids == episode.prompt_ids(fault.turn_idx)
            assert turn.completion_ids == episode.turns[fault.turn_idx].completion.token_ids
            with torch.no_grad():
                student = token_logps(model, turn.prompt_ids, turn.completion_ids)
                teacher = token_logps(model, turn.hinted_prompt_ids, turn.completion_ids)
            total += float(jensen_shannon(*support(student, teacher, 100), 0.5).sum())
            num_tokens += len(turn.completion_ids)
    assert num_tokens > 0 and row["sdpo/turns"] == sum(len(of_row) for of_row, _ in seen)
    assert total / num_tokens > 1e-6
    assert row["loss/sdpo"] == pytest.approx(total / num_tokens, rel=1e-2)


class Summing(ScriptedSampler):
    """Fills its context, sums up, and goes on: to a solution or to a call of an unknown tool, by its seed."""

    golden = (PROJECT / NUMBERS).read_text()

    def words(self, prompt: tuple[int, ...], seed: int) -> str:
        text = self.tokenizer.decode(prompt)
        asked = text.rsplit("<|im_start|>", 2)[1]
        if "Write a summary for yourself" in asked:
            return f"the file is {NUMBERS}{END}"
        *before, _ = text.split(f"{ASSISTANT}\n")
        if "the file is" not in before[0]:
            return said("bash", cmd="ls") if len(before) == 1 else said("bash", command="seq 400")
        if len(before) > 1:
            return said("submit")
        return said("write_file", path=NUMBERS, content=self.golden) if seed % 2 else said("fly_away")


@pytest.mark.long
def test_episodes_that_sum_up_are_trained_on_as_one_rollout(
    monkeypatch: pytest.MonkeyPatch, store: TaskStore, tmp_path: Path
) -> None:
    monkeypatch.setattr(episode_rollouts, "model_sampler", sampler_of([], Summing))
    recorded = Recorded(monkeypatch)
    settings = {
        "trl.max_steps": 1,
        "trl.num_generations": 2,
        "trl.per_device_train_batch_size": 4,
        "agent.max_turns": 8,
        "agent.summary_tokens": 2500,
        "trainer.alpha_sdpo": 0.5,
    }
    folder = train(tmp_path / "run", store, **settings)
    (episodes,), (batch,), (row,) = episodes_of(folder), recorded.batches, read_jsonl(folder.metrics)
    assert [len(episode.first_messages) for episode in episodes] == [2] * 4
    assert row["rollouts/summaries"] == 1.0
    assert row["checks/token_drift_max"] < 1e-4
    assert (
        len({episode.reward for episode in episodes}) == 2
    )  # who wrote the file, and who called what is not there
    model = make_tiny_tools_model(0)[0].eval()
    for number, episode in enumerate(episodes):
        real = batch["completion_mask"][number].bool()
        ids, mask = batch["completion_ids"][number][real], batch["tool_mask"][number][real].bool()
        answers = [turn.completion.token_ids for turn in episode.turns]
        assert ids[mask].tolist() == [token for answer in answers for token in answer]
        (start,) = batch["segment_starts"][number].tolist()
        begun = next(turn.added_ids for turn in episode.turns if turn.segment_idx == 1)
        assert tuple(ids[start : start + len(begun)].tolist()) == begun
        sampled = batch["sampling_per_token_logps"][number][real][mask]
        with torch.no_grad():
            turns = [Turn(episode.prompt_ids(idx), turn.completion) for idx, turn in enumerate(episode.turns)]
            expected = torch.cat([own_logps(model, turn) for turn in turns])
        torch.testing.assert_close(sampled, expected, rtol=0, atol=1e-4)
        advantage = (
            batch["advantages"].expand(real.numel(), 4).t()
            if batch["advantages"].dim() == 1
            else batch["advantages"]
        )
        assert ((advantage[number][real][mask] > 0) == (episode.reward == 1.0 - COST)).all()
    # Each was told of its first mistake, which lies before the summary, and the poor ones of a second one behind it.
    num_poor = sum(episode.reward != 1.0 - COST for episode in episodes)
    assert 0 < num_poor < 4
    assert row["sdpo/turns"] >= 4 + num_poor
    assert row["loss/sdpo"] > 0


def own_logps(model: Any, turn: Turn) -> torch.Tensor:
    ids = turn.completion.token_ids
    return token_logps(model, turn.prompt_ids, ids)[range(len(ids)), list(ids)]


@pytest.mark.long
def test_what_infrastructure_loses_moves_nothing_and_is_counted(
    scripted: pytest.MonkeyPatch, store: TaskStore, tmp_path: Path
) -> None:
    inner = FeatureDeletionEnv.call

    def call(env: FeatureDeletionEnv, asked: Any) -> Any:
        if asked.name == "fly_away":
            raise SandboxFailure("CR0302", "the jail broke.")
        return inner(env, asked)

    scripted.setattr(FeatureDeletionEnv, "call", call)
    recorded = Recorded(scripted)
    folder = train(tmp_path / "run", store, **{"trl.max_steps": 1, "agent.monitor": "report"})
    (episodes,), (batch,), (row,) = episodes_of(folder), recorded.batches, read_jsonl(folder.metrics)
    lost = [episode.stop_reason is StopReason.INFRASTRUCTURE for episode in episodes]
    assert 0 < sum(lost) < len(lost)
    assert [episode.reward is None for episode in episodes] == lost
    loss_mask = batch["completion_mask"] * batch["tool_mask"]
    assert (loss_mask.sum(-1) == 0).tolist() == lost
    assert batch["num_items_in_batch"] == loss_mask.sum()
    assert row["rollouts/dropped"] == row["rollouts/stopped_infrastructure"] * len(lost) == sum(lost)
    assert row["rollouts/infrastructure_failures"] == 3 * sum(lost)
    assert row["rollouts/monitor_masked"] == 0 < row["rollouts/monitor_findings"]  # report masks nothing
    assert row["reward"] == 1.0 and batch["advantages"].abs().max() == 0


def test_a_generation_without_any_episode_stops_the_run(
    scripted: pytest.MonkeyPatch, store: TaskStore, tmp_path: Path
) -> None:
    def reset(env: FeatureDeletionEnv, task_id: str) -> str:
        raise SandboxFailure("CR0302", "no jail today.")

    scripted.setattr(FeatureDeletionEnv, "reset", reset)
    with pytest.raises(SandboxFailure, match="CR0390"):
        train(tmp_path / "run", store)


def test_a_judge_is_asked_about_what_was_paid(
    scripted: pytest.MonkeyPatch, store: TaskStore, tmp_path: Path, scripts: list[list[str]]
) -> None:
    scripted.setattr(shortcut_judge, "SHARE", 1.0)
    scripted.setattr(episode_rollouts, "model_sampler", sampler_of(scripts[:1]))
    with PolicyServer.running(lambda _: says("YES: it was copied.")) as server:
        settings = {"trl.max_steps": 1, "agent.judge": f"{server.url}/v1#tiny"}
        settings |= {"trl.num_generations": 2, "trl.per_device_train_batch_size": 2}
        folder = train(tmp_path / "run", store, **settings)
    [row] = read_jsonl(folder.metrics)
    assert row["rollouts/judged"] == row["rollouts/judged_shortcuts"] == row["rollouts/monitor_findings"] > 0
    assert row["rollouts/monitor_masked"] == row["rollouts/judge_failures"] == 0
    findings = read_jsonl(folder.rollouts / "findings-000001.jsonl")
    assert {each["name"] for found in findings for each in found["findings"]} == {"judged-shortcut"}


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"trl.use_vllm": True}, "CR0101", "vllm is not installed here"),
    ({"trl.use_transformers_continuous_batching": True}, "CR0211", "the agent loop does not sample so"),
    ({"trl.report_to": "excel"}, "CR0211", "refuse trl.report_to: excel is not supported, only azure_ml, "),
    ({"trl.report_to": "trackio"}, "CR0101", "trl.report_to names trackio, which is not installed"),
    ({"agent.judge": "host#model"}, "CR0206", "the judge cannot be asked: the address is not http://HOST"),
    ({"agent.max_context_tokens": 40_000}, "CR0705", "32768 positions"),
    ({"agent.max_context_tokens": 1000, "agent.max_new_tokens": 100}, "CR0705", "leaves no room for an answer"),
    ({"model.name": "tiny-random"}, "CR0810", "no chat template"),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "code", "words"), BAD, ids=lambda part: str(part)[:40])
def test_bad_settings_give_one_sentence(
    settings: dict[str, Any], code: str, words: str, store: TaskStore, tmp_path: Path
) -> None:
    overrides = {"tasks": {"store": str(store.root)}, **WITHOUT_GUARD, **settings}
    with pytest.raises(ComposerError) as raised:
        run_recipe(RECIPE, overrides, tmp_path / "run", resume=False, quiet=True)
    assert raised.value.code == code
    assert words in raised.value.message
    assert "\n" not in raised.value.message


@pytest.mark.long
def test_spread_weights_are_refused_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, store: TaskStore, tmp_path: Path
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(UsageError, match=r"CR0757.*spread over processes"):
        train(tmp_path / "run", store)


@pytest.mark.parametrize("row", [{"prompt": "x"}, {"prompt": "x", "task_id": 3}])
def test_rows_without_a_task_are_refused(row: dict[str, Any]) -> None:
    trainer: Any = SimpleNamespace(generation=Generation([row]))
    with pytest.raises(UsageError, match=r"CR0412.*names a task"):
        episode_rollouts.EpisodeRollouts(None)(["x"], trainer)  # type: ignore[arg-type]


def evaluated(capsys: pytest.CaptureFixture[str], *words: str | Path) -> dict[str, Any]:
    assert main(["eval", *map(str, words), "--quiet", "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


@pytest.mark.long
def test_a_run_with_tools_is_evaluated_by_episodes_with_tools(
    scripted: pytest.MonkeyPatch, run, store: TaskStore, scripts, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, recorded = run
    scripted.setattr(episode_rollouts, "model_sampler", sampler_of(scripts[:1]))
    result = evaluated(capsys, folder.root, "--tasks", store.root, "--samples", "2")
    assert (result["rollouts"], result["stop_reasons"]) == ("episodes", {"submitted": 4})
    assert (result["tasks"], result["visible_pass"], result["hidden_pass"]) == (2, 1.0, 1.0)
    trainer, config = recorded.trainers[0], load_config(folder.recipe)
    still = episode_rollouts.still_trainer(sampling_settings(config), trainer.model, trainer.processing_class)
    assert set(still.eos_token_ids) == set(trainer.eos_token_ids)
    assert vars(still.args) == {name: getattr(trainer.args, name) for name in vars(still.args)}
    assert "top_k" in vars(still.args)


@pytest.mark.long
def test_a_model_is_evaluated_as_a_recipe_makes_its_rollouts(
    scripted: pytest.MonkeyPatch,
    store: TaskStore,
    scripts,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    scripted.setattr(episode_rollouts, "model_sampler", sampler_of(scripts[1:2]))
    folder = tmp_path / "tasks"
    shutil.copytree(store.root, folder)
    server = {"trl.use_vllm": True, "trl.vllm_mode": "server"}  # of training: nobody asks it here
    recipe = write_recipe(tmp_path / "r.toml", {"agent.max_new_tokens": 2048, **server})
    words = ("tiny-tools", "--recipe", recipe, "--tasks", folder, "--samples", "1", "--update-difficulty")
    result = evaluated(capsys, *words)
    assert (result["rollouts"], result["stop_reasons"]) == ("episodes", {"finished": 2})
    assert (result["visible_pass"], result["hidden_pass"]) == (0.0, 0.0)
    write_recipe(recipe, {"agent.max_new_tokens": 2048, "agent.max_turns": 1})
    shorter = evaluated(capsys, *words)
    assert shorter["stop_reasons"] == {"turns": 2}
    assert shorter["difficulty"] != result["difficulty"]  # other limits are another policy


def write_recipe(path: Path, overrides: dict[str, Any]) -> Path:
    path.write_text(dump_config(load_config(RECIPE, overrides)))
    return path
