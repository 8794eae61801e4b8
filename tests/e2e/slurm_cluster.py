"""A real Slurm of two nodes on this machine: munged, slurmctld and two slurmd, gone with the block."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged")
CONFIG = """
ClusterName=loop
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SlurmctldPort={port}
SlurmdPort={port}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
MpiDefault=none
SlurmdParameters=config_overrides
KillWait=60
SchedulerParameters=bf_interval=2,sched_interval=2
JobRequeue=1
MinJobAge=900
NodeName=n[0-1] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=4 RealMemory=64000
PartitionName=main Nodes=ALL Default=YES MaxTime=60 State=UP OverSubscribe=YES
"""


def why_not() -> str:
    """Why no Slurm can be started here; empty where one can. As root its packages are installed."""
    if os.geteuid() != 0:
        return "a Slurm of its own is started by root alone"
    if all(map(shutil.which, PROGRAMS)):
        return ""
    command = ["apt-get", "install", "-y", "--no-install-recommends", *PACKAGES]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"apt-get cannot install Slurm: {error}"
    return "" if done.returncode == 0 else f"apt-get cannot install Slurm: {done.stderr.strip()[-200:]}"


def free_ports(number: int) -> int:
    """The first of so many free ports in a row."""
    while True:
        with ExitStack() as stack:
            sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
            sockets[0].bind(("127.0.0.1", 0))
            first: int = sockets[0].getsockname()[1]
            try:
                for i, one in enumerate(sockets[1:], 1):
                    one.bind(("127.0.0.1", first + i))
            except (OSError, OverflowError):
                continue
            return first


@contextmanager
def slurm(folder: Path) -> Iterator[dict[str, str]]:
    """The variables with which Slurm's programs find it."""
    host = socket.gethostname()
    port = free_ports(3)
    folder.chmod(0o755)
    (folder / "state").mkdir()
    config = folder / "slurm.conf"
    config.write_text(CONFIG.format(host=host, folder=folder, port=port, first=port + 1, last=port + 2))
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o400)
    environment = {**os.environ, "SLURM_CONF": str(config)}
    munged = [f"--{name}={folder}/munge.{name}" for name in ("socket", "pid-file", "log-file", "seed-file")]
    programs = [
        ["munged", "--foreground", "--force", f"--key-file={folder}/munge.key", *munged],
        ["slurmctld", "-D", "-f", str(config)],
        ["slurmd", "-D", "-f", str(config), "-N", "n0"],
        ["slurmd", "-D", "-f", str(config), "-N", "n1"],
    ]
    started = []
    try:
        for words in programs:
            with (folder / f"{words[0]}.out").open("ab") as log:
                started.append(subprocess.Popen(words, env=environment, stdout=log, stderr=log))
            time.sleep(1)
        deadline = time.monotonic() + 60
        while "idle" not in (said := states(environment)) or said.count("idle") < 2:
            assert time.monotonic() < deadline, (said, (folder / "slurmctld.log").read_text()[-2000:])
            time.sleep(0.5)
        yield {"SLURM_CONF": str(config)}
    finally:
        subprocess.run(["scancel", "--user=root", "--full"], env=environment, check=False, timeout=30)
        time.sleep(1)
        for process in reversed(started):
            process.terminate()
        for process in reversed(started):
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def states(environment: dict[str, str]) -> str:
    words = ["sinfo", "--noheader", "--Node", "--format=%N %t"]
    return subprocess.run(
        words, env=environment, capture_output=True, text=True, check=False, timeout=30
    ).stdout
