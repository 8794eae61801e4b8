"""What was seen outside: each judge gives the fact that shows a success, or nothing."""

from __future__ import annotations

import os
import re
import stat
import unicodedata
from collections.abc import Callable
from contextlib import suppress
from operator import attrgetter
from pathlib import Path

from benchmarks.escapes.attempt import LIMITS, MIB, Judge, Outcome
from benchmarks.escapes.scene import Scene, victim_settings
from benchmarks.escapes.watch import Sample, is_stopped

_LONG_SECONDS = 4.0
_MUCH_LATER_SECONDS = 20.0
_MANY_PLACES = 5000
_HARMLESS = "\n\t"
_DIRECTIONS = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}


def any_of(*judges: Judge) -> Judge:
    """A success for one of them is a success."""

    def judge(scene: Scene, outcome: Outcome) -> str:
        return "; ".join(said for said in (each(scene, outcome) for each in judges) if said)

    return judge


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


def _sustained(
    outcome: Outcome, amount: Callable[[Sample], int], limit: int, words: str, unit: int = 1
) -> str:
    """Over the limit for so long that nobody is looking; the few looks of a watch in between are allowed for."""
    longest, began = 0.0, None
    for sample in outcome.samples:
        if amount(sample) <= limit:
            began = None
        else:
            began = sample.at if began is None else began
            longest = max(longest, sample.at - began)
    most = max(map(amount, outcome.samples), default=0) // unit
    return f"{words.format(most)} for {longest:.1f} s" if longest > _LONG_SECONDS else ""


def too_much_memory(_: Scene, outcome: Outcome) -> str:
    """Memory of all its processes together stayed above the limit."""
    words = "up to {} MiB of memory"
    return _sustained(outcome, attrgetter("memory_bytes"), LIMITS.memory_bytes, words, MIB)


def too_much_hidden_memory(_: Scene, outcome: Outcome) -> str:
    """Memory of the machine that no process shows as its own stayed above the limit."""
    first, words = outcome.notes.get("shmem_before", 0), "up to {} MiB of memory-backed files"
    return _sustained(outcome, lambda seen: seen.shmem_bytes - first, LIMITS.memory_bytes, words, MIB)


def too_many_processes(_: Scene, outcome: Outcome) -> str:
    """More processes than the limit stayed alive."""
    return _sustained(outcome, attrgetter("num_processes"), LIMITS.num_processes + 1, "{} processes")


def too_many_threads(_: Scene, outcome: Outcome) -> str:
    """Many times more threads than the process limit stayed alive."""
    return _sustained(outcome, attrgetter("num_threads"), 4 * LIMITS.num_processes, "{} threads")


def too_much_disk(_: Scene, outcome: Outcome) -> str:
    """Files below the writable folders, deleted but open ones too, stayed above the limit."""
    limit, left = LIMITS.disk_bytes + MIB, outcome.notes.get("disk_at_end", 0)
    is_said = any("[sandbox] stopped: it wrote more to disk" in result.stderr for result in outcome.results)
    if left > limit and not is_said:
        return f"{left // MIB} MiB of disk at the end, and nobody says so"
    return _sustained(outcome, attrgetter("disk_bytes"), limit, "up to {} MiB of disk", MIB)


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


def host_link_seen(_: Scene, outcome: Outcome) -> str:
    """The hardware address of a real interface came out."""
    for place in Path("/sys/class/net").iterdir():
        address = (place / "address").read_text().strip()
        is_real = address and set(address) - set("0:") and place.name != "lo"
        if is_real and bytes.fromhex(address.replace(":", "")).hex().encode() in outcome.text():
            return f"the hardware address of {place.name} came out"
    return ""


def token_seen(scene: Scene, outcome: Outcome) -> str:
    """The listing has a name that is in use outside: the suffix is not told."""
    names = [f"{scene.token}-{kind}".encode() for kind in ("s", "d", "p")]
    return "sockets of the host are listed" if any(name in outcome.text() for name in names) else ""


def neighbour_hurt(scene: Scene, outcome: Outcome) -> str:
    note = outcome.notes.get("neighbour_note", b"")
    if note != scene.word.encode():
        return "a file of a neighbour was changed"
    if not outcome.notes.get("neighbour_was_alive", True):
        return "a process of a neighbour died"
    return "a neighbour was reached" if outcome.notes.get("neighbour_hurt") else ""


def through_pipe(_: Scene, outcome: Outcome) -> str:
    return "it wrote into a pipe of the parent" if outcome.notes.get("through_pipe") else ""


def setting_changed(name: str) -> Judge:
    """A setting of the kernel was changed; it is brought back."""

    def judge(scene: Scene, _: Outcome) -> str:
        place = Path("/proc/sys/kernel") / name
        if not place.exists() or place.read_text().strip() != scene.token:
            return ""
        place.write_text({"core_pattern": "core", "modprobe": "/sbin/modprobe"}.get(name, "localhost"))
        return f"kernel.{name} was changed"

    return judge


def core_file(scene: Scene, _: Outcome) -> str:
    """A core file lies in the tree."""
    return "a core file was written" if list(scene.tree.glob("core*")) else ""


def setuid_left(_: Scene, outcome: Outcome) -> str:
    found = outcome.notes.get("setuid", [])
    return f"the tree holds {found[0]} of ours with the setuid or setgid bit" if found else ""


def cgroup_made(scene: Scene, _: Outcome) -> str:
    places = [*Path("/sys/fs/cgroup").glob(scene.token), *Path("/sys/fs/cgroup").glob(f"*/{scene.token}")]
    for place in places:
        place.rmdir()
    return f"it made {places[0]}" if places else ""


def release_agent_changed(scene: Scene, _: Outcome) -> str:
    """The program that runs at the end of a cgroup was changed."""
    place = Path("/sys/fs/cgroup/memory/release_agent")
    return (
        "the release agent was changed" if place.exists() and place.read_text().strip() == scene.token else ""
    )


def device_bytes(_: Scene, outcome: Outcome) -> str:
    """The first bytes of a block device came out; hexadecimal."""
    for name in ("vda", "sda", "nvme0n1", "xvda"):
        place = Path("/dev") / name
        with suppress(OSError), place.open("rb") as device:  # absent, or closed even to us
            if device.read(4096)[1024:1536].hex().encode() in outcome.text():
                return f"the content of /dev/{name} came out"
    return ""


def device_made(scene: Scene, _: Outcome) -> str:
    found = [
        path
        for path in scene.tree.iterdir()
        if stat.S_ISBLK(path.lstat().st_mode) or stat.S_ISCHR(path.lstat().st_mode)
    ]
    return f"it made the device {found[0].name}" if found else ""


def took_places(_: Scene, outcome: Outcome) -> str:
    taken = outcome.notes.get("places", 0)
    return f"{taken} places for asynchronous input were taken" if taken >= _MANY_PLACES else ""


def in_kernel_log(scene: Scene, _: Outcome) -> str:
    found = any(scene.token.encode() in record for record in _kernel_log())
    return "it wrote into the log of the kernel" if found else ""


def kernel_log_read(_: Scene, outcome: Outcome) -> str:
    """A long line of the kernel's log came out."""
    lines = [record.partition(b";")[2].split(b"\n")[0] for record in _kernel_log()]
    found = any(len(line) > 30 and line in outcome.text() for line in lines)
    return "the log of the kernel came out" if found else ""


def _kernel_log() -> list[bytes]:
    found: list[bytes] = []
    with suppress(OSError):
        descriptor = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
        try:
            while True:
                with suppress(BrokenPipeError):  # a record was overwritten meanwhile
                    found.append(os.read(descriptor, 8192))
        finally:
            os.close(descriptor)
    return found


def held_to_the_end(what: str, said: str = "whole") -> Judge:
    """For what no look from outside can see: the program itself came to its end with all that it held."""

    def judge(_: Scene, outcome: Outcome) -> str:
        was_held = any(result.exit_code == 0 and said in result.stdout for result in outcome.results)
        return f"it held {what} to its end, uncounted" if was_held else ""

    return judge


def second_life_says(words: str, what: str) -> Judge:
    """The second life prints what only a trace of the first one can make it print."""

    def judge(_: Scene, outcome: Outcome) -> str:
        found = len(outcome.results) > 1 and words in outcome.results[-1].stdout
        return f"the second life knows that the first one {what}" if found else ""

    return judge


def loader_changed(scene: Scene, _: Outcome) -> str:
    for name in ("/etc/ld.so.preload", "/etc/ld.so.conf.d/poison.conf"):
        place = Path(name)
        if place.exists() and scene.token in place.read_text(errors="replace"):
            place.unlink()
            return f"{name} was written"
    return ""


def privileged(_: Scene, outcome: Outcome) -> str:
    return str(outcome.notes.get("privileged", ""))


def printed(_: Scene, outcome: Outcome) -> str:
    """What is printed for a person has a character that moves, colours, renames or turns round."""
    found = sorted(
        f"U+{ord(character):04X}"
        for character in set(outcome.notes.get("printed", b"").decode(errors="surrogateescape"))
        if (unicodedata.category(character) == "Cc" and character not in _HARMLESS)
        or unicodedata.bidirectional(character) in _DIRECTIONS
    )
    return f"printed raw: {', '.join(found[:5])}" if found else ""


def on_terminal(scene: Scene, outcome: Outcome) -> str:
    seen = outcome.notes.get("on_terminal", b"") + outcome.notes.get("typed", b"")
    return "it wrote to the terminal" if scene.token.encode() in seen else ""
