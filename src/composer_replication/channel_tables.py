"""The tables ``[heldout]``, ``[hints]``, ``[replay]``, ``[curriculum]``, ``[ray]``, ``[replicas]`` and ``[agent]`` of a recipe, and what every table is.

Apart from ``config`` for its size alone.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from composer_replication.records import MonitorMode


class Section(BaseModel):
    """A table of the recipe: unknown keys are errors, values are not coerced, numbers are finite."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    departed: ClassVar[dict[str, Any]] = {}
    """Keys that were removed, each with its last default: the run.toml of an older run still has them, and is still read."""

    @model_validator(mode="before")
    @classmethod
    def _of_an_older_run(cls, table: Any) -> Any:
        if not isinstance(table, dict):
            return table
        return {key: value for key, value in table.items() if cls.departed.get(key, ...) != value}


class HeldoutSection(Section):
    """How the truth is measured; tasks here are never trained on.

    ``repositories`` names the repositories (without version) whose tasks are held out.
    ``split`` is a file that ``composer-rl tasks split`` wrote; the tasks must be those that it
    was made of. ``fraction`` draws so many of the tasks, grouped by repository where there are
    several. Without all three the ``split.json`` of ``tasks.store`` counts, or else 0.3 are drawn.
    ``every`` guard folds share one evaluation: at the others it is not due. Each draws
    ``sample_size`` tasks afresh (0: all), and ``num_canaries`` tasks that cannot be solved
    honestly. ``has_sentinel`` runs the golden code of each drawn task first, so that an outage of
    the grader is not taken for a fall of the truth. One longer than ``timeout_seconds`` is missed, and the third in a row halts.
    With ``[agent]`` an attempt is an episode within its limits, and the score the share of hidden tests
    that pass, unless ``agent.reward.rule`` is ``all_or_nothing``. ``before_and_after_samples`` measures all tasks
    twice, trained ones with ``before_and_after_trained_samples`` where that is given.
    """

    repositories: list[str] = []
    split: str = ""
    fraction: float | None = Field(None, gt=0.0, lt=1.0)
    every: int = Field(1, ge=1)
    samples_per_task: int = Field(1, ge=1)
    sample_size: int = Field(0, ge=0)
    num_canaries: int = Field(0, ge=0)
    has_sentinel: bool = False
    timeout_seconds: float | None = Field(1800.0, gt=0.0)
    before_and_after_samples: int = Field(0, ge=0)
    before_and_after_trained_samples: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _one_division(self) -> HeldoutSection:
        if self.split and (self.repositories or self.fraction is not None):
            raise ValueError("give split alone, without repositories and fraction")
        return self


class HintsSection(Section):
    """Hint distillation (``trainer.alpha_sdpo``): the policy under a hint teaches the policy without it.

    ``teacher`` is a moving average of the policy (``ema``, by ``ema_rate`` a step), its first weights (``frozen``)
    or the model without its adapter (``lora-off``). ``jsd_alpha``: 0 forward KL, 1 reverse KL, between them
    Jensen-Shannon, over the student's ``top_k`` tokens and one tail class. A token weighs
    min(exp(logp - sampled logp), 2). ``strict`` ends the run where a hint does not fit its prompt exactly; otherwise
    such turns are left out and counted.
    """

    teacher: Literal["ema", "frozen", "lora-off"] = "ema"
    ema_rate: float = Field(0.05, gt=0.0, le=1.0)
    jsd_alpha: float = Field(0.5, ge=0.0, le=1.0)
    top_k: int = Field(100, ge=1)
    strict: bool = True

    departed: ClassVar[dict[str, Any]] = {
        "writing": {"layers": ["template", "environment"]},
        "turns_per_step": 4,
    }


class ReplaySection(Section):
    """Preference pairs (``trainer.beta_replay``), mixed into every step: ``pairs_per_step`` of those given.

    ``kind`` is the loss; ``beta`` and ``margin`` are its own (no beta: dpo 5.0, or 0.1 on sums; ipo 0.1;
    simpo 2.0). ``length_normalised`` takes mean log-probabilities a token in place of sums. ``pairs`` is a file of pairs,
    one JSON object a line with prompt, chosen and rejected (texts, messages or ids), its path seen from the recipe.
    ``sibling_pairs`` also pairs, inside each group, rollouts that reach ``pass_reward`` with those that do not.
    """

    kind: Literal["dpo", "ipo", "simpo"] = "dpo"
    beta: float | None = Field(None, gt=0.0)
    margin: float = Field(0.0, ge=0.0)
    length_normalised: bool = True
    pairs: str = ""
    pairs_per_step: int = Field(4, ge=1)
    sibling_pairs: bool = False
    pass_reward: float = 1.0

    @model_validator(mode="after")
    def _kind_fits(self) -> ReplaySection:
        if self.kind == "ipo" and self.margin:
            raise ValueError("ipo takes no margin: its own is 1 / (2 beta)")
        if self.kind == "simpo" and not self.length_normalised:
            raise ValueError("simpo is length-normalised by definition")
        return self


class CurriculumSection(Section):
    """Draws the tasks of each generation by what is known of their pass rates; without this table the data order counts.

    A task weighs E[p(1-p)] under what it did so far. An attempt counts half after ``half_life`` generations, since the
    policy moves on. Pass rates that ``eval --update-difficulty`` kept beside the tasks come first, as at most
    eight attempts each: those of the very weights, and where there are none of other policies
    (``any``) or nothing (``same-weights``). A tenth of the draws is spread evenly over all active tasks;
    docs/curriculum.md says how tasks are retired and come back.
    """

    half_life: float = Field(100.0, gt=0.0)
    recorded: Literal["same-weights", "any", "none"] = "any"

    floor_share: ClassVar[float] = 0.1
    recorded_weight: ClassVar[float] = 8.0
    retire_above: ClassVar[float] = 0.9
    retire_certainty: ClassVar[float] = 0.9
    revival_share: ClassVar[float] = 0.02


class RaySection(Section):
    """Attempts and gradings as actors of a Ray cluster, and a build of ``tasks.source`` too; docs/rollouts_on_ray.md has more.

    ``address`` as ``tasks build --ray`` takes it; ``train --ray ADDRESS`` sets it. There are ``num_actors`` actors, each of which
    asks Ray for ``num_cpus`` and ``resources``; 0 is one for each episode that runs at a time, or as many as the nodes have room
    for where that is less; several processes of a run share the room. No more episodes run at a time than there are actors.
    A run may be resumed with another table, or without one.
    """

    address: str
    num_actors: int = Field(0, ge=0)
    num_cpus: float = Field(1.0, ge=0.0)
    resources: dict[str, Annotated[float, Field(ge=0.0)]] = {}


OuterPrecision = Literal["fp32", "bf16", "int8", "int4"]


class ReplicasSection(Section):
    """Several trainers of one run (DiLoCo), each with its share of the tasks; docs/replicas.md explains each key.

    ``transport`` is ``torchft``, for replicas on one network, or the address of an object store (``s3://``, ``gs://``, ``az://``,
    ``file:///``), for those that share nothing else. ``num_replicas`` of them train ``sync_every`` steps each and then take one outer
    step (Nesterov, 0.7 and momentum 0.9); what they learned is sent as ``precision`` says, and what rounding takes
    away is sent the next time. ``fragments`` of the weights take turns, so that ``sync_every / fragments`` steps lie between two outer
    steps; ``delay`` steps are trained while one is under way. ``min_replicas`` have to take part; the others are waited
    for ``grace_seconds`` more, and ``min_replicas`` for ``deadline_seconds`` at most, as are all in the first outer step.
    With torchft, ``lighthouse`` is HOST:PORT of ``composer-rl replicas lighthouse``, and ``interface`` the address of this machine at
    which the other replicas reach it. With one replica nothing of this is built.
    """

    transport: str
    num_replicas: int = Field(2, ge=1)
    sync_every: int = Field(100, ge=1)
    fragments: int = Field(1, ge=1)
    delay: int = Field(0, ge=0)
    precision: OuterPrecision = "int8"
    min_replicas: int = Field(1, ge=1)
    grace_seconds: float = Field(60.0, gt=0.0)
    deadline_seconds: float = Field(600.0, gt=0.0)
    lighthouse: str = ""
    interface: str = "127.0.0.1"

    outer_lr: ClassVar[float] = 0.7
    outer_momentum: ClassVar[float] = 0.9

    @property
    def interval(self) -> int:
        """Steps between two outer steps."""
        return self.sync_every // self.fragments

    @model_validator(mode="after")
    def _fits(self) -> ReplicasSection:
        if self.sync_every % self.fragments:
            raise ValueError("sync_every is no multiple of fragments")
        if self.delay >= self.interval:
            raise ValueError(f"delay is not below sync_every / fragments = {self.interval}")
        if self.min_replicas > self.num_replicas:
            raise ValueError("min_replicas is above num_replicas")
        if self.transport != "torchft" and "://" not in self.transport:
            raise ValueError('transport is neither "torchft" nor an address such as s3://bucket/run-7')
        return self


class AgentRewardSection(Section):
    """What an attempt with tools is worth; docs/environment.md explains each key.

    ``rule`` is the ``fraction`` of the visible tests that pass, or ``all_or_nothing``. To break a test that passed before
    pays nothing (``breaks`` ``mask``), costs the share that broke (``cost``), or is not looked at (``ignore``);
    ``break_sample`` of them are run, 0 runs all. Each call that could not be made costs ``invalid_call_cost``.
    """

    rule: Literal["fraction", "all_or_nothing"] = "fraction"
    breaks: Literal["mask", "cost", "ignore"] = "mask"
    break_sample: int = Field(0, ge=0)
    invalid_call_cost: float = Field(0.0, ge=0.0)


class AgentToolsSection(Section):
    """``max_characters`` of one result; ``is_warm`` keeps one process in an attempt's sandbox, which starts the commands.

    So it is where the backend can. Without it each command has a jail of its own, some 10 ms. docs/sandbox.md says what differs.
    """

    max_characters: int = Field(16_000, ge=1000)
    is_warm: bool = True


class AgentSection(Section):
    """Rollouts of several turns with tools; without this table a rollout is one answer. docs/agentic_training.md has more.

    An answer has at most ``max_new_tokens``, a whole conversation ``max_context_tokens``; from ``summary_tokens`` on (0:
    never) the policy sums up and goes on in a new one, ``max_summaries`` times at most. docs/episodes.md tells of the other
    limits. ``template_options`` are variables of the chat template. ``monitor`` pays rollouts
    with a finding 0 at most (``mask``), as docs/monitor.md says by class, or only counts findings (``report``).
    ``log_prob_check`` compares trainer and sampler at each step: over 0.05 nats on average it tells
    (``report``) or stops (``error``). At most ``max_concurrent`` episodes run at a time. Answers are sampled when every running episode
    waits for one, so that the same seed gives the same bits.
    """

    max_turns: int = Field(20, ge=1)
    max_context_tokens: int = Field(16_384, ge=2)
    max_new_tokens: int = Field(2048, ge=1)
    min_new_tokens: int = Field(16, ge=1)
    max_concurrent: int = Field(32, ge=1)
    summary_tokens: int = Field(0, ge=0)
    max_summaries: int = Field(4, ge=1)
    reminder: str = ""
    system: str = ""
    template_options: dict[str, Any] = {}
    monitor: MonitorMode = "mask"
    log_prob_check: Literal["report", "error", "off"] = "report"
    reward: AgentRewardSection = AgentRewardSection()
    tools: AgentToolsSection = AgentToolsSection()

    departed: ClassVar[dict[str, Any]] = {"dialect": ""}

    @model_validator(mode="after")
    def _limits_fit(self) -> AgentSection:
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError("min_new_tokens is above max_new_tokens")
        if self.max_new_tokens >= self.max_context_tokens:
            raise ValueError(
                "max_new_tokens leaves no room for a prompt: it has to be below max_context_tokens"
            )
        if self.summary_tokens >= self.max_context_tokens:
            raise ValueError("summary_tokens is never reached: it has to be below max_context_tokens")
        return self
