"""Claim: a run that was killed with SIGKILL anywhere, once or twice, ends with the weights of one that was not.

Each life is ``composer-rl train`` with the tiny recipe (sandboxes, guard and held-out evaluation included) in a
process of its own, killed at a moment drawn at random: some seconds after a step drawn at random, or while the
checkpoint of such a step is being written; every third life is killed again after ``--resume``. Then it is
resumed to its end, and the hash of its parameters is compared with that of a run that nothing cut short.

Prints a line a life, how many of them agree, in which phase the kills fell (read from what lay on disk
afterwards), and what was left behind: processes without a parent, and files in the temporary folder. Exit code 1
unless all agree and nothing was left.

    python benchmarks/kill_resume.py [--lives 100] [--seed 0] [--steps 3] [--set KEY=VALUE ...]
"""

from __future__ import annotations

import collections
import ctypes
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from command_line import options

RECIPE = Path(__file__).parents[1] / "recipes" / "tiny-cpu" / "run.toml"
COMMAND = Path(sys.executable).with_name("composer-rl")
PR_SET_CHILD_SUBREAPER = 36
POLL_SECONDS = 0.002
LONGEST_SECONDS = 7200.0  # of one process; far above what a loaded machine needs
TWICE_EVERY = 3


@dataclass
class Life:
    """One run from its first start to its end."""

    sha256: str = ""
    phases: list[str] = field(default_factory=list)
    num_orphans: int = 0
    left_behind: list[str] = field(default_factory=list)
    trouble: str = ""


@dataclass
class Bench:
    """What all lives share; the seconds are those of the uninterrupted run, and moments are drawn from them."""

    folder: Path
    num_steps: int
    overrides: list[str]
    sha256: str = ""
    step_seconds: float = 0.0
    save_seconds: float = 0.0

    @property
    def temporary(self) -> Path:
        return self.folder / "tmp"

    def start(self, out: Path, *, resume: bool) -> subprocess.Popen[bytes]:
        """The command line, its words in files beside the run."""
        settings = [f"trl.max_steps={self.num_steps}", "trainer.checkpoint_every=1", "heldout.every=2"]
        settings += self.overrides
        flags = [part for setting in settings for part in ("--set", setting)]
        with out.with_suffix(".out").open("wb") as said, out.with_suffix(".err").open("wb") as told:
            return subprocess.Popen(
                [COMMAND, "train", RECIPE, "--out", out, "--json", *flags, *(["--resume"] if resume else [])],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=told,
                env={
                    **os.environ,
                    "TMPDIR": str(self.temporary),
                    "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "torch"),  # torch keeps it, by design
                    "OMP_NUM_THREADS": "1",
                    "HF_HUB_OFFLINE": "1",
                },
            )


def wait_until(is_there: Callable[[], bool], process: subprocess.Popen[bytes]) -> bool:
    """Whether it came to pass while the process lived."""
    deadline = time.monotonic() + LONGEST_SECONDS
    while process.poll() is None:
        if is_there():
            return True
        if time.monotonic() > deadline:
            raise SystemExit(f"no progress in {LONGEST_SECONDS:.0f} s")
        time.sleep(POLL_SECONDS)
    return False


def half_written(out: Path) -> list[Path]:
    """Checkpoints without a manifest."""
    folders = sorted((out / "checkpoints").glob("checkpoint-*"))
    return [folder for folder in folders if not (folder / "MANIFEST.json").exists()]


def step_of(checkpoint: Path) -> int:
    """The number in its name."""
    return int(checkpoint.name.removeprefix("checkpoint-"))


def num_steps_logged(out: Path) -> int:
    """Steps that the run has finished."""
    metrics = out / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def run_whole(bench: Bench) -> None:
    """The uninterrupted run: its hash, and how long a step and a save took."""
    out = bench.folder / "whole"
    process = bench.start(out, resume=False)

    def moment(is_there: Callable[[], bool]) -> float:
        wait_until(is_there, process)
        return time.monotonic()

    try:
        started = moment(lambda: b"\ntraining" in out.with_suffix(".err").read_bytes())
        save_began = moment(lambda: bool(half_written(out)))
        saved = moment((out / "checkpoints" / "checkpoint-1" / "MANIFEST.json").exists)
        ended = moment(lambda: num_steps_logged(out) >= bench.num_steps)
        bench.step_seconds, bench.save_seconds = (ended - started) / bench.num_steps, saved - save_began
        bench.sha256 = finish(out, process)
    finally:
        process.kill()  # it lives only where the lines above raised


def finish(out: Path, process: subprocess.Popen[bytes]) -> str:
    """The hash of a run that comes to its end; what it said where it does not."""
    try:
        process.wait(LONGEST_SECONDS)
    finally:
        process.kill()
    if process.returncode != 0:
        words = out.with_suffix(".err").read_text(errors="replace").strip().splitlines()
        raise RuntimeError(f"exit code {process.returncode}: {' / '.join(words[-3:])}")
    return str(json.loads(out.with_suffix(".out").read_text())["parameter_sha256"])


def kill_somewhere(bench: Bench, out: Path, draws: random.Random, *, resume: bool) -> str | None:
    """Start, kill at a moment drawn at random; the phase it was in, None where it had ended before."""
    old = set(half_written(out))
    step = draws.randint(0, bench.num_steps)
    process = bench.start(out, resume=resume)
    try:  # once the libraries are loaded: a kill before that interrupts nothing of ours
        is_alive = wait_until(lambda: b"tasks:" in out.with_suffix(".err").read_bytes(), process)
        if draws.random() < 0.5:
            delay = draws.uniform(0.0, 1.2 * bench.save_seconds)  # beyond it older checkpoints are deleted
            folder = out / "checkpoints" / f"checkpoint-{max(step, 1)}"
            is_alive = is_alive and wait_until(folder.exists, process)
        else:
            delay = draws.uniform(0.0, bench.step_seconds)
            is_alive = is_alive and wait_until(lambda: num_steps_logged(out) >= step, process)
        if is_alive:
            time.sleep(delay)
    finally:
        process.kill()
    return phase_of(out, old) if process.wait() == -signal.SIGKILL else None


def phase_of(out: Path, old_half_written: set[Path]) -> str:
    """What a killed process was doing, by what it left."""
    words = out.with_suffix(".err").read_bytes()
    whole = [step_of(folder.parent) for folder in out.glob("checkpoints/*/MANIFEST.json")]
    for folder in set(half_written(out)) - old_half_written:
        is_older = bool(whole) and step_of(folder) < max(whole)
        return "deleting an older checkpoint" if is_older else "writing a checkpoint"
    if b"\ntraining" not in words:
        return "starting"
    if b"model: saving" in words:
        return "saving the model"
    return "training"


def live(bench: Bench, out: Path, draws: random.Random, *, num_kills: int) -> Life:
    """Killed so often, resumed to its end, then searched for what is left."""
    life = Life()
    while len(life.phases) < num_kills:
        phase = kill_somewhere(bench, out, draws, resume=bool(life.phases))
        life.num_orphans += num_orphans()
        if phase is not None:
            life.phases.append(phase)
        elif not (out / "summary.json").exists():
            life.trouble = f"it ended by itself: {out.with_suffix('.err').read_text(errors='replace')[-500:]}"
            return life
        elif life.phases:
            break  # the second kill came too late; the first one counts
        else:
            shutil.rmtree(out)
    try:
        life.sha256 = finish(out, bench.start(out, resume=True))
    except RuntimeError as error:
        life.trouble = str(error)
    life.num_orphans += num_orphans()
    life.left_behind = [path.name for path in bench.temporary.iterdir()]
    life.left_behind += [str(path.relative_to(out)) for path in out.rglob("*.tmp")]
    return life


def num_orphans(patience_seconds: float = 10.0) -> int:
    """Children of killed children that still live after some patience, and are killed then; none of ours may live."""
    deadline = time.monotonic() + patience_seconds
    while True:
        try:
            is_waiting = os.waitpid(-1, os.WNOHANG)[0] == 0  # the others have ended, and are reaped by it
        except ChildProcessError:
            return 0
        if is_waiting and time.monotonic() > deadline:
            left = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
            for process_id in left:
                os.kill(int(process_id), signal.SIGKILL)
            return len(left)
        time.sleep(0.05 if is_waiting else 0.0)


def judge(lives: list[Life], expected: str) -> tuple[str, int]:
    """The summary and the exit code: 0 where all lives agree and none left anything."""
    num_same = sum(life.sha256 == expected for life in lives)
    phases = collections.Counter(phase for life in lives for phase in life.phases)
    orphans = sum(life.num_orphans for life in lives)
    left = sorted({name for life in lives for name in life.left_behind})
    lines = [
        f"{num_same} of {len(lives)} lives ended with the hash of the uninterrupted run",
        f"{phases.total()} kills: " + ", ".join(f"{count} {phase}" for phase, count in phases.most_common()),
        f"left behind: {orphans} processes, {len(left)} files or folders {left or ''}".rstrip(),
    ]
    return "\n".join(lines), int(num_same < len(lives) or orphans > 0 or bool(left))


def main() -> int:
    """Live, print, judge."""
    arguments = options(__doc__, lives=100, seed=0, steps=3, set=[])
    if ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise SystemExit("orphans can only be seen on Linux")
    draws = random.Random(arguments.seed)
    lives: list[Life] = []
    with tempfile.TemporaryDirectory(prefix="kill-resume-") as folder:
        bench = Bench(Path(folder), arguments.steps, arguments.set)
        bench.temporary.mkdir()
        run_whole(bench)
        times = f"{bench.step_seconds:.2f} s a step, {bench.save_seconds:.2f} s a save"
        print(f"uninterrupted: {bench.sha256[:12]}, {times}")
        for number in range(1, arguments.lives + 1):
            out = bench.folder / f"life-{number}"
            life = live(bench, out, draws, num_kills=1 + (number % TWICE_EVERY == 0))
            lives.append(life)
            what = "same hash"
            if life.sha256 != bench.sha256:
                what = f"ANOTHER HASH {life.sha256[:12]} {life.trouble}"
            print(f"life {number}: killed while {', then while '.join(life.phases)}: {what}", flush=True)
            shutil.rmtree(out, ignore_errors=True)
    summary, exit_code = judge(lives, bench.sha256)
    print(summary)
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
