"""What a person can meet when replicas work together, each with one thing to do about it."""

from __future__ import annotations

from composer_replication.config import ReplicasSection
from composer_replication.errors import ComposerError, InputError, MissingError, NothingToDoError, UsageError


def unreachable(what: str, why: object, *, where: str) -> ComposerError:
    """A store, a lighthouse or another replica gives no answer, or refuses us."""
    said = f"{what} cannot be used: {' '.join(str(why).split())[:300].rstrip('.')}."
    fix = "check address, port, bucket and the credentials in the environment; docs/replicas.md names the variables."
    return MissingError("CR1101", said, where=where, fix=fix)


def creates_twice(where: str) -> ComposerError:
    """A store on which no vote could be held."""
    said = "this store lets an object be created twice, so two replicas could both win a vote."
    fix = "use a store with conditional writes (If-None-Match), for example Amazon S3, Google Cloud Storage or Azure."
    return UsageError("CR1101", said, where=where, fix=fix)


def unequal(names: list[str], *, where: str) -> ComposerError:
    """A replica of another run; ``names`` say what differs."""
    said = f"this replica differs from the run that it would join in: {', '.join(names)}."
    fix = "start every replica with the same version, recipe and tasks, or give the run a new address."
    return UsageError("CR1103", said, where=where, fix=fix)


def too_few(found: int, options: ReplicasSection, *, where: str) -> ComposerError:
    """The deadline has passed without enough replicas."""
    needed, seconds = options.min_replicas, options.deadline_seconds
    said = f"{found} of at least {needed} replicas came within {seconds:g} seconds."
    fix = "start the other replicas, then this one again with --resume; or raise replicas.deadline_seconds."
    return NothingToDoError("CR1101", said, where=where, fix=fix)


def replaced(replica: int, *, where: str) -> ComposerError:
    """A newer process is this replica now."""
    said = f"another process has joined as replica {replica}, and this one gives way."
    fix = "give each replica a number of its own with --replica."
    return UsageError("CR1105", said, where=where, fix=fix)


def over(round_idx: int, last: int) -> ComposerError:
    """Everybody else has finished."""
    said = f"the run ended without this replica, which has the weights of outer step {round_idx} of {last}."
    return NothingToDoError("CR1105", said, fix="take the model of another replica's run folder.")


def damaged(what: str) -> ComposerError:
    """Weights or bytes that must not be used; ``what`` is the sentence."""
    fix = "start this replica again with --resume: it takes the others' state. If it happens to all, see docs/replicas.md."
    return InputError("CR1107", f"{what}.", where="replicas", fix=fix)
