"""How many episodes a minute: our loop beside TRL's ``environment_factory``, on the same vLLM, with the same slow tool.

    make .venvs/vllm/.setup-done
    .venvs/vllm/bin/python benchmarks/served_episodes.py [--episodes 16] [--calls 4] [--repeat 3]

A tiny model that has learned to call one tool in each answer is served by a vLLM on this machine. Each episode has so many
calls and one answer more. A call takes 0.1 s, and one in ten, the same ones for everybody, 3 s: test suites have such tails.
Timed is what makes a generation: sampling, calls, the ids of all turns; no training, no sandbox. TRL runs the calls of a
turn one after another and waits for all of them before the next turn; our loop asks for each episode's next answer as soon
as its call is through. The last line is our loop over the same model in this process, in place of the server.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import itertools
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import get_json_schema

from composer_replication.config import AgentSection
from composer_replication.records import Outcome, Score, ToolCall, ToolResult, ToolSpec
from composer_replication.rollouts.environment.feature_deletion_env import Judgement
from composer_replication.rollouts.episodes import policies
from composer_replication.rollouts.episodes.agent_loop import EpisodeParts, LedgerTalk, run_episodes
from composer_replication.rollouts.episodes.policies import BatchingPolicy, ServedPolicy
from composer_replication.rollouts.tools.tool_context import function_schema
from composer_replication.trainer.policy import ModelSampler
from composer_replication.trainer.tiny_models import make_tiny_tools_model

TASK = "Look around until you know enough."
ANSWER = '<tool_call>\n{"name": "look", "arguments": {"place": "here"}}\n</tool_call><|im_end|>'
PARAMETERS = {"place": {"type": "string", "description": "where"}}
LOOK = ToolSpec(
    "look", {"type": "object", "properties": PARAMETERS, "required": ["place"]}, "Look at a place."
)
QUICK_SECONDS, SLOW_SECONDS, SLOW_SHARE = 0.1, 3.0, 0.1
MAX_NEW_TOKENS = 48
NUM_STEPS = 1200
BOOT_SECONDS = 900


class Place:
    """What is looked at; ``number`` and how often it was asked say how long a look takes."""

    numbers = itertools.count()
    num_calls = 4
    num_looks = 0
    """Of all places, since it was set to 0."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self.number, self.asked = next(Place.numbers), 0

    def seen(self) -> str:
        """One look; beyond ``num_calls`` it takes no time."""
        self.asked += 1
        if self.asked <= self.num_calls:
            Place.num_looks += 1
            draw = random.Random(f"{self.number}/{self.asked}").random()
            time.sleep(SLOW_SECONDS if draw < SLOW_SHARE else QUICK_SECONDS)
        return "Nothing yet."


class TrlPlace:
    """The environment as TRL takes it."""

    def reset(self, **_: Any) -> None:
        self._place = Place()

    def look(self, place: str) -> str:
        """Look at a place.

        Args:
            place: where
        """
        del place
        return self._place.seen()

    def get_reward(self) -> float:
        return float(self._place.asked)


class OwnPlace:
    """The environment as our loop takes it."""

    tools, is_done = (LOOK,), False

    def reset(self, task_id: str) -> str:
        del task_id
        self._place = Place()
        return TASK

    def call(self, call: ToolCall) -> ToolResult:
        del call
        return ToolResult(self._place.seen())

    def finish(self) -> Judgement:
        return Judgement(Score({"looked": Outcome.PASSED}), reward=1.0, graded_reward=1.0)

    def close(self) -> None:
        """Nothing is open."""


def make_caller(folder: Path) -> None:
    """Save a model that answers everything by ``ANSWER``; TRL knows the chat template of its tokenizer."""
    _, tokenizer = make_tiny_tools_model(0)
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=2,  # vLLM needs heads of 64
            num_key_value_heads=1,
            head_dim=64,
            max_position_embeddings=8192,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            tie_word_embeddings=False,
        )
    )
    answer = tokenizer.encode(ANSWER, add_special_tokens=False)
    call = {"type": "function", "function": {"name": "look", "arguments": {"place": "here"}}}
    asked = [{"role": "user", "content": TASK}]
    told = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "Nothing yet."},
    ]
    options: dict[str, Any] = {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
    prompts = [
        tokenizer.apply_chat_template(asked + told * turns, tools=[tool], enable_thinking=thinks, **options)
        for turns in range(Place.num_calls + 1)
        for tool in (function_schema(LOOK), get_json_schema(TrlPlace().look))
        for thinks in (False, True)
    ]
    draw = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(NUM_STEPS):
        prompt = prompts[step % len(prompts)]
        prompt = prompt[
            draw.randrange(len(prompt) - 8) :
        ]  # whatever stands before: two loops render turns unlike
        ids, labels = torch.tensor([[*prompt, *answer]]), torch.tensor([[-100] * len(prompt) + answer])
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@contextmanager
def served(model: Path, log: Path) -> Iterator[str]:
    """A vLLM over that folder: its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--dtype", "float32"]
    command += ["--enforce-eager", "--max-model-len", "4096", "--logprobs-mode", "processed_logprobs"]
    command += ["--max-logprobs", "-1", "--host", "127.0.0.1", "--port", str(port)]
    variables = os.environ | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True, env=variables)
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + BOOT_SECONDS
    try:
        while True:
            try:
                with urllib.request.urlopen(f"{url}/health", timeout=5):
                    break
            except OSError:
                if time.monotonic() > end or process.poll() is not None:
                    raise SystemExit(log.read_text()[-3000:]) from None
                time.sleep(1)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class TimedTrainer(trl.GRPOTrainer):
    """Notes how long each generation takes; the weights that are served are its own already."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.generations: list[float] = []

    def _generate(self, *arguments: Any, **more: Any) -> Any:
        self._last_loaded_step = self.state.global_step
        started = time.perf_counter()
        result = super()._generate(*arguments, **more)
        self.generations.append(time.perf_counter() - started)
        return result


def trl_seconds(
    model: Any, tokenizer: Any, url: str, *, folder: Path, num_episodes: int, repeat: int
) -> list[float]:
    """TRL's generations over its own loop."""
    from trl.generation.vllm_client import VLLMClient

    VLLMClient.init_communicator = lambda *_, **__: None  # weights stay as they are
    arguments = trl.GRPOConfig(
        str(folder),
        per_device_train_batch_size=num_episodes,
        num_generations=num_episodes,
        max_steps=repeat,
        max_completion_length=2048,
        max_tool_calling_iterations=Place.num_calls,
        temperature=1.0,
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=url,
        learning_rate=0.0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        chat_template_kwargs={"enable_thinking": False},
    )
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": TASK}]}] * num_episodes)
    trainer = TimedTrainer(
        model, args=arguments, train_dataset=rows, processing_class=tokenizer, environment_factory=TrlPlace
    )
    trainer.train()
    return trainer.generations


async def own_seconds(policy: Any, tokenizer: Any, num_episodes: int) -> float:
    """One generation over our loop."""
    options = AgentSection(
        max_turns=Place.num_calls + 1, max_new_tokens=MAX_NEW_TOKENS, max_context_tokens=4000, max_concurrent=num_episodes,
        template_options={"enable_thinking": False},
    )  # fmt: skip
    parts = EpisodeParts(policy, OwnPlace, LedgerTalk(tokenizer, options))
    started = time.perf_counter()
    await run_episodes(["place"] * num_episodes, parts, options=options)
    return time.perf_counter() - started


async def own_served(url: str, tokenizer: Any, num_episodes: int) -> float:
    """One generation over our loop, sampled by the server."""
    endpoint = policies.find_server(policies.open_server(url)).endpoint
    async with ServedPolicy(endpoint, filters={}, stop_token_ids=[tokenizer.eos_token_id]) as policy:
        return await own_seconds(policy, tokenizer, num_episodes)


async def own_in_process(model: Any, tokenizer: Any, num_episodes: int) -> float:
    """One generation over our loop, sampled in this process."""
    arguments = trl.GRPOConfig("unused", use_cpu=True, bf16=False, report_to=[])
    sampler = ModelSampler(model, arguments, tokenizer, eos_token_ids=[tokenizer.eos_token_id])
    policy = BatchingPolicy(sampler, max_batch=num_episodes)
    try:
        return await own_seconds(policy, tokenizer, num_episodes)
    finally:
        policy.close()


def row(name: str, num_episodes: int, run: Callable[[], list[float]]) -> float:
    """Print one way; its calls a second."""
    Place.numbers, Place.num_looks = itertools.count(), 0
    seconds = run()
    middle, num_calls = statistics.median(seconds), Place.num_looks / len(seconds)
    print(
        f"{name:28s} {middle:8.1f} s a generation, {60 * num_episodes / middle:7.1f} episodes a minute,"
        f" {num_calls:g} calls, runs {', '.join(f'{each:.1f}' for each in seconds)}",
        flush=True,
    )
    return num_calls / middle


def main() -> None:
    """Serve, time all ways, print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--episodes", type=int, default=16)
    parser.add_argument("--calls", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    if importlib.util.find_spec("vllm") is None:
        print("left out: vLLM is not installed here; the first lines of this file say where it is")
        return
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    Place.num_calls, num, repeat = options.calls, options.episodes, options.repeat
    with tempfile.TemporaryDirectory(prefix="served-") as name:
        folder = Path(name)
        make_caller(folder / "model")
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model = AutoModelForCausalLM.from_pretrained(folder / "model")
        tokenizer = AutoTokenizer.from_pretrained(folder / "model")
        with served(folder / "model", folder / "vllm.log") as url:
            asyncio.run(own_served(url, tokenizer, 2))  # the first requests of a server are slow
            rounds = range(repeat)
            ours = row(
                "our loop, vLLM", num, lambda: [asyncio.run(own_served(url, tokenizer, num)) for _ in rounds]
            )
            options = {"folder": folder, "num_episodes": num, "repeat": repeat}
            theirs = row("TRL's loop, vLLM", num, lambda: trl_seconds(model, tokenizer, url, **options))
        in_process = partial(own_in_process, model, tokenizer, num)
        row("our loop, model in process", num, lambda: [asyncio.run(in_process()) for _ in rounds])
    print(f"our loop makes {ours / theirs:.1f} times as many calls a second as TRL's (goal 3)")


if __name__ == "__main__":
    main()
