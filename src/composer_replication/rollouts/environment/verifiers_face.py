"""A ``verifiers`` environment: its tasks come from a store, its harness calls our tools, its reward is our grading.

The library finds it by the name ``composer-replication-verifiers``. Model calls go through the library's
interception, so that its limits, its traces and its trainer see them; tools work in our sandboxes, and nothing that
a model writes runs in the library's own runtime.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from composer_replication.errors import SandboxFailure, UsageError, needs_extra
from composer_replication.records import ToolCall
from composer_replication.rollouts.environment.feature_deletion_env import (
    FeatureDeletionEnv,
    Judgement,
    first_message,
    no_attempt,
)
from composer_replication.rollouts.environment.hosted_attempt import (
    AttemptHost,
    EnvironmentLease,
    HostOptions,
)
from composer_replication.rollouts.tools.tool_context import function_schema
from composer_replication.rollouts.tools.toolbox import TOOLS

with needs_extra("verifiers", "the verifiers environment"):
    import openai
    import verifiers.v1 as vf


NAME = "composer-replication-verifiers"
"""What ``vf-eval`` and configurations call it: the name of the module that the library imports."""
T = TypeVar("T")
_HOSTS: dict[str, AttemptHost] = {}
_LEASES: dict[str, EnvironmentLease] = {}
"""Attempts of rollouts under way, by the id of their trace; they live in this process alone and are in no record."""


class FeatureDeletionTaskConfig(vf.TaskConfig, HostOptions):
    """What attempts are made of, under ``--env.taskset.task``."""

    def host(self) -> AttemptHost:
        """One for each configuration in this process, because the library makes tasks anew wherever it likes."""
        key = self.model_copy(update={"store": self.store.resolve()}).model_dump_json()
        return _HOSTS.get(key) or _HOSTS.setdefault(key, AttemptHost(self))


class FeatureDeletionTasksetConfig(vf.TasksetConfig):
    """The tasks of one store."""

    task: FeatureDeletionTaskConfig = FeatureDeletionTaskConfig()


class FeatureDeletionTask(vf.Task[vf.TaskData, vf.State, FeatureDeletionTaskConfig]):
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
        _LEASES[trace.id] = self.config.host().lease()
        weakref.finalize(trace, _LEASES.pop, trace.id, None)  # vf-validate has no harness to clean up
        await _do(trace, lambda environment: environment.reset(self.key))

    async def finalize(self, trace: Any, runtime: Any) -> None:
        """Grade, before the library has a reward to fill in: where a sandbox failed, none is begun."""
        del runtime
        judgement = await self._judged(trace)
        if judgement.report is not None:
            trace.info["monitor"] = judgement.report.to_json()

    @vf.metric
    async def attempt(self, trace: Any) -> dict[str, float]:
        """What the attempt took and came to, by name."""
        return (await self._judged(trace)).figures

    @vf.reward
    async def tests(self, trace: Any) -> float:
        """What the visible tests are worth, 0 where the monitor masks it; where a sandbox failed there is an error instead."""
        return (await self._judged(trace)).reward

    async def _judged(self, trace: Any) -> Judgement:
        return await _do(trace, self.config.host().judged)


class FeatureDeletionTaskset(vf.Taskset[FeatureDeletionTask, FeatureDeletionTasksetConfig]):
    """Every task of a store, in the order of their ids."""

    def load(self) -> Iterator[FeatureDeletionTask]:
        store = self.config.task.host().store
        for task in store.tasks():
            name = f"{task.repository} {task.symbol}"
            data = vf.TaskData(id=task.task_id, name=name, prompt=first_message(store, task))
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
        disabled = set(self.config.disabled_tools or ())
        tools: Any = [function_schema(tool) for tool in TOOLS if tool.name not in disabled]
        system, prompt = self.resolve_text_prompt(data)
        messages: Any = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": prompt})
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, timeout=None) as client:
            while not await _do(trace, lambda environment: environment.is_done):
                answer = await client.chat.completions.create(model=ctx.model, messages=messages, tools=tools)
                message = answer.choices[0].message.model_dump(exclude_none=True)
                messages.append(message)
                if not message.get("tool_calls"):
                    break
                for call in message["tool_calls"]:
                    asked = call.get("function") or {}
                    name, arguments = str(asked.get("name") or ""), asked.get("arguments")
                    is_off = name in disabled  # then the environment counts it as a call of an unknown tool
                    made = ToolCall("" if is_off else name, arguments if isinstance(arguments, str) else "")
                    text = (await _do(trace, partial(FeatureDeletionEnv.call, call=made))).text
                    said = f"the tool {name} is switched off." if is_off else text
                    answered = {"tool_call_id": str(call.get("id") or ""), "name": name}
                    messages.append({"role": "tool", **answered, "content": said})
        return vf.ProgramResult(0, "", "")

    async def cleanup(self, trace: Any, runtime: Any) -> None:
        """Called last, whatever happened."""
        del runtime
        if lease := _LEASES.pop(trace.id, None):
            lease.release()


class FeatureDeletionEnvConfig(vf.SingleAgentEnvConfig):
    """One agent; what it writes runs in our sandboxes, so the library's runtime is a folder of this machine."""

    agent: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())


class FeatureDeletionVerifiersEnv(vf.SingleAgentEnv, vf.Env[FeatureDeletionEnvConfig]):
    """One rollout an episode."""


def load_environment(store: Path | str, **options: Any) -> FeatureDeletionVerifiersEnv:
    """The environment over a store, for whoever writes Python; ``options`` are fields of ``HostOptions``."""
    task = FeatureDeletionTaskConfig(store=Path(store), **options)
    task.host()  # a store that is not there is said at once
    taskset = FeatureDeletionTasksetConfig(id=NAME, task=task)
    return FeatureDeletionVerifiersEnv(FeatureDeletionEnvConfig(taskset=taskset))


async def _do(trace: Any, act: Callable[[FeatureDeletionEnv], T]) -> T:
    """Do something in the attempt of a rollout; a sandbox that fails is an error of the library's."""
    if trace.id not in _LEASES:  # a stored rollout has no sandbox any more
        raise no_attempt(
            NAME, "run it through vf-eval, or Env.run_episode: its task's setup opens the attempt."
        )
    try:
        return await _LEASES[trace.id].do(act)
    except SandboxFailure as error:
        raise vf.SandboxError(str(error)) from error
