"""What a guard would have said during a run that is over, from its log.

chosen = choose_columns(log)              which columns are the proxy, the truth and the KL
readings, notes = readings_of(log, chosen)
statuses = replay(HeldOutGuard(), readings)
"""

from __future__ import annotations

import difflib
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from itertools import pairwise

from composer_replication.errors import InputError, UsageError
from composer_replication.interfaces import Guard, GuardStatus
from composer_replication.report.run_logs import RunLog

ROLES = {
    "proxy": (
        *("reward", "train_reward"),  # ours, TRL's GRPO and RLOO
        *("critic/score/mean", "critic/rewards/mean"),  # verl: the task's score, before a KL penalty
        *("objective/scores", "objective/rlhf_reward"),  # PPO with a reward model
        *("rewards/mean", "reward/mean", "mean_reward", "reward_mean"),
        *("rollout/ep_rew_mean", "env_runners/episode_return_mean", "episode_reward_mean"),
        "rewards/margins",  # DPO
    ),
    "truth": (
        *("heldout/score", "heldout_score"),  # ours
        *("eval_reward", "eval/reward", "val/reward", "val_reward", "eval/mean_reward"),
        *("eval_score", "eval/score", "eval_accuracy", "eval/accuracy"),
        *("eval_rewards/margins", "eval/rewards/margins", "test/score", "test_score"),
    ),
    "kl": (
        "killswitch/kl_to_init",  # ours: what the guard was given
        *("kl_to_init", "kl", "objective/kl"),
        "actor/kl_loss",  # verl: to the reference policy; its actor/ppo_kl is to the policy one step before
        "actor/reward_kl_penalty",
    ),
}
"""What a guard reads, and the names under which it is looked for."""

MOST_NOT_FINITE = 0.1
"""Share of a column's values that may be NaN or infinite (two always may): what is left of a column
with more of them would be a selection, and an honest verdict over it impossible."""

_WRAPPER = re.compile(r"^(.* - )?((data|metrics|logs?|train)/)?")
"""Not part of the name: ``RUN - `` of an exported table, ``data/`` of verl's file logger, and ``train/``,
which the reporters of transformers put before all that is no evaluation."""

_MAX_NAMED = 12


Columns = dict[str, str]
"""By role, as a flag would name it: with a minus where lower is better. The KL is empty where the log has none, or none is wanted."""

Reading = tuple[int, float, float, float | None]
"""One update of the guard: the step of a truth, the newest proxy at or before it, the truth, and the newest KL."""


def choose_columns(log: RunLog, *, proxy: str = "", truth: str = "", kl: str = "") -> Columns:
    """The named columns, and a guess for those that are not named.

    A name that begins with a minus is a column where lower is better (``-eval_loss``); its numbers
    are turned round. A guess is a name of the lists above.

    Raises:
        UsageError: a named column is not there; names the nearest ones (CR0633).
        InputError: no column is known to be the proxy or the truth (CR0633).
    """
    named = {"proxy": proxy, "truth": truth, "kl": kl}
    return {role: _named(log, name, role) if name else _guessed(log, role) for role, name in named.items()}


def columns_sentence(log: RunLog, chosen: Columns, named: Mapping[str, str]) -> str:
    """Which columns are used, for a person; those that are not ``named`` were guessed."""
    said = {role: name if named.get(role) else f"{name} (guessed)" for role, name in chosen.items() if name}
    kl = said.get("kl", "none, so the KL path is off")
    return f"Columns: proxy {said['proxy']}; truth {said['truth']}; KL {kl}; steps {log.step_column}."


def _named(log: RunLog, name: str, role: str) -> str:
    if role == "kl" and name == "none":
        return ""
    if name in log.columns:
        return name
    sign, bare = ("-", name[1:]) if name.startswith("-") else ("", name)
    same = [bare] if bare in log.columns else [known for known in log.columns if _plain(known) == bare]
    if len(same) == 1:
        return sign + same[0]
    near = difflib.get_close_matches(bare, log.columns, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"the log has {_listed(log)}."
    raise UsageError("CR0633", f"there is no column {bare!r}.", where=f"--{role}, {log.path}", fix=hint)


def _guessed(log: RunLog, role: str) -> str:
    plain = {_plain(name).lower(): name for name in reversed(_with_numbers(log))}
    known = next((plain[name] for name in ROLES[role] if name in plain), "")
    if known or role == "kl":
        return known
    problem = f"no column is known to be the {role}; the columns with numbers are {_listed(log)}."
    fix = f"name it with --{role} COL, or --{role}=-COL where lower is better."
    raise InputError("CR0633", problem, where=str(log.path), fix=fix)


def _with_numbers(log: RunLog) -> list[str]:
    return [name for name, column in log.columns.items() if column.numbers]


def _plain(name: str) -> str:
    return _WRAPPER.sub("", name, count=1)


def _listed(log: RunLog) -> str:
    names = _with_numbers(log)
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return (", ".join(name[:80] for name in names[:_MAX_NAMED]) + more) or "none"


# ------------------------------------------------------------------------------- the replay


def readings_of(log: RunLog, chosen: Columns) -> tuple[list[Reading], list[str]]:
    """Pair each truth with what training showed then; and notes on what was left out.

    A log often has the truth in other rows than the proxy (a reward every logging step, an
    evaluation now and then). Each truth at step s makes one reading, with the newest proxy and
    the newest KL whose step is at most s. A truth before the first proxy is left out. A proxy
    may serve several truths; that is noted.

    Raises:
        InputError: a column holds text or too many NaN, or its steps fall or repeat (CR0633).
    """
    notes: list[str] = []
    checked = [_checked(log, chosen[role], notes) for role in ROLES]
    (proxy_steps, proxies), (steps, truths), (kl_steps, kls) = checked
    readings: list[Reading] = []
    num_early, num_stale, used = 0, 0, 0
    for step, truth in zip(steps, truths, strict=True):
        num_proxies, num_kls = bisect_right(proxy_steps, step), bisect_right(kl_steps, step)
        if not num_proxies:
            num_early += 1
            continue
        num_stale += num_proxies == used
        used = num_proxies
        readings.append((step, proxies[num_proxies - 1], truth, kls[num_kls - 1] if num_kls else None))
    if num_early:
        notes.append(f"{num_early} value(s) of the truth before the first proxy were left out.")
    if num_stale:
        notes.append(f"{num_stale} value(s) of the truth had no new proxy and were paired with an older one.")
    return readings, notes


def replay(guard: Guard, readings: Iterable[Reading]) -> list[GuardStatus]:
    """The answers of a fresh guard, one a reading, to the end: a guard that has fired stays fired."""
    return [
        guard.update(step, in_loop_reward=proxy, heldout_score=truth, kl_to_init=kl)
        for step, proxy, truth, kl in readings
    ]


def _checked(log: RunLog, chosen: str, notes: list[str]) -> tuple[list[int], list[float]]:
    """The steps and the numbers of a column, turned round where lower is better; none where none was chosen."""
    if not chosen:
        return [], []
    name, sign = (chosen, 1) if chosen in log.columns else (chosen[1:], -1)
    column = log.columns[name]
    num_bad, num_all = column.num_bad, column.num_bad + len(column.numbers)
    if num_bad > max(2, MOST_NOT_FINITE * num_all) or not column.numbers:
        raise InputError(
            "CR0633",
            f"{num_bad} of {num_all} values of the column {name!r} are no finite numbers.",
            where=str(log.path),
            fix="find out why the run logged them: what is left is too little to judge it by.",
        )
    if num_bad:
        notes.append(f"{num_bad} value(s) of {name} were no finite numbers and were left out.")
    for (earlier, *_), (later, _, place) in pairwise(column.numbers):
        if later <= earlier:
            what = "has a second value" if later == earlier else f"stands after step {earlier}"
            raise InputError(
                "CR0633",
                f"the steps of the column {name!r} are not in order: step {later} {what}.",
                where=place,
                fix="sort the log by step, or, where a run was resumed, add --resumed: the newer values count.",
            )
    return [step for step, *_ in column.numbers], [sign * value for _, value, _ in column.numbers]
