"""What a person can meet when replicas work together, each with one thing to do about it."""

from __future__ import annotations

from composer_replication.errors import InputError, MissingError, NothingToDoError, UsageError


def unreachable(what: str, why: object, *, where: str) -> MissingError:
    """A store, a lighthouse or another replica gives no answer, or refuses us."""
    text = " ".join(str(why).split())[:300].rstrip(".")
    return MissingError(
        "CR1101",
        f"{what} cannot be used: {text}.",
        where=where,
        fix="check address, port, bucket and the credentials in the environment; docs/replicas.md names the variables.",
    )


def creates_twice(where: str) -> UsageError:
    """A store on which no vote could be held."""
    return UsageError(
        "CR1102",
        "this store lets an object be created twice, so two replicas could both win a vote.",
        where=where,
        fix="use a store with conditional writes (If-None-Match), for example Amazon S3, Google Cloud Storage or Azure.",
    )


def unequal(names: list[str], *, where: str) -> UsageError:
    """A replica of another run; ``names`` say what differs."""
    return UsageError(
        "CR1103",
        f"this replica differs from the run that it would join in: {', '.join(names)}.",
        where=where,
        fix="start every replica with the same version, recipe and tasks, or give the run a new address.",
    )


def too_few(found: int, needed: int, seconds: float, *, where: str) -> NothingToDoError:
    """The deadline has passed without enough replicas."""
    return NothingToDoError(
        "CR1104",
        f"{found} of at least {needed} replicas came within {seconds:g} seconds.",
        where=where,
        fix="start the other replicas, then this one again with --resume; or raise replicas.deadline_seconds.",
    )


def replaced(replica: int, *, where: str) -> UsageError:
    """A newer process is this replica now."""
    return UsageError(
        "CR1105",
        f"another process has joined as replica {replica}, and this one gives way.",
        where=where,
        fix="give each replica a number of its own with --replica.",
    )


def over(round_idx: int, last: int) -> NothingToDoError:
    """Everybody else has finished."""
    return NothingToDoError(
        "CR1106",
        f"the run ended without this replica, whose weights are those after outer step {round_idx} of {last}.",
        where="replicas",
        fix="take the model of another replica's run folder.",
    )


def damaged(what: str) -> InputError:
    """Weights or bytes that must not be used; ``what`` is the sentence."""
    return InputError(
        "CR1107",
        f"{what}.",
        where="replicas",
        fix="start this replica again with --resume: it takes the others' state. If it happens to all, see docs/replicas.md.",
    )
