"""A process beside a worker of Ray that removes what the worker left, however it ended.

Ray kills the workers of a driver that is gone, and those that the driver gives up; nothing that they would do at their
end is done. Whoever waits for that end has to outlive it: no child of the worker, for Ray kills those as well, and not of
its session.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from functools import cache

_PROGRAM = """\
import os, select, sys
if os.fork():
    os._exit(0)
end = select.poll()
end.register(int(sys.argv[1]), select.POLLIN)
end.poll()
from composer_replication.sandbox.process_folder import sweep
sweep()
"""


@cache
def sweep_after_this_process() -> None:
    """As soon as this process has ended, ``sweep`` its jails and folders; once a process, about 10 MB.

    Where it cannot be started, or the system tells nobody of such an end (no ``pidfd_open``), the next process of ours
    on this machine does it.
    """
    if not hasattr(os, "pidfd_open"):
        return
    with suppress(OSError):
        # Readable when our locks are gone, which a pipe would not tell.
        descriptor = os.pidfd_open(os.getpid())
        try:
            subprocess.run(
                [sys.executable, "-c", _PROGRAM, str(descriptor)],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                cwd="/", pass_fds=(descriptor,), start_new_session=True, check=False,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        finally:
            os.close(descriptor)
