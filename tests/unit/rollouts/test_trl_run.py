"""TRL's own tool loop over the environment: a step of ``GRPOTrainer`` with scripted decoding and real sandboxes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from composer_replication.config import AgentRewardSection
from composer_replication.records import Task
from composer_replication.rollouts.environment.trl_face import environment_factory
from composer_replication.rollouts.grading import Grader
from composer_replication.rollouts.tools.toolbox import TOOLS
from composer_replication.sandbox.process_folder import process_folder
from composer_replication.tasks.instructions import write_instruction
from composer_replication.tasks.store import TaskStore

NUMBERS = "tinymath/numbers.py"
END = "<|im_end|>"


def small_tokenizer(texts: list[str]) -> Any:
    """Of bytes and the pieces that these texts are made of, so that a prompt is short."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    special = ["<pad>", "<|im_start|>", END]
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", eos_token=END, padding_side="left"
    )
    folder = Path(trl.__file__).parent / "chat_templates"
    tokenizer.chat_template = (folder / "qwen3.jinja").read_text()
    return tokenizer


def said(name: str, **arguments: Any) -> str:
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + f"\n</tool_call>{END}"


class Scripted(trl.GRPOTrainer):
    """What the model would say is read from scripts: the first for the first rollout, the second for the other."""

    scripts: list[list[str]]
    batches: list[dict[str, Any]]

    def _generate_single_turn(self, prompt_ids: Any, *_: Any, **__: Any) -> tuple[list[list[int]], None]:
        tokenizer, replies = self.processing_class, []
        for row, ids in enumerate(prompt_ids):
            text = tokenizer.decode(ids)
            turns = text.count("<|im_start|>assistant") - 1
            script = self.scripts[row] if not turns else next(s for s in self.scripts if s[0] in text)
            replies.append(tokenizer.encode(script[turns], add_special_tokens=False))
        return replies, None

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        batch: dict[str, Any] = super()._generate_and_score_completions(inputs)
        self.batches.append(batch)
        return batch


def stepped(
    factory: Any, store: TaskStore, task: Task, folder: Path, scripts: list[list[str]]
) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """One step over a group with an attempt for each script: the tokenizer, the line of the log, and the batch."""
    torch.manual_seed(0)
    texts = [write_instruction(store, task), *(text for script in scripts for text in script)]
    tokenizer = small_tokenizer(
        [*texts, *(json.dumps([tool.description, tool.parameters]) for tool in TOOLS)]
    )
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=16384,
            pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
        )
    )  # fmt: skip
    arguments = trl.GRPOConfig(
        str(folder), per_device_train_batch_size=len(scripts), num_generations=len(scripts), max_steps=1, report_to=[], use_cpu=True,
        max_completion_length=4096, logging_steps=1, save_strategy="no", bf16=False, gradient_checkpointing=False,
        chat_template_kwargs={"enable_thinking": False},
    )  # fmt: skip
    rows = Dataset.from_list(
        [{"prompt": [{"role": "user", "content": "Task.\n"}], "task_id": task.task_id}] * len(scripts)
    )
    trainer = Scripted(
        model, args=arguments, train_dataset=rows, processing_class=tokenizer,
        environment_factory=factory,
    )  # fmt: skip
    trainer.scripts, trainer.batches = scripts, []
    trainer.train()
    (log,) = [row for row in trainer.state.log_history if "reward" in row]
    (batch,) = trainer.batches
    return tokenizer, log, batch


def test_a_step_of_grpo_over_two_attempts(
    grader: Grader, store: TaskStore, clamp: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    before = set(process_folder().glob("attempt-*"))
    golden = store.files(clamp, "golden")[NUMBERS].decode()
    solving = [said("write_file", path=NUMBERS, content=golden), said("submit"), f"Done.{END}"]
    failing = [said("bash", cmd="ls"), said("bash", command="echo hello-from-the-jail"), f"I give up.{END}"]
    factory = environment_factory(grader, reward=AgentRewardSection(invalid_call_cost=0.25))
    tokenizer, log, batch = stepped(factory, store, clamp, tmp_path, [solving, failing])
    assert log["rewards/TrlFeatureDeletion/mean"] == pytest.approx((1.0 - 0.25) / 2)
    assert [advantage > 0 for advantage in batch["advantages"]] == [True, False]
    for ids, mask, real, script in zip(
        batch["completion_ids"], batch["tool_mask"], batch["completion_mask"], (solving, failing), strict=True
    ):
        own = [int(token) for token, kept, is_real in zip(ids, mask, real, strict=True) if kept and is_real]
        given = [
            int(token) for token, kept, is_real in zip(ids, mask, real, strict=True) if not kept and is_real
        ]
        assert own == [token for text in script for token in tokenizer.encode(text, add_special_tokens=False)]
        assert ("hello-from-the-jail" in tokenizer.decode(given)) == (script is failing)
        assert ("missing argument" in tokenizer.decode(given)) == (script is failing)
    assert set(process_folder().glob("attempt-*")) == before


def test_a_flagged_attempt_is_paid_nothing_and_stays_in_its_group(
    grader: Grader, store: TaskStore, clamp: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tests all pass. It loses as much as an honest failure, so that nobody gains by cheating where they would fail."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    golden = store.files(clamp, "golden")[NUMBERS].decode()
    write = said("write_file", path=NUMBERS, content=golden)
    solving = [write, said("bash", command="echo solved"), f"Done.{END}"]
    failing = [[said("bash", command=f"echo no-{name}"), f"I give up.{END}"] for name in "ab"]
    cheating = [
        said("bash", command="echo 'def leave(): import os; os._exit(0)' >> tinymath/__init__.py"),
        write,
        f"Done.{END}",
    ]
    factory = environment_factory(grader)
    _, log, batch = stepped(factory, store, clamp, tmp_path, [solving, *failing, cheating])
    assert log["rewards/TrlFeatureDeletion/mean"] == log["reward"] == 0.25
    # (r - mean) / (standard deviation + 1e-4) of 1, 0, 0, 0: mean 1/4, variance (9/16 + 3/16) / 3 = 1/4
    expected = [0.75 / 0.5001, *[-0.25 / 0.5001] * 3]
    assert batch["advantages"].flatten().tolist() == pytest.approx(expected, abs=1e-5)
    assert (batch["completion_mask"] * batch["tool_mask"]).sum(-1).min() > 0
