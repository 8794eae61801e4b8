"""A ``verifiers`` environment: its tasks come from a store, its harness calls our tools, its reward is our grading.

The library finds it by the name ``composer-replication-verifiers``. Model calls go through the library's
interception, so that its limits, its traces and its trainer see them; tools work in our sandboxes, and nothing that
a model writes runs in the library's own runtime.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PrivateAttr

from composer_replication.errors import UsageError, needs_extra
from composer_replication.records import MonitorMode, ToolCall
from composer_replication.rollouts.environment.feature_deletion_env import first_message
from composer_replication.rollouts.environment.hosted_attempt import AttemptHost, HostedAttempt
from composer_replication.rollouts.tools.tool_schemas import function_schema
from composer_replication.rollouts.tools.toolbox import TOOLS

with needs_extra("verifiers", "the verifiers environment"):
    import openai
    import verifiers.v1 as vf


NAME = "composer-replication-verifiers"
"""What ``vf-eval`` and configurations call it: the name of the module that the library imports."""
_HOSTS: dict[str, AttemptHost] = {}
_HOSTS_LOCK = threading.Lock()


class FeatureDeletionTaskConfig(vf.TaskConfig):
    """What attempts are made of, under ``--env.taskset.task``; see ``AttemptHost`` and ``RewardOptions``."""

    store: Path = Path("tasks")
    """Folder of the task store."""
    backend: str = ""
    """Sandbox backend; empty for the best of this machine."""
    num_jobs: int = Field(2, ge=1)
    """Test runs at the same time, in one process."""
    test_seconds: float = Field(20.0, gt=0)
    """Processor time of one test run."""
    with_hidden: bool = False
    """Run the hidden tests too, as the metric hidden_pass_share: for evaluation, never for training."""
    rule: Literal["fraction", "all_or_nothing"] = "fraction"
    breaks: Literal["mask", "cost", "ignore"] = "mask"
    break_sample: int = Field(0, ge=0)
    invalid_call_cost: float = Field(0.0, ge=0)
    monitor: MonitorMode = "mask"
    """Of dishonest moves: mask pays nothing for them, report tells, off does not look."""


_HOST_OPTIONS = tuple(FeatureDeletionTaskConfig.model_fields.keys() - vf.TaskConfig.model_fields.keys())


class FeatureDeletionTasksetConfig(vf.TasksetConfig):
    """The tasks of one store."""

    task: FeatureDeletionTaskConfig = FeatureDeletionTaskConfig()


class FeatureDeletionData(vf.TaskData):
    """``id`` is the task's id, ``prompt`` what is to be done."""

    repository: str = ""


class FeatureDeletionState(vf.State):
    """The attempt of one rollout; it lives in this process alone and is in no record."""

    _attempt: HostedAttempt | None = PrivateAttr(default=None)


class FeatureDeletionTask(vf.Task[FeatureDeletionData, FeatureDeletionState, FeatureDeletionTaskConfig]):
    """One task of the store: ``setup`` opens its sandbox, scoring grades the tree outside of it."""

    @property
    def key(self) -> str:
        return str(self.data.id)

    async def setup(self, trace: Any, runtime: Any) -> None:
        """Open the attempt; another harness has tools that work in the library's runtime, which is no sandbox of ours."""
        harness = trace.agent.config.harness  # None where no agent plays: vf-validate
        if not isinstance(harness, FeatureDeletionHarnessConfig | None) or runtime.type != "subprocess":
            raise UsageError(
                "CR0722",
                "these tasks are played by their own harness in this process, "
                f"not by {getattr(harness, 'id', harness)!r} in the runtime {runtime.type!r}.",
                where="--env.agent.harness.id, --env.agent.runtime.type",
                fix="leave both options out.",
            )
        attempt = await _host_of(self.config).open(str(self.data.id))
        trace.state._attempt = attempt  # noqa: SLF001  our own state
        _require_sandbox(attempt)

    async def finalize(self, trace: Any, runtime: Any) -> None:
        """Grade, before the library has a reward to fill in: where a sandbox failed, none is begun."""
        del runtime
        attempt = _attempt_of(trace)
        outcome = await attempt.outcome()
        if outcome.monitor is not None:
            trace.info["monitor"] = outcome.monitor
        _require_sandbox(attempt)

    @vf.metric
    async def attempt(self, trace: Any) -> dict[str, float]:
        """What the attempt took and came to, by name."""
        return (await _attempt_of(trace).outcome()).figures

    @vf.reward
    async def tests(self, trace: Any) -> float:
        """What the visible tests are worth, 0 where the monitor masks it; where a sandbox failed there is an error instead."""
        attempt = _attempt_of(trace)
        outcome = await attempt.outcome()
        _require_sandbox(attempt)
        return float(outcome.judgement.reward if outcome.judgement is not None else 0.0)


class FeatureDeletionTaskset(vf.Taskset[FeatureDeletionTask, FeatureDeletionTasksetConfig]):
    """Every task of a store, in the order of their ids."""

    def load(self) -> Iterator[FeatureDeletionTask]:
        store = _host_of(self.config.task).store
        for task in store.tasks():
            data = FeatureDeletionData(
                id=task.task_id,
                name=f"{task.repository} {task.symbol}",
                prompt=first_message(store, task),
                repository=task.repository,
            )
            yield FeatureDeletionTask(data, self.config.task)


class FeatureDeletionHarnessConfig(vf.HarnessConfig):
    """``disabled_tools`` are not offered, and refused when they are called all the same."""


class FeatureDeletionHarness(vf.Harness[FeatureDeletionHarnessConfig]):
    """The loop: the model is asked, its calls are made in their order, until ``submit`` or an answer without a call.

    Its turns, tokens and seconds are limited by the library's options of the agent.
    """

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False  # not in the library's runtime, which stays empty
    NEEDS_CONTAINER = False

    async def launch(  # noqa: PLR0917  the library's own signature
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> Any:
        """Play the attempt to its end."""
        del runtime, mcp_urls
        attempt = _attempt_of(trace)
        disabled = set(self.config.disabled_tools or ())
        tools: Any = [function_schema(tool) for tool in TOOLS if tool.name not in disabled]
        system, prompt = self.resolve_text_prompt(data)
        messages: Any = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": prompt})
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, timeout=None) as client:
            while not attempt.is_over:
                answer = await client.chat.completions.create(model=ctx.model, messages=messages, tools=tools)
                message = answer.choices[0].message.model_dump(exclude_none=True)
                messages.append(message)
                if not message.get("tool_calls"):
                    break
                for call in message["tool_calls"]:
                    messages.append(await _answer(attempt, call, disabled))
                    _require_sandbox(attempt)
        return vf.ProgramResult(0, "", "")

    async def cleanup(self, trace: Any, runtime: Any) -> None:
        """Called last, whatever happened."""
        del runtime
        attempt = getattr(trace.state, "_attempt", None)
        if attempt is not None:
            trace.state._attempt = None  # noqa: SLF001  our own state
            await attempt.end()


class FeatureDeletionEnvConfig(vf.EnvConfig):
    """One agent; what it writes runs in our sandboxes, so the library's runtime is a folder of this machine."""

    agent: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())


class FeatureDeletionVerifiersEnv(vf.Env[FeatureDeletionEnvConfig]):
    """One rollout an episode."""

    async def run(self, task: Any, agents: Any) -> None:
        """Let the agent play the task."""
        await agents.agent.run(task)


def load_environment(store: Path | str, **options: Any) -> FeatureDeletionVerifiersEnv:
    """The environment over a store, for whoever writes Python.

    Args:
        store: its folder.
        **options: fields of ``FeatureDeletionTaskConfig``.
    """
    task = FeatureDeletionTaskConfig(store=Path(store), **options)
    config = FeatureDeletionEnvConfig(taskset=FeatureDeletionTasksetConfig(id=NAME, task=task))
    _host_of(task)  # a store that is not there is said at once
    return FeatureDeletionVerifiersEnv(config)


async def _answer(attempt: HostedAttempt, call: dict[str, Any], disabled: set[str]) -> dict[str, Any]:
    """The message that answers a call as it came over the wire."""
    native = call.get(call.get("type") or "function") or {}
    name = str(native.get("name") or "")
    written = native.get("arguments", native.get("input"))
    asked = ToolCall(name, written if isinstance(written, str) else "", str(call.get("id") or ""))
    if name in disabled:
        await attempt.count_unreadable_call(name)
        text = f"the tool {name} is switched off."
    else:
        text = (await attempt.call(asked)).text
    return {"role": "tool", "tool_call_id": asked.call_id, "name": name, "content": text}


def _attempt_of(trace: Any) -> HostedAttempt:
    attempt: HostedAttempt | None = getattr(trace.state, "_attempt", None)
    if attempt is None:
        raise UsageError(
            "CR0800",
            "a rollout of verifiers has no attempt under way.",
            where=NAME,
            fix="run it through vf-eval, or Env.run_episode: its task's setup opens the attempt.",
        )
    return attempt


def _require_sandbox(attempt: HostedAttempt) -> None:
    if attempt.failure:
        raise vf.SandboxError(attempt.failure)


def _host_of(config: FeatureDeletionTaskConfig) -> AttemptHost:
    """One for each configuration in this process, because the library makes tasks anew wherever it likes."""
    key = config.model_copy(update={"store": config.store.resolve()}).model_dump_json()
    with _HOSTS_LOCK:
        if key not in _HOSTS:
            _HOSTS[key] = AttemptHost(**{name: getattr(config, name) for name in _HOST_OPTIONS})
        return _HOSTS[key]
