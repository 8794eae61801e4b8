"""Which columns of a log are the proxy, the truth and the KL."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from composer_replication.errors import InputError, UsageError

if TYPE_CHECKING:
    from composer_replication.report.log_columns import RunLog

PROXY_NAMES = (
    "reward",  # ours, TRL's GRPO and RLOO
    "train_reward",
    "critic/score/mean",  # verl: the task's score, before a KL penalty
    "critic/rewards/mean",
    "objective/scores",  # PPO with a reward model
    "objective/rlhf_reward",
    "rewards/mean",
    "reward/mean",
    "mean_reward",
    "reward_mean",
    "rollout/ep_rew_mean",
    "env_runners/episode_return_mean",
    "episode_reward_mean",
    "rewards/margins",  # DPO
)
TRUTH_NAMES = (
    "heldout/score",  # ours
    "heldout_score",
    "eval_reward",
    "eval/reward",
    "val/reward",
    "val_reward",
    "eval/mean_reward",
    "eval_score",
    "eval/score",
    "eval_accuracy",
    "eval/accuracy",
    "eval_rewards/margins",
    "eval/rewards/margins",
    "test/score",
    "test_score",
)
KL_NAMES = (
    "killswitch/kl_to_init",  # ours: what the guard was given
    "kl_to_init",
    "kl",
    "objective/kl",
    "actor/kl_loss",  # verl: to the reference policy; its actor/ppo_kl is to the policy one step before
    "actor/reward_kl_penalty",
)
NO_COLUMN = "none"
"""As ``--kl none``: the KL path stays off."""

_TRUTH_PREFIX = re.compile(r"(held_?out|eval|val|val-core|validation|test)[/_]")
_NO_SCORE = re.compile(
    r"runtime|per_second|seconds|time|loss|epoch|step|num_|tokens|length|std|entropy|kl|clip|ratio|grad|"
    r"failures|evaluation_idx|turns|learning_rate|(^|[/_])(min|max)$"
)
_WRAPPER = re.compile(r"^(.* - )?((data|metrics|logs?|train)/)?")
"""Not part of the name: ``RUN - `` of an exported table, ``data/`` of verl's file logger, and ``train/``,
which the reporters of transformers put before all that is no evaluation."""

_MAX_NAMED = 12


@dataclass(frozen=True, slots=True)
class Chosen:
    """One column; ``sign`` is -1 where lower is better and the numbers are turned round."""

    name: str
    sign: int = 1
    is_guess: bool = False

    @property
    def spelled(self) -> str:
        """As a flag would name it."""
        return f"{'-' if self.sign < 0 else ''}{self.name}"

    def __str__(self) -> str:
        return f"{self.spelled} (guessed)" if self.is_guess else self.spelled


@dataclass(frozen=True, slots=True)
class ChosenColumns:
    """The columns of a scan; ``kl`` is None where the log has none."""

    proxy: Chosen
    truth: Chosen
    kl: Chosen | None

    def sentence(self, log: RunLog) -> str:
        """Which columns are used, for a person."""
        kl = self.kl or "none, so the KL path is off"
        step = log.step_column or f"the {log.place} number"
        return f"Columns: proxy {self.proxy}; truth {self.truth}; KL {kl}; steps {step}."


def choose_columns(log: RunLog, *, proxy: str = "", truth: str = "", kl: str = "") -> ChosenColumns:
    """The named columns, and a guess for those that are not named.

    A name that begins with a minus is a column where lower is better (``-eval_loss``); its numbers
    are turned round. A guess is a name of the lists above; a truth may also be the one column
    whose name begins with eval, val, test or heldout and is no loss, time or count.

    Raises:
        UsageError: a named column is not there; names the nearest ones (CR0633).
        InputError: no column, or several, could be the proxy or the truth (CR0633).
    """
    return ChosenColumns(
        proxy=_named(log, proxy, "proxy") if proxy else _guessed(log, "proxy", PROXY_NAMES),
        truth=_named(log, truth, "truth") if truth else _guessed_truth(log),
        kl=_chosen_kl(log, kl),
    )


def _chosen_kl(log: RunLog, kl: str) -> Chosen | None:
    if kl == NO_COLUMN:
        return None
    if kl:
        return _named(log, kl, "kl")
    name = _first_known(log, KL_NAMES)
    return Chosen(name, is_guess=True) if name else None


def _named(log: RunLog, name: str, role: str) -> Chosen:
    if name in log.columns:
        return Chosen(name)
    sign, bare = (-1, name[1:]) if name.startswith("-") else (1, name)
    same = [bare] if bare in log.columns else [known for known in log.columns if _plain(known) == bare]
    if len(same) == 1:
        return Chosen(same[0], sign)
    near = difflib.get_close_matches(bare, log.columns, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"the log has {_listed(log)}."
    raise UsageError("CR0633", f"there is no column {bare!r}.", where=f"--{role}, {log.path}", fix=hint)


def _guessed(log: RunLog, role: str, names: tuple[str, ...]) -> Chosen:
    name = _first_known(log, names)
    if name:
        return Chosen(name, is_guess=True)
    raise InputError(
        "CR0633",
        f"no column is known to be the {role}; the columns with numbers are {_listed(log)}.",
        where=str(log.path),
        fix=f"name it with --{role} COL, or --{role}=-COL where lower is better.",
    )


def _guessed_truth(log: RunLog) -> Chosen:
    name = _first_known(log, TRUTH_NAMES)
    if name:
        return Chosen(name, is_guess=True)
    possible = [
        known
        for known in _with_numbers(log)
        if _TRUTH_PREFIX.match(_plain(known).lower()) and not _NO_SCORE.search(_plain(known).lower())
    ]
    if len(possible) == 1:
        return Chosen(possible[0], is_guess=True)
    if not possible:
        return _guessed(log, "truth", ())
    raise InputError(
        "CR0633",
        f"{len(possible)} columns could be the truth: {_shortened(possible)}.",
        where=str(log.path),
        fix=f"name one, for example --truth {possible[0]}",
    )


def _first_known(log: RunLog, names: tuple[str, ...]) -> str:
    plain = {_plain(name).lower(): name for name in reversed(_with_numbers(log))}
    return next((plain[name] for name in names if name in plain), "")


def _with_numbers(log: RunLog) -> list[str]:
    return [name for name, column in log.columns.items() if len(column) or column.num_not_finite]


def _plain(name: str) -> str:
    return _WRAPPER.sub("", name, count=1)


def _listed(log: RunLog) -> str:
    return _shortened(_with_numbers(log)) or "none"


def _shortened(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(name[:80] for name in names[:_MAX_NAMED]) + more
