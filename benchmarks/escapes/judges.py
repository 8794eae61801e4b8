"""What was seen outside: each judge gives the fact that shows a success, or nothing."""

from __future__ import annotations

import os
import re
from contextlib import suppress

from benchmarks.escapes.attempt import LIMITS, MIB, Judge, Outcome
from benchmarks.escapes.scene import Scene, victim_settings
from benchmarks.escapes.watch import Sample, is_stopped

_LONG_SECONDS = 4.0
_MUCH_LATER_SECONDS = 20.0


def secret(scene: Scene, outcome: Outcome) -> str:
    """The planted word came out, which no attempt is told."""
    return "the secret came out" if scene.word.encode() in outcome.text() else ""


def mark_in_last(scene: Scene, outcome: Outcome) -> str:
    """What the first life was told is known to the second one."""
    last = outcome.results[-1] if len(outcome.results) > 1 else None
    found = last is not None and scene.mark in last.stdout + last.stderr
    return "the second life knows what the first one was told" if found else ""


def ran_with_privileges(_: Scene, outcome: Outcome) -> str:
    """Something that the attempt left in the tree has run with a capability of this machine."""
    found = re.search(r"CapEff:\s*0*[1-9a-f]", outcome.results[-1].stdout) if outcome.results else None
    return "a program of the tree ran with capabilities" if found else ""


def changed(scene: Scene, _: Outcome) -> str:
    """Something planted outside is not as it was."""
    found = scene.changes()
    return f"changed outside: {', '.join(found[:3])}" if found else ""


def contacted(*names: str) -> Judge:
    """A listener outside was reached."""

    def judge(scene: Scene, _: Outcome) -> str:
        reached = [name for name in names or scene.listeners if _was_reached(scene, name)]
        return f"reached outside: {', '.join(reached)}" if reached else ""

    return judge


def _was_reached(scene: Scene, name: str) -> bool:
    listener = scene.listeners.get(name)
    if listener is None:
        return False
    with suppress(OSError):
        if "udp" in name or "datagram" in name:
            return bool(listener.recv(64))
        listener.accept()[0].close()
        return True
    return False


def pipe_reached(scene: Scene, _: Outcome) -> str:
    """Something came through the pipe in a folder that is shown read-only."""
    with suppress(OSError):
        return "a pipe outside was written to" if os.read(scene.fifo, 64) else ""
    return ""


def victim_hurt(scene: Scene, _: Outcome) -> str:
    """The process outside died, stopped, was signalled, or was set otherwise."""
    victim = scene.victim
    assert victim is not None and victim.stdin is not None and victim.stdout is not None
    with suppress(Exception):
        victim.wait(0.1)
    if victim.returncode is not None:
        return "a process outside died"
    if is_stopped(victim.pid):
        return "a process outside was stopped"
    if victim_settings(victim.pid) != scene.victim_before:
        return "settings of a process outside were changed"
    victim.stdin.write(b"\n")
    victim.stdin.flush()
    said = b""
    with suppress(OSError):
        os.set_blocking(victim.stdout.fileno(), True)
        while not said.endswith(b"\n") or said == b"signal\n":
            said += os.read(victim.stdout.fileno(), 4096)
    if b"signal" in said:
        return "a process outside got a signal"
    return "" if b"before" in said else "the memory of a process outside was changed"


def survivor(_: Scene, outcome: Outcome) -> str:
    """A process of the command lived after it, or its heartbeat went on."""
    found = list(outcome.notes.get("alive", []))
    if outcome.notes.get("beats"):
        found.append("its heartbeat went on")
    if outcome.seconds > _MUCH_LATER_SECONDS + outcome.notes.get("timeout", 0):
        found.append(f"the command held us for {outcome.seconds:.0f} s")
    return ", ".join(found[:3])


def jail_broke(_: Scene, outcome: Outcome) -> str:
    """The jail failed instead of giving a result, so a rollout would be dropped and not scored."""
    return outcome.broken[0] if outcome.broken else ""


def exit_code_is(code: int) -> Judge:
    """The result has an exit code that the command did not end with."""

    def judge(_: Scene, outcome: Outcome) -> str:
        found = bool(outcome.results) and outcome.results[-1].exit_code == code
        return f"the result says exit code {code}" if found else ""

    return judge


def _held_seconds(samples: list[Sample], over: list[bool]) -> float:
    longest, began = 0.0, None
    for sample, is_over in zip(samples, over, strict=True):
        if not is_over:
            began = None
        else:
            began = sample.at if began is None else began
            longest = max(longest, sample.at - began)
    return longest


def _sustained(outcome: Outcome, over: list[bool], what: str) -> str:
    """Over the limit for so long that nobody is looking; the few looks of a watch in between are allowed for."""
    held = _held_seconds(outcome.samples, over)
    return f"{what} for {held:.1f} s" if held > _LONG_SECONDS else ""


def too_much_memory(_: Scene, outcome: Outcome) -> str:
    """Memory of all its processes together stayed above the limit."""
    over = [sample.memory_bytes > LIMITS.memory_bytes for sample in outcome.samples]
    most = max((sample.memory_bytes for sample in outcome.samples), default=0)
    return _sustained(outcome, over, f"up to {most // MIB} MiB of memory")


def too_much_hidden_memory(_: Scene, outcome: Outcome) -> str:
    """Memory of the machine that no process shows as its own stayed above the limit."""
    first = outcome.notes.get("shmem_before", 0)
    over = [sample.shmem_bytes - first > LIMITS.memory_bytes for sample in outcome.samples]
    most = max((sample.shmem_bytes for sample in outcome.samples), default=first) - first
    return _sustained(outcome, over, f"up to {most // MIB} MiB of memory-backed files")


def too_many_processes(_: Scene, outcome: Outcome) -> str:
    """More processes than the limit stayed alive."""
    over = [sample.num_processes > LIMITS.num_processes + 1 for sample in outcome.samples]
    most = max((sample.num_processes for sample in outcome.samples), default=0)
    return _sustained(outcome, over, f"{most} processes")


def too_many_threads(_: Scene, outcome: Outcome) -> str:
    """Many times more threads than the process limit stayed alive."""
    over = [sample.num_threads > 4 * LIMITS.num_processes for sample in outcome.samples]
    most = max((sample.num_threads for sample in outcome.samples), default=0)
    return _sustained(outcome, over, f"{most} threads")


def too_much_disk(_: Scene, outcome: Outcome) -> str:
    """Files below the writable folders, deleted but open ones too, stayed above the limit."""
    over = [sample.disk_bytes > LIMITS.disk_bytes + MIB for sample in outcome.samples]
    most = max((sample.disk_bytes for sample in outcome.samples), default=0)
    left = outcome.notes.get("disk_at_end", 0)
    if left > LIMITS.disk_bytes + MIB and not any(_names_disk(result.stderr) for result in outcome.results):
        return f"{left // MIB} MiB of disk at the end, and nobody says so"
    return _sustained(outcome, over, f"up to {most // MIB} MiB of disk")


def _names_disk(stderr: str) -> bool:
    return "[sandbox] stopped: it wrote more to disk" in stderr


def too_many_descriptors(_: Scene, outcome: Outcome) -> str:
    """One process had more files open than the limit."""
    most = max((sample.descriptors for sample in outcome.samples), default=0)
    return f"{most} open files" if most > LIMITS.num_open_files else ""


def too_much_output(_: Scene, outcome: Outcome) -> str:
    """More output came back than the limit."""
    longest = max(
        (len(text) for result in outcome.results for text in (result.stdout, result.stderr)), default=0
    )
    return f"{longest // MIB} MiB of one stream came back" if longest > LIMITS.output_bytes + 200 else ""


def has_capabilities(_: Scene, outcome: Outcome) -> str:
    """A process of the attempt had a capability, in whatever namespace."""
    seen = {sample.capabilities for sample in outcome.samples} - {0}
    return f"it had capabilities {max(seen):x}" if seen else ""


def became_root(_: Scene, outcome: Outcome) -> str:
    """A process that was not root had the user id 0."""
    seen = {number for sample in outcome.samples for number in sample.user_ids}
    return "it became root" if "0" in seen and seen - {"0"} else ""


def in_group_of_root(_: Scene, outcome: Outcome) -> str:
    """One of its processes was in the group 0 besides its own."""
    return "it is in the group of root" if any("0" in sample.groups for sample in outcome.samples) else ""


def new_namespace(_: Scene, outcome: Outcome) -> str:
    """Its processes were in more than one namespace of a kind."""
    kinds: dict[str, set[str]] = {}
    for sample in outcome.samples:
        for name in sample.namespaces:
            kinds.setdefault(name.split(":")[0], set()).add(name)
    found = [kind for kind, names in kinds.items() if len(names) > 1]
    return f"it made a namespace: {', '.join(found)}" if found else ""


def descriptor_of(kind: str) -> Judge:
    """It had a descriptor of a kind of the kernel that the jail should not give out."""

    def judge(_: Scene, outcome: Outcome) -> str:
        held = {name for sample in outcome.samples for name in sample.kinds if kind in name}
        return f"it held {', '.join(sorted(held))}" if held else ""

    return judge
